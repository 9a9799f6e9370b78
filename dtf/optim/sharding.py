"""How a strategy divides the parameters of a model over ranks, as one rank sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from dtf.api.optimizer import Combine
from dtf.distributed.sharding import Piece

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables


class ParamShard(NamedTuple):
    """What this rank holds of one parameter: all of it, or a slice of its global tensor, one box of it or several."""

    parameter: nn.Parameter  # its gradient arrives here
    local: Tensor  # what forward and backward use
    master: Tensor  # what the optimizer steps; the same tensor unless dtypes differ
    shape: tuple[int, ...]  # of the global tensor
    offset: tuple[int, ...]  # of the local part in it
    # whether this rank counts it in norms and saves it; False where another rank that holds all of it does
    is_primary: bool = True
    pieces: tuple[Piece, ...] = ()  # that fill the local part, where it is no single box; `offset` is that of the first

    @property
    def boxes(self) -> tuple[Piece, ...]:
        """The pieces, or the one box that the local part is."""
        return self.pieces or (Piece((0,) * self.local.dim(), tuple(self.offset), tuple(self.local.shape)),)

    @property
    def place(self) -> str:
        """Follows the name of a slice where it has to differ from that of another one; "" for a whole parameter."""
        if tuple(self.local.shape) == tuple(self.shape):
            return ""
        return f" at {[list(piece.offset) for piece in self.pieces] if self.pieces else list(self.offset)}"


def full_params(model: nn.Module, masters: Mapping[str, Tensor]) -> dict[str, ParamShard]:
    """A ParamShard for each parameter of a model that is fully on this rank. `masters`: see `dtf.cast`."""
    return {
        name: ParamShard(
            p,
            masters[name] if masters[name].dtype is p.dtype else p.data,
            masters[name],
            tuple(p.shape),
            (0,) * p.dim(),
        )
        for name, p in model.named_parameters()
    }


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What this rank holds of the parameters, and what it exchanges with other ranks around an update.

    A strategy gives what differs from the defaults: every rank holds all parameters, and their gradients have been
    summed or averaged over ranks when the backward pass ends: averaged for `Spmd`, which multiplies the loss by the
    number of ranks, summed where it has `dims`. Functions are collective over the ranks they name.
    """

    params: Mapping[str, ParamShard]
    """By name, in the model's order: what is here of each parameter."""

    writes: bool = True
    """Whether this rank writes its parameters to checkpoints. Of several ranks that hold the same, one does."""

    complete_gradients: Callable[[list[Tensor]], None] | None = None
    """Completes the gradients in place, one for each trained parameter in the order of `params`: over the ranks that
    computed other rows. None: the backward pass did.
    """

    sum_slices: Combine | None = None
    """Adds up numbers (..., N), one for each of N parameters, over the ranks that hold other slices of these. None: no
    parameter is in slices.
    """

    all_norms: Combine | None = None
    """From the gradient norms (n,) of the parameters here, those (N,) of all parameters of the model. None: all are
    here.
    """

    owned: frozenset[str] | None = None
    """Names of the parameters whose optimizer state is here, and which this rank steps. None: all of `params`."""

    fetch_others: Callable[[], None] | None = None
    """Called when the owned parameters have changed: brings those that other ranks own up to date."""

    drop_gathered: Callable[[], None] | None = None
    """Called when slices have changed, or are about to: forgets whole parameters that were gathered from them."""

    tables: ShardedTables | None = None
    """The task's sparse tables; their gradients are there before an update begins."""

    steps_tables: bool = True
    """Whether the update here steps `tables`. Of several updates in a process one does."""

    like: Tensor | None = None
    """A tensor with the device and dtype of the model's parameters, where this rank may hold none of them."""
