# pyright: basic, reportMissingImports=false
"""Texts, tokenizer and collators as the documentation of transformers has them: data sets of `datasets` that are
tokenized by `map`, a label for the first token of each word, batches padded to their longest row.
"""

import random

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

WORDS = [f"w{number}" for number in range(57)]


def tokenizer():
    known = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[MASK]", *WORDS])}
    words = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]", model_max_length=32
    )


def _sentences(count, seed, least):
    draws = random.Random(seed)
    for _ in range(count):
        start, step = draws.randrange(57), draws.choice([1, 2, 7])
        words = [WORDS[(start + step * place) % 57] for place in range(draws.randrange(least, 13))]
        yield words, [1, 2, 7].index(step)


def _data(count, columns, tokenize, least=4):
    made = {
        split: Dataset.from_list([columns(*sentence) for sentence in _sentences(rows, seed, least)])
        for split, rows, seed in (("train", count, 0), ("validation", 40, 1))
    }
    return DatasetDict(made).map(tokenize, batched=True)


def sentences(count: int = 160):
    words = tokenizer()
    return _data(count, lambda text, label: {"text": " ".join(text), "label": label}, lambda rows: words(rows["text"]))


def tags(count: int = 160):
    words = tokenizer()

    def tokenize(rows):
        found = words(rows["tokens"], is_split_into_words=True)
        found["labels"] = [
            [-100 if place is None or place % 3 == 0 else tag[place] for place in found.word_ids(row)]
            for row, tag in enumerate(rows["tags"])
        ]
        return found

    return _data(
        count,
        lambda text, _: {"tokens": text, "tags": [int(word[1:]) % 4 for word in text]},
        tokenize,
    )


def texts(count: int = 160):
    words = tokenizer()
    made = _data(count, lambda text, _: {"text": " ".join(text)}, lambda rows: words(rows["text"]), 8)
    return made.remove_columns("text")


def padding():
    return DataCollatorWithPadding(tokenizer())


def tag_padding():
    return DataCollatorForTokenClassification(tokenizer())


def next_words():
    return DataCollatorForLanguageModeling(tokenizer(), mlm=False)


def masked_words():
    return DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4)
