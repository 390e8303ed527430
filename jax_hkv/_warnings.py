"""Warnings, where whoever called the library can see them, and what says that a table is a part."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax

from jax_hkv._compat import is_inside

Result = TypeVar("Result")

_OWN_FRAMES = ("jax_hkv.", "flax.", "jax.", "optax.", "equinox.", "contextlib")


class _Spread(NamedTuple):
    """Over how many devices tables are spread, and along which axes."""

    devices: int
    axes: tuple[str, ...]


_ONE = _Spread(1, ())
_SPREAD: contextvars.ContextVar[_Spread] = contextvars.ContextVar("spread", default=_ONE)


def warn(message: str) -> None:
    """Where the caller of this library (and of Flax, which may stand between) can see it."""
    level, frame = 1, sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN_FRAMES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def on_parts(
    fn: Callable[..., Result], devices: int, axes: tuple[str, ...]
) -> Callable[..., Result]:
    """A function whose tables are parts of tables over so many devices, along these axes."""

    @functools.wraps(fn)
    def on_part(*args: Any) -> Result:
        token = _SPREAD.set(_Spread(devices, axes))
        try:
            return fn(*args)
        finally:
            _SPREAD.reset(token)

    return on_part


def warn_of_part(call: str, remedy: str | None = None) -> None:
    """Warns where an operation on ids is given a device's part: it meets what lies there alone."""
    twin = "insert_or_assign" if call == "insert_and_evict" else call
    _warn_of_part(call, remedy or f"call jax_hkv.sharding.{twin}(..., axis_name=)")


@contextlib.contextmanager
def lookup_of_layer(call: str, *, is_right: bool) -> Iterator[None]:
    """Warns, in the name of a layer or a collection that has no axis name, once for its lookup.

    `is_right`: it reads a replica, and there is nothing to warn of.
    """
    if not is_right:
        _warn_of_part(call, "give axis_name=")
    token = _SPREAD.set(_ONE)
    try:
        yield
    finally:
        _SPREAD.reset(token)


def agree(replicas: bool | int, axes: tuple[str, ...], spread: tuple[str, ...]) -> bool:
    """Whether an exchange along axes meets the owners of keys of a table that is spread so."""
    named, known = ([name for name in each if not _is_of_one(name)] for each in (axes, spread))
    return sorted(named) == sorted(known) if replicas is True else named == known


def _is_of_one(axis: str) -> bool:
    """Whether an axis has one device, so that it matters not who names it."""
    return is_inside((axis,)) and jax.lax.axis_size(axis) == 1


def warn_of_axes(call: str, replicas: bool | int, axes: tuple[str, ...]) -> None:
    """Warns where keys go along other axes than those that a Placement spreads tables over."""
    devices, spread = _SPREAD.get()
    # Whoever asks for an axis that is not bound is told of that.
    if devices > 1 and is_inside(axes) and not agree(replicas, axes, spread):
        warn(
            f"{call}: axis_name names the axes {axes}, but the Placement of this function spreads "
            f"tables over {spread}: keys are sought on devices that do not have them, and the same "
            "key may get an entry on several (of replicas some do not see all keys); name the same "
            "axes in both, in the same order, or, where the devices along other axes hold equal "
            "tables, silence this with warnings.filterwarnings"
        )


def _warn_of_part(call: str, remedy: str) -> None:
    devices = _SPREAD.get().devices
    if devices > 1:
        warn(
            f"{call}: inside a function of Placement a table is one device's part of {devices}, of "
            "which alone its entries are read or changed, by that device's own ids: "
            f"{remedy}, or, where a part is meant, silence this with warnings.filterwarnings"
        )
