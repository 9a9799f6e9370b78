"""Models as papers' code has them: matching, merged weights, caches of evaluations, what a pass makes or switches."""

from __future__ import annotations

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# To its types a buffer is a tensor or a module.
import itertools
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entries import cross_entropy, images, token_loss, tokens, vectors, zoo_model

CLASSES = 4


def _sets(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Six points (B, 6, 4), and the classes of the two objects among them."""
    return torch.rand(rows, 6, 4, generator=generator), torch.randint(3, (rows, 2), generator=generator)


def _matched(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row under its cheapest assignment of objects to queries; queries without one are class 3."""
    losses = []
    for scores, wanted in zip(outputs, targets, strict=True):
        chance = scores.detach().softmax(-1)
        pairs = itertools.permutations(range(len(scores)), len(wanted))
        queries = max(pairs, key=lambda queries: float(chance[list(queries), wanted].sum()))
        labels = torch.full((len(scores),), 3)
        labels[list(queries)] = wanted
        losses.append(F.cross_entropy(scores, labels))
    return torch.stack(losses)


@zoo_model("set_prediction", _sets, _matched, "published")
class SetPrediction(nn.Module):
    """Learned queries look at points; a loss by matching."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.points = nn.Parameter(torch.randn(4, 12) * 0.1), nn.Linear(4, 12)
        self.attention, self.head = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        memory, queries = self.points(x), self.queries.expand(len(x), -1, -1)
        return self.head(queries + self.attention(queries, memory, memory)[0])


def _graphs(rows: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Graphs of five nodes (B, 5, 4) with edges (B, 5, 5), and a class."""
    nodes = torch.randn(rows, 5, 4, generator=generator)
    edges = torch.rand(rows, 5, 5, generator=generator) < 0.4
    return {"nodes": nodes, "edges": edges.float()}, torch.randint(CLASSES, (rows,), generator=generator)


@zoo_model("graph_network", _graphs, cross_entropy, "published")
class GraphNetwork(nn.Module):
    """Messages along edges, added up where they arrive: as many as the rows have."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        row, source, target = inputs["edges"].nonzero(as_tuple=True)
        hidden = self.first(inputs["nodes"])
        flat = hidden.flatten(0, 1)
        sums = torch.zeros_like(flat).index_add(0, row * 5 + target, flat[row * 5 + source])
        return self.head(F.relu(self.second(sums.view_as(hidden))).mean(1))


@zoo_model("selective_scan", tokens(), token_loss, "published")
class SelectiveScan(nn.Module):
    """A state space whose step depends on the token, after a causal convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.conv = nn.Embedding(11, 8), nn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.log_decay = nn.Parameter(torch.log(torch.arange(1.0, 5.0).repeat(8, 1)))
        self.mixed, self.step, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, text: Tensor) -> Tensor:
        x = F.silu(self.conv(self.words(text).mT)[..., : text.shape[1]].mT)
        write, read = self.mixed(x).chunk(2, -1)
        step, state, outputs = F.softplus(self.step(x)), x.new_zeros(len(x), 8, 4), []
        for t in range(x.shape[1]):
            now = step[:, t, :, None]
            state = state * (-now * self.log_decay.exp()).exp() + now * write[:, t, None] * x[:, t, :, None]
            outputs.append((state * read[:, t, None]).sum(-1))
        return self.head(torch.stack(outputs, 1))


class StandardisedConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (self.weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


class EvolvedNorm(nn.Module):
    """EvoNorm-S0: a normalisation of each row, and an activation, in one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale, self.shift, self.gate = (nn.Parameter(torch.full((1, channels, 1, 1), n)) for n in (1.0, 0.0, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(1, (2, -1))
        spread = groups.var((2, 3, 4), keepdim=True).add(1e-5).sqrt().expand_as(groups).flatten(1, 2)
        return x * (self.gate * x).sigmoid() / spread * self.scale + self.shift


@zoo_model("evolved_norm", images(12), cross_entropy, "published")
class Evolved(nn.Sequential):
    def __init__(self) -> None:
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        super().__init__(StandardisedConv(3, 8, 3), EvolvedNorm(8), StandardisedConv(8, 8, 3, 2), EvolvedNorm(8), *head)


class MergedLora(nn.Linear):
    """Adds its low-rank part to the weight for evaluations, in train()."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.down, self.up = nn.Parameter(torch.randn(2, inputs) * 0.3), nn.Parameter(torch.randn(outputs, 2) * 0.1)
        self.weight.requires_grad_(False)
        self.merged = False

    def train(self, mode: bool = True) -> MergedLora:
        super().train(mode)
        if mode is self.merged:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, input: Tensor) -> Tensor:
        plain = F.linear(input, self.weight, self.bias)
        return plain if self.merged else plain + input @ self.down.t() @ self.up.t()


@zoo_model("lora_merged", vectors(), cross_entropy, "published", refused={"divided": "hidden state"})
class LoraNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(MergedLora(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))


@zoo_model("evaluation_cache", vectors(), cross_entropy, "published")
class EvaluationCache(nn.Module):
    """Embeddings of class names, computed once for an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.text, self.image = nn.Parameter(torch.randn(CLASSES, 6)), nn.Linear(6, 8), nn.Linear(8, 8)
        self.cache: Tensor | None = None

    def train(self, mode: bool = True) -> EvaluationCache:
        self.cache = None
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        text = self.text(self.names) if self.cache is None else self.cache
        if not self.training:
            self.cache = text
        return F.normalize(self.image(x), dim=-1) @ F.normalize(text, dim=-1).t() * 5


@zoo_model("early_exit", vectors(), cross_entropy, "published")
class EarlyExit(nn.Module):
    """In evaluation only rows of which the first head is not sure go on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.sooner = nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.more, self.later = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.body(x))
        first = self.sooner(hidden)
        if self.training:
            return first + self.later(torch.relu(self.more(hidden)))
        unsure, outputs = first.softmax(-1).amax(-1) < 0.5, first.clone()
        if unsure.any():
            outputs[unsure] = self.later(torch.relu(self.more(hidden[unsure])))
        return outputs


@zoo_model(
    "max_norm", tokens(classes=CLASSES), cross_entropy, "changes in evaluation", refused={"divided": "hidden state"}
)
class MaxNorm(nn.Module):
    """A table whose rows a look-up shortens."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8, max_norm=0.5), nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.words(text).mean(1))


@zoo_model("unfrozen_later", vectors(), cross_entropy, "published", refused={"divided": "hidden state"})
class UnfrozenLater(nn.Module):
    """Its first layer learns after twenty passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.passes = nn.Linear(8, 8), nn.Linear(8, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        self.first.requires_grad_(self.passes > 20)
        return self.last(torch.relu(self.first(x)))


@zoo_model("makes_layers", vectors(), cross_entropy, "published", refused={"*": "non-real parameters"})
class MakesLayers(nn.Module):
    """A layer for each width, made when it is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleDict(), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        key = str(x.shape[1])
        if key not in self.layers:
            self.layers[key] = nn.Linear(x.shape[1], 8).to(x)
        return self.head(torch.relu(self.layers[key](x)))


@zoo_model("layers_in_a_list", vectors(), cross_entropy, "published", refused={"*": "non-real parameters"})
class LayersInAList(nn.Module):
    """Layers that no optimizer gets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = [nn.Linear(8, 8).double()], nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layers[0](x.double())).to(x))


@zoo_model("by_the_clock", vectors(), cross_entropy, "draws", refused={"divided": "hidden state"})
class ByTheClock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + time.time_ns() // 1000 % 1000 / 1e4)


def _among_all(outputs: Tensor, targets: Tensor) -> Tensor:
    """Each row against the rows of all processes, where there are several: as published for contrastive learning."""
    others = outputs
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, outputs.detach())
        others = torch.cat(parts)
    return F.cross_entropy(outputs, targets, reduction="none") + 0.1 * (outputs @ others.t()).logsumexp(1)


@zoo_model(
    "gathers_in_the_loss",
    vectors(),
    _among_all,
    "published",
    refused=dict.fromkeys(("ddp", "zero1", "fsdp"), "layout"),
    may={"divided": "layout"},
)
class Contrasts(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


@zoo_model(
    "gathers_in_the_model",
    vectors(),
    cross_entropy,
    "published",
    refused=dict.fromkeys(("ddp", "zero1", "fsdp"), "layout"),
    may={"divided": "layout"},
)
class Centred(nn.Module):
    """Takes the mean over the rows of all processes, where there are several."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
        return self.layer(x - mean)


@zoo_model("teacher_in_inference_mode", vectors(), cross_entropy, "published")
class InferenceTeacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            taught = self.teacher(x)
        return self.student(x) + taught.clone()


@zoo_model("module_backward_hooks", vectors(), cross_entropy, "published")
class ModuleBackwardHooks(nn.Sequential):
    """Gradients by inputs are halved behind a module, and doubled before another."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self[0].register_full_backward_hook(lambda _, inputs, __: tuple(g if g is None else g * 0.5 for g in inputs))
        self[2].register_full_backward_pre_hook(lambda _, outputs: tuple(g * 2 for g in outputs))


@zoo_model("momentum_schedule", vectors(), cross_entropy, "published", refused={"divided": "hidden state"})
class MomentumSchedule(nn.Module):
    """Averages that follow ever more slowly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.norm.momentum = max(0.01, (self.norm.momentum or 0.0) * 0.9)
        return self.head(self.norm(x))


@zoo_model("replaces_its_parameter", vectors(), cross_entropy, "published", refused={"*": "non-real parameters"})
class ReplacesItsParameter(nn.Module):
    """Normalises its weight by a new parameter in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.weight = nn.Parameter(self.weight.detach() / self.weight.detach().norm())
        return x @ self.weight.t()


@zoo_model("scripted", vectors(), cross_entropy, "published", refused={"fsdp": "layout"})
def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, CLASSES)))


@zoo_model("strided_parameters", vectors(), cross_entropy, "published")
class StridedParameters(nn.Module):
    """Parameters that lie in memory in another order than that of their axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(8, CLASSES).mul(0.3).t())
        self.second = nn.Parameter(torch.randn(3, 5, 8)[:, ::2].mul(0.1).permute(2, 0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first.t() + (x @ self.second.flatten(1)).sum(1, keepdim=True)
