"""A model cut into stages computes what it computed whole, bit for bit, and stages hold its parts under their own
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.init import construct, init_model
from dtf.model.seeded_dropout import SeededDropout
from dtf.recipes.resnet.options import ModelOptions, Stem
from dtf.recipes.resnet.recipe import ResnetShapes
from dtf.strategies.pipeline.graph_split import GraphSplit, Weights
from tests.support.toy import Toy


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine take longer than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Mlp(nn.Module):
    """Blocks in blocks, changes in place between them, and a parameter and a buffer of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)), nn.Tanh(), nn.Sequential(nn.Linear(6, 6))
        )
        self.head = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.full((6,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x * 2)
        y += self.shift
        return self.head(y * self.scale).view(x.size(0), 3)


class Skip(nn.Module):
    """A value that is used three blocks later, where it is changed in place, and again after that."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(5))

    def forward(self, x: Tensor) -> dict[str, Any]:
        early = y = self.layers[0](x)
        for layer in self.layers[1:4]:
            y = layer(torch.relu(y))
        early += y
        return {"y": self.layers[4](early), "parts": [early.detach()]}


class Asking(nn.Module):
    """A block whose forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


class Towers(nn.Module):
    """Inputs by name, one of them integers and one used late."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.bottom, self.top = nn.Embedding(7, 4), Asking(), nn.Linear(4, 2)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        ids = self.table(inputs["ids"]).mean(1)
        return self.top(torch.sigmoid(self.bottom(inputs["dense"]) * ids)) + inputs["offset"]


class Tied(nn.Module):
    """A weight and a buffer that the first and the last block use, and a layer that is called again later."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("shift", torch.full((4,), 0.5))

    def forward(self, x: Tensor, mask: Tensor | None = None, tokens: bool = True, **more: Any) -> Tensor:
        h = self.embed(x) * self.shift + torch.arange(x.shape[1], device=x.device)[:, None]
        if tokens and mask is None:
            h = torch.cat([self.out.bias.expand(len(x), len((x,)), -1), h], 1)
        h = self.body(torch.tanh(self.out(torch.tanh(self.body(h)))))
        return nn.functional.linear(h + self.shift, self.embed.weight)


class Resnet(ResnetShapes):
    def __init__(self, arch: str, stem: str = "cifar") -> None:
        super().__init__(model=ModelOptions(arch=arch, stem=Stem[stem]))


def of_recipe(recipe: Recipe, sample: Tensor) -> tuple[nn.Module, Sequence[Sequence[str]], Tensor]:
    model = init_model(recipe, 0)
    return model, recipe.layout(model).blocks, sample


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, Callable[[], tuple[nn.Module, Sequence[Sequence[str]], Any]]] = {
    "resnet8": lambda: of_recipe(Resnet("resnet8"), random(2, 3, 8, 8)),
    "resnet18": lambda: of_recipe(Resnet("resnet18", "imagenet"), random(2, 3, 32, 32)),
    "resnet50": lambda: of_recipe(Resnet("resnet50", "imagenet"), random(2, 3, 32, 32)),
    "toy": lambda: of_recipe(Toy(), random(4, 8)),
    "mlp": lambda: (Mlp(), [["body.0"], ["body.2"], ["head"]], random(4, 6)),
    "skip": lambda: (Skip(), [[f"layers.{i}"] for i in range(5)], random(4, 5)),
    "towers": lambda: (
        Towers(),
        [["table"], ["bottom"], ["top"]],
        {"ids": torch.arange(6).view(2, 3), "dense": random(2, 4), "offset": random(2, 2)},
    ),
}
CASES["tied"] = lambda: (Tied(), [["embed"], ["body"], ["out"]], torch.arange(6).view(2, 3))
COARSE = [(name, False) for name in CASES if name != "resnet50"]
FINE = [(name, True) for name in CASES if name not in ("resnet18", "towers")]  # of towers one block cannot be traced


def run(stages: list[nn.Module], sample: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients and buffers after one forward and backward pass, each stage for itself as on a rank of its
    own.
    """
    live: Sequence[Any] = (sample,)
    passes = []
    for stage in stages:
        inputs = [
            value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in live
        ]
        passes.append((inputs, stage(*inputs)))
        live = passes[-1][1]
    outputs = passes[-1][1]
    roots = [outputs["y"] if isinstance(outputs, dict) else outputs]
    gradients = [random(*roots[0].shape)]
    for inputs, made in reversed(passes):
        if made is not outputs:
            roots = [value for value in made if value.requires_grad]
        torch.autograd.backward(roots, gradients)
        gradients = [
            torch.zeros_like(v) if v.grad is None else v.grad
            for v in inputs
            if isinstance(v, Tensor) and v.requires_grad
        ]
    parameters = {name: p.grad for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
    return outputs, parameters, {name: b.clone() for stage in stages for name, b in stage.named_buffers()}


def cuts(count: int) -> Iterator[list[int]]:
    """Every block for itself, then two stages in up to five ways."""
    yield list(range(count + 1))
    yield from ([0, cut, count] for cut in range(1, count, -(-count // 5)))


@pytest.mark.parametrize(
    ("name", "fine"),
    [*COARSE, *(pytest.param(*case, marks=pytest.mark.slow if case[0] == "resnet50" else ()) for case in FINE)],
)
def test_any_cut_computes_the_same(name: str, fine: bool) -> None:
    """Outputs, gradients and running averages, bit for bit; with dropout, whose layers keep their names."""
    model, blocks, sample = CASES[name]()
    split = GraphSplit(model, blocks, fine)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def result(stages: list[nn.Module]) -> Any:
        model.load_state_dict(before)
        model.zero_grad()
        for stage in stages:
            SeededDropout(stage, 5, torch.device("cpu")).begin_micro_batch(1, 2)
            for layer in stage.modules():  # which may be seeded since an earlier cut
                if "_masks" in vars(layer):
                    layer._masks.begin_micro_batch(1, 2)  # type: ignore[operator,union-attr]
        return run(stages, sample)

    whole = result([model])
    for bounds in cuts(len(split)):
        parts = result([split.segment(*ends) for ends in pairwise(bounds)])
        same = tree_map(torch.equal, whole, parts)
        assert all(tree_leaves(same)), (bounds, same)


@pytest.mark.parametrize(("name", "fine"), [*COARSE, *FINE])
def test_segments_share_out_the_model(name: str, fine: bool) -> None:
    """Each parameter and buffer is in the segments that use it, as the very same object and under its own name, also
    in what is saved.
    """
    model, blocks, _ = CASES[name]()
    split = GraphSplit(model, blocks, fine)
    segments = [split.segment(i, i + 1) for i in range(len(split))]
    shared = {key: blocks for key, blocks in split.uses.items() if len(blocks) > 1}
    for names in (nn.Module.named_parameters, nn.Module.named_buffers):
        parts = [pair for segment in segments for pair in names(segment)]
        copies = sum(len(blocks) - 1 for key, blocks in shared.items() if key in dict(parts))
        assert len(parts) == len(dict(parts)) + copies
        assert {k: id(v) for k, v in parts} == {k: id(v) for k, v in names(model)}
    assert {key for segment in segments for key in segment.state_dict()} == model.state_dict().keys()
    modules = dict(model.named_modules())
    assert all(
        part is modules[key] or type(part) is Weights  # it holds a weight that a block uses without its module
        for segment in segments
        for key, part in segment.named_modules()
        if part._parameters and key
    )


def test_blocks_are_named_after_their_modules() -> None:
    recipe = Resnet("resnet8")
    model = construct(recipe)
    assert GraphSplit(model, recipe.layout(model).blocks).names == [
        "conv1+bn1",
        "layer1.0",
        "layer2.0",
        "layer3.0",
        "fc",
    ]
    assert GraphSplit(model, recipe.layout(model).blocks, fine=True).names[:3] == [
        "conv1+bn1",
        "layer1.0.conv1+bn1",
        "layer1.0.conv2+bn2",
    ]


def test_a_fine_cut_divides_blocks_between_convolutions() -> None:
    recipe = Resnet("resnet50")
    model = construct(recipe)
    names = GraphSplit(model, recipe.layout(model).blocks, fine=True).names
    assert len(names) == sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
    assert {"layer2.0.downsample.0+1", "layer4.2.conv3+bn3"} <= set(names)


def test_the_model_stays_as_it_is() -> None:
    model, blocks, sample = CASES["toy"]()
    norm, dropout = model.get_submodule("1"), model.get_submodule("3")
    dropout.eval()
    modes, keys = [module.training for module in model.modules()], set(vars(model))
    split = GraphSplit(model, blocks)
    assert [module.training for module in model.modules()] == modes and set(vars(model)) == keys
    segment = split.segment(0, 1)
    assert segment.eval()(sample)[0].equal(segment(sample)[0])  # no dropout
    assert not norm.training and segment.train() and norm.training


def test_layers_are_found_in_segments_by_their_names() -> None:
    model, blocks, _ = CASES["toy"]()
    segment = GraphSplit(model, blocks).segment(0, 1)
    SeededDropout(segment, 0, torch.device("cpu"))
    assert type(segment.get_submodule("3")).__name__ == "SeededDropout"
    assert BatchNormStatistics(segment).counters() == {"1.num_batches_tracked": 0}


def test_a_chain_on_meta_can_be_filled_in_place() -> None:
    recipe = Resnet("resnet8")
    with torch.device("meta"):
        model = recipe.build_model()
    segment = GraphSplit(model, recipe.layout(model).blocks).segment(1, 3)
    segment.to_empty(device="cpu")
    assert {p.device.type for p in segment.parameters()} == {"cpu"} and model.get_parameter("fc.weight").is_meta


# ---------------------------------------------------------------- what cannot be cut


class Made(nn.Module):
    """Two layers and a forward that a test gives."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self._forward = forward
        self.plain = [torch.ones(3)]

    def forward(self, x: Tensor) -> Any:
        return self._forward(self, x)


class TwoArguments(Made):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.b(self.a(x)) + y


def straight(model: Any, x: Tensor) -> Tensor:
    return model.b(model.a(x))


class Drawing(Made):
    """Its first layer draws, and so counts its calls."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(forward)
        self.a, self.b = (nn.Sequential(nn.Linear(3, 3), drop) for drop in [nn.Dropout(0.5)] * 2)  # type: ignore


class Shifting(Made):
    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(forward)
        self.register_buffer("shift", torch.zeros(3))
        self.a = nn.Sequential(self.a, nn.BatchNorm1d(3))  # type: ignore


def once_more(model: Any, x: Tensor) -> Tensor:
    return model.b(model.a(x))


def changed(model: Any, x: Tensor) -> Tensor:
    x = model.a(x)
    model.shift.add_(x.detach().mean(0))
    return model.b(x) + model.shift


def without_gradient(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = torch.relu(model.a(x))
    return model.b(x)


AB = [["a"], ["b"]]
REFUSED: dict[str, tuple[Callable[[], nn.Module], Sequence[Sequence[str]], str]] = {
    "no blocks": (lambda: Made(straight), [], "no module of it that has parameters is called"),
    "order": (lambda: Made(straight), [["b"], ["a"]], "its forward comes to b after a"),
    "back again": (lambda: Drawing(lambda m, x: m.a(m.b(m.a(x)))), AB, "its forward comes to a after b"),
    "never": (lambda: Made(lambda m, x: m.a(x)), AB, "its forward does not come to b"),
    "outside": (
        lambda: Made(lambda m, x: m.a(x)),
        [["a"]],
        "its forward does not use b.weight, b.bias; leave them out",
    ),
    "one dropout": (lambda: Drawing(once_more), AB, "a Dropout of b is called in two blocks, and its masks depend on"),
    "changed": (lambda: Shifting(changed), AB, "shift changes in a pass and is used in two blocks, a and b"),
    "values": (lambda: Made(lambda m, x: m.b(m.a(x)) if x.sum() > 0 else x), AB, "its forward cannot be followed: "),
    "training": (
        lambda: Made(lambda m, x: m.b(m.a(x)) * (2 if m.training else 1)),
        AB,
        "its forward asks for self.training",
    ),
    "dropout": (lambda: Made(lambda m, x: m.b(nn.functional.dropout(m.a(x), 0.5))), AB, "draws from a generator"),
    "no_grad": (lambda: Made(without_gradient), AB, "a runs under torch.no_grad"),
    "constant": (lambda: Made(lambda m, x: m.b(m.a(x)) + m.plain[0]), AB, "no buffer and not made of its inputs"),
    "alone": (lambda: Made(lambda m, x: m.b(x) + next(m.parameters()).sum()), AB, "from parameters alone"),
    "again": (lambda: Shifting(lambda m, x: checkpoint(m.a, x, use_reentrant=False)), [["a.0"]], "utils.checkpoint"),
    "arguments": (lambda: TwoArguments(straight), AB, "its forward takes 2 arguments (x, y)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_change_when_cut_is_refused(case: str) -> None:
    make, blocks, words = REFUSED[case]
    model = make()
    keys = set(vars(model))
    with pytest.raises(ConfigError) as caught:
        GraphSplit(model, blocks)
    assert words in str(caught.value)
    assert model.training and set(vars(model)) == keys


class Counter(nn.Module):
    """Counts its passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.layer(x)


def test_a_trace_leaves_buffers_as_they_were() -> None:
    """One that looks inside of the block runs the line that counts."""
    model = nn.Sequential(Counter(), nn.Linear(8, 8))
    with pytest.raises(ConfigError, match="the forward pass changes the buffer 0.passes"):
        GraphSplit(model, (("0",), ("1",)), fine=True)
    assert model.get_buffer("0.passes") == 0


def test_a_block_that_asks_for_values_can_be_cut_around_but_not_inside() -> None:
    model, blocks, _ = CASES["towers"]()
    with pytest.raises(ConfigError, match="cannot be followed: .* inside of blocks; cut only between them"):
        GraphSplit(model, blocks, fine=True)
