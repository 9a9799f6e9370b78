"""The passes of a pipeline before its first step: what they take in memory, and what they show of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dtf.api.precision import Format
from dtf.api.sparse_table import inputs_of
from dtf.api.task import StartCheck, Task
from dtf.core.consistency import Peers
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Evaluated
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import local
from dtf.distributed.world import World
from dtf.model.attributes import Attributes
from dtf.model.changing_buffers import buffers_restored
from dtf.model.communication import AsksForOthers, others_error
from dtf.model.compiled_forward import uncompiled
from dtf.model.counters import Counters
from dtf.model.fingerprint import projections
from dtf.model.forward import ForwardPass, as_padding, batch_norm_error, global_rng_error
from dtf.model.known_parameters import KnownParameters
from dtf.model.memory import Footprint
from dtf.model.outside_tensors import OutsideTensors, outside_error
from dtf.model.seeded_calls import FindCalls, seed_calls
from dtf.model.seeded_dropout import Inputs, find_drawing_modules
from dtf.model.shared_state import SharedState
from dtf.strategies.compile_trial import CompileTrial
from dtf.strategies.pass_probes import WrittenParameters, count_calls
from dtf.strategies.pipeline.shared_tensors import SharedTensors
from dtf.strategies.pipeline.stage import Stage
from dtf.strategies.replica_start import PADDED
from dtf.strategies.start_check import (
    ALIKE,
    BUFFER,
    GRADIENT,
    Collectives,
    Numbers,
    Passes,
    Trials,
    alike_within,
    check_passes,
    take_size,
)
from dtf.strategies.start_padding import agree, not_zero, padding_error
from dtf.strategies.tensor_parallel.slices import slices_of
from dtf.strategies.trial_numbers import counted, passes_without_trace, row_sizes

NOT_THERE = "and the other stages would not draw them too"
"""Why a model must not draw from global generators."""

Run = Callable[..., Evaluated]


class StartTrials:
    """Trial passes over the stages of this rank, whose results are dropped: they leave no trace. Collective.

    `run(batch, enter, train)`: forward and backward of one micro-batch by `passes`, with what to call before each
    stage's forward pass; `train=False`: an evaluation.
    `received`: the bytes of gradients that arrived in it ahead of their pass. `instead`: what to use where the rows of
    a model cannot be divided.
    """

    def __init__(
        self,
        stages: list[Stage],
        task: Task,
        shared: SharedTensors,
        run: Run,
        received: Callable[[], int],
        dims: ParallelDims,
        passes: ForwardPass,
        instead: str,
    ) -> None:
        self._instead, self._padded = instead, ""
        self._stages, self._shared, self._run, self._received, self._dims = stages, shared, run, received, dims
        self._recipe, self._passes = task.recipe, passes
        self._divided = dims.dp_shard.count > 1
        forwards = [forward for stage in stages for forward in stage.compiled]
        train = partial(self._trial, micro_batch=0, compiled=True)
        self.compiled = CompileTrial(forwards, train, self._evaluate, self._without_trace, task)
        self._within = alike_within(task.precision.compute)
        self._alike: dict[str, Tensor] = {}  # `projections` of what ranks computing the layers of a pass together share
        self._inputs: list[Inputs] = []  # of dropouts, for each stage
        self.measured: list[tuple[int, Footprint]] = []
        """The first two passes, with their rows."""

    def make(
        self,
        few: Batch,
        a: Callable[[], Batch],
        b: Callable[[], Batch],
        compute: Format,
        world: World,
        check: StartCheck,
    ) -> None:
        """Measure a pass over `few` rows and one over `a`; then, where rows are divided and no earlier run has done so,
        compare passes over `a`, `b` and `a`; try what is compiled. ConfigError for what cannot run.
        """
        attributes = [Attributes(stage.model, self._recipe) for stage in self._stages]
        parameters = [KnownParameters(stage.model) for stage in self._stages]
        shared = [SharedState(stage.model, self._recipe) for stage in self._stages]
        with ExitStack() as stack:
            for kept in (*attributes, *shared):
                stack.callback(kept.restore)
            changed = [stack.enter_context(buffers_restored(stage.model)) for stage in self._stages]

            def check_buffers() -> None:
                for stage, names in zip(self._stages, changed, strict=True):
                    self._shared.refuse_changed(stage.index, names())
                    if stage.positions is not None:
                        stage.positions.refuse_changed(names(), stage.scratch)
                    if self._divided:
                        stage.changing.refuse(names(), self._instead)

            outside = [OutsideTensors(stage.model, self._recipe) for stage in self._stages]
            if self._dims.sizes.shard == 1:  # what is gathered is a copy
                self._passes.watch = outside[-1].look  # the last stage has the loss
            stack.callback(setattr, self._passes, "watch", None)
            written = [WrittenParameters(stage.model) for stage in self._stages]
            asks = AsksForOthers("the model or its loss")  # others do not come to the loss
            drew = self._drew(few, a, written, asks, world)
            everywhere = {name: found for seen in self._inputs for name, found in seen.everywhere.items()}
            by_layer = {name: found for seen in self._inputs for name, found in seen.by_layer.items()}
            unlike = self._dims.unlike(self._alike | everywhere, by_layer)
            learning = [name for held in outside for name in held.learning()]
            _refuse_found(drew, learning, asks.found, unlike, self._dims, world)
            for known, found in zip(parameters, written, strict=True):
                instead = self._instead if self._divided else "strategy=ddp launcher.processes=1"
                known.refuse_changed(instead, found.found)
            check_buffers()
            for attribute in attributes:
                attribute.refuse_read()
            gathers = self._dims.sizes.shard > 1  # then pipelines may make passes over padding
            if self._divided and (check.found is None or (gathers and PADDED not in check.found)):
                counters = [Counters(stage.model, self._recipe) for stage in self._stages]
                trials = Trials(
                    lambda: self._trial(a(), 0), lambda: self._trial(b(), 1), self.modules, counters, alike=False
                )
                found = _changed(attributes, shared)
                names = lambda: sorted({*found, *_changed(attributes, shared)})  # noqa: E731
                check_passes(trials, compute, self.peers(world), names, self._instead)
                check_buffers()
                shown = [not_zero(self._trial(as_padding(a()), 0))] if gathers else []
                check.passed(dict(zip((PADDED,), agree(shown, world), strict=False)))
            self._padded = (check.found or {}).get(PADDED, "")
            self.compiled.follow_code(a)

    def refuse_padding(self) -> None:
        """ConfigError where a pass over rows that count for nothing would add to gradients."""
        if self._padded:
            raise padding_error(self._padded, self._instead)

    def _evaluate(self, rows: Batch) -> Numbers:
        """The sums of an evaluation of some rows, where this rank computes losses."""
        for stage in self._stages:
            stage.train(False)
        with torch.no_grad():
            sums = self._run(rows, lambda stage, j: stage.masks.begin_micro_batch(0, 0), False).sums
        for stage in self._stages:
            stage.train()
        return {f"sum {i}": value for i, value in enumerate(sums.tolist())}

    def passes(self, rows: Callable[[], Batch]) -> Passes:
        """Trial passes over some rows at any time, without a trace. Collective over the pipeline."""

        def run() -> Numbers:
            with self._without_trace():
                return self._trial(rows(), 0)

        return Passes(run, self.modules)

    def _without_trace(self) -> AbstractContextManager[None]:
        return passes_without_trace([stage.model for stage in self._stages], self._recipe)

    def peers(self, world: World) -> Peers:
        """The pipelines, which make the same passes: one value for each."""
        return Collectives(lambda value: self._gather(value, world), world.broadcast)

    def _drew(
        self,
        few: Batch,
        a: Callable[[], Batch],
        written: list[WrittenParameters],
        asks: AsksForOthers,
        world: World,
    ) -> list[str]:
        """The passes that are measured; `written` watch the second.

        Returns the module of a stage here that drew from a global generator, "" where none is known to have done so;
        nothing where no stage drew.
        """
        rows = a()  # what receives rows may draw too
        drew: list[bool] = []
        seeded: list[Tensor] = []  # the generator's state after the last seeding
        first = self._stages[0].masks

        def enter(stage: Stage, j: int) -> None:
            # whether the stage before on this rank drew
            drew.extend(not torch.equal(state, stage.masks.rng_state()) for state in seeded)
            stage.masks.begin_micro_batch(0, 0)
            seeded[:] = [stage.masks.rng_state()]

        with first.find_other_generators(), asks, ExitStack() as stack:
            counted = [stack.enter_context(count_calls(s.statistics.layers(), s.masks)) for s in self._stages]
            dropping = [stack.enter_context(FindCalls(s.model, s.masks, root=False)) for s in self._stages]
            self._trial(few, 0, enter)
        self._release_uneven(counted)
        self._seed_calls({name for found in dropping for name in found.forwards}, world)
        named = chain.from_iterable(stage.model.named_modules() for stage in self._stages)
        with find_drawing_modules(named) as drawing, ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            for watch in written:
                stack.enter_context(watch)
            self._inputs = [stack.enter_context(stage.masks.record_inputs(self._within)) for stage in self._stages]
            self._trial(rows, 0, enter)
        if any(drew) or first.draws_elsewhere or not torch.equal(seeded[0], first.rng_state()):
            return drawing[:1] or [""]
        return []

    def _seed_calls(self, forwards: set[str], world: World) -> None:
        """Seed what these forwards draw by functions, as in the whole model. Collective."""
        found = world.gather(sorted(forwards))
        everywhere = world.broadcast(found and sorted({name for one in found for name in one}))
        seeded = world.gather([seed_calls(s.model, s.masks, everywhere, root=False) for s in self._stages])
        stages = Counter(name for rank in seeded or () for stage in rank for name in stage)
        # pipelines beside each other have the same stages
        pipelines = len(self._dims.rank_lists("pipeline"))
        shared = next((name for name, count in stages.items() if count > pipelines), "")
        if shared := world.broadcast(shared):
            raise ConfigError(
                f"{shared} draws dropout masks and is called in two stages of a pipeline, and its masks depend on how "
                "often; use one module for each"
            )

    def _release_uneven(self, counted: list[dict[str, int]]) -> None:
        """Keep the averages of normalisations that a pass does not call exactly once by the rule for buffers."""
        for stage, calls in zip(self._stages, counted, strict=True):
            stage.changing.take_uneven(stage.statistics, calls)
            self._shared.refuse_changed(stage.index, stage.changing.names)

    def _trial(
        self,
        rows: Batch,
        micro_batch: int,
        enter: Callable[[Stage, int], None] | None = None,
        compiled: bool = False,
    ) -> Numbers:
        """Forward and backward over some rows as a micro-batch of step 0. The memory of the first two is measured.
        Returns their sums, the same on all ranks of a pipeline, and the sizes of the gradients of this rank's
        parameters. Nothing is compiled but as asked.
        """

        def begin(stage: Stage, j: int) -> None:
            stage.masks.begin_micro_batch(0, micro_batch)

        footprint = Footprint() if len(self.measured) < 2 else None
        for stage in self._stages:
            stage.train()  # an evaluation may have come before
            stage.changing.begin()
        try:
            forwards = [forward for stage in self._stages for forward in stage.compiled]
            cuts = {stage.model: stage.positions.cut if stage.positions else () for stage in self._stages}
            with counted(footprint, cuts), nullcontext() if compiled else uncompiled(forwards):
                sums = self._run(rows, enter or begin).sums
        except ValueError as error:
            raise batch_norm_error(error, len(rows.ids)) from error
        received = self._received()
        if footprint is not None:
            footprint.saved_bytes -= received  # there when backward began, but not kept since forward
            self.measured.append((len(rows.ids), footprint))
        names, norms, self._alike = [], [], {f"sum {i}": projections(value, ALIKE) for i, value in enumerate(sums)}
        for stage in self._stages:
            apart = {*slices_of(stage.model), *stage.partial_gradients}
            for name, norm in stage.changing.norms().items():
                names.append(f"{BUFFER}{name}")
                norms.append(norm.reshape(1))
            stage.changing.begin_micro_batch()
            for name, parameter in stage.model.named_parameters():
                if parameter.grad is not None:
                    names.append(f"{GRADIENT}{name} in stage {stage.index}")
                    if name not in apart:
                        self._alike[f"gradients of {name}"] = projections(parameter.grad, self._within)
                    norms.append(take_size(local(parameter.grad)).reshape(1))
        for stage in self._stages:
            for parameter in stage.model.parameters():
                parameter.grad = None
        if compiled and self._stages[0].index == 0:
            for name, norm in row_sizes(rows, inputs_of(self._recipe.tables())).items():
                names.append(name)
                norms.append(norm.reshape(1))
        total = self._dims.total_of_stages(sums.double().clone())
        numbers = torch.cat([total, *(norm.to(total.device) for norm in norms)]).tolist()
        return dict(zip([*(f"sum {i}" for i in range(len(total))), *names], numbers, strict=True))

    def modules(self) -> Mapping[str, nn.Module]:
        """Those of the stages on this rank, and the stages."""
        found: dict[str, nn.Module] = {}
        for stage in self._stages:
            found |= {name: module for name, module in stage.model.named_modules() if name}
            found[f"stage {stage.index}"] = stage.model
        return found

    def _gather(self, value: Any, world: World) -> list[Any] | None:
        """As `World.gather`, one value for each pipeline: what its ranks have, in the order of the stages."""
        order = {name: stage.index for stage in self._stages for name, _ in stage.model.named_modules() if name}
        order |= {f"stage {stage.index}": stage.index for stage in self._stages}
        everyone = world.gather([value, order])
        if everyone is None:
            return None
        return [_merged([everyone[rank] for rank in ranks]) for ranks in self._dims.mesh_rows]


def _refuse_found(
    drawing: list[str], learning: list[str], asked: list[str], unlike: list[str], dims: ParallelDims, world: World
) -> None:
    """Raise ConfigError for what any rank has found: modules that draw from a global generator, tensors outside of the
    model that learn, ways in which it asked for other processes, and what ranks of a stage do not have alike.
    Collective.
    """
    everyone = world.gather([drawing, learning, asked, unlike])
    firsts = everyone and [next(filter(None, found), None) for found in zip(*everyone, strict=True)]
    drawing, learning, asked, unlike = world.broadcast(firsts)
    if asked:
        raise others_error("the model", asked[0])
    if learning:
        raise outside_error(learning[0])
    if drawing:
        raise global_rng_error(NOT_THERE, drawing[0])
    if unlike:
        raise dims.unlike_error(unlike[0])


def _merged(answers: list[Any]) -> list[Any]:
    """One value of the values of a pipeline's ranks: dicts by name, lists of outputs and lists of names."""
    merged: list[Any] = []
    for parts in zip(*(value for value, _ in answers), strict=True):
        if isinstance(parts[0], dict):
            merged.append({key: number for part in parts for key, number in part.items()})
        elif all(isinstance(item, str) for part in parts for item in part):
            merged.append(sorted({name for part in parts for name in part}))
        else:
            staged = [(order[item[0]], item) for part, (_, order) in zip(parts, answers, strict=True) for item in part]
            merged.append([item for _, item in sorted(staged, key=lambda pair: pair[0])])
    return merged


def _changed(attributes: Iterable[Attributes], shared: Iterable[SharedState]) -> list[str]:
    names = [name for attribute in attributes for name in attribute.changed()]
    return [*names, *(name for state in shared for name in state.changed_in_code())]
