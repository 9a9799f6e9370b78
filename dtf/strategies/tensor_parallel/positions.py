"""Positions of each row, divided among ranks: between the divided layers of tensor parallelism (sequence parallelism),
and everywhere (context parallelism).

Activations are (B, T, ...) there. Between the first and the last module that a layout names in `positions`, a rank has
a slice of the T positions. Along the axis `tensor`, divided layers gather all positions of a slice and scatter them
again; outside of these modules ranks compute alike. Along the axis `context`, attention is by heads: an all-to-all
gives a rank all positions of some heads; losses are summed over the ranks; the gradient of a parameter is the sum of
what they have. Sources: Korthikanti et al. 2022 (arXiv:2205.05198); Jacobs et al. 2023 (arXiv:2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtf.api.layout import Layout, Split, SplitBy, Splits
from dtf.api.task import Task
from dtf.core.errors import ConfigError, LayoutError
from dtf.core.text import count_text
from dtf.distributed.collectives import gathered, joined, own_slice
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.distributed.sharding import balanced, bounds, is_dtensor
from dtf.model.seeded_calls import HEADS
from dtf.model.seeded_dropout import MOST_IN_FLIGHT, Part, SeededDropout, in_backward, is_seeded
from dtf.strategies.tensor_parallel.exchanged_attention import Exchange, Exchanging
from dtf.strategies.tensor_parallel.slices import EXCHANGE, slices_of


def check_positions(layout: Layout, name: str, sizes: MeshSizes, task: Task) -> None:
    """Raise ConfigError for a model whose positions are to be divided and not known. `name`: of the strategy."""
    if sizes.context > 1 and not layout.positions:
        raise ConfigError(
            f"{name} strategy.context={sizes.context} divides the positions of each row, and the layout of "
            f"{type(task.recipe).__name__} names no modules that compute position by position: add them, as in "
            "Layout(positions=('blocks.0', 'blocks.1', 'norm')), see docs/strategies.md, or use strategy.tensor"
        )
    if sizes.context > 1 and not any(_makes_heads(by) or _is_attention(by) for by in layout.splits.values()):
        raise ConfigError(
            f"{name} strategy.context={sizes.context} divides attention by heads, and the layout of "
            f"{type(task.recipe).__name__} names no layer that makes queries by SplitBy(heads=...); add them, or use "
            "strategy.tensor"
        )


def partial_parameters(model: nn.Module, names: Sequence[str]) -> frozenset[str]:
    """Names of the parameters that ranks along `tensor` use for some positions each, of a model after its layers were
    divided, or of a stage of one. `names`: the layout's.

    LayoutError for one that is also used for all positions, which a stage shows of its own uses alone.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    summed = {name for name, module in modules.items() if getattr(module, "sums_gradients", False)}
    divided, within = slices_of(model), {*_inside(modules, names)} - summed
    users: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    found = set()
    for used in users.values():
        parts = [name for name in used if name.rpartition(".")[0] in within and name not in divided]
        if parts and len(parts) < len(used):
            raise LayoutError(
                f"{parts[0]} is used for some positions of a row, as the layout's positions say, and as "
                f"{next(name for name in used if name not in parts)} for all of them; split both by the layout, "
                "or leave its module out of the positions"
            )
        found.update(used[:1] if parts else ())
    return frozenset(found)


class Positions:
    """The positions that this rank has in a model or a stage of one, which it changes in place: `model`, after its
    layers were divided. `names`: the layout's. `ends`: whether the last of them is in this stage, so that positions
    stay divided along `context` in what follows.

    ConfigError for a model whose attention cannot be computed so.
    """

    masks: SeededDropout
    """Says which micro-batch computes. See `follow`."""

    def __init__(self, model: nn.Module, names: Sequence[str], splits: Splits, dims: ParallelDims, ends: bool) -> None:
        self._tensor, self._context, self._dims = dims.group("tensor"), dims.group("context"), dims
        self._widths: dict[int, int] = {}  # key of a micro-batch -> its positions
        self._divided = False  # at this place of a forward pass
        self._dropped = set[str]()  # names of modules that drop from divided positions
        modules = dict(model.named_modules())
        model.register_forward_pre_hook(lambda module, inputs: self._begin())
        names = [name for name in names if name in modules]
        inside = _inside(modules, names)
        self._inside = frozenset(inside)
        self.partial = partial_parameters(model, names) if self._tensor is not None else frozenset[str]()
        """Names of the parameters whose gradients are to be summed over the axis `tensor`."""
        for name in inside:
            self._tell(name, modules[name])
        around = {name.rpartition(".")[0] for name, by in splits.items() if _makes_heads(by)} & set(inside)
        for name in around if self._tensor is not None else ():
            self._gather_around(name, modules[name], splits)
        if self._context is not None:
            self._divide_attention(modules, splits)
        for name in names if self._context is not None else names[:1]:
            modules[name].register_forward_pre_hook(self._enter(modules[name] is modules[names[0]]), with_kwargs=True)
        if names and (self._tensor is not None or not ends):
            modules[names[-1]].register_forward_hook(lambda module, inputs, outputs: self._leave(outputs, ends))

    def follow(self, masks: SeededDropout) -> None:
        """Take what says which micro-batch computes, and tell it of the positions. Before the first pass."""
        self.masks, masks.part_of = masks, self._part_of

    def _part_of(self, name: str, shape: Sequence[int]) -> Part | None:
        """Which positions there are of (B, t, ...), which the module of this name drops from: between the first and the
        last module of the layout's positions, and up to the outputs where they stay divided. By their number; None:
        another one, as in front of them.
        """
        again = in_backward() or self.masks.computes_again  # in no order
        if len(shape) < 3 or not (name in self._dropped if again else self._divided):
            return None
        if not again:
            self._dropped.add(name)
        places = ((self._between(), True), (self._of_context(), False))
        return next((Part(*at, own=own) for at, own in places if shape[1] == at[2] - at[1]), None)

    def _begin(self) -> None:
        """Before a forward pass."""
        self._divided = False

    def _tell(self, name: str, module: nn.Module) -> None:
        """Let a module know of the positions: a divided layer, a dropout. LayoutError for one that mixes positions."""
        if isinstance(module, nn.modules.batchnorm._NormBase):
            raise LayoutError(
                f"{name} ({type(module).__name__}) has statistics of all positions, and the layout names it in "
                "positions, of which each rank has some; use a norm of each position, or leave it out of the positions"
            )
        if is_seeded(module):
            module.__dict__["_in_positions"] = True
        elif hasattr(module, "_positions") and self._tensor is not None:
            if not getattr(module, "batch_first", True):
                raise ConfigError(
                    f"{type(module).__name__} of batch_first=False has positions on axis 0, and the layout names it in "
                    "positions, which are on axis 1; use batch_first=True, or leave it out of the positions"
                )
            module.__dict__["_positions"] = self

    def refuse_changed(self, buffers: Iterable[str], scratch: Collection[str]) -> None:
        """Raise LayoutError for a buffer that a pass changes from some positions. `scratch`: no part of the run."""
        for name in buffers:
            module = name.rpartition(".")[0]
            if module in self._inside and name not in scratch:
                raise LayoutError(
                    f"{module} changes its buffer {name} in the forward pass, and the layout names it in positions, of "
                    "which each rank has some; leave it out of the positions, or give the buffer the rule "
                    "BufferUpdate.local"
                )

    def partial_of(self, model: nn.Module) -> frozenset[str]:
        """Names of the parameters whose gradients are to be summed over ranks that compute a layer together."""
        return self.partial if self._context is None else frozenset(name for name, _ in model.named_parameters())

    @property
    def cut(self) -> frozenset[str] | None:
        """Names of the parameters that see other positions on each rank of the axis `tensor`. None: all that is
        computed is of other positions.
        """
        return self.partial if self._context is None else None

    def _gather_around(self, name: str, module: nn.Module, splits: Splits) -> None:
        """Let a module with attention get all positions, once for its queries, keys and values."""
        for key, child in module.named_children():
            if _makes_heads(splits.get(f"{name}.{key}")):
                child.__dict__["_given"] = True

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            assert self._tensor is not None
            hidden = _hidden(args, kwargs)
            whole = gathered(hidden, 1, self.here(), self._tensor, name)
            moved = tuple(whole if value is hidden else value for value in args)
            return moved, {key: whole if value is hidden else value for key, value in kwargs.items()}

        module.register_forward_pre_hook(enter, with_kwargs=True)

    def here(self) -> int:
        """How many positions ranks along `tensor` have together."""
        _, first, last = self._of_context()
        return last - first

    def _of_context(self) -> tuple[int, int, int]:
        """All positions, first and last + 1 of those here along `context`."""
        width = self._widths[self.masks.key]
        if self._context is None:
            return width, 0, width
        return width, *bounds(width, self._dims.sizes.context, self._dims.place["context"])

    def _between(self) -> tuple[int, int, int]:
        """All positions, first and last + 1 of those of this rank, between divided layers."""
        width, begin, end = self._of_context()
        if self._tensor is None:
            return width, begin, end
        first, last = bounds(end - begin, self._dims.sizes.tensor, self._dims.place["tensor"])
        return width, begin + first, begin + last

    def _enter(self, first: bool) -> Callable[..., Any]:
        """A hook before a module; `first`: that gets all positions."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden = _hidden(args, kwargs)
            if first:
                self._note(hidden.shape[1])
                self._divided = True

            def moved(value: Any) -> Any:
                if value is hidden:
                    return self._own(value) if first else value
                return value if self._context is None else self._beside(value)

            return tuple(map(moved, args)), {key: moved(value) for key, value in kwargs.items()}

        return enter

    def _note(self, width: int) -> None:
        """A micro-batch has so many positions."""
        self._widths.pop(self.masks.key, None)
        self._widths[self.masks.key] = width
        if len(self._widths) > MOST_IN_FLIGHT:
            del self._widths[next(iter(self._widths))]

    def _own(self, x: Tensor) -> Tensor:
        """This rank's positions of all of them."""
        if self._context is not None:
            _, first, last = self._of_context()
            x = x.narrow(1, first, last - first)  # in backward zeros for others, which have their own gradients
        return x if self._tensor is None else own_slice(x, 1, self._tensor, "positions")

    def _beside(self, value: Any) -> Any:
        """What is given to a block for each position beside its input: numbers of positions (B, T), and angles of
        rotary embeddings, pairs of (B, T, D). Masks stay whole, as attention has all positions.
        """
        width, first, last = self._of_context()
        if isinstance(value, tuple) and all(isinstance(x, Tensor) and x.dim() == 3 for x in value):
            return tuple(x[:, first:last] if x.shape[1] == width else x for x in value)
        if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int32, torch.int64):
            return value[:, first:last] if value.shape[1] == width else value
        return value

    def _leave(self, outputs: Any, ends: bool) -> Any:
        """After the last module."""
        self._divided = ends and self._context is not None
        if isinstance(outputs, tuple):
            return (self._leave(outputs[0], ends), *outputs[1:])
        width, first, last = self._of_context()
        if self._tensor is not None and not is_dtensor(outputs):  # what is divided by classes has gathered them
            outputs = joined(outputs, 1, last - first, self._tensor, "positions")
        if self._context is not None and not ends:
            outputs = joined(outputs, 1, width, self._context, "positions")
        return outputs

    def carry(self, scores: Tensor) -> Tensor:
        """An output of the model as a DTensor that says which positions are here, and which classes, where they are
        divided up to the loss. ConfigError for one without these positions.
        """
        from torch.distributed.tensor import DTensor, Shard

        if self._context is None or not isinstance(scores, Tensor):
            return scores
        width, first, last = self._of_context()
        if scores.dim() < 2 or scores.shape[1] != last - first:
            raise ConfigError(
                f"strategy.context={self._dims.sizes.context}: an output of the model has shape {tuple(scores.shape)}, "
                f"and not the {last - first} positions of this rank on axis 1; what follows the positions of the "
                "layout must compute each by itself"
            )
        axes, placements, here = ["context"], [Shard(1)], scores
        if isinstance(scores, DTensor):
            axes, placements, here = [*axes, "tensor"], [*placements, *scores.placements], scores.to_local()
        shape = torch.Size([scores.shape[0], width, *scores.shape[2:]])
        stride = torch.empty(shape, device="meta").stride()
        mesh = self._dims.mesh[tuple(axes)] if len(axes) > 1 else self._dims.mesh[axes[0]]
        return DTensor.from_local(here, mesh, placements, run_check=False, shape=shape, stride=stride)

    def _divide_attention(self, modules: Mapping[str, nn.Module], splits: Splits) -> None:
        """Let the modules that compute attention exchange heads and positions."""
        assert self._context is not None
        size, found = self._dims.sizes.context, dict[str, int]()
        for name, by in splits.items():
            if _is_attention(by):
                raise ConfigError(
                    f"strategy.context={size}: {name} is {type(modules.get(name)).__name__}, whose positions cannot be "
                    "divided; write attention with scaled_dot_product_attention, or use strategy.tensor"
                )
            if isinstance(by, SplitBy) and _makes_heads(by) and name in modules:
                found[name.rpartition(".")[0]] = by.heads
        for name, heads in found.items():
            module = modules[name]
            whole, first, last = module.__dict__.get(HEADS, (heads, 0, heads))
            if last - first < size:
                raise ConfigError(
                    f"{name} has {count_text(last - first, 'head')} on a rank, of which strategy.context={size} leaves "
                    f"a rank none; use strategy.context={last - first}{' or less' if last - first > 1 else ''}"
                )
            begin, end = balanced(last - first, size, self._dims.place["context"])
            module.__dict__[HEADS] = (whole, first + begin, first + end)
            module.__dict__[EXCHANGE] = Exchange(self._of_context, name, self._context)
            module.__class__ = type(type(module).__name__, (Exchanging, type(module)), {})


def _inside(modules: Iterable[str], names: Sequence[str]) -> list[str]:
    """Of the names of modules those of `names`, and of what is in these."""
    return [name for name in modules if any(f"{name}.".startswith(f"{one}.") for one in names)]


def _makes_heads(by: Split | SplitBy | None) -> bool:
    """Whether a layer that is split so makes queries, keys or values."""
    return isinstance(by, SplitBy) and by.split is Split.column and bool(by.heads)


def _is_attention(by: Split | SplitBy) -> bool:
    """Whether a module that is split so is attention as a whole."""
    return by is Split.heads or (isinstance(by, SplitBy) and by.split is Split.heads)


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 2 and value.is_floating_point()


def _hidden(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The activations among what a module gets: its first (B, T, ...)."""
    return next(value for value in (*args, *kwargs.values()) if _is_hidden(value))
