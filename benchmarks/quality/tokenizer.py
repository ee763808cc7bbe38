"""A byte-pair encoding: 256 bytes, and the pairs that were most frequent in the text it was trained on.

Text is cut into words first, each with the space before it, so that no token reaches across words.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Pair = tuple[int, int]
_WORD = re.compile(r" ?\w+|\s|[^\w\s]")


@dataclass(frozen=True)
class Tokenizer:
    """An encoding given by its merges: the pair at index i becomes token 256 + i."""

    merges: tuple[Pair, ...]

    @property
    def vocabulary(self) -> int:
        """Returns the number of different tokens."""
        return 256 + len(self.merges)

    @cached_property
    def _ranks(self) -> dict[Pair, int]:
        return {pair: rank for rank, pair in enumerate(self.merges)}

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        known: dict[str, list[int]] = {}
        tokens: list[int] = []
        for word in _WORD.findall(text):
            if word not in known:
                known[word] = self._encode_word(word)
            tokens += known[word]
        return tokens

    def _encode_word(self, word: str) -> list[int]:
        tokens = list(word.encode())
        while pairs := self._ranks.keys() & pairwise(tokens):
            best = min(pairs, key=self._ranks.__getitem__)
            tokens = _merge(tokens, best, 256 + self._ranks[best])
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens; bytes that are no UTF-8 become question marks in diamonds."""
        return b"".join(self._bytes[token] for token in tokens).decode(errors="replace")

    @cached_property
    def _bytes(self) -> list[bytes]:
        pieces = [bytes([b]) for b in range(256)]
        for a, b in self.merges:
            pieces.append(pieces[a] + pieces[b])
        return pieces


def train(text: str, vocabulary: int) -> Tokenizer:
    """Returns the tokenizer with so many tokens whose every merge joins the pair that is then most frequent."""
    counts = Counter(_WORD.findall(text))
    words = [(list(word.encode()), count) for word, count in sorted(counts.items())]
    merges: list[Pair] = []
    while 256 + len(merges) < vocabulary:
        best = _most_frequent(words)
        words = [(_merge(tokens, best, 256 + len(merges)), count) for tokens, count in words]
        words = [(tokens, count) for tokens, count in words if len(tokens) > 1]
        merges.append(best)
    return Tokenizer(tuple(merges))


def _most_frequent(words: list[tuple[list[int], int]]) -> Pair:
    pairs: Counter[Pair] = Counter()
    for tokens, count in words:
        for pair in pairwise(tokens):
            pairs[pair] += count
    return max(pairs, key=lambda pair: (pairs[pair], pair))


def _merge(tokens: list[int], pair: Pair, new: int) -> list[int]:
    """Returns the tokens with each occurrence of the pair, from the left, replaced by a new token."""
    merged: list[int] = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] = new
        else:
            merged.append(token)
    return merged
