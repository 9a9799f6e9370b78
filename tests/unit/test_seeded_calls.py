"""Dropout by functions of torch: what torch computes, with masks by name, found in the modules that call it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dtf.model.contents import FUNCTION_DRAWS
from dtf.model.seeded_calls import HEADS, FindCalls, attention, seed_calls
from dtf.model.seeded_dropout import SeededDropout

CPU = torch.device("cpu")


class Calling(nn.Module):
    """Its forward is a function of (input, whether it trains)."""

    def __init__(self, function: Callable[[Tensor, bool], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.training)


def seeded(model: nn.Module, *inputs: Tensor) -> SeededDropout:
    """The masks of a model after a trial pass, of micro-batch 0 of step 0."""
    masks = SeededDropout(model, 0, CPU)
    masks.begin_micro_batch(0, 0)
    with FindCalls(model, masks) as found:
        total(model(*inputs)).backward()
    seed_calls(model, masks, found.forwards)
    model.zero_grad()
    masks.begin_micro_batch(0, 0)
    return masks


def total(outputs: Any) -> Tensor:
    return sum(part.sum() for part in outputs) if isinstance(outputs, tuple) else outputs.sum()  # type: ignore


def names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if FUNCTION_DRAWS in vars(module)]


def values_of(x: Tensor) -> set[float]:
    return {round(value, 4) for value in x.unique().tolist()}


def forward_of(module: nn.Module) -> str:
    return f"{type(module).forward.__module__}.{type(module).forward.__qualname__}"


def keep_all(x: Tensor, p: float, shape: Sequence[int]) -> Tensor:
    return x.new_ones(shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("narrow", [False, True])
def test_attention_without_its_mask_is_torchs(dtype: torch.dtype, narrow: bool) -> None:
    """`narrow`: under autocast."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, n, 8, generator=draw).to(dtype) for heads, n in ((4, 5), (2, 7), (2, 7)))
    seen = torch.rand(5, 7, generator=draw) > 0.5
    seen[0] = False  # a word that sees none
    masks = {"attn_mask": seen}, {"attn_mask": torch.randn(2, 1, 5, 7, generator=draw).to(dtype)}, {"is_causal": True}
    for case in ({}, *masks, {"scale": 0.3}, {"scale": -0.3}):
        shared: Any = {**case, "enable_gqa": True}
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow), sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(q, k, v, **shared)
            found = attention(keep_all, q, k, v, dropout_p=0.1, **shared)
        assert found is not None and found.dtype is expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6 if dtype is not torch.float64 else 1e-14)
    assert attention(keep_all, q, k, v, enable_gqa=True) is None  # torch's own


FUNCTIONS = {
    "dropout": (F.dropout, (40, 50), 1),
    "dropout1d": (F.dropout1d, (40, 50, 3), 3),
    "dropout1d of a row": (F.dropout1d, (2000, 3), 3),
    "dropout2d": (F.dropout2d, (40, 50, 2, 2), 4),
    "dropout3d": (F.dropout3d, (40, 50, 2, 1, 2), 4),
    "alpha": (F.alpha_dropout, (40, 50), 1),
    "alpha of channels": (F.feature_alpha_dropout, (40, 50, 3), 3),
    "in torch": (lambda x, p, training, inplace: [torch.dropout, torch.dropout_][inplace](x, p, training), (40, 50), 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("inplace", [False, True])
def test_functions_of_torch_do_what_they_say(name: str, inplace: bool) -> None:
    function, shape, together = FUNCTIONS[name]
    model = nn.Sequential(Calling(lambda x, training: function(x, 0.4, training=training, inplace=inplace)))
    torch.manual_seed(0)
    values = [torch.ones(1, *shape[1:]), torch.zeros(1, *shape[1:])]
    x = torch.cat([values[0].expand(shape[0] // 2, *shape[1:]), values[1].expand(shape[0] // 2, *shape[1:])])
    seeded(model, x.clone().requires_grad_() * 1)
    given = x.clone()
    out, plain = model(given), function(x.clone(), 0.4, training=True, inplace=False)
    assert (given.data_ptr() == out.data_ptr()) is inplace
    assert values_of(out) == values_of(plain)
    groups = out.reshape(-1, together)
    assert torch.equal(groups.amax(1), groups.amin(1))  # dropped together
    dropped = (groups[: len(groups) // 2, 0] < 1).double().mean().item()
    assert dropped == pytest.approx(0.4, abs=0.07)
    model.eval()
    assert torch.equal(model(x.clone()), x)


def test_masks_follow_the_micro_batch_the_module_the_call_and_its_place() -> None:
    twice = Calling(lambda x, training: (F.dropout(x, 0.5, training), F.dropout(x, 0.5, training)))
    model, x = nn.ModuleDict({"a": twice, "b": Calling(twice.function)}), torch.ones(8, 8, requires_grad=True)
    masks = SeededDropout(model, 0, CPU)
    assert seed_calls(model, masks, {forward_of(twice)}) == ["a", "b"]
    torch.rand(int(torch.randint(1, 9, ())))  # whatever else drew before

    def drawn(step: int, micro_batch: int) -> list[Tensor]:
        masks.begin_micro_batch(step, micro_batch)
        before = masks.rng_state()
        found = [*model["a"](x), *model["a"](x), *model["b"](x)]
        assert not masks.drew(before)
        return found

    found = drawn(0, 0)
    assert all(one.equal(other) for one, other in zip(found, drawn(0, 0), strict=True))
    found += drawn(0, 1) + drawn(1, 0)
    assert not any(one.equal(other) for i, one in enumerate(found) for other in found[:i])


def test_ranks_that_divide_heads_drop_what_one_drops() -> None:
    """Of weights (B, heads, T, S), by a function and in attention, and of those of torch's module (B * heads, T, S)."""
    x = torch.ones(2, 4, 3, 3)

    def weights(x: Tensor, training: bool) -> Any:
        p = 0.5 if training else 0.0
        return F.dropout(x, 0.5, training), F.scaled_dot_product_attention(x, x, torch.eye(3).expand_as(x), dropout_p=p)

    class Torchs(nn.Module):
        def forward(self, x: Tensor) -> Any:
            heads = x.shape[1]
            eye, words = torch.eye(2 * heads), x[:, 0, :, :2].transpose(0, 1).repeat(1, 1, heads)
            given: Any = (None, None, None, None, False, 0.5, eye, None)
            projections = {"q_proj_weight": eye, "k_proj_weight": eye, "v_proj_weight": eye}
            return F.multi_head_attention_forward(
                words, words, words, 2 * heads, heads, *given, training=self.training, need_weights=True,
                average_attn_weights=False, use_separate_proj_weight=True, **projections,
            )[1]  # fmt: skip

    for make in (lambda: Calling(weights), Torchs):
        found = []
        for first, last in ((0, 4), (0, 1), (1, 4)):
            model = nn.ModuleDict({"attention": make()})
            model["attention"].__dict__[HEADS] = (4, first, last)
            masks = SeededDropout(model, 0, CPU)
            seed_calls(model, masks, {forward_of(model["attention"])})
            masks.begin_micro_batch(0, 0)
            outputs = model["attention"](x[:, first:last])
            found.append(outputs if isinstance(outputs, tuple) else (outputs,))
        for whole, one, rest in zip(*found, strict=True):
            assert torch.equal(whole, torch.cat([one, rest], 1)) and not torch.equal(whole[:, :1], whole[:, 1:2])


def test_what_draws_nothing_is_left_as_it_is() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0)
    seeded(encoder, torch.randn(3, 2, 8))
    assert names(encoder) == [] and type(encoder.self_attn) is nn.MultiheadAttention
    frozen = nn.Sequential(nn.Linear(4, 4), Calling(lambda x, training: F.dropout(x, 0.5)))
    frozen[1].eval()  # draws in evaluation too, from the global generator
    seeded(frozen, torch.ones(2, 4))
    assert names(frozen) == []


def test_a_pass_that_copies_a_module_copies_nothing_else() -> None:
    class Whole(nn.Sequential):
        def __deepcopy__(self, memo: object) -> Any:
            raise AssertionError("the whole model is copied")

    model = Whole(nn.Linear(2, 2), Calling(lambda x, _: copy.deepcopy(model[0])(x) + F.dropout(x)))
    assert names(model) == [] and seeded(model, torch.ones(3, 2)) and names(model) == ["1"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpoint_computes_again_has_its_masks(reentrant: bool) -> None:
    """A module does, with a name. A part of a forward does, from the global generator."""

    class Again(nn.Module):
        def __init__(self, part: nn.Module | Callable[[Tensor], Tensor], on: bool) -> None:
            super().__init__()
            self.linear, self.part, self.on = nn.Linear(4, 4), part, on

        def forward(self, x: Tensor) -> Tensor:
            part = self.part
            y = self.linear(x)
            return y * (checkpoint(part, y, use_reentrant=reentrant) if self.on else part(y))  # type: ignore[operator]

    def drop(x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x.sin(), 0.5), 0.5).cos()

    for part, expected in ((lambda: Calling(lambda x, _: drop(x)), ["part"]), (lambda: drop, [])):
        gradients = []
        for on in (False, True):
            torch.manual_seed(0)
            model = Again(part(), on)
            seeded(model, torch.ones(2, 4))
            assert names(model) == (expected or ([] if on else [""]))
            model(torch.ones(2, 4)).sum().backward()
            gradients.append(model.linear.weight.grad)
        if expected:
            assert torch.equal(*gradients)


def test_what_its_author_compiles_is_left_to_the_global_generator() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="eager")
    model = nn.Sequential(nn.Linear(4, 4), Calling(lambda x, training: compiled(x)))
    seeded(model, torch.ones(2, 4))
    assert names(model) == []
