"""Checkpoints of several ranks: any cut is read back under any other, bit for bit, and a run goes on from the right
one.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from dtf.checkpoint import storage
from dtf.checkpoint.boxes import TORCH_DTYPES
from dtf.checkpoint.manifest import BLOCK_BYTES, intersect
from dtf.checkpoint.options import Every
from dtf.checkpoint.safetensors_format import header, slots
from dtf.core.errors import BusyError, ConfigError, DataError
from dtf.core.types import Box, State
from tests.support.checkpoints import checkpointer, noise, on_ranks, part, same_bits, small_checkpoint, whole

DTYPES = [getattr(torch, name) for name in TORCH_DTYPES.values()]
Cut = list[tuple[tuple[int, ...], tuple[int, ...]]]


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of folders are written here and none has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


# ---------------------------------------------------------------- any cut is read under any other


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    return tuple(draw(st.lists(st.integers(0, 6), max_size=3)))


@st.composite
def cuts(draw: st.DrawFn, shape: tuple[int, ...]) -> Cut:
    """A partition of a tensor, by cutting parts in two again and again."""
    parts: Cut = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        which, axis = draw(st.integers(0, len(parts) - 1)), draw(st.integers(0, max(0, len(shape) - 1)))
        offset, size = parts[which]
        if shape:
            at = draw(st.integers(0, size[axis]))
            parts[which] = (offset, (*size[:axis], at, *size[axis + 1 :]))
            parts.append(
                (
                    (*offset[:axis], offset[axis] + at, *offset[axis + 1 :]),
                    (*size[:axis], size[axis] - at, *size[axis + 1 :]),
                )
            )
    return parts


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_cut_by_any_ranks_is_read_back_under_any_other_cut(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("c")
    size = data.draw(st.integers(1, 4), label="ranks")
    tensors = {
        f"model/t{i}.weight": noise(data.draw(shapes()), data.draw(st.sampled_from(DTYPES)), i)
        for i in range(data.draw(st.integers(0, 3), label="tensors"))
    }
    boxes: list[list[Box]] = [[] for _ in range(size)]
    for name, tensor in tensors.items():
        for offset, shape in data.draw(cuts(tuple(tensor.shape))):
            boxes[data.draw(st.integers(0, size - 1))].append(
                Box(name, part(tensor, offset, shape), tuple(tensor.shape), offset)
            )
    paths = on_ranks(size, lambda world: checkpointer(folder, world).save(7, State(boxes[world.rank], {}), {"x": 1}))
    assert paths == [str(folder / "step_000007")] * size
    others = data.draw(st.integers(1, 3))
    assert on_ranks(others, lambda world: checkpointer(folder, world).find()) == [folder / "step_000007"] * others
    source = checkpointer(folder).load(folder / "step_000007")
    assert source.names() == set(tensors)
    for name, tensor in tensors.items():
        assert same_bits(source.read(name), tensor)
        for offset, shape in data.draw(cuts(tuple(tensor.shape))):
            read = source.read(name, offset, shape, tuple(tensor.shape))
            assert same_bits(read, part(tensor, offset, shape).contiguous())
    shutil.rmtree(folder)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits_and_the_library_reads_them(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "model/a": noise((3, 5), dtype, 1),
        "model/b": noise((), dtype, 2),
        "model/c": noise((0, 4), dtype, 3),
        "model/d": noise((4,), torch.float64, 4),
    }
    path = Path(
        checkpointer(tmp_path).save(1, State([whole(name, tensor) for name, tensor in tensors.items()], {}), {})
    )
    source = checkpointer(tmp_path).load(path)
    with safe_open(path / "rank_0.safetensors", framework="pt") as library:
        for name, tensor in tensors.items():
            assert same_bits(source.read(name), tensor)
            assert same_bits(library.get_tensor(name), tensor)


def test_files_of_the_library_are_understood(tmp_path: Path) -> None:
    tensors = {"b": noise((2, 3), torch.bfloat16, 1), "a": noise((7,), torch.float32, 2), "e": torch.empty(0)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"k": "v"})
    data = (tmp_path / "x.safetensors").read_bytes()
    for name, slot in slots(lambda start, stop: data[start:stop], len(data)).items():
        assert slot.shape == tuple(tensors[name].shape)
        assert data[slot.start : slot.stop] == bytes(tensors[name].view(torch.uint8).flatten().tolist())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b'{"a":1}',
        b'{"a":{}}',
        b'{"a":{"dtype":"X","shape":[],"data_offsets":[0,1]}}',
        b"[" * 3000,
    ]
    + [
        b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[%s]}}' % pair
        for pair in ((b"9", b"0,9"), (b"1", b"-1,0"), (b"-1", b"1,0"), (b"1.0", b"0,1"), (b"2", b"0,1"))
    ],
)
def test_a_header_that_is_none_is_refused(text: bytes) -> None:
    data = len(text).to_bytes(8, "little") + text + b"12345678"
    with pytest.raises(DataError, match="safetensors"):
        slots(lambda start, stop: data[start:stop], len(data))
    for length in (0, len(data), 1 << 63):
        with pytest.raises(DataError, match="safetensors"):
            slots(lambda start, stop, length=length: length.to_bytes(8, "little"), len(data))


def test_headers_keep_tensors_aligned() -> None:
    assert len(header([("a", "F32", (3,))])) % 8 == 0


def test_tensors_larger_than_blocks_and_parts_of_them(tmp_path: Path) -> None:
    tensor = noise((1030, 1024), torch.float32, 0)
    small = [whole(f"model/s{i}", noise((i + 1,), torch.float32, i)) for i in range(50)]
    source = checkpointer(tmp_path).load(
        Path(checkpointer(tmp_path).save(1, State([*small[:25], whole("model/big", tensor), *small[25:]], {}), {}))
    )
    assert same_bits(source.read("model/big"), tensor)
    for offset, shape in (
        ((0, 0), (1, 1)),
        ((1029, 1023), (1, 1)),
        ((255, 3), (520, 7)),
        ((0, 1000), (1030, 24)),
        ((7, 0), (0, 1024)),
    ):
        read = source.read("model/big", offset, shape, tuple(tensor.shape))
        assert same_bits(read, part(tensor, offset, shape).contiguous())
    assert all(same_bits(source.read(box.name), box.tensor) for box in small)


def test_a_part_is_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 16 * BLOCK_BYTES // 1024
    folder = Path(checkpointer(tmp_path).save(1, State([whole("model/big", torch.zeros(rows, 256))], {}), {}))
    source = checkpointer(tmp_path).load(folder)
    seen = []
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, buffers, offset: seen.append(len(buffers[0])) or real(file, buffers, offset)
    )
    source.read("model/big", (rows // 2, 0), (rows // 16, 256), (rows, 256))
    assert sum(seen) <= 4 * BLOCK_BYTES


def test_reading_what_is_not_there_says_so(tmp_path: Path) -> None:
    source = checkpointer(tmp_path).load(
        Path(checkpointer(tmp_path).save(1, State([whole("model/conv1.weight", torch.zeros(4, 3))], {}), {}))
    )
    with pytest.raises(DataError, match=r"no tensor model/conv1.weigth, but model/conv1.weight"):
        source.read("model/conv1.weigth")
    for offset, shape, of in (
        (None, (3, 4), None),
        (None, (12,), None),
        ((0, 0), (5, 3), (4, 3)),
        ((-1, 0), (2, 3), (4, 3)),
        ((4, 0), (1, 3), (4, 3)),
        ((0,), (4,), (4,)),
        ((0, 0), (2, 3), (2, 3)),
    ):
        with pytest.raises(DataError, match="shape"):
            source.read("model/conv1.weight", offset, shape, of)
    assert source.read("model/conv1.weight", (3, 1), None, (4, 3)).shape == (1, 2)
    with pytest.raises(ValueError, match="the shape of all of it"):
        source.read("model/conv1.weight", (3, 1))


def test_scalars_keep_every_bit(tmp_path: Path) -> None:
    floats = [
        0.1,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        float("inf"),
        float("-inf"),
        float("nan"),
        struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0],
    ]
    scalars = {"window": floats, "clock": {"best": None, "step": 2**70, "on": True}, "data": "é\ud800"}
    found = checkpointer(tmp_path).load(Path(checkpointer(tmp_path).save(1, State([], {}), scalars))).scalars
    assert [struct.pack(">d", x) for x in found.pop("window")] == [struct.pack(">d", x) for x in floats]
    assert found == {key: value for key, value in scalars.items() if key != "window"}


def test_intersections_are_what_both_boxes_hold() -> None:
    for a, n, b, m in itertools.product(range(4), range(3), range(4), range(3)):
        shared = sorted(set(range(a, a + n)) & set(range(b, b + m)))
        found = intersect((a,), (n,), (b,), (m,))
        assert found == (((shared[0],), (len(shared),)) if shared else None)


# ---------------------------------------------------------------- where a run goes on


def test_auto_takes_the_newest_loadable_and_cleans_up(tmp_path: Path) -> None:
    notes: list[str] = []
    assert checkpointer(tmp_path / "none", notes=notes).find() is None
    for step in (1, 2, 3):
        small_checkpoint(tmp_path, step)
    (tmp_path / "step_000003" / "state.json").write_text("{}")
    (tmp_path / "step_000004.tmp-dead").mkdir()
    assert checkpointer(tmp_path, notes=notes).find() == tmp_path / "step_000002"
    assert not (tmp_path / "step_000004.tmp-dead").exists()
    assert len(notes) == 1 and "step_000003 is skipped: state.json: has 2 bytes" in notes[0]


def test_a_run_never_starts_anew_over_checkpoints_that_cannot_be_loaded(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    small_checkpoint(other, 9)
    for step in (1, 2):
        (small_checkpoint(own, step) / "manifest.json").unlink()
    before = sorted(os.listdir(own))
    for resume, attempt in (("auto", 0), ("auto", 1), (str(other), 0)):
        results = on_ranks(
            2, lambda world, resume=resume, attempt=attempt: checkpointer(own, world, resume=resume).find(attempt)
        )
        for error in results:
            assert isinstance(error, DataError)
            assert re.search(
                r"own holds no checkpoint that can be loaded \(step_000002: manifest.json is missing.*move them away",
                str(error),
            ), error
    assert sorted(os.listdir(own)) == before


def test_what_a_crash_kept_from_being_removed_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"keep_last": 2, "keep_best": 1}
    for step, value in ((1, 0.9), (2, 0.1), (3, 0.2)):
        checkpointer(tmp_path, **options).save(step, State([], {}), {}, value)
    with monkeypatch.context() as patch:
        # killed right after the last save
        patch.setattr("dtf.checkpoint.checkpointer.retain", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for step in (4, 5):
            with pytest.raises(KeyboardInterrupt):
                checkpointer(tmp_path, **options).save(step, State([], {}), {})
    (tmp_path / "step_000004.tmp-dead").mkdir()
    assert steps(tmp_path) == [5, 4, 3, 2, 1]

    def go_on(world: Any) -> Path | None:
        found = (again := checkpointer(tmp_path, world, **options)).find()
        again.retain()
        return found

    assert on_ranks(2, go_on) == [tmp_path / "step_000005"] * 2
    assert steps(tmp_path) == [5, 4, 1], "the newest two and the best"
    assert not (tmp_path / "step_000004.tmp-dead").exists()


def test_a_start_removes_nothing_in_favour_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        small_checkpoint(tmp_path, step)
    # only its digest tells
    (tmp_path / "step_000003" / "state.json").write_bytes(
        b"x" * (tmp_path / "step_000003" / "state.json").stat().st_size
    )
    again = checkpointer(tmp_path, keep_last=1, keep_best=0)
    assert again.find() == tmp_path / "step_000002"
    assert steps(tmp_path) == [3, 2, 1], "the run may still refuse to go on"
    again.retain()
    assert steps(tmp_path) == [3, 2]
    again.save(4, State([], {}), {})
    assert steps(tmp_path) == [4, 3], "the damaged one is left for a person to look at"
    again.save(3, State([], {}), {})
    again.save(5, State([], {}), {})
    assert steps(tmp_path) == [5], "written anew it is a checkpoint as any other"


def steps(folder: Path) -> list[int]:
    return [storage.step_of(path.name) or 0 for path in storage.checkpoints(folder)]


def test_a_run_folder_stays_one_run(tmp_path: Path) -> None:
    own, other = tmp_path / "a" / "checkpoints", tmp_path / "b" / "checkpoints"
    for folder in (own, other):
        folder.parent.mkdir()
    assert checkpointer(own, resume="never").find() is None
    small_checkpoint(other, 5)
    assert checkpointer(own, resume=str(other.parent)).find() == other / "step_000005"
    assert checkpointer(own, resume=str(other / "step_000005")).find(attempt=1) == other / "step_000005"
    for step in (1, 2):
        small_checkpoint(own, step)
    with pytest.raises(BusyError, match="step_000002"):
        checkpointer(own, resume="never").find()
    with pytest.raises(BusyError, match="older than step_000002"):
        checkpointer(own, resume=str(own / "step_000001")).find()
    for resume in ("auto", str(own.parent), str(own / "step_000002"), str(other)):
        assert checkpointer(own, resume=resume).find() == own / "step_000002"
    for resume in ("never", str(own / "step_000001"), str(other), "/gone"):
        assert checkpointer(own, resume=resume).find(attempt=1) == own / "step_000002"


def test_a_path_to_resume_from_must_load(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no checkpoint"):
        checkpointer(tmp_path / "own", resume=str(tmp_path / "nothing")).find()
    folder = small_checkpoint(tmp_path / "other", 3)
    (folder / "rank_1.safetensors").write_bytes(b"")
    results = on_ranks(2, lambda world: checkpointer(tmp_path / "own", world, resume=str(folder)).find())
    assert all(isinstance(error, DataError) and "can be loaded" in str(error) for error in results), results


def test_nothing_to_resume_from_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.resume"):
        Every(resume="").check()


def test_options_look_for_the_path_before_ranks_start(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"checkpoint\.resume"):
        Every(resume=str(tmp_path)).check()
    (tmp_path / "run").mkdir()
    small_checkpoint(tmp_path / "run" / "checkpoints")
    Every(resume=str(tmp_path / "run")).check()
    Every(resume="auto", every_steps=0).check()
