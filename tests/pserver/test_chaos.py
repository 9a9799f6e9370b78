"""Forty random kills of trainers and servers: no run hangs, and what comes out is what would have come out."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dtf.runs.compare import RecordedRun
from tests.pserver.test_kill import bits, left

pytestmark = pytest.mark.slow
STEPS = 100
BASE = [
    "plugins=[tests.support.kill_trigger]", "recipe=slow_toy", "recipe.rows=100", "step.batch_size=24",
    "step.micro_batch_rows=5",
    f"train.steps={STEPS}",
    "train.log_every=1", "train.eval_every=25", "checkpoint.every_steps=5", "checkpoint.keep_last=2",
    "train.record=true", "lr.warmup=0",
    "observer=[jsonl,kill_trigger]",
    "strategy=pserver", "strategy.min_block=1", "launcher.processes=3", "launcher.threads=1",
    "launcher.hang_timeout_s=30", "launcher.max_restarts=3",
]  # fmt: skip


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_random_kills(
    mode: str, servers: int, run_dtf: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten in each case, in steps 5 to 85; every second of a trainer. DTF_CHAOS_SEED repeats what was seen."""
    seed = int(os.environ.get("DTF_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    chance, words = (
        random.Random(seed),
        [
            *BASE,
            f"strategy.mode={mode}",
            f"strategy.servers={servers}",
            *(["step.clip_norm=0"] if mode != "sync" else []),
        ],
    )
    calm = run_dtf(*words)
    assert calm.code == 0, calm.err
    waits: dict[str, list[float]] = {"trainer": [], "server": []}
    for number in range(2):
        steps = sorted(chance.sample(range(5, 85, 3), 5))
        ranks = [chance.randrange(servers) if i % 2 else servers + chance.randrange(3) for i in range(5)]
        orders = ",".join(f"{step}:{rank}:SIGKILL" for step, rank in zip(steps, ranks, strict=True))
        book = tmp_path / f"book{number}"
        result = run_dtf(
            *words,
            f"observer.kill_trigger.orders=[{','.join(repr(order) for order in orders.split(','))}]",
            f"observer.kill_trigger.log={book}",
        )
        assert result.code == 0, f"seed {seed}: {orders}\n{result.err}"
        done = [line.split() for line in book.read_text().splitlines()]
        assert sorted(order for order, _ in done) == sorted(orders.split(",")), (
            f"seed {seed}: all were killed, and the run went on"
        )
        for order, seconds in done:
            waits["server" if int(order.split(":")[1]) < servers else "trainer"].append(float(seconds))
        ids = RecordedRun.read(result.folder).ids
        for epoch in range(STEPS // 5):
            once = Counter(i for step in range(5 * epoch, 5 * epoch + 5) for rank in ids[step] for i in rank)
            assert once == Counter(range(100)), f"seed {seed}: {orders}: epoch {epoch}"
        assert mode != "sync" or bits(result.folder) == bits(calm.folder), f"seed {seed}: {orders}"
        assert left(result.folder) == []
    with capsys.disabled():
        for role, seconds in waits.items():
            print(
                f"\n{mode}, {servers} servers, seed {seed}: {len(seconds)} kills of a {role}: median "
                f"{median(seconds):.2f} s, longest {max(seconds):.2f} s"
            )
