"""Positions divided among ranks: collectives, numbers, what cannot be divided, memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from dtf.api.layout import Layout
from dtf.config.settings import load_parts
from dtf.core.errors import LayoutError
from dtf.core.types import Place
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.distributed.sharding import balanced, bounds
from dtf.distributed.world import World
from dtf.strategies.pipeline.setup import _positions
from dtf.strategies.tensor_parallel.exchanged_attention import Exchange
from dtf.strategies.tensor_parallel.positions import Positions, partial_parameters
from tests.support.harness import difference, reference, spread
from tests.support.ranks import ranks

load_parts([])
REFUSE = "tests.support.causal:refuse"
CAUSAL: dict[str, Any] = {"recipe": {"name": "causal"}, "plugin": "tests.support.causal"}


def collectives(rank: int, size: int) -> dict[str, float]:
    """Name -> how far outputs and gradients of a collective are from what they should be."""
    from dtf.distributed import collectives as c

    mesh = World(Place(rank=rank, size=size)).mesh({"tensor": size})
    group, found = mesh.get_group(), {}
    heads = 5
    x = torch.arange(2 * 7 * 3, dtype=torch.float64).view(2, 7, 3)
    first, last = bounds(7, size, rank)
    weight = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    everyone = sum(
        torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(other), dtype=torch.float64)
        for other in range(size)
    )
    alike = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    own = x[:, first:last].clone().requires_grad_()

    def apart(made: Tensor, expected: Tensor, gradient: Tensor | None, wanted: Tensor) -> float:
        assert gradient is not None
        assert made.shape == expected.shape
        assert gradient.shape == wanted.shape
        return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in ((made, expected), (gradient, wanted)))

    made = c.gathered(own, 1, 7, group)
    (made * weight).sum().backward()
    found["gathered"] = apart(made, x, own.grad, everyone[:, first:last])  # type: ignore[index]
    own = x[:, first:last].clone().requires_grad_()
    made = c.joined(own, 1, 7, group)
    (made * alike).sum().backward()
    found["joined"] = apart(made, x, own.grad, alike[:, first:last])
    whole = x.clone().requires_grad_()
    made = c.own_slice(whole, 1, group)
    (made * alike[:, first:last]).sum().backward()
    found["own_slice"] = apart(made, x[:, first:last], whole.grad, alike)
    one = x[:1].clone().requires_grad_()  # a slice of one row is contiguous
    c.own_slice(one, 1, group).mul_(alike[:1, first:last]).sum().backward()
    found["own_slice in place"] = apart(one, x[:1], one.grad, alike[:1])
    y = torch.arange(2 * heads * 7 * 3, dtype=torch.float64).view(2, heads, 7, 3)
    own = y[:, :, first:last].clone().requires_grad_()
    made = c.exchanged(own, (1, balanced), (2, bounds), 7, group)
    begin, end = balanced(heads, size, rank)
    back = c.exchanged(made, (2, bounds), (1, balanced), heads, group)
    (back * y[:, :, first:last]).sum().backward()
    found["exchanged"] = apart(made, y[:, begin:end], own.grad, y[:, :, first:last])
    found["and back"] = apart(back, y[:, :, first:last], own.grad, y[:, :, first:last])
    found["attention"] = attention(y, weight.new_tensor(range(heads)), first, last, group)
    return found


def attention(x: Tensor, slopes: Tensor, first: int, last: int, group: Any) -> float:
    """How far attention of divided positions is from that of all, with another mask for each head."""
    whole = x.shape[2]
    mask = slopes.view(-1, 1, 1) * torch.arange(whole) / whole
    here = whole, first, last
    attend: Any = functional.scaled_dot_product_attention
    bound = 0.0
    for given in (mask, mask[:1], mask[0].expand(2, 1, whole, whole)):
        with Exchange(lambda: here, "attention", group) as exchange:
            own = attend(*(x[:, :, first:last] / 100,) * 3, given)
        exchange.check()
        bound = max(bound, float((own - attend(*(x / 100,) * 3, given)[:, :, first:last]).abs().max()))
    longer = torch.cat([x, x], 2) / 100
    exchange = Exchange(lambda: here, "attention", group)
    for count in (2 * whole, 3):  # rows that leave a rank one position or none
        here = count, *bounds(count, group.size(), dist.get_rank(group))
        part = longer[:, :, slice(*here[1:])]
        with exchange:
            own = attend(part, part, part, is_causal=part.shape[2] > 1)
        exchange.check()
        expected = attend(*(longer[:, :, :count],) * 3, is_causal=True)[:, :, slice(*here[1:])]
        bound = max(bound, float((own - expected).abs().max()) if own.numel() else 0.0)
    here = whole, first, last
    with (
        Exchange(lambda: here, "attention", group),
        pytest.raises(LayoutError, match=r"all 7 positions, so .* give it as bool, as integers \(B, T\) are cut"),
    ):
        attend(*(x[:, :, first:last],) * 3, mask[..., :2])
    return bound


@pytest.mark.parametrize("size", [2, 3])
def test_slices_are_cut_and_joined_with_their_gradients(size: int) -> None:
    for found in ranks(size, "tests.laws.test_positions:collectives", shared=True):
        assert max(found.values()) < 1e-12, found


MESHES = [
    (2, {"context": 2}),
    (2, {"tensor": 2}),
    (4, {"context": 2, "tensor": 2}),
    (4, {"context": 2, "pipeline": 2}),
    pytest.param(4, {"context": 2, "shard": 2, "zero": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("processes", "options"), MESHES)
def test_a_language_model_has_the_same_numbers(processes: int, options: dict[str, Any]) -> None:
    """Seven positions, dropout in attention, between layers, by functions and behind the positions, tied embeddings."""
    drops = {**CAUSAL, "recipe": {"name": "causal", "drops": "rows"}}
    assert difference(reference(**drops), spread("mesh", processes, **drops, options=options)) < 1e-10


def test_attention_that_nobody_knows_is_refused_before_the_first_step() -> None:
    """Each rank would attend to its own positions, and shapes would fit."""
    case = {**CAUSAL, "recipe": {"name": "causal", "plain": True}, "strategy": "mesh", "options": {"context": 2}}
    for said in ranks(2, REFUSE, shared=True, **case):
        assert "blocks.0.attention computes attention without F.scaled_dot_product_attention" in said


def test_positions_that_a_block_counts_itself_are_refused_before_the_first_step() -> None:
    """Each rank would take the first ones. They start at zero, and bf16 rounds, so that outputs do not show it."""
    case = {**CAUSAL, "recipe": {"name": "causal", "counted": True}, "precision": "bf16"}
    for said in ranks(2, REFUSE, shared=True, **case, strategy="mesh", options={"context": 2}):
        assert "context 2 gives other outputs than the whole model" in said


def test_dropout_of_unknown_positions_is_refused_before_the_first_step() -> None:
    """Each rank would draw the same mask for other positions, which all have the same norm."""
    case = {**CAUSAL, "recipe": {"name": "causal", "drops": "flat"}, "strategy": "mesh", "options": {"context": 2}}
    for said in ranks(2, REFUSE, shared=True, **case):
        assert "ranks that should agree have different inputs of the dropout in blocks.0" in said


def test_a_loss_of_torch_is_refused_with_what_to_use() -> None:
    case = {**CAUSAL, "recipe": {"name": "causal", "torch_loss": True}, "strategy": "mesh", "options": {"context": 2}}
    for said in ranks(2, REFUSE, shared=True, **case):
        assert "outputs of the model that ranks divide" in said and "in loss; use dtf.cross_entropy" in said


def test_of_what_blocks_get_beside_their_input_numbers_of_positions_are_cut_and_masks_are_not() -> None:
    here: Any = SimpleNamespace(_of_context=lambda: (7, 4, 7))
    numbers, mask = torch.arange(7).expand(2, 7), torch.ones(2, 7, dtype=torch.bool)
    assert torch.equal(Positions._beside(here, numbers), numbers[:, 4:]) and Positions._beside(here, mask) is mask


def test_a_parameter_of_some_positions_and_of_all_is_refused_whichever_stages_use_it() -> None:
    """A module in two blocks is none: both have some positions."""
    norm = nn.LayerNorm(4)
    model = nn.ModuleDict({"first": nn.LayerNorm(4), "block": nn.Sequential(norm), "last": norm})
    names, dims = ("block", "last"), ParallelDims.__new__(ParallelDims)
    assert partial_parameters(model, names) == {"block.0.weight", "block.0.bias"}
    dims.sizes, model["first"].weight = MeshSizes(pipeline=2, tensor=2), norm.weight
    world: Any = None
    with pytest.raises(
        LayoutError, match=r"^block\.0\.weight is used for some .* and as first\.weight for all of them"
    ):
        _positions(model, {1: model["block"]}, Layout(positions=names), dims, 2, world)


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [1, 2])
def test_so_it_is_before_the_first_step(virtual: int) -> None:
    case = {**CAUSAL, "recipe": {"name": "causal", "early": True}, "strategy": "mesh"}
    for said in ranks(4, REFUSE, shared=True, options={"pipeline": 2, "tensor": 2, "virtual": virtual}, **case):
        assert said.startswith("blocks.1.norm1.weight is used for some positions of a row")


@pytest.mark.slow
def test_the_stage_that_has_the_loss_refuses_one_of_torch() -> None:
    case = {**CAUSAL, "recipe": {"name": "causal", "torch_loss": True}, "options": {"tensor": 2, "pipeline": 2}}
    with pytest.raises(AssertionError, match="ConfigError: .* in loss; use dtf.cross_entropy"):
        spread("mesh", 4, **case)


def test_a_buffer_of_some_positions_is_refused() -> None:
    case = {**CAUSAL, "recipe": {"name": "causal", "scaled": True}}
    for said in ranks(2, REFUSE, shared=True, **case, strategy="tensor"):
        assert "blocks.0.norm2 changes its buffer blocks.0.norm2.scale in the forward pass, and the layout" in said


def test_more_ranks_than_heads_are_refused() -> None:
    case = {**CAUSAL, "recipe": {"name": "causal", "heads": 1}, "strategy": "mesh", "options": {"context": 2}}
    for said in ranks(2, REFUSE, shared=True, **case):
        assert "blocks.0.attention has 1 head on a rank, of which strategy.context=2 leaves a rank none" in said


def activations(rank: int, size: int, **case: Any) -> list[list[int]]:
    """Shapes of what the first norm and the first layer of the MLP get in training."""

    from tests.support.harness import Case, _Run

    seen: list[list[int]] = []
    run = _Run(rank, size, Case(**case))
    model: nn.Module = run.program._replica.model  # type: ignore[attr-defined]
    for name in ("blocks.0.norm2", "blocks.0.dropout1", "blocks.0.mlp.2"):
        model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append([*args[0].shape]))
    run.fit()
    return seen[:3]


def test_norms_and_dropouts_between_divided_layers_have_a_slice_of_the_positions() -> None:
    case = {**CAUSAL, "strategy": "mesh", "options": {"tensor": 2}}
    first, second = ranks(2, "tests.laws.test_positions:activations", shared=True, **case)
    assert [shape[1:] for shape in first] == [[4, 16], [4, 16], [7, 16]]
    assert [shape[1:] for shape in second] == [[3, 16], [3, 16], [7, 16]]
