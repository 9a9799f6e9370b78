"""Updates of parameters on this rank: unscale, clip, step or skip. How gradients were computed and summed is not known
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dtf.api.optimizer import Optimizer
from dtf.api.task import Source
from dtf.core.errors import ConfigError, DataError
from dtf.core.types import Box, State
from dtf.distributed.sharding import byte_count, local
from dtf.host import devices
from dtf.host.waits import Group, Operation
from dtf.model.ema import EMA
from dtf.optim.sharding import ParamShard, Sharding

# steps without overflow before the loss scale doubles; as in Micikevicius et al. 2018, section 3.2
GROWTH_INTERVAL = 2000

_NOBODY = Group("", ())  # who takes part is the strategy's affair
_COMPLETING, _FETCHING = (
    Operation(f"{name} of the strategy's Sharding", _NOBODY, ordered=False)
    for name in ("complete_gradients", "fetch_others")
)


def trial_update(optimizer: Optimizer) -> Callable[[nn.Module], Callable[[], None]]:
    """For timing: a function that takes a part of a model with gradients, and returns one that does the work of an
    update on it. The numbers mean nothing.
    """

    def prepare(model: nn.Module) -> Callable[[], None]:
        trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
        gradients = [p.grad for p in trained.values() if p.grad is not None]
        bound = optimizer.bind({name: p.detach() for name, p in trained.items()})

        def work() -> None:
            torch._foreach_norm(gradients, 2, dtype=_norm_dtype(gradients))
            bound.apply(gradients, 0.0, None)
            for parameter in trained.values():
                parameter.grad = None

        return work if trained else lambda: None

    return prepare


class LocalUpdate:
    """What happens after the backward passes. The optimizer runs in this process, over the parameters that are here, or
    over those that this rank owns. Tensors are on the device of the parameters.

    `clip_norm`: the largest gradient norm, 0 for no clipping. `loss_scale`: the first dynamic loss scale, 0 for none.
    ConfigError for a model without a parameter to train.
    """

    def __init__(
        self, sharding: Sharding, optimizer: Optimizer, clip_norm: float = 0.0, loss_scale: float = 0.0
    ) -> None:
        if not isinstance(sharding, Sharding):
            raise ConfigError(
                "LocalUpdate takes a Sharding, which says what this rank holds: "
                "LocalUpdate(Sharding(params=full_params(model, masters)), optimizer, clip_norm, loss_scale)"
            )
        self._sharding, self._clip = sharding, clip_norm
        self._tables = sharding.tables
        self.table_steps = 0  # without those that were skipped, as dense optimizers count
        params, owned = sharding.params, sharding.owned
        self._shards = {name: shard for name, shard in params.items() if shard.parameter.requires_grad}
        self._frozen = {name: shard for name, shard in params.items() if not shard.parameter.requires_grad}
        if not self._shards and sharding.all_norms is None:  # else other ranks have some
            raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
        owned_names = [name for name in self._shards if owned is None or name in owned]
        self._own = owned_names
        self._own_index = [i for i, name in enumerate(self._shards) if owned is None or name in owned]
        masters = {name: self._shards[name].master for name in owned_names}
        shapes = {name: self._shards[name].shape for name in owned_names}
        counts = {name: self._shards[name].is_primary for name in owned_names}
        self._begin = optimizer.begin
        self._bound = optimizer.bind(masters, shapes, sharding.sum_slices, counts)
        self._trained = list(self._shards.values())
        # weights of a narrower format than their averages, while these stand in for them
        self._aside: dict[str, Tensor] = {}
        self._copies = [
            (self._shards[name].local, master)
            for name, master in masters.items()
            if self._shards[name].local is not master
        ]
        like = next(iter(params.values())).local if sharding.like is None else sharding.like
        device, self._norm_dtype = like.device, _norm_dtype([like])
        self._host, self._none = devices.host_reads(device.type), torch.zeros(0, dtype=self._norm_dtype, device=device)
        self._counts = (
            None
            if all(shard.is_primary for shard in self._trained)
            else torch.tensor([float(p.is_primary) for p in self._trained], device=device)
        )
        self._scale = torch.full((), loss_scale, dtype=torch.float32, device=device) if loss_scale else None
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped: int | Tensor = 0 if self._host else torch.zeros((), device=device)
        self.applied: bool | Tensor = False
        """Whether the last `apply` changed parameters: on a GPU bool (), which is not waited for."""
        # of the parameters here, at the last step; and at the first one that was skipped, with its number from 1
        self._norms = self._first_norms = self._none
        self._first: float | Tensor = 0.0 if self._host else torch.zeros((), device=device, dtype=torch.float64)

    def scale(self, factor: Tensor) -> Tensor:
        """The factor () with which the loss is differentiated: `factor` (), times the loss scale if there is one."""
        return factor if self._scale is None else factor * self._scale

    @torch.no_grad()
    def apply(self, step: int, lr: float) -> Tensor | tuple[float, float]:
        """Clip, step and clear gradients. Called once after the backward passes of step `step` (counted from 0), with
        the learning rate `lr`. Collective where ranks share parameters.

        Returns the global L2 norm of the gradient before clipping and after unscaling, as (norm, 1), the same on all
        ranks; (0, 0) when an overflow hides it. On a CPU two numbers, on a GPU a tensor (2,). A norm that is not finite
        changes no parameter: every rank skips and counts the step.
        """
        self._begin(step)
        # Zeros for parameters that the loss did not reach: their update is the optimizer's own (decay, momentum).
        gradients = [
            torch.zeros_like(shard.local) if shard.parameter.grad is None else local(shard.parameter.grad)
            for shard in self._trained
        ]
        if self._sharding.complete_gradients is not None:
            with _COMPLETING:
                self._sharding.complete_gradients(gradients)
        norm = self._norm(gradients)
        if self._scale is not None:
            norm = norm / self._scale
        factor = None
        if self._clip:
            factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)
        if self._scale is not None:
            factor = (1.0 if factor is None else factor) / self._scale
        if self._host:
            # Reading a host tensor waits for nothing, and a skipped step then touches nothing at all.
            number = norm.item()
            self.applied = math.isfinite(number)
            if self.applied:
                self._step(gradients, factor, lr, None)
                self._step_tables(factor, lr)
            self._count(not self.applied, step)
        else:
            finite = self.applied = torch.isfinite(norm)
            skip = finite.logical_not().to(torch.float32)
            self._step(gradients, factor, lr, skip)
            self._count_device(skip, step)
            # tables lie in host memory, which has to wait for their gradients anyway
            if self._tables is not None and not skip.item():
                self._step_tables(factor, lr)
        for shard in self._trained:
            shard.parameter.grad = None
        self.drop_gathered()
        if self._host:
            return (0.0, 0.0) if self._scale is not None and not self.applied else (number, 1.0)
        known = torch.ones_like(norm)
        if self._scale is not None:  # an overflow is routine then, and says nothing of the gradient's size
            known, norm = finite.to(norm.dtype), norm.where(finite, 0.0)
        return torch.stack([norm, known])

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm () of the gradient of the whole model, sparse tables included."""
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=self._norm_dtype)) if gradients else self._none
        sum_slices, all_norms = self._sharding.sum_slices, self._sharding.all_norms
        if sum_slices is not None:
            norms = sum_slices(norms.square() if self._counts is None else norms.square() * self._counts).sqrt()
        self._norms = norms
        norm = torch.linalg.vector_norm(norms if all_norms is None else all_norms(norms))
        return norm if self._tables is None else torch.hypot(norm, self._tables.norm.to(norm))

    def _step(self, gradients: list[Tensor], factor: Tensor | None, lr: float, skip: Tensor | None) -> None:
        if self._sharding.owned is not None:
            gradients = [gradients[i] for i in self._own_index]
        if self._copies:
            gradients = [g.to(self._shards[name].master.dtype) for name, g in zip(self._own, gradients, strict=True)]
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor)
        self._bound.apply(gradients, lr, skip)
        self._changed()

    def _changed(self) -> None:
        """What is stepped here has changed: what computes, and other ranks, follow."""
        for computing, master in self._copies:
            computing.copy_(master)
        if self._sharding.fetch_others is not None:
            with _FETCHING:
                self._sharding.fetch_others()

    def drop_gathered(self) -> None:
        """Forget whole parameters that were gathered. Called by all ranks before a step: an evaluation may have left
        some, and code between may have dropped those of one rank alone, such as by `state_dict()`.
        """
        if self._sharding.drop_gathered is not None:
            self._sharding.drop_gathered()

    def _step_tables(self, factor: Tensor | None, lr: float) -> None:
        if self._tables is not None and self._sharding.steps_tables:
            self._tables.apply(1.0 if factor is None else factor.item(), lr, self.table_steps)
            self.table_steps += 1

    def _count(self, skipped: bool, step: int) -> None:
        # With loss scaling an overflow is how the scale finds its value; it counts only when the scale cannot be the
        # reason.
        if skipped and (self._scale is None or float(self._scale) <= 1.0):
            self._skipped += 1
            if not self._first:
                self._first, self._first_norms = step + 1.0, self._norms
        if self._scale is None:
            return
        torch._amp_update_scale_(self._scale, self._growth, torch.tensor(float(skipped)), 2.0, 0.5, GROWTH_INTERVAL)

    def _count_device(self, skip: Tensor, step: int) -> None:
        counted = skip if self._scale is None else skip * (self._scale <= 1.0)
        self._skipped += counted
        # nothing here waits for the device: the first skipped step stays in its memory until somebody asks
        first = counted > self._first
        self._first = torch.where(first, step + 1.0, self._first)
        if self._first_norms is self._none:
            self._first_norms = torch.zeros_like(self._norms)
        self._first_norms = torch.where(first, self._norms, self._first_norms)
        if self._scale is None:
            return
        torch._amp_update_scale_(self._scale, self._growth, skip, 2.0, 0.5, GROWTH_INTERVAL)

    @torch.no_grad()
    def swap_ema(self, on: bool) -> None:
        """As `Program.swap_ema`. Only where the optimizer keeps averages."""
        for name in self._own:
            master, average = self._shards[name].master, self._bound.states[name][EMA]
            if master.dtype is average.dtype:  # they change places, one by one: a copy of all weights might not fit
                weights = master.clone()
                master.copy_(average)
                average.copy_(weights)
            elif on:  # the average would not survive the weights' format
                self._aside[name] = master.clone()
                master.copy_(average)
            else:
                master.copy_(self._aside.pop(name))
        self._changed()
        self.drop_gathered()

    def skipped(self) -> int:
        """How many updates were skipped so far. The same on all ranks. May synchronise with the device."""
        return int(self._skipped)

    def first_skipped(self) -> tuple[int, list[str]] | None:
        """As `Program.first_skipped`; `sparse tables` stands for the rows of all tables. Waits for the device."""
        if not float(self._first):
            return None
        finite = torch.isfinite(self._first_norms).tolist()
        names = [name for name, known in zip(self._shards, finite, strict=True) if not known]
        return int(self._first) - 1, names or (["sparse tables"] if self._tables is not None else [])

    def bytes(self) -> tuple[int, int, int, int]:
        """Bytes on this rank of the parameters, gradients, optimizer state and sparse tables."""
        shards, trained = [*self._shards.values(), *self._frozen.values()], [shard.local for shard in self._trained]
        parameters = [shard.local for shard in shards] + [
            shard.master for shard in shards if shard.master is not shard.local
        ]
        gradients = trained + [master for _, master in self._copies]  # converted before the step
        rows = self._tables.planned_bytes() if self._tables is not None and self._sharding.steps_tables else 0
        states = byte_count(tensor for state in self._bound.states.values() for tensor in state.values())
        return byte_count(parameters), byte_count(gradients), states, rows

    def held(self) -> dict[str, Tensor]:
        """The parameters on this rank: by name, and slices by name and offset. Parameters of one name are bitwise equal
        on all ranks.
        """
        self.drop_gathered()  # who asks may change them
        shards = {**self._shards, **self._frozen}
        return {f"{name}{shard.place}": shard.local for name, shard in shards.items()}

    def updated_here(self) -> dict[str, Tensor]:
        """The numbers that this rank steps, and the optimizer's state of them: by name, and slices by name and offset.
        Ranks that step the same parameters, or slices, have them alike.
        """
        found: dict[str, Tensor] = {}
        for name in self._own:
            shard = self._shards[name]
            own = {
                f"the optimizer's {key} of {name}{shard.place}": tensor
                for key, tensor in self._bound.states[name].items()
            }
            if shard.master is not shard.local:
                own[f"the master copy of {name}{shard.place}"] = shard.master
            found |= own
        if self._scale is not None:
            found["the loss scale"] = self._scale
        return found

    def kept(self, name: str) -> dict[str, Tensor]:
        """The numbers that are kept of a trained parameter: those that are stepped, under an empty key, and the
        optimizer's state.
        """
        return {"": self._shards[name].master, **self._bound.states[name]}

    @torch.no_grad()
    def refresh(self, steps: int) -> None:
        """Follow a change to the tensors of `kept`, as if by so many steps."""
        for computing, master in self._copies:
            computing.copy_(master)
        self.table_steps += steps
        self.drop_gathered()

    def state(self) -> State:
        """What this rank contributes to a checkpoint."""
        boxes: list[Box] = []
        if self._sharding.writes:
            boxes += [
                box for name, shard in self._frozen.items() if shard.is_primary for box in _boxes(name, shard, {})
            ]
        if self._sharding.writes or self._sharding.owned is not None:
            kept = ((name, self._shards[name], state) for name, state in self._bound.states.items())
            boxes += [box for name, shard, state in kept if shard.is_primary for box in _boxes(name, shard, state)]
        if self._tables is not None and self._sharding.steps_tables:
            boxes += self._tables.boxes()
        boxes = [box for box in boxes if box.tensor.numel()]
        scalars: dict = {"skipped": self.skipped()}
        if self._tables is not None:
            scalars["table_steps"] = self.table_steps
        if self._scale is not None:
            scalars["loss_scale"] = [float(self._scale), int(self._growth)]
        aside = self._tables.set_aside if self._tables is not None and self._tables.has_files else None
        return State(boxes, scalars, aside if self._sharding.steps_tables else None)

    @torch.no_grad()
    def load(self, source: Source) -> None:
        """Take this rank's part from a checkpoint."""
        for name, shard in [*self._shards.items(), *self._frozen.items()]:
            for key, tensor in {"": shard.master, **self._bound.states.get(name, {})}.items():
                place = f"optimizer/{name}/{key}" if key else f"model/{name}"
                if tensor.dim() != len(shard.shape):
                    source.read_into(place, tensor)
                for piece in shard.boxes if tensor.dim() == len(shard.shape) else ():
                    source.read_into(place, piece.here(tensor), piece.offset, shard.shape)
            if shard.local is not shard.master:
                shard.local.copy_(shard.master)
        if self._tables is not None and self._sharding.steps_tables:
            self._tables.clear()  # of rows to start from, where the run goes on
            self._tables.load(source)
            self.table_steps = source.scalars.get("table_steps", 0)
        if self._scale is not None and "loss_scale" in source.scalars:
            scale, growth = source.scalars["loss_scale"]
            self._scale.fill_(scale)
            self._growth.fill_(growth)
        skipped = source.scalars.get("skipped", 0)
        if isinstance(self._skipped, int):
            self._skipped = skipped
        else:
            self._skipped.fill_(skipped)
        self.drop_gathered()


def check_scalars(scalars: Mapping[str, Any]) -> None:
    """Raise DataError for scalars of a program's checkpoint that no update has written."""
    scale, counts = scalars.get("loss_scale", [1.0, 0]), [scalars.get(key, 0) for key in ("skipped", "table_steps")]
    whole = [*counts, scale[-1]] if isinstance(scale, list) and len(scale) == 2 else [None]
    if not all(type(count) is int and 0 <= count < 1 << 53 for count in whole) or type(scale[0]) is not float:
        raise DataError("state.json holds counts of updates that no run writes")


def _boxes(name: str, shard: ParamShard, state: Mapping[str, Tensor]) -> Iterator[Box]:
    for key, tensor in {"": shard.master, **state}.items():
        place = f"optimizer/{name}/{key}" if key else f"model/{name}"
        if tensor.dim() == len(shard.shape):
            for piece in shard.boxes:
                yield Box(place, piece.here(tensor), shard.shape, piece.offset)
        elif not any(shard.offset):  # a counter, the same for all slices: the first one's
            yield Box(place, tensor, (), ())


def _norm_dtype(gradients: list[Tensor]) -> torch.dtype:
    """The dtype of norms. Gradients in half precision have fp32 norms: squares overflow in fp16 and lose their digits
    in bf16.
    """
    return torch.float64 if gradients and gradients[0].dtype is torch.float64 else torch.float32
