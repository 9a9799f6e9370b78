"""Names that have changed. The old ones work for one release, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

MODULES = {
    "dtf.build": (
        "dtf.model.init",
        {"cast_model": "cast", "draw_model": "init_model", "drawn": "init_modules", "sketch": "build_on_meta"},
    ),
    "dtf.classes": ("dtf.model.losses", {"rank": "target_rank"}),
    "dtf.errors": ("dtf.core.errors", {"ORDERLY": "PLANNED_EXITS"}),
    "dtf.job": ("dtf.api.job", {}),
    "dtf.launcher": ("dtf.api.launcher", {"Place": "dtf.core.types:Place"}),
    "dtf.layout": ("dtf.api.layout", {}),
    "dtf.lr": ("dtf.api.lr", {}),
    "dtf.metrics": ("dtf.model.metrics", {}),
    "dtf.observer": ("dtf.api.observer", {}),
    "dtf.optimizer": ("dtf.api.optimizer", {}),
    "dtf.options": ("dtf.api.options", {}),
    "dtf.precision": ("dtf.api.precision", {}),
    "dtf.pserver.placing": ("dtf.pserver.placement", {}),
    "dtf.ranking": ("dtf.model.auc", {"Ranking": "AucEvaluator"}),
    "dtf.recipe": ("dtf.api.recipe", {"Judge": "Evaluator"}),
    "dtf.registry": ("dtf.api.registry", {"suggest": "dtf.core.text:suggest"}),
    "dtf.row_optimizer": ("dtf.api.row_optimizer", {}),
    "dtf.sampler": (
        "dtf.api.sampler",
        {
            **{name: f"dtf.data.samplers:{name}" for name in ("Repeated", "Sequential", "Shuffle", "Weighted")},
            "Epochs": "dtf.data.batches:Epochs",
            "cut": "dtf.data.batches:micro_batch_bounds",
            "share": "dtf.data.batches:micro_batches_of",
            "within": "dtf.data.batches:share_within",
        },
    ),
    "dtf.seeding": ("dtf.core.seeding", {}),
    "dtf.spmd": (
        "dtf.strategies.spmd",
        {
            "alone": "single_process",
            "waiting": "dtf.model.memory:pending_grad_bytes",
            "workload": "microbatch_load",
        },
    ),
    "dtf.strategy": (
        "dtf.api.strategy",
        {
            "Errand": "dtf.api.helper_roles:RoleContext",
            "Source": "dtf.api.task:Source",
            "Standing": "dtf.api.helper_roles:RendezvousContext",
            "Task": "dtf.api.task:Task",
            "Weights": "dtf.api.task:Weights",
        },
    ),
    "dtf.table": ("dtf.api.sparse_table", {}),
    "dtf.update": (
        "dtf.optim.update",
        {
            "Piece": "dtf.optim.sharding:ParamShard",
            "made": "LocalUpdate",
            "rehearsed": "trial_update",
            "state_bytes": "dtf.optim.state_bytes:state_bytes",
            "whole": "dtf.optim.sharding:full_params",
        },
    ),
    "dtf.values": ("dtf.core.types", {}),
    "dtf.world": ("dtf.distributed.world", {}),
}
"""Old module -> the module that has its names now, and the names that changed: `name`, or `module:name` elsewhere."""

MOVED_KEYS = {
    ("strategy", "pserver"): (
        "launcher=manual",
        {
            "endpoints": "launcher.endpoints",
            "role": "launcher.role",
            "server_id": "launcher.id",
            "trainer_id": "launcher.id",
            "token_file": "launcher.token_file",
            "meet_timeout_s": "launcher.timeout_s",
            "tls": "launcher.tls",
            "allow_insecure": "launcher.allow_insecure",
        },
    ),
}
"""(group, option) -> where some of its keys went, and their names there."""

_BUCKET_VIEW = {"gradient_as_bucket_view": "gradients always live in the buckets; leave it out"}

GONE_KEYS = {
    ("strategy", "pserver"): {
        "gather": "with strategy.mode=half_async as many gradients as there are trainers make an update; leave it out, "
        "or set step.batch_size",
        "slice_parameters": "parameters are cut unless the optimizer needs them whole; leave it out, or use a large "
        "strategy.min_block, which cuts none",
        "send_queue": "one push is on its way while the next batch is computed; leave it out",
        "rpc_threads": "a server has as many threads as its trainers need; leave it out",
    },
    ("strategy", "ddp"): _BUCKET_VIEW,
    ("strategy", "zero1"): _BUCKET_VIEW,
    ("strategy", "dp"): {"output_device": "the first of strategy.device_ids sums metrics and gradients; order these"},
    ("job", "report"): {"published_by": "the labels of job.published say who measured what; write it there"},
}
"""(group, option) -> keys that it no longer has, and what does their work."""


LOST_EFFECTS = {
    "gather": (0, ("half_async",), "so many pushes made one update, and now as many as there are trainers do"),
    "send_queue": (
        1,
        ("async", "half_async", "geo"),
        "so many pushes were on their way while the next batch was computed, and now one is",
    ),
}
"""Keys of GONE_KEYS of strategy=pserver that decided the numbers -> the value that does what is done now, the modes in
which they had an effect, and what they did.
"""


def lost_effects(saved: Any) -> list[str]:
    """A line for each key of a config that an earlier version recorded which decided the numbers and is gone."""
    strategy = saved.get("strategy") if isinstance(saved, dict) else None
    if not isinstance(strategy, dict) or strategy.get("name") != "pserver":
        return []
    return [
        f"the run was recorded with strategy.{key}={strategy[key]}, which this version has no more: {effect}"
        for key, (same, modes, effect) in LOST_EFFECTS.items()
        if strategy.get(key, same) != same and strategy.get("mode") in modes
    ]


def refused_keys(group: str, name: str, given: Iterable[str]) -> tuple[str, str] | None:
    """The first of the keys `given` that an option had once, and a text about all of these. None: there is none."""
    where, moved = MOVED_KEYS.get((group, name), ("", {}))
    gone = GONE_KEYS.get((group, name), {})
    old = [key for key in given if key in moved or key in gone]
    if not old:
        return None
    texts = [f"{group}.{key} is gone: {gone[key]}" for key in old if key in gone]
    if keys := [key for key in old if key in moved]:
        shown, new = (", ".join(names) for names in ([f"{group}.{key}" for key in keys], [moved[key] for key in keys]))
        texts.insert(0, f"{shown}: now {new} of {where}; write {where} and the new name{'s' * (len(keys) > 1)}")
    return f"{group}.{old[0]}", "; ".join(texts)


def upgraded_config(saved: Any) -> Any:
    """A config that an earlier version recorded, without keys that its options no longer have. What is no mapping is
    returned as it is.
    """
    if not isinstance(saved, dict):
        return saved
    config = dict(saved)
    for group, node in saved.items():
        if not isinstance(node, dict):
            continue
        option = group, str(node.get("name"))
        old = {*GONE_KEYS.get(option, ()), *MOVED_KEYS.get(option, ("", {}))[1]}
        config[group] = {key: value for key, value in node.items() if key not in old}
        if node.get("endpoints") and "endpoints" in old:
            config[group]["servers"] = len(node["endpoints"])
        if option == ("strategy", "pserver") and isinstance(node.get("trainers"), int):
            del config[group]["trainers"]  # it counted them
        if node.get("slice_parameters") is False and "slice_parameters" in old:
            config[group]["min_block"] = sys.maxsize
    return config


class OldModules:
    """Finds the modules that `MODULES` names. Each passes on to the new one, and warns who imports from it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = fullname in MODULES
        return importlib.machinery.ModuleSpec(fullname, self) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """As Python makes them."""

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new, names = MODULES[old]

        def get(name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            where, _, renamed = names.get(name, name).rpartition(":")
            module = where or new
            value = getattr(importlib.import_module(module), renamed)
            _warn(f"{old}.{name} is now {module}.{renamed}; import what is public from dtf", 2)
            return value

        vars(module)["__getattr__"] = get


def find_old_modules() -> None:
    """Let the old modules be imported."""
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.append(OldModules())


def accept_old_names(contract: type, cls: type, names: Mapping[str, str]) -> None:
    """For `__init_subclass__` of `contract`: its old names, and the new ones.

    What `cls`, or a base such as a mixin, defines under an old name counts under the new one, where nothing nearer has
    the new one. What is read or called under an old name, by `super()` too, is what has the new one.
    """
    for old, new in names.items():
        with_old = [base for base in cls.__mro__ if old in vars(base) and not isinstance(vars(base)[old], _Renamed)]
        with_new = [base for base in cls.__mro__ if new in vars(base)]
        if old not in vars(contract):
            setattr(contract, old, _Renamed(old, new, contract))
        if not with_old:
            continue
        if cls.__mro__.index(with_old[0]) < cls.__mro__.index(with_new[0]):
            where = with_old[0]
            _warn(f"{where.__module__}.{where.__qualname__}.{old} is now called {new}; rename it", 4)
            is_field = old in vars(where).get("__annotations__", {})
            setattr(cls, new, property(lambda self, old=old: getattr(self, old)) if is_field else vars(where)[old])
        elif with_new[0] is cls and with_old[0] is not cls:
            setattr(cls, old, _Renamed(old, new, cls))


class _Renamed:
    """An attribute read under its old name."""

    def __init__(self, old: str, new: str, home: type) -> None:
        self._old, self._new, self._home = old, new, home

    def __get__(self, instance: object, owner: type) -> object:
        _warn(f"{owner.__module__}.{owner.__qualname__}.{self._old} is now called {self._new}; rename it", 2)
        nearer = owner.__mro__[: owner.__mro__.index(self._home)]
        with_old = [base for base in nearer if not isinstance(vars(base).get(self._old, self), _Renamed)]
        if not with_old:
            return getattr(owner if instance is None else instance, self._new)
        # only `super()` in the last of these comes here
        return getattr(super(with_old[-1], owner if instance is None else instance), self._new)


def _warn(text: str, level: int) -> None:
    warnings.warn(f"{text}; the old name goes with the next release", DeprecationWarning, stacklevel=level + 1)
