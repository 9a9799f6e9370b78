"""A tiny member of each family of image classifiers of torchvision. What cannot be made small is slow."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models import convnext, efficientnet, mobilenetv3, regnet, resnet, swin_transformer
from torchvision.models import vgg as vgg_module

from tests.zoo.entries import cross_entropy, images, zoo_model

CLASSES = 5


@zoo_model("alexnet", images(64), cross_entropy, "torchvision", "draws", slow=True)
def alexnet() -> nn.Module:
    return models.AlexNet(num_classes=CLASSES)


@zoo_model("convnext", images(), cross_entropy, "torchvision", "draws")
def tiny_convnext() -> nn.Module:
    settings = [
        convnext.CNBlockConfig(8, 16, 1),
        convnext.CNBlockConfig(16, 24, 1),
        convnext.CNBlockConfig(24, None, 1),
    ]
    return models.ConvNeXt(settings, stochastic_depth_prob=0.3, num_classes=CLASSES)


@zoo_model("convnext_still", images(), cross_entropy, "torchvision")
def convnext_still() -> nn.Module:
    """Without stochastic depth."""
    return models.ConvNeXt([convnext.CNBlockConfig(8, 16, 1), convnext.CNBlockConfig(16, None, 2)], num_classes=CLASSES)


@zoo_model("densenet", images(), cross_entropy, "torchvision")
def densenet() -> nn.Module:
    return models.DenseNet(4, (2, 1, 1, 1), 8, bn_size=2, num_classes=CLASSES)


@zoo_model("densenet_checkpointed", images(), cross_entropy, "torchvision", "draws")
def densenet_checkpointed() -> nn.Module:
    return models.DenseNet(4, (2, 1, 1, 1), 8, bn_size=2, drop_rate=0.2, num_classes=CLASSES, memory_efficient=True)


@zoo_model("efficientnet", images(), cross_entropy, "torchvision", "draws")
def tiny_efficientnet() -> nn.Module:
    block = partial(efficientnet.MBConvConfig, width_mult=1.0, depth_mult=1.0)
    settings = [block(1, 3, 1, 8, 8, 1), block(4, 3, 2, 8, 16, 2), block(4, 5, 2, 16, 16, 1)]
    return models.EfficientNet(settings, dropout=0.2, num_classes=CLASSES)


@zoo_model("efficientnet_v2", images(), cross_entropy, "torchvision", "draws")
def efficientnet_v2() -> nn.Module:
    settings = [
        efficientnet.FusedMBConvConfig(1, 3, 1, 8, 8, 1),
        efficientnet.FusedMBConvConfig(4, 3, 2, 8, 16, 2),
        efficientnet.MBConvConfig(4, 3, 2, 16, 16, 2),
    ]
    norm = partial(nn.BatchNorm2d, eps=1e-03)
    return models.EfficientNet(settings, dropout=0.1, last_channel=32, norm_layer=norm, num_classes=CLASSES)


def with_auxiliary(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of a network with auxiliary heads, which only training has."""
    if isinstance(outputs, Tensor):
        return cross_entropy(outputs, targets)
    main, *others = (cross_entropy(scores, targets) for scores in outputs)
    return main + 0.3 * sum(others, start=torch.zeros_like(main))


@zoo_model("googlenet", images(), with_auxiliary, "torchvision", "draws", slow=True)
def googlenet() -> nn.Module:
    return models.GoogLeNet(num_classes=CLASSES, aux_logits=True, init_weights=True)


@zoo_model("inception", images(107), with_auxiliary, "torchvision", "draws", slow=True)
def inception() -> nn.Module:
    return models.Inception3(num_classes=CLASSES, aux_logits=False, init_weights=True)


@zoo_model("maxvit", images(), cross_entropy, "torchvision", "draws")
def maxvit() -> nn.Module:
    return models.MaxVit((32, 32), 8, 2, [8, 16], [1, 1], 4, 0.2, num_classes=CLASSES)


@zoo_model("mnasnet", images(64), cross_entropy, "torchvision", "draws")
def mnasnet() -> nn.Module:
    return models.MNASNet(0.1, num_classes=CLASSES)


@zoo_model("mobilenet_v2", images(), cross_entropy, "torchvision", "draws")
def mobilenet_v2() -> nn.Module:
    return models.MobileNetV2(CLASSES, 0.25, [[1, 8, 1, 1], [4, 16, 2, 2], [4, 24, 1, 2]])


@zoo_model("mobilenet_v3", images(), cross_entropy, "torchvision", "draws")
def mobilenet_v3() -> nn.Module:
    block = partial(mobilenetv3.InvertedResidualConfig, dilation=1, width_mult=1.0)
    settings = [
        block(8, 3, 8, 8, True, "RE", 2),
        block(8, 3, 24, 16, False, "HS", 2),
        block(16, 5, 32, 16, True, "HS", 1),
    ]
    return models.MobileNetV3(settings, last_channel=32, num_classes=CLASSES)


def _regnet(se_ratio: float | None) -> nn.Module:
    return models.RegNet(
        regnet.BlockParams([1, 2], [8, 16], [8, 8], [1.0, 1.0], [2, 2], se_ratio), CLASSES, stem_width=8
    )


@zoo_model("regnet_x", images(), cross_entropy, "torchvision")
def regnet_x() -> nn.Module:
    return _regnet(None)


@zoo_model("regnet_y", images(), cross_entropy, "torchvision")
def regnet_y() -> nn.Module:
    return _regnet(0.25)


@zoo_model("resnet", images(), cross_entropy, "torchvision")
def bottleneck_resnet() -> nn.Module:
    return models.ResNet(resnet.Bottleneck, [1, 1, 1, 1], CLASSES, zero_init_residual=True, width_per_group=4)


@zoo_model("resnet18", images(), cross_entropy, "torchvision", slow=True)
def resnet18() -> nn.Module:
    return models.resnet18(num_classes=CLASSES)


@zoo_model("resnext", images(), cross_entropy, "torchvision", slow=True)
def resnext() -> nn.Module:
    return models.ResNet(resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=4, width_per_group=4)


@zoo_model("wide_resnet", images(), cross_entropy, "torchvision", slow=True)
def wide_resnet() -> nn.Module:
    return models.ResNet(resnet.Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=128)


@zoo_model("shufflenet", images(), cross_entropy, "torchvision")
def shufflenet() -> nn.Module:
    return models.ShuffleNetV2([1, 2, 1], [8, 16, 24, 32, 32], num_classes=CLASSES)


@zoo_model("squeezenet", images(), cross_entropy, "torchvision", "draws")
def squeezenet() -> nn.Module:
    return models.SqueezeNet("1_1", num_classes=CLASSES)


@zoo_model("swin", images(), cross_entropy, "torchvision", "draws")
def swin() -> nn.Module:
    return models.SwinTransformer([2, 2], 8, [2, 2], [1, 2], [4, 4], stochastic_depth_prob=0.3, num_classes=CLASSES)


@zoo_model("swin_v2", images(), cross_entropy, "torchvision")
def swin_v2() -> nn.Module:
    return models.SwinTransformer(
        [2, 2],
        8,
        [2, 2],
        [1, 2],
        [4, 4],
        stochastic_depth_prob=0.0,
        num_classes=CLASSES,
        block=swin_transformer.SwinTransformerBlockV2,
        downsample_layer=swin_transformer.PatchMergingV2,
    )


@zoo_model("vgg", images(), cross_entropy, "torchvision", "draws", slow=True, precision="fp32")
def vgg() -> nn.Module:
    plan: list[str | int] = [8, "M", 16, "M", 512, "M"]
    return models.VGG(vgg_module.make_layers(plan), num_classes=CLASSES)


@zoo_model("vgg_new_head", images(), cross_entropy, "torchvision")
def vgg_new_head() -> nn.Module:
    """What many do for small pictures: the features as they are, a head of their own."""
    model = models.VGG(vgg_module.make_layers([8, "M", 16, "M"], batch_norm=True), init_weights=False)
    model.avgpool = nn.AdaptiveAvgPool2d(1)
    model.classifier = nn.Sequential(nn.Linear(16, CLASSES))
    return model


@zoo_model("vit", images(16), cross_entropy, "torchvision")
def vit() -> nn.Module:
    return models.VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=CLASSES)


@zoo_model("vit_dropout", images(16), cross_entropy, "torchvision", "draws")
def vit_dropout() -> nn.Module:
    return models.VisionTransformer(16, 4, 2, 2, 16, 32, dropout=0.1, attention_dropout=0.1, num_classes=CLASSES)
