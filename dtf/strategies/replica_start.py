"""What the check at the start asks of one copy of a model, and how the answers are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from dtf.api.task import Task
from dtf.core.consistency import Peers
from dtf.core.types import Batch
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.communication import asks_for_no_others
from dtf.model.counters import Counters
from dtf.model.forward import as_padding
from dtf.model.seeded_calls import FindCalls, seed_calls
from dtf.model.seeded_dropout import SeededDropout
from dtf.strategies.pass_probes import count_calls
from dtf.strategies.start_check import Numbers, Trials, check_passes, not_linear
from dtf.strategies.start_padding import agree, not_zero

CLIPPED, PADDED = "clipped", "padded"
"""What `StartCheck.found` calls the gradient that does not grow with the loss, and that which padding has too."""


@contextmanager
def watched_pass(model: nn.Module, statistics: BatchNormStatistics, masks: SeededDropout) -> Iterator[dict[str, int]]:
    """A context for the first pass. Yields how often each normalisation is called; at its end it is known from what
    the model draws, and dropout functions that its modules call have masks of their own. ConfigError for a model that
    asks for other processes.
    """
    with (
        masks.find_other_generators(),
        count_calls(statistics.layers(), masks) as calls,
        asks_for_no_others(),
        FindCalls(model, masks) as found,
    ):
        yield calls
    masks.dropping = found.forwards
    seed_calls(model, masks, masks.dropping)


def check_start(
    trial: Callable[..., Numbers],
    a: Batch,
    b: Batch,
    model: nn.Module,
    task: Task,
    peers: Peers,
    changed: Callable[[], list[str]],
    instead: str,
) -> dict[str, str]:
    """What the check at the start finds, or an earlier run has found: see `check_passes`. Collective over `peers`.

    `trial(rows, micro_batch, last, factor)`: a pass over some rows without the sum over ranks.
    """
    check, compute = task.start_check, task.precision.compute
    if check.found is None or CLIPPED not in check.found:
        trials = Trials(
            lambda: trial(a, 0, last=False),
            lambda: trial(b, 1, last=False),
            lambda: dict(model.named_modules()),
            [Counters(model, task.recipe)],
        )
        twice = check_passes(trials, compute, peers, changed, instead)
        larger = not_linear(lambda factor: trial(a, 0, last=False, factor=factor), *twice, compute)
        shown = [larger, not_zero(trial(as_padding(a), 0, last=False))]
        check.passed(dict(zip((CLIPPED, PADDED), agree(shown, peers), strict=True)))
    return check.found or {}
