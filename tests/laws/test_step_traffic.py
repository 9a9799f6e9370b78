"""The start-up table says what ranks of a device mesh send in a step: what collectives and messages carry then."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtf.core.text import bytes_text
from dtf.core.types import Train
from dtf.strategies import spmd
from dtf.strategies.pipeline import program
from dtf.strategies.step_traffic import mesh_rows
from tests.support.harness import BATCH, Case, _Run
from tests.support.ranks import ranks

OF_A_RING = {
    "allreduce_": 2,
    "all_reduce": 2,
    "_reduce_scatter_base_": 1,
    "_allgather_base_": 1,
    "allgather_": 1,
    "all_to_all_single": 1,
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
}


class Counting(TorchDispatchMode):
    """Bytes that this rank sends by operators of process groups, by the first axis along which their ranks differ."""

    def __init__(self, places: list[dict[str, int]]) -> None:
        super().__init__()
        self.places, self.found = places, dict[str, float]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        results = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "recv_"):
            boxed = [value for value in args if isinstance(value, torch.ScriptObject)]
            group = (
                dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(args[-1])
            )
            members = [self.places[rank] for rank in dist.get_process_group_ranks(group)]
            axis = next((axis for axis in members[0] if len({member[axis] for member in members}) > 1), "")
            size = max(sum(t.nbytes for t in tree_leaves(each) if isinstance(t, Tensor)) for each in (*args, results))
            part = (len(members) - 1) / len(members)
            sent = size * (1 if name == "send" else OF_A_RING[name] * part)
            self.found[axis] = self.found.get(axis, 0.0) + sent
        return results


def step(rank: int, size: int, strategy: str, options: dict[str, Any], **case: Any) -> dict[str, Any]:
    """What this rank is said to send in a step, what it sent, and its line of the table."""
    said: dict[str, float] = {}

    def hear(sent: Any, *rest: Any) -> dict[str, str]:
        said.update({axis: one.bytes for axis, one in sent.items()})
        return mesh_rows(sent, *rest)

    with patch.object(spmd, "mesh_rows", hear), patch.object(program, "mesh_rows", hear):
        run = _Run(rank, size, Case(strategy=strategy, options=options, eval_every=0, **case))
    made: Any = run.program
    rows = run.loader.get(0, 0) if made.shard else None
    trained = sum(parameter.requires_grad for parameter in run.toy.build_model().parameters())
    for number in range(2):  # the first one also describes messages
        batch = made.prepare(rows)
        with Counting([made._dims.place_of(other) for other in range(size)]) as counting:
            made.step(Train(number, 0, 0, BATCH, 0.1), batch)
    return {"said": said, "sent": counting.found, "trained": trained, "table": made.about()}


TIED = {"plugin": "tests.support.tied", "recipe": {"name": "tied", "kind": "function"}}
CAUSAL = {"plugin": "tests.support.causal", "recipe": {"name": "causal"}}
CASES = [
    ("mesh", {"pipeline": 2, "tensor": 2}, {}),
    ("mesh", {"replicate": 2, "shard": 2, "zero": 1}, {}),
    ("mesh", {"pipeline": 2, "shard": 2, "zero": 2}, {}),
    *(
        pytest.param(name, options, case, marks=pytest.mark.slow)
        for name, options, case in (
            ("fsdp", {"replicate": 2}, {}),
            ("fsdp", {"reshard_after_forward": False}, {}),
            ("tensor", {"degree": 2}, {}),
            ("pipeline", {"degree": 2}, TIED),
            ("mesh", {"shard": 2, "tensor": 2, "zero": 2}, {}),
            ("mesh", {"context": 2, "tensor": 2}, CAUSAL),
            ("mesh", {"shard": 2, "context": 2}, CAUSAL),
            ("mesh", {"replicate": 2, "context": 2}, CAUSAL),
        )
    ),
]


@pytest.mark.parametrize(("strategy", "options", "case"), CASES)
def test_the_table_says_what_is_sent(strategy: str, options: dict[str, Any], case: dict[str, Any]) -> None:
    """To the byte, but for the norms of gradients: a number for each parameter."""
    found = ranks(4, "tests.laws.test_step_traffic:step", shared=True, strategy=strategy, options=options, **case)
    for one in found:
        norms = {axis: size - one["said"].get(axis, 0) for axis, size in one["sent"].items()}
        assert all(0 <= size <= 2 * 8 * one["trained"] for size in norms.values()), one
        assert one["said"].keys() <= norms.keys()
    table = found[0]["table"]
    for axis in found[0]["said"]:
        most = max(one["said"].get(axis, 0) for one in found)
        assert f"{axis} {bytes_text(round(most))} in " in table["sends"], table
        assert f"{axis} " in table["mesh"]
