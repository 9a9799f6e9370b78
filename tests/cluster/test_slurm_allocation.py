"""What a task of a Slurm step knows of its job, from environments that a real Slurm (22.05) made."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtf.cluster.allocation import Allocation
from dtf.cluster.allocation_of import allocation_of
from dtf.cluster.node_lists import node_names, per_node, task_numbers
from dtf.core.errors import ConfigError

TASK = {
    "SLURM_JOB_ID": "35",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_RESTART_COUNT": "3",
    "DTF_DEADLINE": "1796644800",
    "DTF_REASON_FILE": "/run/job/reason.1",
}
PART = {
    "SLURM_JOB_ID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_HET_SIZE": "2",
    "SLURM_NTASKS_HET_GROUP_0": "3",
    "SLURM_NTASKS_HET_GROUP_1": "4",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1,4]",
    "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2,1",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_STEP_NUM_TASKS": "7",
    "DTF_ROLES": "server,trainer",
}


@pytest.mark.parametrize(
    "text, names",
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("node[01-03,7],other", ["node01", "node02", "node03", "node7", "other"]),
        ("gpu-a[098-101]", ["gpu-a098", "gpu-a099", "gpu-a100", "gpu-a101"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("a[1]-ib,b", ["a1-ib", "b"]),
    ],
)
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert node_names(text) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[1-", "n]", "n[1-2", "n[2-1]", "n[]", "n[x]", "n[0-999999999]", "a,,b"]
)
def test_what_is_no_list_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of nodes like"):
        node_names(text)


@given(st.text(alphabet="n12[]-,", max_size=12))
def test_any_text_is_a_list_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert all(name and not set("[],") & set(name) for name in node_names(text))


def test_tasks_of_each_node() -> None:
    assert per_node("4(x2),3") == [4, 4, 3]
    with pytest.raises(ConfigError, match="no list of tasks"):
        per_node("4(x2,3")


def test_a_task_of_each_node() -> None:
    assert allocation_of(TASK) == Allocation(
        nodes=2,
        node=1,
        address="n1:20035",
        restarts=3,
        deadline=1796644800.0,
        reason_file="/run/job/reason.1",
    )
    assert allocation_of({**TASK, "SLURM_RESTART_COUNT": "", "DTF_DEADLINE": ""}).restarts == 0


def test_each_process_of_the_roles() -> None:
    made = [allocation_of({**PART, "SLURM_PROCID": str(task)}) for task in range(7)]
    assert [(one.role, one.number) for one in made] == [
        ("server", 0), ("server", 1), ("server", 2), ("trainer", 0), ("trainer", 1), ("trainer", 2), ("trainer", 3),
    ]  # fmt: skip
    assert {one.endpoints for one in made} == {("n1:20003", "n1:20004", "n4:20005")}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "one task on each node"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        ({"SLURM_STEP_NODELIST": "n[1"}, "no list of nodes"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID=x is no number"),
    ],
)
def test_what_makes_no_sense_is_named(change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        allocation_of({**TASK, **change})


@pytest.mark.parametrize(
    "change, said",
    [
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID=7 is no task of the components server,trainer, which have 3 and 4"),
        ({"SLURM_TASKS_PER_NODE_HET_GROUP_0": "2"}, "are not the 3 tasks of the first component"),
    ],
)
def test_what_makes_no_sense_among_roles_is_named(change: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        allocation_of({**PART, "SLURM_PROCID": "0", **change})


@pytest.mark.parametrize("missing", ["SLURM_STEP_ID", "SLURM_PROCID"])
def test_outside_of_a_step_it_is_a_node_alone(missing: str) -> None:
    """A shell of salloc, or the batch script itself."""
    environment: dict[str, Any] = {name: text for name, text in TASK.items() if name != missing}
    assert allocation_of(environment) == Allocation(scheduled=False)


@pytest.mark.parametrize(
    "text",
    [
        "n[1-999999999]",
        "n[1-60000][1-60000]",
        "n[" + "1-60000," * 2000 + "1]",
        "n[1-60000]," * 2000 + "n",
        "n" + "[1-2]" * 2000,
    ],
)
def test_a_list_of_more_nodes_than_there_are_takes_no_memory(text: str) -> None:
    with pytest.raises(ConfigError, match="is no list of nodes"):
        node_names(text)
    assert node_names("a[1-2]b[08-09],c") == ["a1b08", "a1b09", "a2b08", "a2b09", "c"]


def test_neither_do_lists_of_tasks() -> None:
    with pytest.raises(ConfigError, match="is of more than 65,536 nodes"):
        per_node("1(x99999)," * 1000 + "1")
    with pytest.raises(ConfigError, match="is of more than 4,000,001 tasks"):
        task_numbers("0-999999999," * 1000 + "1")
