"""Whether rows that count for nothing, with which a rank fills up what it lacks, leave gradients alone."""

from __future__ import annotations

from collections.abc import Sequence

from dtf.core.consistency import Peers
from dtf.core.errors import ConfigError
from dtf.strategies.start_check import Numbers


def not_zero(numbers: Numbers) -> str:
    """The name of a gradient that a pass over padding has; empty: it has none. Hooks that add to gradients make one."""
    return next((name for name, value in numbers.items() if name.startswith("gradient") and value != 0.0), "")


def agree(found: Sequence[str], peers: Peers) -> list[str]:
    """The first name that a rank has found, for each place: ranks may see slices of gradients. Collective."""
    everyone = peers.gather([*found])
    return peers.broadcast(everyone and [next(filter(None, names), "") for names in zip(*everyone, strict=True)])


def pads(micro_batches: int, shares: int, alike: bool) -> bool:
    """Whether a share of so many micro-batches has a pass over padding. `alike`: all make the same number of passes."""
    return micro_batches < shares or (alike and micro_batches % shares > 0)


def padding_error(name: str, instead: str) -> ConfigError:
    return ConfigError(
        f"the {name} is not zero where the loss is zero, as by a hook that adds to it, and ranks with fewer "
        "micro-batches than others make passes over rows that count for nothing; let the ranks have equally many "
        "micro-batches in each step (step.batch_size, step.micro_batch_rows, sampler.tail=drop), leave out what is "
        f"added, or use {instead}"
    )
