"""Pins: what a step's lookups have brought, its later ones do not evict before the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jax_hkv import _trees
from jax_hkv._keys import form_of
from jax_hkv.table import InsertResult, Table, is_one_result


def pinned_slots(
    call: str, pinned: Any, *, over_devices: bool = False
) -> Int32[Array, " p"] | None:
    """The slots that a caller gives, or those of results, of which nothing is to be evicted."""
    if pinned is None:
        return None
    is_one = isinstance(pinned, Mapping) or hasattr(pinned, "dtype") or is_one_result(pinned)
    results: list[Any] = []
    slots: list[jax.Array] = []
    for each in [pinned] if is_one else pinned:
        if getattr(each, "dtype", None) == np.int32:
            slots.append(jnp.asarray(each))
        elif hasattr(each, "route") if over_devices else isinstance(each, InsertResult):
            results.append(each)
        else:
            own = "sharding.find_or_insert" if over_devices else "find_or_insert"
            raise TypeError(
                f"{call}: pinned must be what earlier lookups of this table returned, results of "
                f"{own} or of {own}_pooled, or slots of it as int32, or a list of these, got "
                f"{form_of(each)}: no other call brings what waits for an update"
            )
    return slots_of(results, *slots)


def slots_of(results: Iterable[Any], *more: jax.Array | None) -> Int32[Array, " p"] | None:
    """The slots that results of lookups hold, on this device, and more of them; None: of none."""
    found = [slots for slots in more if slots is not None]
    for result in results:
        route = getattr(result, "route", None)
        if route is None:
            found.append(result.unique_slots)
        else:  # what this device did as an owner, in one round or the other
            of_rounds = (route.owner and route.owner.unique_slots, route.wide_slots)
            found += [slots for slots in of_rounds if slots is not None]
    if not found:
        return None
    flat = [slots.reshape(-1) for slots in found]
    return flat[0] if len(flat) == 1 else jnp.concatenate(flat)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecordedTable(Table):
    """A table in a training step, of which so many lookups have been recorded, which hold slots.

    They are a part of it because it goes, and is carried, through all of Flax's transformations.
    """

    pins: tuple[jax.Array, ...]  # pyright: ignore[reportGeneralTypeIssues]
    lookups: int = _trees.static()


def recorded(table: Table, lookups: int, pins: tuple[jax.Array, ...]) -> Table:
    """The table with that record; a plain one without any. What is no table stays what it is."""
    if not isinstance(table, Table):
        return table
    fields = {field.name: getattr(table, field.name) for field in dataclasses.fields(Table)}
    if not lookups and not pins:
        return Table(**fields) if isinstance(table, RecordedTable) else table
    return RecordedTable(**fields, pins=pins, lookups=lookups)


def record_of(table: Table) -> tuple[int, tuple[jax.Array, ...]]:
    """How many lookups have been recorded, and slots that later ones are to leave alone."""
    return (table.lookups, table.pins) if isinstance(table, RecordedTable) else (0, ())
