# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
"""Small LightningModules, and what each of them does that cannot be right here. Needs Lightning, or its stand-in."""

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler


def points(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, (x[:, :3] * x[:, 3:]).argmax(1))


class Points(pl.LightningDataModule):
    def __init__(self, path: str = "./", batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.train_set, self.val_set = points(96), points(40, 1)

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=8)


class Net(pl.LightningModule):
    def __init__(
        self, width: int = 8, lr: float = 0.01, layers=(4, 4), dropout=0.1, act=nn.ReLU, note: str | None = None
    ):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), act(), nn.Dropout(dropout), nn.Linear(width, 3)
        )
        self.accuracy = self.make_metric()

    def make_metric(self):
        return (
            torchmetrics.Accuracy()
            if hasattr(torchmetrics, "AllRows")
            else torchmetrics.Accuracy("multiclass", num_classes=3)
        )

    def forward(self, x):
        return self.net(x)

    def loss(self, logits, y):
        return F.cross_entropy(logits, y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits.argmax(1), y)
        self.log("val_loss", self.loss(logits, y))
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class Counted(torchmetrics.Metric):
    """One more than the rows of all batches."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(1.0), dist_reduce_fx="sum")

    def update(self, labels):
        self.total += len(labels)

    def compute(self):
        return self.total


class TrainMetric(Net):
    """With a metric in training whose state does not begin at zero, and a layer that nothing steps."""

    def __init__(self):
        super().__init__()
        self.counted = Counted()

    def training_step(self, batch, batch_idx):
        self.counted.update(batch[1])
        self.log("counted", self.counted)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[4].parameters(), lr=0.1)


class SumLoss(Net):
    def loss(self, logits, y):
        return F.cross_entropy(logits, y, reduction="sum")


class ClassWeights(Net):
    def loss(self, logits, y):
        return F.cross_entropy(logits, y, weight=torch.tensor([1.0, 2.0, 3.0], dtype=logits.dtype))


class Contrast(Net):
    def loss(self, logits, y):
        return F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class LogsNoMean(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("largest", batch[0].max())
        return loss


class OtherRows(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("rows", loss, batch_size=3)
        return loss


class LogsSum(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("added", loss, reduce_fx="sum")
        return loss


class Masks(Net):
    """Draws a mask of its own for each row, which leaves its loss a mean over rows."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self.net(x * (torch.rand_like(x) > 0.3)), y)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)], []


class OtherOptimizer(Net):
    def configure_optimizers(self):
        return torch.optim.Rprop(self.parameters())


class SlowBackbone(Net):
    """Its first layer is in a group of its own, and its bias does not learn."""

    def configure_optimizers(self):
        self.net[0].bias.requires_grad_(False)
        groups = [{"params": self.net[0].parameters(), "lr": 0.001}, {"params": self.net[4].parameters()}]
        return torch.optim.SGD(groups, lr=0.01)


class Amsgrad(Net):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), amsgrad=True)


class OnPlateau(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
        }


class StepsItself(Net):
    def optimizer_step(self, *args):
        super().optimizer_step(*args)


class BatchEnd(Net):
    def on_train_batch_end(self, *args):
        self.seen = True


class UsesEpoch(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + self.current_epoch)


class UsesBatchNumber(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (2 if batch_idx == 0 else 1)


class AsksTrainer(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * len(self.trainer.callbacks)


class KeepsRows(Net):
    def __init__(self):
        super().__init__()
        self.outputs = []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.outputs.append(batch[1])

    def on_validation_epoch_end(self):
        self.log("mean", torch.cat(self.outputs).float().mean())


class CoolsDown(Net):
    temperature = 1.0

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.temperature

    def on_train_epoch_end(self):
        self.temperature = self.temperature * 0.5


class MovesWeights(Net):
    @torch.no_grad()
    def on_validation_epoch_end(self):
        self.net[0].weight.mul_(0.5)  # pyright: ignore[reportCallIssue]


class NoLoss(Net):
    def training_step(self, batch, batch_idx):
        return None


class Decayed(Net):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class KeepsAllRows(Net):
    def make_metric(self):
        return torchmetrics.AllRows() if hasattr(torchmetrics, "AllRows") else torchmetrics.CatMetric()


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(6), torch.tensor(0)


class StreamData(Points):
    def train_dataloader(self):
        return DataLoader(Stream(), batch_size=16)


class WeightedData(Points):
    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=16, sampler=WeightedRandomSampler([1.0] * 96, 96))


class TextsData(Points):
    def train_dataloader(self):
        return DataLoader([(torch.zeros(6), "a"), (torch.ones(6), "b")] * 32, batch_size=16)


class OtherBatch(Points):
    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=12)


class InOrder(Points):
    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size)


class DropsLast(Points):
    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=16, drop_last=True)


class Noisy(Dataset):
    """Rows that draw from torch's generator."""

    def __len__(self):
        return 32

    def __getitem__(self, row):
        return torch.full((6,), float(row)) + torch.rand(6), row % 3


def padded(rows):
    """Rows of as many numbers as the longest needs, and one drawn for each."""
    longest = max(int(label) for _, label in rows) + 1
    drawn = torch.rand(len(rows), 1)
    return torch.cat([drawn, torch.ones(len(rows), longest)], 1), torch.stack([label for _, label in rows])


def padded_loaders():
    return DataLoader(points(40), batch_size=16, collate_fn=padded), DataLoader(points(40), batch_size=16)


def noisy_loaders():
    return DataLoader(Noisy(), batch_size=16), DataLoader(points(40), batch_size=16)
