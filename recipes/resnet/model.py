"""Residual networks: torchvision's, and the small ones for 32-pixel images.

Says nothing about how they are trained.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock


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
    """One of torchvision's networks, `arch` by torchvision's name; it draws its parameters itself.

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


def _draw(convolutions: nn.Module) -> None:
    """Draw the convolutions in a module by the rule of torchvision's `ResNet.__init__`.

    Source: He et al. 2015 (arXiv:1502.01852), section 2.2.
    """
    for module in convolutions.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
