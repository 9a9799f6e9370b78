"""Recipes for networks on labelled images: they put network, data and loss together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dtf.api.layout import Layout
from dtf.api.layout import Split as Cut
from dtf.api.recipe import Dataset, Recipe, Split
from dtf.api.registry import option, register
from dtf.api.sampler import RowTrait
from dtf.core.errors import ConfigError
from dtf.recipes.resnet.archs import FAMILY_OF, LARGE, SMALL, TIMM, check_pixels
from dtf.recipes.resnet.options import FOLDERS, FolderOptions, ModelOptions, ShapesOptions, SplitOptions, Stem

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from dtf.api.recipe import Dataset
    from dtf.core.types import Batch
    from dtf.recipes.resnet.cache import Decoded
    from dtf.recipes.resnet.images import Images
    from dtf.recipes.resnet.tree import Tree


BASIC = {*SMALL, "resnet18", "resnet34"}
"""Residual networks of blocks with two convolutions; the others have bottlenecks of three."""


@dataclass(kw_only=True)
class Classification(Recipe):
    """A network that classifies images. Subclasses say where the images come from."""

    model: ModelOptions = option(factory=ModelOptions, doc="the network")
    label_smoothing: float = option(
        default=0.0,
        least=0,
        below=1,
        doc="share of the target that is spread over all classes (Szegedy et al. 2016, arXiv:1512.00567)",
    )
    data: SplitOptions = option(factory=SplitOptions, doc="the images")

    @property
    def row_traits(self) -> tuple[RowTrait, ...]:
        return tuple(RowTrait)

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "top1", "top5") if self.model.classes > 5 else ("loss", "top1")

    @property
    def objective(self) -> tuple[str, str]:
        return ("top1", "max")

    def training_rows(self) -> int | None:
        return self.data.train_rows or None

    stem_of_large: ClassVar[Stem] = Stem.cifar
    """What stem=auto means for torchvision's residual networks."""

    def inactive_keys(self) -> dict[str, str]:
        return {f"recipe.model.{key}": "recipe.model.arch" for key in self.model.inactive_keys()}

    def check(self) -> None:
        self.model.check()
        check_pixels(self.model.arch, self.data.pixels, self.data.smallest)
        self.data.check()

    def use_classes(self, names: Sequence[str]) -> None:
        self._known_classes = tuple(names)

    def labels(self, classes: Sequence[str], counts: Sequence[int]) -> np.ndarray:
        """The label of each row, int64, of so many rows of each class. DataError for classes that are not the
        model's.
        """
        import numpy as np

        from dtf.recipes.resnet.tree import labels_of

        known = getattr(self, "_known_classes", ())
        places = labels_of(classes, known, self.model.classes, getattr(self.data, "root", ""))
        return np.repeat(np.array(places, np.int64), counts)

    def build_model(self) -> nn.Module:
        from dtf.recipes.resnet import model

        options = self.model
        if options.arch in SMALL:
            depth = SMALL[options.arch]
            return model.SmallResNet(depth, options.width or 16, options.classes, options.zero_init_residual)
        if options.arch in LARGE:
            stem = self.stem_of_large if options.stem is Stem.auto else options.stem
            return model.large(options.arch, stem.name, options.classes, options.zero_init_residual)
        if options.arch in FAMILY_OF:
            return model.of_torchvision(options.arch, options.classes, self.data.pixels)
        return model.of_timm(options.arch.removeprefix(TIMM), options.classes, self.data.pixels)

    def layout(self, model: nn.Module) -> Layout:
        from dtf.recipes.resnet.model import heads, own_averages

        ends = dict.fromkeys(heads(self.model.arch, model), Cut.classes)
        if not self.model.is_resnet:
            return Layout(splits=ends, buffers=own_averages(model))  # its blocks are found
        stages = [name for name, _ in model.named_children() if name.startswith("layer")]
        residual = [
            (f"{stage}.{block}",) for stage in stages for block, _ in model.get_submodule(stage).named_children()
        ]
        last = (
            {"conv2": Cut.row}
            if self.model.arch in BASIC
            else {"conv2": Cut.row_scatter, "bn2": Cut.local, "conv3": Cut.row}
        )
        if "resnext" in self.model.arch:
            last["conv2"] = Cut.local  # its channels come in groups
        inside = {"conv1": Cut.column, "bn1": Cut.local, **last}
        splits = {f"{block}.{name}": split for (block,) in residual for name, split in inside.items()}
        return Layout((("conv1", "bn1"), *residual, ("fc",)), {**splits, **ends})

    @abstractmethod
    def open_data(self, split: str, seed: int) -> Dataset: ...

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        from dtf.model.losses import cross_entropy

        def of(scores: Tensor) -> Tensor:
            wide = scores.float() if scores.dtype.itemsize < 4 else scores
            return cross_entropy(wide, targets, self.label_smoothing)

        if not isinstance(outputs, tuple):
            return of(outputs)
        total = of(outputs[0])
        for scores in outputs[1:]:  # of auxiliary outputs, which only training has
            total = total + FAMILY_OF[self.model.arch].auxiliary * of(scores)
        return total

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        from dtf.model.losses import target_rank
        from dtf.model.metrics import weighted_sums

        scores = outputs[0] if isinstance(outputs, tuple) else outputs
        place = target_rank(scores, batch.targets)
        return weighted_sums(batch.weight, loss, *(place <= k for k in (1, 5)[: len(self.train_metrics) - 1]))

    @abstractmethod
    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation of red, green and blue in [0, 1]."""

    def preprocessing(self) -> dict[str, Any]:
        from dtf.recipes.resnet.preprocessing import of_squares

        return of_squares(self.data.pixels, *self.normalisation())

    def open_inputs(self, path: Path) -> tuple[list[str], Dataset]:
        from dtf.recipes.resnet.unlabelled import Unlabelled, list_inputs

        found = list_inputs(path)
        return found.names, Unlabelled(path, found, self.data.pixels, *self.normalisation())


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
    """Images from class folders or an archive of them. They are decoded once, and kept for later runs."""

    data: FolderOptions = option(factory=FolderOptions, doc="the images")
    splits = tuple(Split)

    def check(self) -> None:
        super().check()
        images = self._images(self.needed_splits)
        self.data.check_against(images, self.model.classes, self.needed_splits)

    def class_names(self) -> tuple[str, ...]:
        if not self.data.root or not self.data.places()[0].exists():
            return ()
        return self._images(()).classes

    def _images(self, splits: tuple[Split, ...]) -> Decoded | Tree:
        """What is known of the images without decoding them. DataError where one of these splits is not there."""
        from dtf.recipes.resnet import cache, tree

        root, store = self.data.places()
        folders = [FOLDERS[split.value] for split in splits]
        place = cache.location(root, self.data.pixels, store, "test" if folders == ["test"] else "train")
        decoded = cache.glance(place, self.data.pixels)
        if decoded and all(decoded.rows(folder) for folder in folders):
            return decoded
        found = tree.read_tree(root)
        found.check(folders)
        return found

    def normalisation(self) -> tuple[Sequence[float], Sequence[float]]:
        return self.data.mean, self.data.std

    def open_data(self, split: str, seed: int) -> Images:
        import numpy as np

        from dtf.recipes.resnet.cache import decoded
        from dtf.recipes.resnet.images import Images

        data, train, name = self.data, split == "train", FOLDERS[split]
        root, store = data.places()
        decoded_tree = decoded(root, data.pixels, store, name)
        pixels = np.asarray(np.memmap(decoded_tree.file(name), np.uint8, "r")).reshape(-1, data.pixels, data.pixels, 3)
        labels = self.labels(decoded_tree.classes, decoded_tree.counts[name])
        rows = data.rows(split, len(labels))
        if len(rows) < len(labels):
            pixels, labels = pixels[rows], labels[rows]
        images = Images(
            pixels,
            labels,
            data.mean,
            data.std,
            crop_pad=data.crop_pad * train,
            flip=data.flip and train,
            seed=seed,
            digest=f"{decoded_tree.digests[name]:08x}",
        )
        images.left_out = decoded_tree.left_out
        return images
