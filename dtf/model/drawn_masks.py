"""A mask of dropout as a function of names, in passes as they are and in compiled ones, which must not bake it in."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtf.core.seeding import seed_of


def draw_factor(
    key: int,
    name: str,
    number: int,
    index: int,
    p: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A mask as a factor, 0 or 1 / (1 - p), from a micro-batch's key, the name of a module, the number of its call and
    the index of the mask in that call.
    """
    parts = (name, number, index) if index else (name, number) if number else (name,)
    generator = torch.Generator(device).manual_seed(seed_of(key, *parts))
    mask = torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p, generator=generator)
    return mask.mul_(0.0 if p == 1 else 1 / (1 - p))


class DrawsByName:
    """What draws masks by the name of a module and the number of its call, and can do so in a compiled pass.

    `_masks`: the `SeededDropout` of the model.
    """

    _masks: Any
    _name: str
    _draws: Draws

    def before_compiled(self) -> None:
        """Called before a pass of the compiled module that has this one."""
        self._draws.first = self._masks.made(self._name)

    def after_compiled(self) -> None:
        """Called after that pass: count its calls."""
        for _ in self._draws.log:
            self._masks.call(self._name)
        self._draws.log.clear()


class Draws:
    """What a compiled pass needs to draw the masks of one module. `drawing`: has `draw` and, as `_draws`, this."""

    def __init__(self, drawing: Any) -> None:
        self.compiled = False
        self.log: list[int] = []
        """The calls of a compiled pass: it cannot count."""
        self.first = 0
        """The number of its first call within the micro-batch."""
        number = next(_numbers)
        self.layer = torch.tensor(number)
        """Stands for the module, (): a compiled pass reads it, and so holds no seed."""
        _layers[number] = drawing


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def draw_in_compiled(
    layer: Tensor,
    number: int,
    index: int,
    p: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Mask `index`, as a factor, of call `number` of a module within a compiled pass, drawn while that runs."""
    return torch.ops.dtf.dropout_mask(layer, number, index, p, shape, dtype, device)


def _draw(layer: Tensor, number: int, index: int, p: float, shape: Sequence[int], *of: Any) -> Tensor:
    drawing = _layers[int(layer)]
    return drawing.draw(drawing._draws.first + number, index, p, shape, *of)


def _fake(
    layer: Tensor,
    number: int,
    index: int,
    p: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


_library = torch.library.Library("dtf", "DEF")
_library.define(
    "dropout_mask(Tensor layer, int number, int index, float p, SymInt[] shape, ScalarType dtype, Device device)"
    " -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),  # so that no two of them are made one, and none is done again
)
_library.impl("dropout_mask", _draw, "CompositeExplicitAutograd")
torch.library.register_fake("dtf::dropout_mask", _fake, lib=_library)
