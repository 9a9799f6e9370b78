"""Jobs as functions: what a job finds is returned, and what goes wrong is raised. The command line prints the same.

Torch-free, but where a run or a model is in this process.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from dtf.api.launcher import failures_told
from dtf.api.registry import lookup
from dtf.api.schema import option_node
from dtf.config.advice import print_notes
from dtf.config.compose import Composed
from dtf.config.python_compose import compose
from dtf.config.python_overrides import Overrides, as_texts, in_words_of_python
from dtf.core.errors import ConfigError, DtfError, Exit
from dtf.core.types import Event, Failed
from dtf.host.allocator import give_freed_memory_back
from dtf.jobs.callbacks import Callback, Callbacks
from dtf.jobs.evaluate import EvaluateJob
from dtf.jobs.outcome import Evaluation, History, Predictions, Result, error_class
from dtf.jobs.predict import PredictJob
from dtf.jobs.train import TrainJob
from dtf.jobs.use_model import RanksEnded
from dtf.launch import rank_process

if TYPE_CHECKING:
    from torch import nn

Model = Result | str | Path
"""The result of a run, which stands for its best weights; or what `job.model` names."""


_USING = {"evaluate": EvaluateJob, "predict": PredictJob}


def train(config: Composed, callbacks: Sequence[Callback] = ()) -> Result:
    """Train what `dtf.compose` composed, to the end of its plan, and return what came of it.

    It is `python -m dtf` without the command line: the same run folder, resume, restarts and observers. With
    launcher=inline this process trains, and classes of a notebook will do; torch's threads, formats, generators and
    signal handlers are afterwards as before. Other launchers start processes, which import the modules of the classes.

    `callbacks`: functions of one `dtf.Event`, called in a thread of this process. They see the run and cannot change
    it. One that raises an exception hears no more, and `Result.callback_errors` has it.

    A run that does not reach its end raises the DtfError that its exit code stands for, with the run `folder`. Ctrl-C
    and SIGTERM raise Preempted after the step in hand is saved, a second Ctrl-C at once; so does a budget that is spent
    raise BudgetError. An error of a recipe's author has the exception as its `__cause__` with launcher=inline, and the
    rank's traceback as a note else.
    """
    composed = _current(config, TrainJob)
    job, history = composed.job, History()
    assert isinstance(job, TrainJob)
    if composed.config["train"].get("dry_run"):
        raise ConfigError("train.dry_run tries a run and keeps nothing; it is for the command line: python -m dtf ...")
    with Callbacks(callbacks) as heard, _raising(lambda: job.folder):

        def watch(event: Event) -> None:
            history.see(event)
            heard.see(event)

        job.watch = watch
        exit = job.train(composed)
        assert job.folder is not None
        if exit:
            raise RanksEnded(Exit(exit), job.folder)
    return history.result(job.folder, composed, heard.errors)


def evaluate(
    model: Model,
    overrides: Overrides = (),
    *,
    config_dir: str | Path | None = None,
    config_name: str | None = None,
    plugins: Sequence[str | ModuleType] = (),
) -> Evaluation:
    """Evaluate a model, as `job=evaluate` does, each row of `job.split` once.

    `model`: a `Result`, which stands for its best weights, else its newest, and brings its plugins, launcher and
    strategy; or a path as `job.model` takes it. Recipe, precision, step, seed and sparse.values are the run's but for
    `overrides`. The others are as in `dtf.compose`. Raises as `dtf.train`.
    """
    composed = _using("evaluate", model, overrides, config_dir, config_name, plugins)
    job = composed.job
    assert isinstance(job, EvaluateJob)
    with _raising():
        evaluation = job.evaluate(composed)
    assert evaluation is not None
    return evaluation


def predict(
    model: Model,
    overrides: Overrides = (),
    *,
    config_dir: str | Path | None = None,
    config_name: str | None = None,
    plugins: Sequence[str | ModuleType] = (),
) -> Predictions:
    """Predict each row of `job.split`, or of `job.input`, as `job=predict` does, and return the predictions to iterate:
    a dict for each row. Arguments as in `dtf.evaluate`.
    """
    composed = _using("predict", model, overrides, config_dir, config_name, plugins)
    job = composed.job
    assert isinstance(job, PredictJob)
    if job.format.value != "jsonl":
        raise ConfigError(f"job.format={job.format.value} is for programs that read files; leave it out")
    with _raising():
        path = job.predict(composed)
    assert path is not None
    return Predictions(path)


def load_model(
    model: Model,
    overrides: Overrides = (),
    *,
    config_dir: str | Path | None = None,
    config_name: str | None = None,
    plugins: Sequence[str | ModuleType] = (),
) -> nn.Module:
    """The recipe's model with trained weights: on the CPU, in evaluation mode, in the format of precision.param, with
    its sparse tables inside. Averaged weights (`step.ema`) win. Arguments as in `dtf.evaluate`.

    DataError where there are no weights, ConfigError where they do not fit the recipe's model.
    """
    composed = _using("evaluate", model, overrides, config_dir, config_name, plugins)
    job, settings = composed.job, composed.settings
    assert isinstance(job, EvaluateJob)
    from dtf.engine.trained_model import load_trained

    return load_trained(settings, job.model)


def _using(
    job: str,
    model: Model,
    overrides: Overrides,
    config_dir: str | Path | None,
    config_name: str | None,
    plugins: Sequence[str | ModuleType],
) -> Composed:
    """The config of a job that uses a model."""
    given = {"job": job, "job.model": str(model.checkpoint() if isinstance(model, Result) else model)}
    with in_words_of_python():
        texts = as_texts(overrides)
    if isinstance(model, Result):
        run = model.config
        named = [plugins] if isinstance(plugins, str | ModuleType) else plugins
        plugins, config_dir = [*run.config["plugins"], *named], config_dir or run.composer.config_dir
        texts = [*_spread(run, texts), *texts]
    composed = compose([given, *texts], config_dir=config_dir, config_name=config_name, plugins=plugins)
    return _current(composed, _USING[job])


def _spread(run: Composed, texts: Sequence[str]) -> list[str]:
    """How a run was spread over processes, as overrides, but for groups of which `texts` choose the option."""
    chosen = {text.partition("=")[0].lstrip("+~") for text in texts}
    spread: list[str] = []
    for group in ("launcher", "strategy"):
        if group not in chosen:
            option, node = run.choices[group], run.config[group]
            file = run.composer.read(group, option)
            usual = {**option_node(group, node["name"]), **(file.content if file else {})}
            other = {f"{group}.{key}": value for key, value in node.items() if value != usual.get(key)}
            spread += as_texts({group: option, **other})
    return spread


def _current(config: Composed, kind: type) -> Composed:
    """The config with the classes that are registered now: a cell may have defined one anew since it was composed.

    ConfigError for what is no config of such a job, and for calls that cannot be.
    """
    if not isinstance(config, Composed):
        raise ConfigError(f"{config!r:.100} is no config; give dtf.compose([...])")
    if rank_process.is_rank():
        raise ConfigError(
            "a rank that imported this module was told to start a run; put what starts runs under "
            "if __name__ == '__main__':"
        )
    with in_words_of_python():
        composed = config.with_([]) if config.is_outdated else config
        launcher = lookup("launcher", composed.config["launcher"]["name"])
        if not launcher.hears_all:  # type: ignore[attr-defined]
            raise ConfigError(
                f"launcher={composed.config['launcher']['name']} does not tell this process of the whole run; use "
                "launcher=local or launcher=inline here, or the command line"
            )
        if not isinstance(composed.job, kind):
            name = composed.config["job"]["name"]
            raise ConfigError(f"job={name} is none of this function; leave job out, or use python -m dtf job={name}")
    print_notes(composed.notes)
    return composed


@contextmanager
def _raising(folder: Callable[[], Path | None] = lambda: None) -> Iterator[None]:
    """A block whose runs print no failure: it is raised, as the exception that it stands for."""
    failures: list[tuple[Failed, BaseException | None]] = []

    def hear(failure: Failed, raised: BaseException | None) -> bool:
        if not failure.by_author and failure.exit != Exit.BUG:
            # its frames would hold the model and the data, and tell a user nothing
            failure, raised = replace(failure, traceback=""), None
        failures.append((failure, raised))
        return True

    try:
        with failures_told(hear), in_words_of_python():
            yield
        return
    except RanksEnded as ended:
        error, cause = _error(ended.exit, failures)
        error.folder = ended.folder
    except DtfError as raised:
        error, cause = raised, raised.__cause__
    finally:
        _free_memory()
    error.folder = error.folder or folder()
    if error.folder is not None:
        error.add_note(f"run folder: {error.folder}")
    raise error from cause


def _free_memory() -> None:
    """Give back what a run in this process has left: its models hold themselves, so they wait to be collected."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    gc.collect()
    give_freed_memory_back()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _error(exit: Exit, failures: list[tuple[Failed, BaseException | None]]) -> tuple[DtfError, BaseException | None]:
    """What ended the ranks as an exception, and its cause."""
    if not failures:
        return error_class(exit)(f"the run ended with exit code {int(exit)}"), None
    failure, raised = failures[0]
    if isinstance(raised, DtfError) and str(raised) == failure.message:
        return raised, raised.__cause__
    error = error_class(failure.exit, failure.error)(failure.message)
    if raised is None and failure.traceback:
        error.add_note(f"rank {failure.rank} at step {failure.step}:\n{failure.traceback.rstrip()}")
    return error, raised
