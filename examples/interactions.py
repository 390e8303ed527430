"""Interaction lists, who took what in order of time: from a file, or made up on the spot.

A line is a user and an item, any two texts with a tab, a comma or blanks between; files may be
plain, .gz or .xz. The made-up list has a planted truth: users and items are points of a small
space, and a user takes the items that are near, the popular ones more often.
"""

from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from criteo import UserError, read_lines

SEPARATORS = (b"\t", b",", None)  # the first of them that a line holds; None is blanks
KEY_BYTES = 8  # two of 10^8 texts get one key with a chance of 0.03 %
SHOWN_BYTES = 40  # of a bad line, in the error
# The made-up list: 200,000 lines. Whoever knows the points finds the last item of a user among ten
# in 29 % of cases; the ten most popular items hold it in 3 %.
USERS, ITEMS = 10_000, 4_000
FEWEST, MOST = 5, 36  # items of a user
POINT_DIM = 8  # of the space that users and items are points of
NEARNESS = 10.0  # logit of an item at the user's own point, above one at a right angle
POPULARITY_EXPONENT, POPULARITY_SHIFT = 0.7, 10.0  # logit of rank r: -exponent log(r + shift)
USERS_AT_A_TIME = 500  # bounds the memory for logits


class Batch(NamedTuple):
    """Interactions of a step.

    Attributes:
        users: uint64[n].
        items: uint64[n].
        log_frequency: float32[n], the logarithm of each item's share of all interactions.
        valid: bool[n], False for padding.
    """

    users: np.ndarray
    items: np.ndarray
    log_frequency: np.ndarray
    valid: np.ndarray


class Interactions(NamedTuple):
    """Who took what, in order of time, each item of a user once.

    Attributes:
        users: uint64[n].
        items: uint64[n].
    """

    users: np.ndarray
    items: np.ndarray

    def batches(self, size: int, epochs: int, seed: int) -> Iterator[Batch]:
        """Yields everything `epochs` times in random orders, `size` at a time."""
        draw, count = np.random.default_rng(seed), len(self.users)
        _, item, counts = np.unique(self.items, return_inverse=True, return_counts=True)
        log_frequency = np.log(counts / count).astype(np.float32)[item]
        for _ in range(epochs):
            order = draw.permutation(count)
            for first in range(0, count, size):
                own = np.resize(order[first : first + size], size)
                valid = np.arange(size) < count - first
                yield Batch(self.users[own], self.items[own], log_frequency[own], valid)


def read(path: Path) -> Interactions:
    """Reads a file.

    Raises:
        UserError: if the file is missing or empty, or naming the line where one is bad.
    """
    users, items = array("Q"), array("Q")
    for number, line in enumerate(read_lines(path), 1):
        if isinstance(line, UserError):
            raise UserError(f"{path}:{number}: {line}")
        fields = _fields(line)
        if len(fields) != 2 or not all(fields):
            shown = repr(line[:SHOWN_BYTES].decode("utf-8", "backslashreplace"))
            raise UserError(f"{path}:{number}: expected a user and an item, got {shown}")
        users.append(key_of(fields[0]))
        items.append(key_of(fields[1]))
    if not users:
        raise UserError(f"{path}: the file is empty, expected lines of a user and an item")
    return _first_times(np.array(users, np.uint64), np.array(items, np.uint64))


def key_of(text: bytes) -> int:
    """Returns the 64-bit key of any text: a hash, so no vocabulary has to be known."""
    return int.from_bytes(blake2b(text, digest_size=KEY_BYTES).digest(), "little")


def make_up(seed: int) -> Interactions:
    """Returns the made-up list, which depends on the seed alone."""
    draw = np.random.default_rng(seed)
    items = _points(draw, ITEMS)
    popularity = -POPULARITY_EXPONENT * np.log(np.arange(ITEMS) + POPULARITY_SHIFT)
    takers, taken = [], []
    for first in range(0, USERS, USERS_AT_A_TIME):
        logits = NEARNESS * _points(draw, USERS_AT_A_TIME) @ items.T + popularity
        # The largest of logits plus Gumbel noise are a draw without replacement.
        order = np.argsort(-(logits + draw.gumbel(size=logits.shape)), axis=1)[:, :MOST]
        is_taken = np.arange(MOST) < draw.integers(FEWEST, MOST, (USERS_AT_A_TIME, 1))
        takers.append(first + np.nonzero(is_taken)[0])
        taken.append(order[is_taken])
    time = draw.permutation(sum(map(len, taken)))
    user_keys, item_keys = _keys(b"user", USERS), _keys(b"item", ITEMS)
    return Interactions(
        user_keys[np.concatenate(takers)[time]], item_keys[np.concatenate(taken)[time]]
    )


def _fields(line: bytes) -> list[bytes]:
    separator = next(s for s in SEPARATORS if s is None or s in line)
    return [field.strip() for field in line.split(separator)]


def _first_times(users: np.ndarray, items: np.ndarray) -> Interactions:
    """Drops what a user takes again."""
    user, item = (np.unique(keys, return_inverse=True)[1] for keys in (users, items))
    first = np.unique(user * (item.max() + 1) + item, return_index=True)[1]
    first.sort()
    return Interactions(users[first], items[first])


def _points(draw: np.random.Generator, count: int) -> np.ndarray:
    points = draw.standard_normal((count, POINT_DIM), np.float32)
    return points / np.linalg.norm(points, axis=1, keepdims=True)


def _keys(kind: bytes, count: int) -> np.ndarray:
    return np.array([key_of(b"%s %d" % (kind, number)) for number in range(count)], np.uint64)
