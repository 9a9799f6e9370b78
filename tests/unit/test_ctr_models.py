"""Models of click-through rates: each says what its paper's formula says, row by row, and trains to the same numbers
under every strategy.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from dtf.api.schema import option_node
from dtf.config.compose import compose
from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.model.init import init_model, layout_of
from dtf.recipes.ctr.grouped import Grouped
from dtf.recipes.ctr.log_data import Ids, LogOptions
from dtf.recipes.ctr.model import (
    DCN,
    DLRM,
    DNN,
    FactorizationMachine,
    Inputs,
    LogisticRegression,
    Tower,
    WideDeep,
    XDeepFM,
)
from dtf.recipes.ctr.model_options import WIDE, EmbeddingKind, Kind, ModelOptions, Structure
from dtf.recipes.ctr.recipe import ClickLog
from dtf.strategies.pipeline.graph_split import GraphSplit
from tests.support.arrays import plain
from tests.support.ctr_toy import FIELDS, SIZE, CtrToy, Drawn, DrawnOptions, options
from tests.support.harness import ROWS, difference, reference, spread, variants

WIDTH = 3


def drawn(kind: Kind, **more: Any) -> nn.Module:
    """A model in fp64 and evaluation mode, biases and running averages anything but zero."""
    recipe = CtrToy(kind=kind.name)
    recipe.model = options(kind, **more)
    model = init_model(recipe, 0).double().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.copy_(
                    0.5
                    + torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
                )
    return model


def inputs(rows: int = 4) -> dict[str, Tensor]:
    found, _ = Drawn(rows, 2, "train").fetch(np.arange(rows), 0)
    return {"ids": found["ids"], "dense": found["dense"].double()}


def looked_up(model: nn.Module, ids: Tensor) -> np.ndarray:
    """Rows of one sample's ids, zeros for a missing one."""
    table = model.get_parameter("table.rows.weight").detach().numpy()
    return np.stack([table[i + 1] if i >= 0 else 0 * table[0] for i in ids.tolist()])


def linear(model: nn.Module, name: str, x: np.ndarray) -> np.ndarray:
    tensors = {key: tensor.detach().numpy() for key, tensor in model.get_submodule(name).named_parameters()}
    return tensors["weight"].reshape(len(tensors["weight"]), -1) @ x + tensors.get("bias", 0)


def perceptron(model: nn.Module, name: str, x: np.ndarray) -> np.ndarray:
    for i in range(len(model.get_submodule(name))):  # type: ignore[arg-type]
        x = linear(model, f"{name}.{i}.linear", x)
        norm = model.get_submodule(f"{name}.{i}.norm")
        mean, var, weight, bias = (
            norm.state_dict()[key].numpy() for key in ("running_mean", "running_var", "weight", "bias")
        )
        x = np.maximum((x - mean) / np.sqrt(var + 1e-5) * weight + bias, 0)
    return x


def by_hand(kind: Kind, model: nn.Module, ids: Tensor, dense: np.ndarray) -> float:
    """The logit of one sample."""
    rows = looked_up(model, ids)
    wide = kind in (Kind.lr, Kind.fm, Kind.wide_deep, Kind.deepfm, Kind.xdeepfm)
    first = (rows[:, -1].sum() + linear(model, "first.numbers", dense)[0]) if wide else 0.0
    v = rows[:, :-1] if wide else rows
    pairs = sum(float(v[i] @ v[j]) for i, j in combinations(range(FIELDS), 2))
    flat = np.concatenate([v.reshape(-1), dense])

    def deep(x: np.ndarray) -> float:
        return linear(model, "head", perceptron(model, "deep", x))[0]

    match kind:
        case Kind.lr:
            return first
        case Kind.fm:
            return first + pairs
        case Kind.dnn:
            return deep(flat)
        case Kind.wide_deep:
            return first + deep(flat)
        case Kind.deepfm:
            return first + pairs + deep(flat)
        case Kind.dcn:
            x = flat
            for i in range(2):
                x = (
                    flat * linear(model, f"cross.{i}.weight", x)[0]
                    + model.get_parameter(f"cross.{i}.bias").detach().numpy()
                    + x
                )
            return linear(model, "head", np.concatenate([x, perceptron(model, "deep", flat)]))[0]
        case Kind.dcnv2:
            x = flat
            for i in range(2):
                x = flat * linear(model, f"cross.{i}.outer", linear(model, f"cross.{i}.inner", x)) + x
            return deep(x)
        case Kind.xdeepfm:
            x, sums = v, []
            for i in range(2):
                products = np.stack([x[h] * v[m] for h in range(len(x)) for m in range(FIELDS)])
                x = np.stack([linear(model, f"cin.{i}.mix", products[:, d]) for d in range(WIDTH)], 1)
                sums.append(x.sum(1))
            return first + linear(model, "pooled", np.concatenate(sums))[0] + deep(flat)
        case Kind.dlrm:
            numbers = perceptron(model, "bottom", dense)
            all_rows = np.stack([numbers, *v])
            dots = [float(all_rows[i] @ all_rows[j]) for i in range(len(all_rows)) for j in range(i)]
            return deep(np.concatenate([numbers, dots]))


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_forward_is_the_formula(kind: Kind) -> None:
    model, given = drawn(kind), inputs()
    with torch.no_grad():
        found = model(given)
    expected = [by_hand(kind, model, given["ids"][b], given["dense"][b].numpy()) for b in range(4)]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)


def test_cross_layers_beside_the_perceptron_and_with_full_matrices() -> None:
    model, given = drawn(Kind.dcnv2, cross_rank=0, structure=Structure.parallel), inputs(1)
    flat = np.concatenate([looked_up(model, given["ids"][0]).reshape(-1), given["dense"][0].numpy()])
    x = flat
    for i in range(2):
        x = flat * linear(model, f"cross.{i}.matrix", x) + x
    expected = linear(model, "head", np.concatenate([x, perceptron(model, "deep", flat)]))
    np.testing.assert_allclose(model(given).detach().numpy(), expected, rtol=1e-10)


MODELS = [
    lambda size, numbers: LogisticRegression(Inputs(FIELDS, numbers, size)),
    lambda size, numbers: FactorizationMachine(Inputs(FIELDS, numbers, size), WIDTH),
    lambda size, numbers: DNN(Inputs(FIELDS, numbers, size), WIDTH, Tower([4], False, 0.0)),
    lambda size, numbers: WideDeep(Inputs(FIELDS, numbers, size), WIDTH, Tower([4], False, 0.0), pairs=True),
    lambda size, numbers: DCN(Inputs(FIELDS, numbers, size), WIDTH, Tower([4], False, 0.0), 2, None, stacked=False),
    lambda size, numbers: XDeepFM(Inputs(FIELDS, numbers, size), WIDTH, Tower([4], False, 0.0), [2]),
    lambda size, numbers: DLRM(Inputs(FIELDS, numbers, size), WIDTH, Tower([4], False, 0.0), [2]),
]


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("numbers", [0, 2])
def test_rows_in_place_of_ids_give_the_same(build: Any, numbers: int) -> None:
    """What a sparse table hands over; and rows without numbers."""
    torch.manual_seed(0)
    dense, sparse = build(SIZE, numbers), build(0, numbers)
    for module in dense.modules():
        getattr(module, "reset_parameters", lambda: None)()
    sparse.load_state_dict(
        {name: tensor for name, tensor in dense.state_dict().items() if not name.startswith("table.")}
    )
    given = {
        key: value.float() if value.is_floating_point() else value
        for key, value in inputs().items()
        if key == "ids" or numbers
    }
    rows = dense.table(given["ids"]).detach().requires_grad_()
    logits = sparse(given | {"ids": rows})
    torch.testing.assert_close(logits, dense(given))
    logits.sum().backward()
    assert rows.grad is not None and rows.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind in WIDE], ids=lambda kind: kind.name)
def test_the_first_order_term_starts_near_zero(kind: Kind) -> None:
    """Weights of the numbers of a row are first-order weights as those of its ids are, and are drawn as these."""
    recipe = CtrToy(kind=kind.name)
    recipe.model = options(kind, scale=1e-3)
    first = init_model(recipe, 0).get_submodule("first")
    weights = first.get_parameter("numbers.weight").detach()
    assert 0 < weights.abs().max() < 1e-2
    assert not any(parameter.any() for name, parameter in first.named_parameters() if name.endswith("bias"))


def test_a_missing_id_is_zeros_that_do_not_learn() -> None:
    model = drawn(Kind.fm)
    model({"ids": torch.full((2, FIELDS), -1), "dense": torch.zeros(2, 2, dtype=torch.float64)}).sum().backward()
    table = model.get_parameter("table.rows.weight")
    assert not table[0].any() and table.grad is not None and not table.grad.any()


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_every_layer_is_a_block(kind: Kind) -> None:
    """A pipeline can cut before each of them."""
    model = drawn(kind)
    blocks = layout_of(CtrToy(kind=kind.name), model).blocks
    assert len(GraphSplit(model, blocks)) == len(blocks) >= (2 if kind in (Kind.lr, Kind.fm) else 4)


CASE = {"plugin": "tests.support.ctr_toy", "steps": 4, "eval_every": 2, "optimizer": "adam"}


@pytest.mark.parametrize("kind", ["deepfm"])
@pytest.mark.parametrize(
    ("strategy", "chosen"),
    plain(variants()),
)
def test_every_strategy_follows_the_reference(strategy: str, chosen: dict, kind: str) -> None:
    """100 rows, batches of 24, five micro-batches, two ranks; loss, calibration and AUC among the numbers."""
    case = CASE | {"recipe": {"name": "ctr_toy", "rows": ROWS, "kind": kind}}
    expected = reference(**case)
    assert set(expected["eval"]["4"]) == {"loss", "calibration", "auc", "rows"} and 0 < expected["eval"]["4"]["auc"] < 1
    assert difference(expected, spread(strategy, 2, options=chosen, **case)) <= 1e-10


@pytest.mark.parametrize("strategy", ["tensor", "pipeline"])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind.name, marks=() if kind is Kind.dlrm else pytest.mark.slow) for kind in Kind],
)
def test_every_model_can_be_divided(kind: str, strategy: str) -> None:
    case = CASE | {"recipe": {"name": "ctr_toy", "rows": ROWS, "kind": kind}}
    assert difference(reference(**case), spread(strategy, 2, **case)) <= 1e-10


def test_options_of_another_model_are_refused() -> None:
    for kind in Kind:
        options(kind).check()
    with pytest.raises(
        ConfigError,
        match=r"recipe\.model\.hidden=\[8\] does not apply to recipe\.model\.kind=fm, only to dnn, .*; leave it out",
    ):
        ModelOptions(kind=Kind.fm, hidden=[8]).check()
    with pytest.raises(ConfigError, match="structure=stacked does not apply"):
        ModelOptions(kind=Kind.dcn, structure=Structure.stacked).check()
    with pytest.raises(ConfigError, match="must name at least one layer"):
        ModelOptions(hidden=[]).check()
    with pytest.raises(ConfigError, match="capacity=5 has a meaning for"):
        ModelOptions(capacity=5).check()
    with pytest.raises(ConfigError, match=r"recipe\.group=5 must be -1 for none, or a field of a row, 0 to 4$"):
        CtrToy(group=5).check()
    with pytest.raises(ConfigError, match=r"run\.objective=calibration is best at 1"):
        CtrToy().direction("calibration")


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (
            "recipe=ctr_clicks recipe.model.kind=lr recipe.model.table=sparse",
            "recipe.model.dim optimizer.weight_decays",
        ),
        ("recipe=dlrm_criteo recipe.model.kind=fm", "recipe.model.hidden recipe.model.bottom"),
        ("recipe=dcn_frappe recipe.model.kind=lr", "recipe.model.batch_norm recipe.model.dropout"),
        ("recipe=deepfm_criteo recipe.model.table=dense", "sparse"),
    ],
)
def test_what_a_file_sets_for_another_model_gives_way(words: str, gone: str) -> None:
    composed = compose(words.split())
    composed.settings.recipe.model.check()  # type: ignore[attr-defined]
    for key in gone.split():
        group, *path = key.split(".")
        found, default = composed.config[group], option_node(group, composed.config[group]["name"])
        for name in path:
            found, default = found[name], default[name]
        chosen: Any = OmegaConf.to_container(OmegaConf.create({"at": OmegaConf.select(composed.tree, key)}))
        assert found == default == chosen["at"]
    assert composed.config["lr"]["peak"] != option_node("lr", composed.config["lr"]["name"])["peak"], (
        "the rest of the file counts"
    )


def test_what_the_command_line_sets_for_another_model_is_refused() -> None:
    composed = compose(
        [
            "recipe=ctr_clicks",
            "recipe.model.kind=lr",
            "recipe.model.dim=24",
            "recipe.model.table=sparse",
            "optimizer.weight_decays.table=1",
        ]
    )
    assert composed.config["optimizer"]["weight_decays"] == {"table": 1.0}, "ranks refuse it"
    with pytest.raises(ConfigError, match=r"recipe\.model\.dim=24 does not apply to recipe\.model\.kind=lr"):
        composed.settings.recipe.model.check()  # type: ignore[attr-defined]


def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "recipe" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [schema/ctr_generated@_here_, _self_]\nmodel: {kind: lr, dim: 24}\n")
    with pytest.raises(
        ConfigError,
        match=r"recipe\.model\.dim=24 does not apply to recipe\.model\.kind=lr, "
        r".* \(recipe\.model\.dim was set in .*mine\.yaml\)",
    ):
        compose(["--config-dir", str(tmp_path), "recipe=mine", "train.steps=1"]).check()


def test_any_ids_ask_for_a_sparse_table_first() -> None:
    data = LogOptions(ids=Ids.raw)
    with pytest.raises(ConfigError, match=r"use recipe\.model\.table=sparse, and recipe\.model\.capacity=ROWS"):
        ClickLog(data=data, model=ModelOptions(capacity=9)).check()
    with pytest.raises(ConfigError, match=r"recipe\.model\.capacity is not set"):
        ClickLog(data=data, model=ModelOptions(table=EmbeddingKind.sparse)).check()


def test_rows_of_sparse_tables_are_as_wide_as_the_model_asks() -> None:
    recipe = CtrToy(kind="deepfm")
    assert recipe.tables() == {}
    for kind in Kind:
        recipe.model = options(kind, table=EmbeddingKind.sparse)
        (table,) = recipe.tables().values()
        dense = drawn(kind).get_parameter("table.rows.weight")
        assert (table.size, table.width) == (SIZE, dense.shape[1]) and table.capacity == SIZE
        assert not any(name.startswith("table") for name, _ in recipe.build_model().named_parameters())


def test_measures_by_hand() -> None:
    recipe = CtrToy()
    logits, clicks, weight = (
        torch.tensor([0.0, 2.0, -1.0, 5.0]),
        torch.tensor([0.0, 1.0, 1.0, 0.0]),
        torch.tensor([1.0, 1.0, 1.0, 0.0]),
    )
    batch = Batch({}, clicks, weight, np.arange(4))
    chances = 1 / (1 + np.exp(-logits[:3].numpy()))
    losses = -np.log([1 - chances[0], chances[1], chances[2]])
    found = recipe.summarise(recipe.measure(logits, batch, recipe.loss(logits, clicks)).tolist())
    assert found == pytest.approx({"loss": losses.mean(), "calibration": chances.sum() / 2}, rel=1e-6)
    assert recipe.eval_outputs(logits, batch).tolist() == [[0, 0, 1], [2, 1, 1], [-1, 1, 1], [5, 0, 0]]


def test_groups_come_with_the_targets() -> None:
    recipe = CtrToy(group=1)
    data = recipe.open_data("eval", 0)
    assert isinstance(data, Grouped) and recipe.metrics == ("loss", "calibration", "auc", "group_auc")
    given, targets = data.fetch(np.arange(6), 0)
    plain = DrawnOptions().open("eval", 0)
    assert targets[:, 0].equal(plain.fetch(np.arange(6), 0)[1].double()) and targets[:, 1].equal(
        given["ids"][:, 1].double()
    )
    batch = Batch(given, targets, torch.ones(6), np.arange(6))
    assert recipe.eval_outputs(torch.zeros(6), batch)[:, 3].equal(targets[:, 1]) and recipe.loss(
        torch.zeros(6), targets
    ).shape == (6,)
    assert len(data) == len(plain) and data.fingerprint() != plain.fingerprint()
