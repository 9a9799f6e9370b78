"""Config nodes of the residual networks and of their images: `recipe.model` and `recipe.data`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.options import FineTuning
from dtf.api.recipe import Split
from dtf.api.registry import option
from dtf.core.errors import ConfigError, DataError
from dtf.recipes.resnet.tree import SHAPE

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np

    from dtf.recipes.resnet.cache import Decoded
    from dtf.recipes.resnet.tree import Tree


FOLDERS = {"train": "train", "eval": "val", "test": "test"}
"""Split -> the folder of its images."""


class Arch(Enum):
    """Networks by name; those in SMALL are for small images."""

    resnet8 = "resnet8"
    resnet14 = "resnet14"
    resnet20 = "resnet20"
    resnet32 = "resnet32"
    resnet44 = "resnet44"
    resnet56 = "resnet56"
    resnet110 = "resnet110"
    resnet18 = "resnet18"
    resnet34 = "resnet34"
    resnet50 = "resnet50"
    resnet101 = "resnet101"
    resnet152 = "resnet152"
    resnext50_32x4d = "resnext50_32x4d"
    resnext101_32x8d = "resnext101_32x8d"
    resnext101_64x4d = "resnext101_64x4d"
    wide_resnet50_2 = "wide_resnet50_2"
    wide_resnet101_2 = "wide_resnet101_2"


SMALL = {
    Arch.resnet8: 8,
    Arch.resnet14: 14,
    Arch.resnet20: 20,
    Arch.resnet32: 32,
    Arch.resnet44: 44,
    Arch.resnet56: 56,
    Arch.resnet110: 110,
}
"""Networks for small images -> depth; all others are torchvision's."""


BASIC = {*SMALL, Arch.resnet18, Arch.resnet34}
"""Networks of blocks with two convolutions; all others have bottlenecks of three."""


class Stem(Enum):
    cifar = "cifar"
    imagenet = "imagenet"


@dataclass(kw_only=True)
class ModelOptions(FineTuning):
    arch: Arch = option(
        default=Arch.resnet20,
        doc="network: resnet8, 14, 20, 32, 44, 56 and 110 are the small ones for 32-pixel images (He et al. 2015, "
        "section 4.2), the others are torchvision's, and their weight files fit",
    )
    stem: Stem = option(
        default=Stem.cifar,
        doc="first layer: `cifar` 3x3 convolution with stride 1, no pooling; `imagenet` 7x7 with stride 2, then "
        "max-pooling (torchvision's)",
    )
    classes: int = option(default=10, least=2, doc="outputs")
    width: int = option(
        default=0,
        least=0,
        most=1024,  # a convolution of the last stage then has 600 MB
        doc="channels of the first stage of a small network; 0: 16, as published; torchvision's networks have a fixed "
        "width",
    )
    zero_init_residual: bool = option(
        default=False,
        doc="start each residual block as the identity: the weight of its last normalisation is initialised to zero",
    )

    def check(self) -> None:
        """Raise ConfigError for values that make no network."""
        if self.arch in SMALL and self.stem is not Stem.cifar:
            raise ConfigError(
                f"recipe.model.stem={self.stem.name} does not exist for recipe.model.arch={self.arch.name}; use "
                "recipe.model.stem=cifar"
            )
        if self.width and self.arch not in SMALL:
            small = ", ".join(arch.name for arch in SMALL)
            raise ConfigError(
                f"recipe.model.width={self.width} does not apply to recipe.model.arch={self.arch.name}; use 0, or one "
                f"of {small}"
            )


@dataclass(kw_only=True)
class SplitOptions:
    pixels: int = option(default=32, least=8, most=4096, doc="height and width of an image", unit="pixels")
    train_rows: int = option(
        default=0, least=0, doc="rows of the training split, spread evenly over it; 0: all", unit="rows"
    )
    eval_rows: int = option(
        default=0, least=0, doc="rows of the evaluation split, spread evenly over it; 0: all", unit="rows"
    )

    def check(self) -> None:
        """Raise ConfigError or DataError for values that make no data set."""


@dataclass(kw_only=True)
class DataOptions(SplitOptions):
    crop_pad: int = option(
        default=4,
        least=0,
        doc="zeros put around a training image before it is cropped to its size at random; 0: no crop",
        unit="pixels",
    )
    flip: bool = option(default=True, doc="mirror half of the training images")

    def check(self) -> None:
        super().check()
        if self.crop_pad >= self.pixels:
            raise ConfigError(
                f"recipe.data.crop_pad={self.crop_pad} must be less than recipe.data.pixels={self.pixels}: a cut may "
                "miss the image otherwise"
            )


@dataclass(kw_only=True)
class ShapesOptions(DataOptions):
    train_rows: int = option(default=8192, least=1, doc="training images to draw", unit="rows")
    eval_rows: int = option(default=2048, least=1, doc="evaluation images to draw", unit="rows")
    crop_pad: int = option(
        default=0,
        least=0,
        doc="zeros put around a training image before it is cropped to its size at random; 0: no crop",
        unit="pixels",
    )
    seed: int = option(default=0, least=0, doc="of the drawn images; the run's own seed does not change them")

    def check(self) -> None:
        super().check()
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        image = self.pixels**2 * 3
        if (self.train_rows + self.eval_rows) * image > memory:
            keys = f"recipe.data.train_rows={self.train_rows} and recipe.data.eval_rows={self.eval_rows}"
            raise ConfigError(
                f"{keys} must be at most {memory // image} together with recipe.data.pixels={self.pixels}, to fit "
                "into memory"
            )


@dataclass(kw_only=True)
class SourceOptions(SplitOptions):
    root: str = option(default="", doc=f"folder or .tar, .tar.gz archive that holds {SHAPE}; must be given")
    cache: str = option(
        default="",
        doc="folder for the decoded images, which may be deleted at any time; empty: $XDG_CACHE_HOME/dtf/images "
        "or ~/.cache/dtf/images",
    )
    mean: list[float] = option(
        factory=lambda: [0.4914, 0.4822, 0.4465],
        doc="of the red, green and blue of a pixel in [0, 1]; default: CIFAR-10's training split",
    )
    std: list[float] = option(factory=lambda: [0.2470, 0.2435, 0.2616], above=0, doc="standard deviation, likewise")

    def places(self) -> tuple[Path, Path]:
        """Root and cache folder."""
        from dtf.recipes.resnet.cache import default_cache

        return Path(self.root).expanduser(), Path(self.cache).expanduser() if self.cache else default_cache()

    def check(self) -> None:
        super().check()
        if not self.root:
            raise ConfigError("recipe.data.root is not set; give a folder or archive of images: recipe.data.root=PATH")
        for key in ("mean", "std"):
            values = getattr(self, key)
            if len(values) != 3:
                raise ConfigError(f"recipe.data.{key}={values} must be three numbers, for red, green and blue")
        if not Path(self.root).expanduser().exists():
            raise DataError(
                f"recipe.data.root={self.root} does not exist; give a folder or a .tar, .tar.gz archive that holds "
                f"{SHAPE}"
            )
        cache = self.places()[1]
        if not _can_write(cache):
            raise DataError(f"recipe.data.cache={cache} cannot be written; set recipe.data.cache=DIR")

    def check_against(self, images: Decoded | Tree, classes: int, splits: Collection[Split]) -> None:
        """Raise ConfigError where images do not fit these options or the model's number of classes.

        `splits`: those that are needed. Where `train` is not, a split may lack classes: the model says which there are.
        """
        found = len(images.classes)
        if found > classes or (found < classes and Split.train in splits):
            raise ConfigError(
                f"recipe.model.classes={classes}, but {self.root} has {found} classes; set recipe.model.classes={found}"
            )
        for key, split in (("train_rows", Split.train), ("eval_rows", Split.eval)):
            folder = FOLDERS[split.value]
            if split in splits and getattr(self, key) > sum(images.counts[folder]):
                raise ConfigError(
                    f"recipe.data.{key}={getattr(self, key)}, but {folder}/ has {sum(images.counts[folder])} images; "
                    "use 0 for all"
                )

    def rows(self, split: str, count: int) -> np.ndarray:
        """Which of the `count` rows of a split are used: row numbers, int64."""
        import numpy as np

        from dtf.recipes.resnet.images import thin

        keep = {"train": self.train_rows, "eval": self.eval_rows}.get(split, 0)
        return thin(count, keep) if keep else np.arange(count)


@dataclass(kw_only=True)
class FolderOptions(DataOptions, SourceOptions):
    """Small images, decoded once."""


def _can_write(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
