"""Laws of fine-tuning: weights to start from, frozen parts, learning-rate factors and averages give the reference's
numbers under every strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dtf.api.name_patterns import check_used, covers, factor
from dtf.api.options import FineTuning
from dtf.core.errors import ConfigError, DataError
from dtf.model.ema import EmaOptimizer
from dtf.model.init import construct, init_model
from dtf.model.pretrained import match_weights, open_weights
from dtf.optim.optimizers import Sgd
from dtf.optim.sharding import Sharding, full_params
from dtf.optim.update import LocalUpdate
from tests.support.arrays import plain
from tests.support.harness import difference, reference, spread, variants
from tests.support.toy import Toy

RARER = [
    ("fsdp", {"replicate": 2}),
    ("tensor", {"degree": 2}),
    ("pipeline", {"degree": 2}),
    ("pipeline", {"schedule": "gpipe", "balance": "flops"}),
]
WAYS = [*plain(variants()), *(pytest.param(*way, marks=pytest.mark.slow) for way in RARER if way not in variants())]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every option of fine-tuning at once, from a file that has one class less and so another head."""
    file = tmp_path_factory.mktemp("weights") / "toy.safetensors"
    tensors = init_model(Toy(), seed=7).state_dict()
    head = sorted(tensors)[-1].rpartition(".")[0]
    tensors |= {f"{head}.weight": torch.ones(3, 16), f"{head}.bias": torch.ones(3)}
    tensors["1.running_mean"] += 0.5
    save_file(tensors, file)
    return {
        "weights": str(file),
        "freeze": ["[01]", "5.weight"],
        "lr_factors": {head: 10.0, "*.bias": 0.5},
        "ema": 0.95,
        "optimizer": "adamw",
    }


@pytest.mark.parametrize(("strategy", "options"), WAYS)
def test_every_strategy_follows_the_reference(strategy: str, options: dict, everything: dict[str, Any]) -> None:
    processes = 4 if options.keys() & {"degree", "replicate"} else 2
    assert difference(reference(**everything), spread(strategy, processes, options=options, **everything)) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("processes", [3, 4])
@pytest.mark.parametrize("alone", ["weights", "freeze", "lr_factors", "ema"])
@pytest.mark.parametrize(("strategy", "options"), variants(), ids=str)
def test_each_option_alone(
    strategy: str, options: dict, alone: str, processes: int, everything: dict[str, Any]
) -> None:
    case = {alone: everything[alone]}
    assert difference(reference(**case), spread(strategy, processes, options=options, **case)) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16_params", "bf16_master", "fp16"])
@pytest.mark.parametrize(("strategy", "options"), variants(), ids=str)
def test_other_precisions_stay_close(strategy: str, options: dict, precision: str, everything: dict[str, Any]) -> None:
    # calm steps: an fp16 overflow on one side only parts runs
    case = everything | {"precision": precision, "optimizer": "sgd", "lr_factors": {"*.bias": 0.5}}
    assert difference(reference(**case), spread(strategy, 2, options=options, **case), ("optimizer/",)) <= 0.3


@pytest.mark.parametrize(
    ("first", "second"), [("fsdp", "pipeline"), pytest.param("tensor", "dp", marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_on_elsewhere(first: str, second: str, everything: dict[str, Any], tmp_path: Path) -> None:
    """Averages, too, and numbers of the checkpoint win over those to start from."""
    spread(first, 2, folder=str(tmp_path), save_every=2, halt=True, **everything)
    rest = spread(second, 3, start=str(tmp_path / "step_000002"), **everything)
    whole = reference(**everything)
    for split in ("train", "eval", "ids"):
        rest[split] = {
            step: value for step, value in whole[split].items() if int(step) < 2 or (split != "ids" and int(step) == 2)
        } | rest[split]
    assert difference(whole, rest) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "options"), [("ddp", {"shard_optimizer": True}), ("fsdp", {"reshard_after_forward": False})], ids=str
)
def test_resume_is_exact(strategy: str, options: dict, everything: dict[str, Any], tmp_path: Path) -> None:
    """Bit for bit, although evaluations put averages in the weights' place on the way."""
    case = everything | {"options": options, "precision": "fp32", "eval_every": 2}
    whole = spread(strategy, 2, folder=str(tmp_path), save_every=2, **case)
    again = spread(strategy, 2, start=str(tmp_path / "step_000002"), **case)
    assert again["tensors"] == whole["tensors"]
    assert all(whole[split][step] == value for split in ("train", "eval") for step, value in again[split].items())


# ---------------------------------------------------------------- what the options do


def test_frozen_parts_stay_as_they_are(everything: dict[str, Any]) -> None:
    tensors = reference(**everything)["tensors"]
    file = open_weights(everything["weights"], "weights")
    for name in ("0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var", "5.weight"):
        assert np.array_equal(tensors[f"model/{name}"], file.read(name).double().numpy()), name
        assert f"optimizer/{name}/mean" not in tensors
    assert not np.allclose(tensors["model/5.bias"], file.read("5.bias").double().numpy(), atol=1e-6)


def test_a_factor_is_a_learning_rate_of_its_own() -> None:
    """One step of plain descent: the change grows by the factor, and nothing else changes."""
    plain, tenfold = (
        reference(steps=1, clip_norm=0.0, log_every=0, lr_factors=factors) for factors in ({}, {"9": 10.0})
    )
    start = init_model(Toy(), 0).state_dict()
    for name in ("9.weight", "7.weight"):
        a, b = (np.asarray(run["tensors"][f"model/{name}"]) - start[name].double().numpy() for run in (plain, tenfold))
        assert np.allclose(b, 10 * a if name.startswith("9") else a, rtol=1e-9, atol=1e-15)


def test_averages_are_what_their_definition_says() -> None:
    parameter = torch.nn.Parameter(torch.full((2, 3), 4.0))
    bound = EmaOptimizer(Sgd(momentum=0.0), 0.5).bind({"w": parameter.data})
    average, value = torch.full((2, 3), 4.0), parameter.data
    for step in range(12):
        bound.apply([torch.ones(2, 3)], 0.1, None)
        decay = min(0.5, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * value
    assert torch.allclose(bound.states["w"]["ema"], average)
    before = {key: tensor.clone() for key, tensor in bound.states["w"].items()}
    bound.apply([torch.full((2, 3), torch.nan)], 0.1, torch.ones(()))
    assert all(torch.equal(tensor, before[key]) for key, tensor in bound.states["w"].items()), (
        "a skipped step leaves no trace"
    )


def test_averages_are_evaluated_and_weights_go_on() -> None:
    raw, averaged = reference(), reference(ema=0.95)
    assert raw["train"] == averaged["train"] and raw["eval"] != averaged["eval"]
    assert all(np.array_equal(raw["tensors"][name], averaged["tensors"][name]) for name in raw["tensors"])
    assert "ema/1.running_mean" in averaged["tensors"]


def test_averages_of_bf16_parameters_are_kept_in_fp32() -> None:
    bound = EmaOptimizer(Sgd(momentum=0.0), 0.999).bind({"w": torch.ones(4, dtype=torch.bfloat16)})
    assert bound.states["w"]["ema"].dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_averages_come_back_from_an_evaluation_bit_for_bit(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(3, 2, bias=False, dtype=dtype)
    params = full_params(model, {"weight": model.weight.data})
    update = LocalUpdate(Sharding(params=params), EmaOptimizer(Sgd(), 0.9))
    for step in range(3):
        model.weight.grad = torch.full_like(model.weight, 0.37)
        update.apply(step, 0.1)
    before = [box.tensor.clone() for box in update.state().boxes]
    (average,) = (box.tensor.clone() for box in update.state().boxes if box.name.endswith("/ema"))
    update.swap_ema(True)
    assert torch.equal(model.weight, average.to(dtype)) and not torch.equal(model.weight, before[0])
    update.swap_ema(False)
    assert all(torch.equal(box.tensor, old) for box, old in zip(update.state().boxes, before, strict=True))


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layer*", "layer1.0.conv1.weight", True),
        ("layer1", "layer10.0.conv1.weight", False),
        ("*.bn1", "layer1.bn1.weight", True),
        ("*.bn1", "layer1.0.bn1.weight", False),
        ("layer[12].0", "layer2.0.conv1.weight", True),
        ("fc.weight", "fc.bias", False),
        ("fc.weight.more", "fc.weight", False),
        ("*", "fc.weight", True),
    ],
)
def test_patterns_stand_for_parts_of_names(pattern: str, name: str, expected: bool) -> None:
    assert covers(pattern, name) is expected


def test_factors_multiply_and_unused_patterns_are_refused() -> None:
    assert factor({"fc": 10.0, "*.bias": 0.5, "conv1": 3.0}, "fc.bias") == 5.0
    with pytest.raises(
        ConfigError,
        match="recipe.model.freeze names 'layr1', which covers no parameter of the model; did you mean layer1",
    ):
        check_used("recipe.model.freeze", ["fc", "layr1"], ["fc.weight", "layer1.0.weight"])
    check_used("optimizer.lr_factors", {"*": 2.0}, ["fc.weight", "layer1.0.weight"], {"layer1.0.weight"})
    with pytest.raises(
        ConfigError, match="optimizer.lr_factors names 'layer1', which covers only parameters that recipe.model.freeze"
    ):
        check_used(
            "optimizer.lr_factors", {"fc": 10.0, "layer1": 0.1}, ["fc.weight", "layer1.0.weight"], {"layer1.0.weight"}
        )


# ---------------------------------------------------------------- files of weights


@dataclass
class Made:
    tensors: dict[str, Tensor]
    folder: Path

    def file(self, name: str, content: Any) -> str:
        path = self.folder / name
        torch.save(content, path)  # what torchvision's files are made with
        return str(path)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(init_model(Toy(), seed=3).state_dict(), tmp_path)


def take(place: str, whole: bool = False) -> tuple[dict[str, Tensor], Any]:
    recipe = Toy(model=FineTuning(weights=place))
    weights, fit = match_weights(
        open_weights(place, "recipe.model.weights"), recipe, construct(recipe), "recipe.model.weights", whole
    )
    return {name: weights.read(name) for name in fit.kept}, fit


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "_orig_mod.", "model._orig_mod."])
@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model", "safetensors"])
def test_files_as_training_scripts_write_them(wrap: str, prefix: str, made: Made) -> None:
    """And as Lightning writes its checkpoints; what wrappers put before all names is left out, and said."""
    tensors = {prefix + name: tensor for name, tensor in made.tensors.items()}
    wrapped: dict[str, Any] = {
        "plain": tensors,
        "state_dict": {"epoch": 3, "state_dict": tensors, "hyper_parameters": {"lr": 0.1}},
        "model": {"model": tensors, "args": [1]},
    }
    if wrap == "safetensors":
        save_file(tensors, made.folder / "file.safetensors")
    place = str(made.folder / "file.safetensors") if wrap == "safetensors" else made.file("file.ckpt", wrapped[wrap])
    weights, _ = match_weights(open_weights(place, "job.model"), Toy(), construct(Toy()), "job.model", whole=True)
    assert weights.about == (f"{place} (names without {prefix!r})" if prefix else place)
    found, fit = take(place, whole=True)
    assert set(found) == {name for name in made.tensors if not name.endswith("num_batches_tracked")}
    assert all(torch.equal(found[name], made.tensors[name]) for name in found)
    assert fit.text() == f"{len(found)} tensors kept"


def test_old_files_are_no_archives(made: Made) -> None:
    path = made.folder / "old.pth"
    torch.save(made.tensors, path, _use_new_zipfile_serialization=False)
    assert torch.equal(take(str(path))[0]["0.weight"], made.tensors["0.weight"])


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_part_is_read(suffix: str, made: Made) -> None:
    path = made.folder / f"file.{suffix}"
    save_file(made.tensors, path) if suffix == "safetensors" else torch.save(made.tensors, path)
    assert torch.equal(
        open_weights(str(path), "key").read("0.weight", (4, 2), (3, 5)), made.tensors["0.weight"][4:7, 2:7]
    )


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_what_is_read_twice_is_two_tensors(suffix: str, made: Made) -> None:
    """Replicas in one process start from the same file; what one of them learns must not show in another."""
    path = made.folder / f"file.{suffix}"
    save_file(made.tensors, path) if suffix == "safetensors" else torch.save(made.tensors, path)
    weights = open_weights(str(path), "key")
    for name in ("0.weight", "9.bias"):
        weights.read(name).zero_()
        assert torch.equal(weights.read(name), made.tensors[name])


def test_a_head_of_other_classes_is_drawn_anew_and_said(made: Made) -> None:
    made.tensors |= {"9.weight": torch.zeros(7, 16), "9.bias": torch.zeros(7)}
    found, fit = take(made.file("file.pth", made.tensors))
    assert "9.weight" not in found and "9.bias" not in found
    assert fit.text().endswith("drawn anew: 9.weight (7x16 there, 4x16 here), 9.bias (7 there, 4 here)")
    with pytest.raises(
        ConfigError,
        match="9.weight is 7x16 in the file and 4x16 in the model.*; choose the recipe.model that it was made with",
    ):
        take(made.file("file.pth", made.tensors), whole=True)


def test_a_file_without_a_head(made: Made) -> None:
    rest = {name: tensor for name, tensor in made.tensors.items() if not name.startswith("9.")}
    assert take(made.file("file.pth", rest))[1].missing == ("9.weight", "9.bias")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"0.weight": torch.zeros(16, 9)}, "0.weight is 16x9 in the file and 16x8 in the model"),
        ({"9.weight": torch.zeros(4, 15)}, "9.weight is 4x15 in the file and 4x16 in the model"),
        ({"4.weight": None}, "4.weight is not in the file"),
        ({"9.bias": None}, "9.bias is not in the file"),
        ({"12.weight": torch.zeros(2)}, r"12.weight \(2\) is not in the model"),
        (
            {"0.weight": torch.zeros(16, 8, dtype=torch.int8)},
            "0.weight is int8 in the file, and the model has real numbers there",
        ),
        ({"1.running_mean": torch.zeros(16, dtype=torch.bool)}, "1.running_mean is bool in the file"),
    ],
    ids=["shape", "width of the head", "missing", "half a head", "extra", "integers", "truth values"],
)
def test_what_does_not_fit_is_refused_by_name_and_shape(
    change: dict[str, Tensor | None], told: str, made: Made
) -> None:
    tensors = {name: tensor for name, tensor in (made.tensors | change).items() if tensor is not None}
    with pytest.raises(ConfigError, match=told):
        take(made.file("file.pth", tensors))


class Evil:
    """What a file would run if it were unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (print, ("ran",))


def test_files_run_no_code(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="dtf runs no code from files"):
        take(made.file("file.pth", {"0.weight": Evil()}))
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("suffix", [pytest.param("pth", marks=pytest.mark.slow), "safetensors"])
def test_other_formats_of_real_numbers_become_that_of_the_run(suffix: str, made: Made) -> None:
    """Whether whole tensors are read, or parts of them."""
    tensors = {
        name: tensor.to(torch.float16) if tensor.is_floating_point() else tensor
        for name, tensor in made.tensors.items()
    }
    halves, wide = made.folder / f"halves.{suffix}", made.folder / "wide.pth"
    save_file(tensors, halves) if suffix == "safetensors" else torch.save(tensors, halves)
    torch.save(
        {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}, wide
    )
    for strategy in ("ddp", "fsdp"):
        found = [
            spread(strategy, 2, steps=1, precision="fp32", weights=str(file))["tensors"] for file in (halves, wide)
        ]
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "content"),
    [("file.pth", b"nothing"), ("file.safetensors", b"nothing"), ("file.txt", b""), ("absent.pth", None)],
)
def test_what_is_no_file_of_weights(name: str, content: bytes | None, made: Made) -> None:
    if content is not None:
        (made.folder / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        take(str(made.folder / name))


def test_a_dictionary_of_other_things(made: Made) -> None:
    with pytest.raises(DataError, match=r"holds no tensors by name; save model.state_dict\(\)"):
        take(made.file("file.pth", {"epoch": 1}))


def test_a_run_gives_its_averages(tmp_path: Path) -> None:
    run = spread("ddp", 2, folder=str(tmp_path), save_every=3, ema=0.9)
    weights = open_weights(str(tmp_path), "key")
    assert "averaged weights" in weights.about
    assert np.array_equal(weights.read("0.weight").numpy(), np.asarray(run["tensors"]["optimizer/0.weight/ema"]))
    assert np.array_equal(weights.read("1.running_var").numpy(), np.asarray(run["tensors"]["ema/1.running_var"]))
