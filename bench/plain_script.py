"""The default recipe's network on its rows, trained by scripts as people write them. Knows nothing of dtf: nothing of
it is imported in the time that is measured. A line `step=N/M` follows each step.

    torchrun --standalone --nproc-per-node 2 -m bench.plain_script torch --rows FILE --steps 100 --save FOLDER

`bench.plain_rows` writes the rows. With `--save` rank 0 writes a checkpoint every 10 steps, as in torchrun's guide, and
a new start goes on from it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, pad

BATCH, EVERY = 128, 10


class Block(nn.Module):
    """Two convolutions; a shortcut without parameters takes every `stride`-th pixel and appends zero channels."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride, self.more = stride, channels - before

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return self.relu(y + x)


class ResNet8(nn.Module):
    """He et al. 2015 (arXiv:1512.03385), section 4.2."""

    def __init__(self, width: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Rows:
    """Images of a file as normalised float32 (B, 3, H, W) with their channels last in memory, and labels."""

    def __init__(self, path: str) -> None:
        self.pixels = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.pixels)

    def fetch(self, ids: np.ndarray) -> tuple[Tensor, Tensor]:
        images = torch.from_numpy(self.pixels[ids]).float().sub_(0.5 * 255).mul_(1 / (0.29 * 255))
        return images.permute(0, 3, 1, 2), torch.from_numpy(ids % 8)


def batches(given: argparse.Namespace, first: int, rank: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of each batch."""
    rows, share = Rows(given.rows), BATCH // size
    for step in range(first, given.steps):
        epoch, index = divmod(step, len(rows) // BATCH)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch))
        yield rows.fetch(order[index * BATCH + rank * share :][:share].numpy())


def network() -> nn.Module:
    torch.manual_seed(0)
    return ResNet8()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, fused=True)


def say(step: int, given: argparse.Namespace, loss: Tensor) -> None:
    print(f"step={step}/{given.steps} loss={loss.item():.4f}", flush=True)


def with_torch(given: argparse.Namespace) -> None:
    if given.keys_apart:  # those of an attempt that died do not confuse the next one
        agent = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = distributed.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], agent)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    else:
        distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    model = network()
    optimizer, first, path = optimizer_of(model), 0, Path(given.save, "saved.pt") if given.save else None
    if path and path.exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    forward = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    for step, (inputs, targets) in enumerate(batches(given, first, rank, size), first + 1):
        loss = cross_entropy(forward(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            say(step, given, loss)
            if path and step % EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, path.with_suffix(".part"))
                os.replace(path.with_suffix(".part"), path)
    distributed.destroy_process_group()


def with_accelerate(given: argparse.Namespace) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    engine = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
    model = network()
    forward, optimizer = engine.prepare(model, optimizer_of(model))
    rows = batches(given, 0, engine.process_index, engine.num_processes)
    for step, (inputs, targets) in enumerate(rows, 1):
        loss = cross_entropy(forward(inputs), targets)
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if engine.is_main_process:
            say(step, given, loss)


def with_lightning(given: argparse.Namespace) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return cross_entropy(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if self.global_rank == 0:
                say(index + 1, given, outputs["loss"])

    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return batches(given, 0, trainer.global_rank, trainer.world_size)

    strategy: Any = DDPStrategy(gradient_as_bucket_view=True)
    trainer = Trainer(
        accelerator="cpu", devices=given.ranks, strategy=strategy, max_epochs=1, max_steps=given.steps, barebones=True
    )
    trainer.fit(Module(), Batches())


WAYS = {"torch": with_torch, "accelerate": with_accelerate, "lightning": with_lightning}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--rows", required=True, help="file of images")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2, help="of Lightning, which starts them itself")
    parser.add_argument("--save", default="", help="folder of checkpoints")
    parser.add_argument("--keys-apart", action="store_true", help="torch: a restart uses other keys of the store")
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    WAYS[given.way](given)


if __name__ == "__main__":
    main()
