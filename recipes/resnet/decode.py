"""Image files to bytes of one size, by a few threads. Knows nothing of caches and classes."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from dtf.core.errors import DataError
from dtf.data.decode_any import decode_any
from dtf.recipes.resnet.tree import Tree, read_files

CHUNK = 64  # images that a thread takes at a time: handing over a small one costs more than decoding it


def decode_tree(root: Path, tree: Tree, pixels: int, outputs: dict[str, Path]) -> None:
    """Write the splits of `outputs` as raw bytes (rows, pixels, pixels, 3) in the order of the tree.

    DataError names a file that cannot be decoded.
    """
    row_bytes = pixels * pixels * 3
    for name, why in tree.unreadable_rows(outputs):
        raise DataError(f"recipe.data.root={root}: {name} cannot be used: {why}; replace or remove it")
    places = {name: (split, row) for split in outputs for row, name in enumerate(tree.files[split])}
    files = {split: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) for split, path in outputs.items()}

    def work(chunk: list[tuple[str, bytes]]) -> int:
        for name, content in chunk:
            try:
                image = decode_image(content, pixels)
            except ValueError as error:
                raise DataError(
                    f"recipe.data.root={root}: {name} ({len(content)} bytes) cannot be decoded: {error}; replace or "
                    "remove it"
                ) from error
            split, row = places[name]
            if os.pwrite(files[split], image.tobytes(), row * row_bytes) != row_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return len(chunk)

    threads = min(4, os.cpu_count() or 1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            done, waiting = 0, deque[Future[int]]()
            for chunk in _chunks(read_files(root, places, tree.sources)):
                waiting.append(pool.submit(work, chunk))
                if len(waiting) > 4 * threads:  # reading stays a little ahead, not the whole archive
                    done += waiting.popleft().result()
            done += sum(future.result() for future in waiting)
    finally:
        for file in files.values():
            os.close(file)
    if done != len(places):
        raise DataError(
            f"recipe.data.root={root} changed while it was read: {done} of {len(places)} images found; start again"
        )


def decode_image(content: bytes, pixels: int) -> np.ndarray:
    """An image file of any kind as (pixels, pixels, 3) bytes, see `decode_any`: the largest centred square, resized
    (bilinear, anti-aliased) unless it fits. ValueError for what cannot be decoded whole.
    """
    image = decode_any(content)
    if image.shape[:2] == (pixels, pixels):
        return image
    return np.asarray(ImageOps.fit(Image.fromarray(image), (pixels, pixels), Image.Resampling.BILINEAR))


def _chunks(items: Iterator[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    while chunk := list(islice(items, CHUNK)):
        yield chunk
