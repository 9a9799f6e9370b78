"""Small models of transformers, as its configs make them. Present where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tests.zoo.entries import token_loss, tokens, zoo_model

WORDS = 11
SMALL = {"vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 3, "intermediate_size": 20, "pad_token_id": 0}
EACH = SMALL | {"num_attention_heads": 3, "max_position_embeddings": 16}
GROUPED = EACH | {"num_attention_heads": 6, "num_key_value_heads": 3}
ENCODERS: dict[str, dict[str, Any]] = {
    "BertForTokenClassification": EACH | {"num_labels": WORDS},
    "RobertaForTokenClassification": EACH | {"num_labels": WORDS},
}
CAUSAL: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"vocab_size": WORDS, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 16},
    "GPTNeoXForCausalLM": EACH,
    "LlamaForCausalLM": GROUPED,
    "MistralForCausalLM": GROUPED,
    "Phi3ForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED | {"tie_word_embeddings": True},
}
"""They compute normalisations, softmax or places in fp32 in every precision."""


def _loss(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    return token_loss(outputs.logits, targets)


def _builder(kind: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers  # type: ignore[import-not-found]

        model_class = getattr(transformers, kind)
        special = {"bos_token_id": None, "eos_token_id": None}
        return model_class(model_class.config_class(**special, use_cache=False, **options))

    return build


for kind, options in (ENCODERS | CAUSAL).items():
    draws = ["draws"] if kind in ENCODERS or kind == "GPT2LMHeadModel" else []
    zoo_model(
        f"hf_{kind.split('For')[0].removesuffix('LMHeadModel').lower()}",
        tokens(7),
        _loss,
        "attention",
        "transformers",
        "sums and counts",
        *draws,
        slow=True,
        precision="fp64" if kind in ENCODERS else "fp32",
    )(_builder(kind, options))
