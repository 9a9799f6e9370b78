"""Dropout by functions of torch, such as `F.dropout` and that of attention: masks that depend on the seed, the step,
the micro-batch and the module whose forward calls the function, not on the rank that draws them.

Which modules do so is found in a trial pass. Others are left as they are.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dtf.model.contents import FUNCTION_DRAWS
from dtf.model.drawn_masks import Draws, DrawsByName, draw_factor, draw_in_compiled
from dtf.model.seeded_dropout import Part, SeededDropout, in_backward

HEADS = "_dtf_heads"
"""The attribute of a module that makes the weights of attention: number of heads, first and last + 1 of this rank's."""


class _Kind(NamedTuple):
    """What a dropout function does by default. `batched`: axes of an input that has rows; 0: each has."""

    channels: bool = False
    alpha: bool = False
    training: bool = True
    inplace: bool = False
    batched: int = 0


_KINDS: dict[Any, _Kind] = {
    F.dropout: _Kind(),
    F.dropout1d: _Kind(channels=True, batched=3),
    F.dropout2d: _Kind(channels=True),
    F.dropout3d: _Kind(channels=True, batched=5),
    F.alpha_dropout: _Kind(alpha=True, training=False),
    F.feature_alpha_dropout: _Kind(channels=True, alpha=True, training=False),
    torch.dropout: _Kind(),
    torch.dropout_: _Kind(inplace=True),
    torch.feature_dropout: _Kind(channels=True),
    torch.feature_dropout_: _Kind(channels=True, inplace=True),
    torch.alpha_dropout: _Kind(alpha=True),
    torch.alpha_dropout_: _Kind(alpha=True, inplace=True),
    torch.feature_alpha_dropout: _Kind(channels=True, alpha=True),
    torch.feature_alpha_dropout_: _Kind(channels=True, alpha=True, inplace=True),
}
_ALPHA = 1.7580993408473766
"""Minus what SELU comes to far below zero."""

Factor = Callable[[Tensor, float, Sequence[int]], Tensor]
"""(what is dropped from, share, shape of the mask) -> the mask, 0 or 1 / (1 - share)."""


def _dropout(
    kind: _Kind,
    factor: Factor,
    input: Tensor,
    p: float = 0.5,
    training: bool | None = None,
    inplace: bool = False,
    train: bool | None = None,
) -> Tensor | None:
    """The result of a dropout function of torch with a mask of `factor`. None: there is none to draw, or none that is
    known.
    """
    training = next((given for given in (training, train) if given is not None), kind.training)
    if not training or not 0 < p <= 1 or not _is_plain(input) or (kind.channels and input.dim() < 2):
        return None
    shape = [*input.shape]
    if kind.channels:
        rows = 1 if kind.batched and input.dim() != kind.batched else 2
        shape[rows:] = [1] * len(shape[rows:])
    inplace, mask = inplace or kind.inplace, factor(input, p, shape)
    if not kind.alpha or p == 1:
        return input.mul_(mask) if inplace else input * mask
    kept, scale = mask.ne(0).to(input.dtype), 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    shift = (kept - 1).mul_(_ALPHA * scale).add_(_ALPHA * scale * p)
    return input.mul_(kept * scale).add_(shift) if inplace else (input * (kept * scale)).add_(shift)


def attention(
    factor: Factor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """`F.scaled_dot_product_attention` by its definition, in the order and the precision in which torch computes it,
    with a mask of its weights (..., T, S) of `factor`. None as of `_dropout`.

    query (..., T, E), key (..., S, E), value (..., S, V). Returns (..., T, V).
    """
    if not 0 < dropout_p <= 1 or not all(map(_is_plain, (query, key, value))) or (is_causal and attn_mask is not None):
        return None
    device = query.device.type
    if torch.is_autocast_enabled(device):
        narrow = torch.get_autocast_dtype(device)
        query, key, value = (_narrowed(x, narrow) for x in (query, key, value))
        attn_mask = None if attn_mask is None else _narrowed(attn_mask, narrow)
    with torch.autocast(device, enabled=False):
        dtype = query.dtype
        if dtype in (torch.float16, torch.bfloat16):
            query, key, value = query.float(), key.float(), value.float()
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        root = math.sqrt(abs(scale))
        scores = (query * math.copysign(root, scale)) @ (key.transpose(-2, -1) * root)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -math.inf)
        if attn_mask is not None:
            scores = scores + attn_mask.to(scores.dtype)
        weights = torch.ops.aten._safe_softmax(scores, -1)  # a row without a column gives zeros
        return ((weights * factor(weights, dropout_p, weights.shape)) @ value).to(dtype)


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As autocast narrows what a function gets."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _is_plain(x: Tensor) -> bool:
    """Whether it is a tensor of numbers in memory, and none that stands for others."""
    if not torch.compiler.is_dynamo_compiling() and is_functorch_wrapped_tensor(x):
        return False
    known = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and x.is_floating_point()
    return known and x.device.type != "meta" and x.numel() > 0


@functools.cache
def _attention_forward() -> Callable[..., Any]:
    """`F.multi_head_attention_forward`, which does not look for modes: it would come to the one that calls it again."""
    function: Any = F.multi_head_attention_forward
    names = {**vars(F), "has_torch_function": lambda tensors: False}
    code, defaults, closure = function.__code__, function.__defaults__, function.__closure__
    copy = FunctionType(code, names, function.__name__, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class FunctionDraws(DrawsByName):
    """The masks of functions that the forward of one module calls."""

    def __init__(self, module: nn.Module, name: str, masks: SeededDropout) -> None:
        self._name, self._masks, self._draws = name, masks, Draws(self)
        # where ranks divide its heads: how many there are, this rank's first and last + 1
        self._heads: tuple[int, int, int] | None = vars(module).get(HEADS)

    def begin(self) -> int:
        """The number of a call of the module that begins."""
        if torch.compiler.is_dynamo_compiling():
            self._draws.log.append(len(self._draws.log))
            return len(self._draws.log) - 1
        return self._masks.call(self._name)

    @property
    def follows(self) -> bool:
        """Whether masks can be drawn now: not where the author's own code is being compiled."""
        return self._draws.compiled or not torch.compiler.is_dynamo_compiling()

    def factor(self, number: int, index: int, x: Tensor, p: float, shape: Sequence[int]) -> Tensor:
        """The mask of a call, as a factor, for `x`. `index`: how many were drawn in this call before."""
        if torch.compiler.is_dynamo_compiling():
            return draw_in_compiled(self._draws.layer, number, index, p, shape, x.dtype, x.device)
        self._masks.note(f"inputs of the dropout in {self._name}", x, self._part(shape))
        return self.draw(number, index, p, shape, x.dtype, x.device)

    def draw(
        self, number: int, index: int, p: float, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The mask `index` of a call of this micro-batch, as a factor."""
        part = self._part(shape)
        if part is None:
            return draw_factor(self._masks.key, self._name, number, index, p, shape, dtype, device)
        whole = [shape[0], part.width, *shape[2:]]
        mask = draw_factor(self._masks.key, self._name, number, index, p, whole, dtype, device)
        return mask.narrow(1, part.first, part.last - part.first)

    def _part(self, shape: Sequence[int]) -> Part | None:
        """What this rank has of a mask: some of the heads of (B, heads, T, S), or of the positions of (B, T, ...)."""
        if self._heads is not None and len(shape) == 4 and shape[1] == self._heads[2] - self._heads[1]:
            return Part(*self._heads, own=True)
        return self._masks.part_of(self._name, shape)


class _SeededFunctions(TorchFunctionMode):
    """A context for one call of a module's forward: dropout functions of torch draw their masks from `draws`."""

    def __init__(self, draws: FunctionDraws, number: int) -> None:
        super().__init__()
        self._draws, self._number = draws, number
        self._heads = 0  # in the forward of torch's attention, whose weights are (B * heads, T, S)
        self.drawn = 0
        """Masks so far."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        if not self._draws.follows:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            self._heads = args[4] if len(args) > 4 else kwargs["num_heads"]
            with self:
                outputs = _attention_forward()(*args, **kwargs)
            self._heads = 0
            return outputs
        if func is F.scaled_dot_product_attention:
            result = attention(self._factor, *args, **kwargs)
        elif func in _KINDS:
            result = _dropout(_KINDS[func], self._factor, *args, **kwargs)
        return func(*args, **kwargs) if result is None else result

    def _factor(self, x: Tensor, p: float, shape: Sequence[int]) -> Tensor:
        self.drawn += 1
        if self._heads and len(shape) == 3:
            by_head = [shape[0] // self._heads, self._heads, *shape[1:]]
            return self._draws.factor(self._number, self.drawn - 1, x, p, by_head).reshape(shape)
        return self._draws.factor(self._number, self.drawn - 1, x, p, shape)


class _SeededCalls:
    """A module whose own forward calls dropout functions of torch. Its class changes, the module and its name stay."""

    training: bool
    _function_draws: FunctionDraws

    def _seeded_forward(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = super().forward  # type: ignore[misc]
        if not self.training or not self._function_draws.follows:
            return forward(*args, **kwargs)
        with _SeededFunctions(self._function_draws, self._function_draws.begin()):
            return forward(*args, **kwargs)

    forward = _seeded_forward


@functools.cache
def _seeded(kind: type) -> Any:
    """One class for all modules of a kind: what is compiled for one serves all."""
    return type(kind.__name__, (_SeededCalls, kind), {})


def seed_calls(model: nn.Module, masks: SeededDropout, forwards: Collection[str], root: bool = True) -> list[str]:
    """Seed the functions that modules with these forwards call, see `FindCalls`. Returns the names of these modules."""
    seeded = []
    for name, module in model.named_modules():
        if (name or root) and not isinstance(module, _SeededCalls) and _forward_of(module) in forwards:
            module.__class__ = _seeded(type(module))
            module.__dict__[FUNCTION_DRAWS] = FunctionDraws(module, name, masks)
            seeded.append(name)
    return seeded


def draws_in_compiled(module: nn.Module) -> list[FunctionDraws]:
    """What the modules in a module that is compiled draw by functions; compiled passes can draw it from now on."""
    found = [part._function_draws for part in module.modules() if isinstance(part, _SeededCalls)]
    for draws in found:
        draws._draws.compiled = True
    return found


def _forward_of(module: nn.Module) -> str:
    """The name of its forward. Classes that torch or dtf derive have that of their author."""
    forward = None if isinstance(module, torch.jit.ScriptModule) else type(module).forward
    return f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', '')}"


class FindCalls(TorchFunctionMode):
    """A context for a trial pass, forward and backward, which finds the modules whose own forward calls dropout
    functions in training, and draws their masks. `root`: False for a part of a model whose own forward is no module's.

    Left as they are: calls in code that its author compiles; those in a part of a forward that `torch.utils.checkpoint`
    computes again without the module, and in modules that are called several times and so computed again. Their
    masks come from the global generator, which `checkpoint` puts back.
    """

    def __init__(self, model: nn.Module, masks: SeededDropout, root: bool = True) -> None:
        super().__init__()
        self._model, self._masks, self._root = model, masks, root
        self._inside: list[tuple[nn.Module, _SeededFunctions | None]] = []  # the modules that compute now
        self._draws: dict[nn.Module, FunctionDraws] = {}
        self._called: Counter[nn.Module] = Counter()
        self._found: set[str] = set()
        self._left: set[str] = set()
        self._entered = False  # by a module that a backward pass computes again

    @property
    def forwards(self) -> set[str]:
        """The forwards of what was found."""
        return self._found - self._left

    def __enter__(self) -> Self:
        self._stack = ExitStack()
        for name, module in self._model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # calls no function of Python, and takes no hooks
                continue
            if name or self._root:
                self._draws[module] = FunctionDraws(module, name, self._masks)
            # functions: a copy of a module would copy a method's object, and with it the whole model
            before = module.register_forward_pre_hook(lambda module, inputs: self._begin(module, inputs))
            after = module.register_forward_hook(lambda *called: self._end(*called), always_call=True)
            self._stack.callback(before.remove)
            self._stack.callback(after.remove)
        self._stack.callback(setattr, self._masks, "computing_again", self._masks.computing_again)
        self._masks.computing_again = self._computing_again
        if "torch._dynamo" in sys.modules:
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    @contextmanager
    def _computing_again(self, module: nn.Module) -> Iterator[None]:
        self._begin(module, ())
        try:
            yield
        finally:
            self._end(module, (), None)

    def _begin(self, module: nn.Module, inputs: object) -> None:
        if not in_backward():
            self._called[module] += 1
        elif self._called[module] > 1 and not self._masks.computes_again:
            self._left.add(_forward_of(module))
        if in_backward() and not self._inside:  # torch leaves all contexts for a backward pass
            super().__enter__()
            self._entered = True
        draws = self._draws.get(module) if module.training else None
        functions = None if draws is None else _SeededFunctions(draws, 0)
        self._inside.append((module, functions))

    def _end(self, module: nn.Module, inputs: object, outputs: object) -> None:
        while self._inside:
            ended, functions = self._inside.pop()
            if functions is not None and functions.drawn:
                self._found.add(_forward_of(ended))
            if ended is module:
                break
        if self._entered and not self._inside:
            self._entered = False
            super().__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        module, functions = self._inside[-1] if self._inside else (None, None)
        if torch.compiler.is_dynamo_compiling() or not drops(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        if module is not None and functions is not None:
            if not _is_out_of_reach():
                return functions.__torch_function__(func, types, args, kwargs)
            self._left.add(_forward_of(module))
        return func(*args, **(kwargs or {}))


def drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a function drops something."""
    if func in _KINDS:
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        return bool(given.get("p", 0.5) and given.get("training", given.get("train", _KINDS[func].training)))
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if func is F.multi_head_attention_forward:
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        return bool(given["dropout_p"] and given.get("training", True))
    return False


def _is_out_of_reach() -> bool:
    """Whether what calls is a part of what the author's own code compiles, which is not compiled now, or a part of a
    module's forward that `torch.utils.checkpoint` calls.
    """
    frame, own = sys._getframe(1), True
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if name == "compile_wrapper" and file.endswith("torch/_dynamo/eval_frame.py"):
            return True
        if own and file.endswith("torch/utils/checkpoint.py"):
            return True
        own = own and name != "_call_impl" and not file.endswith("model/activation_checkpointing.py")
        frame = frame.f_back
    return False
