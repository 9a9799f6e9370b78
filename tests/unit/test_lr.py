"""Schedules: pure functions of the step that are positive, continuous where they say so, and end where they promise."""

from __future__ import annotations

import copy
import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtf.api.lr import Constant, Cosine, Geometric, OneCycle, Plateau, Schedule, Step
from dtf.api.registry import lookup, registered
from dtf.core.errors import ConfigError

NAMES = list(registered("lr"))
peaks = st.floats(1e-6, 10.0)
warmups = st.integers(0, 200)
shares = st.floats(1e-3, 0.999)
SCHEDULES = {
    "constant": st.builds(Constant, peak=peaks, warmup=warmups),
    "cosine": st.builds(
        lambda peak, share, warmup: Cosine(peak=peak, floor=peak * share, warmup=warmup),
        peaks,
        st.one_of(st.just(0.0), shares),
        warmups,
    ),
    "step": st.builds(
        Step,
        peak=peaks,
        warmup=warmups,
        boundaries=st.lists(shares, max_size=4, unique=True).map(sorted),
        factor=shares,
    ),
    "plateau": st.builds(Plateau, peak=peaks, warmup=warmups, factor=shares, patience=st.integers(1, 5)),
    "onecycle": st.builds(OneCycle, peak=peaks, rise=st.one_of(st.just(0.0), shares), start=shares, final=shares),
    "geometric": st.builds(Geometric, peak=peaks, start=shares),
}


def rates(schedule: Schedule, total: int) -> list[float]:
    return [schedule(step, total) for step in range(total)]


def test_every_schedule_is_tested() -> None:
    assert sorted(SCHEDULES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_defaults_make_a_schedule(name: str) -> None:
    lookup("lr", name)().check()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), total=st.integers(1, 500))
def test_rates_are_positive_and_at_most_the_peak(name: str, data: st.DataObject, total: int) -> None:
    schedule = data.draw(SCHEDULES[name])
    schedule.check()
    assert all(0.0 < rate <= schedule.peak * (1 + 1e-12) and math.isfinite(rate) for rate in rates(schedule, total))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), total=st.integers(1, 100))
def test_a_schedule_is_a_pure_function(name: str, data: st.DataObject, total: int) -> None:
    """Asking in any order, or another copy, gives the same answers: a resumed run needs no schedule state."""
    schedule = data.draw(SCHEDULES[name])
    forward, fields = rates(schedule, total), copy.deepcopy(dataclasses.asdict(schedule))
    backward = [schedule(step, total) for step in reversed(range(total))]
    assert backward[::-1] == forward == rates(type(schedule)(**fields), total)
    assert dataclasses.asdict(schedule) == fields


@given(schedule=st.one_of(SCHEDULES["constant"], SCHEDULES["cosine"], SCHEDULES["step"]), extra=st.integers(1, 500))
def test_warm_up_is_a_line_to_the_peak(schedule: Constant | Cosine | Step, extra: int) -> None:
    total = 10 * schedule.warmup + extra
    if isinstance(schedule, Step):  # a boundary may lie within the warm-up; here it does not
        schedule.boundaries = [boundary for boundary in schedule.boundaries if boundary > 0.2]
    expected = [schedule.peak * (step + 1) / schedule.warmup for step in range(schedule.warmup)]
    assert rates(schedule, total)[: schedule.warmup] == pytest.approx(expected, rel=1e-12)
    assert schedule(schedule.warmup, max(total, schedule.warmup + 3)) == pytest.approx(schedule.peak, rel=1e-12)


def test_a_plateau_falls_each_time_its_patience_ends() -> None:
    schedule = Plateau(factor=0.5, patience=2)
    assert [schedule.fall(waited) for waited in range(1, 6)] == [1.0, 0.5, 1.0, 0.5, 1.0]
    assert Constant().fall(3) == 1.0


@given(schedule=SCHEDULES["cosine"], length=st.integers(1, 500))
def test_cosine_falls_without_jumps_to_its_floor(schedule: Cosine, length: int) -> None:
    total, span = schedule.warmup + length, schedule.peak - schedule.floor
    falling = [schedule(step, total) for step in range(schedule.warmup, total + 1)]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(schedule.floor, rel=1e-9, abs=1e-15)
    assert all(high - low <= span * math.pi / 2 / length * (1 + 1e-9) for high, low in pairwise(falling))


def test_cosine_equals_torch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.01)
    ours = Cosine(peak=0.3, floor=0.01)
    for step in range(50):
        assert ours(step, 50) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_step_falls_at_its_shares_of_any_run() -> None:
    """He et al. 2016: 64k steps, divided by 10 at 32k and 48k; the same recipe at an eighth of the length."""
    for total, first, second in ((64_000, 32_000, 48_000), (8_000, 4_000, 6_000)):
        found = [Step(peak=0.1)(step, total) for step in (0, first - 1, first, second - 1, second, total - 1)]
        assert found == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@given(schedule=SCHEDULES["step"], total=st.integers(1, 300))
def test_step_takes_no_other_values(schedule: Step, total: int) -> None:
    schedule.warmup = 0
    levels = [schedule.peak * schedule.factor**passed for passed in range(len(schedule.boundaries) + 1)]
    assert set(rates(schedule, total)) <= set(levels)
    assert schedule(total - 1, total) == levels[-1] or any(round(b * total) > total - 1 for b in schedule.boundaries)


@given(schedule=SCHEDULES["onecycle"], total=st.integers(2, 500))
def test_onecycle_rises_and_falls_without_jumps(schedule: OneCycle, total: int) -> None:
    found = rates(schedule, total)
    top = max(0.0, schedule.rise * total - 1)
    assert found[-1] == pytest.approx(schedule.peak * schedule.final, rel=1e-9)
    assert found[0] == pytest.approx(schedule.peak * (schedule.start if top > 0 else 1.0), rel=1e-9)
    peak_at = found.index(max(found))
    assert found[: peak_at + 1] == sorted(found[: peak_at + 1]) and found[peak_at:] == sorted(
        found[peak_at:], reverse=True
    )
    slope = schedule.peak * max((1 - schedule.start) / max(top, 1), (1 - schedule.final) / (total - 1 - top))
    assert all(abs(high - low) <= slope * (1 + 1e-9) for high, low in pairwise(found))


@pytest.mark.parametrize(("total", "rise"), [(100, 0.3), (64, 0.25), (7, 0.5)])
def test_onecycle_equals_torch(total: int, rise: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(())], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=0.8,
        total_steps=total,
        pct_start=rise,
        anneal_strategy="linear",
        div_factor=25.0,
        final_div_factor=1e4,
        cycle_momentum=False,
    )
    ours = OneCycle(peak=0.8, rise=rise, start=1 / 25)
    for step in range(total):
        assert ours(step, total) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        if step + 1 < total:
            theirs.step()


@given(schedule=SCHEDULES["geometric"], total=st.integers(3, 500))
def test_geometric_gives_each_power_of_ten_as_many_steps(schedule: Geometric, total: int) -> None:
    found = rates(schedule, total)
    assert found[0] == pytest.approx(schedule.peak * schedule.start) and found[-1] == pytest.approx(schedule.peak)
    factors = [high / low for low, high in pairwise(found)]
    assert factors == pytest.approx([(1 / schedule.start) ** (1 / (total - 1))] * (total - 1))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Geometric(start=0.0), r"lr\.start=0\.0"),
        (Constant(peak=0.0), r"lr\.peak=0\.0 must be a positive number"),
        (Cosine(peak=float("nan")), r"lr\.peak=nan"),
        (Step(peak=float("inf")), r"lr\.peak=inf"),
        (OneCycle(peak=-1.0), r"lr\.peak=-1\.0"),
        (Constant(warmup=-1), r"lr\.warmup=-1 must be a number of steps"),
        (Cosine(warmup=-5), r"lr\.warmup=-5"),
        (Cosine(peak=0.1, floor=0.2), r"lr\.floor=0\.2 must be between 0 and lr\.peak=0\.1"),
        (Cosine(floor=-0.1), r"lr\.floor=-0\.1"),
        (Step(boundaries=[0.75, 0.5]), r"lr\.boundaries=\[0\.75, 0\.5\] must be ascending"),
        (Step(boundaries=[30, 60]), r"lr\.boundaries=\[30, 60\] must be ascending shares"),
        (Step(boundaries=[0.0, 0.5]), r"lr\.boundaries"),
        (Step(boundaries=[0.5, 1.0]), r"lr\.boundaries"),
        (Step(factor=0.0), r"lr\.factor=0\.0"),
        (Step(factor=2.0), r"lr\.factor=2\.0"),
        (OneCycle(rise=1.0), r"lr\.rise=1\.0"),
        (OneCycle(start=0.0), r"lr\.start=0\.0"),
        (OneCycle(final=1.5), r"lr\.final=1\.5"),
    ],
)
def test_values_that_make_no_schedule_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule.check()
