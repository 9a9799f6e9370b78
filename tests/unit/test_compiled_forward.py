"""Compiled modules: which ones, hooks, counts and masks. Code is followed as for a compiler, and computed as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtf.api.options import Compile
from dtf.core.errors import ConfigError
from dtf.model import compiled_forward
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.compiled_forward import compile_modules, uncompiled
from dtf.model.compiled_parts import describe_parts, parts_to_compile
from dtf.model.found_blocks import repeated_blocks
from dtf.model.norm_calls import calls_of
from dtf.model.seeded_dropout import SeededDropout
from dtf.recipes.resnet.model import SmallResNet
from tests.support.toy import Toy


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled_forward, "BACKEND", "aot_eager")
    with torch._dynamo.config.patch():
        yield


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.5) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.linear(self.drop(x)))) + x


def blocks(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(parts or (Block(), Block())))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (blocks(), ["0", "1"]),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), []),  # single layers
        (blocks(Block()), []),  # once
        (nn.ModuleDict({"a": nn.Sequential(Block()), "b": nn.Sequential(Block())}), ["a.0", "b.0"]),
        (blocks(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))), ["0", "1"]),
        (blocks(nn.Sequential(Block(), Block()), nn.Sequential(Block())), ["0.0", "0.1", "1.0"]),
        (SmallResNet(8, 4, 2), ["layer1.0", "layer2.0", "layer3.0"]),
    ],
)
def test_blocks_are_members_of_lists_whose_class_is_there_twice(model: nn.Module, names: list[str]) -> None:
    assert repeated_blocks(model) == names


def test_of_nested_blocks_the_outermost_count() -> None:
    outer = [nn.TransformerEncoderLayer(8, 2), nn.TransformerEncoderLayer(8, 2)]
    for layer in outer:
        layer.parts = nn.ModuleList([Block(), Block()])  # type: ignore[assignment]
    assert repeated_blocks(nn.ModuleList(outer)) == ["0", "1"]


def test_without_repeated_blocks_those_of_the_layout_count_or_none() -> None:
    model = Toy().build_model()
    with pytest.raises(ConfigError, match="finds no blocks in Sequential: .*use step.compile=model, or"):
        parts_to_compile(Compile.blocks, Toy(), model)
    assert parts_to_compile(Compile.model, Toy(), model) == ("",)
    assert parts_to_compile(Compile.off, Toy(), model) == ()


def test_what_is_compiled_already_is_refused() -> None:
    with pytest.raises(ConfigError, match="compiled by its own code already"):
        parts_to_compile(Compile.model, Toy(), nn.Sequential(torch.compile(Block())))  # type: ignore[arg-type]


def test_what_is_compiled_is_told() -> None:
    model = nn.Sequential(Block(), Block())
    assert describe_parts(Compile.blocks, model, ("0", "1")).startswith("blocks: 2 Block;")
    assert describe_parts(Compile.model, model, ("",)).startswith("the whole model (Sequential);")
    assert describe_parts(Compile.off, model, ()) == ""


def passes(model: nn.Module, masks: SeededDropout, statistics: BatchNormStatistics, compiled: bool) -> list[Tensor]:
    """Outputs, gradients and running averages of two steps of two micro-batches."""
    made = compile_modules(model, ["0", "1"], "step.compile=blocks") if compiled else []
    found, x = [], torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for step in range(2):
        statistics.begin(2, 2, 1)
        for j in range(2):
            masks.begin_micro_batch(step, j)
            statistics.begin_micro_batch(j)
            output = model(x + j)
            output.square().mean().backward()
            found.append(output.detach())
        statistics.check_calls("")
        statistics.end()
        statistics.finish(True)
    assert all(forward.called for forward in made)
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def made() -> tuple[nn.Sequential, SeededDropout, BatchNormStatistics]:
    torch.manual_seed(0)
    model = blocks().double().train()
    statistics = BatchNormStatistics(model)
    return model, SeededDropout(model, 0, torch.device("cpu")), statistics


def test_masks_averages_and_counts_are_those_of_the_plain_module() -> None:
    """Also where a block calls one dropout twice, with two masks."""
    plain, compiled = passes(*made(), compiled=False), passes(*made(), compiled=True)
    assert len(plain) == len(compiled)
    for one, other in zip(plain, compiled, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)
    model, masks, statistics = made()
    passes(model, masks, statistics, compiled=True)
    assert masks.calls() == {"0.drop": 2, "1.drop": 2} and calls_of(model[0].norm).learning == 4  # type: ignore[union-attr]


def test_a_module_computes_as_it_is_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that it compiles, in all threads."""
    model, masks, statistics = made()
    forwards = compile_modules(model, ["0", "1"], "step.compile=blocks")
    statistics.begin(1, 1, 1)
    found, x = [], torch.randn(6, 8, dtype=torch.float64)
    for other_compiles in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=other_compiles: value)
        masks.begin_micro_batch(0, 0)
        statistics.begin_micro_batch(0)
        with uncompiled(forwards):
            found.append(model(x))
    assert torch.equal(*found)
    assert masks.calls() == {"0.drop": 2, "1.drop": 2}


def test_names_classes_and_state_stay() -> None:
    model, *_ = made()
    names, kinds = [*model.state_dict()], [type(module) for module in model.modules()]
    compile_modules(model, ["0", "1"], "step.compile=blocks")
    assert [*model.state_dict()] == names and [type(module) for module in model.modules()] == kinds


def test_hooks_within_a_block_are_not_skipped() -> None:
    """Neither one that is there before, on one of two equal blocks, nor one that comes after compilation."""
    model, masks, _ = made()
    seen: list[str] = []
    model[0].linear.register_forward_hook(lambda *_: seen.append("before"))  # type: ignore[union-attr]
    compile_modules(model, ["0", "1"], "step.compile=blocks")
    x = torch.randn(6, 8, dtype=torch.float64)
    masks.begin_micro_batch(0, 0)
    model(x)
    assert seen == ["before"]
    model[1].linear.register_forward_hook(lambda *_: seen.append("after"))  # type: ignore[union-attr]
    masks.begin_micro_batch(0, 1)
    model(x)
    assert seen == ["before", "before", "after"]


def test_nothing_is_compiled_where_that_is_asked() -> None:
    model, masks, _ = made()
    forwards = compile_modules(model, ["0", "1"], "step.compile=blocks")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    masks.begin_micro_batch(0, 0)
    with uncompiled(forwards):
        model(torch.randn(6, 8, dtype=torch.float64))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


def test_inputs_of_too_many_shapes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_forward, "MOST_SHAPES", 2)
    model, masks, _ = made()
    compile_modules(model, ["0"], "step.compile=blocks")
    with pytest.raises(ConfigError, match=r"has compiled modules like 0 \(Block\) \d+ times, .*; pad inputs"):
        for rows in (4, 5, 6):
            masks.begin_micro_batch(rows, 0)
            model(torch.randn(rows, 8, dtype=torch.float64))


def assigned() -> nn.Module:
    block = Block()
    block.linear.forward = lambda x: x  # type: ignore[method-assign]
    return block


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(4, track_running_stats=True)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        (assigned(), "forward of 0.linear was assigned to the object"),
        (Averaged(), r"cannot compile 0 \(Averaged\): an instance normalisation in it keeps running averages"),
        (nn.Module(), "needs 0 in one piece, and the stages are cut inside it"),
    ],
)
def test_modules_that_cannot_be_compiled_are_refused(block: nn.Module, words: str) -> None:
    model: Any = nn.Sequential(block)
    BatchNormStatistics(model)
    with pytest.raises(ConfigError, match=words):
        compile_modules(model, ["0"], "step.compile=blocks")


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        return y + torch.randn_like(y)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [
        torch.contiguous_format,
        pytest.param(
            torch.channels_last,
            marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="the compiler is wrong, as a first step finds"),
        ),
    ],
)
def test_machine_code_draws_in_the_order_in_which_images_lie(
    form: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(compiled_forward, "BACKEND", "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = nn.Sequential(Noisy()), torch.randn(4, 6, 8, 8).contiguous(memory_format=form)
    torch.manual_seed(0)
    plain = model(x)
    compile_modules(model, ["0"], "step.compile=blocks")
    torch.manual_seed(0)
    assert torch.allclose(model(x), plain, atol=1e-5)


def test_the_options_of_the_compiler_are_afterwards_as_before() -> None:
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    def options() -> list[Any]:
        dynamo = torch._dynamo.config
        chosen = [dynamo.recompile_limit, dynamo.skip_nnmodule_hook_guards, functorch.enable_autograd_cache]
        return [*chosen, inductor.fallback_random, inductor.deterministic, inductor.cpp.threads]

    with compiled_forward.compiler_options_kept():
        pass  # other tests have set some
    before = options()
    with compiled_forward.compiler_options_kept():
        compiled_forward.configure("cpu", 3, 2)
        compiled_forward.configure("cpu", 3, 4)
        assert options()[0] == 4 * compiled_forward.MOST_SHAPES and options()[-1] == 3
    assert options() == before
