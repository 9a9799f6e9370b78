"""What the start-up table shows: the run in a dozen lines, for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dtf.api.precision import Cast, Format
from dtf.api.schema import show, to_plain
from dtf.api.strategy import Program
from dtf.config.settings import Settings
from dtf.core.text import bytes_text, count_text
from dtf.core.types import Memory
from dtf.core.version import __version__
from dtf.data.batches import micro_batch_bounds
from dtf.distributed.world import World
from dtf.engine.clock import Plan
from dtf.model.memory import table_row


def startup_table(
    settings: Settings,
    config: dict[str, Any],
    folder: Path,
    parameters: tuple[int, int],
    program: Program,
    world: World,
    plan: Plan,
    planned: list[Memory],
    train_rows: int,
    eval_rows: int,
) -> dict[str, Any]:
    """Name of a line -> text. `parameters`: numbers of the model, and how many of them learn. Not collective."""
    numbers, learning = parameters
    frozen = f" ({learning:,} of them learn)" if learning < numbers else ""
    batch, shares = settings.step.batch_size, program.shares
    bounds = micro_batch_bounds(batch, program.micro_batch_rows)
    roles = settings.strategy.roles(world.slots)
    alike = len(roles) == 1
    kind = "share" if not alike else "rank" if world.size == shares else "replica"
    processes = (
        f"{max(shares, world.size)} x {world.device.type}"
        if alike
        else ", ".join(count_text(number, role) for role, number in roles.items())
    )
    words = [config["strategy"]["name"]]
    words += [
        f"{key}={show(config['strategy'][key])}"
        for key, value in to_plain(type(settings.strategy)()).items()
        if config["strategy"][key] != value
    ]
    precision = settings.precision
    how = (
        ""
        if precision.compute is precision.param
        else " (autocast)"
        if precision.cast is Cast.autocast
        else " on a copy of them"
    )
    threads = world.place.threads
    return {
        "recipe": f"{config['recipe']['name']}: {numbers:,} parameters{frozen}, {train_rows:,} training rows, "
        f"{eval_rows:,} evaluation rows",
        "strategy": f"{' '.join(words)} on {processes}, {count_text(threads, 'thread')} a "
        f"{'process' if alike else world.place.role}{', pinned' * bool(config['launcher'].get('pin'))}",
        "precision": f"{precision.param.value} parameters, {precision.compute.value} arithmetic{how}",
        "batch": f"{count_text(batch, 'row')} a step = {count_text(len(bounds) - 1, 'micro-batch')} of {bounds[1]} "
        f"over {count_text(shares, kind)}",
        **program.about(),
        **(table_row(planned, "server" if world.place.role == "server" else "process") if planned else {}),
        **_sparse(settings, config),
        **_changed_rows(plan),
        **_guard(settings.train.guard_every),
        "length": count_text(plan.total, "step"),
        "run folder": str(folder),
        "versions": f"dtf {__version__}, torch {torch.__version__}",
    }


def _guard(every: int) -> dict[str, str]:
    """Whether replicas are compared is worth a line: a run without a difference says nothing more before its end."""
    return (
        {"guard": f"replicas are compared every {count_text(every, 'step')}, before saves and at the end"}
        if every
        else {}
    )


def _changed_rows(plan: Plan) -> dict[str, str]:
    """How often they alone are saved."""
    if not plan.delta_every:
        return {}
    whole = count_text(plan.save_every, "step")
    return {"changed rows": f"saved every {count_text(plan.delta_every, 'step')}, and all rows every {whole}"}


def _sparse(settings: Settings, config: dict[str, Any]) -> dict[str, str]:
    """Sparse tables, which lie beside the model and grow as rows are met; over all ranks, one copy of them."""
    item = 8 if settings.precision.param is Format.fp64 else 4
    texts = []
    for name, spec in settings.recipe.tables().items():
        numbers = spec.width + sum(count for count, _ in settings.sparse.states(spec.width).values())
        rows = spec.most_rows
        texts.append(
            f"{name}: up to {rows:,} rows of {spec.width} numbers, {bytes_text(rows * numbers * item)} with the state "
            f"of {config['sparse']['name']}"
        )
    life = settings.sparse.life_text()
    kept = settings.sparse.storage_text()
    more = ({"row life": life} if life else {}) | ({"rows": kept} if kept else {})
    return {"sparse tables": "; ".join(texts)} | more if texts else {}
