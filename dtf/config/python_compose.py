"""`dtf.compose`: from Python to a finished config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from dtf.config.compose import Composed, Composer
from dtf.config.python_overrides import Overrides, as_texts, in_words_of_python, plugin_override


def compose(
    overrides: Overrides = (),
    *,
    config_dir: str | Path | None = None,
    config_name: str | None = None,
    plugins: Sequence[str | ModuleType] = (),
) -> Composed:
    """The config of a run, composed, checked key by key and resolved, as `python -m dtf` composes it.

    `overrides`: `"lr.peak=0.1"` as on the command line, `{"lr.peak": 0.1}` with any value that a config can hold, or a
    list of these; later ones win. `config_dir` and `config_name`: as the flags. `plugins`: modules of yours, or their
    names, whose registered classes become options. Classes that this process has registered already are options too:
    modules that define those chosen join `plugins`, so that other processes import them.

    ConfigError for anything in it, or in the files it names, that fits no class.
    """
    with in_words_of_python():
        composer = Composer(str(config_dir) if config_dir is not None else None, config_name)
        return composer.compose([*plugin_override(plugins), *as_texts(overrides)]).with_homes()
