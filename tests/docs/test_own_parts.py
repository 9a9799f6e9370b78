"""Parts from outside: what the pages under docs/ show runs as they show it, and a class that is not complete is
refused.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from dtf.api import registry
from dtf.api.lr import Schedule
from dtf.api.observer import Observer
from dtf.api.registry import lookup, register, registered
from dtf.config.settings import load_parts
from dtf.core.errors import ConfigError, Exit
from dtf.core.types import Batch
from tests.conftest import Result
from tests.support.toy import Toy

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
FILE = re.compile(r"^# (\S+\.yaml)(?: +dtf (.*))?$", flags=re.MULTILINE)  # the path, and a command that uses it
SHORT = ["train.steps=2", "launcher.threads=1"]
SHORT_VERIFY = [
    "launcher.threads=1",
    "job.processes=[2]",
    "job.micro_batches=[1]",
    "job.precisions=[fp64]",
    "job.steps=2",
]
SMALL_IMAGES = ["recipe.data.train_rows=64", "recipe.data.eval_rows=16"]

RunDtf = Callable[..., Result]
PAGES.append(PAGES[0].parents[1] / "README.md")  # its recipe runs too


@dataclass(frozen=True)
class Page:
    """The files that a page shows, and its commands that need them."""

    modules: dict[str, str]  # name -> source: its blocks one after the other
    files: dict[str, str]  # path -> YAML
    commands: list[list[str]]
    scripts: tuple[str, ...] = ()  # those of the modules that are run first

    @classmethod
    def read(cls, path: Path) -> Page:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        modules: dict[str, str] = {}
        for language, text in blocks:
            name = re.match(r"# (\w+)\.py\b", text)
            if language == "python" and (name or "@register(" in text):
                assert name, (
                    f"{path.name}: the first line of a block that registers something says in which file it stands"
                )
                modules[name[1]] = modules.get(name[1], "") + text
        files = {found[1]: text for language, text in blocks if language == "yaml" and (found := FILE.search(text))}
        needed = [
            *modules,
            *(Path(file).stem for file, text in files.items() if any(f"plugins: [{name}]" in text for name in modules)),
        ]
        lines = [line for _, text in blocks for line in text.splitlines() if re.match(r"(python -m )?dtf ", line)]
        told = [
            shlex.split(line, comments=True)
            for line in lines
            if any(re.search(rf"\b{name}\b", line) for name in needed) and "error[" not in line
        ]
        scripts = tuple(re.findall(r"^python (\w+\.py)$", path.read_text(), re.MULTILINE))
        return cls(modules, files, [words[words.index("dtf") + 1 :] for words in told], scripts)


@pytest.fixture
def unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Page], None]]:
    """Write a page's files where commands run. What they register is gone after the test."""
    load_parts([])
    own = {
        group: {name: cls for name, cls in found.items() if cls.__module__.startswith("dtf.")}
        for group, found in registry._CLASSES.items()
    }
    monkeypatch.setattr(registry, "_CLASSES", own)  # other tests register parts too
    monkeypatch.syspath_prepend(tmp_path)
    written: list[str] = []

    def write(page: Page) -> None:
        written.extend(page.modules)
        for name, text in page.modules.items():
            sys.modules.pop(name, None)
            (tmp_path / f"{name}.py").write_text(text)
        for name, text in page.files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        for script in page.scripts:
            subprocess.run([sys.executable, script], cwd=tmp_path, check=True)

    yield write
    for name in written:
        sys.modules.pop(name, None)


def named(page: str) -> Page:
    return Page.read(next(path for path in PAGES if path.name == page))


load_parts([])
STRATEGIES = [name for name, cls in registered("strategy").items() if cls.__module__.startswith("dtf.")]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[dict[str, Any]]]:
    """The measurements of the run in one process that all others must equal, once it was made."""
    return {}


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=() if name == "pserver" else pytest.mark.slow) for name in STRATEGIES],
)
def test_the_recipe_in_the_documentation_trains_alike_under_every_strategy(
    strategy: str, unpack: Callable[[Page], None], run_dtf: RunDtf, alone: dict[str, list[dict[str, Any]]]
) -> None:
    unpack(named("own-recipe.md"))
    same = [
        "--config-dir",
        "my",
        "recipe=detector_quick",
        "precision=fp64",
        "step.micro_batch_rows=25",
        "launcher.devices=cpu",
        "launcher.threads=1",
    ]
    short = ["train.steps=3", "train.eval_every=0", "train.log_every=1", "checkpoint=off", "observer=[jsonl]"]

    def measured(*words: str) -> list[dict[str, Any]]:
        run = run_dtf(*same, *short, *words)
        assert run.code == Exit.OK, run.err
        return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]

    found = measured("launcher.processes=2", f"strategy={strategy}")
    expected = alone.get("metrics") or measured("launcher=inline", "strategy=dp")
    alone["metrics"] = expected
    assert len(expected) == 3
    for one, other in zip(expected, found, strict=True):
        assert {name: other[name] for name in ("loss", "top1", "grad_norm")} == pytest.approx(
            {name: one[name] for name in ("loss", "top1", "grad_norm")}, rel=1e-10
        )


def test_the_recipe_in_the_documentation_is_as_short_as_it_says() -> None:
    page = named("own-recipe.md")
    recipe = [page.modules[name] for name in ("make_readings", "my_recipe", "my_model")]
    assert sum(len(text.splitlines()) for text in [*recipe, *page.files.values()]) <= 120


def test_the_short_answers_of_the_documentation_run(unpack: Callable[[Page], None], tmp_path: Path) -> None:
    page = named("own-recipe.md")
    unpack(Page(page.modules, {}, []))
    adapter, noise, block, loss, metrics = (
        importlib.import_module(name)
        for name in ("my_adapter", "my_noise", "my_block", "my_token_loss", "my_token_metrics")
    )

    images, ids = torch.arange(32.0).reshape(4, 1, 2, 4), np.arange(4)
    rows = adapter.rows_of([(image, index) for index, image in enumerate(images)])
    inputs, targets = rows.fetch(np.array([3, 1]), 0)
    assert torch.equal(inputs, images[[3, 1]]) and targets.tolist() == [3, 1] and len(rows) == 4

    once = noise.flipped(images, 0, 1, ids)
    assert torch.equal(once[2:], noise.flipped(images[2:], 0, 1, ids[2:])), "a row does not depend on the others"
    turned = [torch.equal(image, other.flip(-1)) for image, other in zip(images, once, strict=True)]
    assert any(not torch.equal(once, noise.flipped(images, 0, epoch, ids)) for epoch in range(2, 9))
    assert all(turn or torch.equal(image, other) for turn, image, other in zip(turned, images, once, strict=True))

    dropping = block.Block(4, 0.5)
    x = torch.randn(16, 3, 4)
    skipped = [torch.equal(before, after) for before, after in zip(x, dropping(x), strict=True)]
    assert any(skipped) and not all(skipped)

    assert set(importlib.import_module("my_layout").layout(None, None).buffers) == {"quantizer.*", "attention.cache"}
    load = importlib.import_module("my_load")
    model = load.Detector(32, 4, 0.1)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = load.load(tmp_path / "model.safetensors").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())

    sums, counts = loss.token_loss(torch.zeros(2, 3, 4), torch.tensor([[0, 1, -100], [-100, -100, -100]]))
    assert counts.tolist() == [2, 0] and sums.tolist() == pytest.approx([2 * 1.3862944, 0])

    batch = Batch(None, torch.tensor([[0, 1, -100], [-100, -100, -100]]), torch.ones(2), np.arange(2))
    summed = metrics.TokenMetrics().measure(None, batch, sums)
    assert metrics.TokenMetrics().summarise(summed.tolist()) == pytest.approx({"loss": 1.3862944, "bits": 2.0})

    two = importlib.import_module("my_two_tasks")
    tasks, targets = two.TwoTasks(4), torch.tensor([[0.0, 0.5], [3.0, -1.0]])
    losses = two.loss(None, tasks(torch.ones(2, 8)), targets)
    losses.mean().backward()
    assert losses.shape == (2,) and (tasks.log_variances.grad != 0).all()


LONG = "sparse-tables.md"  # its commands start servers; what of it is quick has a test of its own
LIGHTNING = "from-lightning.md"  # it needs what CI does not install
TRANSFORMERS = "from-transformers.md"  # as well
SLOW = [LONG, "own-recipe.md", LIGHTNING, TRANSFORMERS]  # a test above trains the recipe of the second
RUN = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.name in SLOW))
    for path in PAGES
    if Page.read(path).modules
]


@pytest.mark.parametrize("path", RUN)
def test_parts_in_the_documentation_run_as_it_says(
    path: Path, unpack: Callable[[Page], None], run_dtf: RunDtf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.name == LIGHTNING:
        pytest.importorskip("lightning")
        pytest.importorskip("torchmetrics")
    if path.name == TRANSFORMERS:
        pytest.importorskip("transformers")
        pytest.importorskip("datasets")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # it reads Parquet
    page = Page.read(path)
    unpack(page)
    chosen = set()
    for words in page.commands:
        # one that says nothing of processes needs none of its own
        alone = [] if re.search(r"launcher|strategy=|job=", " ".join(words)) else ["launcher=inline"]
        images = [] if any(word.startswith("recipe=") for word in words) else SMALL_IMAGES
        few = [] if any(word.startswith("job.strategies") for word in words) else ["job.strategies=[ddp]"]
        result = run_dtf(*words, *alone, *images, *([*few, *SHORT_VERIFY] if "job=verify" in words else SHORT))
        assert result.code == Exit.OK, (words, result.out, result.err)
        if (result.folder / "config.yaml").exists():
            config = yaml.safe_load((result.folder / "config.yaml").read_text())
            chosen |= {
                (group, node["name"]) for group, node in config.items() if isinstance(node, dict) and "name" in node
            }
            chosen |= {("observer", name) for name in config["observer"]}
    own = {
        (group, name)
        for group in registry.groups()
        for name, cls in registered(group).items()
        if cls.__module__ in page.modules
    }
    assert own and own <= chosen, "each has a command that trains with it"


def test_the_recipe_with_a_sparse_table_in_the_documentation_trains_and_its_commands_compose(
    unpack: Callable[[Page], None], run_dtf: RunDtf
) -> None:
    page = named(LONG)
    unpack(page)
    trained = run_dtf(
        "--config-dir",
        "my",
        "recipe=ads_quick",
        "launcher=inline",
        "strategy=dp",
        "launcher.threads=1",
        "train.steps=40",
        "train.log_every=20",
    )
    assert trained.code == Exit.OK, trained.err
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train"]
    assert losses[-1] < 0.95 * losses[0]
    strategies = [run_dtf(*words, "--cfg", "job") for words in page.commands]
    assert len(strategies) >= 5 and {result.code for result in strategies} == {Exit.OK}


def test_files_in_the_documentation_compose_as_it_says(unpack: Callable[[Page], None], run_dtf: RunDtf) -> None:
    page = named("configuration.md")
    unpack(page)
    told = [found[2] for text in page.files.values() if (found := FILE.search(text)) and found[2]]
    assert len(told) == len(page.files) >= 4
    for words in told:
        result = run_dtf(*shlex.split(words), "--cfg", "job")
        assert result.code == Exit.OK, (words, result.err)


def test_the_optimizer_in_the_documentation_skips_bit_for_bit(unpack: Callable[[Page], None]) -> None:
    unpack(named("own-parts.md"))
    importlib.import_module("my_parts")
    parameters = {"weight": torch.randn(4, 3), "bias": torch.randn(3)}
    bound = lookup("optimizer", "signsgd")(weight_decay=0.1).bind(parameters)
    gradients = [torch.randn(4, 3), torch.randn(3)]
    bound.apply([g.clone() for g in gradients], 0.1, torch.tensor(0.0))
    before = [t.clone() for t in [*parameters.values(), *(state["momentum"] for state in bound.states.values())]]
    torch.testing.assert_close(before[2:], [g * 0.1 for g in gradients])
    bound.apply([torch.full((4, 3), torch.nan), torch.full((3,), torch.inf)], 0.1, torch.tensor(1.0))
    after = [*parameters.values(), *(state["momentum"] for state in bound.states.values())]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_verify_finds_what_the_documentation_says_it_finds(unpack: Callable[[Page], None], run_dtf: RunDtf) -> None:
    page = named("own-parts.md")
    line = "for gradient in gradients:\n                world.average(gradient)"
    assert page.modules["my_parts"].count(line) == 1
    unpack(Page({"my_parts": page.modules["my_parts"].replace(line, "pass")}, page.files, []))
    result = run_dtf("--config-dir", "my", "job=verify", "recipe=moons_fast", "job.strategies=[plain]", *SHORT_VERIFY)
    assert result.code == Exit.BUG
    assert (
        "BREAK" in result.out
        and "ranks 0 and 1 hold different 0.bias: gradients were not summed over all ranks" in result.out
    )


def test_a_class_that_lacks_methods_is_refused() -> None:
    class Half(Observer):
        pass

    class Empty(Schedule):
        pass

    with pytest.raises(ConfigError, match=r"^observer=half: tests\.docs\.test_own_parts\..*Half must define see$"):
        register("observer", "half")(Half)
    with pytest.raises(ConfigError, match=r"^lr=empty: .*Empty must define __call__$"):
        register("lr", "empty")(Empty)
    assert "half" not in registered("observer") and "empty" not in registered("lr")


def test_an_attribute_in_place_of_a_method_is_refused_and_the_reverse() -> None:
    class Named(Toy):
        class_names = ("a", "b")  # type: ignore[assignment]

    class Aimed(Toy):
        def objective(self) -> tuple[str, str]:  # type: ignore[override]
            return ("loss", "min")

    class Inside(Toy):
        @property
        def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
            return ("a", "b")

    for name, cls in (("named", Named), ("inside", Inside)):
        with pytest.raises(
            ConfigError, match=rf"{cls.__name__}\.class_names must be a method: def class_names\(self\)"
        ):
            register("recipe", name)(cls)
    with pytest.raises(ConfigError, match=r"Aimed\.objective must be an attribute, or a method with @property"):
        register("recipe", "aimed")(Aimed)
