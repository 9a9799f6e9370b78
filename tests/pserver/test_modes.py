"""Laws of the parameter server's modes: those that wait for everybody are the same numbers as sync."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dtf.pserver.net.messages import LATE, NO, READY
from dtf.pserver.options import Mode
from dtf.pserver.trainer.exchange import PULL_WAIT_S, Exchange
from dtf.pserver.trainer.prefetch import WAIT_S
from dtf.pserver.trainer.trainer import Trainer
from tests.laws.test_sharded_tables import ANY
from tests.support.harness import ROWS, difference, reference, spread
from tests.support.launching import HANG_S

slow = pytest.mark.slow
TOY: dict[str, Any] = {"rows": ROWS}


@pytest.mark.parametrize("recipe", [pytest.param(TOY, marks=slow), ANY], ids=["toy", "tabled"])
@pytest.mark.parametrize("servers", [1, 2])
def test_async_with_one_trainer_that_waits_is_sync(servers: int, recipe: dict[str, Any]) -> None:
    """Bit for bit: nobody else's gradients, and none of one's own that are not applied yet."""
    options = {"servers": servers, "min_block": 1}
    case: dict[str, Any] = {"recipe": recipe, "clip_norm": 1.0 if servers == 1 else 0.0}
    waiting = spread("pserver", 1, options=options | {"mode": "async", "staleness": 0}, **case)
    sync = spread("pserver", 1, options=options, **case)
    assert difference(sync, waiting) <= (1e-15 if servers == 1 else 1e-12)


@pytest.mark.parametrize("recipe", [TOY, pytest.param(ANY, marks=slow)], ids=["toy", "tabled"])
def test_half_async_that_runs_not_ahead_is_sync(recipe: dict[str, Any]) -> None:
    """But for the order of the sums, which is that of arrival."""
    result = spread("pserver", 3, options={"mode": "half_async", "staleness": 0}, recipe=recipe)
    for run in (result, whole := reference(recipe=recipe)):
        run["ids"] = {step: sorted(ids) for step, ids in run["ids"].items()}
    assert difference(whole, result) <= 1e-10


@pytest.mark.parametrize("processes", [1, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("servers", [pytest.param(1, marks=slow), 2])
@pytest.mark.parametrize("mode", [mode.value for mode in Mode])
def test_every_mode_takes_every_sample_once_and_counts_evaluations_exactly(
    mode: str, servers: int, processes: int
) -> None:
    """The engine refuses an evaluation that counts a row twice or not at all."""
    result = spread(
        "pserver",
        processes,
        options={"mode": mode, "servers": servers, "min_block": 1},
        steps=6,
        clip_norm=0.0,
        eval_every=1,
    )
    for epoch in range(2):
        assert Counter(i for step in range(3 * epoch, 3 * epoch + 3) for i in result["ids"][str(step)]) == Counter(
            range(ROWS)
        )
    assert len(result["eval"]) == 6 and result["eval"]["6"]["loss"] < result["eval"]["1"]["loss"]


@pytest.mark.parametrize("servers", [1, pytest.param(2, marks=slow)])
@pytest.mark.parametrize("mode", [mode.value for mode in Mode])
def test_a_skipped_step_leaves_running_averages_finite(mode: str, servers: int) -> None:
    options = {"mode": mode, "servers": servers, "min_block": 1}
    result = spread(
        "pserver", 2, options=options, recipe=TOY | {"bad_row": 17}, steps=5, clip_norm=0.0, skip_nonfinite=9
    )
    assert all(np.isfinite(tensor).all() for tensor in result["tensors"].values()) and np.isfinite(
        result["eval"]["4"]["loss"]
    )


@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_resume_in_another_mode_and_of_one(mode: str, tmp_path: Any) -> None:
    """What was pushed is in the checkpoint, or its step is not: each sample once over the break."""
    options = {"mode": mode, "servers": 2, "min_block": 1}
    a = spread("pserver", 2, options=options, clip_norm=0.0, steps=6, folder=str(tmp_path), save_every=2, halt=True)
    assert sorted(a["ids"], key=int) == [str(step) for step in range(2)]
    b = spread(
        "pserver", 3, options=options | {"servers": 1}, clip_norm=0.0, steps=6, start=str(tmp_path / "step_000002")
    )
    c = spread("ddp", 1, clip_norm=0.0, steps=6, start=str(tmp_path / "step_000002"))
    for result in (b, c):
        ids = a["ids"] | result["ids"]
        assert Counter(i for step in range(3) for i in ids[str(step)]) == Counter(range(ROWS))
        assert len(ids) == 6 and not a["ids"].keys() & result["ids"].keys()


@pytest.mark.parametrize("servers", [pytest.param(1, marks=slow), 2])
@pytest.mark.parametrize("mode", [pytest.param("sync", marks=slow), "async"])
def test_a_full_table_ends_the_run_in_every_mode(mode: str, servers: int) -> None:
    """Found in a thread of the service, where a trainer's pull would create the row: the engine does not wait for what
    cannot come.
    """
    with pytest.raises(AssertionError, match="table ids is full: capacity=30"):
        spread("pserver", 2, options={"mode": mode, "servers": servers}, recipe=ANY | {"capacity": 30}, clip_norm=0.0)


@pytest.mark.parametrize("mode", ["async", pytest.param("half_async", marks=slow)])
def test_a_table_is_full_when_all_servers_together_hold_its_rows(mode: str) -> None:
    """Of its ids each server has about half; no update shows it, and the next report does."""
    with pytest.raises(AssertionError, match="table ids is full: capacity=50"):
        spread("pserver", 2, options={"mode": mode, "servers": 2}, recipe=ANY | {"capacity": 50}, clip_norm=0.0)


@pytest.mark.parametrize(
    ("answers", "earlier", "waits_s", "asked"),
    [
        ([NO, NO, READY], False, 0.0, 3),
        pytest.param([NO, READY], True, 0.0, 1, id="earlier work"),
        pytest.param([NO, READY], False, HANG_S, 1, id="over"),
        pytest.param([NO, LATE, READY], False, 0.0, 2, id="late"),
    ],
)
def test_a_pull_gives_way(
    answers: list[int], earlier: bool, waits_s: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not there yet is asked for again, but not while work waits that it may need, nor of a server that says no
    before the time is up: it has ended.
    """
    monkeypatch.setattr("dtf.pserver.trainer.trainer.PULL_WAIT_S", waits_s)
    trainer = Trainer.__new__(Trainer)
    prepared = SimpleNamespace(order=((0, 1, 0), 0))
    left = iter(answers)
    pulls = []

    def pull(wanted: Any) -> tuple[int, None]:
        pulls.append(wanted)
        return next(left), None

    trainer._exchange = SimpleNamespace(pull=pull)  # type: ignore[assignment]
    ready = [SimpleNamespace(order=((0, 0, 2), 1))] if earlier else []
    trainer._prefetcher = SimpleNamespace(ready=lambda: ready)  # type: ignore[assignment]
    assert trainer._pull(prepared)[0] == answers[asked - 1]  # type: ignore[arg-type]
    assert pulls == [prepared] * asked


@pytest.mark.parametrize(("synchronous", "wait_s"), [(True, PULL_WAIT_S), (False, WAIT_S)])
def test_how_long_a_pull_may_wait(synchronous: bool, wait_s: float) -> None:
    """Shortly for updates that this trainer may have to compute; long for the push in the same message."""
    exchange = Exchange.__new__(Exchange)
    exchange._number, exchange._synchronous = 0, synchronous
    prepared = SimpleNamespace(lease=SimpleNamespace(kind=0, step=3, part=1), ticket=SimpleNamespace(step=3))
    scalars, _ = exchange._pull_request(prepared, {}, 3, 0)  # type: ignore[arg-type]
    assert scalars["wait_s"] == wait_s and PULL_WAIT_S < 1 < WAIT_S
