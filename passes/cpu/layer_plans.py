"""The programs between the matmuls of a layer that decodes on the host, as values; `layer` makes them. Nothing here
loads MLIR.

    Norm      a root-mean-square norm, of a token at a time
    Rope      norms and rotations of queries and keys, which it puts where they are read, as values; a head at a time
    Attend    attention over the keys and values of a cache, of a query head at a time
    Chain     programs one behind the other, in the threads that called it

The first three take numbers as matmuls do (`task`), but have pieces alone, `m` of them; `words` are those of a task
behind `task.WORDS`.

A chain's argument is an array of 64-bit words: the number of steps; for each a function, where its task begins in this
array, in bytes, and the numbers that the task has; then the tasks.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 16  # f32 elements of a vector, as in `vector_ops`
STEP_WORDS = 3  # of a step in a chain


@dataclass(frozen=True)
class Norm:
    """y = x / sqrt(mean of x^2 + eps) * (gain + shift), a token a piece.

    hidden     numbers of a token, a multiple of 16
    residual   whether the result is added to another tensor's numbers
    """

    act: str
    hidden: int
    eps: float
    shift: float = 0.0
    residual: bool = False

    words = ("gain", "residual")


CACHED = ("key_batch", "key_head", "value_batch", "value_head")
"""Bytes from one sequence, and from one head, to the next, of keys and values in a cache; places are side by side."""


@dataclass(frozen=True)
class Rope:
    """Rotated queries and keys, and values as they are, a head a piece: of a token first its queries, then its keys,
    then its values. Keys and values go into a cache, from a place on.

    columns   of a head, a multiple of 32
    normed    whether a head of queries or keys has a norm before it is rotated, with `eps` and `shift`
    """

    act: str
    queries: int
    keys: int
    columns: int
    normed: bool = False
    eps: float = 0.0
    shift: float = 0.0

    words = (
        *("q", "q_row", "k", "k_row", "v", "v_row"),  # arrays, and bytes from one token to the next
        *("q_out", "k_out", "v_out", *CACHED, "tokens"),  # of the first new place; tokens of a sequence
        *("cos", "sin", "q_gain", "k_gain"),
    )

    @property
    def heads(self) -> int:
        """The pieces of a token."""
        return self.queries + 2 * self.keys


@dataclass(frozen=True)
class Attend:
    """softmax(scale * q k) v, a query head a piece: that of a token after that of the token before.

    columns   of a head, a multiple of 16
    masked    whether a byte for every place says whether it is looked at; a token that looks at none gets zeros
    """

    act: str
    queries: int
    keys: int
    columns: int
    scale: float
    masked: bool

    words = (
        *("keys", "values", *CACHED),
        *("length", "tokens"),  # places, and tokens of a sequence
        *("mask", "mask_batch", "mask_row"),
    )

    @staticmethod
    def scratch_bytes(pieces: int, length: int) -> int:
        """Returns the bytes that scores of so many places take."""
        return pieces * -(-length // LANES) * 4 * LANES


@dataclass(frozen=True)
class Chain:
    """Programs one behind the other."""


LayerPlan = Norm | Rope | Attend | Chain
