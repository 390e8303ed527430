"""What a step or an evaluation on many devices returns, in the form that its caller sees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hkv._checks import as_counts, check_function
from jax_hkv.table import Entries

_LATER = "state and batch go to what this returns"


def with_leading_axes(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises where it returns a single number."""
    check_function("Placement.run", "fn", fn, "of (state, *batch) to arrays", _LATER)

    @functools.wraps(fn)
    def checked(*args: Any) -> Any:
        outputs = fn(*args)
        if any(jnp.ndim(leaf) == 0 for leaf in jax.tree.leaves(outputs)):
            raise ValueError(
                "Placement.run: the function must return arrays with a leading axis, which those "
                "of the devices are put along, got a single number: return it as x[None]"
            )
        return outputs

    return checked


def with_pair(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """The function, which raises where it returns no plain pair."""
    check_function("Placement.step", "fn", fn, "of (state, *batch) to (state, report)", _LATER)

    @functools.wraps(fn)
    def checked(*args: Any) -> Any:
        outputs = fn(*args)
        if not isinstance(outputs, tuple) or len(outputs) != 2 or hasattr(outputs, "_fields"):
            raise TypeError(
                "Placement.step: the function must return a plain tuple (state, report), got "
                f"{type(outputs).__name__}: return state, None where there is nothing to report"
            )
        return outputs

    return checked


def with_entries_apart(fn: Callable[..., Any], forms: list[Any]) -> Callable[..., Any]:
    """The function, with Entries of its report as a third output; notes the form of the report.

    Entries that have been gathered already, with a leading axis for the devices, stay in it.
    """

    def is_own(node: Any) -> bool:
        return isinstance(node, Entries) and node.keys.ndim == 1

    @functools.wraps(fn)
    def apart(*args: Any) -> Any:
        state, report = fn(*args)
        leaves, form = jax.tree.flatten(report, is_leaf=is_own)
        forms.append(form)
        entries = [
            leaf._replace(count=jnp.reshape(leaf.count, (1,))) for leaf in leaves if is_own(leaf)
        ]
        return state, [None if is_own(leaf) else leaf for leaf in leaves], entries

    return apart


def together(report: list[Any], entries: list[Any], form: Any) -> Any:
    """The report of which :func:`with_entries_apart` noted the form."""
    left = iter(entries)
    return form.unflatten([next(left) if leaf is None else leaf for leaf in report])


def with_one_report(outputs: tuple[Any, Any]) -> tuple[Any, Any]:
    """Of what pmap stacked the state, and the report of one device; Entries of all."""

    def is_stacked(node: Any) -> bool:
        return isinstance(node, Entries) and node.keys.ndim == 2

    state, report = outputs
    report = jax.tree.map(
        lambda leaf: leaf if is_stacked(leaf) else first(leaf), report, is_leaf=is_stacked
    )
    return state, report


def first(leaf: jax.Array) -> jax.Array:
    """Of what pmap stacked that of one device."""
    return leaf.addressable_shards[0].data[0]  # other devices have the same: none is asked


class ExchangeOverflow(OverflowError):
    """Keys of a strict exchange found no room.

    Attributes:
      outputs: what the step returned. In its state the table is as before, but for its clock; other
        lookups of the step have inserted their keys, but no table, parameter or optimizer was
        updated.
    """

    outputs: Any = None


def check_overflow(overflow: Any, where: str = "the table", outputs: Any = None) -> None:
    """Raises if keys of a strict exchange found no room; outside ``jit``.

    Args:
      overflow: of the result of an operation of this module: how many keys did.
      where: the table, for the error.
      outputs: of the step, for the error: the state that was given may have been used up.

    Raises:
      ExchangeOverflow: naming the table, the number of keys and the remedy. The table is as before
        the lookup, but for its clock.
      TypeError: if it is no count.

    Example:
      >>> check_overflow(0)
    """
    count = int(np.sum(np.asarray(as_counts("sharding.check_overflow", "overflow", overflow))))
    if count:
        error = ExchangeOverflow(
            f"sharding: {count} keys of a batch for {where} found no room in its strict exchange, "
            "so that nothing was looked up, written or erased: raise distinct= or slack= of its "
            "jax_hkv.sharding.Exchange, or leave strict out, for a second round with room for all"
        )
        error.outputs = outputs
        raise error
