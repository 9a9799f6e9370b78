"""JPEG files of natural size to batches of 224 pixels on the GPU: dtf's reader, which decodes on the processor, against
decoders on the GPU.

Files come from $DTF_IMAGES, a folder or .tar; without it they are made: 500 x 375 pixels of smooth noise, which decode
as fast as photographs of their length in bytes.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.gpu import device
from bench.gpu.contest import interval_text
from bench.gpu.job import Job
from bench.gpu.steps import IMAGES, installed
from dtf.recipes.resnet.photos import Look, Photos
from dtf.recipes.resnet.store import Store

SIDE, BATCH = 224, 128
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


class Memory(Store):
    """Files that are in memory."""

    def __init__(self, files: list[bytes]) -> None:
        super().__init__(Path(), tuple(map(str, range(len(files)))), None, "")
        self.files = files

    def __getitem__(self, row: int) -> bytes:
        return self.files[row]


def run(job: Job) -> None:
    cores = len(os.sched_getaffinity(0))
    files = _files(16 if job.rehearsed else 2048)
    mean = sum(map(len, files)) / len(files)
    job.lines.figure("files", len(files), "", bytes_each=round(mean), from_=os.environ.get(IMAGES, "made here"))
    place = device.name(job.rehearsed)
    ways: dict[str, Callable[[], int]] = {"dtf, decoded on the processor": _dtf(files, cores, place)}
    if job.rehearsed:
        job.lines.not_run("torchvision, decoded on the GPU", "it needs a GPU")
    else:
        ways["torchvision, decoded on the GPU"] = _torchvision(files, place)
    if installed("nvidia.dali"):
        ways["DALI"] = _dali(files, cores)
    else:
        job.lines.not_run("DALI", "nvidia-dali is not installed")
    _contest(job, ways, len(files))


def _contest(job: Job, ways: dict[str, Callable[[], int]], count: int) -> None:
    seconds: dict[str, list[float]] = {}
    for name, work in list(ways.items()):
        try:
            work()
            seconds[name] = []
        except Exception as error:  # noqa: BLE001 (one way that fails says so, and the others are timed)
            job.lines.part(name, False, f"{type(error).__name__}: {str(error)[:300]}")
            del ways[name]
    order, names = random.Random(0), list(ways)
    for number in range(2 if job.rehearsed else 11):
        if number > 2 and job.left_s < 15:
            break
        order.shuffle(names)
        for name in names:
            seconds[name].append(device.timed(ways[name]))
    base = "dtf, decoded on the processor"
    for name, taken in seconds.items():
        job.lines.figure(name, round(count / median(taken)), "images/s", rounds=len(taken))
        if name != base and base in seconds:
            ratios = [a / b for a, b in zip(taken, seconds[base], strict=True)]
            job.lines.figure(f"time of {name} / dtf", f"{median(ratios):.3f} ({interval_text(ratios)})")
    job.lines.part("images", base in seconds)


def _dtf(files: list[bytes], threads: int, place: str) -> Callable[[], int]:
    """As a run reads them: two batches ahead, pinned, copied without waiting."""
    from concurrent.futures import ThreadPoolExecutor

    look = Look(AREA, RATIO, True, (), "", 0.0, 0.0, 0, 0)
    photos = Photos(Memory(files), np.zeros(len(files), np.int64), SIDE, 256, look, 0, threads, 0)
    pool = ThreadPoolExecutor(2)

    def read(rows: np.ndarray) -> torch.Tensor:
        pixels = photos.fetch(rows, 0)[0]["pixels"]
        return pixels.pin_memory() if device.present() else pixels

    def epoch() -> int:
        waiting = [pool.submit(read, rows) for rows in _batches(len(files))]
        done = 0
        for future in waiting:
            images = future.result().to(place, non_blocking=True).permute(0, 3, 1, 2).float()
            done += len(images)
        return done

    return epoch


def _batches(count: int) -> list[np.ndarray]:
    return [np.arange(first, min(first + BATCH, count)) for first in range(0, count, BATCH)]


def _torchvision(files: list[bytes], place: str) -> Callable[[], int]:
    """nvJPEG, then crops of each image by itself on the GPU, as sizes differ."""
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    crop = v2.Compose([v2.RandomResizedCrop(SIDE, AREA, RATIO, antialias=True), v2.RandomHorizontalFlip()])
    content = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]

    def epoch() -> int:
        done = 0
        for rows in _batches(len(content)):
            decoded: Any = decode_jpeg([content[row] for row in rows], ImageReadMode.RGB, device=place)
            done += len(torch.stack([crop(image) for image in decoded]).float())
        return done

    return epoch


def _dali(files: list[bytes], threads: int) -> Callable[[], int]:
    from nvidia.dali import fn, pipeline_def, types  # type: ignore[import-not-found]

    content = [np.frombuffer(file, np.uint8) for file in files]

    @pipeline_def(batch_size=BATCH, num_threads=threads, device_id=0)
    def pipeline() -> Any:
        jpegs = fn.external_source(lambda: next(source), dtype=types.UINT8)
        images = fn.decoders.image_random_crop(
            jpegs, device="mixed", output_type=types.RGB, random_area=AREA, random_aspect_ratio=RATIO
        )
        return fn.resize(images, size=(SIDE, SIDE), antialias=True)

    def batches() -> Any:
        while True:
            for first in range(0, len(content) - BATCH + 1, BATCH):
                yield content[first : first + BATCH]

    source = batches()
    built = pipeline()
    built.build()

    def epoch() -> int:
        return sum(len(built.run()[0]) for _ in range(len(content) // BATCH))

    return epoch


def _files(count: int) -> list[bytes]:
    place = os.environ.get(IMAGES, "")
    found = _read(Path(place).expanduser()) if place else []
    if not found:
        found = [_made(number) for number in range(min(count, 64))]
    return [found[number % len(found)] for number in range(count)]


def _read(place: Path) -> list[bytes]:
    endings = (".jpg", ".jpeg")
    if place.is_dir():
        return [path.read_bytes() for path in sorted(place.rglob("*")) if path.suffix.lower() in endings]
    with tarfile.open(place) as archive:
        members = [member for member in archive if member.isfile() and member.name.lower().endswith(endings)]
        return [file.read() for member in members if (file := archive.extractfile(member)) is not None]


def _made(number: int) -> bytes:
    from PIL import Image

    noise = np.random.default_rng(number).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    file = io.BytesIO()
    image = Image.fromarray(noise).resize((500, 375), Image.Resampling.BICUBIC)
    grain = np.random.default_rng(number).normal(0, 12, (375, 500, 3))
    Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
