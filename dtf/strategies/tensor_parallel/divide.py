"""Divides the modules of a model that a layout names among the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtf.api.layout import Split
from dtf.core.errors import LayoutError
from dtf.distributed.sharding import bounds
from dtf.model.seeded_dropout import DROPOUTS
from dtf.strategies.pass_probes import has_hook_on_sums
from dtf.strategies.tensor_parallel.layers import CONVOLUTIONS, NORMS, Divided, Grouped, kind_of, outputs


def divide(model: nn.Module, splits: Mapping[str, Split], mesh: DeviceMesh) -> None:
    """Divide the named modules of a model, which may be on meta, over a mesh of one axis, in place; see `layout.Split`.
    Not collective.

    ConfigError for a module that cannot be divided so, and for slices that would be empty or cut a group of channels.
    """
    modules = dict(model.named_modules())
    width, axis = 0, -1  # of the activations between a column and its row
    for name, split in splits.items():
        module = modules[name]
        if split is Split.local and isinstance(module, DROPOUTS):
            if not width:
                raise LayoutError(f"the recipe's layout splits {name} as local, but no column layer comes before it")
            module.__dict__["_slice"] = (axis, width, *bounds(width, mesh.size(), mesh.get_local_rank()))
            continue
        kind = kind_of(name, module, split)
        hooked = [key for key, p in module.named_parameters() if p._backward_hooks or has_hook_on_sums(p)]
        if hooked:
            raise LayoutError(
                f"the recipe's layout splits {name}, and {name}.{hooked[0]} has a hook of register_hook, which would "
                "see a slice of its gradient; leave it out of the splits"
            )
        parameters = {id(parameter) for parameter in module.parameters()}
        shared = [
            other
            for other, tied in modules.items()
            if tied is not module and parameters & {id(parameter) for parameter in tied._parameters.values()}
        ]
        if shared:
            raise LayoutError(
                f"the recipe's layout splits {name}, whose parameters {shared[0]} has too; leave both out of the splits"
            )
        module.__class__ = type(f"Divided{type(module).__name__}", (kind, type(module)), {})
        divided = cast(Divided, module)
        divided.__dict__ |= {
            "_mesh": mesh,
            "_name": name,
            "_group": mesh.get_group(),
            "_split": split,
            "_axis": 1 if isinstance(module, (*CONVOLUTIONS, *NORMS)) else -1,
        }
        divided.cut(name)
        # a grouped convolution may change the number of channels
        if split in (Split.column, Split.row_scatter) or kind is Grouped:
            width, axis = outputs(module), divided._axis
