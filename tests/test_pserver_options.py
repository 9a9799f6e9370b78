"""What is said of a parameter server before anything is started: options out of range, and options that would have no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtf.by_hand import check_certificates
from dtf.config import compose
from dtf.errors import ConfigError

REFUSED = [
    ("record=yes mode=async", "strategy.record=yes is no switch"),
    ("record=on mode=async", "strategy.record=on is no switch"),
    ("mode=geo", "as optimizer=adam keeps them, may become negative; set strategy.staleness=0"),
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


def check(words: str) -> None:
    given = [f"strategy.{word}" for word in words.split()]
    compose(["recipe=ctr_clicks", "strategy=pserver", "launcher.devices=cpu", "launcher.processes=3", *given]).check()


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_has_no_effect_or_cannot_be_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(words)
    assert said in str(refused.value)


def test_files_that_are_no_certificates_are_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("-----BEGIN CERTIFICATE-----\nnone\n")
    for names, said in ((("ca", "cert", "key"), f"strategy.tls.ca={junk} holds no certificate"), (("cert", "key"), f"strategy.tls.key={junk} are no")):
        with pytest.raises(ConfigError) as refused:
            check_certificates("strategy.tls", dict.fromkeys(names, str(junk)))
        assert said in str(refused.value)


@pytest.mark.parametrize("words", ["mode=async record=order", "rpc_threads=7", "slice_parameters=false", "min_block=16"])
def test_what_has_an_effect_is_not(words: str) -> None:
    check(words)
