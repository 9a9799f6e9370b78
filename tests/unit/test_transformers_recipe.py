"""A model of transformers as a recipe, with small stand-ins for its models: keys, losses, refusals. What
transformers itself computes is compared in tests/laws/test_transformers.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.modules.module import register_module_parameter_registration_hook

from dtf.api import registry
from dtf.config.settings import load_parts
from dtf.core.errors import ConfigError
from dtf.core.types import Batch

STAND_IN = Path(__file__).parents[1] / "support" / "stand_in_transformers"
SMALL = "tests.support.hf_small"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The small models, on the stand-in: it is forgotten afterwards, as others look whether transformers is there."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers" or name == SMALL]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(STAND_IN)
    yield importlib.import_module(SMALL)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers" or name == SMALL]:
        del sys.modules[name]


@pytest.fixture
def recipe(small: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the recipe of a model, as a run has it. What it registers is forgotten."""
    from dtf.adapters.transformers_recipe import transformers_recipe

    load_parts([])
    clean = registry._CLASSES

    def make(model: str, data: str = "classes", **more: Any) -> Any:
        monkeypatch.setattr(registry, "_CLASSES", {group: dict(known) for group, known in clean.items()})
        given = {"collator": f"{SMALL}:collator", **more}
        transformers_recipe("small", model=f"{SMALL}:{model}", data=f"{SMALL}:{data}", **given)
        made: Any = registry.lookup("recipe", "small")()
        made.join(SimpleNamespace(seed=0, job=SimpleNamespace(trains=True)))
        return made

    return make


def test_the_command_line_reads_the_line_of_a_plugin_without_torch(tmp_path: Path) -> None:
    plugin = tmp_path / "my_plugin.py"
    plugin.write_text(f'import dtf\n\ndtf.transformers_recipe("small", model="{SMALL}:rows", data="{SMALL}:classes")\n')
    code = (
        "import sys\nfrom dtf.config.compose import compose\n"
        "config = compose(['plugins=[my_plugin]', 'recipe=small', 'recipe.model.width=4']).config\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
        "print(config['recipe'], config['optimizer']['name'])\n"
    )
    places = [str(tmp_path), str(Path(__file__).parents[2]), str(STAND_IN)]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {places}\n{code}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'width': 4" in done.stdout and "'dropout': 0.0" in done.stdout
    assert done.stdout.split()[-1] == "adamw"


@pytest.mark.parametrize(
    ("model", "data", "more", "said"),
    [
        ("plain", "classes", {}, "returned Linear; it must return a PreTrainedModel"),
        ("answers", "tags", {}, "SmallForQuestionAnswering is none of them"),
        ("encodes", "tags", {}, "is an encoder with a decoder"),
        ("weighs", "classes", {}, "computes a loss of its own"),
        ("balanced", "one_class", {}, "computes a loss of its own"),
        ("rare", "one_class", {}, "computes a loss of its own"),
        ("weighs", "ignored", {}, "computes a loss of its own"),
        ("penalised", "classes", {}, "computes a loss of its own in training"),
        ("gives_tuples", "classes", {}, "returned tuple without logits"),
        ("no_names", "classes", {}, "return_dict=False; leave it out"),
        ("takes_any", "classes", {}, "names none of the columns of a row, input_ids, text, label"),
        ("three_numbers", "classes", {}, r"labels of 2 rows are \(2,\), and the model's outputs need \(2, 4\)"),
        ("rowwise", "full_tags", {}, "computes a loss of its own"),
        ("rowwise", "untagged", {}, "computes a loss of its own"),
        ("undefined", "classes", {}, "computes a loss of its own: nan for"),
        ("silent", "tags", {}, "computes a loss of its own: none for"),
        ("rows", "fractions", {}, "multi_label_classification"),
        ("rows", "streams", {}, "is a stream"),
        ("rows", "alone", {}, "as a dict of train, validation"),
        ("rows", "unlabelled", {}, "labels"),
        ("rows", "batches", {}, "with a collate function or a target"),
        ("rows", "classes", {"collator": f"{SMALL}:extra_collator"}, "gives mask, which .*forward does not take"),
        ("rows", "classes", {"collator": f"{SMALL}:pad"}, "required argument: 'rows'; name a function"),
        ("rows", "classes", {"collator": f"{SMALL}:no_collator"}, "must return a function of a list of rows"),
        ("rows", "classes", {"objective": ("perplexity", "min")}, "perplexity is no metric"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(recipe: Any, model: str, data: str, more: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recipe(model, data, **more).build_model()


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe("rows")
    made.check()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        made.check()


def _batch(recipe: Any, count: int = 6) -> tuple[Any, Batch]:
    inputs, targets = recipe.open_data("train", 0).fetch(np.arange(count), 0)
    return inputs, Batch(inputs, targets, torch.ones(count), np.arange(count))


def test_classes_of_rows_have_a_loss_each_and_names(recipe: Any) -> None:
    made = recipe("rows", objective=("top1", "max"))
    model = made.build_model()
    inputs, batch = _batch(made)
    assert set(inputs) == {"input_ids"}, "columns that forward does not take are left out"
    logits = model(inputs)
    sums, counts = made.loss(logits, batch.targets)
    torch.testing.assert_close(sums, functional.cross_entropy(logits, batch.targets, reduction="none"))
    assert counts.tolist() == [1.0] * 6
    values = made.summarise(made.measure(logits, batch, sums).tolist())
    assert values["loss"] == pytest.approx(float(sums.detach().mean()))
    assert values["top1"] == pytest.approx(float((logits.argmax(1) == batch.targets).float().mean()))
    assert made.class_names() == ("a", "b", "c", "d")
    assert set(model.state_dict()) == {"words.weight", "mix.weight", "mix.bias", "head.weight",
                                       "head.bias"}  # fmt: skip


def test_tokens_count_where_their_label_is_not_ignored(recipe: Any) -> None:
    made = recipe("tokens", "tags")
    model = made.build_model()
    inputs, batch = _batch(made)
    logits = model(inputs)
    sums, counts = made.loss(logits, batch.targets)
    assert counts.tolist() == [2.0] * 6
    whole = functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    torch.testing.assert_close(sums.sum() / counts.sum(), whole)
    assert made.summarise(made.measure(logits, batch, sums).tolist())["loss"] == pytest.approx(float(whole.detach()))
    assert made.probabilities(logits) is None


def test_a_language_model_tells_each_word_from_those_before(recipe: Any) -> None:
    made = recipe("words", "tags")
    model = made.build_model()
    inputs, batch = _batch(made)
    logits = model(inputs)
    sums, counts = made.loss(logits, batch.targets)
    whole = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch.targets[:, 1:].flatten())
    torch.testing.assert_close(sums.sum() / counts.sum(), whole)
    values = made.summarise(made.measure(logits, batch, sums).tolist())
    assert values["perplexity"] == pytest.approx(float(whole.detach().exp()), rel=1e-5)
    assert made.direction("perplexity") == "min"


def test_the_model_starts_as_its_author_made_it(recipe: Any, small: Any) -> None:
    model = recipe("rows").build_model()
    torch.manual_seed(0)
    own = small.rows()
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_what_a_pass_that_only_tries_changes_is_put_back(recipe: Any) -> None:
    model = recipe("counts").build_model()
    assert model.passes == 0 and model.training


def test_rows_are_read_before_the_memory_of_a_model_is_taken(recipe: Any, small: Any) -> None:
    """Ranks of a host may have to take turns to make it."""
    made = recipe("rows")
    parameters: list[str] = []
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: parameters.append(name))
    try:
        made.prepare()
        assert set(made.open_data("eval", 0).fetch(np.arange(2), 0)[0]) == {"input_ids"}
        assert not parameters
        made.build_model()
    finally:
        hook.remove()
    assert parameters


def test_each_split_has_its_rows_and_another_is_named(recipe: Any) -> None:
    made = recipe("rows", "three_splits")
    assert [len(made.open_data(split, 0)) for split in ("train", "eval", "test")] == [12, 8, 3]
    with pytest.raises(ConfigError, match="returned no test rows, but train and eval rows"):
        recipe("rows").open_data("test", 0)


def test_items_of_files_are_rows_too(recipe: Any) -> None:
    mine, theirs = (
        recipe("rows", data).open_data("train", 0).fetch(np.arange(3), 0) for data in ("wrapped", "classes")
    )
    assert torch.equal(mine[0]["input_ids"], theirs[0]["input_ids"]) and torch.equal(mine[1], theirs[1])


def test_a_trained_model_is_called_as_before(recipe: Any, small: Any) -> None:
    model = recipe("rows").build_model()
    assert isinstance(model, small.SmallForSequenceClassification)
    words = torch.tensor([[1, 2, 3]])
    assert torch.equal(model({"input_ids": words}), model(words).logits)
    assert model(input_ids=words, labels=torch.tensor([1])).loss is not None
    assert inspect.signature(model.forward) == inspect.signature(small.Small.forward.__get__(model))


def test_a_model_is_made_anew_each_time(recipe: Any) -> None:
    """A second run of a process would go on with the weights of the first."""
    recipe("kept").build_model()
    with pytest.raises(ConfigError, match=r"kept\(\) gives the model that it gave before; .* in the function"):
        recipe("kept").build_model()


def test_a_file_of_16_bits_gives_a_model_of_32(recipe: Any) -> None:
    assert {parameter.dtype for parameter in recipe("halves").build_model().parameters()} == {torch.float32}


def test_predictions_are_classes_of_rows(recipe: Any) -> None:
    made = recipe("words", "tags")
    made.join(SimpleNamespace(seed=0, job=registry.lookup("job", "predict")()))
    with pytest.raises(ConfigError, match="dtf.load_model"):
        made.build_model()
    made = recipe("rows")
    made.join(SimpleNamespace(seed=0, job=registry.lookup("job", "predict")()))
    assert made.probabilities(made.build_model()({"input_ids": torch.ones(6, 3).long()})).shape == (6, 4)
