"""Optimizers as others write them: some can be stepped by dtf, others are refused by name."""

# pyright: reportOptionalOperand=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
# (a gradient may be None, as the type checker has it)
from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

SCALE = 0.5


class Lion(Optimizer):
    """Lion as its package has it: state begun in the first step, decay of the parameter."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay=0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                mean = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((mean * beta1 + p.grad * (1 - beta1)).sign(), alpha=-group["lr"])
                mean.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Counting(Optimizer):
    """Numbers of Python in its state, which begins with the gradient and the learning rate of its first step."""

    def __init__(self, params, lr=0.1, period: int = 3, scale: float = SCALE):
        super().__init__(params, {"lr": lr, "period": period, "scale": scale})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["product"], state["nothing"] = 0, 1.0, None
                    state["late"], state["first"] = False, p.grad.clone()
                    state["width"] = torch.full((1,), group["lr"])
                state["step"] += 1
                state["product"] *= 0.9
                state["late"] = state["step"] % group["period"] == 0
                state["width"] = state["width"] * 1.5
                move = p.grad + state["first"] * state["product"]
                p.add_(move, alpha=-group["scale"] * group["lr"] * (2 if state["late"] else 1))
                p.sub_(state["width"].item() * 1e-3)


class _Plain(Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self.begin(group)
            for p in group["params"]:
                self.move(p, group)

    def begin(self, group: dict) -> None:
        pass

    def move(self, p: torch.Tensor, group: dict) -> None:
        p.sub_(p.grad * group["lr"])


class NormOfRows(_Plain):
    """Element-wise in parameters with one axis, and in halves of rows."""

    def move(self, p, group):
        p.sub_(p.grad / (p.grad.norm(dim=-1, keepdim=True) if p.dim() > 1 else 1.0) * group["lr"])


class NormOfAll(_Plain):
    """Clips by the norm of all parameters."""

    def begin(self, group):
        self.norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()

    def move(self, p, group):
        p.sub_(p.grad / self.norm * group["lr"])


class InItself(_Plain):
    def begin(self, group):
        self.calls += 1

    def move(self, p, group):
        p.sub_(p.grad * group["lr"] / self.calls)


class InState(_Plain):
    """What it counts for all parameters shows late."""

    def begin(self, group):
        self.shared()["calls"] = self.shared().get("calls", 0) + 1

    def move(self, p, group):
        p.sub_(p.grad * group["lr"] * (1 if self.shared()["calls"] < 1000 else 0.5))

    def shared(self) -> Any:
        return self.state


class OtherMemory(_Plain):
    def move(self, p, group):
        p.data = p - p.grad * group["lr"]


class NormOfLarge(_Plain):
    """Element-wise in small parameters."""

    def move(self, p, group):
        p.sub_(p.grad / (p.grad.norm() if p.numel() > 4096 else 1.0) * group["lr"])


class InGroups(_Plain):
    def begin(self, group):
        group["k"] = group.get("k", 0) + 1

    def move(self, p, group):
        p.sub_(p.grad * group["lr"] / group["k"])


class TensorsInGroups(_Plain):
    def begin(self, group):
        group["k"] = group.get("k", torch.zeros(())) + 1


class SumsInGroups(_Plain):
    """Too little to show in parameters for a long time."""

    def begin(self, group):
        group["d"] = group.get("d", 1e-9) + sum(float(p.grad.abs().sum()) for p in group["params"]) * 1e-12


class Noisy(_Plain):
    def move(self, p, group):
        p.sub_((p.grad + torch.randn_like(p)) * group["lr"])


class OwnRate(_Plain):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.rate = lr

    def move(self, p, group):
        p.sub_(p.grad * self.rate)


class LooksAhead(_Plain):
    def begin(self, group):
        self.calls += 1

    def move(self, p, group):
        if self.calls == 6:
            self.state[p]["slow"] = p.clone()
        super().move(p, group)


class Lists(_Plain):
    def move(self, p, group):
        self.state[p]["buffer"] = [1.0]
        super().move(p, group)


class Closure(_Plain):
    def step(self, closure):  # type: ignore[override]
        return closure()


class Crashing(_Plain):
    def move(self, p, group):
        raise RuntimeError("call train() first")


class TrainsAndEvaluates(_Plain):
    def train(self):
        pass

    def eval(self):
        pass


class OnlyFloats(_Plain):
    """Fails in fp64."""

    def move(self, p, group):
        p.lerp_(torch.zeros(p.shape), group["lr"])
        super().move(p, group)


class NoRate(Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


class Wants(_Plain):
    def __init__(self, params, lr, model):
        super().__init__(params, lr)


class OwnNames(_Plain):
    """Arguments under names that mean something else to dtf."""

    def __init__(self, params, lr=0.1, step: int = 1, name: str = "x", check=None):
        super().__init__(params, lr)
        self.size = step

    def move(self, p, group):
        p.sub_(p.grad * group["lr"] * self.size)


class UnsaidDecay(_Plain):
    def __init__(self, params, lr=0.1, weight_decay=None):
        super().__init__(params, lr)


class NotOne:
    def __init__(self, params, lr=0.1):
        pass

    def step(self):
        pass
