"""Images per second from JPEG files of natural size to batches of 224 x 224 pixels, RandomResizedCrop and mirrored,
against what else there is.

    python -m bench.images shared/data/imagenet-sample-200.tar             # any archive or folder of JPEG files
    python -m bench.images ARCHIVE --output float32 --readers dtf loop
    python -m bench.images ARCHIVE --varied          # the files 1, 2 and 3 times as wide, of several qualities

Each reader has a process of its own and runs in steady state: the readers take turns of `--seconds`, and stand still
(SIGSTOP) while another reads; what was ready before a turn is read before the clock starts. Told are medians with their
range, processor seconds per image, and dtf's rate divided by the other's in the same round, with the 95 % interval of
the median. `floor` decodes each file at 1/8 of its size and does nothing else: no reader of the original files that
knows no crop can be faster. What cannot run is told with the reason. `python -m bench` reads the archive that
DTF_BENCH_IMAGES names.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image

from bench.contest import KEPT
from bench.medians import interval, machine
from bench.peers import Absent, python_of
from bench.rows import Row, with_ratios

ROOT = Path(__file__).parent.parent
_FILES = "DTF_BENCH_IMAGES"
"""Environment variable: the archive or folder for `python -m bench`."""
NAMES = {  # reader -> what it is, its resampling
    "dtf": ("dtf", "bilinear, anti-aliased"),
    "loop": ("simplejpeg + torch, threads", "bilinear, anti-aliased"),
    "opencv": ("simplejpeg + OpenCV, threads", "bilinear, not anti-aliased"),
    "dali": ("DALI on the CPU", "linear, anti-aliased"),
    "spdl": ("SPDL, threads", "bilinear of FFmpeg"),
    "io": ("torchvision.io + v2, DataLoader", "bilinear, anti-aliased"),
    "pil": ("torchvision ImageFolder + PIL, DataLoader", "bilinear, anti-aliased"),
    "floor": ("decoding alone, at 1/8 of the size", ""),
}
_OWN_ENVIRONMENT = ("dali", "opencv", "spdl")


class Reader:
    """A process that reads when told to, and is stopped otherwise."""

    def __init__(self, name: str, python: Path, folder: Path, threads: int, kind: str) -> None:
        paths = [str(ROOT), *dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])]
        self._process = subprocess.Popen(
            [str(python), "-m", "bench.image_readers", name, str(folder), str(threads), kind],
            env=os.environ
            | KEPT  # batches come from memory that was freed before, as in a rank of dtf
            | {"PYTHONPATH": os.pathsep.join(paths)}
            | ({"LD_LIBRARY_PATH": _ffmpeg(python.parent.parent)} if name == "spdl" else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self.delivers = self._answer()
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def read(self, seconds: float) -> tuple[float, float]:
        """Images per second, and processor milliseconds per image."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        images, passed, used = json.loads(self._answer())
        self._signal(signal.SIGSTOP)
        return images / passed, used / images * 1000

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None and self._process.stderr is not None
        if line := self._process.stdout.readline().strip():
            return line
        errors = self._process.stderr.read().strip().splitlines()
        raise RuntimeError(errors[-1] if errors else f"ended with {self._process.wait()}")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


Turns = dict[str, list[tuple[float, float]]]
"""Reader -> images per second and processor milliseconds per image, of each round."""


def compare(
    folder: Path, readers: Sequence[str], threads: int, rounds: int, seconds: float, output: str
) -> tuple[Turns, dict[str, str], dict[str, str]]:
    """The turns of all readers, what they deliver, and why others cannot run. `folder`: of the files, see `write`."""
    running: dict[str, Reader] = {}
    absent: dict[str, str] = {}
    found: Turns = {}
    try:
        for name in readers:
            try:
                python = Path(python_of("images") if name in _OWN_ENVIRONMENT else sys.executable)
                running[name] = Reader(name, python, folder, threads, output)
            except (RuntimeError, OSError, Absent) as error:
                absent[name] = str(error)[:200]
        found.update({name: [] for name in running})
        for number in range(rounds):
            order = list(running) if number % 2 == 0 else list(running)[::-1]
            turns = {name: running[name].read(seconds) for name in order}
            for name, turn in turns.items():
                found[name].append(turn)
    finally:
        for reader in running.values():
            reader.close()
    return found, {name: reader.delivers for name, reader in running.items()}, absent


def measure(quick: bool) -> list[Row]:
    """Of the archive or folder that the environment names."""
    source = os.environ.get(_FILES)
    if not source:
        return [Row("Reading JPEG files", "dtf", not_run=f"{_FILES} names no archive or folder of JPEG files")]
    threads, rows = len(os.sched_getaffinity(0)), []
    for vary, output in ((False, "uint8"), (False, "float32"), (True, "uint8"), (True, "float32")):
        with tempfile.TemporaryDirectory() as folder:
            files = _files(Path(source), 20 if quick else 2000, vary)
            sizes = [write(file, Path(folder), number) for number, file in enumerate(files)]
            found, _, absent = compare(Path(folder), list(NAMES), threads, *((2, 0.2) if quick else (20, 0.4)), output)
        kind = "enlarged, of several qualities" if vary else "as they are"
        work = f"Reading {len(sizes)} JPEG files of {sum(sizes) / len(sizes) / 1000:.0f} kB, {kind}, to {output}"
        for name, turns in found.items():
            rates, used = ([*column] for column in zip(*turns, strict=True))
            who, resampling = NAMES[name]
            rows.append(Row(work, who, "images/s", rates, True, used, "ms an image", settings=resampling))
        rows += [Row(work, NAMES[name][0], not_run=why) for name, why in absent.items()]
    return with_ratios(rows)


def main() -> None:
    given = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # readers are ended
    with tempfile.TemporaryDirectory() as folder:
        sizes = [write(file, Path(folder), i) for i, file in enumerate(_files(given.images, given.most, given.varied))]
        print(
            f"{len(sizes)} files of {sum(sizes) / len(sizes) / 1000:.0f} kB, {given.output}, {given.threads} threads "
            f"or workers, {given.rounds} rounds of {given.seconds} s; {machine()}"
        )
        found, delivers, absent = compare(
            Path(folder), given.readers, given.threads, given.rounds, given.seconds, given.output
        )
    for name, why in absent.items():
        print(f"{NAMES[name][0]}: not run: {why}")
    if found and all(found.values()):
        report(found, delivers)


def report(found: dict[str, list[tuple[float, float]]], delivers: dict[str, str]) -> None:
    """A table in Markdown, fastest first."""
    print("| reader | resampling | images/s | range | CPU ms/image | dtf is | delivers |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in sorted(found, key=lambda name: -median(rate for rate, _ in found[name])):
        rates, used = zip(*found[name], strict=True)
        ratio = ""
        if name != "dtf" and "dtf" in found:
            ratios = [own / other for (own, _), other in zip(found["dtf"], rates, strict=True)]
            ratio = f"{median(ratios):.2f} ({interval(ratios)})"
        print(
            f"| {' | '.join(NAMES[name])} | {median(rates):,.0f} | {min(rates):,.0f}-{max(rates):,.0f} | "
            f"{median(used):.2f} | {ratio} | {delivers[name]} |"
        )


def write(content: bytes, folder: Path, number: int) -> int:
    """Put a file where all readers look: `{train,val}/<class>/`, two classes."""
    for split in ("train", "val")[: 2 if number < 2 else 1]:
        path = folder / split / f"c{number % 2}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return len(content)


def varied(content: bytes, number: int) -> bytes:
    """The picture 1, 2 or 3 times as wide, at quality 75, 90 or 95, with colour at full, half or a quarter of the
    pixels.
    """
    image, out = Image.open(io.BytesIO(content)).convert("RGB"), io.BytesIO()
    times, quality, colour = 1 + number % 3, (75, 90, 95)[number // 3 % 3], number // 9 % 3
    image = image.resize((image.width * times, image.height * times), Image.Resampling.BICUBIC)
    image.save(out, "JPEG", quality=quality, subsampling=colour)
    return out.getvalue()


def _files(path: Path, most: int, vary: bool) -> Iterator[bytes]:
    for number, content in enumerate(_originals(path)):
        if number == most:
            return
        yield varied(content, number) if vary else content


def _originals(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        yield from (file.read_bytes() for file in sorted(path.rglob("*")) if file.suffix.lower() in (".jpg", ".jpeg"))
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.lower().endswith((".jpg", ".jpeg")) and (stream := archive.extractfile(member)) is not None:
                yield stream.read()


def _ffmpeg(environment: Path) -> str:
    """Where the FFmpeg inside PyAV's wheel is found under its usual names, which SPDL looks for."""
    folder = environment / "ffmpeg"
    folder.mkdir(exist_ok=True)
    inside = next(environment.glob("lib/*/site-packages/av.libs"))
    for file in inside.glob("lib[as][vw]*-*.so.*"):  # libavcodec-e57b519c.so.62.11.100 as libavcodec.so.62
        link = folder / f"{file.name.split('-')[0]}.so.{file.name.split('.so.')[1].split('.')[0]}"
        if not link.exists():
            link.symlink_to(file)
    return f"{folder}:{inside}"


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--output", choices=("uint8", "float32"), default="uint8")
    parser.add_argument("--readers", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--most", type=int, default=2000, help="files that are read at most")
    parser.add_argument("--varied", action="store_true", help="other sizes, qualities and subsampling: see `varied`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
