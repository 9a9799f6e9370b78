"""Narrow checks of what dtf's steps and saves are made of: the device does what the processor does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.gpu import device
from bench.gpu.job import Job
from dtf.api.optimizer import Optimizer
from dtf.checkpoint.saves import Copies
from dtf.core.types import Box, State
from dtf.model.fingerprint import fingerprints
from dtf.model.seeded_dropout import SeededDropout
from dtf.optim.optimizers import Adagrad, Adam, AdamW, Lars, Sgd
from dtf.optim.torch_optimizers import Adadelta, Adamax, Asgd, NAdam, RAdam, RMSprop, Rprop

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": Sgd,
    "sgd without momentum": lambda: Sgd(momentum=0.0),
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": Adagrad,
    "lars": Lars,
    **{made.__name__.lower(): made for made in (Adadelta, Adamax, Asgd, NAdam, RAdam, RMSprop, Rprop)},
}
FORMATS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Format of parameters -> how far a step may be from that of the processor."""


def run(job: Job) -> None:
    place = torch.device(device.name(job.rehearsed))
    for name, make in OPTIMIZERS.items():
        for dtype in FORMATS:
            _part(job, f"{name}, {str(dtype).removeprefix('torch.')}", lambda m=make, d=dtype: _optimizer(m, d, place))
    checks = {"loss scale": _scale, "digests": _digests, "dropout": _dropout, "copies for saves": _copies}
    for name, check in checks.items():
        _part(job, name, lambda check=check: check(place))


def _part(job: Job, name: str, check: Callable[[], str]) -> None:
    """`check` returns what is wrong; empty: nothing."""
    try:
        wrong = check()
        device.settle()
    except Exception as error:  # noqa: BLE001 (each is told, and the others are tried)
        wrong = f"{type(error).__name__}: {str(error)[:300]}"
    job.lines.part(name, not wrong, wrong)


def _optimizer(make: Callable[[], Optimizer], dtype: torch.dtype, place: torch.device) -> str:
    """Three steps as the processor makes them; a step to be skipped changes no bit, whatever gradients hold."""
    here, there = _three_steps(make(), dtype, torch.device("cpu")), _three_steps(make(), dtype, place)
    for one, other in zip(here[0], there[0], strict=True):
        apart = (one.double() - other.cpu().double()).abs().max() / one.double().abs().max()
        if not apart <= FORMATS[dtype]:
            return f"the steps are {apart:.1e} apart"
    before, after = there[1], there[2]
    changed = [key for key in before if not before[key].equal(after[key])]
    return f"a skipped step changes {', '.join(changed)}" if changed else ""


def _three_steps(
    optimizer: Optimizer, dtype: torch.dtype, place: torch.device
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Parameters after three steps; all tensors then, and after a fourth that is skipped."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (8, 4, 3, 3), "bias": (8,)}
    parameters = {name: torch.randn(shape, generator=generator).to(place, dtype) for name, shape in shapes.items()}
    parameters["weight"] = parameters["weight"].contiguous(memory_format=torch.channels_last)
    bound = optimizer.bind(parameters)
    no, yes = (torch.full((), value, device=place) for value in (0.0, 1.0))
    for _ in range(3):
        gradients = [torch.randn(shape, generator=generator).to(place, dtype) for shape in shapes.values()]
        bound.apply(gradients, 0.1, no)
    kept = {f"parameter {name}": tensor for name, tensor in parameters.items()}
    kept |= {f"{key} of {name}": tensor for name, state in bound.states.items() for key, tensor in state.items()}
    before = {key: tensor.clone() for key, tensor in kept.items()}
    bound.apply([torch.full_like(parameter, torch.nan) for parameter in parameters.values()], 0.1, yes)
    return [before[f"parameter {name}"] for name in parameters], before, kept


def _scale(place: torch.device) -> str:
    scale, growth = torch.full((), 8.0, device=place), torch.zeros((), dtype=torch.int32, device=place)
    torch._amp_update_scale_(scale, growth, torch.ones((), device=place), 2.0, 0.5, 2)
    halved = scale.item()
    for _ in range(2):
        torch._amp_update_scale_(scale, growth, torch.zeros((), device=place), 2.0, 0.5, 2)
    return "" if (halved, scale.item()) == (4.0, 8.0) else f"8 becomes {halved}, then {scale.item()}"


def _digests(place: torch.device) -> str:
    """Replicas are compared by these, wherever they are."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(9000, generator=generator).to(dtype) for dtype in (*FORMATS, torch.float16)]
    tensors += [(100 * tensors[0]).to(torch.int64), tensors[0] > 0]
    tensors.append(torch.randn(8, 4, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last))
    same = fingerprints(tensors) == fingerprints(tensor.to(place) for tensor in tensors)
    return "" if same else "they are others than on the processor"


def _dropout(place: torch.device) -> str:
    """Masks follow from seed, step and micro-batch."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1)).to(place)
    masks, rows = SeededDropout(model, 0, place), torch.ones(64, 8, device=place)
    drawn = []
    for step, micro_batch in ((0, 0), (0, 1), (0, 0)):
        masks.begin_micro_batch(step, micro_batch)
        drawn.append((model[0](rows), torch.rand(4, device=place)))
    (first, loose), (other, _), (again, same) = drawn
    if not (first.equal(again) and loose.equal(same)):
        return "the same micro-batch has another mask"
    return "" if not first.equal(other) else "two micro-batches have one mask"


def _copies(place: torch.device) -> str:
    """A save holds what was there when it was taken, though the next step changes it at once."""
    tensors = [torch.full((1000, 1000), float(number), device=place) for number in range(8)]
    tensors.append(torch.randn(64, 32, 3, 3, device=place).contiguous(memory_format=torch.channels_last))
    expected = [tensor.cpu().clone() for tensor in tensors]
    boxes = [Box(f"model/{n}", tensor, tuple(tensor.shape), (0,) * tensor.dim()) for n, tensor in enumerate(tensors)]
    copies = Copies()
    for _ in range(2):  # the second time the memory is there
        arrive = copies.take(State(boxes, {}))
        for tensor in tensors:
            tensor.add_(1)
        wrong = [
            number
            for number, (box, value) in enumerate(zip(arrive().boxes, expected, strict=True))
            if not box.tensor.equal(value)
        ]
        if wrong:
            return f"tensor {wrong[0]} is not as it was"
        expected = [tensor.cpu().clone() for tensor in tensors]
    return ""
