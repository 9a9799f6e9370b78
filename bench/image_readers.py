"""Readers of JPEG files that `bench.images` compares, each in a process of its own that is told when to read.

Each is set up as its documentation advises, and yields whole batches without end: RandomResizedCrop to 224 x 224 and a
mirror image of half of them, as bytes or as normalised float32. All read the same files from a folder, and have
AHEAD batches under way beside the one that is consumed.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtf.core.seeding import draws
from dtf.recipes.resnet.crops import CROP_DRAWS, random_part
from dtf.recipes.resnet.jpeg import read_header

SIDE, BATCH, AHEAD, CHUNK = 224, 64, 2, 4
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
ROW_MEAN = np.tile(np.array(MEAN, np.float32) * 255, SIDE)
ROW_SCALE = np.tile(1 / (np.array(STD, np.float32) * 255), SIDE)
Batches = Iterator[Any]


def dtf(folder: Path, threads: int, floats: bool) -> Batches:
    """As a rank of a run does: the recipe's data through the loader, and `receive` for floats."""
    from dtf.core.types import Shard
    from dtf.data.batches import Epochs
    from dtf.data.loader import Loader
    from dtf.data.samplers import Shuffle, Tail
    from dtf.recipes.resnet.photo_recipe import PhotoOptions, ResnetPhotos

    torch.set_num_threads(threads)
    recipe = ResnetPhotos(data=PhotoOptions(root=str(folder), cache=str(folder), threads=threads))
    photos = recipe.open_data("train", 0)
    loader = Loader(photos, Epochs(Shuffle(tail=Tail.drop), len(photos), BATCH, 0), Shard(0, 1), BATCH)
    step = 0
    while True:
        loader.ahead([divmod(k, loader.batches) for k in range(step, step + 1 + loader.prefetch)])
        batch = loader.get(*divmod(step, loader.batches))
        assert batch is not None
        yield recipe.receive(batch.inputs) if floats else batch.inputs["pixels"]
        step += 1


def loop(folder: Path, threads: int, floats: bool) -> Batches:
    """simplejpeg, the kernel of torch's anti-aliased interpolation, and threads."""
    import simplejpeg
    from torch.nn.functional import interpolate

    mean, scale = torch.from_numpy(ROW_MEAN), torch.from_numpy(ROW_SCALE)

    def work(content: bytes, out: np.ndarray, uniform: np.ndarray) -> None:
        image = simplejpeg.decode_jpeg(content)
        image = torch.from_numpy(cropped(image, uniform))[None].permute(0, 3, 1, 2)
        image = interpolate(image, (SIDE, SIDE), mode="bilinear", antialias=True)
        if uniform[-1] < 0.5:
            image = image.flip(3)
        place = torch.from_numpy(out)
        place.copy_(image[0].permute(1, 2, 0))
        if floats:
            place.view(SIDE, -1).sub_(mean).mul_(scale)

    return threaded(folder, threads, floats, work)


def opencv(folder: Path, threads: int, floats: bool, decode: Callable[[bytes], np.ndarray] | None = None) -> Batches:
    """OpenCV's linear resampling: it sees four pixels, however much it shrinks. `decode`: default, simplejpeg's."""
    cv2: Any = import_module("cv2")
    import simplejpeg

    cv2.setNumThreads(1)
    decode = decode or simplejpeg.decode_jpeg

    def work(content: bytes, out: np.ndarray, uniform: np.ndarray) -> None:
        image = cv2.resize(cropped(decode(content), uniform), (SIDE, SIDE), interpolation=cv2.INTER_LINEAR)
        if uniform[-1] < 0.5:
            image = cv2.flip(image, 1)
        if floats:
            flat = out.reshape(SIDE, -1)
            np.subtract(image.reshape(SIDE, -1), ROW_MEAN, out=flat)
            np.multiply(flat, ROW_SCALE, out=flat)
        else:
            out[:] = image

    return threaded(folder, threads, floats, work)


def floor(folder: Path, threads: int, floats: bool) -> Batches:
    """Each file decoded at 1/8 of its size, and nothing else."""
    import simplejpeg

    return threaded(
        folder,
        threads,
        floats,
        lambda content, out, uniform: simplejpeg.decode_jpeg(content, min_height=1, min_width=1),
    )


def torchvision_pil(folder: Path, threads: int, floats: bool) -> Batches:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIDE, AREA, RATIO), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    return loaded(ImageFolder(str(folder / "train"), v2.Compose(steps + normalised(floats))), threads)


def torchvision_io(folder: Path, threads: int, floats: bool) -> Batches:
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(SIDE, AREA, RATIO, antialias=True), v2.RandomHorizontalFlip()]
    look = v2.Compose(steps + normalised(floats))
    return loaded(
        ImageFolder(str(folder / "train"), look, loader=lambda path: decode_image(path, ImageReadMode.RGB)), threads
    )


def spdl(folder: Path, threads: int, floats: bool) -> Batches:
    """Its pipeline of stages in threads, batches made by `convert_frames`. FFmpeg's bilinear scaling widens its filter
    when it shrinks.
    """
    io: Any = import_module("spdl.io")
    pipeline: Any = import_module("spdl.pipeline")
    files = paths(folder)

    def source() -> Iterator[tuple[Path, np.ndarray]]:
        for number, rows in enumerate(orders(len(files))):
            yield from zip([files[row] for row in rows], draws(0, number, rows, CROP_DRAWS + 1), strict=True)

    def decode(item: tuple[Path, np.ndarray]) -> Any:
        content, uniform = item[0].read_bytes(), item[1]
        header = read_header(content)
        assert header is not None
        part = random_part(header.height, header.width, AREA, RATIO, uniform[:CROP_DRAWS])
        steps = f"crop={part.width}:{part.height}:{part.left}:{part.top},scale={SIDE}:{SIDE}:flags=bilinear"
        wish = io.get_video_filter_desc(filter_desc=steps + (",hflip" if uniform[-1] < 0.5 else ""), pix_fmt="rgb24")
        return io.decode_packets(io.demux_image(content), filter_desc=wish)

    def assemble(frames: list[Any]) -> torch.Tensor:
        return finished(torch.from_numpy(io.to_numpy(io.convert_frames(frames))), floats)

    build = pipeline.PipelineBuilder().add_source(source()).pipe(decode, concurrency=threads).aggregate(BATCH)
    with (running := build.pipe(assemble).add_sink(AHEAD).build(num_threads=threads)).auto_stop():
        yield from running


def dali(folder: Path, threads: int, floats: bool) -> Batches:
    """Its readers, the decoder that decodes only the crop, and its fused last step."""
    dali_: Any = import_module("nvidia.dali")
    fn, types = dali_.fn, dali_.types

    @dali_.pipeline_def(batch_size=BATCH, num_threads=threads, device_id=None, prefetch_queue_depth=AHEAD)
    def reader() -> Any:
        content, _ = fn.readers.file(file_root=str(folder / "train"), random_shuffle=True, initial_fill=256)
        images = fn.decoders.image_random_crop(
            content, device="cpu", output_type=types.RGB, random_area=AREA, random_aspect_ratio=RATIO
        )
        images = fn.resize(images, size=(SIDE, SIDE), interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.random.coin_flip()
        if not floats:
            return fn.flip(images, horizontal=mirror)
        return fn.crop_mirror_normalize(
            images,
            mirror=mirror,
            dtype=types.FLOAT,
            output_layout="HWC",
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
        )

    pipe = reader()
    pipe.build()
    while True:
        yield pipe.run()[0]


READERS: dict[str, Callable[[Path, int, bool], Batches]] = {
    "dtf": dtf,
    "loop": loop,
    "opencv": opencv,
    "dali": dali,
    "spdl": spdl,
    "io": torchvision_io,
    "pil": torchvision_pil,
    "floor": floor,
}


def paths(folder: Path) -> list[Path]:
    return sorted((folder / "train").rglob("*.jpg"))


def orders(count: int) -> Iterator[np.ndarray]:
    """Rows of whole batches without end, each row equally often."""
    random, left = np.random.default_rng(0), np.empty(0, np.int64)
    while True:
        while len(left) < BATCH:
            left = np.concatenate([left, random.permutation(count)])
        yield left[:BATCH]
        left = left[BATCH:]


def cropped(image: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    part = random_part(image.shape[0], image.shape[1], AREA, RATIO, uniform[:CROP_DRAWS])
    return image[part.top : part.top + part.height, part.left : part.left + part.width]


def threaded(folder: Path, threads: int, floats: bool, work: Callable[[bytes, np.ndarray, np.ndarray], Any]) -> Batches:
    """`work(content, place, draws)` for each image in threads that go on from batch to batch. The memory of batches is
    used again: a batch is valid until the next one is asked for.
    """
    files, waiting = paths(folder), deque[tuple[np.ndarray, list[Any]]]()
    kind = np.float32 if floats else np.uint8
    room = [np.zeros((BATCH, SIDE, SIDE, 3), kind) for _ in range(AHEAD + 2)]

    def some(rows: np.ndarray, out: np.ndarray, uniform: np.ndarray) -> None:
        for i in range(len(rows)):
            with open(files[rows[i]], "rb") as file:
                work(file.read(), out[i], uniform[i])

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for number, rows in enumerate(orders(len(files))):
            out = room[number % len(room)]
            uniform = draws(0, number, rows, CROP_DRAWS + 1)
            parts = [slice(first, first + CHUNK) for first in range(0, BATCH, CHUNK)]
            waiting.append((out, [pool.submit(some, rows[part], out[part], uniform[part]) for part in parts]))
            if len(waiting) > AHEAD:
                out, futures = waiting.popleft()
                for future in futures:
                    future.result()
                yield out


def loaded(data: Any, workers: int) -> Batches:
    """Through a DataLoader with worker processes that stay."""
    torch.set_num_threads(1)
    rows = [list(map(int, batch)) for batch, _ in zip(orders(len(data)), range(100_000), strict=False)]
    for images, _ in torch.utils.data.DataLoader(
        data, batch_sampler=rows, num_workers=workers, prefetch_factor=AHEAD, persistent_workers=True
    ):
        yield images


def normalised(floats: bool) -> list[Any]:
    from torchvision.transforms import v2

    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)] if floats else []


def finished(images: torch.Tensor, floats: bool) -> torch.Tensor:
    if not floats:
        return images
    flat = images.flatten(2).to(torch.float32)
    return flat.sub_(torch.from_numpy(ROW_MEAN)).mul_(torch.from_numpy(ROW_SCALE)).view_as(images)


def cpu_seconds() -> float:
    """Of this process and of its workers, so far."""
    ticks = 0
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def described(batch: Any) -> str:
    """Kind of numbers and their mean, to see that all readers deliver the same."""
    array = np.asarray(batch.as_tensor() if hasattr(batch, "as_tensor") else batch)
    return f"{array.dtype} {sorted(array.shape)} mean {array.mean():.2f}"


def main() -> None:
    """Read, whenever a line says so, as many batches as take so many seconds, and answer with images, seconds and
    processor seconds.

    A turn is of whole rounds of a DataLoader's workers, always as many, and begins and ends with a batch: its workers
    deliver one batch each at about the same time, so that a clock that stops a short turn hits the pause between two
    rounds, and counts too few. Nothing is read before the clock starts: who stood still has no more ready than before.
    """
    name, folder, threads, kind, seconds = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print
    batches, count = READERS[name](Path(folder), int(threads), kind == "float32"), int(threads)

    def read(most: int) -> dict[str, float]:
        start, before = time.perf_counter(), cpu_seconds()
        images = sum(len(next(batches)) for _ in range(most))
        return {"images": images, "seconds": time.perf_counter() - start, "cpu": cpu_seconds() - before}

    first = described(next(batches))
    read(4 * count - 1)
    count *= math.ceil(float(seconds) / read(2 * count)["seconds"] * 2)
    print(json.dumps({"delivers": first}), file=answers)
    for _ in sys.stdin:
        print(json.dumps(read(count)), file=answers)
    os._exit(0)  # threads of readers without end


if __name__ == "__main__":
    main()
