"""The networks: torchvision's, timm's, and the small residual ones for 32-pixel images.

Says nothing about how they are trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from dtf.api.layout import BufferUpdate
from dtf.core.errors import ConfigError
from dtf.recipes.resnet.archs import FAMILY_OF, SMALL, SMALL_VITS, TIMM


class Pad(nn.Module):
    """A shortcut without parameters: take every `stride`-th pixel and append zero channels, (B, C, H, W) -> (B,
    channels, H/stride, W/stride).

    Source: option A of He et al. 2015 (arXiv:1512.03385), sections 3.3 and 4.2.
    """

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.channels, self.stride = channels, stride

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return nn.functional.pad(x, (0, 0, 0, 0, 0, self.channels - x.shape[1]))

    def extra_repr(self) -> str:
        return f"channels={self.channels}, stride={self.stride}"


class SmallResNet(nn.Module):
    """Depth 6n + 2 in three stages of n blocks each, for small images; parameters are named as in torchvision's
    networks.

    `zero_init_residual`: the last normalisation of each block starts at weight 0, so that blocks start as the identity.
    Sources: He et al. 2015 (arXiv:1512.03385), section 4.2, where `width` is 16; Goyal et al. 2017 (arXiv:1706.02677),
    section 5.1.
    """

    def __init__(self, depth: int, width: int, classes: int, zero_init_residual: bool = False) -> None:
        super().__init__()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"depth={depth} is not 6n + 2")
        self.conv1 = nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(width, width, blocks, stride=1)
        self.layer2 = _stage(width, 2 * width, blocks, stride=2)
        self.layer3 = _stage(2 * width, 4 * width, blocks, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)
        _draw(self)
        for name, parameter in self.named_parameters():
            if zero_init_residual and name.endswith("bn2.weight"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _stage(before: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    shortcut = Pad(channels, stride) if stride > 1 or before != channels else None
    return nn.Sequential(
        BasicBlock(before, channels, stride, shortcut), *(BasicBlock(channels, channels) for _ in range(blocks - 1))
    )


def large(arch: str, stem: str, classes: int, zero_init_residual: bool) -> nn.Module:
    """One of torchvision's residual networks, `arch` by torchvision's name; it draws its parameters itself.

    `stem=cifar` makes the first convolution 3x3 with stride 1 and takes out the max-pooling, so that 32-pixel images
    keep their resolution; names stay, and all shapes but that of `conv1.weight`.
    """
    from torchvision.models import get_model

    network = get_model(arch, weights=None, num_classes=classes, zero_init_residual=zero_init_residual)
    if stem == "cifar":
        network.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        network.maxpool = nn.Identity()
        _draw(network.conv1)
    return network


def of_torchvision(arch: str, classes: int, pixels: int) -> nn.Module:
    """Another classifier of torchvision, `arch` by its name or one of SMALL_VITS, as its constructor makes it.

    Networks made for images of one size are made for `pixels`. Those with auxiliary outputs have them, and normalise
    their inputs as torchvision's files of weights want it (`transform_input`).
    """
    from torchvision.models import VisionTransformer, get_model

    if arch in SMALL_VITS:
        width, heads = SMALL_VITS[arch]
        return VisionTransformer(pixels, 16, 12, heads, width, 4 * width, num_classes=classes)
    more: dict[str, Any] = {}
    if FAMILY_OF[arch].auxiliary:
        more = {"aux_logits": True, "transform_input": True, "init_weights": True}
    elif arch.startswith("maxvit"):
        more = {"input_size": (pixels, pixels)}
    elif FAMILY_OF[arch].sized:
        more = {"image_size": pixels}
    return get_model(arch, weights=None, num_classes=classes, **more)


def of_timm(name: str, classes: int, pixels: int) -> nn.Module:
    """A network of timm by its name, perhaps with a tag, as its constructor makes it. Nothing is downloaded.

    Networks made for images of one size are made for `pixels`, where they can be. ConfigError where timm cannot.
    """
    import timm

    made, key = f"recipe.model.arch={TIMM}{name}", f"recipe.data.pixels={pixels}"
    try:
        known: Any = timm.get_pretrained_cfg(name, allow_unregistered=False)
        own = known.input_size[-1]
        more: dict[str, Any] = {"img_size": pixels} if known.fixed_input_size and pixels != own else {}
        return timm.create_model(name, pretrained=False, num_classes=classes, **more)
    except RuntimeError as error:
        raise ConfigError(f"{made}: {error}") from error
    except (TypeError, AssertionError) as error:
        raise ConfigError(
            f"{key}: {made} cannot be made for images of that size ({error or type(error).__name__}); use "
            f"recipe.data.pixels={own}"
        ) from error


def heads(arch: str, network: nn.Module) -> list[str]:
    """Names of the layers that have an output for each class."""
    if arch in SMALL:
        return ["fc"]
    if arch in FAMILY_OF:
        return FAMILY_OF[arch].heads.split()
    named = network.pretrained_cfg.get("classifier") or ()  # type: ignore[union-attr, operator]
    names = [named] if isinstance(named, str) else [*named]
    return [name for name in names if any(True for _ in network.get_submodule(name).parameters())]


def own_averages(network: nn.Module) -> dict[str, BufferUpdate]:
    """What becomes of the running averages of timm's batch normalisations, which have a forward pass of their own (with
    an activation in it): the mean over the micro-batches of a step, as of torch's.
    """
    norms = nn.modules.batchnorm._BatchNorm
    return {
        name: BufferUpdate.mean
        for name, module in network.named_modules()
        if isinstance(module, norms) and type(module).__module__.startswith("timm.") and module.track_running_stats
    }


def _draw(convolutions: nn.Module) -> None:
    """Draw the convolutions in a module by the rule of torchvision's `ResNet.__init__`.

    Source: He et al. 2015 (arXiv:1502.01852), section 2.2.
    """
    for module in convolutions.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
