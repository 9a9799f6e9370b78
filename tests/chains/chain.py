"""What a chain is, and how one is drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

PLUGIN = "tests.support.chain_toy"

RECIPES = {"toy": 3, "chain_toy": 7, "tabled": 3, "coupled_toy": 1, "received_tables_toy": 1}
"""Recipe -> how often it is drawn."""

LAYERS = {
    "toy": ["0", "1", "4", "5", "7", "[0145]"],
    "coupled_toy": ["0", "1", "4", "5", "[0145]"],
    "chain_toy": ["stem", "norm", "first", "second.norm", "second", "head", "*.fall"],
    "tabled": ["first", "norm", "second", "last"],
    "received_tables_toy": ["first", "norm", "second", "last"],
}
"""What may be frozen."""

WAYS: list[tuple[str, str, dict[str, Any]]] = [
    ("dp", "dp", {}),
    ("dp all", "dp", {"reduce": "all"}),
    ("ddp", "ddp", {}),
    ("ddp", "ddp", {"bucket_mb": 0.0001, "static_graph": True}),
    ("ddp", "ddp", {"find_unused_parameters": True}),
    ("zero1", "ddp", {"shard_optimizer": True}),
    ("fsdp", "fsdp", {}),
    ("fsdp", "fsdp", {"unit": "layer", "reshard_after_forward": False, "prefetch": 0}),
    ("fsdp", "fsdp", {"unit": "stage", "prefetch": 2}),
    ("fsdp", "fsdp", {"offload": True}),
    ("hybrid", "fsdp", {"replicate": 2}),
    ("tensor", "tensor", {}),
    ("tensor x dp", "tensor", {"degree": 2}),
    ("pipeline", "pipeline", {}),
    ("pipeline", "pipeline", {"schedule": "gpipe", "balance": "flops"}),
    ("pipeline", "pipeline", {"virtual": 2}),
    ("pipeline x dp", "pipeline", {"degree": 2}),
    ("pserver", "pserver", {}),
    ("pserver", "pserver", {"servers": 2, "min_block": 1}),
    ("pserver", "pserver", {"servers": 3, "min_block": 1_000_000_000, "placement": "hash_name"}),
]
"""Name in the table of pairs, strategy, options. A name of several ways is drawn as often as any other."""

TABLES = ["rows", "columns", "tables", "replicated"]


@dataclass(frozen=True, kw_only=True)
class Leg:
    """A part of a chain: how the run is spread until it is saved at step `until`, or ends there."""

    way: str
    strategy: str
    options: dict[str, Any]
    processes: int
    until: int


@dataclass(frozen=True, kw_only=True)
class Chain:
    """`case`: fields of `harness.Case` that all legs and the undisturbed run have."""

    legs: list[Leg]
    case: dict[str, Any]


def draw(seed: int, attempt: int) -> Chain:
    """The chain of a seed; `attempt`: how many before it were refused."""
    rng = random.Random(f"chain {seed} {attempt}")
    name = rng.choices(list(RECIPES), list(RECIPES.values()))[0]
    steps = rng.randint(3, 9)
    case = {
        "steps": steps,
        "plugin": PLUGIN,
        "recipe": {"name": name, "rows": rng.randint(28, 60)},
        "batch_size": rng.randint(8, 24),
        "micro_batch_rows": rng.choice([3, 4, 5, 6, 8]),
        "precision": rng.choices(["fp64", "fp32", "bf16", "bf16_params", "bf16_master", "fp16"], [70, 15, 4, 3, 4, 4])[
            0
        ],
        "optimizer": rng.choice(["sgd", "adam", "adamw", "adagrad", "lars"]),
        "remat": rng.choice(["none", "blocks", "selective"]) if name == "chain_toy" else "none",
        "ema": rng.choice([0.0, 0.0, 0.5, 0.99]),
        "freeze": [rng.choice(LAYERS[name])] if rng.random() < 0.25 else [],
        "clip_norm": rng.choice([0.0, 0.05, 1.0]),
        "tail": rng.choice(["partial", "partial", "fill", "drop"]),
        "log_every": rng.choice([0, 1, 2, 3, 5]),
        "eval_every": rng.choice([0, 1, 2, 3, 4]),
        **_schedule(rng),
    }
    _draw_recipe(rng, name, case)
    case["recipe"] |= {"rows": max(case["recipe"]["rows"], case["batch_size"])}
    saves = sorted(rng.sample(range(1, steps), min(rng.choice([1, 1, 1, 2, 3]), steps - 1)))
    if case["precision"] == "fp16":  # gradients near the largest number overflow in one order of sums, not in another
        case["lr_options"]["peak"] = 0.02
    drawn = case["recipe"].get("functional", False)
    return Chain(legs=[_leg(rng, until, "table" in name, drawn) for until in [*saves, steps]], case=case)


def _schedule(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(["constant", "cosine", "step", "onecycle", "plateau"])
    options: dict[str, Any] = {"peak": rng.choice([0.02, 0.1])}
    if name != "onecycle":
        options["warmup"] = rng.choice([0, 0, 2, 5])
    if name == "plateau":
        options |= {"factor": 0.5, "patience": rng.choice([1, 2])}
    return {"lr": name, "lr_options": options}


def _draw_recipe(rng: random.Random, name: str, case: dict[str, Any]) -> None:
    """What goes with a recipe: its options, a sampler that its rows allow, the optimizer of its tables."""
    recipe, samplers = case["recipe"], ["shuffle", "shuffle", "shuffle", "sequential"]
    if name in ("toy", "chain_toy"):
        recipe["dropout"] = rng.choice([0.0, 0.1, 0.3])
    if name == "toy":
        recipe["batch_norm"] = rng.random() < 0.7
        if not recipe["batch_norm"] and rng.random() < 0.3:
            case["micro_batch_rows"] = rng.choice([1, 2])
    if name == "chain_toy":
        samplers += ["weighted", "repeated", "repeated"]
        recipe |= {"noise": 0.3} | rng.choice([{}, {"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
        if "mixup" in recipe or "cutmix" in recipe:
            case["micro_batch_rows"] += case["micro_batch_rows"] % 2
        recipe["functional"] = rng.random() < 0.15
    if name == "coupled_toy":
        recipe["received"] = rng.random() < 0.5
    if "table" in name:
        case["sparse"] = rng.choice(["sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "ftrl"])
        recipe |= {"size": rng.choice([0, 50]), "scale": rng.choice([1, 10**12])}
    case["sampler"] = rng.choice(samplers)
    if case["sampler"] == "repeated":
        case["sampler_options"] = {"times": rng.choice([2, 3])}
    if case["sampler"] == "weighted":
        case["sampler_options"] = {"balance": rng.choice([0.5, 1.0])}


def _leg(rng: random.Random, until: int, tables: bool, functional: bool) -> Leg:
    """`functional`: the model draws from the global generator, which trainers in threads of a test would share."""
    way = rng.choice(list(dict.fromkeys(name for name, *_ in WAYS)))
    strategy, options = rng.choice([(strategy, options) for name, strategy, options in WAYS if name == way])
    options = dict(options)
    even = any(options.get(key) == 2 for key in ("replicate", "degree"))
    processes = rng.choice([2, 4] if even else [1, 2, 3, 4])
    if strategy == "pserver" and functional:
        processes = 1
    if tables and strategy != "dp":
        if strategy != "pserver":
            options["tables"] = rng.choice(TABLES)
        elif rng.random() < 0.3:
            options = {"dense": "allreduce", "servers": options.get("servers", 1)}
    return Leg(way=way, strategy=strategy, options=options, processes=processes, until=until)
