"""Law: evaluation is cut into the same micro-batches on any world, and `Recipe.receive` sees one at a time."""

from __future__ import annotations

import json
from itertools import pairwise, product
from typing import Any

import pytest
import torch

from dtf.core.seeding import seed_of
from tests.support.arrays import crossed, seldom
from tests.support.coupled_toy import Coupled, noisy
from tests.support.harness import difference, meshes, reference, spread, variants

COUPLED: dict[str, Any] = {"plugin": "tests.support.coupled_toy", "steps": 3, "eval_every": 3}
BOUND = 1e-10


def recipe(name: str = "coupled_toy", **options: Any) -> dict[str, Any]:
    return {"name": name, "rows": 42, **options}


LOSS = COUPLED | {"recipe": recipe()}
"""25 evaluation rows, in micro-batches of 5: rounds of 1, 2 and 3 leave no rest, one and two."""

RECEIVED = COUPLED | {"recipe": recipe(received=True)}
IDS = COUPLED | {"recipe": recipe("received_tables_toy")}


@pytest.mark.parametrize(("strategy", "options", "processes"), crossed(variants(), [1, 2, 3], usual=[2], programs=True))
def test_a_loss_that_couples_rows(strategy: str, options: dict, processes: int) -> None:
    assert difference(reference(**LOSS), spread(strategy, processes, options=options, **LOSS)) <= BOUND


@pytest.mark.parametrize(("strategy", "options", "processes"), crossed(meshes(), [2, 4], turns=[None, None, None, 4]))
def test_a_loss_that_couples_rows_under_combinations(strategy: str, options: dict, processes: int) -> None:
    assert difference(reference(**LOSS), spread(strategy, processes, options=options, **LOSS)) <= BOUND


@pytest.mark.parametrize(("strategy", "options", "processes"), crossed(variants(), [1, 2, 3], usual=[2], programs=True))
def test_receive_draws_and_looks_across_rows(strategy: str, options: dict, processes: int) -> None:
    assert difference(reference(**RECEIVED), spread(strategy, processes, options=options, **RECEIVED)) <= BOUND


@pytest.mark.parametrize(("strategy", "options", "processes"), crossed(variants(), [2, 3], usual=[2], programs=True))
def test_receive_changes_the_ids_of_tables(strategy: str, options: dict, processes: int) -> None:
    assert difference(reference(**IDS), spread(strategy, processes, options=options, **IDS)) <= BOUND


@pytest.mark.parametrize("dense", [pytest.param("pserver", marks=pytest.mark.slow), "allreduce"])
def test_receive_with_tables_on_servers(dense: str) -> None:
    assert difference(reference(**IDS), spread("pserver", 3, options={"servers": 2, "dense": dense}, **IDS)) <= BOUND


@pytest.mark.parametrize(
    ("strategy", "processes", "rows"),
    seldom(
        [*product(["dp", "ddp", "pipeline", "pserver"], [1, 3], [20, 21, 4, 1])],
        lambda strategy, processes, rows: processes == 3 and rows in ((21, 1) if strategy == "ddp" else (1,)),
    ),
)
def test_ranks_without_a_micro_batch_and_a_last_one_of_one_row(strategy: str, processes: int, rows: int) -> None:
    case = COUPLED | {"recipe": recipe(received=True, eval_rows=rows)}
    assert difference(reference(**case), spread(strategy, processes, **case)) <= BOUND


@pytest.mark.parametrize(
    "strategy", ["pserver", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dp", "ddp", "fsdp"))]
)
def test_where_the_strategy_chooses_the_micro_batches(strategy: str) -> None:
    """With step.micro_batch_rows=0 an evaluation is cut by step.batch_size, 19. The model does not learn here, as its
    training depends on the strategy's choice.
    """
    case = LOSS | {"recipe": recipe(batch_norm=False), "lr_factors": {"*": 0.0}}
    cut = [spread(strategy, processes, micro_batch_rows=0, **case)["eval"]["3"]["loss"] for processes in (2, 3)]
    assert cut == pytest.approx([reference(**case | {"micro_batch_rows": 19})["eval"]["3"]["loss"]] * 2, rel=1e-12)
    assert cut[0] != pytest.approx(reference(**case)["eval"]["3"]["loss"], rel=1e-3)


@pytest.mark.parametrize("received", [False, True])
def test_the_numbers_of_a_plain_loop(received: bool) -> None:
    case = COUPLED | {"recipe": recipe(received=received, eval_rows=51)}
    found = reference(**case)
    toy = Coupled(rows=42, received=received, eval_rows=51)
    model, data = toy.build_model().double(), toy.open_data("eval", 0)
    tensors = {
        name.removeprefix("model/"): torch.tensor(value, dtype=torch.float64)
        for name, value in found["tensors"].items()
        if name.startswith("model/")
    }
    model.load_state_dict(tensors, strict=False)
    model.eval()
    assert not dict(model.named_parameters()).keys() - tensors.keys()
    total = 0.0
    for first, last in pairwise([*range(0, 51, 5), 51]):
        inputs = data.fetch(torch.arange(first, last).numpy(), 0)[0]
        if received:
            torch.manual_seed(seed_of(0, "receive", -1, first))
            inputs = noisy(inputs)
        total += float(toy.loss(model(inputs.double()).detach(), torch.empty(0)).sum())
    assert found["eval"]["3"]["loss"] == pytest.approx(total / 51, rel=1e-12)


USE = ["plugins=[tests.support.coupled_toy]", "recipe=coupled_toy", "recipe.received=true", "recipe.eval_rows=23"]


@pytest.mark.slow
def test_jobs_that_use_a_model_cut_alike(run_dtf: Any) -> None:
    """job=evaluate gives the metrics of the training's last evaluation, job=predict the same answers, on any world; a
    file of predictions that ends within a micro-batch goes on with the same answers.
    """
    train = ["train.steps=2", "train.eval_every=2", "step.batch_size=12", "observer=[jsonl]", "precision=fp64"]
    trained = run_dtf(*USE, *train, "launcher.processes=2", "step.micro_batch_rows=4")
    assert trained.code == 0, trained.err
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    expected = next(line["loss"] for line in lines if line["split"] == "eval")
    answers: list[list[dict[str, Any]]] = []
    for strategy, processes, goes_on in (("ddp", 1, True), ("fsdp", 3, False)):
        world = [f"job.model={trained.folder}", f"strategy={strategy}", f"launcher.processes={processes}", USE[0]]
        found = run_dtf("job=evaluate", *world)
        assert found.code == 0, found.err
        metrics = json.loads((found.folder / "evaluation.json").read_text())["metrics"]
        assert metrics["loss"] == pytest.approx(expected, rel=1e-10)
        predicted = run_dtf("job=predict", *world)
        assert predicted.code == 0, predicted.err
        file = predicted.folder / "predictions.jsonl"
        answers.append([json.loads(line) for line in file.read_text().splitlines()])
        if not goes_on:
            continue
        kept = file.read_text().splitlines(keepends=True)[:6]
        file.write_text("".join(kept))
        assert run_dtf("job=predict", *world, folder=predicted.folder).code == 0
        answers.append([json.loads(line) for line in file.read_text().splitlines()])
    for other in answers[1:]:
        assert [row["row"] for row in other] == list(range(23))
        assert [row["probability"] for row in other] == pytest.approx([row["probability"] for row in answers[0]])
