# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportOptionalMemberAccess=false, reportOperatorIssue=false
"""Eight LightningModules as Lightning's pages and tutorials write them, one that draws, and one that is refused."""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
import torchmetrics
import torchvision
from torch import nn
from torchmetrics.functional import accuracy


class LitClassifier(pl.LightningModule):
    """A perceptron for digits."""

    def __init__(self, hidden_size: int = 32, learning_rate: float = 2e-3, dropout: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Flatten(),
            nn.Linear(144, hidden_size),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden_size, 10),
        )
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def forward(self, x):
        return F.log_softmax(self.model(x), dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.nll_loss(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_accuracy.update(logits.argmax(dim=1), y)
        self.log("val_loss", F.nll_loss(logits, y), prog_bar=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def test_step(self, batch, batch_idx):
        return self.validation_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class LitAutoEncoder(pl.LightningModule):
    """The first example of Lightning's pages: a training step and nothing else."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 144))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.view(x.size(0), -1)
        x_hat = self.decoder(self.encoder(x))
        loss = F.mse_loss(x_hat, x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def create_model(width):
    model = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), bias=False)
    model.maxpool = nn.Identity()
    return model


class LitResnet(pl.LightningModule):
    """The CIFAR-10 tutorial: OneCycleLR, which moves the momentum too."""

    def __init__(self, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.model = create_model(8)

    def forward(self, x):
        out = self.model(x)
        return F.log_softmax(out, dim=1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        self.log("train_loss", loss)
        return loss

    def evaluate(self, batch, stage=None):
        x, y = batch
        logits = self(x)
        loss = F.nll_loss(logits, y)
        preds = torch.argmax(logits, dim=1)
        acc = accuracy(preds, y, task="multiclass", num_classes=10)
        if stage:
            self.log(f"{stage}_loss", loss, prog_bar=True)
            self.log(f"{stage}_acc", acc, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4)
        scheduler_dict = {
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
            ),
            "interval": "step",
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler_dict}


class GLUETransformer(pl.LightningModule):
    """The tutorial of text classification, with a transformer of its own: no weight decay of norms and biases."""

    def __init__(
        self,
        learning_rate: float = 1e-3,
        adam_epsilon: float = 1e-8,
        warmup_steps: int = 4,
        weight_decay: float = 0.05,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(50, 16)
        self.place = nn.Parameter(0.1 * torch.randn(12, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(16, 2)
        metrics = torchmetrics.MetricCollection(
            {
                "accuracy": torchmetrics.classification.BinaryAccuracy(),
                "f1": torchmetrics.classification.BinaryF1Score(),
            }
        )
        self.val_metrics = metrics.clone(prefix="val_")

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.encoder(
            self.embed(input_ids) + self.place[: input_ids.shape[1]], src_key_padding_mask=attention_mask == 0
        )
        weight = attention_mask.unsqueeze(-1).to(x.dtype)
        logits = self.classifier((x * weight).sum(1) / weight.sum(1))
        return F.cross_entropy(logits, labels), logits

    def training_step(self, batch, batch_idx):
        return self(**batch)[0]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        val_loss, logits = self(**batch)
        self.val_metrics.update(logits.argmax(1), batch["labels"])
        self.log("val_loss", val_loss, sync_dist=True)
        self.log_dict(self.val_metrics, prog_bar=True)

    def configure_optimizers(self):
        no_decay = ["bias", "norm1.weight", "norm2.weight"]
        optimizer_grouped_parameters = [
            {
                "params": [p for n, p in self.named_parameters() if not any(nd in n for nd in no_decay)],
                "weight_decay": self.hparams.weight_decay,
            },
            {
                "params": [p for n, p in self.named_parameters() if any(nd in n for nd in no_decay)],
                "weight_decay": 0.0,
            },
        ]
        optimizer = torch.optim.AdamW(
            optimizer_grouped_parameters, lr=self.hparams.learning_rate, eps=self.hparams.adam_epsilon
        )
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(step / self.hparams.warmup_steps, max(0.0, (total - step) / total))
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]


class Regression(pl.LightningModule):
    """Metrics as attributes, updated in one line and logged in the next."""

    def __init__(self, features: int = 6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 1))
        self.train_mse = torchmetrics.MeanSquaredError()
        self.valid_mae = torchmetrics.MeanAbsoluteError()
        self.valid_r2 = torchmetrics.R2Score()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        predicted = self(x)
        loss = nn.functional.mse_loss(predicted, y)
        self.train_mse(predicted, y)
        self.log("train_mse", self.train_mse, on_step=True, on_epoch=False)
        return {"loss": loss, "predicted": predicted.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        predicted = self(x)
        self.valid_mae(predicted, y)
        self.valid_r2(predicted.squeeze(1), y.squeeze(1))
        self.log("valid_mae", self.valid_mae, on_epoch=True)
        self.log("valid_r2", self.valid_r2, on_epoch=True)
        return nn.functional.mse_loss(predicted, y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)]


class MultiLabel(pl.LightningModule):
    """Values that the hook at the end of an epoch computes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 4)
        self.f1 = torchmetrics.classification.MultilabelF1Score(num_labels=4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.binary_cross_entropy_with_logits(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.layer(x)
        self.f1.update(logits.sigmoid(), y.int())
        return {"val_loss": F.binary_cross_entropy_with_logits(logits, y)}

    def on_validation_epoch_end(self):
        self.log("val_f1", self.f1.compute())
        self.f1.reset()

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1, initial_accumulator_value=0.1, weight_decay=1e-3)


class TransferLearning(pl.LightningModule):
    """A backbone that learns slower than the head; batch normalisation and dropout; a stem that does not learn."""

    def __init__(self, backbone_lr: float = 0.002, lr: float = 0.02, dropout: float = 0.2):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stem.requires_grad_(False)
        self.backbone = nn.Sequential(
            nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(12, 10))
        self.loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, x):
        return self.head(self.backbone(self.stem(x)))

    def shared_step(self, batch, batch_idx, name):
        x, y = batch
        logits = self.forward(x)
        loss = self.loss_fn(logits, y)
        self.log_dict({f"{name}/loss": loss, f"{name}/acc": (logits.argmax(1) == y).float().mean()})
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, batch_idx, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, batch_idx, "val")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            [
                {"params": self.backbone.parameters(), "lr": self.hparams.backbone_lr},
                {"params": self.head.parameters(), "weight_decay": 0.1},
            ],
            lr=self.hparams.lr,
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LanguageModel(pl.LightningModule):
    """The next token; rows have different numbers of them; the embedding is the last layer too."""

    def __init__(self, width=16, dropout: float = 0.1):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(width, 50, bias=False)
        self.out.weight = self.embed.weight

    def training_step(self, batch, batch_idx):
        ids, target = batch
        logits = self.out(self.drop(self.rnn(self.embed(ids))[0]))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)}


class VAE(LitAutoEncoder):
    """A step that draws."""

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        z = self.encoder(x)
        loss = F.mse_loss(self.decoder(z + 0.1 * torch.randn_like(z)), x) + 0.01 * z.pow(2).mean()
        self.log("train_loss", loss)
        return loss


class GAN(pl.LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 144), nn.Linear(144, 1)

    def training_step(self, batch):
        return self.optimizers()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.discriminator.parameters())], []
