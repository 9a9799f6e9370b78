"""Networks on image files of any size, read and augmented anew in every epoch: ImageNet, Imagenette, one's own
photographs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from dtf.api.recipe import Split
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, DataError
from dtf.recipes.resnet.options import FOLDERS, ModelOptions, SourceOptions, Stem
from dtf.recipes.resnet.recipe import Classification

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from dtf.core.types import Batch
    from dtf.recipes.resnet.buffers import Buffers
    from dtf.recipes.resnet.photos import Photos


class Policy(Enum):
    none = "none"
    trivial = "trivial"
    rand = "rand"


BadRecords = Enum("BadRecords", {"raise": "raise", "skip": "skip"})


@dataclass(kw_only=True)
class PhotoOptions(SourceOptions):
    pixels: int = option(
        default=224, least=16, most=4096, doc="height and width of the inputs of the network", unit="pixels"
    )
    whole: int = option(
        default=0,
        least=0,
        most=8192,
        doc="length of the shorter side in evaluation, before the centre is cut out; 0: 8/7 of `pixels` (256 for 224)",
        unit="pixels",
    )
    mean: list[float] = option(
        factory=lambda: [0.485, 0.456, 0.406],
        doc="of the red, green and blue of a pixel in [0, 1]; default: ImageNet's",
    )
    std: list[float] = option(factory=lambda: [0.229, 0.224, 0.225], above=0, doc="standard deviation, likewise")
    crop_area: list[float] = option(
        factory=lambda: [0.08, 1.0],
        above=0,
        most=1,
        doc="smallest and largest share of a training image that a crop has",
    )
    crop_ratio: list[float] = option(
        factory=lambda: [3 / 4, 4 / 3],
        above=0,
        most=10,
        doc="smallest and largest ratio of the width of a crop to its height",
    )
    flip: bool = option(default=True, doc="mirror half of the training images")
    jitter: list[float] = option(
        factory=list,
        least=0,
        most=10,
        doc="random changes of brightness, contrast, saturation and hue, four numbers as torchvision's ColorJitter; "
        "empty: none",
    )
    policy: Policy = option(
        default=Policy.none,
        doc="further augmentation: `trivial` TrivialAugmentWide, one operation of any strength; `rand` RandAugment, "
        "two at 9 of 30",
    )
    mixup: float = option(
        default=0.0,
        least=0,
        most=100,
        doc="alpha of mixup, which blends each training image and its target with its neighbour's; 0: off",
    )
    cutmix: float = option(
        default=0.0,
        least=0,
        most=100,
        doc="alpha of cutmix, which pastes a part of the neighbour into it; with both, each image gets one; 0: off",
    )
    grow_from: int = option(
        default=0,
        least=0,
        most=4096,
        doc="progressive resizing: pixels of training images in the first epoch; 0: off",
    )
    grow_epochs: int = option(
        default=0, least=0, most=100_000, doc="epochs in which they grow, in steps of 16, to `pixels`", unit="epochs"
    )
    bad_records: BadRecords = option(
        default=BadRecords["raise"],
        doc="files that cannot be decoded: `raise` ends the run, `skip` reports each in the log and leaves it out",
    )
    bad_share: float = option(
        default=0.001,
        above=0,
        most=1,
        doc="share of a split that may be skipped, over all ranks; more ends the run",
        unit="share of the rows",
    )
    threads: int = option(
        default=0,
        least=0,
        most=1024,
        doc="threads that decode, on each rank; 0: as many as the rank computes with",
        unit="threads",
    )

    @property
    def smallest(self) -> int:
        return self.grow_from or self.pixels

    def check(self) -> None:
        super().check()
        for key, length, what in (
            ("crop_area", 2, "smallest and largest share"),
            ("crop_ratio", 2, "smallest and largest ratio"),
            ("jitter", 4, "brightness, contrast, saturation and hue"),
        ):
            values = getattr(self, key)
            if len(values) != length and (values or key != "jitter"):
                raise ConfigError(f"recipe.data.{key}={values} must be {length} numbers: {what}")
            if key != "jitter" and values[0] > values[1]:
                raise ConfigError(f"recipe.data.{key}={values} must not fall: {what}")
        if self.jitter and self.jitter[3] > 0.5:
            raise ConfigError(f"recipe.data.jitter={self.jitter}: the hue turns by at most 0.5 of a circle")
        if self.whole and self.whole < self.pixels:
            raise ConfigError(f"recipe.data.whole={self.whole} must be at least recipe.data.pixels={self.pixels}, or 0")
        if bool(self.grow_from) != bool(self.grow_epochs):
            raise ConfigError(
                f"recipe.data.grow_from={self.grow_from} and recipe.data.grow_epochs={self.grow_epochs} belong "
                "together; set both, or leave both at 0"
            )
        if self.grow_from and not 16 <= self.grow_from <= self.pixels:
            raise ConfigError(f"recipe.data.grow_from={self.grow_from} must be 16 to recipe.data.pixels={self.pixels}")


@register("recipe", "resnet_photos")
class ResnetPhotos(Classification):
    """A network on image files of any size and kind, in class folders or an archive of them, augmented anew in
    every epoch.
    """

    model: ModelOptions = option(factory=lambda: ModelOptions(arch="resnet18"), doc="the network")
    data: PhotoOptions = option(factory=PhotoOptions, doc="the images")

    splits = tuple(Split)
    stem_of_large: ClassVar[Stem] = Stem.imagenet

    def check(self) -> None:
        from dtf.recipes.resnet.store import read_index

        super().check()
        tree = read_index(*self.data.places()).tree
        folders = [FOLDERS[split.value] for split in self.needed_splits]
        tree.check(folders)
        self.data.check_against(tree, self.model.classes, self.needed_splits)
        if self.data.bad_records is BadRecords["raise"]:
            for name, why in tree.unreadable_rows(folders):
                raise DataError(
                    f"recipe.data.root={self.data.root}: {name} cannot be used: {why}; replace or remove it, or set "
                    "recipe.data.bad_records=skip"
                )

    @property
    def pairs(self) -> bool:
        return bool(self.data.mixup or self.data.cutmix)

    def open_data(self, split: str, seed: int) -> Photos:
        import torch

        from dtf.recipes.resnet.photos import Look, Photos
        from dtf.recipes.resnet.store import read_index

        data, train, name = self.data, split == "train", FOLDERS[split]
        index = read_index(*data.places())
        index.tree.check([name])
        labels = self.labels(index.tree.classes, index.tree.counts[name])
        rows = data.rows(split, len(labels))
        look = Look(
            area=(data.crop_area[0], data.crop_area[1]),
            ratio=(data.crop_ratio[0], data.crop_ratio[1]),
            mirror=data.flip,
            jitter=tuple(data.jitter),
            policy="" if data.policy is Policy.none else data.policy.value,
            mixup=data.mixup,
            cutmix=data.cutmix,
            grow_from=data.grow_from,
            grow_epochs=data.grow_epochs,
        )
        photos = Photos(
            index.open(name, rows),
            labels[rows],
            data.pixels,
            self._whole,
            look if train else None,
            seed,
            data.threads or torch.get_num_threads(),
            math.ceil(data.bad_share * len(rows)) if data.bad_records is BadRecords["skip"] else 0,
        )
        photos.left_out = index.tree.left_out
        return photos

    def class_names(self) -> tuple[str, ...]:
        from dtf.recipes.resnet.store import read_index

        root, cache = self.data.places()
        return read_index(root, cache).tree.classes if self.data.root and root.exists() else ()

    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        return self.data.mean, self.data.std

    def preprocessing(self) -> dict[str, Any]:
        from dtf.recipes.resnet.preprocessing import of_photos

        return of_photos(self.data.pixels, self._whole, *self.normalisation())

    def open_inputs(self, path: Path) -> tuple[list[str], Photos]:
        import numpy as np
        import torch

        from dtf.recipes.resnet.photos import Photos
        from dtf.recipes.resnet.store import Store
        from dtf.recipes.resnet.unlabelled import digest, list_inputs

        found = list_inputs(path)
        names = found.names
        threads = self.data.threads or torch.get_num_threads()
        store = Store(path, tuple(names), None, digest(names), found.unreadable)
        photos = Photos(store, np.zeros(len(names)), self.data.pixels, self._whole, None, 0, threads, 0)
        photos.left_out = found.left_out
        return names, photos

    @property
    def _whole(self) -> int:
        return self.data.whole or round(self.data.pixels * 8 / 7)

    def receive(self, inputs: Any) -> Tensor:
        from dtf.recipes.resnet.photos import to_floats

        colours = _colours(tuple(self.data.mean), tuple(self.data.std), inputs["pixels"].device)
        return to_floats(inputs, *colours, _buffers())

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        if targets.ndim == 1:
            return super().loss(outputs, targets)
        labels, partner, share = targets.unbind(1)
        return share * super().loss(outputs, labels.long()) + (1 - share) * super().loss(outputs, partner.long())

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        if batch.targets.ndim > 1:  # mixed: right is who names the row's own class
            batch = batch._replace(targets=batch.targets[:, 0].long())
        return super().measure(outputs, batch, loss)


@lru_cache(maxsize=1)
def _buffers() -> Buffers:
    """Memory for the inputs of the network, of all recipes of this process."""
    from dtf.recipes.resnet.buffers import Buffers

    return Buffers()


@lru_cache(maxsize=16)
def _colours(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """What bytes are multiplied by to be normalised, and what is added then, (3,) each. Made once: a copy in each step
    would have to be waited for.
    """
    import torch

    with torch.device("cpu"):
        mean_bytes, std_bytes = (torch.tensor(values, dtype=torch.float64).mul(255) for values in (mean, std))
    scale, shift = 1 / std_bytes, -mean_bytes / std_bytes
    return scale.float().to(device), shift.float().to(device)
