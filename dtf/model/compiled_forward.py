"""torch.compile on modules of a model, in place: names, classes, hooks, state and checkpoints stay as they are. Equal
modules share what is compiled, and only their own code is in it: hooks of the module itself run around it.

A run of a given shape is compiled by that shape alone, whatever came before: a run that goes on computes the same bits.
What a compiled pass must not bake in comes as tensors and is counted around it: seeds of masks, momenta of running
averages, calls.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn

from dtf.core.errors import ConfigError, DtfError, io_failure_told
from dtf.host.compiler import CACHE_VARIABLE, compiler_lack
from dtf.host.heartbeat import compiling
from dtf.host.user_cache import user_cache
from dtf.model.norm_calls import Counted
from dtf.model.seeded_calls import draws_in_compiled
from dtf.model.seeded_dropout import Seeded

BACKEND = "inductor"
MOST_SHAPES = 64
"""Compilations of one module: the shapes of its inputs, in training and evaluation."""
CACHE = "compiled"

_numbers = itertools.count()
_functions: dict[tuple[Any, ...], Callable[..., Any]] = {}
_making = threading.Lock()
_traced_only = False
_chosen: dict[str, Any] = {}  # by `configure`
_before: dict[tuple[Any, str], Any] = {}  # options of torch's compiler, and their values before they were set
_thread = threading.local()


class CompiledForward:
    """The forward of a module, in one compiled piece. ConfigError where it cannot be one."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self._module, self.key = name, module, key
        self._kind = (key, *_structure(module))
        self._functions: dict[bool, Callable[..., Any]] = {}
        self._counted: list[Any] = [part for part in module.modules() if isinstance(part, Counted | Seeded)]
        for part in self._counted:
            refusal = part.ready_for_compilation()
            if refusal:
                raise ConfigError(f"{key} cannot compile {self.label}: {refusal}; use step.compile=off")
        self._looked = False  # for what draws by functions, which trial passes have found
        self.called = False
        """Whether a pass has called it."""
        self.is_off = False
        """Whether the module computes as it is, see `uncompiled`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        if self.is_off:
            return _call(self._module, *args, **kwargs)
        if not self._looked:
            self._looked = True
            self._counted += draws_in_compiled(self._module)
        for part in self._counted:
            part.before_compiled()
        if _traced_only not in self._functions:
            self._functions[_traced_only] = _function(self._kind, _traced_only)
        if not getattr(_thread, "configured", False):
            _set_options()
        try:
            return self._functions[_traced_only](self._module, *args, **kwargs)
        except Exception as error:
            refusal = self._refusal(error)
            if refusal is None:
                raise
            raise refusal from error
        finally:
            for part in self._counted:
                part.after_compiled()

    def _refusal(self, error: Exception) -> DtfError | None:
        """What to raise for an error of a pass. None for those that are not the compiler's."""
        from torch._dynamo.exc import (
            BackendCompilerFailed,
            FailOnRecompileLimitHit,
            RecompileError,
            TorchDynamoException,
        )

        if isinstance(error, FailOnRecompileLimitHit):
            return ConfigError(
                f"{self.key} has compiled modules like {self.label} {_most()} times, for shapes of inputs or for "
                "numbers that each keeps; pad inputs to fewer shapes, or use step.compile=off"
            )
        if isinstance(error, RecompileError):
            return ConfigError(
                f"{self.key} would compile {self.label} in each pass anew, as what it depends on changes from pass to "
                f"pass ({_guard(error)}); make an attribute a buffer, or use step.compile=off"
            )
        if isinstance(error, TorchDynamoException):
            if isinstance(error, BackendCompilerFailed) and not _traced_only:
                folder = os.environ.get(CACHE_VARIABLE, "")
                places = f"{folder} or {tempfile.gettempdir()}"  # a C++ compiler writes to the latter
                return io_failure_told(str(error), places) or ConfigError(
                    f"{self.key} cannot compile {self.label}: {reason(error)}; remove {folder} if the machine code "
                    "that it keeps is damaged, or use step.compile=off"
                )
            return ConfigError(
                f"{self.key} cannot compile {self.label} in one piece: {reason(error)}; change that, or use "
                "step.compile=off"
            )
        # uncompiled passes came before; torch ends a pass that it computes again by an Exception of its own
        raised = isinstance(error, RuntimeError | ValueError | TypeError | LookupError | AssertionError)
        if _traced_only and raised and not isinstance(error, torch.OutOfMemoryError):
            return ConfigError(
                f"{self.key}: {self.label} raises {type(error).__name__} when it is compiled, and not as it is: "
                f"{reason(error)}; use step.compile=off"
            )
        return None

    @property
    def label(self) -> str:
        """Its name and class, for people."""
        kind = type(self._module).__name__
        return f"{self.name} ({kind})" if self.name else f"the model ({kind})"

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """It and the modules in it, by their names in the model."""
        return self._module.named_modules(prefix=self.name)


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What is compiled, once for each kind of module. The module is an argument, so that equal ones share it."""
    return type(module).forward(module, *args, **kwargs)


def _function(kind: tuple[Any, ...], traced_only: bool) -> Callable[..., Any]:
    backend = "aot_eager" if traced_only else BACKEND
    with _making:
        if (kind, backend) not in _functions:
            # torch keeps what it has compiled by code objects: one of its own for each kind
            code = _call.__code__.replace(co_name=f"compiled_{next(_numbers)}")
            copy = FunctionType(code, globals(), code.co_name)
            _functions[kind, backend] = torch.compile(copy, backend=_told(backend), fullgraph=True, dynamic=False)
        return _functions[kind, backend]


def _told(name: str) -> Callable[..., Any]:
    """The compiler of this name, which takes a minute or more: the launching process is told."""
    compiler = torch._dynamo.lookup_backend(name)

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with compiling():
            return compiler(graph, inputs)

    return compile_graph


def _structure(module: nn.Module) -> Iterator[tuple[Any, ...]]:
    """What tells kinds of modules apart. Whatever else differs is found by torch's guards."""
    for name, part in module.named_modules():
        tensors = [*part._parameters.items(), *part._buffers.items()]
        yield (
            name,
            type(part),
            part.extra_repr(),
            *((key, None if t is None else (tuple(t.shape), t.dtype)) for key, t in tensors),
        )


def compile_modules(model: nn.Module, names: Collection[str], key: str) -> list[CompiledForward]:
    """Compile those of the named modules that `model` has, in place. `key`: the option with its value, for errors.

    Nothing is compiled before a pass. ConfigError for a module that stages of a pipeline have cut.
    """
    modules, made = dict(model.named_modules()), []
    for name in names:
        if name not in modules:
            continue
        if type(modules[name]) is nn.Module:  # what is left of a block whose layers are called one by one
            raise ConfigError(f"{key} needs {name} in one piece, and the stages are cut inside it; use fewer stages")
        own = [at for at, part in modules[name].named_modules(prefix=name) if "forward" in vars(part)]
        if own:
            raise ConfigError(
                f"{key} cannot compile {name or 'the model'}: forward of {own[0] or 'the model'} was assigned to the "
                "object, not to its class; define it in the class, or use step.compile=off"
            )
        forward = CompiledForward(name, modules[name], key)
        modules[name].forward = forward
        made.append(forward)
    if made:
        device = next((tensor.device.type for tensor in model.parameters()), "cpu")
        configure(device, torch.get_num_threads(), len(made))
    return made


def configure(device: str, threads: int, modules: int = 1) -> None:
    """Set torch's compiler up in this process, for so many modules. ConfigError where this host lacks something for
    it.
    """
    given = os.environ.get(CACHE_VARIABLE, "")
    # torch writes its own choice there when it is imported
    if not given or given.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
        os.environ[CACHE_VARIABLE] = str(cache_folder())

    lack = compiler_lack(device, os.environ) if BACKEND == "inductor" else ""
    if lack:
        raise ConfigError(f"step.compile cannot compile on this host: {lack}; or use step.compile=off")
    _chosen.update(device=device, threads=threads, modules=max(modules, _chosen.get("modules", 1)))
    _set_options()


def _set_options() -> None:
    """For this thread: torch keeps them by thread from 2.14 on."""
    import torch._functorch.config
    import torch._inductor.config as inductor

    _set(
        torch._dynamo.config,
        skip_nnmodule_hook_guards=False,  # a hook that comes later is seen
        optimize_ddp=False,  # it would cut blocks at the ends of buckets
        # equal modules may keep numbers of their own, for each of which torch compiles
        recompile_limit=_most(),
        accumulated_recompile_limit=_most(),
    )
    _set(
        inductor,
        fallback_random=True,  # functional dropout draws what it draws uncompiled
        layout_optimization=False,  # `step.memory_format` says how images lie, and draws follow that
        deterministic=True,  # on GPUs, kernels are not chosen by how fast they were
        fx_graph_cache=True,
    )
    _set(
        torch._functorch.config,
        enable_autograd_cache=True,
        force_non_lazy_backward_lowering=True,  # all is compiled where `compiling` says so
    )
    if _chosen.get("device") == "cpu":
        _set(inductor.cpp, threads=_chosen["threads"])
        _set(inductor, compile_threads=1)  # ranks share the cores
    _thread.configured = True


def _set(options: Any, **values: Any) -> None:
    for name, value in values.items():
        _before.setdefault((options, name), getattr(options, name))
        setattr(options, name, value)


@contextmanager
def compiler_options_kept() -> Iterator[None]:
    """A context for one run, after which torch's compiler has the options that it had before."""
    try:
        yield
    finally:
        for (options, name), value in _before.items():
            setattr(options, name, value)
        _before.clear()
        _chosen.clear()
        _thread.configured = False


def _most() -> int:
    """Compilations of one kind of module, by all of its modules."""
    return MOST_SHAPES * _chosen.get("modules", 1)


def cache_folder() -> Path:
    """Where machine code is kept for later runs of this user, on processors of this kind. Where others could write
    there, a new folder for this process: what is found is run.
    """
    parent = user_cache(CACHE)
    if parent is None:
        return Path(tempfile.mkdtemp(prefix="dtf-compiled-"))
    features = [line for line in _processor() if line.startswith(("model name", "flags", "Features"))]
    folder = parent / hashlib.sha256("".join(features).encode()).hexdigest()[:12]
    with suppress(OSError):
        for made in (parent.parent, parent, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        if all(_is_own(made) for made in (parent.parent, parent, folder)):  # what is there is run
            return folder
    return Path(tempfile.mkdtemp(prefix="dtf-compiled-"))


def _is_own(folder: Path) -> bool:
    """Whether nobody else can write there."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _processor() -> list[str]:
    """What Linux says of the first one. Code for one kind may stop another, which sees the same home folder."""
    with suppress(OSError):
        return Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    return []


@contextmanager
def uncompiled(compiled: Collection[CompiledForward]) -> Iterator[None]:
    """A context in which these modules compute as they are. Others of this process, in other threads, do not change."""
    before = [forward.is_off for forward in compiled]
    for forward in compiled:
        forward.is_off = True
    try:
        yield
    finally:
        for forward, was_off in zip(compiled, before, strict=True):
            forward.is_off = was_off


@contextmanager
def traced_only(again: bool = False) -> Iterator[None]:
    """A context for passes in which modules are followed as for compilation, and computed as they are. `again`: what
    would have to be compiled once more is an error.
    """
    global _traced_only
    before = _traced_only, torch._dynamo.config.error_on_recompile
    _traced_only, torch._dynamo.config.error_on_recompile = True, again
    try:
        yield
    finally:
        _traced_only, torch._dynamo.config.error_on_recompile = before


def _guard(error: Exception) -> str:
    """What changed, of an error that something would be compiled anew."""
    guards = re.findall(r"- \d+/\d+: (.*?)(?:\s+#.*)?$", str(error), re.MULTILINE)
    return next((guard for guard in guards if "module" in guard), "; ".join(guards) or str(error).partition("\n")[0])


def reason(error: Exception) -> str:
    """What torch says of an error, in one line, and the line of code that it names."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.endswith(" raised:")]
    said = [lines[0]] if lines else [type(error).__name__]
    said += [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")][:1]
    said += [line for line in lines if ": error: " in line or ": fatal error: " in line][:1]  # of a C++ compiler
    _, _, user = text.partition("from user code:")
    places = [line.strip() for line in user.splitlines() if line.strip().startswith("File ")]
    if places:
        said.append(places[-1])
    return " ".join(part.rstrip(".") + "," for part in said).rstrip(",")
