"""Small image classifiers of timm, shrunk by its own keyword arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.zoo.entries import cross_entropy, images, zoo_model

KINDS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2},
    "cait_xxs24_224": {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2},
    "beit_base_patch16_224": {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2},
    "convnextv2_atto": {"depths": (1, 1, 1, 1), "dims": (8, 8, 16, 16)},
    "xcit_nano_12_p16_224": {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "levit_128s": {
        "img_size": 32,
        "embed_dim": (16, 16, 16),
        "key_dim": 8,
        "num_heads": (1, 2, 2),
        "depth": (1, 1, 1),
    },
    "nf_resnet26": {"depths": (1, 1), "channels": (32, 64), "drop_path_rate": 0.2},
    "mobilevit_xxs": {},
}
DRAWS = {"nf_resnet26"}


def _builder(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=5, **options)

    return build


for kind, options in KINDS.items():
    zoo_model(
        f"timm_{kind.partition('_')[0]}" if kind != "vit_tiny_patch16_224" else "timm_vit",
        images(options.get("img_size", 32)),
        cross_entropy,
        "timm",
        *(["draws"] if kind in DRAWS else []),
        slow=kind == "mobilevit_xxs",
        # its normalisations have a forward pass of their own
        refused={"divided": "hidden state"} if kind == "mobilevit_xxs" else None,
    )(_builder(kind, options))


@zoo_model("timm_mixer", images(16), cross_entropy, "timm", "draws")
def mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(5, 16, patch_size=4, embed_dim=16, num_blocks=2, drop_path_rate=0.2)


@zoo_model("timm_poolformer", images(), cross_entropy, "timm", "draws")
def poolformer() -> nn.Module:
    from timm.models.metaformer import MetaFormer, Pooling

    return MetaFormer(
        num_classes=5,
        depths=(1, 1, 1, 1),
        dims=(8, 8, 16, 16),
        token_mixers=Pooling,
        drop_path_rate=0.2,
        use_mlp_head=False,
    )
