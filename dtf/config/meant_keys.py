"""What to write in place of a key that a config does not have: what another framework calls so, with a value that does
the same, or a key of an option that was not chosen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from dtf.api.registry import registered
from dtf.api.schema import is_node, keys, show
from dtf.config import elsewhere
from dtf.config.settings import GROUPS, Root


def meant_elsewhere(key: str, value: object, config: Mapping[Any, Any]) -> str:
    """`did you mean X? ` for a key of another framework, where this config has X. Else `X is a key of GROUP=OPTION; `,
    or nothing where it is not known.
    """
    last = key.rpartition(".")[2]
    if last in elsewhere.COUNTED:
        return f"did you mean {_counted(last, value, config)}? "
    names = (f"{key}={show(value)}", key, f"{last}={show(value)}", last)
    offered = next((elsewhere.KEYS[name] for name in names if name in elsewhere.KEYS), "")
    if not offered:
        return ""
    known = set(known_keys(config))
    here, other = [], ""
    for text in offered.split(", or "):
        there = re.split(r"[=, ]", text)[0]
        group = text.removesuffix("=NAME")
        if group != text and isinstance(value, str) and value in registered(group):
            here.append(f"{group}={value}")
        elif there in known or there in GROUPS:
            here.append(text)
        else:
            other = other or (f"{there} is a key of {options}; " if (options := options_with(there)) else "")
    return f"did you mean {', or '.join(here)}? " if here else other


def options_with(key: str) -> str:
    """`lr=constant and lr=step`: the options that have a key; empty where none has it."""
    group = key.partition(".")[0]
    names = [f"{group}={name}" for name, cls in registered(group).items() if key in _keys_below(cls, f"{group}.")]
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def known_keys(config: Mapping[Any, Any]) -> Iterator[str]:
    """Dotted keys of the root and of the options that `config` chose; an option that does not exist has none."""
    yield from _keys_below(Root, "")
    for group in GROUPS:
        chosen = config.get(group)
        parts = chosen if group == "observer" and isinstance(chosen, dict) else {"": chosen}
        for name, part in parts.items():
            cls = registered(group).get(str(part.get("name"))) if isinstance(part, dict) else None
            if cls is not None:
                yield from _keys_below(cls, f"{group}.{name}." if name else f"{group}.")


def _keys_below(cls: type, prefix: str) -> Iterator[str]:
    for key in keys(cls):
        yield f"{prefix}{key.name}"
        if is_node(key.hint):
            yield from _keys_below(key.hint, f"{prefix}{key.name}.")


def _counted(name: str, value: object, config: Mapping[Any, Any]) -> str:
    """What counts rows here, for a name of another framework that counts batches, passes or rows of a rank; with the
    number, where this config tells it.
    """
    number = value if type(value) is int and value > 0 else 0
    batch = _batch_size(config)
    match elsewhere.COUNTED[name]:
        case "passes of a step":
            passes, rows = (f"{number} passes" if number else "passes"), (f"={batch}" if batch else "")
            return (
                f"step.micro_batch_rows=ROWS, those of a pass: step.batch_size{rows} / {passes} / replicas of the model"
            )
        case "batches of an evaluation":
            if not number or not batch:
                return "train.eval_rows=ROWS, rows in place of batches"
            return f"train.eval_rows={number * batch}, {number} x step.batch_size={batch}"
        case _:
            return "step.batch_size=ROWS, those of all ranks together"


def _batch_size(config: Mapping[Any, Any]) -> int:
    """`step.batch_size`; 0 where it is no number."""
    step = config.get("step")
    batch = step.get("batch_size") if isinstance(step, dict) else 0
    return batch if type(batch) is int and batch > 0 else 0
