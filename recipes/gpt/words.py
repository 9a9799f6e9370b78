"""Generated text of known entropy: words that follow each other in a chain, and come back in the same row.

The first word of a row is drawn from a distribution of its own. Each further one is, with chance `repeats`, one of the
row's words so far, each as likely; else it is drawn from the distribution that belongs to the word before it. So every
word's probability is known from the row's words before it, and a model needs all of them to know it.

Words are different and end in a blank, so a row can be read in one way only. The probability of a byte is therefore
that of all words that begin like the word so far and go on with this byte, divided by that of all that begin like the
word so far. Over a word, these quotients multiply to the probability of the word; over a word that the row's end cuts,
to that of all words that begin so. That is what `Drawn.nats` sums: what the best model has as its loss, with nothing
left out. Each row begins with a line feed and is a text by itself, so that its first bytes lack no context either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtf.core.seeding import draws, seed_of

START = b"\n"
"""The first byte of each row. It is given, not predicted."""

SHORTEST, LONGEST = 2, 5
"""Letters of a word."""

FOLLOWERS = 8
"""Words that may follow a word in the chain; each is half as likely as the one before it."""

_CHUNK = 512  # rows drawn at once


@dataclass(frozen=True)
class Drawn:
    text: np.ndarray  # (B, length + 1) uint8
    nats: np.ndarray  # (B,) float64: minus the logarithm of the probability of the row's bytes after the first


class Words:
    """A language: its words, and how they follow each other. All of it is a function of (words, repeats, seed)."""

    def __init__(self, words: int, repeats: float, seed: int) -> None:
        self.repeats, self.seed = repeats, seed
        self.texts = _lexicon(words, seed_of(seed, "words"))
        self.chain = _chain(words, seed_of(seed, "chain"))  # (words + 1, words); last: of first words
        self._lengths = np.array([len(text) for text in self.texts])
        width = int(self._lengths.max())
        self._letters = np.array([[*text.ljust(width)] for text in self.texts], np.uint8)  # (words, width)
        # (width + 1, words, words): whether two words begin with the same so many letters
        same = self._letters[:, None] == self._letters[None]
        ones = np.ones((words, words, 1), bool)
        self._alike = np.moveaxis(np.concatenate([ones, np.logical_and.accumulate(same, axis=2)], axis=2), 2, 0)

    def about(self) -> str:
        """Text that differs between languages."""
        return f"generated from seed {self.seed}: {len(self.texts)} words, repeats {self.repeats:g}"

    def draw(self, ids: np.ndarray, length: int, split: str) -> Drawn:
        """The rows `ids` (B,), of `length` bytes after the first: a pure function of the language and the arguments."""
        key = seed_of(self.seed, "rows", split)
        parts = [self._draw(ids[at : at + _CHUNK], length, key) for at in range(0, len(ids), _CHUNK)]
        return Drawn(np.concatenate([part.text for part in parts]), np.concatenate([part.nats for part in parts]))

    def _draw(self, ids: np.ndarray, length: int, key: int) -> Drawn:
        rows, words = np.arange(len(ids)), len(self.texts)
        counts = np.zeros((len(ids), words))
        last, at, nats = np.full(len(ids), words), np.ones(len(ids), np.int64), np.zeros(len(ids))
        text = np.full((len(ids), length + 1), START[0], np.uint8)
        for number, chance in enumerate(draws(key, 0, ids, -(-length // (SHORTEST + 1))).T):
            repeats = self.repeats if number else 0.0
            mass = (1 - repeats) * self.chain[last] + repeats / max(number, 1) * counts  # (B, words)
            sums = mass.cumsum(axis=1)
            word = (sums <= chance[:, None] * sums[:, -1:]).sum(axis=1)
            fitting = np.clip(length + 1 - at, 0, self._lengths[word])
            nats -= np.log((mass * self._alike[fitting, word]).sum(axis=1))
            for letter in range(self._letters.shape[1]):
                there = rows[letter < fitting]
                text[there, at[there] + letter] = self._letters[word[there], letter]
            counts[rows, word] += 1
            at, last = at + self._lengths[word], word
        return Drawn(text, nats)


def _lexicon(words: int, key: int) -> list[bytes]:
    """So many different words of letters, each with a blank at its end."""
    found: dict[bytes, None] = {}
    for chances in draws(key, 0, np.arange(4 * words + 64), LONGEST + 1):
        letters = SHORTEST + int(chances[0] * (LONGEST - SHORTEST + 1))
        found[bytes(97 + int(chance * 26) for chance in chances[1 : letters + 1]) + b" "] = None
    return list(found)[:words]


def _chain(words: int, key: int) -> np.ndarray:
    """Probabilities (words + 1, words) of what follows each word; in the last row, of the first word of a text."""
    followers = draws(key, 0, np.arange(words + 1), words).argsort(axis=1)[:, :FOLLOWERS]
    shares = 0.5 ** np.arange(followers.shape[1])
    chain = np.zeros((words + 1, words))
    np.put_along_axis(chain, followers, np.broadcast_to(shares / shares.sum(), followers.shape), axis=1)
    return chain
