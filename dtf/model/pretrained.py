"""A model's values on disk: files of torchvision, safetensors files, and checkpoints of dtf.

They are read in parts, and never as code.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtf.api.layout import Split
from dtf.api.recipe import Recipe
from dtf.checkpoint import storage
from dtf.checkpoint.boxes import TORCH_DTYPES, StoredCheckpoint
from dtf.checkpoint.resolve_path import check_weights_path, is_checkpoint, resolve_checkpoints
from dtf.core.errors import ConfigError, DataError
from dtf.model.ema import EMA, EMA_PREFIX
from dtf.model.init import layout_of

Read = Callable[[str, tuple[slice, ...]], Tensor]

COUNTER = "num_batches_tracked"
"""A buffer of batch normalisation. The run counts by itself, and old files do not have it."""
_WRAPPED = ("state_dict", "model")
"""Keys under which training scripts put a model's tensors."""
_WRAPPERS = ("module.", "model.", "_orig_mod.")
"""What DistributedDataParallel, Lightning and torch.compile put before every name."""
_REAL = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
"""Formats of real numbers; each is cast to precision.param where it is another one."""


@dataclass(frozen=True)
class Weights:
    """Tensors by the names that a model gives them, see `dtf.Weights`. `about`: what it is, for people."""

    place: str  # as it was given
    shapes: dict[str, tuple[int, ...]]
    formats: dict[str, torch.dtype | None]  # None: one that torch does not have
    part: Read = field(repr=False)
    file: Path = field(repr=False)  # it stands for every byte of them
    about: str
    stored: StoredCheckpoint | None = field(default=None, repr=False)  # the checkpoint, if they come from one

    @property
    def scalars(self) -> dict[str, Any]:
        """What a checkpoint holds beside tensors; empty for files."""
        return self.stored.scalars if self.stored else {}

    def source(self) -> StoredCheckpoint | None:
        return self.stored

    def digest(self) -> str:
        """A digest of the file, or of a checkpoint's manifest, which holds the digests of all its files. Reads the
        file.
        """
        with self.file.open("rb") as file:
            return f"sha256 {hashlib.file_digest(file, 'sha256').hexdigest()}"

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        full_shape = self.shapes[name]
        begin = offset or (0,) * len(full_shape)
        size = full_shape if shape is None else shape
        return self.part(name, tuple(slice(at, at + n) for at, n in zip(begin, size, strict=True)))


@dataclass(frozen=True)
class WeightMatch:
    """How weights and a model fit."""

    kept: tuple[str, ...]  # tensors of the model that are in the file
    anew: tuple[str, ...]  # tensors of its head that are drawn, with both shapes
    missing: tuple[str, ...]  # those of its head that the file does not have

    def text(self) -> str:
        """One line for the start-up table."""
        parts = [f"{len(self.kept)} tensors kept"]
        parts += [
            f"{what}: {', '.join(names)}"
            for what, names in (("drawn anew", self.anew), ("not in it and drawn", self.missing))
            if names
        ]
        return "; ".join(parts)


def open_weights(given: str, key: str) -> Weights:
    """Weights at a path that the config key `key` gave. Reads only names and shapes.

    DataError when there are none.
    """
    check_weights_path(given, key)
    path = Path(given).expanduser()
    if is_checkpoint(path):
        return _checkpoint(resolve_checkpoints(path, key)[0], given)
    try:
        if path.suffix == ".safetensors":
            shapes, formats, part = _safetensors(path)
        else:
            shapes, formats, part = _torch_file(path, f"{key}={given}")
    except OSError as error:
        raise DataError(f"{key}={given} cannot be read: {error.strerror or error}") from error
    return Weights(given, shapes, formats, part, path, given)


def match_weights(
    weights: Weights, recipe: Recipe, model: nn.Module, key: str, whole: bool = False
) -> tuple[Weights, WeightMatch]:
    """The weights that a model takes, and what it must initialise itself. `model` may be on meta. `whole`: it may
    initialise nothing.

    A head (modules that the recipe's layout splits by `classes`) is initialised when the file has another number of
    classes for it, or does not have it. ConfigError for any other tensor that does not fit.
    """
    model_names = set(model.state_dict())
    weights = _with_names_of_today(_unwrapped(weights, model_names), recipe, model_names)
    tensors = {
        name: tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if name in model_names and not _counts(name)
    }
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    in_file = {name: shape for name, shape in weights.shapes.items() if not _counts(name)}
    other, missing = _heads(recipe, model, wanted, in_file)
    drawn = () if whole else (*other, *missing)
    problems = [
        f"{name} is {_sizes(in_file[name])} in the file and {_sizes(shape)} in the model"
        if name in in_file
        else f"{name} is not in the file"
        for name, shape in wanted.items()
        if in_file.get(name) != shape and name not in drawn
    ]
    problems += [
        f"{name} is {str(weights.formats[name]).removeprefix('torch.')} in the file, and the model has real numbers "
        "there"
        for name, tensor in tensors.items()
        if name in in_file and name not in drawn and tensor.dtype in _REAL and weights.formats[name] not in _REAL
    ]
    problems += [
        f"{name} ({_sizes(in_file[name])}) is not in the model" for name in sorted(in_file.keys() - model_names)
    ]
    if problems:
        more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        classes = (
            {in_file[name][0] for name in other if in_file[name] != wanted[name]}
            if len(problems) <= len(other)
            else set()
        )
        if whole and len(classes) == 1 and hasattr(getattr(recipe, "model", None), "classes"):
            advice = f"the model in it has {min(classes)} classes: set recipe.model.classes={min(classes)}"
        else:
            advice = f"choose the {recipe.fine_tuning.shaped_by} that it was made with"
        raise ConfigError(f"{key}={weights.place} does not fit the model: {'; '.join(problems[:3])}{more}; {advice}")
    kept = tuple(name for name in wanted if name in in_file and name not in drawn)
    redrawn = tuple(f"{name} ({_sizes(in_file[name])} there, {_sizes(wanted[name])} here)" for name in other)
    return replace(weights, shapes={name: wanted[name] for name in kept}), WeightMatch(kept, redrawn, tuple(missing))


def _heads(
    recipe: Recipe, model: nn.Module, wanted: dict[str, tuple[int, ...]], in_file: dict[str, tuple[int, ...]]
) -> tuple[list[str], list[str]]:
    """Tensors of heads that the file has for another number of classes, and those of heads that it does not have."""
    other: list[str] = []
    missing: list[str] = []
    for head in (name for name, split in layout_of(recipe, model).splits.items() if split is Split.classes):
        members = [name for name in wanted if name.rpartition(".")[0] == head]
        absent = [name for name in members if name not in in_file]
        if absent:
            missing += members if len(absent) == len(members) else []
        elif any(in_file[name] != wanted[name] for name in members) and all(
            in_file[name][1:] == wanted[name][1:] for name in members
        ):
            other += members
    return other, missing


def _unwrapped(weights: Weights, model_names: Collection[str]) -> Weights:
    """The weights without what wrappers put before all names, where they are the model's own names without it."""
    prefix = ""
    while weights.shapes and not any(name.removeprefix(prefix) in model_names for name in weights.shapes):
        more = next(
            (wrapper for wrapper in _WRAPPERS if all(name.startswith(prefix + wrapper) for name in weights.shapes)),
            None,
        )
        if more is None:
            return weights
        prefix += more
    if not prefix:
        return weights
    shapes, formats = (
        {name.removeprefix(prefix): value for name, value in values.items()}
        for values in (weights.shapes, weights.formats)
    )
    about = f"{weights.about} (names without {prefix!r})"
    return replace(
        weights,
        shapes=shapes,
        formats=formats,
        part=lambda name, where: weights.part(prefix + name, where),
        about=about,
    )  # type: ignore[arg-type]


def _with_names_of_today(weights: Weights, recipe: Recipe, model_names: Collection[str]) -> Weights:
    """The weights with the names that the model has for what an older version of its code called otherwise."""
    theirs: dict[str, str] = {}  # by today's name
    for name in weights.shapes:
        now = name
        for pattern, replacement in () if name in model_names else recipe.fine_tuning.older_names:
            now = re.sub(pattern, replacement, now)
        theirs[now if now in model_names else name] = name
    if all(now == name for now, name in theirs.items()):
        return weights
    return replace(
        weights,
        shapes={now: weights.shapes[name] for now, name in theirs.items()},
        formats={now: weights.formats[name] for now, name in theirs.items()},
        part=lambda name, where: weights.part(theirs[name], where),
    )


def _counts(name: str) -> bool:
    return name.rpartition(".")[2] == COUNTER


def _sizes(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a single number"


def _checkpoint(folder: Path, given: str) -> Weights:
    """The model in a checkpoint of dtf. Averages of the weights (`step.ema`) win over the weights, as evaluation used
    them.
    """
    stored = StoredCheckpoint(folder)
    places: dict[str, str] = {}
    for name in sorted(stored.names(), key=lambda name: not name.startswith("model/")):  # averages last: they win
        kind, _, rest = name.partition("/")
        if kind == "model" or f"{kind}/" == EMA_PREFIX:
            places[rest] = name
        elif kind == "optimizer" and rest.endswith(f"/{EMA}"):
            places[rest.removesuffix(f"/{EMA}")] = name

    def part(name: str, where: tuple[slice, ...]) -> Tensor:
        first, shape = tuple(s.start for s in where), tuple(s.stop - s.start for s in where)
        return stored.read(places[name], first, shape, shapes[name])

    shapes = {name: stored.manifest.tensors[at].shape for name, at in places.items()}
    formats = {name: _format(stored.manifest.tensors[at].dtype) for name, at in places.items()}
    averaged = ", averaged weights" if any(not at.startswith("model/") for at in places.values()) else ""
    return Weights(
        given,
        shapes,
        formats,
        part,
        folder / storage.MANIFEST,
        f"{folder}, step {stored.manifest.step}{averaged}",
        stored,
    )


def _format(name: str) -> torch.dtype | None:
    """By the name that safetensors give it."""
    return getattr(torch, TORCH_DTYPES.get(name, ""), None)


def _safetensors(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype | None], Read]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
        formats = {name: _format(tensor.get_dtype()) for name, tensor in slices.items()}
    except SafetensorError as error:
        raise DataError(f"{path} is no safetensors file: {error}") from error
    # of the mapped file
    return (
        shapes,
        formats,
        lambda name, where: (file.get_slice(name)[where] if where else file.get_tensor(name)).clone(),
    )


def _torch_file(path: Path, what: str) -> tuple[dict[str, tuple[int, ...]], dict[str, torch.dtype | None], Read]:
    """Mapped into memory where the file's format allows: what is not asked for is not read."""
    path.stat()
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError):  # files from before torch 1.6 are no archives
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # its parser meets whatever the file holds
        match = re.search(r"GLOBAL (\S+)", str(error))
        anew = "in the program that made it, torch.save(model.state_dict(), 'weights.pth')"
        if match:
            raise DataError(
                f"{what} holds {match[1]} beside tensors, and dtf runs no code from files; save the tensors alone: "
                f"{anew}"
            ) from error
        raise DataError(
            f"{what} is damaged, or no file of tensors that torch.save wrote; copy it again, or save it anew: {anew}"
        ) from error
    if isinstance(content, dict):
        wrapped = [content[key] for key in _WRAPPED if isinstance(content.get(key), dict)]
        content = wrapped[0] if wrapped else content
    if (
        not isinstance(content, dict)
        or not content
        or not all(isinstance(name, str) and isinstance(t, Tensor) for name, t in content.items())
    ):
        raise DataError(f"{what} holds no tensors by name; save model.state_dict()")
    odd = next(
        (
            name
            for name, t in content.items()
            if t.layout is not torch.strided or t.is_meta or t.is_quantized or t.is_complex()
        ),
        None,
    )
    if odd is not None:
        raise DataError(
            f"{what}: {odd} is {content[odd].dtype}, {content[odd].layout}, on {content[odd].device}; only plain "
            "tensors of real numbers can be read"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in content.items()}
    return (
        shapes,
        {name: tensor.dtype for name, tensor in content.items()},
        lambda name, where: content[name][where].clone(),
    )
