"""The zoo under every strategy: the numbers of one process, or a refusal that its entry allows. Most of it is slow."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.zoo import trial
from tests.zoo.causes import CAUSES, cause_of
from tests.zoo.entries import load_zoo

ZOO = load_zoo()

SAMPLE = {
    ("vit", "fsdp"),
    ("timm_levit", "ddp"),
    ("gpt_tied", "pipeline"),
    ("mobilenet_v3", "pipeline"),
    ("teacher", "pipeline"),
    ("rotary", "pserver"),
    ("siamese", "ddp"),
    ("codebook", "ddp"),
    ("teacher", "ddp"),
    ("writes_into_its_rows", "ddp"),
    ("complex_parameter", "ddp"),
    ("zero_size_parameter", "fsdp"),
    ("noise_private_generator", "ddp"),
    ("gradient_penalty", "fsdp"),
    ("token_sums", "pserver"),
    ("contrastive", "ddp"),
    ("gan_pair", "ddp"),
    ("scripted", "ddp"),
    ("heads_by_size", "tensor"),
    ("heads_by_count", "mesh tensor=2"),
    ("dropout_unnamed", "mesh pipeline=2 tensor=2"),
    ("heads_by_count_and_width", "tensor"),
}
"""What runs by default, on two processes or four: one for each kind of thing that can go wrong."""


def _trials() -> list:
    """All trials; an entry's one after the other."""
    found = []
    for i, (name, entry) in enumerate(ZOO.items()):
        for processes in trial.processes_for(i, name):
            for strategy in trial.strategies_for(entry, list(trial.STRATEGIES), processes):
                fast = (name, strategy) in SAMPLE and not entry.slow and processes != 3
                found.append(pytest.param(name, strategy, processes, marks=() if fast else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "strategy", "processes"), _trials())
def test_the_same_numbers_or_a_clear_no(name: str, strategy: str, processes: int) -> None:
    outcome = trial.attempt(ZOO[name], strategy, processes)
    assert trial.is_allowed(ZOO[name], strategy, processes, outcome), f"{outcome.shown}: {outcome.text}"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ZOO))
def test_one_process_trains_as_plain_torch(name: str) -> None:
    outcome = trial.attempt_plain(ZOO[name])
    assert trial.is_allowed_alone(ZOO[name], outcome), f"{outcome.shown}: {outcome.text}"


def test_the_zoo_is_large_and_its_refusals_few() -> None:
    assert len(ZOO) >= 80
    assert len(CAUSES) <= 8
    causes = {cause for entry in ZOO.values() for cause in (*entry.refused.values(), *entry.may.values())}
    assert causes <= CAUSES.keys()
    refused = Counter(bool(entry.refused) for entry in ZOO.values() if "mistake" not in entry.tags)
    assert refused[True] <= 0.2 * len(ZOO)


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("hidden state", "the forward pass changes the buffer m, which only one process can keep right"),
        ("non-real parameters", "makes the parameter turn complex64; parameters are real numbers: make it a buffer"),
        ("loss", "Zoo.loss returned shape (); it must return a loss per row, (2,)"),
        ("layout", "Net cannot be cut into stages: no module of it that has parameters is called"),
        ("other", "strategy=dp: replicas share one generator"),
    ],
)
def test_a_refusal_names_its_cause(cause: str, words: str) -> None:
    assert cause_of(words) == cause
