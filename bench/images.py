"""Images per second from JPEG files of natural size to batches of 224 x 224 pixels, RandomResizedCrop and mirrored,
against what else there is.

    python -m bench.images shared/data/imagenet-sample-200.tar             # any archive or folder of JPEG files
    python -m bench.images ARCHIVE --output float32 --readers dtf loop
    python -m bench.images ARCHIVE --varied          # the files 1, 2 and 3 times as wide, of several qualities

Each reader has a process of its own and runs in steady state: the readers take turns of `--seconds` or more, and stand
still (SIGSTOP) while another reads, with all of their processes and threads. Nobody gains from that pause: what is
ready when a turn begins was made in the last one, and as much is ready when it ends. Told are medians with their range,
processor time per image, and dtf's rate over that of the other. `floor` decodes each file at 1/8 of its size and does
nothing else: no reader of the original files that knows no crop can be faster. What cannot run is told with the reason.
`python -m bench` reads the archive that DTF_BENCH_IMAGES names.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from bench.contest import KEPT, Running, Turn, contest
from bench.image_readers import BATCH
from bench.medians import machine
from bench.peers import Absent, python_of
from bench.processes import Process, answers
from bench.rows import Row, table, with_ratios

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


class Reader(Running):
    """A contestant: a process that reads when told to, and is stopped otherwise, with all of its session."""

    alone = True  # as it starts, it finds out how many batches a turn takes

    def __init__(self, name: str, *arguments: str) -> None:
        super().__init__([])
        self.who, self.resampling = NAMES[name]
        self.delivers, self._name, self._arguments = "", name, arguments

    @property
    def settings(self) -> str:
        return "; ".join(text for text in (self.resampling, self.delivers) if text)

    def start(self) -> Running:
        python, found = sys.executable, dict[str, str]()
        if self._name in _OWN_ENVIRONMENT:
            python = python_of("images")
        if self._name == "spdl":
            found = {"LD_LIBRARY_PATH": _ffmpeg(Path(python).parent.parent)}
        command = [python, "-m", "bench.image_readers", self._name, *self._arguments]
        self.asked = [Process(command, KEPT | found)]  # batches come from memory that was freed before, as in dtf
        return self

    def wait_until_ready(self) -> None:
        self.delivers = answers(self.asked)[0]["delivers"]
        self.asked[0].signal(signal.SIGSTOP)

    def turn(self, steps: int) -> Turn:
        """Seconds of an image, however many it reads."""
        self.asked[0].signal(signal.SIGCONT)
        told = self._told([steps])[0]
        self.asked[0].signal(signal.SIGSTOP)
        return Turn(told["seconds"] / told["images"], told["cpu"] / told["images"], None, 0.0)


def compare(
    work: str, folder: Path, readers: Sequence[str], threads: int, rounds: int, seconds: float, output: str
) -> list[Row]:
    """A row for each reader. `folder`: of the files, see `write`."""
    those = [Reader(name, str(folder), str(threads), output, str(seconds)) for name in readers]
    turns, rows = contest(work, those, rounds, steps=1, warm=1)
    for one in those:
        if one.who in turns:
            rates, used = [1 / turn.seconds for turn in turns[one.who]], [1e3 * turn.cpu for turn in turns[one.who]]
            rows.append(Row(work, one.who, "images/s", rates, True, used, "ms an image", settings=one.settings))
    return with_ratios(rows)


def _of(source: Path, most: int, large: bool, readers: Sequence[str], *rest: Any) -> list[Row]:
    threads, rounds, seconds, output = rest
    with tempfile.TemporaryDirectory(prefix="dtf-bench-images-") as name:
        folder = Path(name)
        sizes = [write(file, folder, number) for number, file in enumerate(_files(source, most, large))]
        if len(sizes) < BATCH:
            raise SystemExit(f"{source}: {len(sizes)} JPEG files, fewer than a batch of {BATCH}")
        kind = "enlarged, of several qualities" if large else "as they are"
        work = f"Reading {len(sizes)} JPEG files of {sum(sizes) / len(sizes) / 1000:.0f} kB, {kind}, to {output}"
        return compare(work, folder, readers, threads, rounds, seconds, output)


def _measure(quick: bool, large: bool, output: str) -> list[Row]:
    """Of the archive or folder that the environment names."""
    source = os.environ.get(_FILES)
    if not source:
        return [Row("Reading JPEG files", "dtf", not_run=f"{_FILES} names no archive or folder of JPEG files")]
    rounds, seconds = (2, 0.2) if quick else (20, 1.0)
    most, threads = 80 if quick else 2000, len(os.sched_getaffinity(0))  # more than a batch
    return _of(Path(source), most, large, list(NAMES), threads, rounds, seconds, output)


def measure(quick: bool) -> list[Row]:
    return _measure(quick, False, "uint8")


def measure_floats(quick: bool) -> list[Row]:
    return _measure(quick, False, "float32")


def measure_large(quick: bool) -> list[Row]:
    return _measure(quick, True, "uint8")


def measure_large_floats(quick: bool) -> list[Row]:
    return _measure(quick, True, "float32")


def main() -> None:
    given = _arguments()
    print(f"{given.threads} threads or workers, {given.rounds} rounds of {given.seconds} s; {machine()}", flush=True)
    rest = given.threads, given.rounds, given.seconds, given.output
    rows = _of(given.images, given.most, given.varied, given.readers, *rest)
    print(table(rows))
    raise SystemExit(not any(row.values for row in rows))


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
    if not path.exists():
        raise SystemExit(f"{path} does not exist")
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
    inside = next(environment.glob("lib/*/site-packages/av.libs"), None)
    if inside is None:
        raise Absent("PyAV's wheel has no FFmpeg")
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
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--most", type=int, default=2000, help="files that are read at most")
    parser.add_argument("--varied", action="store_true", help="other sizes, qualities and subsampling: see `varied`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
