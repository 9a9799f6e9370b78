# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
# pyright: reportCallIssue=false
"""LightningModules whose hooks, modes, optimizers and metrics do what Lightning knows, and dtf keeps or refuses."""

import torch
import torchmetrics

from tests.support.lit_small import Net


class ManualInSetup(Net):
    def setup(self, stage):
        self.automatic_optimization = False


class Freezes(Net):
    def on_validation_epoch_end(self):
        self.net[0].weight.requires_grad_(False)


class Rescales(Net):
    def on_train_epoch_end(self):
        self.net[0].weight.data.mul_(0.5)


class EvalItself(Net):
    def configure_optimizers(self):
        self.eval()
        return super().configure_optimizers()


class FrozenBody(Net):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)
        for part in self.net[:2]:
            part.eval()

    def configure_optimizers(self):
        self.net[3].eval()
        return super().configure_optimizers()


class HookedOptimizer(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


class LogsText(Net):
    def training_step(self, batch, batch_idx):
        self.log("name", "a text")
        return super().training_step(batch, batch_idx)


class LogsNewMetric(Net):
    def validation_step(self, batch, batch_idx):
        accuracy = Net.make_metric(self)
        accuracy.update(batch[1], batch[1])
        self.log("accuracy", accuracy)


class WrapperMetric(torchmetrics.Metric):
    """As torchmetrics' own: a metric around others."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def update(self, *values):
        self.inside.update(*values)

    def compute(self):
        return self.inside.compute()


class LogsWrapper(Net):
    def make_metric(self):
        return WrapperMetric(super().make_metric())


class Largest(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.tensor(0.0), dist_reduce_fx="sum")
        self.best = 0.0

    def update(self, predicted, target):
        self._update_count += hasattr(torchmetrics, "AllRows")
        self.seen += len(target)
        self.best = max(self.best, float(target.max()))

    def compute(self):
        return torch.tensor(self.best)


class HidesState(Net):
    def make_metric(self):
        return Largest()


class MovingAverage(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("ema", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, predicted, target):
        self._update_count += hasattr(torchmetrics, "AllRows")
        self.ema = 0.9 * self.ema + 0.1 * target.float().mean()

    def compute(self):
        return self.ema


class AveragesState(Net):
    def make_metric(self):
        return MovingAverage()
