"""What is said of a parameter server before anything is started: options out of range, and options that would have no
effect.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.config.compose import compose
from dtf.config.settings import Settings
from dtf.core.errors import ConfigError, Exit
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.engine.clock import Plan
from dtf.engine.summary import startup_table
from dtf.pserver.manual_start import check_certificates
from dtf.pserver.strategy import Pserver
from tests.conftest import Result
from tests.pserver.test_rpc import certificate

REFUSED = [
    ("record=yes mode=async", "strategy.record=yes is no switch"),
    ("record=on mode=async", "strategy.record=on is no switch"),
    ("mode=geo staleness=1", "as optimizer=adam keeps them, may become negative; leave it at null"),
    ("mode=geo staleness=1 wire=bf16", "strategy.wire=bf16 narrows gradients"),
    ("mode=asyn", "did you mean async? choices: async, geo, half_async, sync"),
    ("rpc_threads=6", "each of 3 trainers may wait in two"),
    ("rpc_threads=12 mode=async hogwild_threads=2", "each of 6 trainers may wait in two"),
    ("slice_parameters=false min_block=16", "strategy.min_block=16 is for slices"),
    ("meet_timeout_s=5", "strategy.meet_timeout_s=5 is for strategy.endpoints"),
    *(
        (f"record={name}", f"strategy.record={name} must name a folder of its own")
        for name in ("/tmp/order", "../order", "a/b", ".", "run.json", "checkpoints")
    ),
]


def check(words: str, processes: str = "launcher.processes=3") -> Settings:
    given = [f"strategy.{word}" for word in words.split()]
    return compose(["recipe=ctr_clicks", "strategy=pserver", "launcher.devices=cpu", processes, *given]).check()


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_has_no_effect_or_cannot_be_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(words)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "window"),
    [
        ("recipe=ctr_clicks", 0),
        ("recipe=ctr_clicks optimizer=sgd", 1),
        ("recipe=ctr_clicks_sparse optimizer=sgd", 1),
        ("recipe=ctr_clicks_sparse optimizer=sgd sparse=lazy_adam", 0),
        ("recipe=ctr_clicks optimizer=sgd strategy.staleness=3", 3),
    ],
)
def test_geo_exchanges_at_once_where_an_optimizer_averages_squares(words: str, window: int) -> None:
    settings = compose([*words.split(), "strategy=pserver", "strategy.mode=geo", "launcher.devices=cpu"]).check(False)
    task = Task(settings.recipe, settings.optimizer, settings.precision, settings.step, 0, rows=settings.sparse)
    assert cast(Pserver, settings.strategy).sync_mode(task).window(2) == window


@pytest.mark.parametrize(
    ("words", "fits"),
    [("trainers=3", False), ("trainers=4", True), ("trainers=2 team=2", True), ("trainers=1 team=2", False)],
)
def test_trainers_and_processes_that_differ_are_refused(words: str, fits: bool) -> None:
    settings = check(words, "launcher.processes=4")
    with (
        nullcontext()
        if fits
        else pytest.raises(ConfigError, match=r"launcher.processes=4 and strategy.trainers=. .* differ")
    ):
        settings.launcher.check(settings.strategy)
    settings = check(words, "launcher.processes=auto")
    settings.launcher.check(settings.strategy)


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with openssl")
def test_a_certificate_for_another_host_is_refused_under_a_launcher(tmp_path: Path) -> None:
    for names, message in (
        ("IP:127.0.0.1", ""),
        ("IP:10.0.0.1", "does not do for 127.0.0.1"),
        ("", "does not do for 127.0.0.1"),
    ):
        key, cert = certificate(tmp_path, "run", names)
        words = f"tls.mode=mtls tls.ca={cert} tls.cert={cert} tls.key={key}"
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            check(words)
    _, stranger = certificate(tmp_path, "stranger")
    key, cert = certificate(tmp_path, "run")
    with pytest.raises(ConfigError, match="self-signed"):
        check(f"tls.mode=tls tls.ca={stranger} tls.cert={cert} tls.key={key}")


@pytest.mark.parametrize("key", ["job=status job.run_folder", "job=verify job.replay"])
def test_a_run_folder_that_is_none(key: str, tmp_path: Path, run_dtf: Callable[..., Result]) -> None:
    job, key = key.split()
    missing = run_dtf(job, f"{key}={tmp_path / 'typo'}")
    assert (
        missing.code == Exit.DATA
        and f"{key}={tmp_path / 'typo'} does not exist; give the folder of a run" in missing.err
    )


def test_the_table_of_a_run_counts_processes_by_their_roles() -> None:
    composed = compose(
        ["recipe=ctr_clicks", "strategy=pserver", "strategy.servers=2", "launcher.devices=cpu", "launcher.processes=3"]
    )
    # in mode async a step is one share
    program = cast(Program, SimpleNamespace(shares=1, micro_batch_rows=64, about=dict))
    world, plan = World(Place(size=2, slots=3, role="server", threads=2)), Plan(5, 1, 0, 0)
    table = startup_table(composed.check(), composed.config, Path("run"), (6, 6), program, world, plan, [], 10, 10)
    assert table["strategy"] == "pserver servers=2 on 2 servers, 3 trainers, 2 threads a server"
    assert table["batch"].endswith(" over 1 share")


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nnone\n")
    for names, message in (
        (("ca", "cert", "key"), f"strategy.tls.ca={junk} holds no certificate"),
        (("cert", "key"), f"strategy.tls.key={junk} are no"),
    ):
        with pytest.raises(ConfigError) as refused:
            check_certificates("strategy.tls", dict.fromkeys(names, str(junk)))
        assert message in str(refused.value)


@pytest.mark.parametrize(
    "words", ["mode=async record=order", "rpc_threads=7", "slice_parameters=false", "min_block=16"]
)
def test_what_has_an_effect_is_not(words: str) -> None:
    check(words)
