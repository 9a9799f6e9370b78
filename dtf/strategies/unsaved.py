"""Tells what passes of a model have changed and no checkpoint holds, where one replica trains alone: several are
refused at the start, as each would go on from its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from dtf.api.precision import Format
from dtf.core.consistency import Peers
from dtf.core.types import Evaluated
from dtf.distributed.sharding import local
from dtf.model.attributes import GENERATOR, Attributes
from dtf.strategies.start_check import TOLERANCES, Numbers, numbers_differ

NAMED = 4
"""Attributes and buffers that the warning names."""


class Unsaved:
    """Attributes, and buffers that are not saved, of the models of this process as they are now: after a start, also
    one that resumes. Attributes of their recipe, too.

    `train`: the numbers of a few rows, without a trace but in parameters. `scratch`: buffers that are no part of the
    run's state. `peers`: the ranks that make the same passes.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        recipe: object,
        scratch: Collection[str],
        train: Callable[[], Numbers],
        compute: Format,
        peers: Peers,
    ) -> None:
        self.evaluate: Callable[[], Evaluated | None] | None = None
        """The sums of a few rows of the evaluation, as of `train`; None: nothing is evaluated."""
        self._train, self._compute, self._peers = train, compute, peers
        self._kept = [_Kept(model, recipe, scratch) for model in models]
        self._said = False

    def warning(self) -> str | None:
        """Once, what a run that goes on from a checkpoint would start anew, and would compute other numbers for it.
        None: nothing. Collective.
        """
        if self._said:
            return None
        everyone = self._peers.gather([name for kept in self._kept for name in kept.changed()])
        names = self._peers.broadcast(None if everyone is None else list(dict.fromkeys(chain(*everyone))))
        if not names:
            return None
        with ExitStack() as stack:
            undo = [stack.enter_context(kept.restored()) for kept in self._kept]
            now = self._numbers()
            for put in undo:
                put()
            then = self._numbers()
        matters = self._peers.gather(numbers_differ(now, then, TOLERANCES[self._compute]))
        self._said = self._peers.broadcast(None if matters is None else any(matters))
        if not self._said:
            return None
        listed = ", ".join(name.removesuffix(GENERATOR) for name in names[:NAMED])
        more = f" and {len(names) - NAMED} more" if names[NAMED:] else ""
        return (
            f"passes of the model change {listed}{more}; its numbers depend on this, and checkpoints do not hold it: a "
            "run that goes on from one starts anew with it; register what matters in the constructor, as a persistent "
            "buffer with a rule in the recipe's Layout.buffers; get_extra_state() is not saved"
        )

    def _numbers(self) -> Numbers:
        evaluated = self.evaluate() if self.evaluate else None
        sums = [] if evaluated is None else evaluated.sums.tolist()
        return self._train() | {f"evaluated {i}": value for i, value in enumerate(sums)}


class _Kept:
    """What one model has that is not saved, as it is now."""

    def __init__(self, model: nn.Module, recipe: object, scratch: Collection[str]) -> None:
        self._model, self._recipe, self._attributes = model, recipe, Attributes(model, recipe)
        saved = set(model.state_dict(keep_vars=True))
        self._saved = {name for name, _ in model.named_buffers() if name in saved} | set(scratch)
        self._buffers = self._now()

    def changed(self) -> list[str]:
        """Names of what is not as it was."""
        now = self._now()
        buffers = [name for name in {**self._buffers, **now} if not _same(self._buffers.get(name), now.get(name))]
        return buffers + self._attributes.changed()

    @contextmanager
    def restored(self) -> Iterator[Callable[[], None]]:
        """A context at whose end the model is as at its begin. Yields what makes it as it was when this was made, with
        the parameters of the begin: one process may change these in its passes.
        """
        attributes, buffers = Attributes(self._model, self._recipe), self._now()
        parameters = [local(parameter).detach().to("cpu", copy=True) for parameter in self._model.parameters()]

        def put() -> None:
            self._attributes.restore()
            self._put(self._buffers)
            self._put_parameters(parameters)

        try:
            yield put
        finally:
            attributes.restore()
            self._put(buffers)
            self._put_parameters(parameters)

    def _now(self) -> dict[str, Tensor]:
        """Copies of the buffers that are not saved."""
        return {
            name: buffer.detach().clone() for name, buffer in self._model.named_buffers() if name not in self._saved
        }

    def _put(self, buffers: dict[str, Tensor]) -> None:
        """Give the model these buffers in place of those that are not saved."""
        modules = dict(self._model.named_modules())
        for name in {**self._now(), **buffers}:
            module, _, key = name.rpartition(".")
            if name in buffers:
                modules[module]._buffers[key] = buffers[name].clone()
            else:
                del modules[module]._buffers[key]

    @torch.no_grad()
    def _put_parameters(self, parameters: list[Tensor]) -> None:
        for parameter, value in zip(self._model.parameters(), parameters, strict=True):
            own = local(parameter).detach()
            if not torch.equal(own.cpu(), value):
                own.copy_(value)


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    if one is None or two is None:
        return one is two
    return one.shape == two.shape and one.dtype is two.dtype and bool(torch.equal(one, two))
