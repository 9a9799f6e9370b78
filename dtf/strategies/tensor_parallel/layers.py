"""Layers that hold slices of their weights and communicate with the other ranks of their group.

A module keeps its name, its code and its parameters' names; its class changes to one whose tensors are this rank's
slices, plain tensors, which its forward sees as they are. A table in the module says what they are of the whole ones,
see `slices`. Source: Shoeybi et al. 2019 (arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from dtf.api.layout import Split, SplitBy
from dtf.core.errors import ConfigError, LayoutError
from dtf.distributed.collectives import fan, gathered, partial, scattered_total, total
from dtf.distributed.sharding import Slice, bounds, cut
from dtf.strategies.tensor_parallel.slices import DEGREE, TABLE, check_enough, ranges

if TYPE_CHECKING:
    from dtf.strategies.tensor_parallel.positions import Positions

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
TRANSPOSED = "transformers.pytorch_utils.Conv1D"
"""A Linear whose weight is (inputs, outputs)."""


class Divided(nn.Module):
    """The parts that all divided modules share. `_axes`: parameter or buffer -> the axis along which it is cut."""

    _mesh: DeviceMesh
    _group: dist.ProcessGroup
    _name: str
    _by: SplitBy
    _axis: int  # of the channels in activations
    _positions: Positions | None = None  # where ranks divide positions between divided layers
    _given = False  # whether the module around it has gathered them
    _axes: Mapping[str, int] = MappingProxyType({})

    def cut(self, name: str, made: dict[int, tuple[Tensor, nn.Parameter, Slice]]) -> None:
        """Replace the whole tensors, which may be on meta, by this rank's slices. `made`: of parameters that several
        modules have, by identity of the whole one: it, and what was made of it.
        """
        if "weight" in self._axes and "weight" not in self._parameters:
            raise LayoutError(
                f"the recipe's layout splits {name}, whose weight is no parameter of it but made from others in each "
                "pass, as by weight_norm; leave it out of the splits"
            )
        table = self.__dict__.setdefault(TABLE, {})
        for tensors in (self._parameters, self._buffers):
            for key, tensor in [*tensors.items()]:
                if tensor is None or key not in self._axes or not tensor.dim():
                    continue
                axis = self._axes[key]
                table[key] = cut(tensor.shape, axis, self._ranges(key, tensor.shape[axis]))
                whole, part, before = made.get(id(tensor), (None, None, table[key]))
                if before != table[key]:
                    raise LayoutError(
                        f"the recipe's layout splits {name}, and another module has its {key} too, which is cut in "
                        "another way there; leave both out of the splits"
                    )
                if whole is None:
                    part = table[key].take(tensor)
                if key in self._parameters:
                    part = part if whole is not None else nn.Parameter(part, tensor.requires_grad)  # type: ignore[arg-type]
                    made[id(tensor)] = (tensor, cast(nn.Parameter, part), table[key])
                setattr(self, key, part)

    def _ranges(self, key: str, width: int) -> list[tuple[int, int]]:
        return ranges(f"{self._name}.{key}", self._by, width, self._mesh)

    def fanned(self, x: Tensor) -> Tensor:
        """An input that all ranks have alike, or of which each has some positions, and which they use differently."""
        if self._given:
            return x
        if self._positions is not None:
            return gathered(x, 1, self._positions.here(), self._group, self._name)
        return fan(x, self._group, self._name) if x.requires_grad else x


class _Column(Divided):
    """Linear and convolution by outputs."""

    _axes = MappingProxyType({"weight": 0, "bias": 0})

    def cut(self, name: str, made: Any) -> None:
        if self._by.split is not Split.classes and not self._by.heads:
            check_enough(name, min(self._by.parts, default=outputs(self)), "channels", self._mesh.size())
        super().cut(name, made)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(self.fanned(x))
        if self._by.split is not Split.classes:
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

    def cut(self, name: str, made: Any) -> None:
        if self._by.split is Split.row_scatter:
            self.__dict__["_axes"] = {"weight": 1, "bias": 0}
        super().cut(name, made)

    def product(self, x: Tensor) -> Tensor:
        """This rank's summand, without the bias."""
        weight = cast(Tensor, self.weight)
        if isinstance(self, CONVOLUTIONS):
            return self._conv_forward(x, weight, None)
        return functional.linear(x, weight)

    def forward(self, x: Tensor) -> Tensor:
        with partial():
            y = self.product(x)
        y = (
            scattered_total(y, 1, self._group, self._name)
            if self._positions is not None
            else total(y, self._group, self._name)
            if self._by.split is Split.row
            else scattered_total(y, self._axis, self._group, self._name)
        )
        bias = self._parameters.get("bias")
        if bias is None:
            return y
        return y + (bias.view(-1, *(1 for _ in y.shape[2:])) if self._axis == 1 else bias).to(y.dtype)


class _TransposedColumn(_Column):
    """As _Column, of a weight (inputs, outputs)."""

    _axes = MappingProxyType({"weight": 1, "bias": 0})
    nf: int

    def cut(self, name: str, made: Any) -> None:
        super().cut(name, made)
        self.nf = cast(Tensor, self.bias).shape[0]


class _TransposedRow(_Row):
    """As _Row, of a weight (inputs, outputs)."""

    _axes = MappingProxyType({"weight": 0})

    def product(self, x: Tensor) -> Tensor:
        return x.matmul(cast(Tensor, self.weight))


class Grouped(Divided):
    """A convolution whose groups of channels are divided."""

    _axes = MappingProxyType({"weight": 0, "bias": 0})

    def cut(self, name: str, made: Any) -> None:
        convolution = cast(nn.Conv2d, self)
        if convolution.groups % self._mesh.size():
            raise ConfigError(
                f"{name} has {convolution.groups} groups of channels, which {self._mesh.size()} ranks do not divide; "
                f"use a divisor, see {DEGREE}"
            )
        super().cut(name, made)
        convolution.groups //= self._mesh.size()


class _Norm(Divided):
    """Batch normalisation, a channel at a time: no communication."""

    _axes = MappingProxyType({"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0})


class _Whole(Divided):
    """Any module whose weights all ranks hold, and use for slices: their gradients are sums over ranks."""

    sums_gradients = True

    def forward(self, x: Tensor) -> Tensor:
        parameters = {key: p for key, p in self._parameters.items() if p is not None}
        fanned = {key: fan(p, self._group, self._name) for key, p in parameters.items() if p.requires_grad}
        vars(self).update(fanned)  # found before the parameters of these names
        try:
            return super().forward(x)
        finally:
            for key in fanned:
                del vars(self)[key]


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

    def cut(self, name: str, made: Any) -> None:
        embedding = cast(nn.Embedding, self)
        check_enough(name, embedding.num_embeddings, "rows", self._mesh.size())
        super().cut(name, made)
        first, last = bounds(embedding.num_embeddings, self._mesh.size(), self._mesh.get_local_rank())
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


def outputs(module: nn.Module) -> int:
    """Features or channels of a layer's output."""
    keys = ("out_features", "out_channels", "embedding_dim", "nf")
    return next(count for count in (getattr(module, key, None) for key in keys) if count)


def is_a(module: nn.Module, kind: str) -> bool:
    """Whether a module is of a class, given by its full name, whose library may not be installed."""
    return any(f"{base.__module__}.{base.__qualname__}" == kind for base in type(module).__mro__)


def kind_of(name: str, module: nn.Module, by: SplitBy) -> type[Divided]:
    """The class of a module that is split so. ConfigError when there is none."""
    split, plain = by.split, not (by.heads or by.parts)
    linear, transposed = isinstance(module, nn.Linear), is_a(module, TRANSPOSED)
    whole_convolution = isinstance(module, CONVOLUTIONS) and module.groups == 1
    if not plain and not (split in (Split.column, Split.row) and (linear or transposed or whole_convolution)):
        split = None  # only these have heads and parts
    match split:
        case Split.column | Split.row if transposed:
            return _TransposedColumn if split is Split.column else _TransposedRow
        case Split.column | Split.classes if linear or (whole_convolution and split is Split.column):
            return _Column
        case Split.row | Split.row_scatter if linear or whole_convolution:
            return _Row
        case Split.local if isinstance(module, NORMS):
            return _Norm
        case Split.local if isinstance(module, CONVOLUTIONS) and module.groups > 1:
            return Grouped
        case Split.whole if not any(True for _ in module.children()):
            return _Whole
        case Split.column | Split.row if (
            isinstance(module, nn.Embedding)
            and module.max_norm is None
            and not (module.scale_grad_by_freq or module.sparse)
        ):
            return _Features if split is Split.column else _Ids
    if split is Split.classes:  # no mistake: weights of another number of classes have these layers drawn anew
        raise ConfigError(
            f"the last layer {name} is {type(module).__name__}, and only a Linear is divided by "
            "classes; use strategy=fsdp"
        )
    how = by.split.value if plain else f"{by.split.value} by heads or parts"
    raise LayoutError(
        f"the recipe's layout splits {name} as {how}, which {type(module).__name__} cannot be; see docs/strategies.md"
    )
