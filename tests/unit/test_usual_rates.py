"""A learning rate that nobody chose for the optimizer is told where it is far above what is usual for it."""

from __future__ import annotations

import pytest

import dtf
from dtf.api import registry
from dtf.config.compose import Composer


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize(
    ("keys", "usual"),
    [
        (["optimizer=adamw"], "0.001"),
        (["optimizer=nadam"], "0.002"),
        (["optimizer=adam", "recipe=resnet_photos"], "0.001"),
        (["optimizer=adamw", "job=verify"], "0.001"),
        (["optimizer=adamw", "lr.peak=0.1"], ""),  # it was chosen
        (["optimizer=adamw", "job=tune"], ""),  # it does not count
        (["optimizer=adamw", "recipe=deepfm_criteo"], ""),  # it is that of another Adam
        (["optimizer=sgd"], ""),
        ([], ""),
    ],
)
def test_a_rate_that_nobody_chose_for_the_optimizer_is_told(keys: list[str], usual: str, composer: Composer) -> None:
    said = " ".join(composer.compose(keys).notes)
    assert f"which usually takes {usual}; job=tune" in said if usual else "usually takes" not in said


def test_a_class_in_the_form_of_torchs_brings_the_rate_of_its_constructor(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = {group: dict(known) for group, known in registry._CLASSES.items()}
    monkeypatch.setattr(registry, "_CLASSES", clean)
    assert dtf.torch_optimizer("amsgrad", "torch.optim:Adam", {"amsgrad": True}).usual_lr == 0.001
