"""Warnings, where whoever called the library can see them, and what says that a table is a part."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

Result = TypeVar("Result")

_OWN_FRAMES = ("jax_hkv.", "flax.", "jax.", "contextlib")
_PARTS: contextvars.ContextVar[int] = contextvars.ContextVar("parts", default=1)


def warn(message: str) -> None:
    """Where the caller of this library (and of Flax, which may stand between) can see it."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN_FRAMES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def on_parts(fn: Callable[..., Result], devices: int) -> Callable[..., Result]:
    """A function whose tables are parts of tables over so many devices."""

    @functools.wraps(fn)
    def on_part(*args: Any) -> Result:
        token = _PARTS.set(devices)
        try:
            return fn(*args)
        finally:
            _PARTS.reset(token)

    return on_part


def warn_of_part(call: str, remedy: str | None = None) -> None:
    """Warns where an operation on ids is given a device's part: it meets what lies there alone."""
    twin = "insert_or_assign" if call == "insert_and_evict" else call
    _warn_of_part(call, remedy or f"call jax_hkv.sharding.{twin}(..., axis_name=)")


@contextlib.contextmanager
def lookup_of_layer(call: str) -> Iterator[None]:
    """Warns, in the name of a layer or a collection that has no axis name, once for its lookup."""
    _warn_of_part(call, "give axis_name=")
    token = _PARTS.set(1)
    try:
        yield
    finally:
        _PARTS.reset(token)


def _warn_of_part(call: str, remedy: str) -> None:
    devices = _PARTS.get()
    if devices > 1:
        warn(
            f"{call}: inside a function of Placement a table is one device's part of {devices}, of "
            "which alone its entries are read or changed, by that device's own ids: "
            f"{remedy}, or, where every device holds the whole table or a part is meant, silence "
            "this with warnings.filterwarnings"
        )
