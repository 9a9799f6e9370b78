"""Attention divided among ranks by heads computes as if whole: outputs, gradients, evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtf.api.layout import Split, SplitBy
from dtf.core.types import Place
from dtf.distributed.world import World
from tests.laws.test_tensor_layers import pair
from tests.support.ranks import ranks

Case = tuple[Callable[[], nn.Module], Mapping[str, Any], Callable[[nn.Module], Any]]
N, T, S = 2, 5, 4


def noise(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def itself(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: model(*[noise(N, T, 12)] * 3, **options)


def other(**options: Any) -> Callable[[nn.Module], Any]:
    """Keys and values are other sequences, of other widths."""
    return lambda model: model(noise(T, N, 12), noise(S, N, 7), noise(S, N, 9), **options)


CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False] * 4 + [True], [False] * 5])
ATTENTION: dict[str, Case] = {
    "plain": (lambda: nn.MultiheadAttention(12, 3, batch_first=True), {}, itself(need_weights=False)),
    "weights": (lambda: nn.MultiheadAttention(12, 3), {}, itself()),
    "weights of each head": (
        lambda: nn.MultiheadAttention(12, 3, bias=False, batch_first=True),
        {},
        itself(average_attn_weights=False),
    ),
    "causal": (
        lambda: nn.MultiheadAttention(12, 4, batch_first=True),
        {},
        itself(need_weights=False, attn_mask=CAUSAL, is_causal=True),
    ),
    "causal and padded": (
        lambda: nn.MultiheadAttention(12, 4, batch_first=True),
        {},
        itself(attn_mask=CAUSAL, key_padding_mask=PADDED, is_causal=True),
    ),
    "a mask for each head": (
        lambda: nn.MultiheadAttention(12, 3, add_bias_kv=True, add_zero_attn=True, batch_first=True),
        {},
        itself(need_weights=False, attn_mask=noise(3 * N, T, T), key_padding_mask=PADDED),
    ),
    "other widths": (
        lambda: nn.MultiheadAttention(12, 3, kdim=7, vdim=9, add_bias_kv=True),
        {},
        other(key_padding_mask=noise(N, S), attn_mask=noise(T, S)),
    ),
    "no batch": (
        lambda: nn.MultiheadAttention(12, 3, add_zero_attn=True),
        {},
        lambda model: model(noise(T, 12), noise(S, 12), noise(S, 12), attn_mask=noise(3, T, S)),
    ),
}
ATTENTION = {name: (build, {"": Split.heads}, run) for name, (build, _, run) in ATTENTION.items()}


class Fused(nn.Module):
    """Grouped queries, made with keys and values by one layer; a normalisation of each head; a fused gate."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.out = nn.Linear(12, 24 + 12 + 12), nn.LayerNorm(4), nn.Linear(24, 12)
        self.drop, self.up, self.gone, self.down = nn.Dropout(0.5), nn.Linear(12, 14), nn.Dropout(0.5), nn.Linear(7, 12)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.qkv(x)
        q, k, v = fused.split([fused.shape[-1] // 4 * size for size in (2, 1, 1)], -1)
        q, k, v = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(2, 1) for each in (self.norm(k), v))
        weights = self.drop((self.norm(q) @ k.transpose(-2, -1)).softmax(-1))
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(self.gone(gate.sigmoid() * up))


FUSED = {
    "qkv": SplitBy(heads=6, groups=3, parts=(24, 12, 12)),
    "norm": Split.whole,
    "drop": SplitBy(Split.local, 6, 3),
    "out": SplitBy(Split.row, 6, 3),
    "up": SplitBy(parts=(7, 7)),
    "gone": Split.local,
    "down": Split.row,
}
OWN: dict[str, Case] = {"fused": (Fused, FUSED, lambda model: model(noise(N, T, 12)))}


def torchs(kind: type, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(12, 4, 8, 0.0, batch_first=True, **options)  # torch has a fast path for even heads


LAYER = {"linear1": Split.column, "dropout": Split.local, "linear2": Split.row}
LAYERS: dict[str, Case] = {
    "encoder": (
        lambda: nn.TransformerEncoder(torchs(nn.TransformerEncoderLayer)(), 2),  # type: ignore[arg-type]
        {f"layers.{i}.{name}": split for i in (0, 1) for name, split in ({"self_attn": Split.heads} | LAYER).items()},
        lambda model: model(noise(N, T, 12), src_key_padding_mask=PADDED)[~PADDED],
    ),
    "decoder": (
        torchs(nn.TransformerDecoderLayer, norm_first=True),
        {"self_attn": Split.heads, "multihead_attn": Split.heads, **LAYER},
        lambda model: model(noise(N, T, 12), noise(N, S, 12), tgt_mask=CAUSAL, tgt_is_causal=True),
    ),
}


def swin(kind: str, *sizes: list[int], **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision.models import swin_transformer

        made = getattr(swin_transformer, kind)(12, *sizes, 3, **options)
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.5)
        return made

    return build


SWIN: dict[str, Case] = {
    name: (build, {"": Split.heads}, lambda model: model(noise(N, 5, 7, 12)))
    for name, build in {
        "windows": swin("ShiftedWindowAttention", [2, 3], [0, 0], qkv_bias=False),
        "shifted": swin("ShiftedWindowAttention", [3, 2], [1, 1]),
        "shifted one way": swin("ShiftedWindowAttention", [5, 2], [2, 1], proj_bias=False),
        "second version": swin("ShiftedWindowAttentionV2", [3, 3], [1, 1]),
        "second version without bias": swin("ShiftedWindowAttentionV2", [3, 3], [0, 0], qkv_bias=False),
    }.items()
}
CASES = ATTENTION | OWN | LAYERS | SWIN


def apart(outputs: Any, expected: Any) -> float:
    """The largest difference between the tensors of two results."""
    pairs = zip(outputs, expected, strict=True) if isinstance(expected, tuple) else [(outputs, expected)]
    return max(float((one - two).detach().abs().max()) for one, two in pairs if two is not None)


def divided(rank: int, size: int, names: list[str]) -> dict[str, list[float]]:
    """By case: how far outputs, gradients and an evaluation are from those of the whole; share of its numbers here."""
    from dtf.distributed.sharding import slice_of
    from dtf.strategies.tensor_parallel.slices import slices_of

    mesh, found = World(Place(rank=rank, size=size)).mesh({"tp": size}), {}
    for name in names:
        build, splits, run = CASES[name]
        whole, parts = pair(mesh, build, splits)
        one, two = run(parts), run(whole)
        for outputs in (one, two):
            outputs = outputs[0] if isinstance(outputs, tuple) else outputs
            (outputs * noise(*outputs.shape)).sum().backward()
        place, gradients = slices_of(parts), dict(parts.named_parameters())
        off = [
            float((slice_of(mine, place.get(key)).take(p.grad) - mine.grad).abs().max())
            for key, p in whole.named_parameters()
            if p.grad is not None and (mine := gradients[key]).grad is not None
        ]
        assert len(off) == sum(p.grad is not None for p in whole.parameters())
        with torch.no_grad():
            evaluated = apart(run(parts.eval()), run(whole.eval()))
        held, all_of_it = (sum(p.numel() for p in model.parameters()) for model in (parts, whole))
        found[name] = [apart(one, two), max(off), evaluated, held / all_of_it]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_attention_computes_as_if_whole(size: int) -> None:
    for found in ranks(size, "tests.laws.test_tensor_heads:divided", shared=True, names=list(CASES)):
        worst = {name: numbers for name, numbers in found.items() if not max(numbers[:3]) < 1e-12}
        assert not worst
        assert found.keys() == CASES.keys()
        if size == 2:  # and four heads: half of all but the bias of the last layer
            assert found["causal"][3] <= 0.55
