"""Layers that hold slices of their weights and communicate with the other ranks of their group.

A module keeps its name, its code and its parameters' names; its class changes to one whose tensors are this rank's
slices, plain tensors, which its forward sees as they are. A table in the module says what they are of the whole ones,
see `slices`. Source: Shoeybi et al. 2019 (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtf.api.layout import Split
from dtf.core.errors import ConfigError, LayoutError
from dtf.distributed.collectives import fan, partial, scattered_total, total
from dtf.distributed.sharding import bounds, cut
from dtf.strategies.tensor_parallel.slices import TABLE

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Divided(nn.Module):
    """The parts that all divided modules share. `_axes`: parameter or buffer -> the axis along which it is cut."""

    _mesh: DeviceMesh
    _group: dist.ProcessGroup
    _name: str
    _split: Split
    _axis: int  # of the channels in activations
    _axes: Mapping[str, int] = MappingProxyType({})

    def cut(self, name: str) -> None:
        """Replace the whole tensors, which may be on meta, by this rank's slices."""
        table = self.__dict__.setdefault(TABLE, {})
        for tensors in (self._parameters, self._buffers):
            for key, tensor in [*tensors.items()]:
                if tensor is None or key not in self._axes or not tensor.dim():
                    continue
                axis = self._axes[key]
                table[key] = cut(tensor.shape, axis, [self._bounds(tensor.shape[axis])])
                part = table[key].take(tensor)
                setattr(self, key, nn.Parameter(part, tensor.requires_grad) if key in self._parameters else part)

    def _bounds(self, width: int) -> tuple[int, int]:
        return bounds(width, self._mesh.size(), self._mesh.get_local_rank())


class _Column(Divided):
    """Linear and convolution by outputs."""

    _axes = MappingProxyType({"weight": 0, "bias": 0})

    def cut(self, name: str) -> None:
        if self._split is not Split.classes:
            check_enough(name, outputs(self), "channels", self._mesh.size())
        super().cut(name)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(fan(x, self._group, self._name) if x.requires_grad else x)
        if self._split is not Split.classes:
            return y
        shape = torch.Size((*y.shape[:-1], outputs(self)))
        return DTensor.from_local(
            y,
            self._mesh,
            [Shard(y.dim() - 1)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )


class _Row(Divided):
    """Linear and convolution by inputs. The bias is added once, to the sum."""

    _axes = MappingProxyType({"weight": 1})

    def cut(self, name: str) -> None:
        if self._split is Split.row_scatter:
            self.__dict__["_axes"] = {"weight": 1, "bias": 0}
        super().cut(name)

    def __getattr__(self, name: str) -> Any:
        return None if name == "bias" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        with partial():
            y = super().forward(x)
        y = (
            total(y, self._group, self._name)
            if self._split is Split.row
            else scattered_total(y, self._axis, self._group, self._name)
        )
        bias = self._parameters.get("bias")
        if bias is None:
            return y
        return y + (bias.view(-1, *(1 for _ in y.shape[2:])) if self._axis == 1 else bias).to(y.dtype)


class Grouped(Divided):
    """A convolution whose groups of channels are divided."""

    _axes = MappingProxyType({"weight": 0, "bias": 0})

    def cut(self, name: str) -> None:
        convolution = cast(nn.Conv2d, self)
        if convolution.groups % self._mesh.size():
            raise ConfigError(
                f"{name} has {convolution.groups} groups of channels, which strategy.degree={self._mesh.size()} does "
                "not divide"
            )
        super().cut(name)
        convolution.groups //= self._mesh.size()


class _Norm(Divided):
    """Batch normalisation, a channel at a time: no communication."""

    _axes = MappingProxyType({"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0})


class _Features(Divided):
    """An embedding by features: every rank looks up a slice of each row."""

    _axes = MappingProxyType({"weight": 1})


class _Ids(Divided):
    """An embedding by ids: every rank looks up the ids it holds, and rows of other ids count as zero.

    The row of an id outside the table is NaN, so that the update is skipped and counted. Raising an error would have
    to wait for the device.
    """

    _axes = MappingProxyType({"weight": 0})
    _first: int

    def cut(self, name: str) -> None:
        embedding = cast(nn.Embedding, self)
        check_enough(name, embedding.num_embeddings, "rows", self._mesh.size())
        super().cut(name)
        first, last = self._bounds(embedding.num_embeddings)
        self.__dict__["_first"] = first
        if embedding.padding_idx is not None:
            embedding.padding_idx = embedding.padding_idx - first if first <= embedding.padding_idx < last else None

    def forward(self, ids: Tensor) -> Tensor:
        rows = cast(Tensor, self.weight).shape[0]
        local = ids - self._first
        others = (local < 0) | (local >= rows)
        beyond = (ids < 0) | (ids >= cast(int, self.num_embeddings))
        looked_up = super().forward(local.clamp(0, rows - 1)).masked_fill(others[..., None], 0.0)
        return total(looked_up.masked_fill(beyond[..., None], torch.nan), self._group, self._name)


def check_enough(name: str, count: int, of: str, size: int) -> None:
    """ConfigError, on all ranks alike, when one of `size` gets none of the `count`."""
    first, last = bounds(count, size, size - 1)
    if first == last:
        raise ConfigError(
            f"{name} has {count} {of}, of which strategy.degree={size} leaves a rank none; use a smaller degree"
        )


def outputs(module: nn.Module) -> int:
    """Features or channels of a layer's output."""
    return cast(
        int,
        getattr(module, "out_features", None)
        or getattr(module, "out_channels", None)
        or getattr(module, "embedding_dim", None),
    )


def kind_of(name: str, module: nn.Module, split: Split) -> type[Divided]:
    """The class of a module that is split so. ConfigError when there is none."""
    plain_convolution = isinstance(module, CONVOLUTIONS) and module.groups == 1
    match split:
        case Split.column | Split.classes if isinstance(module, nn.Linear) or (
            plain_convolution and split is Split.column
        ):
            return _Column
        case Split.row | Split.row_scatter if isinstance(module, nn.Linear) or plain_convolution:
            return _Row
        case Split.local if isinstance(module, NORMS):
            return _Norm
        case Split.local if isinstance(module, CONVOLUTIONS) and module.groups > 1:
            return Grouped
        case Split.column | Split.row if (
            isinstance(module, nn.Embedding)
            and module.max_norm is None
            and not (module.scale_grad_by_freq or module.sparse)
        ):
            return _Features if split is Split.column else _Ids
    if split is Split.classes:  # no mistake: weights of another number of classes have these layers drawn anew
        raise ConfigError(
            f"strategy=tensor: the last layer {name} is {type(module).__name__}, and only a Linear is divided by "
            "classes; use strategy=fsdp"
        )
    raise LayoutError(
        f"the recipe's layout splits {name} as {split.value}, which {type(module).__name__} cannot be; see "
        "docs/own-parts.md"
    )
