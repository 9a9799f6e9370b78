"""What makes a micro-batch a unit of its own: batch statistics and dropout masks that do not depend on who computes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dtf.errors import ConfigError
from dtf.seeding import seed_of


class RunningStatistics:
    """Running averages of normalisation layers: one update per step, of the mean over all micro-batches of the global batch.

    A rank averages its own micro-batches, weighted so that the mean over ranks is the mean over micro-batches; averages are
    linear, so `average` over ranks may happen at any time (evaluating, saving) and is exact. A rank with `own` of `total`
    micro-batches on `ranks` ranks does, with momentum m and c = ranks * own / total,

        running = (1 - m) * running + m * c * (mean statistic of its own micro-batches).

    torch's kernel applies running = (1 - a) * running + a * statistic per micro-batch. For c = 1 the factors
    a_j = g / (1 - (own - 1 - j) * g) with g = m / own compose to exactly this; for c != 1 the gain is corrected afterwards.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[tuple[str, nn.modules.batchnorm._NormBase, float | None]] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                self._layers.append((name, module, module.momentum))
                # Counted here, once per step instead of once per micro-batch, and written to checkpoints under its own name.
                module.num_batches_tracked = None
        self._steps = 0
        self._before: list[Tensor] | None = None
        self._own, self._gain = 0, 1.0
        self._changed = False  # whether the layers' momentum differs from their own
        self._cumulative = any(base is None for _, _, base in self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def tensors(self) -> list[Tensor]:
        """The running averages, in a fixed order."""
        return [t for _, layer, _ in self._layers for t in (layer.running_mean, layer.running_var) if t is not None]

    def begin(self, own: int, total: int, ranks: int) -> None:
        """Before the micro-batches of a step."""
        if not self._layers:
            return
        self._own, self._gain = own, ranks * own / total
        self._steps += 1
        if own * ranks != total:
            self._before = [t.clone() for t in self.tensors()]

    def enter(self, j: int) -> None:
        """Before this rank's micro-batch `j` of the step."""
        plain = self._own == 1 and not self._cumulative
        if plain and not self._changed:
            return
        for _, layer, base in self._layers:
            part = self._momentum(base) / self._own
            layer.momentum = part / (1 - (self._own - 1 - j) * part)
        self._changed = not plain

    def end(self) -> None:
        """After the micro-batches of a step."""
        if self._before is None:
            return
        index = 0
        for _, _, base in self._layers:
            keep = 1 - self._momentum(base)
            for _ in range(2):
                self._before[index].mul_(keep)
                index += 1
        tensors = self.tensors()
        if self._own:  # running = before + c * (running - before), with `before` the decayed old average
            torch._foreach_sub_(tensors, self._before)
            torch._foreach_mul_(tensors, self._gain)
            torch._foreach_add_(tensors, self._before)
        else:  # a padding pass went through the layers: drop what it left
            torch._foreach_copy_(tensors, self._before)
        self._before = None

    def average(self, reduce_mean) -> None:
        """Replace every average by its mean over ranks; `reduce_mean` does so for one flat tensor, in place. Collective."""
        tensors = self.tensors()
        if not tensors:
            return
        flat = torch.cat([t.reshape(-1) for t in tensors])
        reduce_mean(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def counters(self) -> dict[str, int]:
        """`<layer>.num_batches_tracked` -> steps, the names torch gives them."""
        return {f"{name}.num_batches_tracked": self._steps for name, _, _ in self._layers}

    def restore(self, steps: int) -> None:
        """Set the number of steps taken, from a checkpoint."""
        self._steps = steps

    def _momentum(self, base: float | None) -> float:
        return 1.0 / self._steps if base is None else base


class Masks:
    """Keys from which the dropout layers of one model replica draw; one key per micro-batch, the same on every rank."""

    def __init__(self, model: nn.Module, seed: int, device: torch.device) -> None:
        self._seed, self.key = seed, 0
        self._generator = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
        self.layers = 0
        for name, module in model.named_modules():
            if isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):
                raise ConfigError(f"{name}: {type(module).__name__} cannot be drawn per micro-batch; use nn.Dropout")
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                channels = not isinstance(module, nn.Dropout)
                # The class changes, the module and its name stay: parameter names and hooks of the user's model are untouched.
                module.__class__ = _SeededDropout  # type: ignore[assignment]
                module.__dict__ |= {"_masks": self, "_name": name, "_channels": channels}
                self.layers += 1

    def enter(self, step: int, micro_batch: int) -> None:
        """Before a micro-batch: all that draws at random in it draws from (seed, step, micro-batch)."""
        self.key = seed_of(self._seed, "mask", step, micro_batch)
        self._generator.manual_seed(self.key)  # for functional dropout and torch.rand in a user's forward


class _SeededDropout(nn.Module):
    """nn.Dropout and its channel-wise kin with the mask drawn from hash(seed, step, micro-batch, layer name)."""

    _masks: Masks
    _name: str
    _channels: bool
    p: float

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        generator = torch.Generator(x.device).manual_seed(seed_of(self._masks.key, self._name))
        shape = (*x.shape[:2], *(1 for _ in x.shape[2:])) if self._channels else x.shape
        mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p, generator=generator)
        return x * mask.mul_(0.0 if self.p == 1 else 1 / (1 - self.p))

    def extra_repr(self) -> str:
        return f"p={self.p}"
