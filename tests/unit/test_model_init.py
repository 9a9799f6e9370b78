"""What a recipe makes is looked at once, for every strategy: the parameters of its model, and the layout that it
gives.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dtf.api.layout import BufferUpdate, Layout, Split
from dtf.core.errors import ConfigError
from dtf.model.init import init_model, layout_of
from tests.support.toy import Toy


class Made(Toy):
    """Whatever a test gives it."""

    def build_model(self) -> nn.Module:
        return self.made()

    def layout(self, model: nn.Module) -> Layout:
        return self.falls()

    made: Callable[[], nn.Module]
    falls: Callable[[], Layout]


def recipe(made: Callable[[], nn.Module], falls: Callable[[], Layout]) -> Made:
    found = Made()
    found.made, found.falls = made, falls
    return found


def nest() -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Sequential(nn.Linear(3, 3), nn.ReLU())})


class Waves(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.phase = nn.Parameter(torch.empty(3, dtype=torch.complex64))


class Counts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen = nn.Parameter(torch.empty(3, dtype=torch.int64), requires_grad=False)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Waves, r"Made.build_model\(\) makes the parameter phase complex64; parameters are real numbers"),
        (Counts, r"makes the parameter seen int64; parameters are real numbers"),
        (
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).half()),
            r"several formats \(0.weight is float32, 1.weight is float16\), but all become precision.param",
        ),
    ],
)
def test_parameters_that_would_not_stay_what_they_are_are_refused(made: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        init_model(recipe(made, Layout), 0)


def buffered(buffer: torch.Tensor, persistent: bool) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("links", buffer, persistent=persistent)
    return model


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (torch.eye(3).to_sparse(), "the buffer links sparse .torch.sparse_coo.*register its indices and values"),
        (torch.eye(3).to_sparse_csr(), "the buffer links sparse .torch.sparse_csr"),
        (torch.view_as_complex(torch.rand(3, 2)).conj(), "the buffer links a conjugate or negative view"),
        (torch.view_as_complex(torch.rand(3, 2)).conj().imag, "the buffer links a conjugate or negative view"),
    ],
)
def test_buffers_that_are_not_plain_memory_are_refused(buffer: torch.Tensor, words: str, persistent: bool) -> None:
    with pytest.raises(ConfigError, match=words):
        init_model(recipe(lambda: buffered(buffer, persistent), Layout), 0)


def test_a_model_in_one_format_is_taken_in_any() -> None:
    assert next(init_model(recipe(lambda: nn.Linear(3, 3).double(), Layout), 0).parameters()).shape


def broken() -> Layout:
    raise KeyError("b.2")


@pytest.mark.parametrize(
    ("falls", "words"),
    [
        (lambda: None, "returned NoneType; it must return a dtf.Layout"),
        (broken, "raised KeyError: 'b.2'"),
        (lambda: Layout(("a", "b")), "has the block 'a'; a block is a tuple of names"),  # type: ignore[arg-type]
        (lambda: Layout((("a",), ("c",))), "names 'c', which is no module of its model; choices: a, b, b.0, b.1"),
        (lambda: Layout((("",),)), "names '', which is no module of its model; choices: a, b, b.0, b.1"),
        (lambda: Layout((("a",), ("a", "b"))), "names a twice; a module lies in one block"),
        (lambda: Layout((("a",), ("b",), ("b.0",))), "names b.0 and b, which contains it; name one of them"),
        (lambda: Layout(buffers=["a"]), "has buffers=['a']; use a dict of names and rules"),  # type: ignore[arg-type]
        (
            lambda: Layout(buffers={0: BufferUpdate.mean}),  # type: ignore[dict-item]
            "gives the buffers 0 the rule <BufferUpdate.mean: 'mean'>; name buffers by a text",
        ),
        (lambda: Layout(splits={"a": "column"}), "splits a as 'column'; use SplitBy, or one of Split.column"),  # type: ignore[dict-item]
    ],
)
def test_a_layout_that_does_not_fit_is_refused(falls: Callable[[], Layout], words: str) -> None:
    made = recipe(nest, falls)
    with pytest.raises(ConfigError) as caught:
        layout_of(made, init_model(made, 0))
    assert f"Made.layout() {words}" in str(caught.value)


def test_a_layout_that_fits_is_given_back() -> None:
    layout = Layout((("a",), ("b.0",)), {"a": Split.column, "b.0": Split.row})
    made = recipe(nest, lambda: layout)
    assert layout_of(made, init_model(made, 0)) is layout
