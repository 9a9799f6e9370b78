"""A recipe of small pictures, and the same pictures in tar archives, Parquet files, folders and Hugging Face's form."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.options import FineTuning
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.model.metrics import weighted_sums

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from dtf.core.types import Batch

CLASSES, PIXELS = "abc", 8
FORMS = ("tar", "parquet", "folder", "hugging_face")


def pixels(number: int) -> np.ndarray:
    """(8, 8, 3) bytes of picture `number`, whose class is number % 3."""
    import numpy as np

    return np.random.default_rng(number).integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)


def png(number: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels(number)).save(out, "png")
    return out.getvalue()


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write(root: Path, form: str, rows: int, shards: int = 3) -> None:
    """Pictures 0 to rows - 1 in a form."""
    root.mkdir(parents=True, exist_ok=True)
    cut = [range(rows * shard // shards, rows * (shard + 1) // shards) for shard in range(shards)]
    if form == "tar":
        for shard, numbers in enumerate(cut):
            with tarfile.open(root / f"shard-{shard:03d}.tar", "w") as archive:
                for number in numbers:
                    add(archive, f"{number:06d}.png", png(number))
                    add(archive, f"{number:06d}.cls", str(number % 3).encode())
    elif form == "folder":
        for number in range(rows):
            (folder := root / "all" / f"{number:06d}").parent.mkdir(exist_ok=True)
            folder.with_suffix(".png").write_bytes(png(number))
            folder.with_suffix(".cls").write_text(str(number % 3))
    elif form == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        for shard, numbers in enumerate(cut):
            images = [{"bytes": png(number), "path": f"{number}.png"} for number in numbers]
            table = pa.table({"png": images, "cls": [number % 3 for number in numbers]})
            pq.write_table(table, root / f"part-{shard}.parquet", row_group_size=7)
    else:
        import datasets  # type: ignore[import-not-found]

        rows_of = datasets.Dataset.from_dict(
            {"png": [{"bytes": png(n), "path": None} for n in range(rows)], "cls": [n % 3 for n in range(rows)]}
        )
        rows_of.cast_column("png", datasets.Image()).save_to_disk(str(root / "arrow"))


def read(root: Path, form: str, cache: Path) -> Dataset:
    """The pictures of a form as a data set: inputs {png: (B, 3, 8, 8)} uint8, targets (B,)."""
    from dtf import folder_samples, map_style, parquet_rows, tar_samples

    if form == "tar":
        shards = len(list(root.glob("*.tar")))
        return tar_samples(root / f"shard-{{000..{shards - 1:03d}}}.tar", target="cls", cache=cache)
    if form == "folder":
        return folder_samples(root / "all", target="cls")
    if form == "parquet":
        return parquet_rows(root / "*.parquet", target="cls", cache=cache)
    import datasets  # type: ignore[import-not-found]

    return map_style(datasets.load_from_disk(str(root / "arrow")).with_format("torch"), target="cls")


@register("recipe", "pictures")
class Pictures(Recipe):
    """Classes of small pictures."""

    model: FineTuning = option(factory=FineTuning, doc="what is learned")
    root: str = option(default="pictures", doc="where they lie")
    form: str = option(default="tar", doc="how they lie there")
    train_metrics = ("loss", "top1")  # type: ignore[assignment]
    objective = ("top1", "max")  # type: ignore[assignment]

    def check(self) -> None:
        pass

    def build_model(self) -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS * PIXELS, 16), nn.ReLU(), nn.Linear(16, 3))

    def open_data(self, split: str, seed: int) -> Dataset:
        return read(Path(self.root) / split / self.form, self.form, Path(self.root) / "cache")

    def receive(self, inputs: Any) -> Any:
        return inputs["png"].float() / 255

    def loss(self, outputs: Any, targets: Tensor) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets, reduction="none")

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss, outputs.argmax(1) == batch.targets)
