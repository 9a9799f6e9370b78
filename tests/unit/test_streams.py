"""Pictures in archives, Parquet files, folders and Hugging Face's form are the same rows; what is damaged is named."""

from __future__ import annotations

import gzip
import os
import signal
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtf import ConfigError, DataError, Dataset, decoded, folder_samples, parquet_rows, tar_samples, write_samples
from dtf.core.types import Shard
from dtf.data.batches import Epochs
from dtf.data.file_patterns import files_of
from dtf.data.loader import Loader
from dtf.data.made_once import made_once, name_of
from dtf.data.samplers import Shuffle
from dtf.engine.row_notes import left_out_text
from tests.support import pictures
from tests.support.image_files import encode

ROWS = 40


@pytest.fixture(params=pictures.FORMS)
def rows(request: pytest.FixtureRequest, tmp_path: Path) -> Dataset:
    """The same pictures in each form."""
    if request.param in ("parquet", "hugging_face"):
        pytest.importorskip({"parquet": "pyarrow", "hugging_face": "datasets"}[request.param])
    pictures.write(tmp_path, request.param, ROWS)
    return pictures.read(tmp_path, request.param, tmp_path / "cache")


def test_ranks_read_the_same_pictures_each_once_and_in_the_middle_too(rows: Dataset) -> None:
    assert len(rows) == ROWS
    expected = Epochs(Shuffle(), ROWS, 12, seed=3)
    for count in (1, 2, 3, 4):
        for epoch in (0, 1):
            loaders = [Loader(rows, Epochs(Shuffle(), ROWS, 12, seed=3), Shard(n, count), 3) for n in range(count)]
            seen = []
            for index in [2, 3, 0, 1]:  # as one that resumes in the middle
                batches = [loader.get(epoch, index) for loader in loaders]
                real = [batch for batch in batches if batch is not None and (batch.ids >= 0).all()]
                ids = np.concatenate([batch.ids for batch in real])
                assert ids.tolist() == expected.ids(epoch, index).tolist()
                shown = torch.cat([batch.inputs["png"] for batch in real]).permute(0, 2, 3, 1).numpy()
                assert all((picture == pictures.pixels(id)).all() for picture, id in zip(shown, ids, strict=True))
                assert torch.cat([batch.targets for batch in real]).tolist() == (ids % 3).tolist()
                seen += ids.tolist()
            assert sorted(seen) == list(range(ROWS))
            for loader in loaders:
                loader.close()


def archive(path: Path, *files: tuple[str, bytes]) -> Path:
    with tarfile.open(path, "w") as out:
        for name, content in files:
            pictures.add(out, name, content)
    return path


def test_an_index_is_made_once_and_again_for_what_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtf.data import tar_index

    scanned: list[str] = []
    scan = tar_index._scan
    monkeypatch.setattr(tar_index, "_scan", lambda path: scanned.append(path.name) or scan(path))
    pictures.write(tmp_path, "tar", ROWS)
    first = pictures.read(tmp_path, "tar", tmp_path / "cache").fingerprint()
    assert pictures.read(tmp_path, "tar", tmp_path / "cache").fingerprint() == first
    assert sorted(scanned) == ["shard-000.tar", "shard-001.tar", "shard-002.tar"]
    other = name_of("tar", tar_index.FORMAT, os.path.realpath(tmp_path / "shard-000.tar"))
    index = tmp_path / "cache" / f"{other}.npz"
    index.write_bytes(index.read_bytes()[:-30])
    archive(tmp_path / "shard-001.tar", ("x.png", pictures.png(1)), ("x.cls", b"1"))
    changed = pictures.read(tmp_path, "tar", tmp_path / "cache")
    assert len(changed) < ROWS and changed.fingerprint() != first
    assert sorted(scanned[3:]) == ["shard-000.tar", "shard-001.tar"] and "shard-001.tar has changed" in caplog.text


def test_whoever_is_killed_while_an_index_is_made_leaves_none(tmp_path: Path) -> None:
    def make(path: Path) -> None:
        path.mkdir()
        (path / "part").write_text("half")
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        (path / "part").write_text("whole")

    def read(path: Path) -> str:
        return (path / "part").read_text()

    parent = os.getpid()
    child = os.fork()
    if not child:
        made_once(tmp_path / "cache" / "index", read, make)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert made_once(tmp_path / "cache" / "index", read, make) == "whole"


def test_one_makes_what_another_waits_for(tmp_path: Path) -> None:
    """The second begins while the first one makes it, and finds it made."""
    begun, makers = threading.Event(), list[str]()

    def make(path: Path) -> None:
        makers.append(threading.current_thread().name)
        begun.set()
        if len(makers) == 1:
            second.join(0.2)  # whoever does not wait is done by then
        path.write_text("made")

    def read() -> str:
        return made_once(tmp_path / "index", Path.read_text, make)

    second = threading.Thread(target=lambda: begun.wait() and read(), name="second")
    second.start()
    assert read() == "made"
    second.join()
    assert makers == [threading.current_thread().name]


def test_webdataset_finds_the_same_samples(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "shard-000.tar")) as out:
        for number in range(5):
            out.write({"__key__": f"some/{number:03d}", "a.png": pictures.png(number), "json": {"n": number}})
    rows: Any = tar_samples(tmp_path / "shard-{000..000}.tar", cache=tmp_path / "cache", decode=lambda sample: sample)
    theirs = list(webdataset.WebDataset(str(tmp_path / "shard-000.tar"), shardshuffle=False))
    assert [rows.items[n] for n in range(5)] == [
        {name: value for name, value in sample.items() if name in ("__key__", "a.png", "json")} for sample in theirs
    ]


def broken(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def hole(content: bytes) -> bytes:
    """A disk has lost blocks: zeros, which look like the end of an archive."""
    return content[:1024] + bytes(20480) + content[21504:]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: broken(archive(p, ("a.png", bytes(9000))), lambda b: b[:5000]), "a.tar is no whole tar.*a.png"),
        (lambda p: broken(archive(p, ("a.png", b"x"), ("b.png", b"y")), lambda b: b[:1024]), "breaks off.*byte 1024"),
        (
            lambda p: broken(
                archive(p, ("a.png", b"x"), ("b.png", b"y"), ("c.png", bytes(20000)), ("d.png", b"y")), hole
            ),
            "damaged.*byte 1024",
        ),
        (lambda p: broken(archive(p, ("a.png", b"x")), gzip.compress), "a.tar is compressed .gzip"),
        (lambda p: archive(p, ("a.png", b"x"), ("b.png", b"y"), ("a.cls", b"0")), "sample a do not lie side by side"),
        (lambda p: archive(p, ("a.png", b"x"), ("a.PNG", b"y")), "sample a has two files .png"),
    ],
)
def test_an_archive_that_cannot_be_indexed_is_named(make: Callable[[Path], Path], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        tar_samples(make(tmp_path / "a.tar"), cache=tmp_path / "cache")


def test_bytes_that_change_during_a_run_are_named(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar", ("a.npy", bytes(600)), ("b.txt", b"text"))
    rows = tar_samples(path, cache=tmp_path / "cache")
    before = path.stat()
    broken(path, lambda b: b[:700] + bytes([b[700] ^ 1]) + b[701:])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match=r"a.tar: the bytes of a.npy are others"):
        rows.fetch(np.array([0]), 0)


def test_a_folder_that_lacks_a_class_may_have_the_numbers_of_another(tmp_path: Path) -> None:
    """Else those of its own classes: bird and cat would be 0 and 1."""
    for name in ("bird/1.txt", "cat/2.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("text")
    for classes, numbers in ((None, [0, 1]), (["ant", "bird", "cat"], [1, 2])):
        rows: Any = folder_samples(tmp_path, target="cls", classes=classes)
        assert [rows.items[row]["cls"] for row in range(2)] == numbers
    with pytest.raises(DataError, match=r"the class cat is none of classes=.'ant', 'bird'."):
        folder_samples(tmp_path, classes=["ant", "bird"])
    with pytest.raises(DataError, match="no folders of classes, as in"):
        folder_samples(tmp_path / "cat", classes=["ant"])


def test_files_of_a_folder_that_change_during_a_run_are_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    rows: Any = folder_samples(tmp_path)
    (tmp_path / "b.txt").write_text("more text")
    assert rows.items[0] == {"txt": "text"}
    with pytest.raises(DataError, match=r"b.txt has changed since the start"):
        rows.items[1]
    (tmp_path / "b.TXT").write_text("text")
    with pytest.raises(DataError, match="sample b has two files .txt in upper and lower case"):
        folder_samples(tmp_path)


def test_parquet_files_that_change_or_differ_are_read_again_or_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def read(*numbers: float, more: dict[str, Any] | None = None) -> Any:
        pq.write_table(pa.table({"x": [*numbers]}), tmp_path / "a.parquet")
        pq.write_table(pa.table(more or {"x": [0.5]}), tmp_path / "b.parquet")
        return parquet_rows(tmp_path, cache=tmp_path / "cache")

    first = read(1.0, 2.0).fingerprint()
    again = read(1.0, 3.0)
    assert again.items[1] == {"x": 3.0} and again.items[2] == {"x": 0.5} and again.fingerprint() != first
    assert "a.parquet has changed since it was read" in caplog.text
    (stored,) = {file._folder for file in again.items._files if file.path.name == "a.parquet"}
    content = (stored / "rows.arrow").read_bytes()
    at = content.index(np.float64(3.0).tobytes())
    (stored / "rows.arrow").write_bytes(content[:at] + np.float64(4.0).tobytes() + content[at + 8 :])
    with pytest.raises(DataError, match=r"the cache of .*a.parquet, is damaged"):
        parquet_rows(tmp_path, cache=tmp_path / "cache").items[1]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"b.parquet has other columns than .*a.parquet: x: int64 and not x: double"):
        read(1.0, more={"x": [1]})


def test_what_is_missing_or_elsewhere_is_named(tmp_path: Path) -> None:
    archive(tmp_path / "s-0.tar", ("a.cls", b"1"))
    with pytest.raises(DataError, match=r"s-1.tar is no file, and .*\{0..2\}.tar names it"):
        tar_samples(tmp_path / "s-{0..2}.tar", cache=tmp_path / "cache")
    with pytest.raises(DataError, match="names no file"):
        tar_samples(tmp_path / "t-*.tar", cache=tmp_path / "cache")
    with pytest.raises(DataError, match="s3://bucket/a.tar is no file of this machine"):
        tar_samples("s3://bucket/a.tar", cache=tmp_path / "cache")


def test_folders_are_walked_once_and_hidden_ones_are_no_classes(tmp_path: Path) -> None:
    for name in ("a/0.txt", "b/0.txt", ".ipynb_checkpoints/0-checkpoint.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a text")
    rows: Any = folder_samples(tmp_path, decode=lambda sample: (sample["__key__"], sample["cls"])).items  # type: ignore[attr-defined]
    assert [rows[n] for n in range(len(rows))] == [("a/0", b"0"), ("b/0", b"1")]
    (tmp_path / "a/up").symlink_to("..")
    with pytest.raises(DataError, match="a/up is a link in a circle, to "):
        folder_samples(tmp_path)


def test_links_inside_an_archive_are_followed_and_others_named(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        pictures.add(out, "data/a.cls", b"7")
        for name, target, kind in (("b.cls", "data/a.cls", tarfile.LNKTYPE), ("data/c.cls", "a.cls", tarfile.SYMTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            out.addfile(link)
    rows: Any = tar_samples(tmp_path / "a.tar", cache=tmp_path / "cache")
    assert [rows.items[n] for n in range(3)] == [{"cls": 7}] * 3
    with tarfile.open(tmp_path / "b.tar", "w") as out:
        link = tarfile.TarInfo("b.cls")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        out.addfile(link)
    with pytest.raises(DataError, match=r"b.cls is a link to /etc/passwd, which is no file of the archive"):
        tar_samples(tmp_path / "b.tar", cache=tmp_path / "cache")


def test_a_file_may_have_brackets_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "a[1].tar").touch()
    assert files_of(tmp_path / "a[1].tar", ".tar") == [tmp_path / "a[1].tar"]
    assert files_of(tmp_path / "a?1?.tar", ".tar") == [tmp_path / "a[1].tar"]


def test_files_in_no_sample_are_left_out_by_name(tmp_path: Path) -> None:
    """In a folder and in an archive, so that the start of a run counts them."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("1.cls", "LICENSE", ".hidden"):
        (folder / name).write_bytes(b"1")
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        out.add(folder, "")
    read = folder_samples(folder, target="cls"), tar_samples(tmp_path / "a.tar", cache=tmp_path / "cache")
    again = tar_samples(tmp_path / "a.tar", cache=tmp_path / "cache")
    for rows in (*read, again):
        assert len(rows) == 1 and sorted(name.rpartition("/")[2] for name in rows.left_out) == [".hidden", "LICENSE"]
        assert left_out_text(rows.left_out) == "1 .hidden, 1 without suffix (in no sample)"


def test_pickles_and_broken_files_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="sample s has a pickle, .pt"):
        decoded({"__key__": "s", "pt": b""})
    with pytest.raises(DataError, match="s.png .3 bytes. cannot be decoded"):
        decoded({"__key__": "s", "png": b"abc"})
    with pytest.raises(DataError, match="s.tif .* cannot be decoded: its pixels are numbers of 32 bits"):
        decoded({"__key__": "s", "tif": encode(np.zeros((2, 2), np.uint8), "TIFF", "F")})
    found = decoded({"__key__": "s", "a.txt": b"x", "json": b"[1]", "cls": b"3\n", "bin": b"z"})
    assert found == {"a.txt": "x", "json": [1], "cls": 3, "bin": b"z"}


def test_a_stream_is_written_once_and_read_back_as_it_was(tmp_path: Path) -> None:
    opened = []

    def stream() -> Any:
        opened.append(1)
        for n in range(5):
            yield (
                {"x": torch.full((n + 1,), n), "more": [np.array([n], np.float32), (n, f"text {n}", None, b"\x00b")]},
                n,
            )

    folder = write_samples(stream, tmp_path / "rows", shard_bytes=3000)
    assert write_samples(stream, tmp_path / "rows") == folder and opened == [1]
    assert len(list(Path(folder).glob("*.tar"))) > 1
    rows: Any = tar_samples(folder, cache=tmp_path / "cache")
    for n in range(5):
        (inputs, target) = rows.items[n]
        assert inputs["x"].tolist() == [n] * (n + 1) and target == n
        assert inputs["more"][0].dtype == np.float32 and inputs["more"][1] == (n, f"text {n}", None, b"\x00b")


def test_a_stream_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sample 1: sample\['x'\] is a builtins.set"):
        write_samples([{"x": 1}, {"x": {1}}], tmp_path / "rows")
    with pytest.raises(DataError, match="no samples"):
        write_samples([], tmp_path / "rows")
    assert [path.name for path in tmp_path.iterdir()] == [".rows.lock"]
