"""Names of networks, and what is to be known of each before torch is imported: the small ones, all classifiers of
torchvision, and those of timm.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from dtf.core.errors import ConfigError
from dtf.core.text import suggest

SMALL = {f"resnet{depth}": depth for depth in (8, 14, 20, 32, 44, 56, 110)}
"""Networks for small images -> depth."""

TIMM = "timm/"
"""What stands before the name of a network of timm."""


@dataclass(frozen=True)
class Family:
    """Networks of torchvision that are alike."""

    names: str
    """Parted by blanks."""

    heads: str = "fc"
    """The layers that have an output for each class, parted by blanks."""

    least: int = 8
    """Height and width of the smallest images that they take."""

    auxiliary: float = 0.0
    """Weight of the losses of its auxiliary outputs, which only training has."""

    sized: int = 0
    """Of networks made for images of one size: what height and width are a multiple of; 0: they take any size."""


RESNETS = Family(
    "resnet18 resnet34 resnet50 resnet101 resnet152 resnext50_32x4d resnext101_32x8d resnext101_64x4d wide_resnet50_2 "
    "wide_resnet101_2"
)
FAMILIES = {
    "alexnet": Family("alexnet", "classifier.6", 63),
    "convnext": Family("convnext_tiny convnext_small convnext_base convnext_large", "classifier.2", 32),
    "densenet": Family("densenet121 densenet161 densenet169 densenet201", "classifier", 29),
    "efficientnet": Family(
        "efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4 efficientnet_b5 "
        "efficientnet_b6 efficientnet_b7",
        "classifier.1",
    ),
    "efficientnet_v2": Family("efficientnet_v2_s efficientnet_v2_m efficientnet_v2_l", "classifier.1"),
    "googlenet": Family("googlenet", "fc aux1.fc2 aux2.fc2", 15, auxiliary=0.3),
    "inception": Family("inception_v3", "fc AuxLogits.fc", 299, auxiliary=0.4),
    "maxvit": Family("maxvit_t", "classifier.5", 224, sized=224),
    "mnasnet": Family("mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3", "classifier.1"),
    "mobilenet_v2": Family("mobilenet_v2", "classifier.1"),
    "mobilenet_v3": Family("mobilenet_v3_small mobilenet_v3_large", "classifier.3"),
    "regnet_x": Family(
        "regnet_x_400mf regnet_x_800mf regnet_x_1_6gf regnet_x_3_2gf regnet_x_8gf regnet_x_16gf regnet_x_32gf"
    ),
    "regnet_y": Family(
        "regnet_y_400mf regnet_y_800mf regnet_y_1_6gf regnet_y_3_2gf regnet_y_8gf regnet_y_16gf regnet_y_32gf "
        "regnet_y_128gf"
    ),
    "resnet": RESNETS,
    "shufflenet": Family("shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5 shufflenet_v2_x2_0"),
    "squeezenet": Family("squeezenet1_1 squeezenet1_0", "classifier.1", 21),
    "swin": Family("swin_t swin_s swin_b", "head"),
    "swin_v2": Family("swin_v2_t swin_v2_s swin_v2_b", "head"),
    "vgg": Family("vgg11 vgg13 vgg16 vgg19", "classifier.6", 32),
    "vgg_bn": Family("vgg11_bn vgg13_bn vgg16_bn vgg19_bn", "classifier.6", 32),
    "vit_16": Family("vit_ti_16 vit_s_16 vit_b_16 vit_l_16", "heads.head", 16, sized=16),
    "vit_32": Family("vit_b_32 vit_l_32", "heads.head", 32, sized=32),
    "vit_14": Family("vit_h_14", "heads.head", 14, sized=14),
}
"""All classifiers of torchvision, and two smaller vision transformers; the smallest of a family first."""

SMALL_VITS = {"vit_ti_16": (192, 3), "vit_s_16": (384, 6)}
"""Vision transformers that torchvision has no name for -> width and heads. Twelve blocks, as vit_b_16 has. Source:
Touvron et al. 2021 (arXiv:2012.12877), table 1.
"""

FAMILY_OF = {name: family for family in FAMILIES.values() for name in family.names.split()}
LARGE = tuple(RESNETS.names.split())
"""Torchvision's residual networks, which have a stem of two kinds."""

OLDER_NAMES = (
    (r"(denselayer\d+\.(?:norm|conv))\.([12]\.)", r"\1\2"),
    (r"(mlp)\.linear_1\.", r"\1.0."),
    (r"(mlp)\.linear_2\.", r"\1.3."),
)
"""Patterns of names in torchvision's files of weights that are older than its DenseNet and ViT, and what they are."""

_REGISTERED = re.compile(r"^@register_model\s*\ndef (\w+)\(", re.MULTILINE)


def check_arch(arch: str) -> None:
    """Raise ConfigError for a name that no network has. Torch-free: names of timm are read from its files."""
    key = f"recipe.model.arch={arch}"
    if not arch.startswith(TIMM):
        if arch not in SMALL and arch not in FAMILY_OF:
            plain = re.sub(r"^timm[._:]", "", arch)
            near, choices, names = suggest(arch, [*SMALL, *FAMILY_OF]).partition("choices")
            if find_spec("timm") is not None and plain.partition(".")[0] in timm_names():
                near = f"did you mean {TIMM}{plain}? "
            said = near or f"{choices}{names}; "  # the names of 90 networks would hide the near one
            raise ConfigError(f"{key} is no network; {said}networks of timm are {TIMM}NAME")
        return
    if find_spec("timm") is None:
        raise ConfigError(f"{key} needs timm, which is not installed; pip install 'dtf[timm]'")
    known = timm_names()
    name = arch.removeprefix(TIMM).partition(".")[0]
    if name not in known:
        near = suggest(name, known).partition("; ")[0].partition("? choices")[0]
        more = f"; {near.removesuffix('?')}?" if near.startswith("did you mean") else ""
        raise ConfigError(f"{key}: timm has no {name}{more}; timm.list_models() names its {len(known):,} networks")


@lru_cache(maxsize=1)
def timm_names() -> frozenset[str]:
    """The networks of the timm that is installed, without those of older names. It is not imported."""
    spec = find_spec("timm")
    folders = spec.submodule_search_locations if spec is not None else None
    files = [path for folder in folders or () for path in sorted(Path(folder, "models").glob("*.py"))]
    return frozenset(name for path in files for name in _REGISTERED.findall(path.read_text(encoding="utf-8")))


def check_pixels(arch: str, pixels: int, smallest: int) -> None:
    """Raise ConfigError for images that a network of torchvision does not take. `smallest`: that it meets in training,
    less than `pixels` where images grow.
    """
    family = FAMILY_OF.get(arch)
    if family is None:
        return
    key, made = f"recipe.data.pixels={pixels}", f"recipe.model.arch={arch}"
    if family.sized and pixels % family.sized:
        below = max(pixels // family.sized, 1) * family.sized
        near = f"{below} or {below + family.sized}" if below < pixels else f"{below}"
        raise ConfigError(f"{key}: {made} takes images of a multiple of {family.sized} pixels; use {near}")
    if pixels < family.least:
        raise ConfigError(f"{key}: {made} takes images of at least {family.least} pixels; use {family.least}")
    if smallest < pixels and (family.sized or smallest < family.least):
        what = "images of one size" if family.sized else f"images of at least {family.least} pixels"
        raise ConfigError(
            f"recipe.data.grow_from={smallest}: {made} takes {what}; use recipe.data.grow_from=0 and "
            "recipe.data.grow_epochs=0"
        )
