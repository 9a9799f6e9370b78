"""How a model falls into parts, as data: what a recipe says once, for every strategy that divides models. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Names as in `model.named_modules()`."""

    blocks: tuple[tuple[str, ...], ...] = ()
    """The modules with parameters in the order in which data flows, those that belong together as one block; empty: unknown."""

    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Neighbouring blocks that lie in the same child of the model, as one."""
        found: list[list[str]] = []
        for block in self.blocks:
            if found and {name.partition(".")[0] for name in (*found[-1], *block)} == {block[0].partition(".")[0]}:
                found[-1].extend(block)
            else:
                found.append([*block])
        return tuple(tuple(stage) for stage in found)
