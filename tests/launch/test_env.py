"""launcher=env and launcher=inline: processes that somebody else started, and this one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtf.config.settings import Settings
from dtf.core import consistency
from dtf.core.errors import BusyError, ConfigError, DtfError, Exit, PeerError
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.launch.cluster_env import VARIABLES
from dtf.launch.env import Env
from dtf.runs.run_folder import Run
from tests.support.entries import listening

ROOT = Path(__file__).parents[2]
HERE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """`environment(RANK="1")`: those of the variables, and no others."""

    def make(**values: str) -> None:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.fixture
def port() -> Iterator[int]:
    """A port for the store of rank 0. It is bound here, so that the system gives it to nobody who asks for any."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: it may bind it too
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def test_the_world_comes_from_the_environment(environment) -> None:
    environment(**HERE)
    assert Env().count() == 4


def meet(
    rank: int, size: int, folder: str, seeds: list[int], attempt: int = 0, busy: bool = False, hosted: bool = True,
    port: int = 0,
    sizes: list[int] | None = None, wait_s: float = 600.0,
) -> dict[str, Any]:  # fmt: skip
    """What one rank gets from `Env.open`.

    `hosted`: the store is there already, as with torchrun; else rank 0 opens it on `port`.
    """
    import torch.distributed as dist

    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(sizes[rank] if sizes else size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port if hosted else port),
        "TORCHELASTIC_USE_AGENT_STORE": str(hosted),
    }
    made: list[str] = []

    def make(again: str) -> Run:
        made.append(again)
        if busy:
            raise BusyError("somebody lives here")
        return Run(Path(folder), f"run-{attempt}", {}, cast(Settings, None))

    found: dict[str, Any] = {}
    launchers = []  # with them goes the store that rank 0 hosts
    import dtf.config.settings

    dtf.config.settings.parse_settings = lambda config: SimpleNamespace(of=config)  # type: ignore[assignment,return-value]
    for number in range(attempt + 1):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        launchers.append(Env(devices="cpu", meet_timeout_s=wait_s))
        try:
            run = launchers[-1].open({"seed": seeds[rank]}, make)
            found = {
                "folder": str(run.folder),
                "id": run.id,
                "leader": run.leader,
                "made": made,
                "listening": listening(),
            }
        except DtfError as error:
            found = {"exit": int(error.exit), "message": str(error), "made": made}
        dist.barrier()
    return found


def test_rank_0_makes_the_folder_for_all(ranks, tmp_path: Path) -> None:
    first, *others = ranks(3, "tests.launch.test_env:meet", folder=str(tmp_path), seeds=[5, 5, 5])
    assert first["leader"] and first["made"] == [""]
    for other in others:
        assert (other["folder"], other["id"], other["leader"], other["made"]) == (str(tmp_path), "run-0", False, [])


def test_a_rank_that_differs_is_named_to_all(ranks, tmp_path: Path) -> None:
    for found in ranks(3, "tests.launch.test_env:meet", folder=str(tmp_path), seeds=[5, 5, 6]):
        assert found["exit"] == Exit.CONFIG and found["made"] == []
        assert found["message"].startswith(
            f"rank 2 on {socket.gethostname()} differs from rank 0: seed=6, rank 0 has 5; "
        )


@pytest.mark.parametrize(
    "sizes", [pytest.param([2, 3], marks=pytest.mark.slow), pytest.param([3, 2], marks=pytest.mark.slow), [3, 2, 3]]
)
def test_a_rank_of_another_world_is_named(ranks, tmp_path: Path, sizes: list[int], port: int) -> None:
    for found in ranks(
        len(sizes),
        "tests.launch.test_env:meet",
        folder=str(tmp_path),
        seeds=[5] * len(sizes),
        sizes=sizes,
        hosted=False,
        port=port,
    ):
        assert found["exit"] == Exit.CONFIG and found["made"] == []
        assert found["message"].startswith(
            f"rank 1 on {socket.gethostname()} differs from rank 0: world size={sizes[1]}, rank 0 has {sizes[0]}; "
        )


def test_a_rank_that_nobody_waits_for_ends_by_itself(ranks, tmp_path: Path, port: int) -> None:
    *others, extra = ranks(
        3,
        "tests.launch.test_env:meet",
        folder=str(tmp_path),
        seeds=[5, 5, 5],
        sizes=[2, 2, 3],
        hosted=False,
        port=port,
    )
    assert [other["id"] for other in others] == ["run-0", "run-0"]
    assert extra["exit"] == Exit.CONFIG and extra["message"].startswith(
        f"rank 2 on {socket.gethostname()} differs from rank 0: world size=3, rank 0 has 2; "
    )


def test_who_did_not_come_is_named_to_all(ranks, tmp_path: Path, port: int) -> None:
    for found in ranks(
        2,
        "tests.launch.test_env:meet",
        folder=str(tmp_path),
        seeds=[5, 5],
        sizes=[4, 4],
        hosted=False,
        port=port,
        wait_s=1.0,
    ):
        assert found["exit"] == Exit.PEER and found["made"] == []
        assert (
            found["message"]
            == f"rank 2, 3 of 4 did not come to 127.0.0.1:{port} within launcher.meet_timeout_s=1, or is gone; see "
            "job=doctor"
        )


def test_a_rank_that_waits_says_for_whom(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    for name, value in {**environment, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("dtf.launch.env._PATIENCE_S", 0.0)
    with pytest.raises(PeerError):
        Env(devices="cpu", meet_timeout_s=1.0).open({}, lambda again: cast(Run, None))
    waits = f"dtf: rank 0 of 2 waits at 127.0.0.1:{port} for the other ranks, up to launcher.meet_timeout_s=1\n"
    assert waits in capsys.readouterr().err


def test_a_busy_folder_ends_all_ranks(ranks, tmp_path: Path) -> None:
    for found in ranks(2, "tests.launch.test_env:meet", folder=str(tmp_path), seeds=[5, 5], busy=True):
        assert (found["exit"], found["message"]) == (Exit.BUSY, "somebody lives here")


def test_ranks_restarted_by_torchrun_go_on_in_the_first_folder(ranks, tmp_path: Path) -> None:
    first, second = ranks(2, "tests.launch.test_env:meet", folder=str(tmp_path), seeds=[5, 5], attempt=1)
    assert first["made"] == ["", str(tmp_path)]
    assert second["id"] == "run-1"


def test_rank_0_hosts_the_store_on_its_address_alone(ranks, tmp_path: Path, port: int) -> None:
    first, second = ranks(2, "tests.launch.test_env:meet", folder=str(tmp_path), seeds=[5, 5], hosted=False, port=port)
    assert first.get("folder") == second.get("folder") == str(tmp_path), (first, second)
    assert set(first["listening"]) == {"0100007F"}


def agree(rank: int, size: int, differ: bool) -> str:
    """What a rank hears when the last one has other data and another torch."""
    found = {"versions": {"torch": "2.15", "nccl": ""}, "training data": "100 rows"}
    if differ and rank == size - 1:
        found = {"versions": {"torch": "2.14", "nccl": ""}, "training data": "90 rows"}
    try:
        consistency.check_consistent(World(Place(rank=rank, size=size)), found)
        return ""
    except ConfigError as error:
        return str(error)


def test_ranks_with_other_versions_or_data_are_named_to_all(ranks) -> None:
    assert ranks(3, "tests.launch.test_env:agree", differ=False) == ["", "", ""]
    host = socket.gethostname()
    how = (
        f'training data="90 rows", rank 0 on {host} has "100 rows"; versions.torch="2.14", rank 0 on {host} has "2.15"'
    )
    for heard in ranks(3, "tests.launch.test_env:agree", differ=True):
        assert heard.startswith(f"ranks differ: rank 2 on {host}: {how}; give all the same")


SMALL = [
    "recipe.data.train_rows=64",
    "recipe.data.eval_rows=16",
    "step.batch_size=16",
    "train.steps=2",
    "launcher.devices=cpu",
    "observer=[]",
]


def test_inline_trains_in_this_process(run_dtf) -> None:
    before = signal.getsignal(signal.SIGTERM)
    done = run_dtf("launcher=inline", *SMALL)
    assert done.code == Exit.OK, done.err
    record = json.loads((done.folder / "run.json").read_text())
    assert (record["exit"], record["cause"]) == (0, "finished")
    assert list((done.folder / "checkpoints").glob("step_*2"))
    assert signal.getsignal(signal.SIGTERM) is before


def test_inline_is_one_process(run_dtf) -> None:
    done = run_dtf("launcher=inline", "launcher.processes=2", *SMALL)
    assert done.code == Exit.CONFIG
    assert "launcher=inline is one process, launcher.processes=2 needs 2" in done.err
    assert not done.folder.exists()
    assert run_dtf("launcher=inline", "launcher.processes=2", "strategy=dp", *SMALL).code == Exit.OK


def test_env_says_what_is_missing(run_dtf, environment) -> None:
    environment()
    done = run_dtf("launcher=env", *SMALL)
    assert done.code == Exit.CONFIG
    assert "launcher=env finds no rank in the environment, none of RANK (torchrun), " in done.err
    assert not done.folder.exists()


@pytest.mark.slow
def test_torchrun_works_plainly(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "dtf",
        "launcher=env",
        *SMALL,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, f"run.dir={tmp_path / 'run'}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["exit"] == 0 and record["world"]["processes"] == 2
