"""Who owns a key (docs/semantics.md, section 12), in NumPy: devices, and what is sent to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from oracle import GOLDEN, Array, hash_keys, high64, mix, rank_within


class Route(NamedTuple):
    """The positions sent to each peer, the places they went to, and how many each peer has."""

    sent: Array
    places: Array
    counts: Array


def owner_of(keys: Array, devices: int) -> Array:
    """The device of each key: int64[n]."""
    return high64(mix(hash_keys(keys) + GOLDEN + GOLDEN), devices).astype(np.int64)


def route(keys: Array, valid: Array, devices: int, inner: int, p: int, c: int) -> Route:
    """One hop of an exchange; keys are 64-bit words."""
    positions = np.flatnonzero(valid)
    peers = owner_of(keys[positions], devices) // inner % p
    ranks = rank_within(peers)
    fits = ranks < c
    sent = np.full((p, c), -1, np.int32)
    sent[peers[fits], ranks[fits]] = positions[fits]
    places = np.full(len(keys), -1, np.int32)
    places[positions[fits]] = peers[fits] * c + ranks[fits]
    return Route(sent, places, np.bincount(peers, minlength=p).astype(np.int32))
