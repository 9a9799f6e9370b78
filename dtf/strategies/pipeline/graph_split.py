"""A model as a chain of blocks that can be cut between any two; the model and its code stay as they are.

Says nothing about where to cut.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import inplace_methods

from dtf.core.errors import LayoutError
from dtf.model.seeded_dropout import is_seeded
from dtf.strategies.pipeline.trace import NORMS, refusal, trace


class GraphSplit:
    """`blocks`: names of modules as `init.layout_of` gives them, in the order in which data flows. What lies between
    two goes with the first.

    `fine`: cut inside blocks too, before each layer with parameters but a normalisation; then the code of the blocks is
    traced as well. Raises ConfigError where cutting could change what the model computes.
    """

    names: list[str]
    """One label per block, e.g. `conv1+bn1`, `layer1.0`."""
    uses: dict[str, list[int]]
    """First name of each parameter and buffer -> the blocks that use it, in order."""

    def __init__(self, model: nn.Module, blocks: Sequence[Sequence[str]], fine: bool = False) -> None:
        self._model = model
        self._modules = dict(model.named_modules(remove_duplicate=False))
        if not blocks:
            raise refusal(
                model,
                "no module of it that has parameters is called; name its blocks in the order in which data flows, in "
                "Recipe.layout",
            )
        taken = next((name for name in _members(model) if hasattr(GraphModule, name)), None)
        if taken is not None:
            raise refusal(model, f"it has a member named {taken}, as torch.fx's modules have; give it another name")
        self._block_of = {name: index for index, block in enumerate(blocks) for name in block}
        opened = self._opened(fine)
        for name in sorted({"", *opened}):
            if not _only_passes_modes_on(self._modules[name]):
                raise refusal(
                    model,
                    f"{name or 'it'} has a train() of its own, of which its parts would not hear; freeze parts in "
                    "modules of blocks instead",
                )
        self._nodes = trace(
            model,
            opened,
            "inside of blocks; cut only between them" if fine else "outside of blocks; leave that to a module",
        )
        self._place: dict[Node, int] = {}  # the block of each node
        inputs = [node.name for node in self._nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise refusal(
                model,
                f"its forward takes {len(inputs)} arguments ({', '.join(inputs)}); take one, a tensor or a dict of "
                "tensors",
            )
        self.names = self._assign(blocks, fine)
        self.uses = self._uses()

    def __len__(self) -> int:
        return len(self.names)

    def segment(self, first: int, last: int) -> GraphModule:
        """Blocks [first, last) as a module that shares the model's modules, under their full names.

        It takes the tensors that are live before its first block, or the model's input, and returns the tuple of those
        that are live after its last block, or the model's outputs. A value for a later segment passes through.
        """
        if not 0 <= first < last <= len(self):
            raise ValueError(f"blocks [{first}, {last}) of {len(self)}")
        graph = Graph()
        copies: dict[Node, Node] = {}
        for node in self._live(first):
            copies[node] = graph.placeholder(node.name)
            if any(first <= self._place[user] < last and self._changes(user, node) for user in node.users):
                # what is received is a leaf of autograd, which must not change in place
                copies[node] = graph.call_method("clone", (copies[node],))
        for node in self._nodes:
            if any(first <= block < last for block in self._blocks(node)):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        if last < len(self):
            graph.output(tuple(copies[node] for node in self._live(last)))
        module = GraphModule(self._model, graph, "Segment")
        # GraphModule registers buffers that the forward itself reads as persistent
        called = [f"{node.target}." for node in graph.nodes if node.op == "call_module"]
        for name, part in module.named_modules():
            if type(part) is nn.Module and not any(target.startswith(f"{name}.") for target in called):
                part.__class__ = Weights
            part._non_persistent_buffers_set |= self._modules[name]._non_persistent_buffers_set & part._buffers.keys()
        return module

    def changed(self, cut: int) -> list[bool]:
        """Of each tensor that is live before block `cut`: whether what follows may change it in place."""
        return [
            any(self._place[user] >= cut and self._changes(user, node) for user in node.users)
            for node in self._live(cut)
        ]

    def _live(self, cut: int) -> list[Node]:
        """Values made before block `cut` and used in or after it. Each segment has its own parameters and buffers."""
        return [
            node
            for node in self._nodes
            if node.op != "get_attr"
            and self._place[node] < cut
            and any(self._place[user] >= cut for user in node.users)
        ]

    def _blocks(self, node: Node) -> set[int]:
        """The blocks that a node belongs to. Parameters and buffers go with who uses them."""
        nodes = list(node.users) if node.op == "get_attr" and node.users else [node]
        return {min(self._place[part], len(self) - 1) for part in nodes}

    def _opened(self, fine: bool) -> set[str]:
        """Modules into which the trace looks: those around blocks and, if `fine`, those around layers."""
        inside = (
            name
            for name in self._modules
            if fine and self._block(name) is not None and _is_container(self._modules[name])
        )
        parts = [name.split(".") for name in self._block_of]
        return {".".join(part[:length]) for part in parts for length in range(len(part))} | set(inside)

    def _block(self, name: str) -> int | None:
        """Index of the layout's block in which the module lies."""
        while name and name not in self._block_of:
            name = name.rpartition(".")[0]
        return self._block_of.get(name)

    def _assign(self, blocks: Sequence[Sequence[str]], fine: bool) -> list[str]:
        """Give every node its block; returns the labels."""
        labels: list[list[str]] = [[]]
        block, weighted, visited, called = 0, False, set(), set()
        for node in self._nodes:
            target = str(node.target)
            now = self._block(target) if node.op == "call_module" else None
            if now is not None and now < block and target in called and not _keeps(self._modules[target]):
                now = None  # called once more: its parameters are shared
            if now is not None:
                called.add(target)
                if now < block:
                    raise refusal(
                        self._model,
                        f"its forward comes to {target} after {blocks[block][0]}; name the blocks in the order in "
                        "which data flows",
                        LayoutError,
                    )
                owns = any(True for _ in self._modules[target].parameters())
                weighs = owns and not isinstance(self._modules[target], NORMS)
                if now > block or (fine and weighs and weighted):
                    labels.append([])
                    weighted = False
                block, weighted = now, weighted or weighs
                named = next(name for name in blocks[now] if f"{target}.".startswith(f"{name}."))
                visited.add(named)
                name = target if fine else named
                if name not in labels[-1] and (owns or not labels[-1]):
                    labels[-1].append(name)
            self._place[node] = 0 if _is_input(node) else len(labels) - 1
        missed = self._block_of.keys() - visited
        if missed:
            raise refusal(
                self._model,
                f"its forward does not come to {', '.join(sorted(missed))}, which the layout names as part of a block",
                LayoutError,
            )
        self._place[self._nodes[-1]] = len(labels)  # the output
        return [_label(names) for names in labels]

    def _uses(self) -> dict[str, list[int]]:
        """See `uses`. ConfigError for tensors that are not the model's, are not used or change in several blocks."""
        tensors = {name: id(tensor) for name, tensor in _tensors(self._model)}
        first = {key: name for name, key in reversed(tensors.items())}
        running = {id(b) for m in self._modules.values() if isinstance(m, NORMS[0]) for b in m.buffers(recurse=False)}
        uses: dict[str, set[int]] = {}
        changing: set[str] = set()
        drawing: dict[nn.Module, int] = {}  # the block of each dropout
        for node in self._nodes:
            target = str(node.target)
            if node.op == "get_attr" and target not in tensors:
                raise refusal(
                    self._model,
                    f"its forward uses the tensor {target}, which is neither a parameter nor a buffer; register it as "
                    "a buffer",
                )
            used = [tensors[target]] if node.op == "get_attr" else []
            if any(self._changes(user, node) for user in node.users):
                changing |= {first[key] for key in used}
            if node.op == "call_module":
                used = [id(tensor) for _, tensor in _tensors(self._modules[target])]
                for part in self._modules[target].modules():
                    if _draws(part) and drawing.setdefault(part, self._place[node]) != self._place[node]:
                        raise refusal(
                            self._model,
                            f"a {type(part).__name__} of {target} is called in two blocks, and its masks depend on how "
                            "often; use one for each block",
                        )
            for key in used:
                uses.setdefault(first[key], set()).update(self._blocks(node))
        for key in running:
            changing.add(first[key])
        for name, blocks in uses.items():
            if len(blocks) > 1 and name in changing:
                where = " and ".join(self.names[block] for block in sorted(blocks)[:2])
                raise refusal(
                    self._model,
                    f"{name} changes in a pass and is used in two blocks, {where}; name them as one, and cut only "
                    "between blocks",
                )
        unused = [name for name, key in tensors.items() if first[key] not in uses]
        if unused:
            raise refusal(self._model, f"its forward does not use {', '.join(unused)}; leave them out of the model")
        return {name: sorted(uses[name]) for name in first.values()}

    def shared_parameters(self, block: int) -> dict[str, nn.Parameter]:
        """Those of a block that other blocks use too, by their first names."""
        return {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if len(self.uses[name]) > 1 and block in self.uses[name]
        }

    def _changes(self, user: Node, node: Node) -> bool:
        """Whether `user` may change the value of `node` in place."""
        if not user.args or user.args[0] is not node:
            return False
        if user.target is getattr and user.args[1] == "data":  # who takes it writes to it, out of autograd's sight
            return True
        if user.op == "call_module":
            return bool(getattr(self._modules[str(user.target)], "inplace", False))
        name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
        flagged = user.kwargs.get("inplace") is True or any(value is True for value in user.args[1:])
        return flagged or name in inplace_methods or (name.endswith("_") and not name.endswith("__"))


class Weights(nn.Module):
    """Stands for a module of which a segment uses tensors, and which it does not call."""


def refuse_hooks_of_root(model: nn.Module) -> None:
    """Raise ConfigError for hooks of the whole model, or a forward of this one alone: no stage is the whole model."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = next((kind.strip("_") for kind in kinds if vars(model).get(kind)), "")
    if "forward" in vars(model):
        found = "a forward() of its own object"
    if found:
        raise refusal(
            model, f"the whole model has {found}, and no stage is the whole model; put them on a module in it"
        )


def _only_passes_modes_on(module: nn.Module) -> bool:
    """Whether `train()` tells parts of the mode, and does nothing else."""
    train = type(module).train
    of_transformers = train.__module__ == "transformers.modeling_utils"  # it changes kernels where they are asked for
    return train is nn.Module.train or (of_transformers and not getattr(module, "use_kernels", True))


def _is_input(node: Node) -> bool:
    """Whether it is the model's input or, of a nest, a part of it: that belongs to the first block, so that only
    tensors cross cuts.
    """
    while node.op == "call_function" and node.args and isinstance(node.args[0], Node) and _takes_part(node):
        node = node.args[0]
    return node.op == "placeholder"


def _takes_part(node: Node) -> bool:
    """Whether it takes a value out of a dict, list or tuple, or a field of a named tuple. A tensor has others."""
    if node.target is operator.getitem:
        return isinstance(node.args[1], str | int) or node.args[0].op == "placeholder"  # type: ignore[union-attr]
    return node.target is getattr and not hasattr(torch.Tensor, str(node.args[1]))


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers by all their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _members(module: nn.Module) -> Iterator[str]:
    """Names of its own parameters, buffers and children."""
    for members in (module._parameters, module._buffers, module._modules):
        yield from members


def _is_container(module: nn.Module) -> bool:
    """Whether all its parameters are those of its children, and its forward is not torch's own."""
    own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
    return not own and not module._parameters and any(True for _ in module.parameters())


def _draws(module: nn.Module) -> bool:
    """Whether its masks depend on how often it was called."""
    return isinstance(module, nn.modules.dropout._DropoutNd) or is_seeded(module)


def _keeps(module: nn.Module) -> bool:
    """Whether two calls of a module in one pass know of each other: by buffers, or by how often it drew."""
    return any(True for _ in module.buffers()) or any(map(_draws, module.modules()))


def _label(names: list[str]) -> str:
    """`a.b.conv`, `a.b.norm` -> `a.b.conv+norm`."""
    prefix = names[0].rpartition(".")[0] + "."
    return "+".join([names[0], *(name.removeprefix(prefix) for name in names[1:])])
