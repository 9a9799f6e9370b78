"""The options of the config group `checkpoint`. Torch-free."""

from __future__ import annotations

from dtf.api.registry import option, register, with_default
from dtf.api.schema import KeyProblem
from dtf.checkpoint.place_names import check_place, is_mistyped, is_url
from dtf.checkpoint.resolve_path import resolve_checkpoints


@register("checkpoint", "every")
class Every:
    """Save regularly, keep the newest and the best checkpoints, and resume from the newest."""

    every_steps: int | None = option(
        default=None,
        least=0,
        doc="save so often, and at the end; null: at each end of an epoch; 0, which is checkpoint=off: never, not even "
        "at the end",
        unit="steps",
    )
    delta_every: int | None = option(
        default=None,
        least=1,
        doc="between these, save so often, and write of sparse tables only the rows that changed since the last save; "
        "null: never",
        unit="steps",
    )
    keep_last: int = option(default=3, least=1, doc="newest checkpoints to keep")
    keep_best: int = option(
        default=1, least=0, doc="best checkpoints to keep beside them; not 0: each new best evaluation is saved"
    )
    background: bool = option(
        default=True,
        doc="training waits for a copy of the state in memory, and a thread writes it; off: it waits for the disk",
    )
    resume: str = option(
        default="auto",
        doc="`auto`: from the newest loadable checkpoint of the run folder, if any; `never`: from step 0, refused "
        "when the run folder holds checkpoints; or a path, of a checkpoint or another run folder, or the URL of a "
        "mirror: from there, until the run folder has checkpoints of its own",
    )
    mirror: str = option(
        default="",
        doc="a second place for the checkpoints that are kept: FOLDER, s3://BUCKET/PATH or gs://BUCKET/PATH, written "
        "beside training; a run folder without checkpoints goes on from there; empty: none",
    )

    def check(self) -> None:
        """Raise KeyProblem for values that make no sense, DataError when there is no checkpoint to resume from.

        Torch-free.
        """
        if not self.resume:
            raise KeyProblem(
                "checkpoint.resume",
                "checkpoint.resume is empty; use auto, never or the path of a checkpoint or run folder",
            )
        if self.delta_every is not None and self.every_steps == 0:
            raise KeyProblem(
                "checkpoint.delta_every",
                f"checkpoint.delta_every={self.delta_every} has no saves to come between, as checkpoint=off saves "
                "nothing; use checkpoint=every, or leave it out",
            )
        if self.delta_every is not None and self.every_steps is not None and self.delta_every >= self.every_steps:
            raise KeyProblem(
                "checkpoint.delta_every",
                f"checkpoint.delta_every={self.delta_every} must be less than "
                f"checkpoint.every_steps={self.every_steps}, between whose saves it saves",
            )
        if self.mirror and self.every_steps == 0:
            raise KeyProblem(
                "checkpoint.mirror",
                f"checkpoint.mirror={self.mirror} has nothing to mirror, as checkpoint=off saves nothing; use "
                "checkpoint=every, or no mirror",
            )
        check_place(self.mirror, "checkpoint.mirror")
        if is_url(self.resume) or is_mistyped(self.resume):
            check_place(self.resume, "checkpoint.resume")
        elif self.resume not in ("auto", "never") and not self.mirror:  # else the mirror may be what is left of it
            resolve_checkpoints(self.resume, "checkpoint.resume")


@register("checkpoint", "off", variant_of="every")
class Off(Every):
    """For trials whose result nobody needs: nothing is written, and a killed run starts over."""

    every_steps: int | None = with_default(Every, "every_steps", 0)
