"""Keys that options no longer have: refused where they are given, left out of configs of earlier versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtf.api.schema import coerce_option, option_node
from dtf.cli import trials
from dtf.config.compose import compose
from dtf.config.inherit import saved_config
from dtf.config.settings import load_parts, parse_settings
from dtf.core.errors import ConfigError, Exit
from dtf.core.renamed import GONE_KEYS, LOST_EFFECTS, MOVED_KEYS, lost_effects, refused_keys, upgraded_config
from dtf.pserver.strategy import Pserver

load_parts([])
OPTIONS = sorted({*GONE_KEYS, *MOVED_KEYS})


def old_keys(option: tuple[str, str]) -> list[str]:
    return [*GONE_KEYS.get(option, ()), *MOVED_KEYS.get(option, ("", {}))[1]]


@pytest.mark.parametrize(
    ("option", "key"), [(option, key) for option in OPTIONS for key in old_keys(option)], ids=lambda value: str(value)
)
def test_each_is_refused_by_name_on_the_command_line_and_says_what_to_do(option: tuple[str, str], key: str) -> None:
    group, name = option
    assert key not in option_node(group, name)
    with pytest.raises(
        ConfigError, match=rf"^{group}\.{key}(: now | is gone: ).* \({group}\.{key} was set on the command line\)$"
    ):
        compose([f"{group}={name}", f"{group}.{key}=1"])


def test_one_message_tells_of_all() -> None:
    told = refused_keys("strategy", "pserver", ["mode", "endpoints", "gather", "role"])
    assert told is not None and told[0] == "strategy.endpoints"
    assert told[1].startswith("strategy.endpoints, strategy.role: now launcher.endpoints, launcher.role of launcher=")
    assert "; strategy.gather is gone: " in told[1]
    assert refused_keys("strategy", "pserver", ["mode"]) is refused_keys("strategy", "mine", ["endpoints"]) is None


@pytest.mark.parametrize("content", [["a"], "text", None, 3])
def test_what_is_no_config_stays_as_it_is(content: Any) -> None:
    assert upgraded_config(content) == content


OLD: dict[str, Any] = {
    "endpoints": ["127.0.0.1:1", "127.0.0.1:2"],
    "role": "server",
    "server_id": 0,
    "trainer_id": None,
    "token_file": "***",
    "meet_timeout_s": None,
    "tls": {"mode": "none", "ca": "", "cert": "", "key": "***"},
    "allow_insecure": False,
    "trainers": 3,
    "gather": 0,
    "slice_parameters": False,
    "send_queue": 1,
    "rpc_threads": 0,
}
"""What an earlier version recorded of a run whose processes were started by hand."""


def test_a_recorded_config_is_read_with_what_it_recorded(tmp_path: Path) -> None:
    config = compose(["strategy=pserver", "strategy.mode=async", "recipe=ctr_clicks"]).config
    assert sorted(OLD) == sorted([*old_keys(("strategy", "pserver")), "trainers"]), "that key means something else now"
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**config, "strategy": {**config["strategy"], **OLD}}))
    strategy = parse_settings(saved_config(file, "job.replay=RUN", [])).strategy
    assert isinstance(strategy, Pserver) and strategy.mode.value == "async" and strategy.servers == 2
    assert strategy.min_block > 10**12  # cuts nothing, as then
    same = saved_config(file, "job.replay=RUN", [])
    assert upgraded_config(same) == same


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_what_was_recorded_of_each_option_fits_it_still(option: tuple[str, str]) -> None:
    group, name = option
    recorded = {**option_node(group, name), **dict.fromkeys(old_keys(option), 1), "endpoints": ["a:1"]}
    recorded = {key: value for key, value in recorded.items() if key != "endpoints" or name == "pserver"}
    assert coerce_option(group, upgraded_config({group: recorded})[group], group)["name"] == name


def test_a_trial_that_an_earlier_version_finished_stays_finished(tmp_path: Path) -> None:
    config = compose(["strategy=ddp", "train.steps=1"]).config
    strategy = {**config["strategy"], "gradient_as_bucket_view": True}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config, "strategy": strategy}))
    (tmp_path / "run.json").write_text(json.dumps({"exit": Exit.OK}))
    found = trials.find(tmp_path, config)
    assert found is not None and found.finished


def test_what_an_earlier_version_did_otherwise_is_told_in_a_line() -> None:
    assert LOST_EFFECTS.keys() <= GONE_KEYS["strategy", "pserver"].keys()
    told = lost_effects({"strategy": {**OLD, "name": "pserver", "mode": "half_async", "gather": 5, "send_queue": 3}})
    assert len(told) == 2
    assert told[0].startswith("the run was recorded with strategy.gather=5, which this version has no more: ")
    assert told[1].startswith("the run was recorded with strategy.send_queue=3, which this version has no more: ")
    for quiet in (
        {**OLD, "name": "pserver", "mode": "half_async"},
        {"name": "pserver", "mode": "sync", "gather": 5, "send_queue": 3},
        {"name": "pserver", "mode": "async", "gather": 5},
        {"name": "mine", "mode": "half_async", "gather": 5},
        "pserver",
    ):
        assert lost_effects({"strategy": quiet}) == []
    assert lost_effects("text") == lost_effects(None) == []
