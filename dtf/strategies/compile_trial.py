"""Passes of a model with compiled modules, beside the same passes as the modules are: what cannot be compiled, and what
computes something else then, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain

from dtf.api.precision import Format
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.model.author_errors import memory_error
from dtf.model.compiled_forward import CompiledForward, traced_only, uncompiled
from dtf.model.seeded_dropout import find_drawing_modules, host_states
from dtf.strategies.start_check import GRADIENT, TOLERANCES, Numbers, differences

MACHINE_CODE = {Format.fp64: 1e-7, Format.fp32: 1e-3, Format.bf16: 0.1, Format.fp16: 0.1}
"""Relative differences that machine code may make: it rounds fewer results, and sums in another order."""


class CompileTrial:
    """Tries the compiled modules of one copy of a model, or of a part of it.

    `train` and `evaluate`: the numbers of a pass over some rows, collective where passes are. `kept`: a context for
    passes that leave no trace in the model.
    """

    def __init__(
        self,
        compiled: Sequence[CompiledForward],
        train: Callable[[Batch], Numbers],
        evaluate: Callable[[Batch], Numbers],
        kept: Callable[[], AbstractContextManager[object]],
        task: Task,
    ) -> None:
        self._compiled, self._train, self._evaluate, self._kept = compiled, train, evaluate, kept
        self._compute, self._key = task.precision.compute, f"step.compile={task.step.compile.value}"
        self._due = bool(task.compiled)  # a pipeline may have stages without blocks, which take part

    def follow_code(self, rows: Callable[[], Batch]) -> None:
        """Follow the compiled modules through passes of training and of an evaluation. ConfigError for one that is not
        one piece, that would be compiled in each pass anew, or that gives other numbers. Collective where passes are.

        What follows code is all that is tried here: the compiler itself comes with the first step.
        """
        if not self._due:
            return
        parts = chain.from_iterable(forward.parts() for forward in self._compiled)
        with find_drawing_modules(parts, host_states) as drawing, uncompiled(self._compiled):
            trained, evaluated = self._alone(self._train, rows()), self._alone(self._evaluate, rows())
        self._refuse_passed_by(trained)
        if drawing:
            raise ConfigError(
                f"{self._key} cannot compile {drawing[0]}: it draws random numbers from Python or numpy, which do not "
                "reach machine code; draw them with torch, or use step.compile=off"
            )
        with traced_only():
            for run, plain in (self._train, trained), (self._evaluate, evaluated):
                why = "torch does not follow all that its blocks do, such as a buffer that changes within a pass"
                self._compare(plain, self._alone(run, rows()), TOLERANCES[self._compute], why)
        with traced_only(again=True), self._kept():
            for _ in range(2):  # the first begins where those above did
                self._train(rows())
                self._evaluate(rows())

    def skip_machine_code(self) -> None:
        """Do not compare it: another copy of the model is compared, or others write to the parameters meanwhile."""
        self._due = False

    def compare_machine_code(self, rows: Callable[[], Batch]) -> None:
        """Called before each step, with what makes its first micro-batch, whose shape is compiled now. Does nothing but
        in the first. ConfigError where machine code gives other gradients than the modules as they are, over these
        rows. Collective where passes are. `rows` is called for each pass: a model may write to its inputs.
        """
        if not self._due:
            return
        self._due = False
        try:
            with uncompiled(self._compiled):
                plain = self._alone(self._train, rows())
        except Exception as error:
            if (named := memory_error(error)) is None:
                raise
            raise ConfigError(
                f"{self._key}: in the first pass of the first step, which is made without machine code to compare the "
                f"two, and may need more memory: {named}"
            ) from error
        found = self._alone(self._train, rows())
        # metrics count rows, and a rounding may change a count
        plain, found = ({name: one[name] for name in one if not name.startswith("sum")} for one in (plain, found))
        why = "the compiler has made wrong machine code, or code that draws other random numbers"
        self._compare(plain, found, MACHINE_CODE[self._compute], why)

    def _alone(self, run: Callable[[Batch], Numbers], rows: Batch) -> Numbers:
        with self._kept():
            return run(rows)

    def _compare(self, plain: Numbers, found: Numbers, bound: float, why: str) -> None:
        other = differences(plain, found, bound)
        if self._compiled and other:
            raise ConfigError(
                f"{self._key}: the model computes something else when it is compiled ({other[0]} differs): {why}; use "
                "step.compile=off"
            )

    def _refuse_passed_by(self, numbers: Numbers) -> None:
        """Raise ConfigError for modules whose forward no pass has called, where all are or gradients come to them."""
        uncalled = [forward for forward in self._compiled if not forward.called]
        if len(uncalled) < len(self._compiled):  # others may be left out of a pass
            uncalled = [one for one in uncalled if any(name.startswith(f"{GRADIENT}{one.name}.") for name in numbers)]
        if uncalled:
            raise ConfigError(
                f"{self._key}: the forward pass calls none of {', '.join(one.label for one in uncalled[:3])} as a "
                "module; call blocks as block(x), or use step.compile=off"
            )
