"""`strategy.trainers=auto`: the layout follows from the cores of the host, once, and what is set stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtf.config.compose import compose
from dtf.config.settings import parse_settings
from dtf.core.errors import ConfigError
from dtf.core.renamed import upgraded_config
from dtf.host import devices
from dtf.pserver.host_layout import MOST_TRAINERS, HostLayout, host_layout
from dtf.pserver.options import Mode

AUTO = ["strategy=pserver", "strategy.trainers=auto", "launcher.devices=cpu"]


def layout_of(config: dict[str, Any]) -> HostLayout:
    launcher = config["launcher"]
    return HostLayout(launcher["processes"], config["strategy"]["servers"])


def on(monkeypatch: pytest.MonkeyPatch, cores: int, *overrides: str) -> HostLayout:
    monkeypatch.setattr(devices, "cores", lambda: cores)
    return layout_of(compose([*AUTO, *overrides]).config)


def test_every_core_has_a_trainer_up_to_a_bound() -> None:
    for cores in range(1, 200):
        for mode in Mode:
            for hogwild in (1, 2, 3):
                trainers, servers = host_layout(mode, cores, hogwild)
                assert 1 <= trainers <= min(cores, MOST_TRAINERS) and 1 <= servers <= trainers
                assert mode is not Mode.sync or trainers == 1
                assert host_layout(mode, cores, 1, team=4).trainers % 4 == 0


@pytest.mark.parametrize(("mode", "expected"), [("sync", (1, 1)), ("async", (2, 1)), ("geo", (2, 1))])
def test_two_cores(monkeypatch: pytest.MonkeyPatch, mode: str, expected: tuple[int, int]) -> None:
    assert on(monkeypatch, 2, f"strategy.mode={mode}") == expected


def test_what_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["strategy.mode=async"]
    assert on(monkeypatch, 32, *overrides) == (8, 2)
    assert on(monkeypatch, 32, *overrides, "launcher.processes=3") == (3, 2)
    assert on(monkeypatch, 32, *overrides, "launcher.threads=2") == (8, 2)
    assert on(monkeypatch, 32, *overrides, "launcher.threads=8") == (4, 2), "no more threads than cores"
    assert on(monkeypatch, 2, *overrides, "launcher.threads=2") == (1, 1)
    assert on(monkeypatch, 2, *overrides, "launcher.threads=3") == (1, 1)
    assert on(monkeypatch, 32, *overrides, "strategy.servers=1") == (8, 1)
    assert on(monkeypatch, 32, *overrides, "launcher.processes=auto", "launcher.threads=0") == (8, 2)


def test_threads_are_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """launcher=local divides the cores where nothing is."""
    monkeypatch.setattr(devices, "cores", lambda: 8)
    assert compose([*AUTO]).config["launcher"]["threads"] == 0
    assert compose([*AUTO, "launcher.threads=3"]).config["launcher"]["threads"] == 3


def test_without_auto_nothing_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 32)
    assert layout_of(compose(["strategy=pserver", "launcher.devices=cpu"]).config) == ("auto", 1)


def test_it_is_the_same_on_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks get the config that was filled in, and do not look at their host."""
    monkeypatch.setattr(devices, "cores", lambda: 16)
    config = compose([*AUTO, "strategy.mode=async"]).config
    monkeypatch.setattr(devices, "cores", lambda: 3)
    settings = parse_settings(config)
    assert settings.launcher.count() == 8
    assert settings.strategy.roles(settings.launcher.count()) == {"server": 1, "trainer": 8}


def earlier_run(folder: Path, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cores", lambda: cores)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(compose([*AUTO, "strategy.mode=async"]).config))


def test_a_run_that_goes_on_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / "run"
    earlier_run(run, 32, monkeypatch)
    here = ["strategy.mode=async", f"run.dir={run}"]
    assert on(monkeypatch, 4, *here) == (8, 2), "checkpoint.resume=auto"
    assert on(monkeypatch, 4, *here, "checkpoint.resume=never") == (4, 1)
    assert on(monkeypatch, 4, *here, "launcher.processes=2") == (2, 2), "what is set stays"
    (run / "checkpoints" / "step_000001").mkdir(parents=True)
    elsewhere = [f"run.dir={tmp_path / 'other'}", f"checkpoint.resume={run}", "strategy.mode=async"]
    assert on(monkeypatch, 4, *elsewhere) == (8, 2), "that of the run whose checkpoint it is"


def test_a_run_that_was_laid_out_by_hand_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(compose(["strategy=pserver", "launcher.processes=7", "strategy.servers=3"]).config)
    )
    assert on(monkeypatch, 4, "strategy.mode=async", f"run.dir={tmp_path}") == (4, 1)


def test_only_where_one_command_starts_all() -> None:
    with pytest.raises(ConfigError, match="strategy.trainers=auto lays out what launcher=local starts"):
        compose([*AUTO, "launcher=inline"])


def test_configs_of_versions_whose_key_counted_trainers_are_read() -> None:
    saved = {"strategy": {"name": "pserver", "trainers": 3}}
    assert upgraded_config(saved) == {"strategy": {"name": "pserver"}}


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_layout(
    run_dtf: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["strategy=pserver", "recipe.data.train_rows=64", "step.batch_size=16", "lr.peak=0.01"]
    first = run_dtf(*small, "launcher.processes=3", "train.steps=2")
    assert first.code == 0, first.err
    monkeypatch.setattr(devices, "cores", lambda: 2)
    second = run_dtf(*small, "strategy.mode=async", "strategy.trainers=auto", "train.steps=4", folder=first.folder)
    assert second.code == 0 and "2 trainer processes, 1 server" in second.out, second.err
    assert layout_of(yaml.safe_load((first.folder / "config.yaml").read_text())) == (2, 1)
