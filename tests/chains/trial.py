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
from dtf.runs.compare import NOISE_FACTOR
from dtf.strategies.buffers import SHARE
from tests.chains.chain import PLUGIN, Chain, Leg, draw
from tests.support.harness import Case, reference, spread

DRAWS = 50
"""How often a seed is drawn at most."""

LEG_S = 60.0
"""The longest that a leg may take."""

FP64, FP32, FP32_LOSS, HALF = 1e-10, 1e-5, 1e-3, 0.3
"""Bounds: of any tensor and metric; of all parameters together; of a loss; of both in half formats."""

NOISES = (1, 2, 3, 4)
"""Seeds of undisturbed runs that begin one rounding away: what is beyond its bound may be NOISE_FACTOR times as far off
as the worst of them. Two runs of one chain can be three times as far off as two others.
"""

_CONFIG_ERROR = re.compile(r"^dtf\.core\.errors\.ConfigError: (.*)", re.MULTILINE)


class Refused(Exception):
    """A combination that dtf refuses before the first step."""


@dataclass(kw_only=True)
class Outcome:
    """Of a seed. `why` is empty where the chain passed; `refused`: reasons why it was drawn again."""

    seed: int
    why: str = ""
    difference: float = 0.0
    """The largest one that is within its bound."""
    rounding: dict[str, list[float]] = field(default_factory=dict)
    """What is beyond its bound -> how far off it is, and how far rounding may put it."""
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
            judge(chain, outcome)
            break
        except (Refused, ConfigError) as error:
            outcome.refused.append(str(error))
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


def judge(chain: Chain, outcome: Outcome) -> Outcome:
    """The outcome, with what the chain shows. Refused where dtf does not take it."""
    load_parts([chain.case["plugin"]])
    try:
        outcome.why = _wrong(chain, outcome)
    except AssertionError as error:
        outcome.why = str(error)[-4000:] or "an assertion of the harness"
    return outcome


def _wrong(chain: Chain, outcome: Outcome) -> str:
    """What is wrong; empty where nothing is."""
    run = broken(chain)
    whole = _taken(lambda: reference(**chain.case))
    wrong = _wrong_ids(chain, run["ids"])
    if wrong:
        return wrong
    found = _distances(chain, whole, run)
    beyond = {name: value for name, (value, bound) in found.items() if not value <= bound}
    outcome.difference = max((value for name, (value, _) in found.items() if name not in beyond), default=0.0)
    if not beyond:
        return ""
    noises = [_distances(chain, whole, reference(**chain.case, perturb=seed)) for seed in NOISES]
    allowed = {name: NOISE_FACTOR * max(noise[name][0] for noise in noises) for name in beyond}
    outcome.rounding = {name: [value, allowed[name]] for name, value in beyond.items()}
    # as `job=verify` judges: in fp64 rounding excuses no loss or gradient norm of a step
    strict = chain.case["precision"] == "fp64"
    wrong = {
        name: value
        for name, value in beyond.items()
        if (strict and name.startswith("train, ")) or not (np.isfinite(value) and value <= allowed[name])
    }
    return "; ".join(
        f"{name} differs by {value:.1e}, at most {found[name][1]:g}, and {allowed[name]:.1e} for rounding"
        for name, value in list(wrong.items())[:8]
    )


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
            if found and ("in warmup\n" in part or not started):  # trainers live in threads here, and warm up inside
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


def _distances(chain: Chain, whole: dict[str, Any], run: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """What is compared -> how far it is from the undisturbed run, relative to the largest value, and its bound."""
    precision = chain.case["precision"]
    exact, loss_bound = precision == "fp64", {"fp64": FP64, "fp32": FP32_LOSS}.get(precision, HALF)
    names, others = ({name for name in each["tensors"] if not name.startswith(SHARE)} for each in (whole, run))
    assert names == others, f"other tensors: {sorted(names ^ others)}"
    found = {}
    for split in ("train", "eval"):
        assert whole[split].keys() == run[split].keys(), f"other steps of {split}"
        for step, values in whole[split].items():
            assert values.keys() == run[split][step].keys(), f"{split}, step {step}: other metrics"
            chosen = list(values) if exact else ["loss"]  # in fp32 a row that is nearly tied tips a count
            a, b = ([each[name] for name in chosen] for each in (values, run[split][step]))
            found[f"{split}, step {step}"] = (_distance(a, b), loss_bound)
    if exact:
        pairs = {name: (whole["tensors"][name], run["tensors"][name]) for name in sorted(names)}
        return found | {name: (_distance(*pair), FP64) for name, pair in pairs.items()}
    found["parameters"] = (_of_all(whole["tensors"], run["tensors"]), FP32 if precision == "fp32" else HALF)
    return found


def _distance(a: Any, b: Any) -> float:
    """max|a - b| / max|a|; infinite where anything is not finite."""
    one, two = np.asarray(a), np.asarray(b)
    assert one.shape == two.shape, f"shape {two.shape}, not {one.shape}"
    if not one.size:
        return 0.0
    found = float(np.abs(one - two).max() / max(np.abs(one).max(), 1e-30))
    return found if np.isfinite(found) else np.inf


def _of_all(a: dict[str, Any], b: dict[str, Any]) -> float:
    """The L2 norm of the difference of all parameters and buffers, relative to theirs."""
    names = [name for name in a if name.startswith("model/") and not name.endswith("/ids")]
    one, two = (np.concatenate([np.ravel(np.asarray(run[name], float)) for name in names]) for run in (a, b))
    found = float(np.linalg.norm(one - two) / np.linalg.norm(one))
    return found if np.isfinite(found) else np.inf
