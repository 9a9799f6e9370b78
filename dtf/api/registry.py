"""Names for classes: `@register("strategy", "ddp")` makes a dataclass, a config schema, an option and its help text in
one.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, dataclass_transform

from dtf.core.errors import ConfigError
from dtf.core.main_module import MAIN, is_interactive
from dtf.core.text import suggest

T = TypeVar("T", bound=type)

_CLASSES: dict[str, dict[str, type]] = {}
_BASES: dict[type, str] = {}  # class of a variant -> its option
_BRINGERS: set[str] = set()
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` to `most`, both included, or beyond `above` and before `below`, which are not.

    None: no end.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        low = (self.least is None or value >= self.least) and (self.above is None or value > self.above)
        return low and (self.most is None or value <= self.most) and (self.below is None or value < self.below)

    def __str__(self) -> str:
        """As it follows `must be`: `0 or more`, `1 to 8`, `more than 0 and less than 1`; empty for all numbers."""
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}"
        ends = [
            ("{} or more", self.least),
            ("more than {}", self.above),
            ("at most {}", self.most),
            ("less than {}", self.below),
        ]
        return " and ".join(text.format(end) for text, end in ends if end is not None)


def option(
    default: Any = dataclasses.MISSING,
    *,
    doc: str,
    unit: str = "",
    factory: Any = dataclasses.MISSING,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field that is also a config key. `job=describe` shows its `doc`, its `unit` and the range of its
    numbers.

    A number outside the range (see `Range`) is refused before anything starts; in a list, each number is checked. Lists
    and nested nodes are given by `factory`. A field without default is mandatory (`???` in the config).
    """
    return dataclasses.field(
        default=default,
        default_factory=factory,
        metadata={"doc": doc, "unit": unit, "range": Range(least, above, most, below)},
    )


def with_default(base: type, key: str, default: Any) -> Any:
    """A field as `base` has it, with another default: for a registered class that is `base` with other values."""
    (field,) = (field for field in dataclasses.fields(base) if field.name == key)
    return dataclasses.field(default=default, metadata=field.metadata)


@dataclass_transform(kw_only_default=True, field_specifiers=(option, with_default))
def register(group: str, name: str, *, variant_of: str = "") -> Callable[[T], T]:
    """Class decorator: make the class a keyword-only dataclass, and the option `name` of the config group `group`.

    `variant_of`: an option of the group, registered before. The class is a subclass of its class that gives its keys
    other defaults and does nothing else, as `zero1` of `ddp`. The values of a node then decide which of the two names
    it gets.

    The module of the class must import without torch, as the command line reads the class. ConfigError when another
    class has the name, or when the class lacks methods of its contract or has an `__init__`.
    """

    def decorate(cls: T) -> T:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{group}={name!r} is no usable name; letters, digits, '.', '_' and '-' only")
        if "__init__" in vars(cls) and "__dataclass_fields__" not in vars(cls):
            raise ConfigError(
                f"{group}={name}: {cls.__module__}.{cls.__qualname__} has an __init__ of its own, and its options are "
                "the arguments of one that is made from its fields; call it __post_init__(self)"
            )
        _check_defaults(f"{group}={name}", cls)
        if variant_of:
            known = registered(group)
            if variant_of not in known:
                raise ConfigError(
                    f"{group}={name}: {cls.__module__}.{cls.__qualname__} has variant_of={variant_of!r}, which is not "
                    f"registered; {suggest(str(variant_of), known)}"
                )
            _check_variant(f"{group}={name}", cls, known[variant_of])
        made = dataclasses.dataclass(kw_only=True)(cls)
        missing = sorted(getattr(made, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{group}={name}: {cls.__module__}.{cls.__qualname__} must define {', '.join(missing)}")
        _check_kinds(f"{group}={name}", made)
        known = _CLASSES.setdefault(group, {})
        other = known.get(name)
        if other is not None and not _replaces(cls, other):
            raise ConfigError(
                f"{group}={name} is registered twice, by {other.__module__} and {cls.__module__}; rename one"
            )
        if variant_of:
            _BASES[made] = base_of(group, variant_of)
        known[name] = made
        return made

    return decorate


def _replaces(cls: type, other: type) -> bool:
    """Whether a class is what an edited cell, or a module that was loaded again, makes of another one."""
    if cls.__module__ != other.__module__:
        return False
    return cls.__qualname__ == other.__qualname__ or (cls.__module__ == MAIN and is_interactive())


def _check_defaults(place: str, cls: type) -> None:
    """Raise ConfigError for a key that gets a value without an annotation, which a dataclass takes for no default."""
    if "__dataclass_fields__" in vars(cls):
        return
    bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    annotated = inspect.get_annotations(cls)
    name = next((name for name in vars(cls) if name in inherited and name not in annotated), None)
    if name is not None:
        raise ConfigError(
            f"{place}: {cls.__module__}.{cls.__qualname__} gives its key {name} a value without a type, which would be "
            f"ignored; write {name}: TYPE = dtf.with_default(BASE, {name!r}, VALUE)"
        )


def _check_variant(place: str, cls: type, base: type) -> None:
    """Raise ConfigError for a class that is not `base` with other defaults: its body must hold nothing else."""
    keys = {field.name for field in dataclasses.fields(base)}
    made = {"__init__", "__repr__", "__eq__", "__replace__", "__annotate__", "__annotate_func__"}  # by Python
    code = (FunctionType, property, classmethod, staticmethod)
    more = [
        name
        for name, value in vars(cls).items()
        if name not in keys | made and (not name.startswith("_") or isinstance(value, code))
    ]
    if not issubclass(cls, base) or more:
        raise ConfigError(
            f"{place}: {cls.__module__}.{cls.__qualname__} is no variant of {base.__module__}.{base.__qualname__}"
            f"{f', as it defines {more[0]}' if more else ''}; make it a subclass that gives its keys other defaults "
            "and has nothing else, or leave variant_of out"
        )


def _check_kinds(place: str, cls: type) -> None:
    """Raise ConfigError where a class has an attribute in place of a method of its contract, or the reverse."""
    for base in cls.__mro__[1:]:
        for key, theirs in vars(base).items():
            if key.startswith("__"):
                continue
            own, who = inspect.getattr_static(cls, key), f"{place}: {cls.__module__}.{cls.__qualname__}.{key}"
            if inspect.isfunction(theirs) and (isinstance(own, property) or not callable(getattr(cls, key))):
                raise ConfigError(
                    f"{who} must be a method: def {key}({', '.join(inspect.signature(theirs).parameters)})"
                )
            if isinstance(theirs, property) and inspect.isfunction(own):
                raise ConfigError(f"{who} must be an attribute, or a method with @property")


def brings(module: str) -> bool:
    """Whether a module has registered something that is no class, see `bring`."""
    return module in _BRINGERS


def bring(module: str) -> None:
    """Record that `module`, a plugin, has registered something that is no class of a config group."""
    _BRINGERS.add(module)


def groups() -> list[str]:
    """All config groups that have a registered class."""
    return sorted(_CLASSES)


def registered(group: str) -> dict[str, type]:
    """Name -> class of one group, sorted by name."""
    return dict(sorted(_CLASSES.get(group, {}).items()))


def lookup(group: str, name: str) -> type:
    """The class registered as `name`; ConfigError with the nearest names otherwise."""
    classes = registered(group)
    if name not in classes:
        raise ConfigError(f"{group}={name} is not registered; {suggest(name, classes)}")
    return classes[name]


def base_of(group: str, name: str) -> str:
    """The option of which `name` is a variant (see `register`), such as `fp32` for `bf16`; else `name`."""
    return _BASES.get(lookup(group, name), name)


def family_of(group: str, name: str) -> list[str]:
    """An option with all its variants, or a variant with its option and the other variants; the option first."""
    base = base_of(group, name)
    return [base, *(other for other, cls in registered(group).items() if _BASES.get(cls) == base)]


def name_of(group: str, part: object) -> str:
    """The name by which a config calls the class of an object."""
    return next((name for name, cls in registered(group).items() if cls is type(part)), type(part).__name__)
