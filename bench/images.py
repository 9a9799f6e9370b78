"""Images per second from JPEG files of natural size to batches of 224 x 224 bytes, RandomResizedCrop, against what else
there is.

    python -m bench.images shared/data/imagenet-sample-200.tar             # any archive or folder of JPEG files
    python -m bench.images ARCHIVE --threads 2 --rounds 5

All read the same files into memory first, draw their own crops, use so many threads or worker processes, and are run in
turn; the median over rounds is told with its range. `floor` decodes each file at 1/8 of its size and does nothing else:
no reader of the original files that knows no crop can be faster. Readers whose package is missing are left out, and
named.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import statistics
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from dtf.core.seeding import draws
from dtf.recipes.resnet import jpeg
from dtf.recipes.resnet.crops import CROP_DRAWS, random_part
from dtf.recipes.resnet.photos import Look, Photos, resized
from dtf.recipes.resnet.store import Store

SIDE, BATCH = 224, 64
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
_here = threading.local()


class Memory(Store):
    """Files that are in memory."""

    def __init__(self, files: list[bytes]) -> None:
        super().__init__(Path(), tuple(map(str, range(len(files)))), None, "")
        self.files = files

    def __getitem__(self, row: int) -> bytes:
        return self.files[row]


class Decoded(torch.utils.data.Dataset):
    """torchvision.io and transforms v2, for a DataLoader."""

    def __init__(self, files: list[bytes]) -> None:
        self.files = files
        self.crop = v2.Compose([v2.RandomResizedCrop(SIDE, AREA, RATIO, antialias=True), v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.crop(
            decode_jpeg(torch.frombuffer(bytearray(self.files[row]), dtype=torch.uint8), ImageReadMode.RGB)
        )


def dtf(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    look = Look(AREA, RATIO, True, (), "", 0.0, 0.0, 0, 0)
    photos = Photos(Memory(files), np.zeros(len(files), np.int64), SIDE, 256, look, 0, threads, 0)

    def epoch(number: int) -> int:
        return sum(len(photos.fetch(rows, number)[1]) for rows in _batches(len(files)))

    return epoch


def floor(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    return _threaded(
        files, threads, lambda content, out, draw: simplejpeg.decode_jpeg(content, min_height=1, min_width=1)
    )


def whole(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    return _threaded(files, threads, lambda content, out, draw: simplejpeg.decode_jpeg(content))


def simplejpeg_opencv(files: list[bytes], threads: int, folder: Path, area: bool = False) -> Callable[[int], int]:
    cv2: Any = import_module("cv2")

    cv2.setNumThreads(1)

    def work(content: bytes, out: np.ndarray, draw: np.ndarray) -> None:
        image = simplejpeg.decode_jpeg(content)
        part = random_part(image.shape[0], image.shape[1], AREA, RATIO, draw)
        window = image[part.top : part.top + part.height, part.left : part.left + part.width]
        out[:] = cv2.resize(window, (SIDE, SIDE), interpolation=cv2.INTER_AREA if area else cv2.INTER_LINEAR)

    return _threaded(files, threads, work)


def opencv(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    cv2: Any = import_module("cv2")

    cv2.setNumThreads(1)

    def work(content: bytes, out: np.ndarray, draw: np.ndarray) -> None:
        image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
        part = random_part(image.shape[0], image.shape[1], AREA, RATIO, draw)
        out[:] = cv2.resize(image[part.top : part.top + part.height, part.left : part.left + part.width], (SIDE, SIDE))

    return _threaded(files, threads, work)


def simplejpeg_torch(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    def work(content: bytes, out: np.ndarray, draw: np.ndarray) -> None:
        image = simplejpeg.decode_jpeg(content)
        part = random_part(image.shape[0], image.shape[1], AREA, RATIO, draw)
        torch.from_numpy(out).copy_(
            resized(image[part.top : part.top + part.height, part.left : part.left + part.width], SIDE, SIDE).permute(
                1, 2, 0
            )
        )

    return _threaded(files, threads, work)


def unsmoothed(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    """dtf's decoding with OpenCV's resampling, which sees four pixels however much it shrinks."""
    cv2: Any = import_module("cv2")

    cv2.setNumThreads(1)

    def work(content: bytes, out: np.ndarray, draw: np.ndarray) -> None:
        header = jpeg.read_header(content)
        assert header is not None
        window = jpeg.decode(content, header, random_part(header.height, header.width, AREA, RATIO, draw), SIDE)
        assert window is not None
        out[:] = cv2.resize(window, (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)

    return _threaded(files, threads, work)


def torchvision_pil(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    for row, content in enumerate(files):
        path = folder / "class" / f"{row:05d}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    look = v2.Compose([v2.RandomResizedCrop(SIDE, AREA, RATIO), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    return _loaded(ImageFolder(str(folder), look), threads)


def torchvision_io(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    return _loaded(Decoded(files), threads)


def spdl(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    spdl_io: Any = import_module("spdl.io")

    def work(content: bytes, out: np.ndarray, draw: np.ndarray) -> None:
        with Image.open(io.BytesIO(content)) as file:
            width, height = file.size
        part = random_part(height, width, AREA, RATIO, draw)
        wish = spdl_io.get_video_filter_desc(
            filter_desc=f"crop={part.width}:{part.height}:{part.left}:{part.top},scale={SIDE}:{SIDE}", pix_fmt="rgb24"
        )
        frames = spdl_io.decode_packets(spdl_io.demux_image(content), filter_desc=wish)
        out[:] = spdl_io.to_numpy(spdl_io.convert_frames(frames))

    return _threaded(files, threads, work)


def dali(files: list[bytes], threads: int, folder: Path) -> Callable[[int], int]:
    dali_: Any = import_module("nvidia.dali")
    fn, types = dali_.fn, dali_.types

    arrays = [np.frombuffer(content, np.uint8) for content in files]

    @dali_.pipeline_def(batch_size=BATCH, num_threads=threads, device_id=None, prefetch_queue_depth=2)
    def reader() -> Any:
        content = fn.external_source(source=_forever(arrays), batch=True)
        images = fn.decoders.image_random_crop(
            content, device="cpu", output_type=types.RGB, random_area=AREA, random_aspect_ratio=RATIO
        )
        return fn.resize(images, size=(SIDE, SIDE), interp_type=types.INTERP_LINEAR, antialias=True)

    pipe = reader()
    pipe.build()

    def epoch(number: int) -> int:
        done = 0
        while done < len(files):
            done += len(pipe.run()[0])
        return done

    return epoch


READERS = {
    "floor: libjpeg-turbo at 1/8": floor,
    "libjpeg-turbo, whole pictures": whole,
    "dtf": dtf,
    "dtf's decoding, not anti-aliased": unsmoothed,
    "simplejpeg + torch, threads": simplejpeg_torch,
    "simplejpeg + OpenCV linear, threads": simplejpeg_opencv,
    "simplejpeg + OpenCV area, threads": lambda *given: simplejpeg_opencv(*given, area=True),
    "OpenCV, threads": opencv,
    "torchvision.io + v2, DataLoader": torchvision_io,
    "torchvision ImageFolder + PIL, DataLoader": torchvision_pil,
    "DALI on the CPU": dali,
    "SPDL": spdl,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    files = list(_read(given.images))
    kilobytes = sum(map(len, files)) / len(files) / 1000
    print(
        f"{len(files)} files of {kilobytes:.0f} kB, {given.threads} threads or processes, "
        f"{platform.processor() or platform.machine()}"
    )
    with tempfile.TemporaryDirectory() as folder:
        readers: dict[str, Callable[[int], int]] = {}
        for name, make in READERS.items():
            try:
                readers[name] = make(files, given.threads, Path(folder))
                readers[name](0)
            except (ImportError, RuntimeError) as error:
                print(f"left out: {name} ({str(error)[:100]})")
                readers.pop(name, None)
        rates: dict[str, list[float]] = {name: [] for name in readers}
        for number in range(1, given.rounds + 1):
            for name, epoch in readers.items():
                start = time.perf_counter()
                count = epoch(number)
                rates[name].append(count / (time.perf_counter() - start))
    lowest = statistics.median(rates["floor: libjpeg-turbo at 1/8"])
    own = statistics.median(rates["dtf"])
    print(f"{'':44}{'images/s':>9}  {'range':>13} {'of floor':>9} {'dtf is':>8}")
    for name, found in sorted(rates.items(), key=lambda item: -statistics.median(item[1])):
        rate = statistics.median(found)
        print(f"{name:44}{rate:9,.0f}  {min(found):6,.0f}-{max(found):<6,.0f} {rate / lowest:9.2f} {own / rate:7.2f}x")
    print(
        f"dtf and whole pictures through torch's anti-aliased bilinear are {_apart(files):.3f} of 255 apart, mean "
        "over pixels; crops alike"
    )


def _apart(files: list[bytes]) -> float:
    """Mean difference between dtf's pixels and the same crops of whole pictures resampled by torchvision's default."""
    found = []
    for row, content in enumerate(files):
        header = jpeg.read_header(content)
        if header is None:
            continue
        part = random_part(header.height, header.width, AREA, RATIO, draws(0, 0, np.array([row]), CROP_DRAWS)[0])
        ours = jpeg.decode(content, header, part, 2 * SIDE)
        assert ours is not None
        image = resized(ours, SIDE, SIDE)
        window = simplejpeg.decode_jpeg(content)[part.top : part.top + part.height, part.left : part.left + part.width]
        found.append((image.int() - resized(window, SIDE, SIDE).int()).abs().float().mean().item())
    return statistics.mean(found)


def _read(path: Path) -> Iterator[bytes]:
    if path.is_dir():
        yield from (file.read_bytes() for file in sorted(path.rglob("*")) if file.suffix.lower() in (".jpg", ".jpeg"))
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if member.name.lower().endswith((".jpg", ".jpeg")) and (stream := archive.extractfile(member)) is not None:
                yield stream.read()


def _batches(rows: int) -> Iterator[np.ndarray]:
    return (np.arange(first, min(first + BATCH, rows)) for first in range(0, rows, BATCH))


def _forever(arrays: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    while True:
        for rows in _batches(len(arrays)):
            yield [arrays[row] for row in rows]


def _loaded(data: Any, workers: int) -> Callable[[int], int]:
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, persistent_workers=True)

    def epoch(number: int) -> int:
        return sum(len(batch[0]) if isinstance(batch, list) else len(batch) for batch in loader)

    return epoch


def _threaded(
    files: list[bytes], threads: int, work: Callable[[bytes, np.ndarray, np.ndarray], Any]
) -> Callable[[int], int]:
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def epoch(number: int) -> int:
        done = 0
        for rows in _batches(len(files)):
            out = np.empty((len(rows), SIDE, SIDE, 3), np.uint8)
            uniform = draws(0, number, rows, CROP_DRAWS)
            done += len(
                list(
                    pool.map(
                        lambda i, out=out, rows=rows, uniform=uniform: work(files[rows[i]], out[i], uniform[i]),
                        range(len(rows)),
                    )
                )
            )
        return done

    return epoch


if __name__ == "__main__":
    main()
