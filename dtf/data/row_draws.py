"""What rows and collate functions draw from the generators of torch, Python and NumPy, which a whole process has: it is
seen, and put under seeds, so that it does not depend on what was drawn before.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtf.core.errors import ConfigError
from dtf.core.seeding import seed_of
from dtf.model.receive import Receiver

_NUMPY_BYTES = 4 * 625
"""Of the state of NumPy's generator, a Mersenne twister: 624 numbers and a position."""


class Positions(NamedTuple):
    """Where the generators stand, to see whether they move. Read for each batch: NumPy's own way to read its state
    takes longer than to read some rows.
    """

    torch: Tensor
    python: Any
    numpy: bytes

    @classmethod
    def now(cls) -> Positions:
        return cls(torch.get_rng_state(), random.getstate(), _numpy_position())

    def moved(self) -> bool:
        """Whether any of them has moved since."""
        now = Positions.now()
        return not (torch.equal(self.torch, now.torch) and self.python == now.python and self.numpy == now.numpy)

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        source = _numpy_generator()
        if isinstance(source, np.random.MT19937):  # others cannot be seeded, so that nobody goes on
            ctypes.memmove(source.ctypes.state_address, self.numpy, _NUMPY_BYTES)
            state: Any = np.random.get_state()
            np.random.set_state((*state[:3], 0, 0.0))  # without a normal number that it has drawn ahead


def _numpy_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


def _numpy_position() -> bytes:
    source = _numpy_generator()
    if isinstance(source, np.random.MT19937):
        return ctypes.string_at(source.ctypes.state_address, _NUMPY_BYTES)
    return str(source.state).encode()


def drawn_batch(
    items: Callable[[list[int]], Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    numbers: list[int],
    keys: tuple[int, int],
    cut: bool,
    who: str,
) -> Any:
    """The batch of the rows `numbers`, each drawn under a seed of its own, made of `keys` (the run's seed, the epoch)
    and its number; what `collate` draws is under a seed of all numbers. Generators are then as before.

    `items`: the items of some rows. `cut`: whether `collate` gets the rows of one micro-batch. ConfigError, which names
    `who`, for one that draws and gets those of several: which ones depends on the number of ranks.
    """
    with _generators_restored():
        found: list[Any] = []
        for number in numbers:
            _seed_generators(seed_of(keys[0], "row", keys[1], number))
            found += items([number])
        _seed_generators(seed_of(keys[0], "collate", keys[1], *numbers))
        start = Positions.now()
        batch = collate(found)
        if not cut and start.moved():
            raise ConfigError(
                f"{who} draws random numbers for all rows that it gets, which ranks divide with shapes_vary=False; "
                "leave shapes_vary out, so that each micro-batch is collated by itself, or draw in the data set, for "
                "each row"
            )
        return batch


@contextmanager
def _generators_restored() -> Iterator[None]:
    """A context after which the generators are as before; nobody else seeds them, or draws under a seed."""
    with Receiver.lock:
        states = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])


def _seed_generators(key: int) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    np.random.seed(key % 2**32)
