"""Blocks that nobody wrote down: which modules they are, in which order, and the layout that is written of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtf.api.layout import BufferUpdate, Layout, Split
from dtf.core.errors import ConfigError
from dtf.model.found_blocks import FoundLayout, as_code, blocks_row, found_blocks, found_layout, parts, repeated_blocks
from dtf.model.init import layout_of
from dtf.strategies.fsdp_units import gathered_units
from dtf.strategies.pipeline.flow_order import blocks_in_order, layout_code
from dtf.strategies.pipeline.trace import trace
from tests.support.toy import Toy


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.relu(self.norm(self.first(x))))


class Stage(nn.Module):
    """Little more than a list of blocks, with a forward of its own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.down, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        for block in self.blocks:
            x = block(x)
        return x


class Backwards(nn.Module):
    """Names its parts in another order than data flows, and one that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.spare = nn.Linear(8, 4), nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.embed = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](self.blocks[1](self.embed(x))))


class Attributes(nn.Module):
    """Blocks that are no members of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = Block(), Block(), Block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.b(self.a(x))))


def chain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (chain(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)), [["0", "1"], ["3"]]),
        (chain(nn.Linear(8, 8), Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 4)), [["0"], ["1"], ["2"], ["3", "4"]]),
        (chain(Block(), Block(), nn.LayerNorm(8)), [["0"], ["1", "2"]]),
        (chain(Stage(2), Stage(2)), [[f"{i}.{name}"] for i in (0, 1) for name in ("down", "blocks.0", "blocks.1")]),
        (chain(nn.Linear(8, 8), Block(), nn.Linear(8, 4)), [["0"], ["1.first", "1.norm"], ["1.last"], ["2"]]),
        (Attributes(), [["a"], ["b"], ["c"], ["head"]]),
        (chain(chain(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Linear(8, 4)), [["0"], ["1"]]),
        (chain(nn.MultiheadAttention(8, 2), nn.Linear(8, 4)), [["0"], ["1"]]),
        (chain(nn.ReLU()), []),
    ],
)  # fmt: skip
def test_blocks_are_what_is_repeated_and_the_layers_around_it(model: nn.Module, blocks: list[list[str]]) -> None:
    assert found_blocks(model) == tuple(map(tuple, blocks))
    names = [name for block in found_blocks(model) for name in block]
    assert sorted(names) == sorted(parts(model))
    assert set(repeated_blocks(model)) <= set(names)


def test_found_blocks_take_the_order_of_the_forward_pass_and_leave_out_what_it_does_not_call() -> None:
    model = Backwards()
    assert found_blocks(model) == (("head", "spare"), ("blocks.0",), ("blocks.1",), ("embed",))
    ordered = blocks_in_order(model, found_layout(model, Layout()))
    assert ordered == (("embed",), ("blocks.1",), ("blocks.0",), ("head",))
    written = Layout((("blocks.1",), ("blocks.0",)))
    assert blocks_in_order(model, written) == written.blocks


class Bare(Toy):
    """Says nothing of its blocks, but of a buffer and a split."""

    def layout(self, model: nn.Module) -> Layout:
        return Layout(splits={"9": Split.classes}, buffers={"1.running_mean": BufferUpdate.mean})


def test_a_layout_without_blocks_gets_those_that_are_found() -> None:
    model = Bare().build_model()
    layout = layout_of(Bare(), model)
    assert isinstance(layout, FoundLayout) and layout.blocks == (("0", "1"), ("4", "5"), ("7",), ("9",))
    assert layout.splits == {"9": Split.classes} and layout.buffers == {"1.running_mean": BufferUpdate.mean}
    assert not isinstance(layout_of(Toy(), Toy().build_model()), FoundLayout)
    assert blocks_row(model, layout)["blocks"].startswith("4 found in the model: 4 Linear, 1 BatchNorm1d, 1 LayerNorm;")
    assert blocks_row(model, Toy().layout(model)) == {}


def test_a_written_layout_is_the_found_one() -> None:
    model = Attributes()
    names: dict[str, Any] = {}
    layout = Layout(found_blocks(model), {"head": Split.classes})
    exec(as_code(layout), names)
    assert names["layout"](None, model) == layout


def test_the_layout_of_a_recipe_is_written_with_the_reason_why_it_cannot_be_cut() -> None:
    assert '("4", "5"),' in layout_code(Bare()) and '"9": Split.classes,' in layout_code(Bare())

    class Asks(Bare):
        def build_model(self) -> nn.Module:
            return Unfreezes()

        def layout(self, model: nn.Module) -> Layout:
            return Layout()

    assert layout_code(Asks()).splitlines()[-1].startswith("# in the order of names, as strategy=pipeline cannot cut")
    exec(layout_code(Asks()), {})


def test_fsdp_gathers_found_blocks_only_where_some_are_repeated() -> None:
    model = Attributes()
    layout = found_layout(model, Layout())
    assert gathered_units(model, layout, "block", None) == [[model.a], [model.b], [model.c], [model.head]]
    plain = chain(*(nn.Linear(8, 8) for _ in range(40)))
    assert len(found_blocks(plain)) == 40
    assert len(gathered_units(plain, found_layout(plain, Layout()), "block", None)) == 8


class Follows(nn.Module):
    """Its forward pass moves a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.first.parameters():
            parameter.data = parameter.data * 0.9
        return self.last(self.first(x))


class Unfreezes(Follows):
    def forward(self, x: Tensor) -> Tensor:
        self.first.requires_grad_(False)
        return self.last(self.first(x))


class Assigns(Follows):
    def forward(self, x: Tensor) -> Tensor:
        self.first.weight.data = self.first.weight.data * 0.9
        return self.last(self.first(x))


def test_an_assignment_that_leaves_no_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="it assigns the .data of a tensor, which leaves no trace"):
        trace(Assigns(), {""}, "here")


@pytest.mark.parametrize("kind", [Follows, Unfreezes])
def test_a_forward_that_changes_a_parameter_is_not_followed(kind: type[nn.Module]) -> None:
    with pytest.raises(ConfigError, match="the forward pass itself changes the parameter first.weight"):
        trace(kind(), {""}, "here")


def test_torchscript_is_not_followed() -> None:
    with pytest.raises(ConfigError, match="0 is TorchScript, whose code cannot be followed"):
        trace(chain(torch.jit.script(nn.Linear(4, 4))), {""}, "here")  # type: ignore[arg-type]
