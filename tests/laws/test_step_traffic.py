"""The start-up table says what ranks of a device mesh send in a step: what collectives and messages carry then."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtf.core.types import Train
from dtf.data.batches import Epochs
from dtf.strategies import spmd
from dtf.strategies.pipeline import program
from dtf.strategies.step_traffic import mesh_rows
from tests.support.harness import Case, _Run
from tests.support.ranks import ranks

OF_A_RING = {"allreduce_": 2, "all_reduce": 2, "_reduce_scatter_base_": 1, "_allgather_base_": 1, "allgather_": 1}


class Counting(TorchDispatchMode):
    """Bytes that this rank sends by operators of process groups, by the axes along which their ranks differ."""

    def __init__(self, places: list[dict[str, int]]) -> None:
        super().__init__()
        self.places, self.found, self.small = places, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "recv_"):
            if func.namespace == "c10d":
                group = dist.ProcessGroup.unbox(next(a for a in args if isinstance(a, torch.ScriptObject)))
            else:
                group = dist.distributed_c10d._resolve_process_group(args[-1])
            members = [self.places[rank] for rank in dist.get_process_group_ranks(group)]
            axes = [axis for axis in members[0] if len({member[axis] for member in members}) > 1]
            each = [sum(t.nbytes for t in tree_leaves(part) if isinstance(t, Tensor)) for part in (*args, results)]
            n = len(members)
            size = max(each) * (1 if name == "send" else OF_A_RING[name] * (n - 1) / n)
            print(name, axes, size, flush=True)
            self.found[" ".join(axes)] += size
        return results


def step(rank: int, size: int, strategy: str, options: dict[str, Any], **case: Any) -> list[dict[str, float]]:
    """What this rank is said to send in a step, and what it sent."""
    torch.set_num_threads(1)
    said: dict[str, float] = {}

    def hear(sent: Any, *rest: Any) -> dict[str, str]:
        said.update({axis: one.bytes for axis, one in sent.items()})
        return mesh_rows(sent, *rest)

    with patch.object(spmd, "mesh_rows", hear), patch.object(program, "mesh_rows", hear):
        run = _Run(rank, size, Case(strategy=strategy, options=options, **case))
    made = run.program
    print(made.about())
    rows = run._rows("train", made.shard, made.micro_batch_rows).get(0, 0) if made.shard else None
    batch = made.prepare(rows)
    with Counting([made._dims.place_of(other) for other in range(size)]) as counting:
        made.step(Train(0, 0, 0, run.case.batch_size, 0.1), batch)
    return [said, dict(counting.found), made.about()]


@pytest.mark.parametrize(
    ("options"),
    [
        {"pipeline": 2, "tensor": 2},
        {"replicate": 2, "shard": 2, "zero": 3},
        {"replicate": 2, "shard": 2, "zero": 1},
        {"pipeline": 2, "shard": 2, "zero": 2},
        {"replicate": 2, "tensor": 2},
    ],
)
def test_the_table_says_what_is_sent(options: dict[str, Any]) -> None:
    for said, sent, about in ranks(4, "tests.laws.test_step_traffic:step", strategy="mesh", options=options):
        print(said, sent, about)
    assert 0
