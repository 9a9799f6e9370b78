"""Parsers of click logs against readers of ten lines, on whatever bytes: each line is read as the reference reads it,
or bad with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dtf.recipes.ctr import avazu, criteo, lines
from dtf.recipes.ctr.log import Parsed, Text, avazu_text, criteo_text, libsvm_text

Row = tuple[int, list[int], list[int]]
TEXTS = {
    "criteo": criteo_text(),
    "avazu": avazu_text(),
    "libsvm": libsvm_text(3, 0),
    "libsvm given": libsvm_text(3, 50),
}


def mixed(x: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ x >> shift) * factor % 2**64
    return x


def key(field: int, value: int) -> int:
    return mixed((mixed(value) + (field + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 1


def fnv(text: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in text:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def read_criteo(line: bytes) -> Row | None:
    columns = line.split(b"\t")
    shape = [rb"[01]", *[rb"(-?[0-9]{1,18})?"] * 13, *[rb"[0-9a-fA-F]{0,16}"] * 26]
    if len(columns) != 40 or not all(map(re.fullmatch, shape, columns)):
        return None
    integers = [int(text) if text else lines.NONE for text in columns[1:14]]
    return (
        int(columns[0]),
        integers,
        [key(13 + f, int(text, 16)) if text else -1 for f, text in enumerate(columns[14:])],
    )


def read_avazu(line: bytes) -> Row | None:
    columns = line.split(b",")
    try:
        line.decode()
    except UnicodeDecodeError:
        return None
    if b"\0" in line or len(columns) != 24 or columns[1] not in (b"0", b"1"):
        return None
    columns[2] = columns[2][-2:]
    return int(columns[1]), [], [key(f, fnv(text)) if text else -1 for f, text in enumerate(columns[2:])]


def read_libsvm(line: bytes, limit: int = 0) -> Row | None:
    label, *pairs = line.split(b" ")
    found = [re.fullmatch(rb"([0-9]{1,18}):1(\.0+)?", pair) for pair in pairs if pair]
    if label not in (b"0", b"1", b"-1", b"+1") or len(found) != 3 or not all(found):
        return None
    ids = [int(match[1]) for match in found if match]
    if limit:
        return (int(label) > 0, [], ids) if max(ids) < limit else None
    return int(label) > 0, [], [key(f, number) for f, number in enumerate(ids)]


READERS: dict[str, Callable[[bytes], Row | None]] = {
    "criteo": read_criteo,
    "avazu": read_avazu,
    "libsvm": read_libsvm,
    "libsvm given": lambda line: read_libsvm(line, 50),
}


def parse(text: Text, content: bytes, rows: int, around: bytes = b"") -> tuple[int, Parsed]:
    """The kernel, on bytes amid others that it must not look at, into rows amid others that it must not touch."""
    whole = np.frombuffer(bytearray(around + content + around), np.uint8)
    out = Parsed.empty(rows + 2, text.integers, text.fields)
    for part in out[:4]:
        part[:] = 77
    found = text.parse(whole[len(around) : len(around) + len(content)], 0, *(part[1 : 1 + rows] for part in out[:4]))
    assert all((part[[0, -1]] == 77).all() for part in out[:4])
    return found, out.part(1, 1 + rows)


def agree(name: str, content: bytes) -> list[int]:
    """Assert that kernel and reference say the same of each line; returns why each is bad."""
    expected = content.split(b"\n")
    expected = expected[:-1] if not expected[-1] else expected
    found, parsed = parse(TEXTS[name], content, len(expected) + 1, b"\t1:1,0")
    again, other = parse(TEXTS[name], content, len(expected) + 1, b"\n\xff")
    assert found == again == len(expected), "as many lines as there are, and nothing outside matters"
    for i, line in enumerate(expected):
        line = line.removesuffix(b"\r")
        row = None if len(line) > lines.LONGEST or not line else READERS[name](line)
        assert (parsed.why[i] == lines.GOOD) == (row is not None), (line, lines.REASONS[parsed.why[i]])
        assert parsed.why[i] == other.why[i] < len(lines.REASONS)
        if row is not None:
            assert (int(parsed.labels[i]), parsed.numbers[i].tolist(), parsed.keys[i].tolist()) == (
                int(row[0]),
                *row[1:],
            )
    return parsed.why[: len(expected)].tolist()


CRITEO = (
    b"1\t" + b"\t".join([b"1", b"", b"-3", *[b"12"] * 10]) + b"\t" + b"\t".join([b"68fd1e64", b"", *[b"a8cd5504"] * 24])
)
AVAZU = (
    b"1000009418151094273,0,14102100,1005,0,1fbe01fe,f3845767,28905ebd,ecad2386,"
    b"7801e8d9,07d7df22,a99f214a,ddd2926e,44956a24,1,2,15706,320,50,1722,0,35,-1,79"
)
LIBSVM = b"-1 4:1 17:1 42:1"
LINES = {"criteo": CRITEO, "avazu": AVAZU, "libsvm": LIBSVM, "libsvm given": LIBSVM}

BAD = {
    "blank": (b"", lines.BLANK),
    "short": (CRITEO.rpartition(b"\t")[0], lines.SHORT),
    "long": (CRITEO + b"\t", lines.LONG),
    "bad hex": (CRITEO.replace(b"68fd1e64", b"68fd1g64"), lines.HEX),
    "17 digits": (CRITEO.replace(b"68fd1e64", b"0" * 17), lines.HEX),
    "no integer": (CRITEO.replace(b"-3", b"-"), lines.INTEGER),
    "19 digits": (CRITEO.replace(b"-3", b"9" * 19), lines.INTEGER),
    "NUL": (CRITEO.replace(b"68fd1e64", b"68fd\0e64"), lines.NUL),
    "BOM": (b"\xef\xbb\xbf" + CRITEO, lines.MARK),
    "1 MB": (CRITEO + b"0" * 2**20, lines.TOO_LONG),
    "bad UTF-8": (CRITEO.replace(b"68fd1e64", b"68fd\xff\xfe64"), lines.NOT_TEXT),
    "label 2": (b"2" + CRITEO[1:], lines.LABEL),
    "no label": (CRITEO[1:], lines.LABEL),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_has_its_reason_and_the_lines_around_it_are_read(name: str) -> None:
    line, reason = BAD[name]
    assert agree("criteo", b"\n".join([CRITEO, line, CRITEO])) == [lines.GOOD, reason, lines.GOOD]
    assert agree("criteo", b"\r\n".join([CRITEO, line, CRITEO, b""])) == [lines.GOOD, reason, lines.GOOD]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"2 4:1 17:1 42:1", lines.LABEL),
        (b"-0 4:1 17:1 42:1", lines.LABEL),
        (b"1 4:1 17:1", lines.SHORT),
        (b"1 4:1 17:1 42:1 43:1", lines.LONG),
        (b"1 4:1 17:1 -2:1", lines.PAIR),
        (b"1 4:1 17:1 42", lines.PAIR),
        (b"1 4:1 17:1 42:", lines.PAIR),
        (b"1 4:1 17:1 42:0.5", lines.VALUE),
        (b"1 4:1 17:1 42:1.", lines.VALUE),
        (b"1 4:1 17:1 50:1", lines.RANGE),
        (b"+1  4:1 17:1.0 42:1 ", lines.GOOD),
    ],
)
def test_lines_of_libsvm(line: bytes, reason: int) -> None:
    assert agree("libsvm given", line) == [reason]


def test_the_hour_of_avazu_is_that_of_the_day() -> None:
    other = AVAZU.replace(b"14102100", b"14102900")
    one, two = (parse(TEXTS["avazu"], line, 1)[1].keys for line in (AVAZU, other))
    assert np.array_equal(one, two) and len(avazu.HEADER.split(",")) == 2 + avazu.CATEGORIES
    assert agree("avazu", AVAZU.replace(b"ecad2386", "ü".encode())) == [lines.GOOD]
    assert agree("avazu", AVAZU.replace(b"ecad2386", b"\xfc")) == [lines.NOT_TEXT]


def pieces(name: str) -> st.SearchStrategy[bytes]:
    """Lines of the format, damaged here and there, amid bytes of all kinds."""
    line = LINES[name]
    byte = st.one_of(st.sampled_from(list(b"\t\n\r ,:01-+af\0\xef\xbb\xbf")), st.integers(0, 255))
    edits = st.lists(
        st.tuples(st.integers(0, len(line) - 1), st.integers(0, 3), st.lists(byte, max_size=3)), max_size=3
    )

    def damaged(changes: list[tuple[int, int, list[int]]]) -> bytes:
        out = line
        for at, cut, more in changes:
            out = out[:at] + bytes(more) + out[at + cut :]
        return out

    some = st.one_of(
        edits.map(damaged),
        st.just(line),
        st.binary(max_size=40),
        st.sampled_from([one for one, _ in BAD.values() if len(one) < 1000]),
    )
    return st.lists(some, max_size=6).flatmap(
        lambda all: st.sampled_from([b"\n", b"\r\n", b"\n\n"]).map(lambda end: end.join(all))
    )


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_bytes_are_read_as_the_reference_reads_them(name: str, data: st.DataObject) -> None:
    agree(name, data.draw(pieces(name)))


@given(content=st.binary(max_size=8))
@example(content=b"\xed\xa0\x80")
@example(content=b"\xf4\x90\x80\x80")
@example(content=b"\xc0\x80")
@settings(max_examples=200, deadline=None)
def test_text_is_what_python_decodes(content: bytes) -> None:
    try:
        content.decode()
        good = True
    except UnicodeDecodeError:
        good = False
    assert lines.is_text(np.frombuffer(bytearray(content), np.uint8), 0, len(content)) == good


def test_a_log_of_criteo_is_read_whole() -> None:
    rng = np.random.default_rng(0)
    rows = [
        b"\t".join(
            [
                b"%d" % rng.integers(2),
                *(b"" if rng.random() < 0.3 else b"%d" % rng.integers(-3, 10**6) for _ in range(13)),
                *(b"" if rng.random() < 0.1 else b"%08x" % rng.integers(2**32) for _ in range(26)),
            ]
        )
        for _ in range(500)
    ]
    assert agree("criteo", b"\n".join(rows)) == [lines.GOOD] * 500
    assert criteo.CATEGORIES == 26
