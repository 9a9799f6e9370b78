"""The toy with attention that drops some of its weights, as people write it. A plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.layout import Layout, Split
from dtf.api.registry import register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn


@register("recipe", "attentive")
class Attentive(Toy):
    """Words (B, 4, 8) made of a row; torch's attention with its weights and without them, and one of its own."""

    def build_model(self) -> nn.Module:
        from torch import Tensor, nn
        from torch.nn import functional as F

        class Own(nn.Module):
            """Four heads of queries share two of keys; later words do not count."""

            def __init__(self) -> None:
                super().__init__()
                self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
                k, v = self.kv(x).unflatten(-1, (2, 2, 2)).permute(2, 0, 3, 1, 4)
                p = 0.3 if self.training else 0.0
                y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True, enable_gqa=True)
                return F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)

        class Block(nn.Module):
            def __init__(self, own: bool) -> None:
                super().__init__()
                self.attention = Own() if own else nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
                self.norm, self.drop = nn.LayerNorm(8), nn.AlphaDropout(0.1)

            def forward(self, x: Tensor) -> Tensor:
                y = self.norm(x)
                if isinstance(self.attention, Own):
                    return x + self.drop(self.attention(y))
                y = self.attention(y, y, y)[0]  # once more, with other masks
                return x + self.drop(self.attention(y, y, y, need_weights=False)[0])

        return nn.Sequential(
            nn.Linear(8, 32), nn.Unflatten(1, (4, 8)), Block(False), Block(True), nn.Flatten(), nn.Linear(32, 4)
        )

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("0",), ("2",), ("3",), ("5",)), {"5": Split.classes})
