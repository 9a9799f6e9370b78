"""A LightningModule as a recipe, with Lightning's hooks alone: keys, refusals, learning rates, sums. What Lightning
itself computes is compared in tests/laws/test_lightning.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dtf.adapters.lightning import LightningRecipe, lightning_recipe
from dtf.adapters.lightning_data import LoaderRows
from dtf.adapters.lightning_module import Records
from dtf.adapters.lightning_parts import ModuleOptimizer, ModuleSchedule
from dtf.api import registry
from dtf.api.sampler import Tail
from dtf.config.settings import load_parts
from dtf.core.errors import ConfigError
from dtf.model.freeze import freeze

STAND_IN = Path(__file__).parents[1] / "support" / "stand_in"
STANDS_IN = importlib.util.find_spec("lightning") is None or importlib.util.find_spec("torchmetrics") is None
if STANDS_IN:
    sys.path.append(str(STAND_IN))

from tests.support import lit_small  # noqa: E402  after its stand-in

SMALL, ODD = "tests.support.lit_small", "tests.support.lit_odd"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the recipe of a module, as a run of some epochs has it. What it registers is forgotten."""
    load_parts([])
    clean = registry._CLASSES

    def make(module: str, data: str = "Points", batch: int = 16) -> LightningRecipe:
        monkeypatch.setattr(registry, "_CLASSES", {group: dict(known) for group, known in clean.items()})
        lightning_recipe("small", module=module if ":" in module else f"{SMALL}:{module}", data=f"{SMALL}:{data}")
        made = {group: registry.lookup(group, "small")() for group in ("recipe", "optimizer", "lr", "sampler")}
        settings = SimpleNamespace(
            **made, seed=0, job=SimpleNamespace(trains=True), step=SimpleNamespace(batch_size=batch),
            train=SimpleNamespace(steps=None, epochs=2.0),
        )  # fmt: skip
        made["recipe"].join(settings)
        found: LightningRecipe = made["recipe"]
        return found

    return make


def test_the_command_line_reads_the_line_of_a_plugin_without_torch(tmp_path: Path) -> None:
    plugin = tmp_path / "my_plugin.py"
    plugin.write_text(f'import dtf\n\ndtf.lightning_recipe("small", module="{SMALL}:Net", data="{SMALL}:Points")\n')
    code = (
        "import sys\nfrom dtf.config.compose import compose\n"
        "config = compose(['plugins=[my_plugin]', 'recipe=small', 'recipe.model.width=4']).config\n"
        "assert not {'torch', 'numpy', 'lightning', 'torchmetrics'} & set(sys.modules)\n"
        "print(config['recipe'], config['step']['batch_size'], config['lr']['name'], config['sampler']['name'])\n"
    )
    places = [str(tmp_path), str(Path(__file__).parents[2]), str(STAND_IN)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {places}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "'width': 4" in done.stdout
    assert "'path': './'" in done.stdout
    assert done.stdout.split("}")[-1].split() == ["16", "small", "small"]


def test_a_file_that_starts_from_the_recipe_gets_what_goes_with_it(tmp_path: Path) -> None:
    """The optimizer, the schedule, the sampler and the batch size of the module, where the file chooses no others."""
    (tmp_path / "my_plugin.py").write_text(
        f'import dtf\n\ndtf.lightning_recipe("small", module="{SMALL}:Net", data="{SMALL}:Points")\n'
    )
    files = {
        "plain": "# @package _global_\ndefaults: [schema/small@recipe, _self_]\nrecipe: {model: {width: 4}}\n",
        "here": "defaults: [schema/small@_here_, _self_]\nmodel: {width: 4}\n",
        "other": "# @package _global_\ndefaults: [schema/small@recipe, _self_, override /lr: constant]\n"
        "recipe: {model: {width: 4}}\nstep: {batch_size: 8}\n",
    }
    for name, text in files.items():
        (tmp_path / "my" / "recipe").mkdir(parents=True, exist_ok=True)
        (tmp_path / "my" / "recipe" / f"{name}.yaml").write_text(text)
    code = (
        "import sys, json\nfrom dtf.config.compose import compose\n"
        "for option, *more in json.loads(sys.argv[1]):\n"
        "    made = compose(['--config-dir', 'my', 'plugins=[my_plugin]', f'recipe={option}', *more])\n"
        "    config, said = made.config, made.sources('step.batch_size')[-1]\n"
        "    parts = [config[group]['name'] for group in ('recipe', 'optimizer', 'lr', 'sampler')]\n"
        "    print(*parts, config['recipe']['model']['width'], config['step']['batch_size'], said.place)\n"
    )
    asked = [["plain"], ["here"], ["other"], ["plain", "optimizer=adamw", "lr=cosine", "step.batch_size=32"]]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}:{STAND_IN}"}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(asked)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "small small small small 4 16 the class my_plugin.Net.presets",
        "small small small small 4 16 the class my_plugin.Net.presets",
        "small small constant small 4 8 my/recipe/other.yaml",
        "small adamw cosine small 4 32 on the command line",
    ]


@pytest.mark.parametrize(
    ("module", "data", "said"),
    [
        ("Manual", "Points", "automatic_optimization=False"),
        ("TwoOptimizers", "Points", "returned 2 optimizers"),
        (
            "OtherOptimizer",
            "Points",
            "Rprop; those that are taken .* or choose optimizer=rprop in its place",
        ),
        ("Amsgrad", "Points", r"Adam\(amsgrad=True\)"),
        ("OnPlateau", "Points", "ReduceLROnPlateau"),
        ("StepsItself", "Points", r"overrides optimizer_step\(\)"),
        ("BatchEnd", "Points", r"overrides on_train_batch_end\(\)"),
        ("UsesEpoch", "Points", "self.current_epoch is not known"),
        ("UsesBatchNumber", "Points", "batch_idx is not known"),
        ("AsksTrainer", "Points", "self.trainer.callbacks is not known"),
        ("KeepsRows", "Points", "keeps what its steps compute in self.outputs"),
        ("CoolsDown", "Points", r"on_train_epoch_end\(\) changes self.temperature"),
        ("MovesWeights", "Points", r"on_validation_epoch_end\(\) changes self.net.0.weight"),
        ("KeepsAllRows", "Points", "keeps all rows in its state"),
        ("NoLoss", "Points", "training_step returned None"),
        ("Decayed", "Points", "unused.weight gets no gradient"),
        ("SumLoss", "Points", "no mean over rows"),
        ("ClassWeights", "Points", "no mean over rows"),
        ("Contrast", "Points", "no mean over rows"),
        ("OtherRows", "Points", "batch_size=3. in a batch of 16 rows"),
        ("LogsSum", "Points", "reduce_fx='sum'"),
        ("LogsNoMean", "Points", "logs 'largest', which is no mean over rows"),
        (f"{ODD}:ManualInSetup", "Points", "automatic_optimization=False"),
        (f"{ODD}:Freezes", "Points", r"on_validation_epoch_end\(\) changes self.net.0.weight"),
        (f"{ODD}:Rescales", "Points", r"on_train_epoch_end\(\) changes self.net.0.weight"),
        (f"{ODD}:EvalItself", "Points", "puts itself into evaluation mode"),
        (f"{ODD}:HookedOptimizer", "Points", "an optimizer with step hooks"),
        (f"{ODD}:LogsText", "Points", r"self.log\('name'\) got a str; log single numbers"),
        (f"{ODD}:LogsNewMetric", "Points", "that is made in the step"),
        (f"{ODD}:LogsWrapper", "Points", "is made of others, and has no sums of its own"),
        (f"{ODD}:HidesState", "Points", r"keeps what update\(\) computes in self.best"),
        (
            f"{ODD}:AveragesState",
            "Points",
            r"a state ema with dist_reduce_fx='sum' that update\(\) does more to than add",
        ),
        ("Net", "StreamData", "Stream gives rows in an order of its own"),
        ("Net", "WeightedData", "has the sampler WeightedRandomSampler"),
        ("Net", "TextsData", "1.0 is a str"),
        ("Net", "DropsLast", "drop_last=True, and an evaluation counts each row"),
        ("Net", "OtherBatch", "has batches of 12 rows"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(recipe: Any, module: str, data: str, said: str) -> None:
    made = recipe(module, data)
    with pytest.raises(ConfigError, match=said):  # as a run comes to it
        made.build_model()
        assert made.train_metrics
        made.loss_mean(True)


SHARED, ACTIVATION = torch.nn.Linear(6, 3), torch.nn.ReLU()


def of_shared(**arguments: Any) -> Any:
    """A part of it is made once, outside."""
    module = lit_small.Net(**arguments)
    module.net[-1] = SHARED
    return module


def of_activation(**arguments: Any) -> Any:
    """As where it is the default of an argument."""
    module = lit_small.Net(**arguments)
    module.net[2] = ACTIVATION
    return module


def test_a_module_is_made_anew_each_time(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe("Net")
    monkeypatch.setattr(type(made), "module_target", staticmethod(of_shared))
    with pytest.raises(ConfigError, match=r"of_shared\(\) gives net.4 that it gave before; a rank makes several"):
        assert made.build_model() and made.train_metrics
    made = recipe("Net")
    monkeypatch.setattr(type(made), "module_target", staticmethod(of_activation))
    assert made.build_model() and made.train_metrics
    with pytest.raises(ConfigError, match="module is an object, of Net; give its class, or a function that makes one"):
        lightning_recipe("other", module=lit_small.Net())


def test_a_module_that_is_right_is_taken(recipe: Any) -> None:
    made = recipe("Net")
    model = made.build_model()
    assert isinstance(model, lit_small.Net)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in lit_small.Net().named_parameters()]
    assert made.loss_mean(True) == "labels"  # cross_entropy leaves out labels -100
    assert recipe("SumLoss").loss_mean(False) == ""  # nothing is divided
    assert recipe("Masks").loss_mean(True) == "labels"  # rows draw alike in the trial
    assert made.run.train.drop_last
    assert made._settings.sampler.tail is Tail.drop


def test_a_module_is_where_its_parameters_are(recipe: Any) -> None:
    """Strategies may move them one by one, so that what Lightning remembers is not asked."""
    model = recipe("Net").build_model()
    assert model.device.type == "cpu"
    assert torch.nn.Module.to(model, "meta").device.type == "meta"


def test_a_group_of_its_own_may_hold_what_does_not_learn(recipe: Any) -> None:
    """By the module, or by `recipe.model.freeze`: its factor is none that the config names in vain."""
    made = recipe("SlowBackbone")
    made.build_model()
    assert made._settings.optimizer.lr_factors == pytest.approx({"net.0.weight": 0.1})
    made = recipe("SlowBackbone")
    made.model.freeze = ["net.0"]
    made.build_model()
    assert made._settings.optimizer.lr_factors == {}


@pytest.mark.parametrize(
    ("logged", "returned", "loss"),
    [
        ({"kl_loss": 1.0, "val/loss": 2.0, "acc": 3.0}, None, 2.0),
        ({"kl_loss": 1.0, "acc": 3.0}, torch.tensor(4.0), 4.0),
        ({"acc": 3.0, "loss_of_reconstruction": 1.0}, None, 1.0),
        ({"acc": 3.0}, torch.tensor([1.0, 2.0]), None),
    ],
)
def test_the_loss_of_an_evaluation_is_no_part_of_it(logged: Any, returned: Any, loss: float | None) -> None:
    records = Records(torch.nn.Linear(1, 1), trains=False, rows=4)
    for name, value in logged.items():
        records.log(name, value)
    records.close(returned)
    assert (records.loss is None) if loss is None else float(records.loss) == loss  # type: ignore[arg-type]


def test_a_run_goes_on_with_the_order_of_its_loader_alone(recipe: Any) -> None:
    """A loader that shuffles no more has other rows in the middle of an epoch: what checkpoints hold differs."""
    made = [recipe("Net", data) for data in ("Points", "InOrder", "Points")]
    told = [each.open_data("train", 0).fingerprint() + each._settings.sampler.fingerprint() for each in made]
    assert told == ["TensorDataset 96, shuffled, tail=drop", "TensorDataset 96, in order, tail=partial", told[0]]


def test_parts_that_the_author_put_into_evaluation_mode_stay_there(recipe: Any) -> None:
    """As in Lightning: their batch statistics do not change, and nothing in them is dropped."""
    model = recipe(f"{ODD}:FrozenBody").build_model()
    model.eval().train()
    assert {name: part.training for name, part in model.net.named_children()} == {
        "0": False, "1": False, "2": True, "3": False, "4": True
    }  # fmt: skip
    assert type(model.net[0]) is not torch.nn.Linear and isinstance(model.net[0], torch.nn.Linear)
    copy = deepcopy(model).train()
    assert not copy.net[1].training and copy.net.training
    freeze(model, ["net.1"])  # it may be named in recipe.model.freeze, too
    assert not model.train().net[1].training


def test_logs_of_parts_add_up_to_those_of_all_rows(recipe: Any) -> None:
    made = recipe("Net")
    model = made.build_model().eval()
    inputs, targets = made.open_data("eval", 0).fetch(np.arange(40), 0)
    weight = torch.ones(40)

    def sums(first: int, end: int) -> Any:
        outputs = model({name: tensor[first:end] for name, tensor in inputs.items()})
        return made.measure(outputs, SimpleNamespace(weight=weight[first:end]), None)

    with torch.no_grad():
        whole, parts = sums(0, 40), sums(0, 7) + sums(7, 30) + sums(30, 40)
        right = (model.net(inputs["0"]).argmax(1) == targets).float().mean()
    values, others = made.summarise(whole.tolist()), made.summarise(parts.tolist())
    assert values == pytest.approx(others, rel=1e-6)
    assert values["val_acc"] == pytest.approx(float(right))
    assert values["loss"] == values["val_loss"]
    assert "train_loss" not in values
    padding = made.measure(model(inputs), SimpleNamespace(weight=torch.zeros(40)), None)
    assert not padding.any()


def test_a_metric_of_training_counts_each_row_and_its_beginning_once(recipe: Any) -> None:
    made = recipe("TrainMetric")
    model = made.build_model()
    assert made.loss_mean(True) == "labels"  # cutting the rows, metrics are those of each part
    inputs, _ = made.open_data("train", 0).fetch(np.arange(32), 0)
    parts = [{name: tensor[first:end] for name, tensor in inputs.items()} for first, end in ((0, 20), (20, 32))]
    sums = [made.measure(model(part), SimpleNamespace(weight=torch.ones(len(part["1"]))), None) for part in parts]
    assert made.summarise((sums[0] + sums[1]).tolist())["counted"] == 33


def test_what_is_in_no_group_does_not_learn(recipe: Any) -> None:
    learning = [name for name, p in recipe("TrainMetric").build_model().named_parameters() if p.requires_grad]
    assert learning == ["net.4.weight", "net.4.bias"]


def test_rows_draw_the_same_however_they_are_fetched(recipe: Any) -> None:
    rows = recipe("Net", "noisy_loaders").open_data("train", 0)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one, _ = rows.fetch(np.array([4, 9, 2]), 1)
    two, _ = rows.fetch(np.array([9, 4]), 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one["0"][:2].flip(0), two["0"])
    assert not torch.equal(rows.fetch(np.array([4]), 2)[0]["0"][0], one["0"][0])


def test_a_collate_function_may_pad_and_draw() -> None:
    """It gets the rows of a micro-batch, so that this is a function of their numbers."""
    train, last = lit_small.padded_loaders()
    rows = LoaderRows(train, "train_dataloader()", 0)
    labels = torch.stack([label for _, label in train.dataset])
    short, long = np.flatnonzero(labels == 0)[:2], np.flatnonzero(labels == 2)[:2]
    state = torch.get_rng_state()
    one, _ = rows.fetch(short, 0)
    two, _ = rows.fetch(long, 0)
    assert (one["0"].shape, two["0"].shape) == ((2, 2), (2, 4))
    assert torch.equal(one["0"], rows.fetch(short, 0)[0]["0"])
    assert not torch.equal(one["0"], rows.fetch(short, 1)[0]["0"])
    assert torch.equal(torch.get_rng_state(), state)
    assert rows.shapes_vary and not LoaderRows(last, "val_dataloader()", 0).shapes_vary
    with pytest.raises(ConfigError, match="leave shapes_vary out, so that each micro-batch is collated by itself"):
        LoaderRows(train, "train_dataloader()", 0, shapes_vary=False).fetch(short, 0)


def test_a_missing_library_is_named_with_the_command_that_gets_it(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = recipe("Net")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install lightning torchmetrics"):
        made.check()


def test_another_optimizer_may_be_chosen_but_not_with_the_modules_schedule(recipe: Any) -> None:
    made = recipe("Net")
    made._settings.optimizer = registry.lookup("optimizer", "adamw")()
    with pytest.raises(ConfigError, match="choose a schedule too"):
        made.check()
    made._settings.lr = registry.lookup("lr", "constant")()
    made.check()
    assert isinstance(made.build_model(), lit_small.Net)
    assert isinstance(registry.lookup("optimizer", "small")(), ModuleOptimizer)
    assert isinstance(registry.lookup("lr", "small")(), ModuleSchedule)


def test_two_ranks_train_it_and_go_on(tmp_path: Path, run_dtf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line: read, tried, divided, saved, resumed."""
    load_parts([])
    monkeypatch.setattr(registry, "_CLASSES", {group: dict(known) for group, known in registry._CLASSES.items()})
    monkeypatch.syspath_prepend(tmp_path)
    plugin = tmp_path / "lit_plugin.py"
    plugin.write_text(f'import dtf\n\ndtf.lightning_recipe("small", module="{SMALL}:Net", data="{SMALL}:Points")\n')
    words = ["plugins=[lit_plugin]", "recipe=small", "train.epochs=2", "launcher.processes=2", "launcher.devices=cpu"]
    for until in ("train.until=4", "train.until=null"):
        done = run_dtf(*words, "observer=[jsonl]", until, folder=tmp_path / "run")
        assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["split"] == "eval"]
    assert [line["step"] for line in evaluated][-1] == 12
    assert {"loss", "val_loss", "val_acc"} <= set(evaluated[-1])
