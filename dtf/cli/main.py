"""The command line: `python -m dtf` and `dtf`. Answers without torch; training starts it in other processes only."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.core.errors import INTERRUPTED, PIPE_CLOSED, ConfigError, DtfError, Exit, error_line, io_failure
from dtf.core.lossy_stream import lossy_stream

if TYPE_CHECKING:
    import argparse

    from dtf.config.compose import Composed, Composer

_ANSWERS = ("-h", "--help", "--version", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says, and return the exit code. An expected error is printed as one line."""
    _open_streams()
    given = list(sys.argv[1:] if argv is None else argv)
    leaving = argv is None  # else the caller lives on, and its fork server with it
    if leaving:  # an error line that cannot be written, on a full disk, must not change the exit code
        sys.stderr = lossy_stream(2, sys.stderr.encoding)
    code = reported(lambda: _dispatch(given))
    if leaving and code:
        _shut_fork_server_down()
    # it was a rank itself: gloo's threads may not outlive the interpreter
    if leaving and "torch.distributed" in sys.modules:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


def _open_streams() -> None:
    """Give what the caller closed (`dtf 1>&-`) to /dev/null: otherwise a lock file or a socket would become standard
    output.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _asks(argv: Sequence[str]) -> bool:
    """Whether the command line asks for an answer, and starts nothing."""
    return any(word.split("=")[0] in _ANSWERS for word in argv if word.startswith("-"))


def will_launch(argv: Sequence[str]) -> bool:
    """Whether the command line looks as if ranks will be needed: it asks for no answer and has no typo that can be seen
    without composing.

    A guess: wrong either way costs time only. Imports the parts, which composing needs too, but not Hydra.
    """
    if _asks(argv):
        return False
    flags = [word for word in argv if word.startswith("-")]
    from dtf.config.command_line import is_known
    from dtf.config.settings import load_parts

    load_parts([])
    elsewhere = any("plugins=" in word or "hydra." in word for word in argv) or any(
        flag not in ("-m", "--multirun", "-r", "--run") for flag in flags
    )
    return elsewhere or all(is_known(word) for word in argv if not word.startswith("-"))


def _dispatch(argv: list[str]) -> int:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError("the current directory does not exist any more; change to one that does") from error
    if "launcher=ray" in argv and not _asks(argv):
        from dtf.cluster.ray_client import start_client

        start_client(argv)
    if will_launch(argv):
        from dtf.launch.forkserver_cache import prestart

        # torch is imported over there while the config is composed here; only now, since it slows every answer down
        prestart(argv)
    if "--version" in argv:
        from dtf.core.version import __version__

        print(f"dtf {__version__}")
        return Exit.OK
    from dtf.config.advice import print_notes
    from dtf.config.command_line import parse_arguments
    from dtf.config.compose import Composer

    flags = parse_arguments(argv)
    if flags.bundle and not flags.help:
        from dtf.cluster.inside import run_bundle

        return run_bundle(Path(flags.bundle), flags.digest or "", flags.trial, flags.overrides)
    composer = Composer(flags.config_dir, flags.config_name, flags.overrides)
    if flags.shell_completion:
        return _complete(flags.overrides)
    if flags.help:
        return _help(composer, flags.overrides)
    if flags.multirun:
        from dtf.cli.sweep import sweep

        return sweep(composer, flags.overrides, reported)
    composed = composer.compose(flags.overrides)
    print_notes(composed.notes)
    if flags.cfg:
        return _show(composed, flags)
    if flags.info:
        return _info(composed, flags.info)
    return _run(composed)


def _run(composed: Composed) -> int:
    """Do the job here, or submit it, as the launcher says."""
    from dtf.cluster.submit import is_submitted, submit

    return submit(composed) if is_submitted(composed) else composed.job.run(composed)


def reported(action: Callable[[], int]) -> int:
    """Call `action` and return its exit code; print what it raises, and return the exit code of that."""
    try:
        code = action()
        sys.stdout.flush()
        return code
    except DtfError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            import traceback

            traceback.print_exc()
        print(error_line(error.exit, " ".join(str(error).split())), file=sys.stderr)
        return error.exit
    except KeyboardInterrupt:
        print("dtf: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # dtf --help | head: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:  # noqa: BLE001  the last word on anything unexpected
        if failure := io_failure(error):
            print(error_line(failure.exit, str(failure)), file=sys.stderr)
            return failure.exit
        import traceback

        traceback.print_exc()
        print(
            error_line(
                Exit.BUG,
                f"{type(error).__name__}: {' '.join(str(error).split())}; this is a mistake in dtf or in a plugin, "
                "see above",
            ),
            file=sys.stderr,
        )
        return Exit.BUG


def _shut_fork_server_down() -> None:
    """End the fork server that `prestart` began."""
    cache = sys.modules.get("dtf.launch.forkserver_cache")
    if cache is not None:
        cache.shut_down()


def _help(composer: Composer, overrides: list[str]) -> int:
    import shutil

    from dtf.config.describe import help_text

    composer.with_plugins(overrides, lambda: None)
    print(help_text(composer, min(120, shutil.get_terminal_size().columns - 1)))
    return Exit.OK


def _show(composed: Composed, flags: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from dtf.api.schema import show

    tree = composed.tree
    if flags.cfg == "job":
        tree = (
            OmegaConf.create(composed.config)
            if flags.resolve
            else OmegaConf.masked_copy(tree, [str(name) for name in tree if name != "hydra"])
        )
    elif flags.cfg == "hydra":
        tree = OmegaConf.masked_copy(tree, ["hydra"])
    missing = object()
    part = tree
    if flags.package and flags.package != "_global_":
        part = OmegaConf.select(tree, flags.package, default=missing)
    if part is missing:
        raise ConfigError(f"--package={flags.package} is no node of the config; see dtf --cfg {flags.cfg}")
    if not OmegaConf.is_config(part):
        print(show(part) if part is None else part)
        return Exit.OK
    if part is not tree:
        print(f"# @package {flags.package}")
    # a resolved job holds text that only looks like one
    print(OmegaConf.to_yaml(part, resolve=flags.resolve and flags.cfg != "job"), end="")
    return Exit.OK


def _info(composed: Composed, what: str) -> int:
    import logging

    from dtf.config.hydra_internals import hydra_app

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        composer = composed.composer
        # by way of a text: a handler of logging prints tracebacks when nobody reads on
        with contextlib.redirect_stdout(io.StringIO()) as text:
            hydra_app(composer.loader).show_info(what, composer.config_name, list(composed.overrides))
        print(text.getvalue(), end="")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return Exit.OK


def _complete(overrides: list[str]) -> int:
    """Tab completion, by Hydra; the line to complete is in COMP_LINE and may name a config dir and plugins of its
    own.
    """
    import shlex

    from dtf.config.command_line import parse_arguments
    from dtf.config.compose import Composer
    from dtf.config.hydra_internals import hydra_app

    if sys.argv[0].endswith(".py") and "query=bash" not in overrides:
        raise ConfigError(
            "tab completion is for the console script; use dtf -sc install=bash in place of python -m dtf"
        )
    try:
        words = shlex.split(os.environ.get("COMP_LINE", ""))[1:]
        flags = parse_arguments(words[:-1])
    except (ValueError, ConfigError):  # a line that is not finished
        flags = parse_arguments([])
    composer = Composer(flags.config_dir, flags.config_name)
    hydra = hydra_app(composer.loader)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            composer.with_plugins(flags.overrides, lambda: hydra.shell_completion(composer.config_name, overrides))
    except ValueError as error:
        raise ConfigError(f"{error}") from error
    print(text.getvalue(), end="")
    return Exit.OK
