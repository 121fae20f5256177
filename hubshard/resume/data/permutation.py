"""A pseudo-random permutation of 0..n-1 that needs no memory and no random number generator: "feistel-1".

The order of a shuffled epoch must be the same on every machine, for years, whatever torch, numpy or Python is
installed; and a rank that starts in the middle of an epoch of 10^12 samples must not build the whole of it first. So
the index at a position is computed from the position alone:

1. The key of an epoch is SHA-512 of the text ``hubshard feistel-1 {seed} {epoch}`` (decimal), read as eight
   little-endian unsigned 64-bit integers, one for each round.
2. A position x is written as the pair (l, r) = divmod(x, b) in a box of a x b places, where a = ceil(sqrt(n)) and
   b = ceil(n / a): at least n places, and fewer than n + a.
3. Eight Feistel rounds, each undone by a subtraction and so one to one: ``l = (l + f(key + r)) mod a`` in the even
   rounds, ``r = (r + f(key + l)) mod b`` in the odd ones. f is the output function of SplitMix64 (Steele, Lea and
   Flood, 2014), in 64 bits.
4. x' = l * b + r. As long as x' >= n, it goes through the rounds again (cycle walking), which keeps it one to one.

Feistel networks over such boxes, and cycle walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002).
This shuffles; it hides nothing, and among fewer than ten samples some orders are likelier than others. Any change of
these steps needs a new id: the states of runs name the one that they were begun with.
"""

from __future__ import annotations

import hashlib
import struct
from math import isqrt

__all__ = ["FEISTEL", "permuted"]

FEISTEL = "feistel-1"
"""The id of the permutation that this module computes."""

_MASK = (1 << 64) - 1


def permuted(num_samples: int, seed: int, epoch: int, start: int, stop: int) -> list[int]:
    """The indices at the positions ``start`` to ``stop`` (half-open) of the shuffled order of 0..num_samples-1."""
    keys = _keys(seed, epoch)
    left = isqrt(num_samples - 1) + 1 if num_samples > 1 else 1
    right = -(-num_samples // left)
    indices = []
    for position in range(start, stop):
        index = _through_the_rounds(position, left, right, keys)
        while index >= num_samples:
            index = _through_the_rounds(index, left, right, keys)
        indices.append(index)
    return indices


def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return struct.unpack("<8Q", hashlib.sha512(f"hubshard {FEISTEL} {seed} {epoch}".encode()).digest())


def _through_the_rounds(position: int, left: int, right: int, keys: tuple[int, ...]) -> int:
    # the two halves change their roles at each round; the number of rounds is even, so they end where they began
    changed, other = divmod(position, right)
    size, other_size = left, right
    for key in keys:
        mixed = (key + other) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        changed, other = other, (changed + (mixed ^ (mixed >> 31))) % size
        size, other_size = other_size, size
    return changed * right + other
