"""Config nodes of the networks and of their images: `recipe.model` and `recipe.data`."""

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
from dtf.recipes.resnet.archs import FAMILY_OF, LARGE, OLDER_NAMES, SMALL, TIMM, check_arch
from dtf.recipes.resnet.tree import SHAPE

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy as np

    from dtf.recipes.resnet.cache import Decoded
    from dtf.recipes.resnet.tree import Tree


FOLDERS = {"train": "train", "eval": "val", "test": "test"}
"""Split -> the folder of its images."""


class Stem(Enum):
    auto = "auto"
    cifar = "cifar"
    imagenet = "imagenet"


@dataclass(kw_only=True)
class ModelOptions(FineTuning):
    arch: str = option(
        default="resnet20",
        doc="network: resnet8, 14, 20, 32, 44, 56 and 110 are the small ones for 32-pixel images (He et al. 2015, "
        "section 4.2); all classifiers of torchvision have torchvision's names, such as efficientnet_b0; those of timm "
        "are timm/NAME. Weight files of both fit",
    )
    stem: Stem = option(
        default=Stem.auto,
        doc="first layer of a ResNet: `cifar` 3x3 convolution with stride 1, no pooling; `imagenet` 7x7 with stride 2, "
        "then max-pooling (torchvision's); `auto`: cifar for the small ones, else as the recipe has it. Other networks "
        "have their own",
    )
    classes: int = option(default=10, least=2, doc="outputs")
    width: int = option(
        default=0,
        least=0,
        most=1024,  # a convolution of the last stage then has 600 MB
        doc="channels of the first stage of a small network; 0: 16, as published; other networks have a fixed width",
    )
    zero_init_residual: bool = option(
        default=False,
        doc="start each residual block of a ResNet as the identity: the weight of its last normalisation is "
        "initialised to zero",
    )

    @property
    def is_resnet(self) -> bool:
        """Whether it is a small network, or a residual one of torchvision."""
        return self.arch in SMALL or self.arch in LARGE

    def inactive_keys(self) -> tuple[str, ...]:
        """Names of options that the network does not have."""
        return (
            *(() if self.is_resnet else ("stem", "zero_init_residual")),
            *(() if self.arch in SMALL else ("width",)),
        )

    def check(self) -> None:
        """Raise ConfigError for values that make no network."""
        check_arch(self.arch)
        made = f"recipe.model.arch={self.arch}"
        if self.arch in SMALL and self.stem is Stem.imagenet:
            raise ConfigError(f"recipe.model.stem=imagenet does not exist for {made}; use recipe.model.stem=cifar")
        if self.width and self.arch not in SMALL:
            raise ConfigError(
                f"recipe.model.width={self.width} does not apply to {made}; use 0, or one of {', '.join(SMALL)}"
            )
        if self.is_resnet:
            return
        if self.stem is not Stem.auto:
            raise ConfigError(
                f"recipe.model.stem={self.stem.name} does not apply to {made}, which has a first layer of its own; use "
                "recipe.model.stem=auto"
            )
        if self.zero_init_residual:
            raise ConfigError(
                f"recipe.model.zero_init_residual=true does not apply to {made}; it is for ResNets: use "
                "recipe.model.zero_init_residual=false"
            )

    @property
    def shaped_by(self) -> str:
        family = FAMILY_OF.get(self.arch)
        sized = (family is not None and family.sized) or self.arch.startswith(TIMM)
        return "recipe.model and recipe.data.pixels" if sized else super().shaped_by

    @property
    def older_names(self) -> tuple[tuple[str, str], ...]:
        return OLDER_NAMES


@dataclass(kw_only=True)
class SplitOptions:
    pixels: int = option(default=32, least=8, most=4096, doc="height and width of an image", unit="pixels")
    train_rows: int = option(
        default=0, least=0, doc="rows of the training split, spread evenly over it; 0: all", unit="rows"
    )
    eval_rows: int = option(
        default=0, least=0, doc="rows of the evaluation split, spread evenly over it; 0: all", unit="rows"
    )

    @property
    def smallest(self) -> int:
        """Height and width of the smallest images of a training."""
        return self.pixels

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
