"""The contract of optimizers: functions on named parameters, whose state is a dict by name, ready for a checkpoint.

An optimizer does not clip, scale, reduce or decide which rank owns what; that is `dtf.optim.update`. The options in
`dtf.optim.optimizers` call the functional kernels of `torch.optim`, never its classes: these keep state by position,
would need a conversion for every checkpoint, and import `torch._dynamo` when constructed (about a second).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, ClassVar

from dtf.api import name_patterns
from dtf.api.registry import option

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Combine = Callable[["Tensor"], "Tensor"]
"""Adds up a tensor in place over the ranks that hold the other parts of the same parameters, and returns it.
Collective.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters of one type on one device, with one weight decay and one learning rate, and their state, as a kernel
    takes them.
    """

    parameters: list[Tensor]
    slots: dict[str, list[Tensor]]  # key of the state -> its tensor for each parameter
    decayed: bool  # whether weight decay acts on them at all; a decay of 0 is one
    weight_decay: float  # 0 where it does not
    combine: Combine | None


Step = Callable[[list["Tensor"], float, "Tensor | None"], None]
"""A step of one group: gradients, learning rate, skip, as `Optimizer.step` takes them."""


@dataclass(kw_only=True)
class Optimizer(ABC):
    """Updates parameters from gradients. Fields are the config node `optimizer`. Modules import torch only inside
    methods.
    """

    lr_factors: dict[str, float] = option(
        factory=dict,
        above=0,
        most=1_000_000,
        doc="factors of the learning rate by name of a module or parameter, for all that lies in it: "
        "{fc:10,layer*:0.1}; `*` stands for characters "
        "between two dots, and factors of all patterns that cover a parameter are multiplied",
    )
    weight_decays: dict[str, float] = option(
        factory=dict,
        least=0,
        doc="weight decay of parts of the model in place of `weight_decay`, by name as in `lr_factors`: {table:0.05}; "
        "of all patterns that cover a parameter the longest decides, whatever `decay_norm_and_bias` says",
    )
    weight_decay = 0.0
    decay_norm_and_bias = True
    averages_squares = False
    """Whether the state holds decayed averages of squares, which arithmetic on states could make negative."""

    by_tensor = False
    """Whether a step uses norms or sums of whole tensors, and not each element by itself."""

    usual_lr: ClassVar[float | None] = None
    """The learning rate that its authors suggest; None: that of `lr.peak` suits it."""

    def check(self) -> None:
        """Raise ConfigError for values that contradict each other. Torch-free."""
        return

    @abstractmethod
    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        """New state of one parameter. Each tensor has the shape of the parameter, or shape () (a counter, float32)."""

    def begin(self, step: int) -> None:
        """Called before the groups are stepped, with the number of finished steps. For options that change from step to
        step, such as a momentum. Default: nothing.
        """
        return

    @abstractmethod
    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        """One step over a non-empty group, in place, fused, without host synchronisation.

        `gradients`: in the order of `group.parameters`; may be overwritten. `skip`: as in `Bound.apply`.
        """

    def stepper(self, group: Group) -> Step:
        """What steps a group, made once for each `bind`: `step` with the group, unless something is kept beside it."""
        return partial(self.step, group)

    def decays(self, shape: Sequence[int]) -> bool:
        """Whether weight decay applies to a parameter of this global shape.

        Biases and normalisation scales have one axis.
        """
        return self.decay_norm_and_bias or len(shape) > 1

    def decay_of(self, name: str, shape: Sequence[int]) -> float | None:
        """The weight decay of a parameter of this name and global shape. None: it has no weight decay."""
        named = name_patterns.longest(self.weight_decays, name)
        return named if named is not None else self.weight_decay if self.decays(shape) else None

    def bind(
        self,
        parameters: Mapping[str, Tensor],
        shapes: Mapping[str, Sequence[int]] | None = None,
        combine: Combine | None = None,
        counts: Mapping[str, bool] | None = None,
    ) -> Bound:
        """Give the parameters new state, and prepare the lists that kernels take.

        `shapes`: the global shapes where `parameters` are slices of larger tensors. Then `combine` adds up sums per
        tensor, (2, n), over the ranks that hold the other slices; these bind slices of the same parameters in the same
        order. Element-wise optimizers never call it. `counts`: False for a parameter that several of these ranks hold
        in full, on all of them but one. ValueError for a parameter with gaps in memory, such as a slice of columns:
        bind a contiguous copy.
        """
        return Bound(self, parameters, shapes or {}, combine, counts or {})


class Bound:
    """An optimizer and the parameters that it steps. `states`: parameter name -> state. Load a checkpoint into these
    tensors in place.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        shapes: Mapping[str, Sequence[int]],
        combine: Combine | None,
        counts: Mapping[str, bool],
    ) -> None:
        import torch

        for name, parameter in parameters.items():
            if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
                raise ValueError(
                    f"{name} has shape {tuple(parameter.shape)}, strides {parameter.stride()} and so gaps in memory; "
                    "bind a contiguous copy"
                )
        self.states = {name: optimizer.init(parameter) for name, parameter in parameters.items()}
        self._parameters = list(parameters.values())
        self._strides = [parameter.stride() for parameter in self._parameters]
        decays = [optimizer.decay_of(name, shapes.get(name, parameter.shape)) for name, parameter in parameters.items()]
        counted = [float(counts.get(name, True)) for name in parameters]
        states = list(self.states.values())
        kinds = [
            (
                decay,
                name_patterns.factor(optimizer.lr_factors, name),
                str(parameter.dtype),
                str(parameter.device),
                tuple(self.states[name]),
            )
            for (name, parameter), decay in zip(parameters.items(), decays, strict=True)
        ]
        self._groups: list[tuple[list[int], Step, float]] = []
        for kind in sorted(set(kinds), key=lambda kind: (kind[0] is None, kind)):
            chosen = [index for index, other in enumerate(kinds) if other == kind]
            slots = {key: [states[index][key] for index in chosen] for key in states[chosen[0]]}
            members = [self._parameters[index] for index in chosen]
            add = combine
            if combine is not None and not all(counted):
                add = _Counting(combine, torch.tensor([counted[index] for index in chosen], device=members[0].device))
            decay, factor, *_ = kind
            group = Group(members, slots, decay is not None, decay or 0.0, add)
            self._groups.append((chosen, optimizer.stepper(group), factor))

    def apply(self, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        """One step in place. `gradients` are in the order of the bound parameters and may be overwritten.

        `skip`, float32 (), on the device of the parameters: with 1, parameters and state stay bitwise the same whatever
        the gradients hold (NaN included); with 0 they are stepped. None: never skip. No host synchronisation.
        """
        import torch

        with torch.no_grad():
            if [gradient.stride() for gradient in gradients] != self._strides:
                gradients = _aligned(gradients, self._parameters)
            for chosen, step, factor in self._groups:
                part = gradients if len(self._groups) == 1 else [gradients[index] for index in chosen]
                step(part, lr * factor, skip)


@dataclass(frozen=True, slots=True)
class _Counting:
    """A combine that leaves out parameters which another rank counts."""

    combine: Combine
    counts: Tensor  # (n,) 1 or 0

    def __call__(self, sums: Tensor) -> Tensor:
        return self.combine(sums * self.counts)


def _aligned(gradients: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """The gradients in the memory layout of their parameters.

    torch's fused CPU kernels pair elements by memory position and do not look at strides: a `channels_last` gradient of
    a contiguous weight would silently update the wrong elements.
    """
    import torch

    return [
        g if g.stride() == p.stride() else torch.empty_like(p).copy_(g)
        for g, p in zip(gradients, parameters, strict=True)
    ]


@dataclass(kw_only=True)
class AdamMoments(Optimizer):
    """The running averages and the step of Adam. Subclasses differ in what weight decay is applied to."""

    averages_squares = True
    usual_lr = 0.001

    decoupled = False
    """Whether weight decay acts on the parameter itself, not on its gradient."""

    beta1: float = option(default=0.9, least=0, below=1, doc="decay of the running mean of gradients")
    beta2: float = option(default=0.999, least=0, below=1, doc="decay of the running mean of squared gradients")
    eps: float = option(default=1e-8, above=0, doc="added to the denominator")
    decay_norm_and_bias: bool = option(
        default=True, doc="let weight decay act on biases and normalisation scales (parameters with one axis) too"
    )

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        return {
            "mean": torch.zeros_like(parameter, requires_grad=False),
            "square": torch.zeros_like(parameter, requires_grad=False),
            "step": counter(parameter),
        }

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        from torch.optim.adam import adam

        adam(
            group.parameters,
            gradients,
            group.slots["mean"],
            group.slots["square"],
            [],
            group.slots["step"],
            fused=True,
            found_inf=skip,
            decoupled_weight_decay=self.decoupled,
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=group.weight_decay,
            eps=self.eps,
            maximize=False,
        )


def counter(parameter: Tensor) -> Tensor:
    """A counter of steps, 0 at first: float32 (), on the device of the parameter."""
    import torch

    return torch.zeros((), dtype=torch.float32, device=parameter.device)


def sgd_step(
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor] | None,
    skip: Tensor | None,
    lr: float,
    momentum: float,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """SGD of torch on lists of tensors of one type and device, in place, with the fused kernel where that is correct.
    `skip`: as in `Bound.apply`; `momenta`: None without momentum.
    """
    import torch

    more = {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "dampening": 0.0,
        "nesterov": nesterov,
        "maximize": False,
    }
    if _fused_sgd_is_right(parameters[0].device.type, parameters[0].dtype):
        # the kernel itself: torch.optim.sgd would sort the tensors by type and device first, which takes longer than
        # to step a small model
        torch._fused_sgd_(
            parameters, gradients, momenta or [], is_first_step=False, grad_scale=None, found_inf=skip, **more
        )
    elif skip is None or not skip.item():  # on the host, nothing is waited for
        from torch.optim.sgd import sgd

        kept: list[Tensor | None] = [*momenta] if momenta is not None else [None] * len(parameters)
        sgd(parameters, gradients, kept, fused=False, **more)


@cache
def _fused_sgd_is_right(device: str, dtype: torch.dtype) -> bool:
    """Torch 2.11's for bf16 on CPUs writes parameters into the momentum."""
    import torch
    from torch.optim.sgd import sgd

    if device != "cpu" or dtype.itemsize >= 4:
        return True
    parameter, gradient, momentum = (torch.full((64,), value, dtype=dtype) for value in (1.0, 0.5, 0.0))
    sgd(
        [parameter],
        [gradient],
        [momentum],
        fused=True,
        weight_decay=0.0,
        momentum=0.5,
        lr=0.5,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    return bool((parameter == 0.75).all() and (momentum == 0.5).all())
