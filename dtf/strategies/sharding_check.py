"""Whether a strategy's `Sharding` describes the model, found on all ranks before the first step.

A wrong one would train: parameters that nobody steps stay as they are, and those that nobody writes are missing in the
checkpoint, which is noticed when the run is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from dtf.checkpoint.manifest import partition_fault
from dtf.core.errors import ConfigError
from dtf.distributed.sharding import Piece, byte_count, local
from dtf.distributed.world import World
from dtf.optim.sharding import ParamShard, Sharding
from dtf.sparse.sharded_tables import ShardedTables

FUNCTIONS = ("complete_gradients", "sum_slices", "all_norms", "fetch_others", "drop_gathered")


class _Held(NamedTuple):
    """What a rank says of one parameter; JSON."""

    name: str
    shape: list[int]  # of the global tensor
    trained: bool
    steps: bool  # whether this rank steps it
    writes: list[list[list[int]]]  # the boxes (offset, shape) that this rank writes to checkpoints


def check_sharding(sharding: Sharding, model: nn.Module, world: World) -> None:
    """ConfigError on all ranks when one has a Sharding that is not that of `model`. Collective."""
    fault = _fault_here(sharding, model)
    gathered = world.gather([fault, [] if fault else _held(sharding)])
    fault = world.broadcast("" if gathered is None else _fault_among(gathered))
    if fault:
        raise ConfigError(f"the strategy's Sharding: {fault}")


def _fault_here(sharding: Sharding, model: nn.Module) -> str:
    """What is wrong on this rank alone, or ""."""
    if not isinstance(sharding, Sharding):
        return f"Spmd got {_kind(sharding)}; make a dtf.Sharding(params=full_params(model, masters), ...)"
    for field in FUNCTIONS:
        if not _is_function_or_none(getattr(sharding, field)):
            return f"{field} is {_kind(getattr(sharding, field))}; give a function, or None"
    for field in ("writes", "steps_tables"):
        if not isinstance(getattr(sharding, field), bool):
            return f"{field} is {_kind(getattr(sharding, field))}; give True or False"
    if sharding.tables is not None and not sharding.steps_tables:
        return "steps_tables is False: nothing would step the tables, or write them to checkpoints; leave it out"
    for field, kind in (("tables", ShardedTables), ("like", Tensor)):
        value = getattr(sharding, field)
        if value is not None and not isinstance(value, kind):
            return f"{field} is {_kind(value)}; give a {kind.__name__}, or None"
    return _params_fault(sharding, model) or _owned_fault(sharding)


def _params_fault(sharding: Sharding, model: nn.Module) -> str:
    params, parameters = sharding.params, dict(model.named_parameters())
    if not isinstance(params, Mapping):
        return f"params is {_kind(params)}; give a ParamShard by name, as full_params(model, masters) does"
    for name in parameters:
        if name not in params:
            return f"params lacks {name}; give a ParamShard for each parameter of the model"
    for name, shard in params.items():
        if name not in parameters:
            return f"params has {name!r}, and the model has no such parameter; use the names of named_parameters()"
        fault = _shard_fault(shard, parameters[name])
        if fault:
            return f"params[{name!r}] {fault}"
    if list(params) != list(parameters):
        return "params has another order than the model; go through named_parameters()"
    taken = _shared_master(params)
    if taken:
        return f"params[{taken[0]!r}] has a master in the memory of {taken[1]}: each of them would step both"
    if sharding.sum_slices is None and sharding.all_norms is None:
        sliced = next((name for name, shard in params.items() if tuple(shard.local.shape) != tuple(shard.shape)), None)
        if sliced:
            return f"params[{sliced!r}] is a slice, and sum_slices is None: the gradient's norm would be that of slices"
    return ""


def _shard_fault(shard: Any, parameter: nn.Parameter) -> str:
    if not isinstance(shard, ParamShard):
        return f"is {_kind(shard)}; give a ParamShard"
    if shard.parameter is not parameter:
        return "has another tensor than the model as its parameter; describe the model that computes"
    for field in ("local", "master"):
        if not isinstance(getattr(shard, field), Tensor):
            return f"has {_kind(getattr(shard, field))} as its {field}; give a tensor"
    here, place = local(parameter), shard.local
    if tuple(place.shape) != tuple(here.shape) or place.data_ptr() != here.data_ptr():
        return "has a local tensor that is not the parameter's memory: what is stepped would not be what computes"
    if tuple(shard.master.shape) != tuple(place.shape):
        return f"has a master of shape {tuple(shard.master.shape)} for a local tensor of {tuple(place.shape)}"
    if shard.master.device != place.device or shard.master.is_floating_point() != place.is_floating_point():
        return (
            f"has a master of {shard.master.dtype} on {shard.master.device} for a local tensor of {place.dtype} on "
            f"{place.device}; dtf.cast makes the masters of a model"
        )
    if not isinstance(shard.is_primary, bool):
        return f"has is_primary={_kind(shard.is_primary)}; give True or False"
    return _place_fault(shard)


def _place_fault(shard: ParamShard) -> str:
    """What is wrong with the place that a shard names in the global tensor, or ""."""
    for field in ("shape", "offset"):
        numbers = getattr(shard, field)
        if not isinstance(numbers, tuple | list) or any(type(number) is not int for number in numbers):
            return f"has {field}={numbers!r}; give a tuple of int"
    if not isinstance(shard.pieces, tuple) or not all(isinstance(piece, Piece) for piece in shard.pieces):
        return f"has pieces={shard.pieces!r}; give a tuple of dtf.distributed.sharding.Piece, or none"
    shape, part = tuple(shard.shape), tuple(shard.local.shape)
    for _, offset, size in shard.boxes:
        lies_in = len(shape) == len(offset) == len(size) and all(
            a >= 0 and a + n <= length for a, n, length in zip(offset, size, shape, strict=True)
        )
        if not lies_in and shard.local.numel():
            return f"says that {size} at offset {offset} is a part of shape {shape}, and it does not lie in it"
    fault = partition_fault(part, [(piece.at, piece.shape) for piece in shard.pieces]) if shard.pieces else ""
    return f"has pieces that do not fill the local tensor of shape {part} exactly once: {fault}" if fault else ""


def _shared_master(params: Mapping[str, ParamShard]) -> tuple[str, str] | None:
    """A parameter whose master is not its own tensor and shares memory with another one, and that other one."""
    used: list[tuple[int, int, str, bool]] = []  # first byte, last + 1, name, whether it is a copy of the parameter
    for name, shard in params.items():
        copied = shard.master.data_ptr() != shard.local.data_ptr()
        for tensor, copy in ((shard.local, False), (shard.master, True))[: 1 + copied]:
            if tensor.is_contiguous() and tensor.numel():
                used.append((tensor.data_ptr(), tensor.data_ptr() + byte_count([tensor]), name, copy))
    used.sort()
    reaching: list[tuple[int, str, bool]] = []  # those before that reach so far
    for start, end, name, copy in used:
        reaching = [each for each in reaching if each[0] > start]
        other = next((each for each in reaching if copy or each[2]), None)
        if other:
            return (name, other[1]) if copy else (other[1], name)
        reaching.append((end, name, copy))
    return None


def _owned_fault(sharding: Sharding) -> str:
    owned = sharding.owned
    if owned is None:
        return ""
    if not isinstance(owned, frozenset | set):
        return f"owned is {_kind(owned)}; give a frozenset of names, or None for all"
    trained = {name for name, shard in sharding.params.items() if shard.parameter.requires_grad}
    other = sorted(map(str, owned - trained))
    if other:
        return f"owned has {other[0]!r}, which is no parameter that is trained"
    if owned != trained and sharding.fetch_others is None:
        return "owned lacks some trained parameters, and fetch_others is None: nothing would bring them up to date"
    return ""


def _held(sharding: Sharding) -> list[_Held]:
    """What is here of each parameter, in order."""
    held = []
    for name, shard in sharding.params.items():
        trained = shard.parameter.requires_grad
        steps = trained and (sharding.owned is None or name in sharding.owned)
        writes = sharding.writes or (steps and sharding.owned is not None)  # as LocalUpdate.state does
        writes = writes and shard.is_primary and (steps or not trained) and shard.master.numel() > 0
        boxes = [[list(piece.offset), list(piece.shape)] for piece in shard.boxes] if writes else []
        held.append(_Held(name, list(shard.shape), trained, steps, boxes))
    return held


def _fault_among(gathered: list[Any]) -> str:
    """What is wrong on one of the ranks, or between them, or ""."""
    for rank, (fault, _) in enumerate(gathered):
        if fault:
            return f"on rank {rank}, {fault}"
    everyone = [[_Held(*each) for each in held] for _, held in gathered]
    for rank, held in enumerate(everyone):
        for ours, first in zip(held, everyone[0], strict=False):
            if ours[:3] != first[:3]:
                return (
                    f"rank 0 has {_described(first)} where rank {rank} has {_described(ours)}; all ranks need the same "
                    "parameters in the same order"
                )
        if len(held) != len(everyone[0]):
            return f"rank 0 has {len(everyone[0])} parameters and rank {rank} has {len(held)}"
    for one in zip(*everyone, strict=True):
        fault = _coverage_fault(one)
        if fault:
            return fault
    return ""


def _coverage_fault(one: tuple[_Held, ...]) -> str:
    """Why a parameter, as all ranks hold it, is not stepped, or not written exactly once; "" when it is."""
    name, shape = one[0].name, tuple(one[0].shape)
    if one[0].trained and not any(held.steps for held in one):
        return f"no rank owns {name}: it would never be stepped"
    boxes = [(tuple(offset), tuple(size)) for held in one for offset, size in held.writes]
    fault = partition_fault(shape, boxes) if 0 not in shape else ""
    if not fault:
        return ""
    writers = [rank for rank, held in enumerate(one) if held.writes]
    if not writers:
        return (
            f"no rank writes {name} to checkpoints; of the ranks that hold it, give one writes=True and a ParamShard "
            "with is_primary=True"
        )
    whole = [rank for rank in writers if one[rank].writes == [[[0] * len(shape), list(shape)]]]
    if len(whole) > 1:
        remedy = "writes=False" if all(held.steps for held in one) else "other parameters to own"
        return f"ranks {whole[0]} and {whole[1]} both write {name} to checkpoints; give one of them {remedy}"
    return (
        f"the parts of {name}, shape {shape}, that ranks {', '.join(map(str, writers))} write to checkpoints do not "
        f"cover it exactly once: {fault}"
    )


def _described(held: _Held) -> str:
    return f"{held.name} of shape {tuple(held.shape)}" + ("" if held.trained else ", frozen")


def _is_function_or_none(value: Callable[..., Any] | None) -> bool:
    return value is None or callable(value)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | None) else f"a {type(value).__name__}"
