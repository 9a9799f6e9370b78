"""What a trial pass leaves behind: its numbers, and parameters that it has changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from dtf.api.layout import Split
from dtf.api.precision import Format
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.distributed.sharding import is_dtensor, local, slice_of
from dtf.model.attributes import without_trace
from dtf.model.fingerprint import projections
from dtf.model.forward import leaf_gradients
from dtf.model.init import init_model
from dtf.model.memory import Footprint
from dtf.model.module_outputs import unrecorded
from dtf.model.shared_state import SharedState
from dtf.strategies.pass_probes import WrittenParameters, pass_error
from dtf.strategies.start_check import BUFFER, GRADIENT, Numbers, alike_within, take_size
from dtf.strategies.tensor_parallel.slices import slices_of

SLICED_INPUTS = (Split.row, Split.row_scatter, Split.local)


def pass_numbers(
    model: nn.Module, sums: Tensor, buffers: Mapping[str, Tensor], compute: Format | None
) -> tuple[Numbers, dict[str, Tensor]]:
    """The metric sums (M,), the sizes of gradients and the norms `buffers` of a pass; and the `projections` of
    gradients of undivided layers, where `compute` says in which format they were made. The gradients are dropped.
    ConfigError for a sparse one.
    """
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sparse = [name for name, gradient in gradients.items() if gradient.layout is not torch.strided]
    if sparse:
        raise ConfigError(
            f"the gradient of {sparse[0]} is sparse (sparse=True of its module); use sparse=False, or a sparse "
            "table of the recipe"
        )
    divided = slices_of(model)
    compared = {} if compute is None else {n: g for n, g in gradients.items() if n not in divided}
    whole = {n: projections(g, alike_within(compute)) for n, g in compared.items() if compute is not None}
    norms = [take_size(local(gradient)) for gradient in gradients.values()]
    for parameter in model.parameters():
        parameter.grad = None
    norms += buffers.values()
    numbers = torch.cat([sums.double(), *(norm.reshape(1).to(sums.device) for norm in norms)])
    names = [*(f"sum {i}" for i in range(len(sums))), *(f"{GRADIENT}{name}" for name in gradients)]
    names += [BUFFER + name for name in buffers]
    return dict(zip(names, numbers.tolist(), strict=True)), whole


def row_sizes(rows: Batch, names: Iterable[str]) -> dict[str, Tensor]:
    """The sizes () of the gradients of these inputs after a pass, by names among its numbers. They are leaves, looked
    up in sparse tables: all that a block behind a table gives back shows in them.
    """
    return {f"{GRADIENT}rows of {name}": take_size(each) for name, each in leaf_gradients([rows], names).items()}


def output_norms(outputs: Any) -> Numbers:
    """Of what a model gives: the norms of its tensors of numbers."""
    floats = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return {f"output {i}": local(leaf).detach().double().norm().item() for i, leaf in enumerate(floats)}


@contextmanager
def counted(footprint: Footprint | None, models: Mapping[nn.Module, Iterable[str] | None]) -> Iterator[None]:
    """A context for a pass that `footprint`, if given, counts.

    It gets to know the parameters of which other ranks compute other parts: divided ones, and those named for each of
    the `models`; None: all that is computed is a part. What is gathered exists only when its module computes.
    """
    if footprint is None:
        yield
        return
    with ExitStack() as stack:
        for model, names in models.items():
            if names is None:
                footprint.all_parts = True
            for hook in _show_parts(footprint, model, names or ()):
                stack.callback(hook.remove)
        stack.enter_context(footprint)
        yield


def _show_parts(footprint: Footprint, model: nn.Module, names: Iterable[str]) -> list[RemovableHandle]:
    parts: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for name in {*slices_of(model), *names}:
        path, _, key = name.rpartition(".")
        places, owner = path.split(".") if path else [], model.get_submodule(path)
        for end in range(len(places) + 1):
            parts.setdefault(model.get_submodule(".".join(places[:end])), []).append((owner, key))

    cut = {model.get_submodule(name.rpartition(".")[0]) for name in names}

    def show(module: nn.Module, inputs: Any) -> None:
        by = getattr(module, "_by", None)
        if module in cut or (by is not None and by.split in SLICED_INPUTS):  # they may come from another stage
            footprint.add_parts(leaf for leaf in inputs if isinstance(leaf, Tensor))
        tensors = (getattr(owner, key) for owner, key in parts[module])
        footprint.add_parts(tensor for tensor in tensors if tensor is not None and not is_dtensor(tensor))

    def follow(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor) and outputs.requires_grad and footprint.is_part(outputs):
            outputs.register_hook(lambda gradient: footprint.add_parts([gradient]))  # it may come from another stage

    shown = [module.register_forward_pre_hook(show) for module in parts]
    return [*shown, *(module.register_forward_hook(follow) for module in parts)]


@contextmanager
def passes_without_trace(models: Sequence[nn.Module], recipe: object) -> Iterator[None]:
    """A context for passes at any time, whose effects on models, on what they share and on generators are undone."""
    with without_trace(models, recipe), unrecorded(), ExitStack() as stack:
        for model in models:
            stack.callback(SharedState(model, recipe).restore)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        yield


@contextmanager
def trial(models: Sequence[nn.Module], task: Task) -> Iterator[None]:
    """A context for evaluations before the first step, whose effects on models are undone at its end."""
    # what is compiled is not compiled for this
    with without_trace(models, task.recipe), torch.compiler.set_stance("force_eager"), ExitStack() as stack:
        stack.callback(SharedState(models[0], task.recipe).restore)
        written = [stack.enter_context(WrittenParameters(model)) for model in models]
        try:
            yield
        except (RuntimeError, AssertionError) as error:
            named = pass_error(error)
            if named is None:
                raise
            raise named from error
    for each in written:
        each.restore()


@torch.no_grad()
def put_start(model: nn.Module, task: Task, names: Collection[str]) -> None:
    """Give these parameters the values they start from, and let them learn as at the start."""
    if names:
        start = dict(init_model(task.recipe, task.seed, task.weights).named_parameters())
        divided = slices_of(model)
        for name, parameter in model.named_parameters():
            if name in names:
                for piece in slice_of(parameter, divided.get(name)).pieces:
                    piece.here(parameter).copy_(piece.of(start[name]))
                parameter.requires_grad_(start[name].requires_grad)
