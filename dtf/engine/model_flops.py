"""How fast a run computes: floating-point operations of its model, and which share of what its devices can do they are
(model FLOPs utilisation, MFU).

Source: Chowdhery et al. 2022, appendix B (arXiv:2204.02311): operations that the model needs, not those that are made
again to save memory.
"""

from __future__ import annotations

import torch

from dtf.api.precision import Precision
from dtf.api.strategy import Program
from dtf.core.text import scaled_text
from dtf.distributed.world import World
from dtf.host.peak_flops import peak_flops


class ModelFlops:
    """What a rate of rows means in operations.

    To make one is collective. `vary`: whether rows are of several shapes; then those that were tried tell nothing of
    others, and nothing is known.
    """

    def __init__(self, program: Program, precision: Precision, world: World, vary: bool) -> None:
        self._program, self._vary = program, vary
        self._format = "tf32" if precision.tf32 else precision.compute.value
        self._peak, self._devices = 0.0, ""
        if world.device.type == "cuda":
            here = [torch.cuda.get_device_properties(device) for device in program.devices or [world.device]]
            everyone = world.gather([(str(device.uuid), device.name) for device in here]) or []
            names = [*dict(pair for pairs in everyone for pair in pairs).values()]  # ranks may share a device
            peaks = [peak_flops(name, self._format) for name in names]
            self._peak = sum(peak for peak in peaks if peak) if all(peaks) else 0.0
            self._devices = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))

    def row(self) -> dict[str, str]:
        """For the start-up table of rank 0."""
        count = self._count()
        if not count:
            return {}
        text = f"{scaled_text(count)}FLOP a row in matrix products and convolutions"
        if self._peak:
            text += f"; {scaled_text(self._peak)}FLOP/s are the peak of {self._devices} in {self._format}"
        return {"arithmetic": text}

    def values(self, rows_per_s: float) -> dict[str, float]:
        """What to report of training beside the rate: operations a second of all devices together, and their share of
        what these can do. Nothing where it is not known.
        """
        count = self._count()
        if not count:
            return {}
        rate = count * rows_per_s
        return {"model_flops_per_s": rate} | ({"mfu": rate / self._peak} if self._peak else {})

    def _count(self) -> float:
        return 0.0 if self._vary else self._program.row_flops or 0.0
