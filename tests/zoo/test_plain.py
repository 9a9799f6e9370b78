"""Every entry of the zoo trains in plain torch, by default one in five; some start and take their first step under dtf
exactly as there.
"""

from __future__ import annotations

import pytest
import torch

from dtf.api.layout import Layout
from tests.zoo import plain, trial
from tests.zoo.entries import ZooModel, load_zoo
from tests.zoo.recipe import LAYOUTS

ZOO = load_zoo()

STARTS = (
    "class_token",
    "vit",
    "swin_v2",
    "convnext_still",
    "timm_cait",
    "timm_beit",
    "gpt_tied",
    "gru_language_model",
    "multihead_attention",
    "mixture_of_experts",
    "odd_buffers",
    "assigned_buffer",
    "drawn_by_numpy",
    "drawn_attribute",
    "constructor_reads_numbers",
    "scalar_parameter",
    "weight_norm",
    "orthogonal",
    "lora",
    "pruned_old",
    "gradient_hook_mask",
    "shared_parameter",
    "batch_norm",
    "deep",
)
"""Entries whose constructors do what is lost most easily. None of them draws while it trains."""

TURNS = {"fp64": 1e-12, "fp32": 1e-6}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if e.slow or i % 5 else ()) for i, (n, e) in enumerate(ZOO.items())]
)
def test_an_entry_trains_in_plain_torch(name: str) -> None:
    entry = ZOO[name]
    if "mistake" in entry.tags:
        pytest.skip("its loss or layout is an author's mistake")
    total, model = plain.first_loss(entry, 5)
    total.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert bool(torch.isfinite(total))
    assert any(bool((g.to_dense() if g.is_sparse else g).abs().sum() > 0) for g in gradients)


def _sampled(names: tuple[str, ...]) -> list:
    """Each entry under one strategy by default, and under all that can divide it in the slow tests."""
    found = []
    for i, name in enumerate(names):
        layout = LAYOUTS.get(name, Layout())
        dividing = [s for s, parts in (("pipeline", layout.blocks), ("tensor", layout.splits)) if parts]
        for strategy in (*trial.CLEAN, *dividing):
            fast = strategy == trial.CLEAN[i % len(trial.CLEAN)] and i < 2
            found.append(pytest.param(name, strategy, marks=() if fast else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "strategy"), _sampled(STARTS))
def test_starts_as_its_constructor_made_it(name: str, strategy: str) -> None:
    entry = ZOO[name]
    model = plain.construct(entry)
    expected = plain.tensors_of(model)
    found = {
        key.removeprefix("model/"): tensor
        for key, tensor in trial.train(name, strategy, 2, steps=0).tensors.items()
        if key.startswith("model/")
    }
    assert found.keys() == expected.keys() & model.state_dict().keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key].to(tensor.dtype)), key


@pytest.mark.parametrize(("name", "strategy"), _sampled(STARTS))
@pytest.mark.parametrize("precision", ["fp64", pytest.param("fp32", marks=pytest.mark.slow)])
def test_takes_the_first_step_of_plain_torch(name: str, strategy: str, precision: str) -> None:
    entry = ZOO[name]
    found = trial.train(name, strategy, 2, steps=1, precision=precision)
    expected = plain.run(entry, [found.ids["0"]], 5, precision=precision)
    values = found.metrics["train"]["1"]
    assert values["loss"] == pytest.approx(expected.losses[0], rel=TURNS[precision])
    assert values["grad_norm"] == pytest.approx(expected.norms[0], rel=TURNS[precision])


def test_nothing_in_the_starts_draws() -> None:
    assert not [name for name in STARTS if _draws(ZOO[name])]


def _draws(entry: ZooModel) -> bool:
    model = plain.construct(entry)
    inputs, _ = entry.rows(5, 0)
    before = torch.get_rng_state()
    model(inputs)
    return not torch.equal(before, torch.get_rng_state())
