# pyright: basic, reportMissingImports=false
"""Models of a few thousand parameters, as the documentation of transformers makes them of a config."""

from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

WORDS = 60


def _bert(dropout, **more):
    return BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **more,
    )  # fmt: skip


def classifier(dropout: float = 0.1):
    names = {0: "negative", 1: "neutral", 2: "positive"}
    return BertForSequenceClassification(_bert(dropout, num_labels=3, id2label=names))


def regression(dropout: float = 0.1):
    return BertForSequenceClassification(_bert(dropout, num_labels=1))


def label_sets(dropout: float = 0.1):
    return BertForSequenceClassification(_bert(dropout, num_labels=3, problem_type="multi_label_classification"))


def tagger(dropout: float = 0.1):
    return BertForTokenClassification(_bert(dropout, num_labels=4))


def masked_words(dropout: float = 0.1):
    return BertForMaskedLM(_bert(dropout))


def language_model(dropout: float = 0.1):
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        )
    )  # fmt: skip


def loaded(folder: str):
    return AutoModelForCausalLM.from_pretrained(folder, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def llama(dropout: float = 0.1):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, attention_dropout=dropout,
        )
    )  # fmt: skip
