"""launcher=static with one host, and what it refuses; job=doctor on one host. Two hosts: test_hosts_apart.py."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from dtf.core.errors import ConfigError, Exit
from dtf.host import network

SMALL = [
    "recipe.data.train_rows=64",
    "recipe.data.eval_rows=16",
    "step.batch_size=16",
    "train.steps=2",
    "launcher.devices=cpu",
    "observer=[jsonl]",
]


def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.slow
def test_one_host_trains_as_with_local(run_dtf, tmp_path: Path) -> None:
    static = [
        "launcher=static",
        "launcher.nodes=1",
        "launcher.node_rank=0",
        f"launcher.address={address()}",
        f"launcher.log_dir={tmp_path / 'logs'}",
    ]
    lines = []
    for words in (static, ["launcher=local"]):
        done = run_dtf(*words, *SMALL, "launcher.processes=2")
        assert done.code == Exit.OK, done.err
        measured = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
        rates = [line["model_flops_per_s"] / line["rows_per_s"] for line in measured if line["split"] == "train"]
        assert min(rates) == pytest.approx(max(rates)) and min(rates) > 0, "operations of a row"
        lines.append(
            [
                {key: value for key, value in line.items() if key not in ("seconds", "rows_per_s", "model_flops_per_s")}
                for line in measured
            ]
        )
    assert lines[0] == lines[1]
    assert sorted(path.name for path in (tmp_path / "logs" / "run1").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert not list((tmp_path / "run1").glob("*.log"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launcher=static"], "launcher.nodes=??? is mandatory"),
        (
            ["launcher=static", "launcher.nodes=2", "launcher.node_rank=2", "launcher.address=a:1"],
            "launcher.node_rank=2 must be less than launcher.nodes=2",
        ),
        (
            ["launcher=static", "launcher.nodes=2", "launcher.node_rank=0", "launcher.address=here"],
            "launcher.address=here must be HOST:PORT",
        ),
        (
            [
                "launcher=static",
                "launcher.nodes=2",
                "launcher.node_rank=0",
                "launcher.address=127.0.0.1:1",
                "strategy=dp",
            ],
            "this strategy has 1 process(es), which do not divide among launcher.nodes=2 hosts",
        ),
        (
            ["launcher=torchrun", "launcher.rendezvous=a:1", "launcher.nodes=3:2"],
            "launcher.nodes=3:2 must be FEWEST:MOST hosts",
        ),
        (["launcher=torchrun", "launcher.rendezvous=a", "launcher.nodes=2"], "launcher.rendezvous=a must be HOST:PORT"),
        (
            ["launcher=env", "launcher.interface=nosuch0"],
            "launcher.interface=nosuch0 is no network interface of this host",
        ),
        (["launcher.log_dir=/proc/nowhere"], "launcher.log_dir=/proc/nowhere: /proc/nowhere/run1 cannot be made"),
    ],
)
def test_what_cannot_be_is_refused(run_dtf, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str) -> None:
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    done = run_dtf(*SMALL, *words)
    assert done.code == Exit.CONFIG
    assert text in done.err


def test_torchrun_needs_a_run_folder(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from dtf.cli.main import main

    assert main(["launcher=torchrun", "launcher.rendezvous=127.0.0.1:1", "launcher.devices=cpu"]) == Exit.CONFIG
    assert "launcher=torchrun needs run.dir=FOLDER" in capsys.readouterr().err
    assert (
        main(
            [
                "launcher=torchrun",
                "launcher.rendezvous=127.0.0.1:1",
                "launcher.devices=cpu",
                "run.dir=here",
                "checkpoint.resume=never",
            ]
        )
        == Exit.CONFIG
    )
    assert "launcher=torchrun needs checkpoint.resume=auto, not never" in capsys.readouterr().err
    assert not list(elsewhere.iterdir())


def test_doctor_looks_at_one_host(run_dtf, tmp_path: Path) -> None:
    done = run_dtf("job=doctor", "job.megabytes=1", "job.slow_mb_s=0", "launcher.devices=cpu", "launcher.processes=2")
    assert done.code == Exit.OK, done.err
    assert (
        "rank 0 to rank 1: " in done.out
        and "all-reduce of 1 MB over 2 ranks: " in done.out
        and "nothing is wrong" in done.out
    )
    assert not list(tmp_path.iterdir()), "it leaves nothing"


def test_doctor_says_what_is_wrong(run_dtf) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = [
            "launcher=static",
            "launcher.nodes=2",
            "launcher.node_rank=0",
            f"launcher.address=127.0.0.1:{port}",
            "launcher.devices=cpu",
        ]
        done = run_dtf("job=doctor", *words)
    assert done.code == Exit.CONFIG
    assert f"wrong: port {port} of 127.0.0.1 is taken by another program; choose another" in done.out
    assert "node 0 cannot listen there" in done.err


def test_interfaces_are_found_by_address() -> None:
    assert network.interface_of(network.own_address("127.0.0.1", 1)) == "lo"
    assert network.interface_of("192.0.2.77") == network.interface_of("2001:db8::77") == ""
    assert network.socket_variables("", ("127.0.0.1", 1), {}) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert network.socket_variables("", ("127.0.0.1", 1), {"GLOO_SOCKET_IFNAME": "eth7"}) == {}
    assert network.socket_variables("eth1", ("127.0.0.1", 1), dict(os.environ)) == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "eth1",
    }


@pytest.mark.parametrize(
    ("text", "found"), [("a.b:1", ("a.b", 1)), ("[::1]:29500", ("::1", 29500)), ("10.0.0.1:65535", ("10.0.0.1", 65535))]
)
def test_endpoints(text: str, found: tuple[str, int]) -> None:
    assert network.endpoint(text, "key") == found
    assert network.endpoint_text(*found) == text


@pytest.mark.parametrize(
    "text", ["", "a", "a:", ":1", "a:0", "a:65536", "a:b", "::1:29500", "[::1]", "[a]:1", "[::1:1", "a b:1", "a:٣"]
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ConfigError, match="must be HOST:PORT"):
        network.endpoint(text, "launcher.address")
