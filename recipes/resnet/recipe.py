"""Residual networks on labelled images: what the config says of them, and the recipes that put network, data and loss
together.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout, Split
from dtf.api.options import FineTuning
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, DataError
from dtf.recipes.resnet.tree import SHAPE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtf.api.recipe import Dataset
    from dtf.core.types import Batch
    from dtf.recipes.resnet.cache import Decoded
    from dtf.recipes.resnet.images import Images
    from dtf.recipes.resnet.tree import Tree


class Arch(Enum):
    """Networks by name; SMALL says which are for small images."""

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
        "section 4.2), the others "
        "are torchvision's, and their weight files fit",
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
        doc="start each residual block as the identity: the weight of its last normalisation is drawn as zero",
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
        doc="training images are cut at random out of themselves with a border of zeros this wide; 0: not",
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
        doc="training images are cut at random out of themselves with a border of zeros this wide; 0: not",
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
        doc="folder for what is made of it once, which may be deleted at any time; empty: $XDG_CACHE_HOME/dtf/images "
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

    def check_against(self, found: Decoded | Tree, classes: int) -> None:
        """Raise ConfigError where the images found do not fit these options and the model's number of classes."""
        if len(found.classes) != classes:
            raise ConfigError(
                f"recipe.model.classes={classes}, but {self.root} has {len(found.classes)} classes; set "
                f"recipe.model.classes={len(found.classes)}"
            )
        for key, split in (("train_rows", "train"), ("eval_rows", "val")):
            if getattr(self, key) > sum(found.counts[split]):
                raise ConfigError(
                    f"recipe.data.{key}={getattr(self, key)}, but {split}/ has {sum(found.counts[split])} images; use "
                    "0 for all"
                )


@dataclass(kw_only=True)
class FolderOptions(DataOptions, SourceOptions):
    """Small images, decoded once."""


@dataclass(kw_only=True)
class Classification(Recipe):
    """A residual network that tells classes of images apart. The kinds of images are left to subclasses."""

    model: ModelOptions = option(factory=ModelOptions, doc="the network")
    label_smoothing: float = option(
        default=0.0,
        least=0,
        below=1,
        doc="share of the target that is spread over all classes (Szegedy et al. 2016, arXiv:1512.00567)",
    )
    data: SplitOptions = option(factory=SplitOptions, doc="the images")

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "top1", "top5") if self.model.classes > 5 else ("loss", "top1")

    @property
    def objective(self) -> tuple[str, str]:
        return ("top1", "max")

    def training_rows(self) -> int | None:
        return self.data.train_rows or None

    def check(self) -> None:
        self.model.check()
        self.data.check()

    def build_model(self) -> nn.Module:
        from dtf.recipes.resnet import model

        options = self.model
        if options.arch in SMALL:
            return model.SmallResNet(SMALL[options.arch], options.width or 16, options.classes)
        return model.large(options.arch.name, options.stem.name, options.classes)

    def initialise(self, name: str, module: nn.Module) -> None:
        from dtf.recipes.resnet import model

        model.draw(name, module, self.model.zero_init_residual, last_norm="bn2" if self.model.arch in BASIC else "bn3")

    def layout(self, model: nn.Module) -> Layout:
        stages = [name for name, _ in model.named_children() if name.startswith("layer")]
        residual = [
            (f"{stage}.{block}",) for stage in stages for block, _ in model.get_submodule(stage).named_children()
        ]
        last = (
            {"conv2": Split.row}
            if self.model.arch in BASIC
            else {"conv2": Split.row_scatter, "bn2": Split.local, "conv3": Split.row}
        )
        if "resnext" in self.model.arch.name:
            last["conv2"] = Split.local  # its channels come in groups
        inside = {"conv1": Split.column, "bn1": Split.local, **last}
        splits = {f"{block}.{name}": split for (block,) in residual for name, split in inside.items()}
        return Layout((("conv1", "bn1"), *residual, ("fc",)), {**splits, "fc": Split.classes})

    @abstractmethod
    def open_data(self, split: str, seed: int) -> Dataset: ...

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from dtf.model.losses import cross_entropy

        return cross_entropy(outputs.float() if outputs.dtype.itemsize < 4 else outputs, targets, self.label_smoothing)

    def measure(self, outputs: Tensor, batch: Batch, loss: Tensor) -> Tensor:
        from dtf.model.losses import rank
        from dtf.model.metrics import weighted_sums

        place = rank(outputs, batch.targets)
        return weighted_sums(batch.weight, loss, *(place <= k for k in (1, 5)[: len(self.train_metrics) - 1]))

    @abstractmethod
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation of red, green and blue in [0, 1]."""

    def preprocessing(self) -> dict[str, Any]:
        mean, std = self.normalisation()
        steps = [
            "decode to RGB",
            f"cut out the largest centred square and resize it to {self.data.pixels} x {self.data.pixels} pixels "
            "(bilinear, antialiased)",
            "divide by 255, subtract mean, divide by std, for each channel",
            "order as (batch, channel, row, column)",
        ]
        return {"steps": steps, "pixels": self.data.pixels, "channels": "RGB", "mean": [*mean], "std": [*std]}

    def open_inputs(self, path: Path) -> tuple[list[str], Dataset]:
        from dtf.recipes.resnet.unlabelled import Unlabelled, image_names

        names = image_names(path)
        return names, Unlabelled(path, names, self.data.pixels, *self.normalisation())


@register("recipe", "resnet_shapes")
class ResnetShapes(Classification):
    """Eight kinds of coloured shapes, drawn as they are read: no files needed."""

    model: ModelOptions = option(factory=lambda: ModelOptions(classes=8), doc="the network")
    data: ShapesOptions = option(factory=ShapesOptions, doc="the images")

    def check(self) -> None:
        super().check()
        if self.model.classes > 8:
            raise ConfigError(f"recipe.model.classes={self.model.classes}, but there are 8 kinds of shapes; use 2 to 8")

    def class_names(self) -> tuple[str, ...]:
        from dtf.recipes.resnet.shapes import KINDS

        return KINDS[: self.model.classes]

    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        from dtf.recipes.resnet.shapes import MEAN, STD

        return MEAN, STD

    def open_data(self, split: str, seed: int) -> Images:
        from dtf.recipes.resnet.shapes import Shapes

        data, train = self.data, split == "train"
        rows = data.train_rows if train else data.eval_rows
        return Shapes(
            rows,
            data.pixels,
            self.model.classes,
            data.seed,
            split,
            crop_pad=data.crop_pad * train,
            flip=data.flip and train,
            augment_seed=seed,
        )


@register("recipe", "resnet_cifar10")
class ResnetFolder(Classification):
    """Images from class folders or an archive of them. Decoded once, then kept for later runs."""

    data: FolderOptions = option(factory=FolderOptions, doc="the images")

    def check(self) -> None:
        from dtf.recipes.resnet import cache, tree

        super().check()
        root, store = self.data.places()
        found = cache.glance(cache.location(root, self.data.pixels, store), self.data.pixels) or tree.read_tree(root)
        self.data.check_against(found, self.model.classes)

    def class_names(self) -> tuple[str, ...]:
        from dtf.recipes.resnet import cache, tree

        root, store = self.data.places()
        if not self.data.root or not root.exists():
            return ()
        return (
            cache.glance(cache.location(root, self.data.pixels, store), self.data.pixels) or tree.read_tree(root)
        ).classes

    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        return self.data.mean, self.data.std

    def open_data(self, split: str, seed: int) -> Images:
        import numpy as np

        from dtf.recipes.resnet.cache import decoded
        from dtf.recipes.resnet.images import Images, thin

        data, train = self.data, split == "train"
        name, keep = ("train", data.train_rows) if train else ("val", data.eval_rows)
        root, store = data.places()
        found = decoded(root, data.pixels, store, name)
        pixels = np.asarray(np.memmap(found.file(name), np.uint8, "r")).reshape(-1, data.pixels, data.pixels, 3)
        labels = np.repeat(np.arange(len(found.classes)), found.counts[name])
        if keep:
            rows = thin(len(labels), keep)
            pixels, labels = pixels[rows], labels[rows]
        digest = f"{found.digests[name]:08x}"
        return Images(
            pixels,
            labels,
            data.mean,
            data.std,
            crop_pad=data.crop_pad * train,
            flip=data.flip and train,
            seed=seed,
            digest=digest,
        )


def _can_write(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
