# pyright: basic
"""Rows of words by number as lists of dicts, of many lengths, and a function that pads them."""

import random

import torch


def _sentences(count, seed, least=4, most=12):
    draws = random.Random(seed)
    for _ in range(count):
        start, step = draws.randrange(1, 60), draws.choice([1, 2, 7])
        yield [(start + step * place) % 59 + 1 for place in range(draws.randrange(least, most + 1))]


def _rows(count, seed, label):
    return [
        {"input_ids": words, "attention_mask": [1] * len(words), "text": "left out", "label": label(words)}
        for words in _sentences(count, seed)
    ]


def numbers(count: int = 160):
    return tuple(_rows(n, seed, lambda words: sum(words) / 400) for n, seed in ((count, 0), (40, 1)))


def sets(count: int = 160):
    return tuple(
        _rows(n, seed, lambda words: [float(words[0] % 2), float(words[1] > 30), float(len(words) > 8)])
        for n, seed in ((count, 0), (40, 1))
    )


def texts(count: int = 160):
    return tuple(
        [{"input_ids": words, "attention_mask": [1] * len(words)} for words in _sentences(n, seed, 8)]
        for n, seed in ((count, 0), (40, 1))
    )


def padding():
    def collate(rows):
        most = max(len(row["input_ids"]) for row in rows)
        batch = {
            name: torch.tensor([row[name] + [0] * (most - len(row[name])) for row in rows])
            for name in ("input_ids", "attention_mask")
        }
        labels = [row.get("label", row["input_ids"] + [-100] * (most - len(row["input_ids"]))) for row in rows]
        return {**batch, "labels": torch.tensor(labels)}

    return collate
