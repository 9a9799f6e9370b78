# pyright: basic
"""What dtf asks of transformers, for tests where it is not installed."""

from types import SimpleNamespace

import torch
from torch import nn


class PreTrainedModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = SimpleNamespace(**{"num_labels": 2, **vars(config)})


def default_data_collator(rows):
    return {("labels" if key == "label" else key): torch.tensor([row[key] for row in rows]) for key in rows[0]}
