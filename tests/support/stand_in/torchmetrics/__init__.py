# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
"""A metric, as far as its states are read."""

import torch
from torch import nn


def dim_zero_sum(states): ...
def dim_zero_cat(states): ...


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self._defaults, self._reductions, self._update_count, self._computed = {}, {}, 0, None
        self._device = torch.device("cpu")

    def __init_subclass__(cls):
        update = vars(cls).get("update")
        if update is not None:
            cls.update = lambda self, *args: (
                setattr(self, "_update_count", self._update_count + 1),
                update(self, *args),
            )

    def add_state(self, name, default, dist_reduce_fx):
        self._defaults[name] = default
        self._reductions[name] = {"sum": dim_zero_sum, "cat": dim_zero_cat}[dist_reduce_fx]
        setattr(self, name, default if isinstance(default, list) else default.clone())

    def reset(self):
        self._update_count, self._computed = 0, None
        for name, default in self._defaults.items():
            setattr(self, name, [] if isinstance(default, list) else default.clone())

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


class Accuracy(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("right", torch.tensor(0), "sum")
        self.add_state("total", torch.tensor(0), "sum")

    def update(self, predicted, target):
        self.right += (predicted == target).sum()
        self.total += len(target)

    def compute(self):
        return self.right / self.total


class AllRows(Metric):
    def __init__(self):
        super().__init__()
        self.add_state("rows", [], "cat")
