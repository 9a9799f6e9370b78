# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""Small models in the form of transformers', and what some of them do that cannot be right here. Needs transformers, or
its stand-in.
"""

from types import SimpleNamespace

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import dtf


class Small(transformers.PreTrainedModel):
    def __init__(self, dropout=0.0, width=8, labels=4, **config):
        super().__init__(SimpleNamespace(num_labels=labels, **config))
        self.words, self.mix, self.drop = nn.Embedding(20, width), nn.Linear(width, width), nn.Dropout(dropout)
        self.head = nn.Linear(width, labels)

    def loss(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, input_ids, labels=None, return_dict=None):
        logits = self.pooled(self.head(self.drop(self.mix(self.words(input_ids)))))
        return SimpleNamespace(logits=logits, loss=None if labels is None else self.loss(logits, labels))

    def pooled(self, logits):
        return logits


class SmallForTokenClassification(Small):
    pass


class SmallForSequenceClassification(Small):
    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels)

    def pooled(self, logits):
        return logits.mean(1)


class SmallForCausalLM(Small):
    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class WeighsForSequenceClassification(SmallForSequenceClassification):
    def loss(self, logits, labels):
        return super().loss(logits, labels) + 0.1


class BalancedForSequenceClassification(SmallForSequenceClassification):
    """Equal to the plain one where all rows have one class."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, torch.tensor([1.0, 2.0, 3.0, 4.0]))


class RareForSequenceClassification(SmallForSequenceClassification):
    """Equal to the plain one for the first classes."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, torch.tensor([1.0, 1.0, 1.0, 4.0]))


class PenalisedForSequenceClassification(SmallForSequenceClassification):
    """Equal to the plain one in evaluation."""

    def loss(self, logits, labels):
        return super().loss(logits, labels) + (logits.square().mean() if self.training else 0.0)


class TupleForSequenceClassification(SmallForSequenceClassification):
    def forward(self, input_ids, labels=None, return_dict=None):
        return (super().forward(input_ids, labels).logits,)


class RowwiseForTokenClassification(SmallForTokenClassification):
    """Equal to the plain one where rows have as many labels."""

    def loss(self, logits, labels):
        return torch.stack([F.cross_entropy(*row) for row in zip(logits, labels, strict=True)]).mean()


class NanForSequenceClassification(SmallForSequenceClassification):
    """Of labels that are not those of the rows, such as a loss over counts of the classes that are there."""

    def loss(self, logits, labels):
        return super().loss(logits, labels) * torch.tensor(torch.nan)


class SilentForTokenClassification(SmallForTokenClassification):
    def loss(self, logits, labels):
        return None


class SmallForQuestionAnswering(Small):
    pass


class SmallForConditionalGeneration(SmallForCausalLM):
    pass


def tokens(width: int = 8, dropout: float = 0.0):
    return SmallForTokenClassification(dropout, width)


def rows(width: int = 8, dropout: float = 0.0):
    return SmallForSequenceClassification(dropout, width, id2label={0: "a", 1: "b", 2: "c", 3: "d"})


def words():
    return SmallForCausalLM(labels=20)


def weighs():
    return WeighsForSequenceClassification()


def balanced():
    return BalancedForSequenceClassification()


def rare():
    return RareForSequenceClassification()


def penalised():
    return PenalisedForSequenceClassification(dropout=0.5)


def gives_tuples():
    return TupleForSequenceClassification()


class CountsForSequenceClassification(SmallForSequenceClassification):
    passes = 0

    def pooled(self, logits):
        self.passes += self.training
        return super().pooled(logits)


def counts():
    return CountsForSequenceClassification()


class AnyForSequenceClassification(SmallForSequenceClassification):
    def forward(self, *given, **named):
        return super().forward(*given, **named)


def takes_any():
    return AnyForSequenceClassification()


def no_names():
    return SmallForSequenceClassification(return_dict=False)


def three_numbers():
    return SmallForSequenceClassification(problem_type="regression")


def rowwise():
    return RowwiseForTokenClassification()


def undefined():
    return NanForSequenceClassification()


def silent():
    return SilentForTokenClassification()


KEPT = SmallForSequenceClassification()


def kept():
    return KEPT


def encodes():
    return SmallForCausalLM(labels=20, is_encoder_decoder=True)


def halves():
    return rows().bfloat16()


def answers():
    return SmallForQuestionAnswering()


def plain():
    return nn.Linear(2, 2)


def _made(count, label):
    return [{"input_ids": [row % 19, 3, row % 7], "text": "left out", "label": label(row)} for row in range(count)]


def classes():
    return _made(12, lambda row: row % 4), _made(8, lambda row: row % 4)


def tags():
    made = [_made(count, lambda row: [-100, row % 4, row % 3]) for count in (12, 8)]
    return {"train": made[0], "validation": made[1]}


def one_class():
    return _made(12, lambda row: 1), _made(8, lambda row: 1)


def untagged():
    """Few rows have a label, as of masked words: not those that are tried."""
    return tuple(_made(count, lambda row: [0 if row == 1 else -100, -100, -100]) for count in (12, 8))


def ignored():
    return tuple(_made(count, lambda row: -100) for count in (12, 8))


def full_tags():
    return tuple(_made(count, lambda row: [row % 4, row % 4, row % 3]) for count in (12, 8))


def three_splits():
    return {"train": classes()[0], "validation": classes()[1], "test": classes()[1][:3]}


def batches():
    return dtf.map_style(classes()[0], target="label"), classes()[1]


def wrapped():
    return tuple(dtf.map_style(part) for part in classes())


def fractions():
    return _made(12, lambda row: [0.5] * 4), _made(8, lambda row: [0.5] * 4)


def unlabelled():
    return tuple([{"input_ids": [1, 2]} for _ in range(count)] for count in (12, 8))


class Stream(IterableDataset):
    def __iter__(self):
        yield {"input_ids": [1], "label": 0}

    def __len__(self):
        return 1


def streams():
    return Stream(), Stream()


def alone():
    return {"train": classes()[0]}


def collator():
    return transformers.default_data_collator


def pad(rows):
    return transformers.default_data_collator(rows)


def extra_collator():
    return lambda rows: {**transformers.default_data_collator(rows), "mask": torch.ones(len(rows))}


def no_collator():
    return torch.zeros(1)
