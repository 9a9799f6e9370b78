"""Run a chain and the same run left alone in one process, and compare them."""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from dtf.config.settings import load_parts
from dtf.core.errors import ConfigError
from dtf.strategies.buffers import SHARE
from tests.chains.chain import PLUGIN, Chain, Leg, draw
from tests.support.harness import Case, difference, reference, spread

DRAWS = 50
"""How often a seed is drawn at most."""

LEG_S = 60.0
"""The longest that a leg may take."""

FP64, FP32, HALF, TIPPED = 1e-10, 1e-5, 0.3, 1e-3
"""Bounds: fp64, of any tensor and metric; fp32 and half formats, of all parameters together; fp32, of the loss."""

_CONFIG_ERROR = re.compile(r"^dtf\.core\.errors\.ConfigError: (.*)", re.MULTILINE)


class Refused(Exception):
    """A combination that dtf refuses before the first step."""


@dataclass(kw_only=True)
class Outcome:
    """Of a seed. `why` is empty where the chain passed; `refused`: reasons why it was drawn again."""

    seed: int
    why: str = ""
    difference: float = 0.0
    seconds: float = 0.0
    refused: list[str] = field(default_factory=list)
    chain: dict[str, Any] = field(default_factory=dict)


def attempt(seed: int) -> Outcome:
    """Draw until dtf takes the chain, and judge it."""
    outcome, began = Outcome(seed=seed), time.monotonic()
    load_parts([PLUGIN])
    for number in range(DRAWS):
        chain = draw(seed, number)
        outcome.chain = asdict(chain)
        try:
            check(chain)
            outcome.difference, outcome.why = _judge(chain)
            break
        except (Refused, ConfigError) as error:
            outcome.refused.append(str(error))
        except AssertionError as error:
            outcome.why = str(error)[-4000:] or "an assertion of the harness"
            break
    else:
        outcome.why = f"refused {DRAWS} times"
    outcome.seconds = round(time.monotonic() - began, 2)
    return outcome


def check(chain: Chain) -> None:
    """ConfigError for what can be told without ranks."""
    for leg in chain.legs:
        case = Case(strategy=leg.strategy, options=leg.options, **chain.case)
        task = case.task()
        case.chosen(task).check(task, leg.processes, "cpu")
        if task.recipe.pairs and task.step.parts_pairs(task.step.micro_batch_rows):
            raise ConfigError("step.micro_batch_rows parts the pairs of rows that the recipe mixes")


def _judge(chain: Chain) -> tuple[float, str]:
    """The largest difference, and what is wrong."""
    run = broken(chain)
    whole = _taken(lambda: reference(**chain.case))
    wrong = _wrong_ids(chain, run["ids"])
    if wrong:
        return 0.0, wrong
    return _compare(chain.case["precision"], whole, run)


def broken(chain: Chain) -> dict[str, Any]:
    """All legs as one run."""
    found: dict[str, Any] = {"train": {}, "eval": {}, "ids": {}}
    with tempfile.TemporaryDirectory(prefix="dtf-chain-") as folder:
        start = ""
        for i, leg in enumerate(chain.legs):
            last = i == len(chain.legs) - 1
            place = str(Path(folder, str(i)))
            plan = {"start": start} | ({} if last else {"folder": place, "save_every": leg.until, "halt": True})
            result = _taken(lambda leg=leg, plan=plan: _run(leg, chain.case | plan))
            for key in ("train", "eval", "ids"):
                twice = sorted(found[key].keys() & result[key].keys())
                assert not twice, f"leg {i} has {key} of steps {twice} again"
                found[key] |= result[key]
            found["tensors"], start = result["tensors"], str(Path(place, f"step_{leg.until:06}"))
    return found


def _run(leg: Leg, case: dict[str, Any]) -> dict[str, Any]:
    return spread(leg.strategy, leg.processes, options=leg.options, timeout_s=LEG_S, **case)


def _taken(call: Any) -> dict[str, Any]:
    """What the call returns. Refused where a rank refused before its first step."""
    try:
        return call()
    except AssertionError as error:
        for part in str(error).split("Traceback (most recent call last):"):
            found = _CONFIG_ERROR.search(part)
            started = "in fit\n" in part or ("in _live\n" in part and "in __init__\n" not in part)
            if found and not started:
                raise Refused(found[1]) from error
        raise


def _wrong_ids(chain: Chain, ids: dict[str, list[int]]) -> str:
    """What is wrong with the samples that were visited, against the sampler and against `once in an epoch`."""
    case = Case(**chain.case)
    task = case.task()
    training = task.recipe.open_data("train", 0)
    epochs, rows = case.epochs(training), len(training)
    if sorted(map(int, ids)) != list(range(case.steps)):
        return f"steps {sorted(map(int, ids))}"
    for epoch, group in groupby(range(case.steps), lambda step: step // epochs.batches):
        steps = list(group)
        for step in steps:
            if sorted(ids[str(step)]) != sorted(epochs.ids(epoch, step % epochs.batches).tolist()):
                return f"step {step}: other samples than the sampler gives"
        visited = [i for step in steps for i in ids[str(step)]]
        if case.sampler in ("shuffle", "sequential") and len(steps) == epochs.batches:
            once = {"partial": sorted(visited) == list(range(rows)), "fill": set(visited) == set(range(rows))}
            if not once.get(case.tail, len(set(visited)) == len(visited) == epochs.batches * case.batch_size):
                return f"epoch {epoch}: not each sample once"
    return ""


def _compare(precision: str, whole: dict[str, Any], run: dict[str, Any]) -> tuple[float, str]:
    """The difference of two runs in the measure of their precision, and what is wrong."""
    if precision == "fp64":
        found = difference(whole, run)
        return found, "" if found <= FP64 else f"{_worst(whole, run)} differs by {found:.1e}, at most {FP64:g}"
    assert whole["ids"] == run["ids"], "other samples"
    names, others = ({name for name in other["tensors"] if not name.startswith(SHARE)} for other in (whole, run))
    assert names == others, f"other tensors: {sorted(names ^ others)}"
    for split in ("train", "eval"):
        assert whole[split].keys() == run[split].keys(), f"other steps of {split}"
        for step, values in run[split].items():
            assert values.keys() == whole[split][step].keys(), f"{split}, step {step}: other metrics"
            loss, other = values["loss"], whole[split][step]["loss"]
            bound = TIPPED if precision == "fp32" else HALF
            if not abs(loss - other) <= bound * max(abs(other), 1e-30):
                return abs(loss - other) / max(abs(other), 1e-30), f"{split}, step {step}: loss {loss}, not {other}"
    found, bound = _of_all(whole["tensors"], run["tensors"]), FP32 if precision == "fp32" else HALF
    return found, "" if found <= bound else f"all parameters differ by {found:.1e}, at most {bound:g}"


def _of_all(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The L2 norm of the difference of all parameters and buffers, relative to theirs; NaN stays NaN."""
    names = [name for name in a if name.startswith("model/") and not name.endswith("/ids")]
    one, two = (np.concatenate([np.ravel(np.asarray(run[name], float)) for name in names]) for run in (a, b))
    return float(np.linalg.norm(one - two) / np.linalg.norm(one))


def _worst(whole: dict[str, Any], run: dict[str, Any]) -> str:
    """The name of the first metric beyond the bound, or of the worst tensor."""
    for split in ("train", "eval"):
        for step, values in whole[split].items():
            for name, value in values.items():
                if not abs(run[split][step][name] - value) <= FP64 * max(map(abs, values.values())):
                    return f"{split}, step {step}: {name}"

    def off(name: str) -> float:
        a, b = np.asarray(whole["tensors"][name]), np.asarray(run["tensors"][name])
        return np.nan_to_num(np.abs(a - b).max() / max(np.abs(a).max(), 1e-30), nan=np.inf) if a.size else 0.0

    return max(whole["tensors"], key=off)
