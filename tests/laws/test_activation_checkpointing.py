"""Law: what a block forgets and computes again changes no bit of a run; and it does forget."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtf.api.layout import Layout
from dtf.api.options import Remat
from dtf.api.recipe import Recipe
from dtf.api.registry import register
from dtf.core.errors import ConfigError, Exit
from dtf.model.activation_checkpointing import apply_activation_checkpointing, modules_to_checkpoint
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.init import init_model
from dtf.model.memory import Footprint
from dtf.model.seeded_dropout import SeededDropout
from dtf.recipes.resnet.options import ModelOptions
from dtf.recipes.resnet.recipe import ResnetShapes
from tests.conftest import Result
from tests.support.harness import spread, variants
from tests.support.ranks import ranks
from tests.support.residual_toy import Residual
from tests.support.toy import Toy

KINDS = [Remat.blocks, Remat.selective]


@lru_cache(maxsize=64)
def trained(strategy: str, options: str, processes: int, precision: str, remat: Remat) -> str:
    """Metrics, parameters, running averages and optimizer state of a run, every bit of them."""
    recipe = {"name": "residual", "functional": strategy != "tensor"}
    case = {
        "options": json.loads(options),
        "recipe": recipe,
        "plugin": "tests.support.residual_toy",
        "precision": precision,
    }
    return json.dumps(spread(strategy, processes, remat=remat.value, steps=2, **case), sort_keys=True)


def cases() -> list[Any]:
    """By default two processes, no options, and one kind in turn."""
    found = []
    for place, (strategy, options) in enumerate([*variants(), ("fsdp", {"unit": "stage", "prefetch": 2})]):
        for processes, remat in product((1, 2, 3), KINDS):
            usual = (
                processes == 2
                and remat is KINDS[place % 2]
                and not options
                and strategy not in ("dp", "zero1", "fsdp", "tensor")
            )
            found.append(
                pytest.param(
                    strategy,
                    options,
                    processes,
                    remat,
                    id=f"{strategy}-{options}-{processes}-{remat}",
                    marks=() if usual else pytest.mark.slow,
                )
            )
    return found


@pytest.mark.parametrize(("strategy", "options", "processes", "remat"), cases())
def test_no_bit_changes(strategy: str, options: dict, processes: int, remat: Remat) -> None:
    """Batch statistics, masks, accumulation, uneven shares, and a functional dropout where the strategy allows it."""
    text = json.dumps(options)
    assert trained(strategy, text, processes, "fp64", remat) == trained(strategy, text, processes, "fp64", Remat.none)


@pytest.mark.parametrize("remat", KINDS)
@pytest.mark.parametrize(
    "precision",
    ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16_params", "bf16_master", "fp16"))],
)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_no_bit_changes_in_half_formats(strategy: str, precision: str, remat: Remat) -> None:
    assert trained(strategy, "{}", 2, precision, remat) == trained(strategy, "{}", 2, precision, Remat.none)


def residual(remat: Remat) -> tuple[nn.Module, SeededDropout, BatchNormStatistics]:
    recipe = Residual(functional=True)
    model = init_model(recipe, 0).double()
    statistics, masks = BatchNormStatistics(model), SeededDropout(model, 0, torch.device("cpu"))
    names = modules_to_checkpoint(recipe, model, recipe.layout(model), remat)
    apply_activation_checkpointing(model, names, remat, masks)
    return model, masks, statistics


@pytest.mark.parametrize("remat", KINDS)
def test_micro_batches_may_overlap(remat: Remat) -> None:
    """As in a pipeline: the second one's forward comes before the first one's backward, and has other masks and another
    momentum.
    """

    def overlapped(remat: Remat) -> list[torch.Tensor]:
        model, masks, statistics = residual(remat)
        statistics.begin(2, 2, 1)
        sums = []
        for j in range(2):
            masks.begin_micro_batch(0, j)
            statistics.begin_micro_batch(j)
            sums.append(
                model(torch.full((5, 8), 1.0 + j, dtype=torch.float64) * torch.arange(1, 6)[:, None]).square().sum()
            )
        for total in sums[::-1]:  # the state that is left is then not that of the last backward
            total.backward()
        left = [float(masks.key), *(norm.momentum for norm in model.modules() if isinstance(norm, nn.BatchNorm1d))]
        statistics.end()
        return [
            *(p.grad for p in model.parameters() if p.grad is not None),
            *model.buffers(),
            torch.tensor(left),
            torch.get_rng_state(),
        ]

    assert all(a.equal(b) for a, b in zip(overlapped(remat), overlapped(Remat.none), strict=True))


def footprint(model: nn.Module, rows: int) -> Footprint:
    with Footprint() as found:
        model(torch.zeros(rows, 3, 16, 16)).square().sum().backward()
    return found


def test_blocks_forget() -> None:
    """A residual block of ResNet-20 keeps four results; with `blocks` its input, with `selective` also those of its two
    convolutions.
    """
    recipe = ResnetShapes(model=ModelOptions(arch="resnet20", classes=8))
    found = {}
    for remat in Remat:
        model = init_model(recipe, 0)
        names = [name for name, _ in model.named_parameters()]
        blocks = modules_to_checkpoint(recipe, model, recipe.layout(model), remat)
        apply_activation_checkpointing(model, blocks, remat, SeededDropout(model, 0, torch.device("cpu")))
        assert [name for name, _ in model.named_parameters()] == names
        found[remat] = footprint(model, 4)
    whole = found[Remat.none]
    assert whole.recomputed_bytes == 0
    assert found[Remat.blocks].saved_bytes < 0.33 * whole.saved_bytes
    assert found[Remat.blocks].saved_bytes + found[Remat.blocks].recomputed_bytes < 0.5 * whole.saved_bytes
    assert found[Remat.selective].saved_bytes < 0.8 * whole.saved_bytes
    assert found[Remat.selective].recomputed_bytes < found[Remat.blocks].recomputed_bytes


class _Count(TorchDispatchMode):
    """How often operators of a kind run."""

    def __init__(self, counts: Callable[[Any], bool]) -> None:
        super().__init__()
        self.times, self._counts = 0, counts

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.times += self._counts(func)
        return func(*args, **(kwargs or {}))


def test_selective_multiplies_no_matrix_twice() -> None:
    def products(remat: Remat) -> int:
        model, masks, _ = residual(remat)
        masks.begin_micro_batch(0, 0)
        with _Count(lambda operator: operator.name() in ("aten::mm", "aten::addmm")) as count:
            model(torch.ones(4, 8, dtype=torch.float64).cumsum(0)).sum().backward()
        return count.times

    # two layers in each of two blocks
    assert products(Remat.selective) == products(Remat.none) == products(Remat.blocks) - 4


class Gathered(nn.Module):
    """A linear layer over the rows of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist
        from torch.distributed._functional_collectives import all_gather_tensor_autograd

        assert dist.group.WORLD is not None
        return torch.relu(self.last(torch.tanh(all_gather_tensor_autograd(self.first(x), 0, dist.group.WORLD)))).sum()


def gather(rank: int, size: int, remat: str) -> tuple[int, list[Any]]:
    """How often a block gathers in a pass, and its gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(Gathered())
    apply_activation_checkpointing(model, ["0"], Remat(remat), SeededDropout(model, 0, torch.device("cpu")))
    with _Count(lambda operator: operator.name() == "_c10d_functional::all_gather_into_tensor") as count:
        model(torch.ones(3, 4) * (rank + 1)).backward()
    return count.times, [p.grad.tolist() for p in model.parameters() if p.grad is not None]


def test_selective_communicates_once() -> None:
    found = {
        remat: ranks(2, "tests.laws.test_activation_checkpointing:gather", shared=True, remat=remat.value)
        for remat in Remat
    }
    assert [found[remat][0][0] for remat in Remat] == [1, 2, 1]
    assert found[Remat.blocks][1][1] == found[Remat.selective][1][1] == found[Remat.none][1][1]


@pytest.mark.parametrize("remat", KINDS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_runs_plain(mode: Callable[[], Any], remat: Remat) -> None:
    outputs = []
    for kind in (remat, Remat.none):
        model = residual(kind)[0].eval()
        with mode():
            outputs.append(model(torch.ones(4, 8, dtype=torch.float64)))
    assert outputs[0].equal(outputs[1])


class _Around(nn.Module):
    """A block that does something before and after a layer, and keeps a buffer."""

    def __init__(self, before: Any = None, after: Any = None, counts: bool = False) -> None:
        super().__init__()
        self.inner, self._before, self._after, self._counts = nn.Linear(4, 4), before, after, counts
        self.register_buffer("calls", torch.zeros(()))
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._counts:
            self.calls += 1
        x = self._before(x) if self._before else x
        y = self.inner(x)
        return self.last(torch.tanh(self._after(y) if self._after else y))


@pytest.mark.parametrize(
    ("block", "remat", "words"),
    [
        (_Around(before=torch.relu_), Remat.blocks, "0 changes its input in place"),
        (_Around(after=torch.relu_), Remat.selective, "use step.remat=blocks"),
        (_Around(counts=True), Remat.blocks, "0 changes a buffer"),
        (_Around(counts=True), Remat.selective, "0 changes a buffer"),
    ],
)
def test_blocks_that_cannot_be_computed_again_are_refused(block: nn.Module, remat: Remat, words: str) -> None:
    model = nn.Sequential(block)
    apply_activation_checkpointing(model, ["0"], remat, SeededDropout(model, 0, torch.device("cpu")))
    with pytest.raises(ConfigError) as caught:
        model(torch.ones(2, 4, requires_grad=True) * 2).sum().backward()
    assert words in str(caught.value)


def test_a_change_in_place_inside_a_block_is_computed_again() -> None:
    model = nn.Sequential(_Around(after=torch.relu_))
    x = torch.ones(2, 4)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    apply_activation_checkpointing(model, ["0"], Remat.blocks, SeededDropout(model, 0, torch.device("cpu")))
    model(x).sum().backward()
    assert all(
        a.equal(b) for a, b in zip(expected, [p.grad for p in model.parameters() if p.grad is not None], strict=True)
    )


@register("recipe", "without_layout")
class WithoutLayout(Toy):
    """Its blocks are unknown."""

    layout = Recipe.layout


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("without_layout", "Sequential has no module with layers inside of it; name blocks in"),
        ("toy", "names no block that is a module with layers inside"),
    ],
)
@pytest.mark.slow
def test_a_run_that_could_forget_nothing_is_refused(run_dtf: Callable[..., Result], recipe: str, words: str) -> None:
    done = run_dtf(
        f"plugins=[tests.support.toy,{__name__}]",
        f"recipe={recipe}",
        "launcher.processes=1",
        "train.steps=2",
        "step.remat=selective",
    )
    assert done.code == Exit.CONFIG
    assert "step.remat=selective needs blocks to compute again" in done.err and words in done.err


class Plain(Toy):
    """Three layers, in as many blocks as one likes."""

    blocks: tuple[tuple[str, ...], ...] = ()

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4), nn.BatchNorm1d(4))

    def layout(self, model: nn.Module) -> Layout:
        return Layout(self.blocks)


@pytest.mark.parametrize("blocks", [(), (("0",), ("1", "2"))])
def test_a_layout_without_blocks_to_forget_is_refused(
    blocks: tuple[tuple[str, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Plain, "blocks", blocks)
    assert modules_to_checkpoint(Plain(), Plain().build_model(), Layout(blocks), Remat.none) == []
    for remat in KINDS:
        with pytest.raises(ConfigError, match=f"step.remat={remat.value} needs blocks"):
            modules_to_checkpoint(Plain(), Plain().build_model(), Layout(blocks), remat)
