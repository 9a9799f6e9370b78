"""What the options of `launcher=slurm` may pass on to Slurm: nothing that undoes what the job relies on. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from dtf.core.errors import ConfigError

_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=.*)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_OWN = {
    **dict.fromkeys(("array", "hetjob"), "sweeps and roles decide about it"),
    **dict.fromkeys(
        (
            "no-requeue",
            "requeue",
            "signal",
            "wait",
            "test-only",
            "open-mode",
            "job-name",
            "comment",
            "parsable",
            "wrap",
        ),
        "the job would not start again, or not be found again",
    ),
    **dict.fromkeys(("output", "error"), "job=logs reads them where dtf puts them"),
    **dict.fromkeys(("export", "export-file"), "give launcher.export"),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "give launcher.nodes and launcher.processes"),
    "cpus-per-task": "give launcher.cpus",
    "time": "give launcher.hours",
    "clusters": "set SLURM_CLUSTERS, which job=status and job=cancel read too",
}
"""Options of sbatch that dtf sets, or whose absence it relies on, and what to do instead."""
_LIMITS = {
    "partition": "launcher.partition",
    "account": "launcher.account",
    "qos": "launcher.qos",
    "constraint": "launcher.constraint",
    "mem": "launcher.memory",
}
"""Options of sbatch with an option of dtf. A role may have another value."""
_OF_SRUN = {
    **dict.fromkeys(
        ("kill-on-bad-exit", "wait", "export", "distribution", "het-group", "multi-prog", "pty", "output", "error"),
        "the script decides about it",
    ),
    **{name: _OWN[name] for name in ("nodes", "ntasks", "ntasks-per-node", "cpus-per-task")},
}
_VARIABLES = {"time": "TIMELIMIT", "array": "ARRAY_INX", "mem": "MEM_PER_NODE", "job-name": "JOB_NAME"}
"""Where sbatch's variable has another name than its option."""

_REFUSED = (
    (r"unrecognized option|option '.*' (is ambiguous|requires)", "extra"),
    (r"invalid (partition|account|qos)\b|Invalid --(partition|account|qos|constraint|mem|export)\b", ""),
    (r"group not permitted to use this partition|partition (configuration )?not available", "partition"),
    (r"QOS not permitted", "qos"),
    (r"invalid feature", "constraint"),
    (r"memory (specification|required)", "memory"),
    (r"time limit is invalid|invalid --time", "hours"),
    (r"generic resource|invalid gres|invalid --gpus", "gpus"),
    (r"More processors requested|CPU count", "cpus"),
    (r"node count specification|More nodes requested|Requested node configuration is not available", "nodes"),
    (r"reservation is invalid|invalid (node name|license|--)", "extra"),
)
"""What sbatch says of options that no job can have, and the option of dtf; empty: the word in brackets names it. All
else, as of a controller that is away or a user who has too many jobs, may be otherwise the next time.
"""


def refused_option(said: str) -> str:
    """Which option of `launcher=slurm` it is that sbatch refuses; empty where it is not about one."""
    for pattern, option in _REFUSED:
        if found := re.search(pattern, said, re.IGNORECASE):
            word = option or next(filter(None, found.groups())).lower()
            return _LIMITS.get(word, f"launcher.{word}").removeprefix("launcher.")
    return ""


def check_extra(key: str, words: Sequence[str], role: bool = False) -> None:
    """Raise ConfigError for lines of the script's head that are no options, or that dtf has to decide about.

    `role`: they are of one role alone.
    """
    owned = _OWN if role else {**_OWN, **{name: f"give {option}" for name, option in _LIMITS.items()}}
    for word in words:
        _refuse_control(key, word)
        try:
            parts = shlex.split(word)
        except ValueError as error:
            raise ConfigError(f"{key}: {word!r}: {error}") from None
        if not word.startswith("--"):
            parts = [word]
        for part in parts:  # a line may have several
            if part.startswith("-") or part is parts[0]:
                _check_option(key, part, "sbatch", owned)


def check_srun(words: Sequence[str]) -> None:
    """As `check_extra`, for arguments of srun."""
    for word in words:
        _refuse_control("launcher.srun", word)
        _check_option("launcher.srun", word, "srun", _OF_SRUN)


def check_texts(texts: Mapping[str, str]) -> None:
    """Raise ConfigError for values, by their keys, that would not stay in their line of the script."""
    for key, text in texts.items():
        _refuse_control(key, text)


def for_sbatch(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """Without the variables that would override the script's own lines, and without those of a job in which this
    process may run itself: they would be taken for the new job's.
    """
    given = {*_OWN.keys() - {"time"}, *re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)}
    dropped = {f"SBATCH_{_VARIABLES.get(name, name.replace('-', '_').upper())}" for name in given}
    kept = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_JWT"}
    return {
        name: value
        for name, value in environment.items()
        if name not in dropped and (not name.startswith("SLURM") or name in kept)
    }


def _check_option(key: str, word: str, command: str, owned: Mapping[str, str]) -> None:
    found = _OPTION.fullmatch(word)
    if not found:
        raise ConfigError(f"{key}: {word!r} is no option of {command}; write it out, as in --name=value")
    # Slurm takes the beginning of a name for the name
    name = next((name for name in owned if name.startswith(found[1])), "")
    if name:
        raise ConfigError(f"{key}: {word!r}: --{name} of {command} is not yours to give here; {owned[name]}")


def _refuse_control(key: str, text: str) -> None:
    if found := _CONTROL.search(text):
        raise ConfigError(f"{key}={text!r} has the character {found[0]!r}, which would end its line for Slurm")
