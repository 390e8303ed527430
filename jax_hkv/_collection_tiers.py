"""The tables of a collection before stores in the host's memory, see :mod:`jax_hkv.tiered`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from jax_hkv import _tier_checks, _tier_parts, _tiers
from jax_hkv._bag_parts import as_count, check_bags_of_parts, whole_bags
from jax_hkv._compat import of_one_device
from jax_hkv._keys import Keys, would_cut
from jax_hkv._placement import Placement
from jax_hkv._tier_types import Admits, PrefetchCounts, Tiers
from jax_hkv.features import Jagged, Padded, as_splits
from jax_hkv.table import Table


class HasKeys(Protocol):
    """What is needed here of a :class:`jax_hkv.Collection`, which imports this module."""

    @property
    def groups(self) -> Any: ...
    def keys(self, inputs: Mapping[str, Any], *, partial: bool) -> dict[str, tuple[Keys, Any]]: ...
    def check_tables(self, call: str, tables: Mapping[str, Any]) -> None: ...
    def check_inputs(
        self, call: str, inputs: Mapping[str, Any], partial: bool, argument: str = "inputs"
    ) -> None: ...
    def __hash__(self) -> int: ...


_Found = Mapping[str, tuple[Tiers, PrefetchCounts]]
Prefetched = tuple[dict[str, Table], dict[str, Any], dict[str, PrefetchCounts]]


@dataclasses.dataclass(frozen=True)
class KeysOf:
    """The keys of a batch, of some physical tables."""

    collection: HasKeys
    names: tuple[str, ...]
    micro_batches: int

    def __call__(self, batch: Any) -> dict[str, tuple[Keys, Any]]:
        whole = _of_all_parts("Collection.prefetch", batch, self.micro_batches)
        keys = self.collection.keys(whole, partial=True)
        return {name: own for name, own in keys.items() if name in self.names}


def prefetch(
    collection: HasKeys,
    tables: Mapping[str, Table],
    stores: Mapping[str, Any],
    inputs: Mapping[str, Any],
    *,
    partial: bool,
    admits: Admits,
    placement: Placement | None,
    micro_batches: int,
) -> Prefetched:
    call = "Collection.prefetch"
    micro_batches = as_count(call, micro_batches)
    tiers, kinds = _tiers_of(collection, call, tables, stores), _kinds_of(collection, admits)
    if placement is not None:
        placement = _tier_parts.check_placement(call, placement)
        collection.check_inputs(call, inputs, partial)
        keys_of = KeysOf(collection, tuple(stores), micro_batches)
        found = _tier_parts.prefetch(call, placement, tiers, kinds, keys_of, dict(inputs))
    else:
        keys = _keys_at_once(collection, call, inputs, partial, micro_batches)
        batches = _batches(call, tiers, keys)
        found = _tiers.prefetch(
            {name: (tiers[name], *batch, kinds[name]) for name, batch in batches.items()}
        )
    return _put_back(tables, stores, found)


def step_and_prefetch(
    collection: HasKeys,
    step: Callable[[dict[str, Table]], tuple[Mapping[str, Table], Any]],
    tables: Mapping[str, Table],
    stores: Mapping[str, Any],
    inputs: Mapping[str, Any],
    coming: Mapping[str, Any] | None,
    *,
    partial: bool,
    placement: Placement | None,
    micro_batches: int,
) -> tuple[Prefetched, Any]:
    call = "Collection.step_and_prefetch"
    micro_batches = as_count(call, micro_batches)
    _tier_checks.check_step(call, step, coming)
    tiers, kinds = _tiers_of(collection, call, tables, stores), _kinds_of(collection, Admits.ALL)
    for own in tiers.values():
        _tier_checks.check_outside(call, own.cache, "tables", "Collection.prefetch")
    after: dict[str, Table] = {}

    def stepped(caches: Mapping[str, Table]) -> tuple[Mapping[str, Table], Any]:
        returned, result = _tier_checks.pair_of(call, step({**tables, **caches}), "the tables")
        collection.check_tables(f"{call}, behind step", returned)
        for name, table in tables.items():
            _tier_checks.after_step(f"{call} of {name!r}", table, (returned[name], None))
        after.update(returned)
        return after, result

    given = {"inputs": inputs} | ({} if coming is None else {"coming": coming})
    if placement is not None:
        placement = _tier_parts.check_placement(call, placement)
        for name, batch in given.items():
            collection.check_inputs(call, batch, partial, name)
        if coming is None:
            _tier_parts.checked_parts(call, placement, tiers)
            found, result = {}, stepped({})[1]
        else:
            keys_of = KeysOf(collection, tuple(stores), micro_batches)
            both = dict(inputs), dict(coming)
            found, result = _tier_parts.step_and_prefetch(
                call, placement, tiers, kinds, keys_of, both, stepped
            )
    else:
        keys = {
            name: _batches(
                call, tiers, _keys_at_once(collection, call, batch, partial, micro_batches, name)
            )
            for name, batch in given.items()
        }
        kept, wanted = keys["inputs"], keys.get("coming", {})
        found, result = _tiers.step_and_prefetch(
            {
                name: (tiers[name], batch, kept.get(name), kinds[name])
                for name, batch in wanted.items()
            },
            of_one_device(stepped),
        )
    return _put_back(after, stores, found), result


def _kinds_of(collection: HasKeys, admits: Admits) -> dict[str, Admits]:
    """By group: into tables that are not trained nothing is inserted."""
    of_frozen = Admits.KNOWN if admits is Admits.ALL else admits
    return {
        group.name: of_frozen if group.optimizer is None else admits for group in collection.groups
    }


def _tiers_of(
    collection: HasKeys, call: str, tables: Mapping[str, Table], stores: Mapping[str, Any]
) -> dict[str, Tiers]:
    collection.check_tables(call, tables)
    names = [group.name for group in collection.groups]
    if not isinstance(stores, Mapping) or not set(stores) <= set(names):
        given = sorted(stores) if isinstance(stores, Mapping) else type(stores).__name__
        raise ValueError(
            f"{call}: stores must be a dict by names of some of the physical tables {names}, got "
            f"{given}: make them by {{name: tiered.create_store(tables[name], "
            "capacity) for name in ...}"
        )
    return {name: Tiers(tables[name], stores[name]) for name in stores}


def _batches(
    call: str, tiers: Mapping[str, Tiers], keys: Mapping[str, Any]
) -> dict[str, _tiers.Batch]:
    """The keys of tables with stores, and the tables checked, before one is used up."""
    names = [name for name in keys if name in tiers]
    for name in names:
        _tier_checks.check(f"{call} of {name!r}", tiers[name])
    batches = {name: _tier_checks.batch_of(call, tiers[name].cache, *keys[name]) for name in names}
    _tier_checks.check_apart(
        call,
        {f"tables[{name!r}]": tiers[name].cache for name in names}
        | {f"stores[{name!r}]": tiers[name].store for name in names},
    )
    return batches


def _put_back(tables: Mapping[str, Table], stores: Mapping[str, Any], found: _Found) -> Prefetched:
    return (
        dict(tables) | {name: own.cache for name, (own, _) in found.items()},
        dict(stores) | {name: own.store for name, (own, _) in found.items()},
        {name: counts for name, (_, counts) in found.items()},
    )


def _keys_at_once(
    collection: HasKeys,
    call: str,
    inputs: Mapping[str, Any],
    partial: bool,
    micro_batches: int,
    name: str = "inputs",
) -> dict[str, Any]:
    """As `Collection.keys`, by one program unless there is something to be named.

    A compiled program looks at shapes and types alone: what else is to be checked is here.
    """
    collection.check_inputs(call, inputs, partial, name)
    kinds = (jax.Array, np.ndarray, Keys, Jagged, Padded)
    leaves = jax.tree.leaves(dict(inputs))
    is_plain = all(isinstance(each, kinds) for each in inputs.values()) and all(
        isinstance(leaf, jax.Array)
        or (type(leaf) is np.ndarray and leaf.dtype.isnative and not would_cut(leaf))
        for leaf in leaves
    )
    if not is_plain:
        return collection.keys(_of_all_parts(call, inputs, micro_batches), partial=partial)
    for feature, each in inputs.items():
        own = each.ids if isinstance(each, Padded) else each
        if isinstance(own, Jagged) and own.ids.ndim == 1:
            if micro_batches > 1:
                check_bags_of_parts(call, repr(feature), each, micro_batches)
            else:
                as_splits(f"{call} of {feature!r}", "row_splits", own.row_splits, own.ids.shape[0])
    names = tuple(group.name for group in collection.groups)
    return _keys_program(KeysOf(collection, names, micro_batches))(dict(inputs))


def _of_all_parts(call: str, inputs: Mapping[str, Any], micro_batches: int) -> dict[str, Any]:
    """Inputs of a step in micro-batches, with bags of them all."""
    return {
        name: whole_bags(call, repr(name), each, micro_batches) for name, each in inputs.items()
    }


@functools.lru_cache(maxsize=64)
def _keys_program(keys_of: KeysOf) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return jax.jit(keys_of)
