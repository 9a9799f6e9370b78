"""Models of transformers: how they are split, as they say themselves or by their family, and what of their attributes
counts channels. Imports nothing of transformers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from dtf.api.layout import Split, SplitBy
from dtf.strategies.tensor_parallel.layers import is_a

_PLAN = {
    "colwise": Split.column,
    "rowwise": Split.row,
    "replicated_with_grad_allreduce": Split.whole,
}
"""What a tensor-parallel plan of transformers says of a module, and what that is here."""

OUTPUTS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of classes whose loss takes divided scores."""


def transformers_splits(model: Any) -> dict[str, Split | SplitBy]:
    """Splits by name, in the order of modules. Empty for a family that is not known."""
    modules, plan = dict(model.named_modules()), _plan_of(model)
    splits: dict[str, Split | SplitBy] = {}
    for name, module in modules.items():
        names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith(_AT)]
        kind = next((_FAMILIES[base] for base in names if base in _FAMILIES), None)
        found = dict(kind(module)) if kind is not None else {}
        if found and all(_has(module, key) for key in found):
            splits |= {f"{name}.{key}": split for key, split in found.items()}
        elif kind is None:
            splits |= _planned(name, module, plan)
    return (_vocabulary(model, modules) | splits) if splits else {}


def adjust(module: nn.Module, heads: tuple[int, int, int]) -> None:
    """Give an attention module, which computes heads [first, last) of `heads`, the counts of what it has."""
    whole, first, last = heads
    here = last - first
    if is_a(module, f"{_AT}gpt2.modeling_gpt2.GPT2Attention"):
        module.split_size = here * module.head_dim  # type: ignore[operator]
    if is_a(module, f"{_AT}phi3.modeling_phi3.Phi3Attention"):
        module.config = copy.copy(module.config)  # its own: other modules read the whole one
        module.config.num_attention_heads = here  # type: ignore[union-attr]
        module.num_key_value_heads = module.num_key_value_heads * here // whole  # type: ignore[operator]


_AT = "transformers.models."


def _plan_of(model: Any) -> list[tuple[re.Pattern[str], str]]:
    """The model's own plan: patterns of full names, and kinds."""
    prefix = getattr(model, "base_model_prefix", "")
    inside = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    own: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    return [(re.compile(re.escape(inside + name).replace(r"\*", r"\d+")), kind) for name, kind in own.items()]


def _planned(name: str, module: nn.Module, plan: list[tuple[re.Pattern[str], str]]) -> dict[str, Split | SplitBy]:
    """The splits of the layers in a module, where the plan says of all of them what is known here."""
    kinds = {}
    for key, child in module.named_children():
        kind = next((kind for pattern, kind in plan if pattern.fullmatch(f"{name}.{key}")), None)
        if kind is not None and any(True for _ in child.parameters()):
            kinds[key] = kind
    found = {key: _PLAN.get(kind) for key, kind in kinds.items()}
    if None in found.values() or Split.column not in found.values() or Split.row not in found.values():
        return {}
    size = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    if size is None:
        linear = all(isinstance(module.get_submodule(key), nn.Linear) for key in found)
        return {f"{name}.{key}": split for key, split in found.items()} if linear else {}  # type: ignore[misc]
    by = _grouped(module, found, size)
    return {} if by is None else {f"{name}.{key}": by[key] for key in found}


def _grouped(module: nn.Module, found: Mapping[str, Split | None], size: int) -> dict[str, Split | SplitBy] | None:
    """Splits by heads of an attention module with heads of this size. None for one that is made in another way."""
    config: Any = getattr(module, "config", None)
    heads = getattr(config, "num_attention_heads", 0)
    groups = getattr(config, "num_key_value_heads", None) or heads
    splits: dict[str, Split | SplitBy] = {}
    for key, split in found.items():
        layer: Any = module.get_submodule(key)
        if split is Split.whole:
            if any(parameter.numel() != size for parameter in layer.parameters()):
                return None
            splits[key] = split
            continue
        if not isinstance(layer, nn.Linear) or not heads or heads % groups:
            return None
        width = layer.out_features if split is Split.column else layer.in_features
        known = {"q_proj": heads, "k_proj": groups, "v_proj": groups}.get(key, heads)
        if width not in (known * size, 3 * heads * size if key == "query_key_value" else -1):
            return None
        splits[key] = SplitBy(split or Split.column, heads, groups if groups != heads else 0)
    return splits


def _vocabulary(model: Any, modules: Mapping[str, nn.Module]) -> dict[str, Split | SplitBy]:
    """Splits of the embedding and the output by words, where the loss takes divided scores and no other module has what
    is in these.
    """
    if not any(base.__name__.endswith(OUTPUTS) for base in type(model).__mro__):
        return {}
    names = {id(module): name for name, module in modules.items()}
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    plain = isinstance(ends[0], nn.Embedding) and isinstance(ends[1], nn.Linear)
    if not plain or any(id(end) not in names for end in ends) or ends[0].num_embeddings != ends[1].out_features:
        return {}
    own = {id(parameter) for end in ends for parameter in end.parameters()}
    shared = any(
        id(parameter) in own
        for module in modules.values()
        if module not in ends
        for parameter in module._parameters.values()
    )
    unlike = ends[0].max_norm is not None or ends[0].sparse or ends[0].scale_grad_by_freq
    return {} if shared or unlike else {names[id(ends[0])]: Split.row, names[id(ends[1])]: Split.classes}


def _has(module: nn.Module, key: str) -> bool:
    try:
        return module.get_submodule(key) is not None
    except AttributeError:
        return False


Found = Iterator[tuple[str, Split | SplitBy]]


def _gpt2_attention(module: Any) -> Found:
    width, heads = module.embed_dim, module.num_heads
    if not module.is_cross_attention:
        yield "c_attn", SplitBy(heads=heads, parts=(width,) * 3)
        yield "attn_dropout", SplitBy(Split.local, heads)
        yield "c_proj", SplitBy(Split.row, heads)


def _gpt2_mlp(module: Any) -> Found:
    yield from (("c_fc", Split.column), ("c_proj", Split.row))


def _phi3_attention(module: Any) -> Found:
    heads, groups, size = module.config.num_attention_heads, module.num_key_value_heads, module.head_dim
    grouped = groups if groups != heads else 0
    yield "qkv_proj", SplitBy(heads=heads, groups=grouped, parts=(heads * size, groups * size, groups * size))
    yield "o_proj", SplitBy(Split.row, heads, grouped)


def _phi3_mlp(module: Any) -> Found:
    yield "gate_up_proj", SplitBy(parts=(module.gate_up_proj.out_features // 2,) * 2)
    yield "down_proj", Split.row


def _bert_attention(module: Any) -> Found:
    """Of the module that has the attention and the layer behind it."""
    heads = module.self.num_attention_heads
    yield from ((f"self.{key}", SplitBy(heads=heads)) for key in ("query", "key", "value"))
    yield "self.dropout", SplitBy(Split.local, heads)
    yield "output.dense", SplitBy(Split.row, heads)


def _bert_layer(module: Any) -> Found:
    yield from (("intermediate.dense", Split.column), ("output.dense", Split.row))


_FAMILIES: dict[str, Callable[[Any], Found]] = {
    "GPT2Attention": _gpt2_attention,
    "GPT2MLP": _gpt2_mlp,
    "Phi3Attention": _phi3_attention,
    "Phi3MLP": _phi3_mlp,
    **{f"{name}Attention": _bert_attention for name in ("Bert", "Roberta", "Electra")},
    **{f"{name}Layer": _bert_layer for name in ("Bert", "Roberta", "Electra")},
}
"""Name of a class of transformers -> what makes the splits in such a module, by names inside."""
