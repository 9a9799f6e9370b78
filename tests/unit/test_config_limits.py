"""Config files from elsewhere: they may waste no time and no memory, and start no code."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import pytest
import yaml
from yaml.error import Mark

from dtf.config.compose import Composer
from dtf.config.limits import MAX_BYTES
from dtf.config.messages import parse
from dtf.core.errors import ConfigError


class TooMuchWork(BaseException):
    """Nothing catches it on its way to the test."""


def experiment(folder: Path, body: str) -> Composer:
    (folder / "experiment").mkdir()
    (folder / "experiment" / "e.yaml").write_text(f"# @package _global_\n{body}")
    return Composer(str(folder))


def env(entries: dict[str, str]) -> str:
    return "launcher:\n  env:\n" + "".join(f"    {key}: '{value}'\n" for key, value in entries.items())


MOST_S = 60.0
"""Of the processor, while a file is composed: each takes less than a second, and to unfold one never ends."""
DOUBLED = {f"a{n}": f"${{launcher.env.a{n - 1}}}${{launcher.env.a{n - 1}}}" for n in range(40, 0, -1)}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", "the alias \\*a is refused"),
        ("a: &a {x: 1}\nstep:\n  <<: *a\n", "the alias \\*a is refused"),
        (f"x: {'[' * 2000}{']' * 2000}\n", "or 32 levels"),
        (f"x: [{'1,' * 20_000}]\n", "more than 10000 values"),
        (f"x: {'a' * MAX_BYTES}\n", f"more than {MAX_BYTES:,} bytes"),
        (env({**DOUBLED, "a0": "x"}), "interpolation makes more than"),
        (
            env({**{f"a{n}": f"${{.a{n - 1}}}${{.a{n - 1}}}" for n in range(40, 0, -1)}, "a0": "x"}),
            "interpolation makes more than",
        ),
        (
            env({**{f"a{n}": f"${{oc.select:launcher.env.a{n - 1}}}" * 2 for n in range(40, 0, -1)}, "a0": "x"}),
            "whose target is no plain key",
        ),
        (env({f"a{n}": f"${{launcher.env.a{n - 1}}}" for n in range(400, 0, -1)}), "a chain of more than 100"),
        (env({"a": "x" * 60_000, "b": "${.a}" * 500}), "interpolation makes more than"),
        (
            "step:\n  a0: [1, 1, 1]\n"
            + "".join(f"  a{n}: {{x: '${{step.a{n - 1}}}', y: '${{step.a{n - 1}}}'}}\n" for n in range(1, 40)),
            "interpolation makes more than",
        ),
        (env({"a": "${.b}", "b": "${.a}"}), "Recursive interpolation"),
        (f"seed: {'9' * 6000}\n", "it must be a YAML mapping"),
        ("hydra: null\n", "hydra=None takes Hydra's own settings away"),
        ("seed: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_bombs_are_refused_at_once(tmp_path: Path, body: str, message: str) -> None:
    composer = experiment(tmp_path, body)

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TooMuchWork

    before = signal.signal(signal.SIGPROF, give_up)
    signal.setitimer(signal.ITIMER_PROF, MOST_S)
    try:
        with pytest.raises(ConfigError, match=message):
            composer.compose(["experiment=e"])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize(
    "opened", ["[", *(pytest.param(opened, marks=pytest.mark.slow) for opened in ("{a:", "choice(", "${a.", "'"))]
)
def test_nested_brackets_on_a_command_line_are_refused_by_name(opened: str) -> None:
    closed = {"[": "]", "{a:": "}", "choice(": ")", "${a.": "}", "'": ""}[opened]
    with pytest.raises(ConfigError, match="^seed") as caught:
        parse([f"seed={opened * 3000}{closed * 3000}"])
    assert len(str(caught.value)) < 1000


def test_a_parser_that_judges_the_depth_itself_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str, Loader: type) -> None:
        place = Mark("", 0, 2, 0, None, 0)
        raise yaml.MarkedYAMLError(problem="exceeded maximum nesting depth", problem_mark=place)

    monkeypatch.setattr(yaml, "parse", parse)
    with pytest.raises(ConfigError, match="e.yaml, line 3: more than 10000 values or 32 levels"):
        experiment(tmp_path, "seed: 1\n").compose(["experiment=e"])


def test_wide_but_small_chains_are_fine(tmp_path: Path) -> None:
    composer = experiment(tmp_path, env({**DOUBLED, "a0": ""}))  # 2 ** 40 lookups, if each were made
    composer.typed = [f"launcher.env.a{number}=x" for number in range(41)]  # a file alone may not set them
    assert composer.compose(["experiment=e"]).config["launcher"]["env"]["a40"] == ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("recipe: {_target_: os.getcwd}\n", "_target_ is refused"),
        ('recipe: {"_targ\\x65t_": os.getcwd}\n', "_target_ is refused"),
        ("launcher:\n  env: ${oc.create:${oc.decode:'{\"_tar${run.name}get_\":x}'}}\n", "refused|GrammarParseError"),
        ("hydra: {callbacks: {a: {b: 1}}}\n", "hydra.callbacks is not used here; use observers instead"),
        ("hydra: {job: {env_set: {LD_PRELOAD: x}}}\n", "hydra.job.env_set is not used here"),
        ("hydra: {job: {chdir: true}}\n", "hydra.job.chdir is not used here"),
        ("hydra: {job_logging: {root: {handlers: []}}}\n", "hydra.job_logging is not used here"),
        ("hydra: {sweeper: {_target_: os.getcwd}}\n", "_target_ is refused"),
        ("hydra:\n  sweeper: {params: \"${oc.create:'{a: 1}'}\"}\n", "is no class of an installed Hydra plugin"),
        ("hydra: {searchpath: [file:///]}\n", "hydra.searchpath is only supported"),
        ("launcher: {name: inline}\n", "launcher.name=inline is another class than local"),
        ("plugins: ['../x']\n", "is no module name"),
    ],
)
def test_no_code_from_files(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(tmp_path, body).compose(["experiment=e"])


def test_sweeps_are_held_to_the_same_rules(tmp_path: Path) -> None:
    from dtf.cli.sweep import sweep

    started: list[int] = []
    with pytest.raises(ConfigError, match="hydra.callbacks is not used here"):
        sweep(
            experiment(tmp_path, "hydra: {callbacks: {a: {b: 1}}}\n"),
            ["experiment=e", "seed=1,2"],
            lambda action: started.append(1) or 0,
        )
    assert not started
