"""Tensor parallelism: modules that hold slices of their weights, as a layout says, and communicate with the other ranks
of their group.

A module keeps its name, its code and its parameters' names; its class changes to one whose tensors are DTensors and
whose forward, unchanged, sees this rank's slices: torch's DTensor has no rule for convolutions over divided channels.
Source: Shoeybi et al. 2019 (arXiv:1909.08053).
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
from dtf.distributed.sharding import bounds
from dtf.model.seeded_dropout import DROPOUTS
from dtf.strategies.pass_probes import has_hook_on_sums

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def divide(model: nn.Module, splits: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Divide the named modules of a model, which may be on meta, over a mesh of one axis, in place; see `layout.Split`.
    Not collective.

    ConfigError for a module that cannot be divided so, and for slices that would be empty or cut a group of channels.
    """
    modules = dict(model.named_modules())
    width, axis = 0, -1  # of the activations between a column and its row
    for name, split in splits.items():
        module = modules[name]
        if split is Split.local and isinstance(module, DROPOUTS):
            if not width:
                raise LayoutError(f"the recipe's layout splits {name} as local, but no column layer comes before it")
            module.__dict__["_slice"] = (axis, width, *bounds(width, mesh.size(), mesh.get_local_rank()))
            continue
        kind = _kind(name, module, split)
        hooked = [key for key, p in module.named_parameters() if p._backward_hooks or has_hook_on_sums(p)]
        if hooked:
            raise LayoutError(
                f"the recipe's layout splits {name}, and {name}.{hooked[0]} has a hook of register_hook, which would "
                "see a slice of its gradient; leave it out of the splits"
            )
        parameters = {id(parameter) for parameter in module.parameters()}
        shared = [
            other
            for other, tied in modules.items()
            if tied is not module and parameters & {id(parameter) for parameter in tied._parameters.values()}
        ]
        if shared:
            raise LayoutError(
                f"the recipe's layout splits {name}, whose parameters {shared[0]} has too; leave both out of the splits"
            )
        module.__class__ = type(f"Divided{type(module).__name__}", (kind, type(module)), {})
        divided = cast(_Divided, module)
        divided.__dict__ |= {
            "_mesh": mesh,
            "_name": name,
            "_group": mesh.get_group(),
            "_split": split,
            "_axis": 1 if isinstance(module, (*CONVOLUTIONS, *NORMS)) else -1,
        }
        divided.cut(name)
        # a grouped convolution may change the number of channels
        if split in (Split.column, Split.row_scatter) or kind is _Grouped:
            width, axis = _outputs(module), divided._axis


class _Divided(nn.Module):
    """The parts that all divided modules share. `_axes`: parameter or buffer -> the axis along which it is cut."""

    _mesh: DeviceMesh
    _group: dist.ProcessGroup
    _name: str
    _split: Split
    _axis: int  # of the channels in activations
    _axes: Mapping[str, int] = MappingProxyType({})

    def cut(self, name: str) -> None:
        """Replace the whole tensors by DTensors of which this rank holds a slice."""
        for tensors in (self._parameters, self._buffers):
            for key, tensor in [*tensors.items()]:
                if tensor is None or key not in self._axes or not tensor.dim():
                    continue
                slices = sliced(tensor, self._axes[key], self._mesh)
                setattr(
                    self,
                    key,
                    nn.Parameter(slices, requires_grad=tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else slices,
                )

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not isinstance(value, DTensor):
            return value
        return _Slice.apply(value) if value.requires_grad else value.to_local()


class _Slice(torch.autograd.Function):
    """`DTensor.to_local`, with a gradient of the parameter's own shape and strides.

    Torch computes both from the slice, which is wrong where slices are uneven; autograd then gathers the gradient to
    mend it (seen in 2.11).
    """

    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> Tensor:  # type: ignore[override]
        ctx.like = whole.device_mesh, whole.placements, whole.shape, whole.stride()
        local = whole.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:  # type: ignore[override]
        mesh, placements, shape, stride = ctx.like
        return DTensor.from_local(gradient.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)


class _Column(_Divided):
    """Linear and convolution by outputs."""

    _axes = MappingProxyType({"weight": 0, "bias": 0})

    def cut(self, name: str) -> None:
        if self._split is not Split.classes:
            _check_enough(name, _outputs(self), "channels", self._mesh.size())
        super().cut(name)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(fan(x, self._group, self._name) if x.requires_grad else x)
        if self._split is not Split.classes:
            return y
        shape = torch.Size((*y.shape[:-1], _outputs(self)))
        return DTensor.from_local(
            y,
            self._mesh,
            [Shard(y.dim() - 1)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )


class _Row(_Divided):
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
        bias = _Divided.__getattr__(self, "bias")
        return (
            y
            if bias is None
            else y + (bias.view(-1, *(1 for _ in y.shape[2:])) if self._axis == 1 else bias).to(y.dtype)
        )


class _Grouped(_Divided):
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


class _Norm(_Divided):
    """Batch normalisation, a channel at a time: no communication."""

    _axes = MappingProxyType({"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0})


class _Features(_Divided):
    """An embedding by features: every rank looks up a slice of each row."""

    _axes = MappingProxyType({"weight": 1})


class _Ids(_Divided):
    """An embedding by ids: every rank looks up the ids it holds, and rows of other ids count as zero.

    The row of an id outside the table is NaN, so that the update is skipped and counted. Raising an error would have
    to wait for the device.
    """

    _axes = MappingProxyType({"weight": 0})
    _first: int

    def cut(self, name: str) -> None:
        embedding = cast(nn.Embedding, self)
        _check_enough(name, embedding.num_embeddings, "rows", self._mesh.size())
        super().cut(name)
        first, last = bounds(embedding.num_embeddings, self._mesh.size(), self._mesh.get_local_rank())
        self.__dict__["_first"] = first
        if embedding.padding_idx is not None:
            embedding.padding_idx = embedding.padding_idx - first if first <= embedding.padding_idx < last else None

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = ids - self._first
        others = (local < 0) | (local >= rows)
        beyond = (ids < 0) | (ids >= cast(int, self.num_embeddings))
        looked_up = super().forward(local.clamp(0, rows - 1)).masked_fill(others[..., None], 0.0)
        return total(looked_up.masked_fill(beyond[..., None], torch.nan), self._group, self._name)


def sliced(tensor: Tensor, axis: int, mesh: DeviceMesh) -> DTensor:
    """A DTensor like `tensor`, which may be on meta, of which this rank holds a slice along `axis`."""
    first, last = bounds(tensor.shape[axis], mesh.size(), mesh.get_local_rank())
    local = tensor.detach().narrow(axis, first, last - first).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(local, mesh, [Shard(axis)], run_check=False, shape=tensor.shape, stride=tensor.stride())


def _check_enough(name: str, count: int, of: str, size: int) -> None:
    """ConfigError, on all ranks alike, when one of `size` gets none of the `count`."""
    first, last = bounds(count, size, size - 1)
    if first == last:
        raise ConfigError(
            f"{name} has {count} {of}, of which strategy.degree={size} leaves a rank none; use a smaller degree"
        )


def _outputs(module: nn.Module) -> int:
    """Features or channels of a layer's output."""
    return cast(
        int,
        getattr(module, "out_features", None)
        or getattr(module, "out_channels", None)
        or getattr(module, "embedding_dim", None),
    )


def _kind(name: str, module: nn.Module, split: Split) -> type[_Divided]:
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
            return _Grouped
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
