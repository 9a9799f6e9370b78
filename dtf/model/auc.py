"""The area under the ROC curve (AUC): exact from rows, or from a histogram with a bound on the error."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dtf.api.evaluator import Evaluator, Peers

EXACT_ROWS = 1 << 25
"""The most rows of an evaluation for which the AUC is exact.

Rank 0 then holds all of them, 24 bytes each (32 with groups), and twice that while it sorts.
"""

BITS = 20
"""Of a score in fp32 that tell one bin of the histogram from the next: sign, exponent and 11 of the mantissa, so that a
bin is 0.05 % wide.
"""


def auc(scores: np.ndarray, clicked: np.ndarray) -> float:
    """The share of pairs of a clicked row and another row in which the clicked one has the higher score. A tie counts
    half. `scores` (N,) and `clicked` (N,) of 0 and 1.

    NaN without such a pair, and where a score is NaN. Equal to scikit-learn's roc_auc_score. Exact but for the last
    division.
    """
    if np.isnan(scores).any():
        return float("nan")
    order = np.argsort(scores)
    starts = _starts(scores[order])
    won, pairs, _ = _pairs(*_counts(clicked[order], starts))
    return won / pairs if pairs else float("nan")


def grouped_auc(scores: np.ndarray, clicked: np.ndarray, groups: np.ndarray) -> float:
    """The mean of the AUCs of the groups that have one, weighted by their rows. All arguments (N,).

    Source: Zhu et al. 2017, eq. 5 (arXiv:1703.02091).
    """
    if np.isnan(scores).any() or not len(scores):
        return float("nan")
    order = np.lexsort((scores, groups))
    scores, groups = scores[order], groups[order]
    starts = np.union1d(_starts(scores), _starts(groups))  # of rows of a group that tie
    hits, misses = _counts(clicked[order], starts)
    firsts = _starts(groups[starts])  # of each group, among these
    clicks, others = np.add.reduceat(hits, firsts), np.add.reduceat(misses, firsts)
    below = np.cumsum(misses) - misses
    below -= np.repeat(below[firsts], np.diff(np.r_[firsts, len(starts)]))
    won = np.add.reduceat(hits * (2 * below + misses), firsts) / 2
    known = clicks * others > 0
    rows = (clicks + others)[known]
    return float(won[known] / (clicks * others)[known] @ rows / rows.sum()) if known.any() else float("nan")


def _starts(values: np.ndarray) -> np.ndarray:
    """Where runs of equal values begin."""
    return np.flatnonzero(np.r_[True, values[1:] != values[:-1]]) if len(values) else np.empty(0, np.int64)


def _counts(clicked: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Clicked rows and others in each run."""
    if not len(starts):
        return starts, starts
    hits = np.add.reduceat(clicked.astype(np.int64), starts)
    return hits, np.diff(np.r_[starts, len(clicked)]) - hits


def _pairs(hits: np.ndarray, misses: np.ndarray) -> tuple[float, int, float]:
    """From counts by ascending score: pairs won, half those that tie; all pairs; pairs that tie."""
    below = np.cumsum(misses) - misses
    tied = _dot(hits, misses)
    return (2 * _dot(hits, below) + tied) / 2, int(hits.sum()) * int(misses.sum()), tied


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Exact as long as it fits."""
    return (
        int(a @ b)
        if int(a.sum()) * int(b.max(initial=0)) < 1 << 62
        else float(a.astype(np.float64) @ b.astype(np.float64))
    )


class AucEvaluator(Evaluator):
    """`auc` from rows (R, 3): score, 1 for a click or 0, weight 1 or 0 for padding. From rows (R, 4), with a group,
    also `group_auc`.

    Of more than EXACT_ROWS rows the AUC comes from a histogram of scores, and `auc_error` bounds its distance from the
    exact one. With groups it is always exact.
    """

    def __init__(self, rows: int, grouped: bool = False) -> None:
        self._grouped, self._rows = grouped, []
        self._bins: Tensor | None = None if grouped or rows <= EXACT_ROWS else torch.zeros(2 << BITS, dtype=torch.int64)

    def add(self, rows: Tensor) -> None:
        if self._bins is None:
            self._rows.append(rows)
            return
        self._bins = self._bins.to(rows.device)
        self._bins.index_add_(0, 2 * _bin(rows[:, 0]) + rows[:, 1].long(), rows[:, 2].long())

    def values(self, peers: Peers) -> dict[str, float]:
        if self._bins is not None:
            misses, hits = peers.reduce(self._bins.cpu()).view(-1, 2).numpy().T
            won, pairs, tied = _pairs(hits, misses)
            lost = bool((hits + misses)[_bin(torch.tensor([torch.inf])).item() + 1 :].any())  # NaNs sort last
            return {
                "auc": won / pairs if pairs and not lost else float("nan"),
                "auc_error": tied / 2 / pairs if pairs else float("nan"),
            }
        local_rows = (
            torch.cat(self._rows).cpu().double()
            if self._rows
            else torch.empty(0, 3 + self._grouped, dtype=torch.float64)
        )
        rows = peers.collect(local_rows[local_rows[:, 2] > 0])
        values = None
        if rows is not None:
            scores, clicked, _, *groups = rows.numpy().T
            values = {"auc": auc(scores, clicked)} | (
                {"group_auc": grouped_auc(scores, clicked, groups[0])} if groups else {}
            )
        return peers.broadcast(values)


def _bin(scores: Tensor) -> Tensor:
    """The number of each score's bin, in order of scores: the first bits of fp32, whose order is that of the numbers
    once the sign is seen to.
    """
    # -0 becomes 0, and every NaN the same
    bits = torch.where(scores.isnan(), torch.nan, scores.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() >> (32 - BITS)) + (1 << (BITS - 1))
