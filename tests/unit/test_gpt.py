"""The recipe of a language model over bytes: text of known entropy, rows of files, the network, loss and measures."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtf.api.recipe import Dataset
from dtf.config.compose import compose
from dtf.core.errors import ConfigError, DataError
from dtf.core.types import Batch
from dtf.model.losses import IGNORED
from dtf.recipes.gpt.model import GPT, Attention
from dtf.recipes.gpt.recipe import GptText, ModelOptions, TextOptions
from dtf.recipes.gpt.words import Words


def chance_of(language: Words, row: bytes, byte: int) -> float:
    """The probability of a byte after a row's bytes, by counting words; nothing is shared with `Words.draw`."""
    *past, begun = row[1:].split(b" ")
    words = [language.texts.index(word + b" ") for word in past]
    mass = {}
    for number, text in enumerate(language.texts):
        chain = language.chain[words[-1] if words else -1, number]
        again = words.count(number) / len(words) if words else 0
        mass[text] = (1 - language.repeats) * chain + language.repeats * again if words else chain
    fit = {text: share for text, share in mass.items() if text.startswith(begun)}
    return sum(share for text, share in fit.items() if text[len(begun)] == byte) / sum(fit.values())


@pytest.mark.parametrize(("words", "repeats"), [(12, 0.4), (5, 0.0)])
def test_the_entropy_of_a_row_is_that_of_its_bytes_one_after_the_other(words: int, repeats: float) -> None:
    language = Words(words, repeats, 3)
    drawn = language.draw(np.arange(12), 30, "eval")
    for row, nats in zip(drawn.text, drawn.nats, strict=True):
        chances = [chance_of(language, bytes(row[:at]), row[at]) for at in range(1, len(row))]
        assert nats == pytest.approx(-sum(map(math.log, chances)), rel=1e-12)
        assert row[0] == ord("\n")


def test_rows_are_as_frequent_as_their_probability_says() -> None:
    """All rows of a small language are enumerated. Their probabilities sum to 1, counted rows have them, and the mean
    of `nats` is the entropy, within four standard errors.
    """
    language, length, count = Words(3, 0.5, 1), 9, 40_000
    rows = {b"\n": 1.0}
    for _ in range(length):
        rows = {
            row + bytes([byte]): chance * share
            for row, chance in rows.items()
            for byte in {*b"".join(language.texts)}
            if _begins(language, row + bytes([byte])) and (share := chance_of(language, row, byte))
        }
    assert sum(rows.values()) == pytest.approx(1, abs=1e-12) and len(rows) > 5
    drawn = language.draw(np.arange(count), length, "train")
    found, times = np.unique(drawn.text, axis=0, return_counts=True)
    for row, number in zip(found, times, strict=True):
        share = rows[bytes(row)]
        assert abs(number / count - share) < 4 * math.sqrt(share * (1 - share) / count)
    entropy = -sum(share * math.log(share) for share in rows.values())
    assert abs(drawn.nats.mean() - entropy) < 4 * drawn.nats.std() / math.sqrt(count)


def _begins(language: Words, row: bytes) -> bool:
    *past, begun = row[1:].split(b" ")
    known = all(word + b" " in language.texts for word in past)
    return known and any(text.startswith(begun) for text in language.texts)


def test_without_repeats_the_entropy_is_that_of_the_chain() -> None:
    """Of a row's whole words, by the chain's matrix alone: what `nats` has without what the row's end cuts."""
    language, length = Words(6, 0.0, 2), 240
    drawn = language.draw(np.arange(2048), length, "eval")
    first, after = language.chain[-1], language.chain[:-1]
    uncertain = -np.where(after > 0, after * np.log(np.where(after > 0, after, 1)), 0).sum(1)
    steady = np.linalg.matrix_power(after, 4096)[0]
    rate = steady @ uncertain / (steady @ [len(text) for text in language.texts])
    assert drawn.nats.mean() / length == pytest.approx(rate, rel=0.01)
    starts = [bytes(row[1:]).split(b" ")[0] + b" " for row in drawn.text]
    shares = [starts.count(text) / len(starts) for text in language.texts]
    assert np.abs(np.array(shares) - first).max() < 0.05


def test_generated_rows_are_a_function_of_their_numbers() -> None:
    data = _data(GptText(data=TextOptions(length=20, words=9)), "train")
    ids = np.array([7, 0, 600, 7])
    inputs, targets = data.fetch(ids, 0)
    assert inputs.shape == targets.shape == (4, 20) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and torch.equal(inputs[0], inputs[3])
    for place, number in enumerate(ids):
        assert torch.equal(data.fetch(np.array([number]), 5)[0][0], inputs[place])
    other = _data(GptText(data=TextOptions(length=20, words=9)), "eval")
    assert not torch.equal(other.fetch(ids, 0)[0], inputs) and other.fingerprint() != data.fingerprint()
    best = other.best_possible()
    assert best["bits_per_byte"] == pytest.approx(best["loss"] / math.log(2)) and 0 < best["loss"] < 1


def _data(recipe: GptText, split: str) -> Dataset:
    return recipe.open_data(split, 0)


def test_each_byte_of_files_is_predicted_once_from_those_before(tmp_path: Path) -> None:
    text = bytes(range(256)) * 2
    for name, part in (("a", text[:100]), ("b", b""), ("c", text[100:101]), ("d", text[101:])):
        (tmp_path / f"{name}.bin").write_bytes(part)
    recipe = GptText(data=TextOptions(path=str(tmp_path / "*.bin"), length=30, eval_share=0.2))
    recipe.check()
    seen = b""
    for split, rows in (("train", 14), ("eval", 4)):
        data = _data(recipe, split)
        assert len(data) == rows
        inputs, targets = data.fetch(np.arange(rows), 0)
        before = len(seen)
        seen += bytes(targets[targets != IGNORED].tolist())
        there = inputs[targets != IGNORED].tolist()
        assert bytes(there) == text[before : before + len(there)]  # the byte before each target
        assert torch.equal(data.fetch(np.array([rows - 1]), 3)[1][0], targets[-1])
    assert seen == text[1:]
    before_change = _data(recipe, "eval").fingerprint()
    (tmp_path / "d.bin").write_bytes(text[101:-1] + b"x")
    assert _data(recipe, "eval").fingerprint() != before_change


def test_files_that_make_no_rows_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_bytes(b"a" * 600)
    for path, share, words in (
        ("nowhere", 0.1, "there is no such file; give a file, or a quoted pattern such as"),
        ("*.txt", 0.1, "no file fits it"),
        ("empty", 0.1, "is empty; give a file with text"),
        (".", 0.1, "is no file; give a file, or a quoted pattern such as"),
        ("short", 0.1, r"has 600 bytes: 540 to train and 60 to evaluate \(recipe.data.eval_share=0.1\), .*length=64"),
        ("short", 0.9, r"has 600 bytes: 60 to train"),
    ):
        recipe = GptText(data=TextOptions(path=str(tmp_path / path), eval_share=share))
        with pytest.raises(DataError, match=words):
            recipe.check()


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"width=30 must be a multiple of recipe.model.heads=4; use .*width=32"):
        compose(["recipe=gpt_text", "recipe.model.width=30"]).check()
    composed = compose(["recipe=gpt_text"])
    assert isinstance(composed.check().recipe, GptText) and composed.choices["optimizer"] == "adamw"


def test_loss_and_measures_count_bytes() -> None:
    recipe = GptText()
    scores, targets = torch.randn(3, 4, 256, dtype=torch.float64), torch.arange(12).view(3, 4)
    targets[1, 2:] = IGNORED
    scores[0, 1, 1] = 99
    sums, counts = recipe.loss(scores, targets)
    each = -scores.log_softmax(-1).gather(-1, targets.clamp(0)[..., None])[..., 0] * (targets != IGNORED)
    torch.testing.assert_close(sums, each.sum(1))
    assert counts.tolist() == [4, 2, 4] and recipe.loss(scores.bfloat16(), targets)[0].dtype == torch.float32
    batch = Batch(None, targets, torch.tensor([1.0, 1.0, 0.0]), np.arange(3))
    values = recipe.summarise(recipe.measure(scores, batch, sums).tolist())
    assert values["loss"] == pytest.approx(float(each[:2].sum()) / 6)
    assert values["bits_per_byte"] == pytest.approx(values["loss"] / math.log(2))
    assert values["top1"] == pytest.approx(1 / 6, abs=1e-9)
    assert recipe.direction("bits_per_byte") == "min" and recipe.direction("top1") == "max"
    assert recipe.probabilities(scores) is None


def small(**options: Any) -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "mlp_ratio": 4, "dropout": 0.0, "length": 12}
    return GPT(**{**sizes, "tied": True, **options})


def test_a_place_sees_only_those_before_it() -> None:
    model = small()
    tokens = torch.randint(0, 256, (2, 12))
    other = tokens.clone()
    other[:, 7] += 1
    same = (model(tokens) == model(other % 256)).all(-1)
    assert same[:, :7].all() and not same[:, 7:].any()


def test_parameters_are_drawn_and_named_as_documented() -> None:
    model = small(layers=3, width=128)
    parameters = dict(model.named_parameters())
    assert "head.weight" not in parameters and model.head.weight is model.embedding.weight
    assert "head.weight" in dict(small(tied=False).named_parameters())
    assert "blocks.2.attention.query.bias" in parameters and "blocks.2.attention.key.bias" not in parameters
    for name, parameter in parameters.items():
        if parameter.dim() == 1:
            assert (parameter == (1 if "norm" in name and name.endswith("weight") else 0)).all(), name
        else:
            ends = name.endswith(("attention.out.weight", "mlp.2.weight"))
            assert float(parameter.detach().std()) == pytest.approx(0.02 / math.sqrt(6) if ends else 0.02, rel=0.05), (
                name
            )
    layout = GptText(model=ModelOptions(layers=3)).layout(model)
    covered = {name for block in layout.blocks for name in block}
    assert covered == {"embedding", "positions", "norm", "head", *(f"blocks.{number}" for number in range(3))}


def test_attention_takes_its_heads_from_its_layers() -> None:
    """Two halves, each with one of two heads, sum to the whole: no code knows how many there are."""
    torch.manual_seed(0)
    whole, x = Attention(8, 2, 0.0).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    total = torch.zeros_like(x)
    for half in (slice(0, 4), slice(4, 8)):
        part = Attention(8, 2, 0.0).double()
        for mine, full in ((part.query, whole.query), (part.key, whole.key), (part.value, whole.value)):
            mine.weight = torch.nn.Parameter(full.weight[half])
            if full.bias is not None:
                mine.bias = torch.nn.Parameter(full.bias[half])
        part.out.weight, part.out.bias = torch.nn.Parameter(whole.out.weight[:, half]), whole.out.bias
        total += part(x) - whole.out.bias
    torch.testing.assert_close(total + whole.out.bias, whole(x))


def test_it_learns_the_language() -> None:
    recipe = GptText(
        model=ModelOptions(layers=1, heads=2, width=32), data=TextOptions(length=32, words=4, repeats=0.3, eval_rows=64)
    )
    train, held_out = _data(recipe, "train"), _data(recipe, "eval")
    torch.manual_seed(0)
    model = recipe.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for first in range(0, 120 * 16, 16):
        inputs, targets = train.fetch(np.arange(first, first + 16), 0)
        sums, counts = recipe.loss(model(inputs), targets)
        optimizer.zero_grad()
        (sums.sum() / counts.sum()).backward()
        optimizer.step()
    inputs, targets = held_out.fetch(np.arange(64), 0)
    with torch.no_grad():
        sums, counts = recipe.loss(model(inputs), targets)
    best = held_out.best_possible()["loss"]
    assert best < float(sums.sum() / counts.sum()) < 1.5 * best


def test_generated_text_has_no_two_words_alike() -> None:
    texts = Words(1024, 0.25, 0).texts
    assert len(texts) == len({*texts}) == 1024 and all(text.endswith(b" ") for text in texts)
    assert all(not b.startswith(a) for a, b in pairwise(sorted(texts)))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_outputs_and_gradients_are_those_of_gpt2(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 256}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **off, tie_word_embeddings=tied, attn_implementation="eager")
    torch.manual_seed(1)
    theirs = transformers.GPT2LMHeadModel(config).double()
    ours = small(tied=tied).double()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    of_gpt2 = {name: (parameter, _theirs(name, theirs)) for name, parameter in ours.named_parameters()}
    with torch.no_grad():
        for parameter, (tensor, turn) in of_gpt2.values():
            parameter.copy_(turn(tensor))
    tokens, targets = torch.randint(0, 256, (3, 12)), torch.randint(0, 256, (3, 12))
    scores = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), scores, rtol=0, atol=1e-12)
    sums, counts = GptText().loss(ours(tokens), targets)
    (sums.sum() / counts.sum()).backward()
    torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()).backward()
    for name, (parameter, (tensor, turn)) in of_gpt2.items():
        torch.testing.assert_close(parameter.grad, turn(tensor.grad), rtol=0, atol=1e-12, msg=name)
    keys = theirs.transformer.h[0].attn.c_attn.bias.grad[16:32]  # the one parameter that `GPT` has not
    assert keys.abs().max() < 1e-15


def _theirs(name: str, model: Any) -> tuple[torch.Tensor, Any]:
    """The parameter of GPT-2 that holds one of ours, and what makes ours of it."""
    plain = {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f"}
    inside = {"norm1": "ln_1", "norm2": "ln_2", "attention.out": "attn.c_proj", "mlp.0": "mlp.c_fc"}
    inside |= {"mlp.2": "mlp.c_proj"} | dict.fromkeys(
        (f"attention.{part}" for part in ("query", "key", "value")), "attn.c_attn"
    )
    module, _, kind = name.rpartition(".")
    if not module.startswith("blocks."):
        return model.get_parameter(f"{plain.get(module, 'lm_head')}.{kind}"), lambda tensor: tensor
    number, _, part = module.removeprefix("blocks.").partition(".")
    tensor = model.get_parameter(f"transformer.h.{number}.{inside[part]}.{kind}")
    third = ["query", "key", "value"].index(part[10:]) if inside[part] == "attn.c_attn" else None
    turned = kind == "weight" and not part.startswith("norm")  # GPT-2's layers hold their weights turned

    def turn(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor if third is None else tensor[..., 16 * third : 16 * (third + 1)]
        return mine.T if turned else mine

    return tensor, turn


@pytest.mark.slow
def test_the_documented_lines_write_a_text(run_dtf: Any, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_dtf("recipe=gpt_text", "recipe.data.train_rows=64", "recipe.data.eval_rows=16", "launcher.processes=1")
    assert done.code == 0 and "best_possible" in done.out + done.err, done.err
    page = (Path(__file__).parents[2] / "recipes" / "gpt" / "README.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(code.replace("RUN/best", str(done.folder)), {})
    assert len(capsys.readouterr().out) > 200
    refused = run_dtf("job=predict", f"job.model={done.folder}")
    assert refused.code == 2 and "a language model gives some for each byte of a row" in refused.err
    exported = run_dtf("job=export", f"job.model={done.folder}")
    assert exported.code == 0, exported.err
