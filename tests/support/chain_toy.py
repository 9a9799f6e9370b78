"""The toy with residual blocks on rows that are augmented, mixed in pairs and shown in several views.

A plugin: `plugins=[tests.support.chain_toy]`. It registers the other toys of chains, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.core.seeding import draws
from tests.support import coupled_toy, sparse_toy  # noqa: F401 (they register themselves)
from tests.support.residual_toy import Residual
from tests.support.toy import Rows

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from dtf.core.types import Batch

SHAPE = (1, 2, 4)
"""A row of eight numbers as an image, for mixing."""


@register("recipe", "chain_toy")
class ChainToy(Residual):
    """With `mixup` or `cutmix` targets are (class, class of the partner, share), as those of photos."""

    noise: float = option(default=0.3, doc="strength of the augmentation")
    mixup: float = option(default=0.0, doc="alpha of mixup; 0: not")
    cutmix: float = option(default=0.0, doc="alpha of cutmix; 0: not")

    @property
    def pairs(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.get_submodule("stem").register_parameter(
            "bias", None
        )  # the norm cancels it: its gradient would be rounding alone
        return model

    def open_data(self, split: str, seed: int) -> Dataset:
        if split != "train":
            return super().open_data(split, seed)
        return Augmented(self.rows, seed, self.noise, (self.mixup, self.cutmix) if self.pairs else None)

    def receive(self, inputs: Any) -> Tensor:
        from dtf.recipes.resnet.augment import mix

        if not isinstance(inputs, dict):
            return inputs
        return mix(inputs["rows"].unflatten(1, SHAPE), inputs["mixing"]).flatten(1)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        if targets.ndim == 1:
            return super().loss(outputs, targets)
        own, partner, share = targets.unbind(1)
        return share * super().loss(outputs, own.long()) + (1 - share) * super().loss(outputs, partner.long())

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        if batch.targets.ndim > 1:
            batch = batch._replace(targets=batch.targets[:, 0].long())
        return super().measure(outputs, batch, loss)


class Augmented(Dataset):
    """The toy's rows, changed by what is drawn for (epoch, id)."""

    prefetch = 0
    repeats = True

    def __init__(self, rows: int, seed: int, noise: float, alphas: tuple[float, float] | None) -> None:
        from dtf.recipes.resnet.augment import Mix

        self._plain, self._seed, self._noise = Rows(rows, "train", -1), seed, noise
        self._mix = Mix(*alphas) if alphas else None

    def __len__(self) -> int:
        return len(self._plain)

    def groups(self) -> np.ndarray:
        import numpy as np

        return self._plain.fetch(np.arange(len(self)), 0)[1].numpy()

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        import torch

        from dtf.recipes.resnet.augment import MIX_DRAWS

        uniform = draws(self._seed, epoch, ids, 8 + MIX_DRAWS)
        inputs, targets = self._plain.fetch(ids % len(self), epoch)
        inputs = inputs + self._noise * torch.from_numpy(uniform[:, :8] - 0.5).float()
        if self._mix is None:
            return inputs, targets
        mixing, targets = self._mix.draw(uniform[:, 8:], targets.numpy(), *SHAPE[1:])
        return {"rows": inputs, "mixing": mixing}, targets
