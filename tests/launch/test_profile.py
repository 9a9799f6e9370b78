"""observer=profile: traces of the ranks that were chosen, and a line that says where the time goes."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from timeit import timeit

from dtf.api.observer import Probe, Probes
from dtf.model.annotate import section

SMALL = (
    "recipe.data.train_rows=64",
    "recipe.data.eval_rows=32",
    "step.batch_size=8",
    "train.epochs=1",
    "checkpoint=off",
    "launcher.threads=1",
)


def test_the_window_on_the_chosen_ranks(run_dtf):
    done = run_dtf(
        "observer=[console,jsonl,profile]",
        "observer.profile.skip=2",
        "observer.profile.steps=3",
        "observer.profile.ranks=[1]",
        *SMALL,
    )
    assert done.code == 0, done.err
    assert {path.name for path in (done.folder / "profile").iterdir()} == {"rank_1.pt.trace.json", "rank_1.json"}
    kept = json.loads((done.folder / "profile" / "rank_1.json").read_text())
    assert (kept["rank"], kept["first_step"], kept["steps"]) == (1, 2, 3)
    assert (
        all(kept["parts"][name] > 0 for name in ("forward", "backward", "optimizer", "data"))
        and abs(sum(kept["parts"].values()) - 1) < 1e-9
    )
    events = json.loads((done.folder / "profile" / "rank_1.pt.trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"dtf:forward", "dtf:backward", "dtf:optimizer", "dtf:data", "gloo:all_reduce"} <= names
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == 3
    (line,) = re.findall(r"^info: profile of rank 1, steps 2 to 4: .*$", done.out, re.MULTILINE)
    assert re.search(r" ms a step: data \d+ %, forward \d+ %, backward \d+ %, communication \d+ %", line)


def test_threads_of_dp_and_a_window_that_the_end_cuts(run_dtf):
    done = run_dtf(
        "strategy=dp",
        "launcher=inline",
        "launcher.processes=2",
        "observer=[console,profile]",
        "observer.profile.skip=6",
        *SMALL,
    )
    assert done.code == 0, done.err
    kept = json.loads((done.folder / "profile" / "rank_0.json").read_text())
    assert kept["first_step"] == 6 and 1 <= kept["steps"] <= 2 and kept["parts"]["backward"] > 0.1


def test_a_window_that_never_comes_is_told(run_dtf):
    done = run_dtf("launcher=inline", "observer=[console,profile]", "observer.profile.skip=8", "train.until=4", *SMALL)
    assert done.code == 0 and "ended after 4 steps, the window begins after 8; lower observer.profile.skip" in done.out


def test_a_rank_that_is_not_there_is_refused(run_dtf):
    done = run_dtf("launcher=inline", "observer=[profile]", "observer.profile.ranks=[0,3]", *SMALL)
    assert done.code == 2 and "observer.profile.ranks=[0, 3] names rank 3; there are 1, 0 to 0" in done.err
    assert run_dtf("observer=[profile]", "observer.profile.ranks=[]", *SMALL).code == 2


def test_a_broken_probe_ends_alone():
    class Broken(Probe):
        closed = 0

        def enter(self, phase: str, step: int) -> None:
            raise OSError("no space left")

        def close(self) -> None:
            self.closed += 1

    warnings: list[str] = []
    probes = Probes({"profile": (broken := Broken())}, warnings.append)
    probes.enter("step", 0)
    probes.enter("fetch", 1)
    probes.close()
    assert (
        warnings == ["observer.profile stops watching, the run goes on: OSError: no space left"] and broken.closed == 1
    )
    assert not probes


def test_a_section_costs_nothing_to_speak_of_while_no_trace_is_taken():
    assert isinstance(section("forward"), nullcontext)
    best = min(timeit(lambda: section("forward"), number=2000) / 2000 for _ in range(5))
    assert best < 5e-6
