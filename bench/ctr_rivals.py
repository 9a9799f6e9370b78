"""Click-through training without dtf: loops written by hand, torchrec, FBGEMM alone, FuxiCTR. Knows nothing of dtf.

`bench.ctr` starts it, once for each of them, as a contestant of `bench.contest`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bench.turns import Turns, contestant

NUMBERS, DIM, LR, SCALE = 13, 16, 0.01, 0.01
ZIPF = 1.05
# Distinct values of the 26 fields of Criteo's Kaggle log; those of more than 100,000 are scaled for the wanted sum.
CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
FIELDS = len(CRITEO)

Run = Callable[[int], float]
"""So many optimizer steps; returns the mean log loss of their rows."""


class Case(NamedTuple):
    hidden: Sequence[int]
    bf16: bool
    threads: int


class Log(NamedTuple):
    """Rows in memory, in the order in which they are read; at the end it begins anew."""

    sizes: list[int]  # of the fields
    ids: np.ndarray  # (N, 26) int64, from 0 in each field
    dense: np.ndarray  # (N, 13) float32
    clicks: np.ndarray  # (N,) float32
    batch: int

    def save(self, path: Path) -> None:
        np.savez(path, **self._asdict())


def opened(path: Path) -> Log:
    """A log that was saved."""
    kept = np.load(path)
    return Log(kept["sizes"].tolist(), kept["ids"], kept["dense"], kept["clicks"], int(kept["batch"]))


def field_sizes(total: int) -> list[int]:
    large = sum(size for size in CRITEO if size > 100_000)
    return [size if size <= 100_000 else size * (total - sum(CRITEO) + large) // large for size in CRITEO]


def draw(total: int, batch: int, batches: int) -> Log:
    """Ids by Zipf's law, popular ones anywhere in their field; clicks from known probabilities, to which every id and
    number contributes.
    """
    rng, rows, sizes = np.random.default_rng(0), batch * batches, field_sizes(total)
    ids = np.empty((rows, FIELDS), np.int64)
    logit = np.full(rows, -1.0)
    for field, size in enumerate(sizes):
        shares = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -ZIPF)
        ranks = np.searchsorted(shares, rng.random(rows) * shares[-1]).clip(max=size - 1)
        ids[:, field] = ranks * 2654435761 % size  # a prime: one to one
        logit += rng.normal(0, FIELDS**-0.5, size)[ids[:, field]]
    dense = rng.normal(size=(rows, NUMBERS)).astype(np.float32)
    logit += dense @ rng.normal(0, 0.5 * NUMBERS**-0.5, NUMBERS)
    clicks = rng.random(rows) < 1 / (1 + np.exp(-logit))
    return Log(sizes, ids, dense, clicks.astype(np.float32), batch)


class Batches:
    """Batches of a log as views, in turn."""

    def __init__(self, log: Log) -> None:
        self._parts = [torch.from_numpy(part).split(log.batch) for part in (log.ids, log.dense, log.clicks)]
        self._at = -1

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        self._at = (self._at + 1) % len(self._parts[0])
        ids, dense, clicks = (part[self._at] for part in self._parts)
        return ids, dense, clicks


def tower(hidden: Sequence[int]) -> nn.Sequential:
    """The multilayer perceptron of all contestants."""
    ends = zip((NUMBERS + FIELDS * DIM, *hidden), hidden, strict=False)
    return nn.Sequential(
        *(part for inputs, outputs in ends for part in (nn.Linear(inputs, outputs), nn.ReLU())),
        nn.Linear(hidden[-1], 1),
    )


def loop(
    batches: Batches,
    logits: Callable[[Tensor, Tensor], Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    bf16: bool,
) -> Run:
    """The training loop that everybody writes; the optimizers of what is not here already ran in the backward pass."""

    def run(steps: int) -> float:
        total = torch.zeros(())
        for _ in range(steps):
            ids, dense, clicks = batches()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                outputs = logits(ids, dense)
            loss = binary_cross_entropy_with_logits(outputs[:, 0].float(), clicks)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            total += loss.detach()
        return float(total) / max(steps, 1)

    return run


def hand(log: Log, case: Case) -> Run:
    """26 sparse nn.Embedding and torch.optim.Adagrad, fused for the perceptron."""
    tables = [nn.Embedding(size, DIM, sparse=True) for size in log.sizes]
    for table in tables:
        nn.init.normal_(table.weight, std=SCALE)
    mlp = tower(case.hidden)
    optimizers = (
        torch.optim.Adagrad([table.weight for table in tables], LR),
        torch.optim.Adagrad(mlp.parameters(), LR, fused=True),
    )

    def logits(ids: Tensor, dense: Tensor) -> Tensor:
        return mlp(torch.cat([dense, *(table(ids[:, field]) for field, table in enumerate(tables))], 1))

    return loop(Batches(log), logits, optimizers, case.bf16)


def one_table(log: Log, case: Case) -> Run:
    """One sparse nn.Embedding for all fields, whose ids have the field's first row added."""
    table = nn.Embedding(sum(log.sizes), DIM, sparse=True)
    nn.init.normal_(table.weight, std=SCALE)
    mlp, starts = tower(case.hidden), torch.tensor([0, *log.sizes[:-1]]).cumsum(0)
    optimizers = (
        torch.optim.Adagrad([table.weight], LR),
        torch.optim.Adagrad(mlp.parameters(), LR, fused=True),
    )

    def logits(ids: Tensor, dense: Tensor) -> Tensor:
        return mlp(torch.cat([dense, table(ids + starts).flatten(1)], 1))

    return loop(Batches(log), logits, optimizers, case.bf16)


def torchrec(log: Log, case: Case) -> Run:
    """torchrec's collection of embedding bags whose Adagrad is fused into the backward pass."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    names = [f"field{field}" for field in range(FIELDS)]
    configs = [
        EmbeddingBagConfig(num_embeddings=size, embedding_dim=DIM, name=name, feature_names=[name])
        for name, size in zip(names, log.sizes, strict=True)
    ]
    tables = FusedEmbeddingBagCollection(configs, torch.optim.Adagrad, {"lr": LR, "eps": 1e-10})
    mlp, lengths = tower(case.hidden), torch.ones(FIELDS * log.batch, dtype=torch.int32)
    offsets = torch.arange(FIELDS * log.batch + 1)

    def logits(ids: Tensor, dense: Tensor) -> Tensor:
        keyed = KeyedJaggedTensor(names, ids.t().reshape(-1), lengths=lengths, offsets=offsets, stride=log.batch)
        return mlp(torch.cat([dense, tables(keyed).values()], 1))

    return loop(Batches(log), logits, [torch.optim.Adagrad(mlp.parameters(), LR, fused=True)], case.bf16)


def fbgemm(log: Log, case: Case) -> Run:
    """The operator below torchrec, called as directly as can be: table-batched embeddings with exact Adagrad."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    specs = [(size, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for size in log.sizes]
    tables = SplitTableBatchedEmbeddingBagsCodegen(
        specs, optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=LR, eps=1e-10, device=torch.device("cpu")
    )
    for weight in tables.split_embedding_weights():
        nn.init.normal_(weight, std=SCALE)
    mlp, offsets = tower(case.hidden), torch.arange(FIELDS * log.batch + 1)

    def logits(ids: Tensor, dense: Tensor) -> Tensor:
        return mlp(torch.cat([dense, tables(ids.t().reshape(-1), offsets)], 1))

    return loop(Batches(log), logits, [torch.optim.Adagrad(mlp.parameters(), LR, fused=True)], case.bf16)


def fuxictr(log: Log, case: Case) -> Run:
    """FuxiCTR's base model, embedding layer, perceptron and training step; numbers go into the perceptron as they
    are.
    """
    from fuxictr.features import FeatureMap
    from fuxictr.pytorch.layers import FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel

    fields = [f"C{field}" for field in range(FIELDS)]
    features = FeatureMap("bench", ".")
    features.labels = ["click"]
    features.features.update(
        {
            name: {"type": "categorical", "source": "", "vocab_size": size}
            for name, size in zip(fields, log.sizes, strict=True)
        }
    )
    features.features["dense"] = {"type": "numeric", "source": ""}

    class DNN(BaseModel):
        def __init__(self) -> None:
            super().__init__(features, gpu=-1, verbose=0, model_root=".", metrics=["logloss"])
            self.embedding_layer = FeatureEmbedding(features, DIM, required_feature_columns=fields)
            self.mlp = MLP_Block(
                NUMBERS + FIELDS * DIM,
                list(case.hidden),
                output_dim=1,
                hidden_activations="ReLU",
                output_activation=None,
            )
            self.compile("Adagrad", "binary_crossentropy", LR)
            self.reset_parameters()
            self.model_to_device()
            self._max_gradient_norm = 10.0  # what `fit` clips to

        def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            given = self.get_inputs(inputs)
            dense = given.pop("dense")
            with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
                logit = self.mlp(torch.cat([dense, self.embedding_layer(given, flatten_emb=True)], 1))
            return {"y_pred": self.output_activation(logit.float())}

    model, batches = DNN().train(), Batches(log)

    def run(steps: int) -> float:
        total = torch.zeros(())
        for _ in range(steps):
            ids, dense, clicks = batches()
            total += model.train_step(
                {**dict(zip(fields, ids.unbind(1), strict=True)), "dense": dense, "click": clicks}
            ).detach()
        return float(total) / max(steps, 1)

    return run


RIVALS = {"hand": hand, "one_table": one_table, "torchrec": torchrec, "fbgemm": fbgemm, "fuxictr": fuxictr}


def main(turns: Turns) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rival", choices=RIVALS)
    parser.add_argument("case", help="JSON: [hidden, bf16, threads]")
    parser.add_argument("log", type=Path, help="file that `Log.save` wrote")
    given = parser.parse_args()
    case = Case(*json.loads(given.case))
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    run = RIVALS[given.rival](opened(given.log), case)
    turns.ready()
    turns.serve(run)


if __name__ == "__main__":
    contestant(main)
