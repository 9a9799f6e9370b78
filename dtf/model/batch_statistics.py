"""Running averages of batch normalisation that do not depend on which rank computes which micro-batch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.model.ema import decay_after
from dtf.model.norm_calls import calls_of, count_calls_of, goes_its_own_way, is_torchs_own

_KINDS = ("running_mean", "running_var")
EMA_SUFFIX = "_ema"
"""What is appended to a running average's name for its own average over steps."""

_Layer = tuple[str, nn.modules.batchnorm._NormBase, float | None]  # name, module, its own momentum


def _averages(layers: list[_Layer], suffix: str = "") -> list[Tensor]:
    return [getattr(layer, f"{kind}{suffix}") for _, layer, _ in layers for kind in _KINDS]


def trained_parts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that `model.train()` puts into training mode, by name. All are left in the mode they have, which may
    be that of evaluation: so models come from files of weights.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    found = {name: module for name, module in model.named_modules() if module.training}
    for module, mode in modes:
        module.training = mode
    return found


class BatchNormStatistics:
    """Running averages of normalisation layers: one update per step, with the mean over all micro-batches of the global
    batch.

    A rank averages its own micro-batches, weighted so that the mean over ranks is the mean over micro-batches. Averages
    are linear, so `average` over ranks is exact and may happen at any time (evaluating, saving). A step counts once
    `finish` gets `applied` = True; a skipped step leaves all averages as they were. A rank with `own` of `total`
    micro-batches on `ranks` ranks computes, with momentum m and c = ranks * own / total,

        running = (1 - m) * running + m * c * (mean statistic of its own micro-batches).

    torch's kernel computes running = (1 - a) * running + a * statistic for each micro-batch. For c = 1 the factors
    a_j = g / (1 - (own - 1 - j) * g) with g = m / own compose to exactly this; for c != 1 the gain is corrected
    afterwards.

    A layer that a micro-batch does not call exactly once in training mode, or whose momentum the forward pass sets, is
    left to others, see `release`. So is one whose class has a forward pass of its own.

    `ema`: a decay. Each average then has an average of its own over steps, which belongs to those of the weights, see
    `dtf.model.ema`. That is linear too. ConfigError for layers whose evaluation would depend on the ranks.
    """

    def __init__(self, model: nn.Module, ema: float = 0.0) -> None:
        self._layers: list[_Layer] = []
        self._live: list[_Layer] = []
        first: dict[int, str] = {}  # running average -> its name
        for name, module in model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise ConfigError(
                    f"{name}: SyncBatchNorm talks to other ranks in every pass; use BatchNorm, its statistics act per "
                    "micro-batch anyway"
                )
            if is_torchs_own(module) and module.running_mean is not None:
                assert isinstance(module, nn.modules.batchnorm._NormBase)
                self._layers.append((name, module, module.momentum))
                _refuse_shared(name, module, first)
                count_calls_of(module)
                # Counted here, once per step instead of once per micro-batch, and written to checkpoints under its own
                # name.
                module._buffers["num_batches_tracked"] = None
                for kind in _KINDS if ema else ():
                    module.register_buffer(f"{kind}{EMA_SUFFIX}", module._buffers[kind].detach().clone())  # type: ignore[union-attr]
        self._uneven: set[str] = set()  # layers that others keep right, see `release`
        self._learning = {*trained_parts(model)}
        self._calls: dict[str, int] = {}  # that changed averages, by layer, at `begin`
        self._ema, self._aside = ema, list[Tensor]()
        self._steps = 0
        self._before: list[Tensor] | None = None
        self._last = torch.empty(0)  # all averages as the step before left them
        self._held: list[Tensor] | None = None  # this rank's own, while the mean over ranks stands in for them
        self._own, self._gain = 0, 1.0
        self._changed = False  # whether the layers' momentum differs from their own
        self._cumulative = any(base is None for _, _, base in self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def tensors(self) -> list[Tensor]:
        """The running averages, then their averages over steps, in a fixed order."""
        return _averages(self._layers) + (_averages(self._layers, EMA_SUFFIX) if self._ema else [])

    def names(self) -> list[str]:
        """The names of these buffers, in the same order."""
        return [
            f"{name}.{kind}{suffix}"
            for suffix in ("", *([EMA_SUFFIX] if self._ema else []))
            for name, _, _ in self._layers
            for kind in _KINDS
        ]

    def release(self, names: Iterable[str]) -> list[str]:
        """Leave the running averages of these layers to the rule `mean` of `ChangingBuffers`, because a micro-batch
        does not call them exactly once. So are those that passes called, but never in training mode, and those whose
        momentum passes set. Returns the names of the buffers. ConfigError for cumulative averages.
        """
        found = {name for name, layer, base in self._learners() if goes_its_own_way(layer, base)}
        names = set(names)
        self._uneven |= found | names
        for name, layer, base in self._layers:
            if base is None and (name in names or (name in found and calls_of(layer).learning)):
                raise ConfigError(
                    f"{name}: a cumulative average (momentum=None) of a normalisation that a micro-batch does not call "
                    "once; give it a momentum"
                )
        return [f"{name}.{kind}" for name, _, _ in self._layers if name in self._uneven for kind in _KINDS]

    @property
    def uneven(self) -> frozenset[str]:
        """Names of the layers that were left to others."""
        return frozenset(self._uneven)

    def layers(self) -> dict[str, nn.Module]:
        """The layers with running averages, by name."""
        return {name: layer for name, layer, _ in self._layers}

    def begin(self, own: int, total: int, ranks: int) -> None:
        """Called before the micro-batches of a step. `own`: how many this rank computes, of `total` on `ranks`
        ranks.
        """
        if not self._layers:
            return
        if self._held is not None:
            torch._foreach_copy_(self.tensors(), self._held)
            self._held = None
        self._own, self._gain = own, ranks * own / total
        self._steps += 1
        self._last = self._flat()
        self._live = self._learners()
        for name, layer, _ in self._layers:
            calls_of(layer).begin(self._steps - 1)
            self._calls[name] = calls_of(layer).learning
        if self._live and own * ranks != total:
            self._before = [t.clone() for t in _averages(self._live)]

    def begin_micro_batch(self, j: int) -> None:
        """Called before this rank's micro-batch `j` of the step."""
        for _, layer, _ in self._layers if j else ():
            calls_of(layer).begin(self._steps - 1)
        plain = self._own == 1 and not self._cumulative
        if plain and not self._changed:
            return
        for _, layer, base in self._live:
            part = self._momentum(base) / self._own
            layer.momentum = part / (1 - (self._own - 1 - j) * part)
            calls_of(layer).momentum = layer.momentum
        self._changed = not plain

    def begin_padding(self) -> None:
        """Called before a pass over padding, which exists for the collectives in it. Averages do not change in it."""
        for _, layer, _ in self._live:
            layer.momentum = 0.0
        self._changed = True

    def check_calls(self, instead: str) -> None:
        """Raise ConfigError where a layer was not called once for each micro-batch since `begin`. Before `end`.
        `instead`: what to use for such a model.
        """
        for name, layer, base in self._layers:
            calls, at_start = self._made(name, layer), name in self._learning
            if calls != self._own * at_start and base != 0.0 and name not in self._uneven:
                raise ConfigError(
                    f"the normalisation {name} is called unevenly: {calls} times in {self._own} passes, and "
                    f"{'once' if at_start else 'never'} in each at the start, in training mode; ranks would average "
                    "its statistics wrongly; let the recipe's layout say "
                    f"Layout(buffers={{{name!r}: BufferUpdate.mean}}), or use {instead}"
                )

    def end(self) -> None:
        """Called after the micro-batches of a step. ConfigError where one of them has set the momentum of a layer."""
        for name, layer, _ in self._live:
            if calls_of(layer).sets_momentum:
                raise ConfigError(
                    f"the momentum of the normalisation {name} was set during training, and the first pass did not set "
                    "it; let the recipe's layout say what becomes of its averages, "
                    f"Layout(buffers={{{name!r}: BufferUpdate.mean}})"
                )
        self._correct()

    def finish(self, applied: bool | Tensor) -> None:
        """Called after the update of a step. `applied`: whether there was an update, on a GPU bool (). Without host
        synchronisation.
        """
        if not self._layers:
            return
        for _, layer, _ in self._layers:
            calls_of(layer).begin(self._steps)
        self._average_steps()
        if isinstance(applied, Tensor):
            self._set(torch.where(applied.to(self._last.device), self._flat(), self._last))
        elif not applied:
            self._set(self._last)

    def _average_steps(self) -> None:
        if self._ema and self._layers:
            weight = 1 - decay_after(self._ema, self._steps - 1)
            torch._foreach_lerp_(_averages(self._layers, EMA_SUFFIX), _averages(self._layers), weight)

    def forget(self, steps: int) -> None:
        """Start after so many steps with averages of 0 in layers in training. After the next step they are what that
        step adds to averages that another process keeps, see `absorb`.
        """
        self.restore(steps)
        for _, layer, _ in self._layers:
            calls_of(layer).elsewhere = True
        for average in self._training():
            average.zero_()

    def added(self) -> Tensor:
        """What a step has added since `forget`, as one tensor in fp64."""
        return torch.cat([t.reshape(-1) for t in self._training()] or [torch.zeros(0)]).double()

    @property
    def added_numbers(self) -> int:
        """How many numbers `added` has."""
        return sum(t.numel() for t in self._training())

    def absorb(self, added: Tensor | None) -> None:
        """Take one step: running = (1 - m) * running + `added`, the sum of `added` over the shares of the step. None:
        the step was skipped.
        """
        self._steps += 1
        if added is None:
            return
        at = 0
        for _, layer, base in self._learners():
            for kind in _KINDS:
                running = getattr(layer, kind)
                running.mul_(1 - self._momentum(base)).add_(added[at : at + running.numel()].view(running.shape))
                at += running.numel()
        self._average_steps()

    def _training(self) -> list[Tensor]:
        """The averages of `_learners`."""
        return _averages(self._learners())

    def _learners(self) -> list[_Layer]:
        """The layers that `train()` puts into training mode and that are not left to others. A frozen layer keeps its
        averages.
        """
        return [entry for entry in self._layers if entry[0] in self._learning and entry[0] not in self._uneven]

    def _made(self, name: str, layer: nn.Module) -> int:
        """How many calls have changed the averages of a layer since `begin`."""
        return calls_of(layer).learning - self._calls[name]

    def swap_ema(self, on: bool) -> None:
        """`on=True` puts the averages over steps in place of the running averages, `on=False` puts these back."""
        tensors = _averages(self._layers) if self._ema else []
        if tensors:
            self._aside = [t.clone() for t in tensors] if on else self._aside
            torch._foreach_copy_(tensors, _averages(self._layers, EMA_SUFFIX) if on else self._aside)

    def _correct(self) -> None:
        if self._before is None:
            return
        layers = [entry for entry in self._live if not self._own or self._made(*entry[:2])]  # others have not changed
        before = [t for entry in layers for t in self._before[2 * self._live.index(entry) :][:2]]
        keeps = [1 - self._momentum(base) for _, _, base in layers for _ in _KINDS]
        for old, keep in zip(before, keeps, strict=True):
            old.mul_(keep)
        tensors = _averages(layers)
        if self._own and layers:  # running = before + c * (running - before), with `before` the decayed old average
            torch._foreach_sub_(tensors, before)
            torch._foreach_mul_(tensors, self._gain)
            torch._foreach_add_(tensors, before)
        elif layers:  # a padding pass went through the layers: drop what it left
            torch._foreach_copy_(tensors, before)
        self._before = None

    def average(self, reduce_mean) -> None:
        """Replace each average by its mean over ranks, until the next step. `reduce_mean` takes the mean of one flat
        tensor over ranks, in place. Collective.
        """
        tensors = self.tensors()
        if not tensors:
            return
        self.stash()
        flat = self._flat()
        reduce_mean(flat)
        self._set(flat)

    def _flat(self) -> Tensor:
        return torch.cat([t.reshape(-1) for t in self.tensors()])

    def _set(self, flat: Tensor) -> None:
        tensors = self.tensors()
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

    def stash(self) -> None:
        """Keep this rank's own averages and go on from them in the next step, so that evaluating and saving do not
        change the numbers of training.
        """
        self._held = [t.clone() for t in self.tensors()]

    def stashed(self) -> dict[str, Tensor]:
        """This rank's own averages by the names of their buffers, while the means over ranks are in their place; else
        empty.
        """
        return dict(zip(self.names(), self._held, strict=True)) if self._held is not None else {}

    def counters(self) -> dict[str, int]:
        """`<layer>.num_batches_tracked` -> steps taken, under torch's names."""
        return {f"{name}.num_batches_tracked": self._steps for name, _, _ in self._layers}

    def restore(self, steps: int) -> None:
        """Set how many steps were taken, from a checkpoint."""
        self._steps = steps
        for _, layer, _ in self._layers:
            calls_of(layer).begin(steps)

    def _momentum(self, base: float | None) -> float:
        return 1.0 / self._steps if base is None else base


def _refuse_shared(name: str, layer: nn.Module, first: dict[int, str]) -> None:
    """Raise ConfigError for a running average that another layer has too. `first`: those so far, by identity."""
    for kind in _KINDS:
        other = first.setdefault(id(layer._buffers[kind]), f"{name}.{kind}")
        if other != f"{name}.{kind}":
            raise ConfigError(
                f"the normalisations {other.rpartition('.')[0]} and {name} share the buffer {other}, which both change "
                "in each pass; give each averages of its own, or use one module in both places"
            )
