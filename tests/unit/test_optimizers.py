"""Optimizers: the published update, skipped steps that leave no trace, state by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtf.api.optimizer import Optimizer
from dtf.api.registry import registered
from dtf.api.schema import build_option, coerce_option
from dtf.core.errors import ConfigError
from dtf.optim.optimizers import Lars
from dtf.optim.torch_optimizers import Rprop

NAMES = list(registered("optimizer"))
DECAYING = [name for name, cls in registered("optimizer").items() if cls is not Rprop]
SHAPES = {"conv.weight": (4, 3, 3, 3), "norm.weight": (4,), "norm.bias": (4,), "fc.weight": (5, 4), "temperature": ()}
LRS = [0.1, 0.2, 0.05, 0.1, 0.3, 0.1, 0.1, 0.02, 0.5, 0.1]


def make(name: str, **options: object) -> Optimizer:
    optimizer: Optimizer = build_option("optimizer", coerce_option("optimizer", {"name": name, **options}, "optimizer"))
    optimizer.check()
    return optimizer


def draw(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def run(optimizer: Optimizer, dtype: torch.dtype, skip: Tensor | None = None) -> dict[str, Tensor]:
    """Ten steps from fixed parameters on fixed gradients."""
    parameters = draw(0, dtype)
    bound = optimizer.bind(parameters)
    for step, lr in enumerate(LRS):
        bound.apply(list(draw(1 + step, dtype).values()), lr, skip)
    return parameters


def run_torch(
    build: Callable[[list[dict]], torch.optim.Optimizer], dtype: torch.dtype, exempt: bool
) -> dict[str, Tensor]:
    parameters = {name: torch.nn.Parameter(value) for name, value in draw(0, dtype).items()}
    flat = [p for p in parameters.values() if exempt and p.ndim <= 1]
    groups = [{"params": [p for p in parameters.values() if not (exempt and p.ndim <= 1)]}]
    reference = build(groups + ([{"params": flat, "weight_decay": 0.0}] if flat else []))
    for step, lr in enumerate(LRS):
        for parameter, gradient in zip(parameters.values(), draw(1 + step, dtype).values(), strict=True):
            parameter.grad = gradient
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


TWINS = {
    "sgd": ("sgd", {"momentum": 0.0}, lambda groups: torch.optim.SGD(groups, lr=1.0)),
    "sgd-momentum": (
        "sgd",
        {"momentum": 0.9, "weight_decay": 5e-2},
        lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, weight_decay=5e-2),
    ),
    "sgd-nesterov": (
        "sgd",
        {"momentum": 0.8, "nesterov": True, "weight_decay": 1e-2},
        lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.8, nesterov=True, weight_decay=1e-2),
    ),
    "adamw": ("adamw", {}, lambda groups: torch.optim.AdamW(groups)),
    "adamw-options": (
        "adamw",
        {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3},
        lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    ),
    "adam": ("adam", {}, lambda groups: torch.optim.Adam(groups)),
    "adam-options": (
        "adam",
        {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.3},
        lambda groups: torch.optim.Adam(groups, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3),
    ),
    "adagrad": ("adagrad", {}, lambda groups: torch.optim.Adagrad(groups)),
    "adagrad-options": (
        "adagrad",
        {"initial_accumulator": 0.1, "eps": 1e-5, "lr_decay": 0.1, "weight_decay": 0.05},
        lambda groups: torch.optim.Adagrad(
            groups, initial_accumulator_value=0.1, eps=1e-5, lr_decay=0.1, weight_decay=0.05
        ),
    ),
}


@pytest.mark.parametrize("exempt", [False, True])
@pytest.mark.parametrize("twin", TWINS)
def test_ten_steps_equal_torch_optim(twin: str, exempt: bool) -> None:
    name, options, build = TWINS[twin]
    optimizer = make(name, **options, decay_norm_and_bias=not exempt)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        ours, theirs = run(optimizer, dtype), run_torch(build, dtype, exempt)
        for key in SHAPES:
            torch.testing.assert_close(
                ours[key], theirs[key], rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
            )


def lars_by_hand(options: Lars, dtype: torch.dtype) -> dict[str, Tensor]:
    """You et al. 2017, algorithm 1, tensor by tensor."""
    parameters = draw(0, dtype)
    velocity = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for step, lr in enumerate(LRS):
        for name, gradient in draw(1 + step, dtype).items():
            parameter = parameters[name]
            ratio, decay = torch.ones((), dtype=dtype), 0.0
            if options.decay_norm_and_bias or parameter.ndim > 1:
                decay = options.weight_decay
                ratio = (
                    options.trust_coefficient
                    * parameter.norm()
                    / (gradient.norm() + decay * parameter.norm() + options.eps)
                )
            velocity[name] = options.momentum * velocity[name] + lr * ratio * (gradient + decay * parameter)
            parameters[name] = parameter - velocity[name]
    return parameters


@pytest.mark.parametrize(
    "options", [{}, {"decay_norm_and_bias": True}, {"momentum": 0.0}, {"weight_decay": 0.0, "trust_coefficient": 0.02}]
)
def test_lars_follows_its_paper(options: dict) -> None:
    optimizer = Lars(**options)
    optimizer.check()
    ours, by_hand = run(optimizer, torch.float64), lars_by_hand(optimizer, torch.float64)
    for key in SHAPES:
        torch.testing.assert_close(ours[key], by_hand[key], rtol=1e-12, atol=1e-12)


def test_lars_does_not_adapt_zeros() -> None:
    """Zero parameters would never move, zero gradients would divide by eps alone."""
    parameters = {"fresh": torch.zeros(3, 3), "idle": torch.ones(3, 3)}
    make("lars", weight_decay=0.0).bind(parameters).apply([torch.ones(3, 3), torch.zeros(3, 3)], 0.1, None)
    assert parameters["fresh"].eq(-0.1).all() and parameters["idle"].eq(1.0).all()


def test_lars_on_parts_of_tensors_equals_lars_on_whole_tensors() -> None:
    """Two holders of halves, stepping in turn; `combine` adds what the other one measured."""
    whole = draw(0, torch.float64)
    parts = [{name: (p.chunk(2)[rank] if p.ndim else p).clone() for name, p in whole.items()} for rank in (0, 1)]
    gradients = draw(1, torch.float64)
    cut = [[g.chunk(2)[rank] if g.ndim else g for g in gradients.values()] for rank in (0, 1)]
    optimizer = Lars(decay_norm_and_bias=False)
    sliced = [[name for name in parts[rank] if optimizer.decays(SHAPES[name])] for rank in (0, 1)]
    assert sliced[0] == sliced[1] and sliced[0]
    sums = [
        optimizer.squares(
            [parts[rank][name] for name in sliced[rank]], [cut[rank][list(SHAPES).index(name)] for name in sliced[rank]]
        )
        for rank in (0, 1)
    ]
    for rank in (0, 1):
        optimizer.bind(parts[rank], SHAPES, lambda squares, rank=rank: squares + sums[1 - rank]).apply(
            cut[rank], 0.1, None
        )
    optimizer.bind(whole).apply(list(gradients.values()), 0.1, None)
    for name, parameter in whole.items():
        joined = torch.cat([parts[0][name], parts[1][name]]) if parameter.ndim else parts[0][name]
        torch.testing.assert_close(joined, parameter, rtol=1e-14, atol=1e-14)


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("exempt", [False, True])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_skipped_step_leaves_no_trace(name: str, dtype: torch.dtype, poison: float, exempt: bool) -> None:
    optimizer = make(name, decay_norm_and_bias=not exempt, weight_decay=0.1 * (name in DECAYING))
    parameters = draw(0, dtype)
    parameters["fc.weight"][0, 0] = -0.0  # bits, not values, must survive
    bound = optimizer.bind(parameters)
    flat = parameters | {
        f"{key}/{slot}": tensor for key, state in bound.states.items() for slot, tensor in state.items()
    }
    for warm in (False, True):
        if warm:
            bound.apply(list(draw(1, dtype).values()), 0.1, torch.zeros(()))
        before = bits(flat)
        bound.apply([torch.full_like(p, poison) for p in parameters.values()], 0.1, torch.ones(()))
        assert bits(flat) == before
    bound.apply(list(draw(2, dtype).values()), 0.1, torch.zeros(()))
    assert bits(flat) != before, "a step that is not skipped must move"


@pytest.mark.parametrize("name", NAMES)
def test_skip_zero_is_a_step(name: str) -> None:
    never, zero = run(make(name), torch.float32), run(make(name), torch.float32, torch.zeros(()))
    assert bits(never) == bits(zero)


@pytest.mark.parametrize("name", NAMES)
def test_state_is_by_name_and_restarts_the_run(name: str) -> None:
    """State copied into a fresh binding goes on bit for bit: nothing is kept elsewhere."""
    optimizer, parameters = make(name), draw(0, torch.float32)
    bound = optimizer.bind(parameters)
    for step in range(3):
        bound.apply(list(draw(1 + step, torch.float32).values()), 0.1, None)
    twins = {key: value.clone() for key, value in parameters.items()}
    again = optimizer.bind(twins)
    assert list(again.states) == list(SHAPES)
    for key, state in again.states.items():
        assert all(
            value.shape == twins[key].shape or (value.shape == () and value.dtype == torch.float32)
            for value in state.values()
        )
        for slot, value in state.items():
            value.copy_(bound.states[key][slot])
    for one in (bound, again):
        one.apply(list(draw(9, torch.float32).values()), 0.1, None)
    assert bits(parameters) == bits(twins)


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("sgd", ["momentum"]),
        ("adam", ["mean", "square", "step"]),
        ("adamw", ["mean", "square", "step"]),
        ("adagrad", ["sum", "step"]),
        ("lars", ["momentum"]),
    ],
)
def test_state_names_are_the_checkpoint_format(name: str, slots: list[str]) -> None:
    assert list(make(name).init(torch.zeros(2, 2))) == slots


def test_no_momentum_needs_no_memory() -> None:
    assert make("sgd", momentum=0.0).init(torch.zeros(2)) == {} == make("lars", momentum=0.0).init(torch.zeros(2))


@pytest.mark.parametrize("name", NAMES)
def test_no_parameters_is_no_error(name: str) -> None:
    """A rank that owns nothing steps too."""
    bound = make(name).bind({})
    bound.apply([], 0.1, torch.ones(()))
    assert bound.states == {}


@pytest.mark.parametrize("name", NAMES)
def test_half_parameters_beside_fp32_normalisation(name: str) -> None:
    """What precision=bf16_params hands over. Each tensor moves as it does alone in its own format."""
    optimizer = make(name)
    mixed = {key: value if "norm" in key else value.bfloat16() for key, value in draw(0, torch.float32).items()}
    gradients = {key: value.to(mixed[key].dtype) for key, value in draw(1, torch.float32).items()}
    alone = {key: value.clone() for key, value in mixed.items()}
    optimizer.bind(mixed).apply(list(gradients.values()), 0.1, None)
    for key, value in alone.items():
        optimizer.bind({key: value}).apply([gradients[key]], 0.1, None)
        torch.testing.assert_close(mixed[key], value, rtol=1e-2 if value.dtype == torch.bfloat16 else 1e-6, atol=0.0)
        assert mixed[key].dtype == value.dtype


@pytest.mark.parametrize("name", NAMES)
def test_memory_layout_of_gradients_does_not_matter(name: str) -> None:
    optimizer = make(name)
    plain, other = draw(0, torch.float32), draw(0, torch.float32)
    gradients = draw(1, torch.float32)
    optimizer.bind(plain).apply(list(gradients.values()), 0.1, None)
    gradients = draw(1, torch.float32)
    gradients["conv.weight"] = gradients["conv.weight"].contiguous(memory_format=torch.channels_last)
    gradients["fc.weight"] = gradients["fc.weight"].t().contiguous().t()
    optimizer.bind(other).apply(list(gradients.values()), 0.1, None)
    assert bits(plain) == bits(other)


def test_gaps_in_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"columns has shape .* gaps in memory"):
        make("sgd").bind({"columns": torch.zeros(4, 6)[:, :3]})
    make("sgd").bind(
        {
            "rows": torch.zeros(4, 6)[1:3],
            "channels_last": torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        }
    )


def test_parameters_that_require_gradients_are_stepped_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    make("sgd").bind({"p": parameter}).apply([torch.ones(2, 2)], 0.5, None)
    assert parameter.detach().eq(0.5).all() and parameter.requires_grad


@pytest.mark.parametrize("name", DECAYING)
def test_decay_of_norms_and_biases_goes_by_the_global_shape(name: str) -> None:
    optimizer = make(name, decay_norm_and_bias=False)
    assert [optimizer.decays(shape) for shape in SHAPES.values()] == [True, False, False, True, False]
    assert all(make(name, decay_norm_and_bias=True).decays(shape) for shape in SHAPES.values())
    flat = {"fc.weight": torch.ones(20)}  # a flattened part of a matrix still decays
    whole = {"fc.weight": torch.ones(5, 4)}
    optimizer = make(name, decay_norm_and_bias=False, weight_decay=0.5)
    optimizer.bind(flat, {"fc.weight": (5, 4)}, lambda squares: squares).apply([torch.ones(20)], 0.1, None)
    optimizer.bind(whole).apply([torch.ones(5, 4)], 0.1, None)
    torch.testing.assert_close(flat["fc.weight"], whole["fc.weight"].view(-1))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("sgd", "momentum", 1.0),
        ("sgd", "momentum", -0.1),
        ("sgd", "weight_decay", float("nan")),
        ("adamw", "beta1", 1.0),
        ("adamw", "beta2", -1.0),
        ("adamw", "eps", 0.0),
        ("adamw", "weight_decay", float("inf")),
        ("adagrad", "eps", 0.0),
        ("adagrad", "initial_accumulator", -1.0),
        ("adagrad", "lr_decay", -1.0),
        ("lars", "trust_coefficient", 0.0),
        ("lars", "momentum", 1.5),
        ("lars", "eps", -1.0),
    ],
)
def test_values_that_make_no_optimizer_are_refused(name: str, key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.{key}=.* must be"):
        make(name, **{key: value})


def test_nesterov_without_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.nesterov=true needs a momentum"):
        make("sgd", momentum=0.0, nesterov=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", NAMES)
def test_cuda_steps_like_cpu_and_skips_without_a_trace(name: str) -> None:
    optimizer = make(name, decay_norm_and_bias=False)
    cpu = run(optimizer, torch.float64)
    parameters = {key: value.cuda() for key, value in draw(0, torch.float64).items()}
    bound = optimizer.bind(parameters)
    flat = parameters | {
        f"{key}/{slot}": tensor for key, state in bound.states.items() for slot, tensor in state.items()
    }
    no, yes = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    for step, lr in enumerate(LRS):
        before = bits({key: value.cpu() for key, value in flat.items()})
        bound.apply([torch.full_like(p, float("nan")) for p in parameters.values()], lr, yes)
        assert bits({key: value.cpu() for key, value in flat.items()}) == before
        gradients = [g.cuda() for g in draw(1 + step, torch.float64).values()]
        torch.cuda.set_sync_debug_mode("default" if name == "asgd" else "error")  # torch's keeps counters there
        try:
            bound.apply(gradients, lr, no)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    close = 1e-5 if name == "asgd" else 1e-12  # on CUDA torch computes its step sizes in fp32
    torch.testing.assert_close({key: value.cpu() for key, value in parameters.items()}, cpu, rtol=close, atol=close)


@pytest.mark.parametrize("name", ["sgd", "lars"])
@pytest.mark.parametrize("skip", [None, 0.0, 1.0])
def test_where_the_fused_kernel_is_wrong_the_plain_one_steps(
    name: str, skip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dtf.api import optimizer

    found = []
    for right in (True, False):
        monkeypatch.setattr(optimizer, "_fused_sgd_is_right", lambda device, dtype, right=right: right)
        parameters = {"w": torch.ones(3, 5)}
        bound = make(name).bind(parameters)
        for _ in range(2):
            bound.apply([torch.full((3, 5), 0.5)], 0.1, None if skip is None else torch.tensor(skip))
        found.append(parameters["w"])
    torch.testing.assert_close(found[0], found[1])
    assert bool((found[1] == 1).all()) == (skip == 1.0)


@pytest.mark.parametrize("name", DECAYING)
def test_weight_decay_by_name(name: str) -> None:
    """Each tensor moves as it does alone under an optimizer with its decay; the longest pattern decides."""
    optimizer = make(
        name, weight_decay=0.1, decay_norm_and_bias=False, weight_decays={"conv": 0.5, "*": 0.2, "norm.bias": 0.0}
    )
    assert [optimizer.decay_of(key, shape) for key, shape in SHAPES.items()] == [0.5, 0.2, 0.0, 0.2, 0.2]
    assert make(name, weight_decay=0.1, decay_norm_and_bias=False).decay_of("norm.bias", (4,)) is None
    parameters = draw(0, torch.float64)
    optimizer.bind(parameters).apply(list(draw(1, torch.float64).values()), 0.1, None)
    for key, decay in {"conv.weight": 0.5, "fc.weight": 0.2, "norm.bias": 0.0}.items():
        alone = {key: draw(0, torch.float64)[key]}
        make(name, weight_decay=decay, decay_norm_and_bias=True).bind(alone).apply(
            [draw(1, torch.float64)[key]], 0.1, None
        )
        torch.testing.assert_close(parameters[key], alone[key], rtol=1e-12, atol=0)
