"""Models of known families are split without a layout, and compute as if whole."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtf.api.layout import Layout, Split, SplitBy
from dtf.core.errors import ConfigError
from dtf.core.types import Place
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.distributed.world import World
from dtf.strategies.tensor_parallel.families import found_positions, found_splits, with_found, with_splits
from tests.laws.test_tensor_layers import pair
from tests.support.ranks import ranks
from tests.support.toy import Toy

WORDS = 37
SMALL = {"vocab_size": WORDS, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 20}
GROUPED = SMALL | {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 16}
EACH = SMALL | {"num_attention_heads": 3, "max_position_embeddings": 16}
GPT2 = {"vocab_size": WORDS, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 16}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2, eager": ("GPT2LMHeadModel", GPT2 | {"attn_implementation": "eager", "reorder_and_upcast_attn": False}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED | {"attn_implementation": "eager", "attention_dropout": 0.2}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 4}),
    "phi3": ("Phi3ForCausalLM", GROUPED | {"pad_token_id": 0}),
    "gpt_neox": ("GPTNeoXForCausalLM", EACH),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", EACH),
    "roberta": ("RobertaForTokenClassification", EACH | {"pad_token_id": 1, "attn_implementation": "eager"}),
}
HUGGING_FACE = CAUSAL | ENCODERS


def of_transformers(kind: str, options: dict[str, Any]) -> nn.Module:
    import transformers  # type: ignore[import-not-found]

    model_class = getattr(transformers, kind)
    options = dict(options)
    implementation = options.pop("attn_implementation", "sdpa")
    config = model_class.config_class(**options)
    config._attn_implementation = implementation
    return model_class(config)


def vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    made = VisionTransformer(8, 4, 2, 3, 12, 20, dropout=0.1, attention_dropout=0.1, num_classes=5)
    for parameter in made.heads.parameters():
        nn.init.normal_(parameter)  # zeros at first
    return made


def swin(version: int) -> nn.Module:
    from torchvision.models import swin_transformer as swins

    block = swins.SwinTransformerBlockV2 if version == 2 else swins.SwinTransformerBlock
    merging = swins.PatchMergingV2 if version == 2 else swins.PatchMerging
    return swins.SwinTransformer(
        [2, 2], 12, [2, 1], [3, 6], [2, 2], 1.5, 0.1, 0.1, 0.0, 5, block=block, downsample_layer=merging
    )


VISION: dict[str, Callable[[], nn.Module]] = {"vit": vit, "swin": lambda: swin(1), "swin v2": lambda: swin(2)}


def images() -> Tensor:
    return torch.arange(2 * 3 * 8 * 8, dtype=torch.float64).view(2, 3, 8, 8).sin()


def computed(rank: int, size: int, names: list[str]) -> dict[str, list[float]]:
    """By model: how far outputs and gradients are from those of the whole, and the share of split weights here."""
    from dtf.distributed.sharding import slice_of
    from dtf.model.losses import cross_entropy
    from dtf.model.seeded_calls import FindCalls, seed_calls
    from dtf.strategies.tensor_parallel.slices import slices_of

    mesh, found = World(Place(rank=rank, size=size)).mesh({"tp": size}), {}
    words = torch.arange(14).view(2, 7) * 5 % WORDS

    def scores(model: nn.Module) -> Tensor:
        if name in VISION:
            return model(images())
        return model(words, **({"use_cache": False} if name in CAUSAL else {})).logits

    for name in names:
        build = VISION[name] if name in VISION else lambda name=name: of_transformers(*HUGGING_FACE[name])
        with torch.device("meta"):
            splits = found_splits(build())
        whole, parts = pair(mesh, build, splits)
        losses, evaluated = [], []
        for model in (whole, parts):
            masks = model.__dict__["masks"]
            with FindCalls(model, masks) as calls:
                scores(model)
            seed_calls(model, masks, calls.forwards)
            masks.begin_micro_batch(0, 0)
            for kept in (losses, evaluated):
                given = scores(model.train(kept is losses))
                shape = given.shape[:-1]
                loss = cross_entropy(given, torch.arange(shape.numel()).view(shape) % given.shape[-1])
                kept.append(loss.detach())
                if kept is losses:
                    loss.sum().backward()
        place, gradients = slices_of(parts), dict(parts.named_parameters())
        off = {
            key: float((slice_of(gradients[key], place.get(key)).take(p.grad) - mine).abs().max())
            for key, p in whole.named_parameters()
            if p.grad is not None and (mine := gradients[key].grad) is not None
        }
        assert len(off) == sum(p.grad is not None for p in whole.parameters())
        weights = [key for key in place if key.endswith("weight")]
        known = [dict(model.named_parameters(remove_duplicate=False)) for model in (parts, whole)]
        held, full = (sum(each[key].numel() for key in weights) for each in known)
        found[name] = [
            float((losses[0] - losses[1]).abs().max()),
            float((evaluated[0] - evaluated[1]).abs().max()),
            max(off.values()),
            held / full,
        ]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_models_of_torchvision_compute_as_if_whole(size: int) -> None:
    for found in ranks(size, "tests.laws.test_tensor_families:computed", shared=True, names=list(VISION)):
        assert {name: numbers for name, numbers in found.items() if not max(numbers[:3]) < 1e-11} == {}


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_models_of_transformers_compute_as_if_whole(size: int) -> None:
    for found in ranks(size, "tests.laws.test_tensor_families:computed", shared=True, names=list(HUGGING_FACE)):
        assert {name: numbers for name, numbers in found.items() if not max(numbers[:3]) < FP32.get(name, 1e-11)} == {}
        assert all(share < 0.7 for *_, share in found.values())


FP32 = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2", "gpt2, eager", "gpt_neox"), 1e-5)
"""Their normalisations, softmax or rotary positions are of fp32, whatever the model computes in."""


def test_a_model_of_no_known_family_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the layout of Toy splits no module, and nothing was found in its model"):
        with_splits(Layout(), nn.Sequential(nn.Linear(2, 2)), Toy(), "strategy=tensor", MeshSizes(tensor=2))
    named = Layout(splits={"0": Split.column})
    assert (
        with_splits(named, nn.Sequential(nn.Linear(2, 2)), Toy(), "strategy=tensor", MeshSizes(tensor=2)).splits
        == named.splits
    )


def test_a_layout_of_the_last_layer_leaves_the_rest_to_be_found() -> None:
    """As that of the recipes of images, for a ViT."""
    with torch.device("meta"):
        model = nn.Sequential(nn.TransformerEncoderLayer(12, 3, 8), nn.Linear(12, 4))
    found = with_found(Layout(splits={"1": Split.classes}), model)
    assert found.splits == {**found_splits(model), "1": Split.classes} and len(found.splits) == 5
    more = Layout(splits={"0.self_attn": Split.heads, "1": Split.classes})
    assert with_found(more, model) is more


def test_layers_around_an_attention_are_found_in_order() -> None:
    with torch.device("meta"):
        splits = found_splits(nn.Sequential(nn.TransformerEncoderLayer(12, 3, 8)))
    assert list(splits) == ["0.linear1", "0.dropout", "0.linear2", "0.self_attn"]
    assert not any(isinstance(split, SplitBy) for split in splits.values())


def test_positions_are_found_where_one_block_takes_what_another_gives() -> None:
    """In a ModuleList anything may stand between them."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(12, 4, 8, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(12))
        chain, free = nn.Sequential(nn.Sequential(layer)), nn.Sequential(nn.ModuleList([layer]))
    assert found_positions(encoder, found_splits(encoder)) == ("layers.0", "layers.1", "norm")
    assert found_positions(chain, found_splits(chain)) == ("0.0",)
    assert found_positions(free, found_splits(free)) == ()


def test_attention_with_fewer_heads_than_ranks_stays_whole() -> None:
    """As in the first stages of a Swin; and so do the positions around it."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.TransformerEncoderLayer(12, 2, 8, batch_first=True)))
    two, three = (with_splits(Layout(), model, Toy(), "strategy=tensor", MeshSizes(tensor=n)) for n in (2, 3))
    assert "0.0.self_attn" in two.splits
    assert two.positions == ("0.0",)
    assert list(three.splits) == ["0.0.linear1", "0.0.dropout", "0.0.linear2"]
    assert three.positions == ()
    with pytest.raises(ConfigError, match="0, which was found in its model, has fewer heads than 3 ranks; name layers"):
        attention = nn.Sequential(nn.MultiheadAttention(12, 2))
        with_splits(Layout(), attention, Toy(), "strategy=tensor", MeshSizes(tensor=3))


@needs_transformers
def test_grouped_queries_with_fewer_groups_than_ranks_stay_whole() -> None:
    with torch.device("meta"):
        model = of_transformers(*CAUSAL["qwen3"])
    splits = with_splits(Layout(), model, Toy(), "strategy=tensor", MeshSizes(tensor=4)).splits
    kept = {key.split(".layers.0.")[-1] for key in splits if "layers.1" not in key}
    assert kept == {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "model.embed_tokens", "lm_head"}
