"""What one must do to a row of a log before a model takes it, as JSON: for users of an exported model.

Formulas are Python, on whole numbers of any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from dtf.recipes.ctr import avazu, criteo
from dtf.recipes.ctr.encode import Encoder
from dtf.recipes.ctr.hashing import GOLDEN, MISSING

DENSE = {"log": "copysign(log1p(abs(x)), x)", "raw": "x"}
"""What becomes of an integer x, by `Encoder.integers`."""

BUCKET = "floor(log(x) ** 2) if x > 2 else x - 3"
"""See `encode.bucket_keys`."""

VALUES = {
    "hexadecimal": "the number that the text is, `int(text, 16)`",
    "text": "FNV-1a, 64 bits, of the bytes of the text",
    "last two": "FNV-1a, 64 bits, of the last two bytes of the text",
    "id": "the number in front of the colon",
    "typed": "of a column of integers the number itself; else FNV-1a, 64 bits, of the bytes of the text",
    "bucket": BUCKET,
}
"""What `value` stands for in the formula of a key, by what fields say of it."""

STEPS = (
    "a row is its `columns` with `separator` between, without a label; an empty one is missing",
    "`dense`, float32: of each of its columns, which hold an integer x, `value`",
    "`ids`, int64: of field f, counted from 0, `id`, made of `key` and the field's `seed`; `value` in it is what "
    "`values` says of the field's column",
    "`mix` is a function of x whose result is the last x; it is the output function of SplitMix64",
)


BAGS = (
    "`bags`: `values`, int64, has the ids of all values of a row, field after field, made as those of `ids`, whose "
    "fields they follow; `lengths`, int64, says how many each field has; a text has `between` between its values, "
    "empty ones are none"
)


def of_log(
    format: str,
    pairs: int,
    numbers: Sequence[str],
    categories: Sequence[str],
    encoder: Encoder,
    bags: Sequence[str] = (),
    between: str = "",
) -> dict[str, Any]:
    """Of the rows of a log, as they are without a label.

    `pairs`: of libsvm; `numbers`, `categories`, `bags`: names of columns, of Parquet files. `between`: the values of a
    text in a column of `bags`.
    """
    match format:
        case "criteo":
            columns, separator, value = [*criteo.COLUMNS], "\t", "hexadecimal"
            numbers, categories = columns[: criteo.INTEGERS], columns[criteo.INTEGERS :]
        case "avazu":
            columns, separator, value = avazu.UNLABELLED.split(","), ",", "text"
            numbers, categories = [], columns[1:]  # after the id
        case "libsvm":
            columns, separator, value = [f"pair {i + 1}" for i in range(pairs)], " ", "id"
            numbers, categories = [], columns
        case _:
            columns, separator, value = [*numbers, *categories], None, "typed"
    bucket = encoder.integers == "bucket"
    fields = [(name, "bucket", d) for d, name in enumerate(numbers if bucket else [])]
    fields += [
        (name, "last two" if (value, name) == ("text", "hour") else value, len(numbers) + f)
        for f, name in enumerate(categories)
    ]
    described = [{"column": name, "value": kind, "seed": seed} for name, kind, seed in fields]
    several = [
        {"column": name, "value": value, "seed": len(numbers) + len(categories) + g} for g, name in enumerate(bags)
    ]
    return {
        "steps": (*STEPS, *([BAGS] if bags else [])),
        "rows": {"format": format, "separator": separator, "columns": columns},
        **({} if bucket else _dense(encoder.integers, numbers)),
        **({"bags": {"fields": several, "between": between if format == "parquet" else separator}} if bags else {}),
        "ids": {
            "fields": described,
            "missing": MISSING,
            "values": {kind: VALUES[kind] for kind in dict.fromkeys(each["value"] for each in (*described, *several))},
            **_id(encoder),
        },
    }


def generated(offsets: Sequence[int], numbers: int, bags: bool) -> dict[str, Any]:
    """Of clicks that are drawn: their ids are numbers already. `bags`: there is one more category, of several values of
    the last one.
    """
    fields = [
        {"column": f"C{f + 1}", "first": first, "values": end - first}
        for f, (first, end) in enumerate(itertools.pairwise(offsets))
    ]
    more = {"bags": {"fields": [fields[-1] | {"column": "several"}], "id": "first + value"}} if bags else {}
    return (
        _dense("log", [f"I{d + 1}" for d in range(numbers)])
        | more
        | {
            "ids": {
                "fields": fields,
                "id": "first + value",
                "value": "0 for the most frequent of a field, and so on",
                "table_size": offsets[-1],
            }
        }
    )


def _dense(integers: str, names: Sequence[str]) -> dict[str, Any]:
    """Of the input `dense`, where there are numbers."""
    return {"dense": {"columns": [*names], "value": DENSE[integers], "missing": 0.0}} if names else {}


def _id(encoder: Encoder) -> dict[str, Any]:
    """How an id comes of a value."""
    if encoder.given:
        return {"id": "value"}
    hashed = {
        "mix": "x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64; x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64; x = x "
        "^ x >> 31",
        "key": f"mix((mix(value % 2**64) + (seed + 1) * {int(GOLDEN):#x}) % 2**64) >> 1",
    }
    if encoder.vocabulary is None:
        return hashed | (
            {"id": f"key % {encoder.table_size}", "table_size": encoder.table_size}
            if encoder.table_size
            else {"id": "key"}
        )
    return hashed | {
        "id": "first[f] + 1 + known.index(key) if key in known else first[f]",
        "known": "keys[first[f] - f : first[f + 1] - f - 1]",
        "vocabulary": {
            "digest": encoder.vocabulary.digest,
            "table_size": len(encoder.vocabulary),
            "arrays": ["keys", "first"],
        },
    }
