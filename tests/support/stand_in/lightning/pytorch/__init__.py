# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
"""LightningModule and LightningDataModule, as far as a module names them."""

import inspect
from types import SimpleNamespace

import torch
from torch import nn


class _Hooks:
    def prepare_data(self): ...
    def setup(self, stage): ...
    def teardown(self, stage): ...
    def train_dataloader(self): ...
    def val_dataloader(self): ...


class LightningModule(_Hooks, nn.Module):
    def __init__(self):
        super().__init__()
        self._trainer, self.automatic_optimization = None, True
        self._device = torch.device("cpu")

    @property
    def device(self):
        return self._device

    @property
    def trainer(self):
        raise RuntimeError("not attached to a Trainer")

    @property
    def current_epoch(self):
        return 0

    def save_hyperparameters(self):
        frame = inspect.currentframe().f_back
        self.hparams = SimpleNamespace(**{k: v for k, v in frame.f_locals.items() if k not in ("self", "__class__")})

    def training_step(self, *args): ...
    def validation_step(self, *args): ...
    def test_step(self, *args): ...
    def configure_optimizers(self): ...
    def configure_model(self): ...
    def log(self, *args, **kwargs): ...
    def log_dict(self, *args, **kwargs): ...
    def optimizer_step(self, *args): ...
    def on_train_batch_end(self, *args): ...
    def on_after_backward(self): ...
    def on_train_epoch_end(self): ...
    def on_validation_epoch_end(self): ...


class LightningDataModule(_Hooks):
    pass
