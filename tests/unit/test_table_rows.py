"""CSV, TSV and Parquet tables by columns, and what of them is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtf import ConfigError, DataError, parquet_rows, table_rows

pytest.importorskip("pyarrow")

TEXT = "a,b,c,y\n" + "".join(f'{n / 4},"q{n % 4}\nz",{n % 11},{n % 3}\n' for n in range(50))


def read(path: Path, text: str = TEXT, **more: Any) -> Any:
    path.write_text(text)
    given = {"numeric": ["a"], "categorical": ["b", "c"], "label": "y", "cache": path.parent / "cache"}
    return table_rows(path, **given | more)


def test_columns_become_numbers_and_numbers_of_categories(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.csv")
    inputs, targets = rows.fetch(np.array([49, 1]), 0)
    assert inputs["numeric"].tolist() == [[12.25], [0.25]] and inputs["categorical"].tolist() == [[1, 5], [1, 1]]
    assert targets.tolist() == [1, 1] and rows.classes == ["0", "1", "2"] and rows.groups()[4] == 1
    assert rows.categories["c"] == [str(n) for n in range(11)], "whole numbers by size"
    assert read(tmp_path / "a.csv", numeric=[]).fetch(np.array([1]), 0)[0].tolist() == [[1, 1]]
    prices = read(tmp_path / "a.csv", categorical=[], numeric=["c"], label="", target="a")
    assert [part.tolist() for part in prices.fetch(np.array([3]), 0)] == [[[3.0]], [0.75]]


def test_every_form_of_a_table_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow.csv
    import pyarrow.parquet

    ids = np.arange(50)
    rows = read(tmp_path / "a.csv")
    pyarrow.parquet.write_table(
        pyarrow.csv.read_csv(tmp_path / "a.csv", parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True)),
        tmp_path / "a.parquet",
    )
    columns = {"numeric": ["a"], "categorical": ["b", "c"], "label": "y", "cache": tmp_path / "cache"}
    bare = TEXT.partition("\n")[2]
    for other in (
        table_rows(tmp_path / "a.parquet", **columns),
        read(tmp_path / "a.tsv", TEXT.replace(",", "\t")),
        read(tmp_path / "bare.csv", bare, columns=["a", "b", "c", "y"]),
    ):
        assert str(other.fetch(ids, 0)) == str(rows.fetch(ids, 0)) and other.fingerprint() == rows.fingerprint()


def test_rows_of_a_table_and_the_values_of_another(tmp_path: Path) -> None:
    train, last = read(tmp_path / "a.csv", rows=slice(None, -10)), read(tmp_path / "a.csv", rows=slice(-10, None))
    assert (len(train), len(last)) == (40, 10) and train.fingerprint() != last.fingerprint()
    assert last.fetch(np.array([9]), 0)[0]["numeric"].tolist() == [[12.25]] and len(last.groups()) == 10
    odd, even = (read(tmp_path / "a.csv", rows=slice(first, None, 2)) for first in (1, 0))
    assert odd.fetch(np.array([0, 24]), 0)[0]["numeric"].tolist() == [[0.25], [12.25]]
    assert len(odd) == len(even) and odd.fingerprint() != even.fingerprint()
    other = read(tmp_path / "b.csv", "a,b,c,y\n1,new,3,2\n", like=train)
    inputs, targets = other.fetch(np.array([0]), 0)
    assert inputs["categorical"].tolist() == [[4, 3]] and targets.tolist() == [2]
    with pytest.raises(DataError, match=r"b.csv: y='7' in row 0 is none of the 3 classes"):
        read(tmp_path / "b.csv", "a,b,c,y\n1,new,3,7\n", like=train)


@pytest.mark.parametrize(
    ("text", "more", "error", "words"),
    [
        (TEXT, {"numeric": ["d"]}, DataError, "a.csv has no column d; it has a, b, c, y"),
        (TEXT, {"numeric": ["b"], "categorical": []}, DataError, "a.csv cannot be read as a table: In column b: .*'q0"),
        ("a,b,c,y\n1,x,2,0\n,x,2,0\n", {}, DataError, "a is empty in row 1; give missing="),
        ("a,b,c,y\n1,x,2,0\n1e39,x,2,0\n", {}, DataError, r"a=1e\+39 in row 1 is no finite number of 32 bits"),
        ("a,b,c,y\n1,x,2,\n", {}, DataError, "y=None in row 0 is empty"),
        ("a,b,c,y\n1,x,2,NA\n", {}, DataError, "y=None in row 0 is empty"),
        ("a,b,c,y\n1,x,2\n", {}, DataError, "a.csv cannot be read as a table: .*[Ee]xpected 4 columns"),
        ("a,a,b,c,y\n1,1,x,2,0\n", {}, DataError, "has the column a more than once"),
        (TEXT, {"numeric": ["a", "b"]}, ConfigError, "the column b is named twice"),
        (TEXT, {"target": "a", "numeric": []}, ConfigError, "either label= .* or target="),
        (TEXT, {"numeric": [], "categorical": []}, ConfigError, "no inputs"),
    ],
)
def test_what_does_not_fit_is_named(text: str, more: Any, error: type, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        read(tmp_path / "a.csv", text, **more)


def test_empty_numbers_take_the_one_that_is_given_and_unknown_categories_have_a_number(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.csv", "a,b,c,y\n1,x,,0\n,x,2,0\n", missing=-1.0)
    inputs, _ = rows.fetch(np.array([1, 0]), 0)
    assert inputs["numeric"].tolist() == [[-1.0], [1.0]] and inputs["categorical"].tolist() == [[0, 0], [0, 1]]


def test_a_category_may_be_any_text(tmp_path: Path) -> None:
    """NA is the code of Namibia; --5 begins as a number does."""
    texts = ["NA", "null", "--5", "7", "-7", "\u00b2", "9" * 5000]
    rows = read(tmp_path / "a.csv", "a,b,c,y\n" + "".join(f"1,{text},2,0\n" for text in texts), categorical=["b"])
    assert rows.categories["b"] == ["-7", "7", "--5", "9" * 5000, "NA", "null", "\u00b2"]
    inputs, _ = rows.fetch(np.array([0, 4]), 0)
    assert inputs["categorical"].tolist() == [[4], [0]]


def test_a_damaged_cache_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = read(tmp_path / "a.csv").fingerprint()
    stored = next((tmp_path / "cache").glob("*/numeric"))
    stored.write_bytes(bytes(4) + stored.read_bytes()[4:8] + bytes([9]) + stored.read_bytes()[9:])
    again = table_rows(tmp_path / "a.csv", numeric=["a"], categorical=["b", "c"], label="y", cache=tmp_path / "cache")
    assert again.fingerprint() == first and "is damaged" in caplog.text
    assert again.fetch(np.array([2]), 0)[0]["numeric"].tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([1.0, None, 3.0], "a.parquet, row 1: column x is empty; mend it"),
        ([[1.0], [None], [3.0]], "a.parquet, row 1: column x is empty; mend it"),
        (np.zeros((3, 2, 2)), "column x is extension<arrow.fixed_shape_tensor.*write lists of lists"),
    ],
)
def test_what_rows_of_parquet_files_lack_is_named(column: Any, words: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    shaped = isinstance(column, np.ndarray)
    values = pa.FixedShapeTensorArray.from_numpy_ndarray(column) if shaped else pa.array(column)
    pyarrow.parquet.write_table(pa.table({"x": values, "y": pa.array([0, 1, 0])}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=words):
        parquet_rows(tmp_path / "a.parquet", target="y", cache=tmp_path / "cache").fetch(np.arange(3), 0)
