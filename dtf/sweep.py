"""`-m`: one run per combination of values. Hydra's sweeper and launcher decide which and when; each trial starts fresh ranks.

This process stays without torch, so any number of trials may follow each other in it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dtf.errors import Exit, code_name
from dtf.explain import parse
from dtf.sources import recorded

if TYPE_CHECKING:
    from hydra.conf import HydraConf

    from dtf.config import Composed, Composer


class _Stopped(BaseException):
    """A trial was asked to stop, and so is the sweep. No Exception: Hydra's launcher would go on to the next trial."""


def sweep(composer: Composer, overrides: Sequence[str], run: Callable[[Callable[[], int]], int]) -> int:
    """Check every trial, then run them; the first exit code that is not 0. `run` calls, reports what is raised and returns an exit code.

    ConfigError before the first trial starts when one of them cannot be composed.
    """
    trials = _combinations(composer, overrides)
    first, *_ = [composer.compose(trial) for trial in trials]
    codes: list[tuple[int, str]] = []

    def trial(config: DictConfig) -> int:
        hydra = HydraConfig.get()
        task = list(hydra.overrides.task)
        title = " ".join(task) or "(no overrides)"
        print(f"dtf: trial {len(codes) + 1}{f' of {len(trials)}' if len(trials) > 1 else ''}: {title}", flush=True)
        code = run(lambda: _start(composer, config, hydra, task))
        codes.append((code, title))
        if code == Exit.PREEMPTED:
            raise _Stopped
        return code

    with tempfile.TemporaryDirectory(prefix="dtf-sweep-") as scratch:
        own = [] if first.tree.hydra.sweep.dir else [f"hydra.sweep.dir={scratch}"]  # Hydra insists on a folder for its copy of the config
        hydra = Hydra("dtf", composer.loader)
        try:
            composer.with_plugins(overrides, lambda: hydra.multirun(composer.config_name, trial, [*overrides, *own]))
        except _Stopped:
            print("dtf: the sweep stops here", file=sys.stderr)
    for number, (code, title) in enumerate(codes, 1):
        print(f"dtf: trial {number}: {'ok' if code == 0 else code_name(Exit(code)) if code in set(Exit) else f'exit code {code}'}: {title}")
    return next((code for code, _ in codes if code), 0)


def _start(composer: Composer, config: DictConfig, hydra: HydraConf, overrides: list[str]) -> int:
    OmegaConf.set_struct(config, False)
    OmegaConf.set_readonly(config, False)
    config.hydra = hydra
    composed: Composed = composer.finish(config, [*hydra.overrides.hydra, *overrides], recorded())
    return composed.job.run(composed)


def _combinations(composer: Composer, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each trial; of one possible trial only where a sweeper chooses values as it goes."""
    parsed = parse(overrides, composer.loader)
    fixed = [each for each in parsed if not each.is_sweep_override() or each.is_discrete_sweep()]
    trials: list[list[Any]] = BasicSweeper.split_arguments(fixed, max_batch_size=None)[0]
    usual = len(fixed) == len(parsed) and not any(each.key_or_group.startswith("hydra/sweeper") for each in parsed)
    return trials if usual else trials[:1]
