"""`observer=[wandb]`: a run at Weights & Biases, online or offline as the WANDB_* variables say."""

from __future__ import annotations

from dtf.api.registry import option, register
from dtf.observers.tracker import Tracker


@register("observer", "wandb")
class Wandb(Tracker):
    """Show the run at Weights & Biases: `<split>/<metric>` by step, the config, warnings, the best value and how it
    ended. WANDB_MODE=offline keeps it in the run folder, for `wandb sync`.
    """

    project: str = option(default="", doc="empty: WANDB_PROJECT, else the recipe's name")
    entity: str = option(default="", doc="user or team; empty: WANDB_ENTITY, else that of the login")

    package = "wandb"
    requirement = "wandb>=0.19"
