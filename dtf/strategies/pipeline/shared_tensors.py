"""Parameters and buffers that several stages of a pipeline use, such as tied embeddings: each rank that needs one holds
a copy, and all copies get the same update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtf.api.precision import Precision
from dtf.api.task import Source
from dtf.core.errors import ConfigError
from dtf.core.types import Box
from dtf.distributed.collectives import waiting_group
from dtf.distributed.grad_allreduce import buckets
from dtf.distributed.sharding import byte_count, local
from dtf.host.waits import Operation
from dtf.model.init import formats
from dtf.strategies.tensor_parallel.slices import TABLE, slices_of


def holders(uses: Mapping[str, Sequence[int]], bounds: Sequence[int], ranks: int) -> dict[str, list[int]]:
    """Name of each tensor that several ranks of a pipeline use -> their places, in the order of their first stage.

    `uses`: name -> the blocks that use it. `bounds`: the first block of each stage, and the number of blocks.
    """
    found = {}
    for name, blocks in uses.items():
        places = list(dict.fromkeys(s % ranks for s in _stages(blocks, bounds)))
        if len(places) > 1:
            found[name] = places
    return found


def refuse_gathered_twice(
    model: nn.Module, uses: Mapping[str, Sequence[int]], bounds: Sequence[int], ranks: int, shards: int
) -> None:
    """ConfigError, on all ranks alike, for a parameter that two stages of a rank use, where ranks have slices of it:
    torch gathers what is in one root. `shards`: how many; the others as of `holders`.
    """
    for name, _ in model.named_parameters() if shards > 1 else ():
        stages = _stages(uses[name], bounds)
        for place in range(ranks):
            first, second, *_ = [s for s in stages if s % ranks == place] + [-1, -1]
            if second >= 0:
                raise ConfigError(
                    f"strategy.shard={shards}: the stages {first} and {second} are on one rank and both use {name}, "
                    "whose slices are gathered for one stage; use strategy.virtual=1, or strategy.shard=1"
                )


def _stages(blocks: Iterable[int], bounds: Sequence[int]) -> list[int]:
    """The stages of some blocks."""
    return [s for s in range(len(bounds) - 1) if any(bounds[s] <= block < bounds[s + 1] for block in blocks)]


def first_names(model: nn.Module) -> dict[int, str]:
    """The first name of each parameter and buffer, by identity."""
    return {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def renamed(segment: nn.Module, names: Mapping[int, str]) -> dict[str, str]:
    """Names of a segment's tensors -> their first names in the model."""
    return {name: names[id(tensor)] for name, tensor in (*segment.named_parameters(), *segment.named_buffers())}


def check_formats(whole: nn.Module, segment: nn.Module, names: Mapping[str, str], precision: Precision) -> None:
    """ConfigError where a tensor would have another format in a stage than in the whole model."""
    expected, found = formats(whole, precision), formats(segment, precision)
    for name, first in names.items():
        if name in found and found[name] != expected[first]:
            raise ConfigError(
                f"{first} is shared by a normalisation that stays in fp32 and by {name}, which does not; use "
                "precision=fp32, or two parameters"
            )


class RankTensors(nn.Module):
    """All tensors of this rank's segments under their first names, to be filled in place."""

    def __init__(self, segments: Iterable[tuple[nn.Module, Mapping[str, str]]]) -> None:
        super().__init__()
        self.found: dict[str, tuple[bool, Tensor]] = {}
        table = self.__dict__.setdefault(TABLE, {})
        for segment, names in segments:
            table |= {names[name]: part for name, part in slices_of(segment).items() if name in names}
            self.found |= {names[name]: (True, parameter) for name, parameter in segment.named_parameters()}
            self.found |= {names[name]: (False, buffer) for name, buffer in segment.named_buffers()}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, tensor) for name, (trained, tensor) in self.found.items() if trained)  # type: ignore[misc]

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, (trained, tensor) in self.found.items() if not trained)


class Ties:
    """Which slots of this rank's segments are one tensor, to join them again after they got memory one by one."""

    def __init__(self, segments: Iterable[nn.Module]) -> None:
        self._slots: dict[int, list[tuple[dict, str]]] = {}
        for segment in segments:
            for module in segment.modules():
                for tensors in (module._parameters, module._buffers):
                    for key, tensor in tensors.items():
                        if tensor is not None:
                            self._slots.setdefault(id(tensor), []).append((tensors, key))

    def join(self) -> None:
        """Give all slots of a tensor the one that the first has now."""
        for (tensors, key), *others in self._slots.values():
            for other, name in others:
                other[name] = tensors[key]


class TiedGradients:
    """Sums the gradients of shared parameters over the ranks of a pipeline that hold them. Built and called by all
    ranks alike. Collective.

    `holders`: see `holders`. `pipelines`: the ranks of each. `names`: of the gradients that `__call__` gets.
    """

    def __init__(
        self, holders: Mapping[str, list[int]], pipelines: list[list[int]], rank: int, names: list[str]
    ) -> None:
        together: dict[tuple[int, ...], list[str]] = {}
        for name, places in holders.items():
            together.setdefault(tuple(places), []).append(name)
        self._sums: list[tuple[list[int], list[int], dist.ProcessGroup, Operation]] = []
        for places, shared in together.items():
            for pipeline in pipelines:
                ranks = [pipeline[place] for place in places]
                group = dist.new_group(ranks)
                indices = [names.index(name) for name in shared if name in names]
                if rank in ranks and indices:
                    assert isinstance(group, dist.ProcessGroup)
                    waits = Operation("the sum of the gradients of shared parameters", waiting_group(group, "shared"))
                    order = [dist.get_process_group_ranks(group).index(other) for other in ranks]
                    self._sums.append((indices, order, group, waits))

    def __call__(self, gradients: list[Tensor]) -> None:
        """In place, in the order of the stages: the same bits on all ranks."""
        for indices, order, group, waits in self._sums:
            for bucket in buckets(gradients[i] for i in indices):
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                parts = [torch.empty_like(flat) for _ in order]
                with waits:
                    dist.all_gather(parts, flat, group=group)
                total = parts[order[0]]
                for i in order[1:]:
                    total += parts[i]
                sums = total.split([gradient.numel() for gradient in bucket])
                torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(sums, bucket, strict=True)])


@dataclass(frozen=True)
class SharedTensors:
    """What a program has to know of shared tensors. `names`: by stage, see `renamed`. `elsewhere`: first names of those
    that another rank saves. `copied`: first names of those that several ranks hold -> how many.
    """

    names: dict[int, dict[str, str]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    copied: Mapping[str, int] = field(default_factory=dict)

    def once(self, stage: int, boxes: Iterable[Box], seen: set[str]) -> list[Box]:
        """Those boxes of a stage's buffers that this rank saves, under their first names. `seen`: names saved before,
        which grow.
        """
        kept = []
        for box in boxes:
            place, _, name = box.name.partition("/")
            first = self.names.get(stage, {}).get(name, name)
            if first not in self.elsewhere and f"{place}/{first}" not in seen:
                seen.add(f"{place}/{first}")
                kept.append(Box(f"{place}/{first}", box.tensor, box.shape, box.offset))
        return kept

    def tied_bytes(self, models: Mapping[int, nn.Module]) -> int:
        """What this rank sends in a step for sums of the gradients of shared parameters. `models`: its stages."""
        tied = {
            self.names[index].get(name, name): local(parameter)
            for index, model in models.items()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        return sum((self.copied[name] - 1) * byte_count([tied[name]]) for name in tied if name in self.copied)

    def refuse_changed(self, stage: int, changed: Iterable[str]) -> None:
        """ConfigError where one of these changed buffers has copies on several ranks, which would drift apart."""
        for name in changed:
            if self.names.get(stage, {}).get(name, name) in self.copied:
                raise ConfigError(
                    f"the forward pass changes the buffer {name}, which stages on several ranks use; cut elsewhere "
                    "with strategy.cuts, or use launcher.processes=1"
                )


class CopiedBuffers:
    """The buffers of this rank of which other ranks have copies: a pass must not change them."""

    def __init__(self, shared: SharedTensors, stages: Mapping[int, nn.Module]) -> None:
        self._shared = shared
        self._slots = [
            (index, f"{prefix}.{key}" if prefix else key, module._buffers, key)
            for index, stage in stages.items()
            for prefix, module in stage.named_modules()
            for key in module._buffers
            if shared.names[index].get(f"{prefix}.{key}" if prefix else key) in shared.copied
        ]
        self._marks: list[tuple[int, int]] = []

    def mark(self) -> None:
        """From here on changes count."""
        self._marks = [_mark(buffers[key]) for _, _, buffers, key in self._slots]

    def check(self) -> None:
        """ConfigError where one was changed since `mark`. Without host synchronisation."""
        for (index, name, buffers, key), mark in zip(self._slots, self._marks, strict=True):
            if _mark(buffers.get(key)) != mark:
                self._shared.refuse_changed(index, [name])


def _mark(tensor: Tensor | None) -> tuple[int, int]:
    return id(tensor), 0 if tensor is None else tensor._version


class RenamedSource:
    """A checkpoint in which a stage finds its buffers under their first names."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self._source, self._names = source, names
        self.scalars: dict = source.scalars
        self.place: str = source.place
        self.folder: Path = source.folder

    def names(self) -> set[str]:
        return self._source.names()

    def read(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
        whole: tuple[int, ...] | None = None,
    ) -> Tensor:
        return self._source.read(self._first(name), offset, shape, whole)

    def read_into(
        self, name: str, out: Tensor, offset: tuple[int, ...] | None = None, whole: tuple[int, ...] | None = None
    ) -> None:
        self._source.read_into(self._first(name), out, offset, whole)

    def _first(self, name: str) -> str:
        place, _, rest = name.partition("/")
        return f"{place}/{self._names.get(rest, rest)}"
