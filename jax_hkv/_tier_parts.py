"""Tiers over devices: each device's part of the cache has a store of its own.

The keys of all devices go to their owners; from then on each part is a table of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jax_hkv import _checks, _placement, _tier_checks, _tiers
from jax_hkv import index as _index
from jax_hkv._bag_parts import are_amiss, are_bags, has_axes
from jax_hkv._checks import check_not_used_up
from jax_hkv._compat import is_traced, of_one_device, vary
from jax_hkv._exchange import Exchange
from jax_hkv._hops import Items, outward, plan_of
from jax_hkv._keys import Keys
from jax_hkv._placed import cut, is_saved, is_table, of_checked_batch
from jax_hkv._placement import Placement
from jax_hkv._tier_types import Admits, PrefetchCounts, Tiers
from jax_hkv.features import Jagged, Padded, check_whose_bags
from jax_hkv.table import Table, check_table


@dataclasses.dataclass(frozen=True)
class OneTable:
    """The keys of a batch of :func:`batch_of`, of one table, for errors of a call."""

    call: str
    micro_batches: int

    def __call__(self, batch: Any) -> dict[str, tuple[Any, Any]]:
        keys = batch["keys"]
        if isinstance(keys, (Jagged, Padded)):
            return {"keys": _tier_checks.in_bags(self.call, keys, self.micro_batches)}
        return {"keys": (keys, batch["valid"])}


def batch_of(
    call: str,
    placement: Placement,
    tiers: Any,
    keys: Any,
    valid: Any,
    names: tuple[str, str] = ("keys", "valid"),
) -> dict[str, Any]:
    """Keys of all devices, checked as those of one; those of bags where they are taken apart."""
    if not isinstance(tiers, Tiers):
        _tier_checks.check(call, tiers)
    check_table(call, tiers.cache)
    if isinstance(keys, (Jagged, Padded)):
        check_whose_bags(call, names[0], keys, tiers.cache.index.namespace)
        _tier_checks.check_no_mask(call, keys, valid, names)
    else:
        _tier_checks.batch_of(call, tiers.cache, keys, valid, names=names, is_placed=True)
    placement.check_named(call, dict(zip(names, (keys, valid), strict=True)))
    return {"keys": keys, "valid": valid}


class KeysOf(Protocol):
    """What knows the keys of a batch by the names of tables; two that are equal know the same."""

    @property
    def micro_batches(self) -> int: ...

    def __call__(self, batch: Any) -> Mapping[str, tuple[Any, jax.Array | None]]: ...

    def __hash__(self) -> int: ...


def check_placement(call: str, placement: Any, may_be_absent: bool = False) -> Placement:
    _placement.check_placement(call, placement, ", or None for a cache of one device")
    if isinstance(placement.mesh, AbstractMesh) and not may_be_absent:
        raise TypeError(
            f"{call}: placement must have devices, got one of an abstract mesh: give that whose "
            "devices the cache lies on. Exports alone read the tiers of other devices, as NumPy "
            "arrays, jax.device_get(tiers)"
        )
    if placement.mesh.size != placement.devices:
        raise ValueError(
            f"{call}: placement must have one device for each part of a table, got "
            f"{placement.mesh.size} devices for {placement.devices} parts: spread the table over "
            "all axes of the mesh"
        )
    return placement


def caches_of(call: str, placement: Placement, cache: Any) -> list[Table]:
    """The parts of a table over devices, as tables of one device each."""
    check_table(call, cache)
    if is_traced(cache.values):
        raise TypeError(
            f"{call}: tiers.cache must be a table over devices outside of jit, got one that is "
            "traced: call it between steps"
        )
    check_not_used_up(call, jax.tree.leaves(cache), "cache", _tier_checks.LOST)
    if not isinstance(cache.values, jax.Array):
        raise TypeError(
            f"{call}: a cache must lie on the devices of the placement, got one of "
            f"{type(cache.values).__name__}: put it there, jax.device_put(cache, "
            "jax.sharding.NamedSharding(placement.mesh, "
            "jax.sharding.PartitionSpec(placement.axes)))"
        )
    placement.check_outside(call, cache)
    _check_split(call, cache)
    return placement.shards(cache)


def shapes_of(call: str, placement: Placement, cache: Table) -> list[Table]:
    """As :func:`caches_of`, of shapes; of devices that are not here, all parts."""
    _check_split(call, cache)
    parts = cut(call, cache, placement)
    is_here = not isinstance(placement.mesh, AbstractMesh)
    return [parts[part] for part in placement.local_parts] if is_here else parts


def _check_split(call: str, cache: Table) -> None:
    if cache.replicas:
        raise ValueError(
            f"{call}: the cache must be split by keys, got {cache.name!r}, of replicas, which "
            "would differ, since a key's row is brought to one device: create it without "
            f"replicas={cache.replicas}"
        )


def _stores_of(call: str, stores: Any, count: int, where: str) -> list[Table]:
    if isinstance(stores, Table) or not isinstance(stores, Sequence) or len(stores) != count:
        got = f"{len(stores)}" if isinstance(stores, (tuple, list)) else type(stores).__name__
        raise TypeError(
            f"{call}: tiers.store must have a table for each of the {count} parts that the "
            f"placement has {where}, got {got}: make them by "
            "tiered.create_store(cache, capacity, placement=placement)"
        )
    return list(stores)


def parts_of(call: str, placement: Placement, tiers: Any) -> list[Tiers]:
    """Tiers of one device each, checked."""
    if not isinstance(tiers, Tiers):
        _tier_checks.check(call, tiers)
    stores = _stores_of(call, tiers.store, len(placement.local_parts), "in this process")
    return _pairs(call, caches_of(call, placement, tiers.cache), stores)


def _pairs(
    call: str, caches: Sequence[Table], stores: Sequence[Table], may_be_saved: bool = False
) -> list[Tiers]:
    parts = [Tiers(*pair) for pair in zip(caches, stores, strict=True)]
    for part in parts:
        _tier_checks.check(call, part, may_be_saved)
    return parts


def between_steps(call: str, tiers: Any, placement: Placement | None) -> list[Tiers]:
    """Tiers of one device each, checked: those that were given, or their parts."""
    if placement is None:
        _tier_checks.check(call, tiers)
        return [tiers]
    return parts_of(call, check_placement(call, placement), tiers)


def to_read(call: str, tiers: Any, placement: Placement | None) -> list[Tiers]:
    """As :func:`between_steps`, also of saved ones, whose devices need not be there."""
    if isinstance(tiers, Tiers):
        _checks.check_arrays(call, jax.tree.leaves(tiers), "tiers")
    if not (isinstance(tiers, Tiers) and is_table(tiers.cache) and is_saved(tiers.cache)):
        return between_steps(call, tiers, placement)
    if placement is None:
        return _pairs(call, [tiers.cache], [tiers.store], may_be_saved=True)
    placement = check_placement(call, placement, may_be_absent=True)
    stores = _stores_of(call, tiers.store, placement.devices, "in all")
    _check_split(call, tiers.cache)
    return _pairs(call, cut(call, tiers.cache, placement), stores, may_be_saved=True)


def joined(placement: Placement, parts: Sequence[Tiers]) -> Tiers:
    """The inverse of :func:`parts_of`."""
    stores: Any = tuple(part.store for part in parts)
    return Tiers(placement.join([part.cache for part in parts]), stores)


def whole_of(placement: Placement | None, parts: Sequence[Tiers]) -> Tiers:
    """The inverse of :func:`between_steps`."""
    return parts[0] if placement is None else joined(placement, parts)


@of_one_device
def owned(
    call: str, placement: Placement, keys_of: KeysOf, *batches: Any
) -> list[dict[str, list[tuple[Keys, jax.Array]]]]:
    """The distinct keys of batches with their owners: by table, of each part keys and their mask.

    Args:
      call: for errors.
      placement: of the tables.
      keys_of: what finds them in a batch.
      batches: of `Placement.put`, as of a step. All are under way before the first is waited for.
    """
    for batch in batches if placement._must_put else ():
        placement.check_put(call, batch)
    own = _owning(placement, keys_of)
    with of_checked_batch():  # what is amiss is in what comes back
        every = [own((), batch) for batch in batches]
    return [_received(call, placement, *found) for found in every]


def _received(
    call: str,
    placement: Placement,
    words: Mapping[str, jax.Array],
    counts: Mapping[str, jax.Array],
    amiss: Mapping[str, None],
    are_wrong: jax.Array,
) -> dict[str, list[tuple[Keys, jax.Array]]]:
    parts = {name: placement.shards((words[name], counts[name])) for name in words}
    wrong, found = jax.device_get(
        (
            placement.shards(are_wrong)[0],
            {name: [count for _, count in own] for name, own in parts.items()},
        )
    )
    for name in itertools.compress(sorted(amiss), wrong[0]):
        raise ValueError(
            f"{call}: row_splits of {name!r} must be those of a Jagged of each device, which start "
            "at 0, do not decrease and end within its positions, got others: of a batch that was "
            "put for a step in micro-batches say how many here too, micro_batches="
        )
    after = {}
    for name in words:
        own = [int(np.max(count)) for count in found[name]]
        after[name] = [
            _in_front(part, count, max(own))
            for (part, _), count in zip(parts[name], own, strict=True)
        ]
    return after


def _in_front(words: jax.Array, count: int, room: int) -> tuple[Keys, jax.Array]:
    """The keys of a part, and which of them are meant; as many places as all parts want."""
    words = _tiers.in_front(words, room)
    return Keys(words), jax.device_put(np.arange(words.shape[0]) < count, *words.devices())


@functools.lru_cache(maxsize=64)
def _owning(placement: Placement, keys_of: KeysOf) -> Any:
    exchange = Exchange(placement.axes)

    def own(nothing: Any, batch: Any) -> Any:
        words, counts = {}, {}
        for name, (keys, valid) in keys_of(batch).items():
            flat, mask = _checks.flat_batch(keys, valid)
            count = flat.shape[0]
            plan = plan_of(exchange, count, merges=True, complete=True)
            items = vary(Items(flat, _checks.flat_mask(mask, (count,))), exchange.axes)
            _, arrived, _ = outward(plan, items)
            groups = _index.unique(arrived.keys, arrived.valid)
            words[name], counts[name] = groups.keys, groups.count
        return words, counts, *amiss_of(batch)

    def amiss_of(batch: Any) -> tuple[dict[str, None], jax.Array]:
        """Of bags by their names, in order, whether a device's splits are not what they should be.

        The names are in the structure of what comes back.
        """
        nodes = jax.tree_util.tree_leaves_with_path(batch, is_leaf=are_bags)
        amiss = {
            jax.tree_util.keystr(path, simple=True, separator="."): are_amiss(
                node, keys_of.micro_batches
            )
            for path, node in nodes
            if are_bags(node) and has_axes(node)
        }
        names = dict.fromkeys(sorted(amiss))
        flags = vary(jnp.array([amiss[name] for name in names], jnp.int32), exchange.axes)
        # Every process is to know, so that all raise.
        return names, jax.lax.pmax(flags, exchange.axes)[None] if names else flags[None]

    return placement.run(own)


def prefetch(
    call: str,
    placement: Placement,
    tiers: Mapping[str, Tiers],
    kinds: Mapping[str, Admits],
    keys_of: KeysOf,
    batch: Any,
) -> dict[str, tuple[Tiers, PrefetchCounts]]:
    """As :func:`jax_hkv._tiers.prefetch`, of tables over devices by their names."""
    parts = checked_parts(call, placement, tiers)
    (keys,) = owned(call, placement, keys_of, batch)
    batches = {
        (name, number): (part, *keys[name][number], kinds[name])
        for name, number, part in _each(parts, keys)
    }
    return _joined(placement, _tiers.prefetch(batches))


def step_and_prefetch(
    call: str,
    placement: Placement,
    tiers: Mapping[str, Tiers],
    kinds: Mapping[str, Admits],
    keys_of: KeysOf,
    batches: tuple[Any, Any],
    step: Callable[[dict[str, Table]], tuple[Mapping[str, Table], Any]],
) -> tuple[dict[str, tuple[Tiers, PrefetchCounts]], Any]:
    """As :func:`jax_hkv._tiers.step_and_prefetch`, of tables over devices by their names.

    Args:
      call: for errors.
      placement: of the tables.
      tiers: by name.
      kinds: by name, see there.
      keys_of: what finds keys in a batch.
      batches: that of the step, and the one after it, of `Placement.put`.
      step: from the whole caches by name to such and a result.
    """
    parts = checked_parts(call, placement, tiers)
    kept, keys = owned(call, placement, keys_of, *batches)
    given = {
        (name, number): (
            *(part, keys[name][number], kept[name][number] if name in kept else None),
            kinds[name],
        )
        for name, number, part in _each(parts, keys)
    }

    def step_parts(caches: dict[tuple[str, int], Table]) -> Any:
        joined = {
            name: placement.join([caches[own] for own in given if own[0] == name]) for name in keys
        }
        caches.clear()  # with "pmap" these are copies
        whole: Mapping[str, Table] = {}
        try:
            whole, result = step(joined)
            after = {name: caches_of(call, placement, whole[name]) for name in keys}
        except BaseException:
            _tiers.use_up(joined, [whole[name] for name in joined if name in whole])
            raise
        return {(name, number): after[name][number] for name, number in given}, result

    after, result = _tiers.step_and_prefetch(given, step_parts)
    return _joined(placement, after), result


def checked_parts(
    call: str, placement: Placement, tiers: Mapping[str, Tiers]
) -> dict[str, list[Tiers]]:
    parts = {name: parts_of(call, placement, own) for name, own in tiers.items()}
    _tier_checks.check_apart(
        call,
        {
            f"store {number} of {name!r}": part.store
            for name, own in parts.items()
            for number, part in enumerate(own)
        },
    )
    return parts


def _each(parts: Mapping[str, list[Tiers]], names: Iterable[str]) -> Iterator[Any]:
    """Names, numbers and tiers of the parts of some tables."""
    for name in names:
        for number, part in enumerate(parts[name]):
            yield name, number, part


def _joined(placement: Placement, after: Mapping[tuple[str, int], Any]) -> dict[str, Any]:
    """By table what there is of its parts."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for name, _ in after):
        own = [each for (table, _), each in after.items() if table == name]
        found[name] = (
            joined(placement, [part for part, _ in own]),
            total([counts for _, counts in own]),
        )
    return found


def total(counts: Sequence[Any]) -> Any:
    """The sums of counts of one kind, which lie on several devices."""
    return jax.tree.map(lambda *each: jnp.int32(sum(map(int, each))), *jax.device_get(counts))
