"""A model of transformers and its data in a rank: made, tried on a few rows, and read for what the recipe tells."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import Proxy

from dtf.adapters.made_parts import MadeParts
from dtf.adapters.transformers_data import ForModel, items_of, splits_of
from dtf.adapters.transformers_heads import Head, head_of
from dtf.api.options import FineTuning
from dtf.api.recipe import Dataset
from dtf.api.registry import name_of
from dtf.core.arguments import load, name_in_module
from dtf.core.errors import ConfigError
from dtf.data.map_style import map_style
from dtf.model.attributes import without_trace
from dtf.model.init import seeded

if TYPE_CHECKING:
    from dtf.config.settings import Settings

_OWN_KEYS = frozenset(field.name for field in fields(FineTuning))
_CLOSE = 1e-5
_MADE = MadeParts()  # by all runs of this process: a second one must not go on with the weights of the first


class TransformersRun:
    """The model of a recipe and its data, opened when they are first asked for. `settings`: of the run."""

    def __init__(self, recipe: Any, settings: Settings) -> None:
        self._recipe, self._settings = recipe, settings
        self._rows: dict[str, Dataset] = {}
        self._collate: ForModel | None = None
        self._head: Head | None = None
        self._loss_is_known = False

    @property
    def head(self) -> Head:
        """What the model is trained for."""
        if self._head is None:
            self._made()
        assert self._head is not None
        return self._head

    # -------------------------------------------------------- data

    def rows(self, split: str) -> Dataset:
        """The rows of `train`, `eval` or `test`. ConfigError where there are none."""
        if not self._rows:
            self._open()
        if split not in self._rows:
            raise ConfigError(
                f"{self._recipe.data_target} returned no {split} rows, but {' and '.join(self._rows)} rows; add them, "
                "or use another split"
            )
        return self._rows[split]

    def _open(self) -> None:
        recipe, seed = self._recipe, self._settings.seed
        with seeded(seed):
            node = getattr(recipe, "data", None)
            splits = splits_of(_call(recipe.data_target, vars(node) if node is not None else {}), recipe.data_target)
            # ranks take turns to make a large model, and rows are read before
            self._collate = ForModel(self._collator(), class_of_model(self._called))
        for split, rows in splits.items():
            self._rows[split] = map_style(
                items_of(rows, recipe.data_target),
                collate_fn=self._collate,
                target="labels",
                seed=seed,
                shapes_vary=self._shapes_vary,
            )

    def _collator(self) -> Any:
        target = self._recipe.collator_target
        if target is not None:
            try:
                inspect.signature(load(target)).bind()
            except TypeError as error:
                raise ConfigError(
                    f"collator={target}: {error}; name a function without arguments that returns the collator"
                ) from None
            return _call(target, {})
        from transformers import default_data_collator  # pyright: ignore[reportMissingImports]

        return default_data_collator

    @property
    def _shapes_vary(self) -> bool:
        """Of rows of a batch. The default collator stacks rows of one length."""
        told = self._recipe.shapes_vary
        return self._recipe.collator_target is not None if told is None else told

    # -------------------------------------------------------- the model

    def build(self) -> nn.Module:
        """A new model, whose forward pass also takes one dict of inputs, and then gives logits."""
        model = self._made()
        self._refuse_objective()
        if name_of("job", self._settings.job) == "predict" and not self.head.gives_classes:
            raise ConfigError(
                f"job=predict writes the class of each row, and {type(model).__name__} gives none; use the model "
                "itself: dtf.load_model(RUN)"
            )
        if self._settings.job.trains and not self._loss_is_known:
            self._refuse_another_loss(model)
            self._loss_is_known = True
        return _taking_dicts(model)

    def _made(self) -> Any:
        from transformers import PreTrainedModel  # pyright: ignore[reportMissingImports]

        with seeded(self._settings.seed):
            model = self._called()
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"{self._recipe.model_target} returned {type(model).__name__}; it must return a PreTrainedModel of "
                "transformers"
            )
        _MADE.add(model, name_in_module(self._recipe.model_target))
        self._head = head_of(model)
        if self._collate is not None:
            self._collate.follow(type(model))
        return model.float()  # from_pretrained keeps the format of the file

    def _called(self) -> Any:
        recipe = self._recipe
        return _call(
            recipe.model_target, {key: value for key, value in vars(recipe.model).items() if key not in _OWN_KEYS}
        )

    def _refuse_objective(self) -> None:
        """Raise ConfigError where evaluations have no metric by the name of the objective."""
        name, known = self._recipe.objective[0], self.head.summarise([1.0] * (len(self.head.sums) + 1))
        if name not in known:
            raise ConfigError(
                f"{name} is no metric of {type(self._recipe).__name__}, which evaluations have: {', '.join(known)}; "
                f'give transformers_recipe(..., objective=("{next(iter(known))}", "min"))'
            )

    def _refuse_another_loss(self, model: Any) -> None:
        """Raise ConfigError where the model computes another loss of some rows than its head."""
        rows = self.rows("train")
        ids = np.unique(np.linspace(0, len(rows) - 1, min(self.head.tried_rows, len(rows))).astype(np.int64))
        inputs, targets = rows.fetch(ids, 0)
        if not isinstance(targets, Tensor):
            raise ConfigError(f"labels of a batch are {type(targets).__name__}; they must be a tensor")
        if getattr(model.config, "return_dict", True) is False:
            raise ConfigError("the model's config has return_dict=False; leave it out: its outputs are taken by name")
        was, extras = model.training, _extras(model)
        with seeded(self._settings.seed), torch.no_grad(), without_trace([model]):
            logits = _logits(model.eval(), model(**inputs, **extras))
            self.head.loss(logits, targets)  # names what is wrong with them
            labels = self.head.labels_to_try(targets, logits)
            evaluated = model(**inputs, **extras, labels=labels)
            trained = model.train()(**inputs, **extras, labels=labels)  # with dropout: beside its own scores
            model.train(was)
        for given, scores in ((evaluated, logits), (trained, _logits(model, trained))):
            theirs, mine = given.loss, _mean(self.head.loss(scores, labels))
            if theirs is None or not abs(float(theirs) - mine) <= _CLOSE * max(1.0, abs(mine)):
                raise ConfigError(
                    f"{type(model).__name__} computes a loss of its own{' in training' if given is trained else ''}: "
                    f"{'none' if theirs is None else f'{float(theirs):.6g}'} for {len(ids)} rows, where the loss of "
                    f"its kind, {type(self.head).__name__}, is {mine:.6g}. What it adds or weighs is no mean that can "
                    "be cut; write a recipe with that loss (docs/own-recipe.md)"
                )


class _Seen(BaseException):
    """Ends a function that makes a model. No Exception: a function that bears errors must not bear this one."""


def class_of_model(make: Callable[[], Any]) -> type:
    """The class of the model that a function makes, without its memory: what it is made with is read, not its weights.
    Of several models, the first one's.
    """
    from transformers import PreTrainedModel  # pyright: ignore[reportMissingImports]

    def _stop(model: Any, *config: Any, **more: Any) -> None:
        raise _Seen(type(model))

    before = PreTrainedModel.__init__
    PreTrainedModel.__init__ = _stop
    try:
        return type(make())
    except _Seen as seen:
        return seen.args[0]
    finally:
        PreTrainedModel.__init__ = before


def _logits(model: Any, outputs: Any) -> Tensor:
    """ConfigError where a pass gave none by that name."""
    logits = getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise ConfigError(
            f"{type(model).__name__}.forward returned {type(outputs).__name__} without logits; it must return a "
            "ModelOutput with loss and logits"
        )
    return logits


def _mean(loss: Any) -> float:
    """Of the loss of each row, or of sums and counts."""
    sums, counts = loss if isinstance(loss, tuple) else (loss, torch.ones_like(loss))
    return float(sums.sum() / counts.sum())


def _call(target: Any, given: Mapping[str, Any]) -> Any:
    try:
        return load(target)(**given)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("transformers", "datasets", "tokenizers"):
            raise ConfigError(f"{target} needs {missing}: pip install {missing}") from error
        raise


def _extras(model: nn.Module) -> dict[str, Any]:
    """Arguments of a pass that is no generation."""
    known = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in (("use_cache", False), ("return_dict", True)) if name in known}


def _taking_dicts(model: Any) -> nn.Module:
    """The model, whose forward pass also takes one dict, and then gives logits alone. Called as transformers does, it
    is as it was. Names of parameters and modules stay.
    """
    cls, extras = type(model), _extras(model)

    @functools.wraps(cls.forward)
    def _forward(self: Any, *inputs: Any, **named: Any) -> Any:
        if len(inputs) == 1 and isinstance(inputs[0], dict):
            return cls.forward(self, **inputs[0], **extras).logits
        if any(isinstance(value, Proxy) for value in inputs):
            raise TypeError("it takes a dict of tensors, and which ones only rows tell; use strategy=fsdp")
        return cls.forward(self, *inputs, **named)

    own = {"forward": _forward, "__qualname__": cls.__qualname__, "__module__": cls.__module__}
    model.__class__ = type(cls.__name__, (cls,), own)
    return model
