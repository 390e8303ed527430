"""What two tables that are one are made of, and how entries move between them.

See :mod:`jax_hkv.tiered`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from jax_hkv import _checks, _entries, _inserts, operations
from jax_hkv import index as _index
from jax_hkv._compat import is_traced
from jax_hkv._entries import Exported
from jax_hkv._feature_bags import bags_of
from jax_hkv._keys import Keys, check_fixed, check_keys
from jax_hkv._placement import check_not_used_up
from jax_hkv._warnings import warn_of_part
from jax_hkv.features import Jagged, Padded
from jax_hkv.index import Policy, Status
from jax_hkv.table import Counts, Entries, EraseResult, Table, check_one_device, forms_of
from jax_hkv.table import check_table as check_is_table

# The others refuse a key whose score is low, whatever the store has of it.
POLICIES = (Policy.LRU, Policy.LFU, Policy.EPOCH_LRU)

_LEAST = 256  # entries moved at a time, so that few programs serve all numbers of them
_ADDED = ("restored", "inserted", "evicted", "dropped")  # of counts, by a second prefetch

Batch = tuple[Any, jax.Array | None]  # keys, and their mask
Name = TypeVar("Name")


class Tiers(NamedTuple):
    """Two tables that are one: what stands in the cache counts, whatever the store has of it.

    Attributes:
      cache: the smaller one, which is trained.
      store: the larger one, of :func:`create_store`. Of a cache over devices there is one for each
        of this process's parts.
    """

    cache: Table
    store: Any


class PrefetchCounts(NamedTuple):
    """What became of the distinct keys of a batch; ``int32`` scalars.

    Attributes:
      unique: distinct keys, the sum of the next four.
      hits: of them, those that the cache had.
      restored: those that the store had, as far as they found room in the cache.
      inserted: those that neither had; they have their first rows.
      refused: those that found no room in the cache, where the keys of the batch had filled their
        buckets. A training step gives them their first rows, or trains them for nothing: take a
        larger cache, or smaller batches.
      evicted: entries that moved from the cache to the store.
      dropped: entries that found no room in the store, or were evicted there. They are lost, but
        for those that the cache has, too: take a larger store.
      absent: of other keys, which were to be kept (`keep` of :func:`admit`), those that the cache
        did not have.
    """

    unique: Int32[Array, ""]
    hits: Int32[Array, ""]
    restored: Int32[Array, ""]
    inserted: Int32[Array, ""]
    refused: Int32[Array, ""]
    evicted: Int32[Array, ""]
    dropped: Int32[Array, ""]
    absent: Int32[Array, ""]


class Admitted(NamedTuple):
    """What :func:`admit` tells the store.

    Attributes:
      keys: that were not in the cache, the first `count`.
      count: of them.
      evicted: the entries that made room.
      time: the score of this batch, where scores are times and it is a lookup; else None.
      counts: of the distinct keys of the batch.
      absent: keys that were to be kept, and are not there.
    """

    keys: Keys
    count: Int32[Array, ""]
    evicted: Entries
    time: Keys | None
    counts: Counts
    absent: Int32[Array, ""]


class Fetched(NamedTuple):
    """What :func:`exchange` gives back: entries for the cache, and what became of the batch."""

    entries: Entries | None
    counts: PrefetchCounts


def in_place(fn: Callable[..., Any]) -> Callable[..., Any]:
    """One program that changes its first argument's arrays, inlined into a caller's that traces."""
    compiled = jax.jit(fn, donate_argnums=0)

    @functools.wraps(fn)
    def call(table: Table, *args: Any) -> Any:
        return (fn if is_traced(table.values) else compiled)(table, *args)

    return call


def _admit(
    cache: Table,
    given: Any,
    mask: jax.Array | None,
    kept: tuple[Any, jax.Array | None] | None,
    *,
    is_lookup: bool,
) -> tuple[Table, Admitted]:
    keys, valid = _checks.flat_batch(given, mask)
    no_counts = Keys(jnp.zeros_like(keys.words)) if cache.policy.counts else None
    pinned, absent, found = None, jnp.int32(0), jnp.int32(0)
    if kept is not None:
        others, are_meant = _checks.flat_batch(*kept)
        index, pinned = _index.find(cache.index, others, are_meant)
        cache = dataclasses.replace(cache, index=index)
        is_absent = (pinned < 0) & _checks.flat_mask(are_meant, pinned.shape)
        absent, found = (_index.unique(others, own).count[0] for own in (is_absent, pinned >= 0))
    cache, inserted = _inserts.insert_rows(
        cache, keys, valid, no_counts, None, True, pinned=pinned, is_ticked=not is_lookup
    )
    assert inserted.evicted is not None
    counts = _inserts.counts_of(inserted.groups, inserted.upserted.unique_status)
    # The new ones side by side.
    new = _index.unique(Keys(inserted.groups.keys), inserted.upserted.new_slots >= 0)
    time = _time(cache) if is_lookup else None
    if not is_lookup:  # those that are kept are of the batch
        counts = counts._replace(unique=counts.unique + found, hits=counts.hits + found)
    return cache, Admitted(Keys(new.keys), counts.inserted, inserted.evicted, time, counts, absent)


@in_place
def admit(
    cache: Table, given: Any, mask: Any, kept: tuple[Any, jax.Array | None] | None = None
) -> tuple[Table, Admitted]:
    """Places for the keys of a batch, which are looked up now, and none for those that are kept."""
    return _admit(cache, given, mask, kept, is_lookup=True)


@in_place
def admit_known(cache: Table, given: Any, behind: jax.Array, near: jax.Array) -> Any:
    """Places for what the store has of a batch. No time passes, and nothing has been looked up."""
    return _admit(cache, given, behind, (given, near), is_lookup=False)


def _time(table: Table) -> Keys | None:
    """The score of the latest batch, where it is the same for all of its keys."""
    if table.policy is Policy.LRU:
        return Keys(table.clock)
    if table.policy is Policy.EPOCH_LRU:
        return Keys(jnp.stack([table.clock[0], table.epoch[0]]))
    return None


def exchange(
    stores: Sequence[Table], admitted: Sequence[Admitted]
) -> tuple[list[Table], list[Fetched]]:
    """What tables ask of their stores; it waits for an answer when all stores have been asked."""
    asked = [_asked(*pair) for pair in zip(stores, admitted, strict=True)]
    return [store for store, _, _ in asked], [
        _fetched(own, entries, dropped)
        for own, (_, entries, dropped) in zip(admitted, asked, strict=True)
    ]


def _asked(store: Table, admitted: Admitted) -> tuple[Table, Entries | None, Any]:
    """A store, what it has of the keys, and how many entries found no room in it.

    What moves between two devices is as much as there is, and nothing where there is nothing.
    """
    evicted, asked = admitted.evicted, (admitted.keys, admitted.count, admitted.time)
    entries, dropped = None, np.int32(0)
    wants = leaves = True
    if not (is_traced(store.values) or is_traced(admitted.count)):
        wants, leaves = jax.device_get((admitted.count, evicted.count))
        if wants:
            asked = jax.device_put((in_front(asked[0], wants), *asked[1:]), device_of(store))
        if leaves:
            evicted = jax.device_put(in_front(evicted, leaves), device_of(store))
    if store.policy is Policy.EPOCH_LRU and admitted.time is not None:
        store = _at_epoch(store, admitted.time)
    if wants:
        store, entries = _read(store, *asked)
    if leaves:
        store, dropped = _keep(store, evicted)
    return store, entries, dropped


def _at_epoch(store: Table, time: Keys) -> Table:
    """A store in the epoch of its cache."""
    words = time.words
    if not is_traced(words) and not is_traced(store.values):
        words = jax.device_put(words, device_of(store))
    return dataclasses.replace(store, index=dataclasses.replace(store.index, epoch=words[1:]))


def _fetched(admitted: Admitted, entries: Entries | None, dropped: Any) -> Fetched:
    own = admitted.counts
    restored: Any = np.int32(0) if entries is None else entries.count
    if not is_traced(own.unique) and not is_traced(restored):
        restored, dropped = np.asarray(restored), np.asarray(dropped)
        entries = in_front(entries, restored) if restored else None
        restored, dropped = jax.device_put((restored, dropped), own.unique.device)
    counts = PrefetchCounts(
        unique=own.unique,
        hits=own.hits,
        restored=restored,
        inserted=own.inserted - restored,
        refused=own.refused,
        evicted=own.evicted,
        dropped=dropped,
        absent=admitted.absent,
    )
    return Fetched(entries, counts)


@in_place
def _read(store: Table, keys: Keys, count: jax.Array, time: Keys | None) -> tuple[Table, Entries]:
    """The entries of keys in front, with the score of a batch that has looked them up."""
    is_meant = jnp.arange(keys.shape[0], dtype=jnp.int32) < count
    store, entries, _ = _inserts.export_keys(store, keys, is_meant)
    if time is not None:
        words = jnp.broadcast_to(time.words, entries.keys.words.shape)
        entries = entries._replace(scores=Keys(words))
    return store, entries


@in_place
def _keep(store: Table, evicted: Entries) -> tuple[Table, jax.Array]:
    store, kept = _imported(store, evicted, admits=True)
    return store, kept.counts.evicted + kept.counts.refused


def restore(cache: Table, fetched: Fetched) -> Table:
    if fetched.entries is None:
        return cache
    return _give_back(cache, from_store(cache, fetched.entries))


def from_store(cache: Table, tree: Any) -> Any:
    """What a store gave, on the cache's device, and committed to it only if the cache is.

    Otherwise the cache would be committed from there on, and steps that take it compiled anew.
    """
    if is_traced(cache.values) or any(map(is_traced, jax.tree.leaves(tree))):
        return tree
    if cache.values.committed:
        return jax.device_put(tree, device_of(cache))
    return jax.tree.map(np.asarray, tree)


@in_place
def _give_back(cache: Table, entries: Entries) -> Table:
    return _imported(cache, entries, admits=False)[0]


def _imported(table: Table, entries: Entries, *, admits: bool) -> tuple[Table, Any]:
    is_meant = jnp.arange(entries.keys.shape[0], dtype=jnp.int32) < entries.count
    return _inserts.import_rows(
        table, *entries[:-1], is_meant, evicted=False, is_ticked=True, admits=admits
    )


def in_front(tree: Any, count: Any) -> Any:
    """What stands in front of arrays, so many elements or some more; scalars as they are."""
    most = max((leaf.shape[0] for leaf in jax.tree.leaves(tree) if leaf.ndim), default=0)
    room = min(max(_LEAST, 1 << (int(count) - 1).bit_length()), most)
    return tree if room == most else _cut(tree, room)


@functools.partial(jax.jit, static_argnums=1)
def _cut(tree: Any, room: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[:room] if leaf.ndim else leaf, tree)


def prefetch(
    batches: Mapping[Name, tuple[Tiers, Any, jax.Array | None]], inserts: bool
) -> dict[Name, tuple[Tiers, PrefetchCounts]]:
    """Keys of several tables go to their caches, all of them before the first one is waited for."""
    stores, places = {}, {}
    for name, (tiers, given, mask) in batches.items():
        if inserts:
            places[name] = admit(tiers.cache, given, mask)
        else:
            tiers, behind, near = known(tiers, given, mask)
            places[name] = admit_known(tiers.cache, given, behind, near)
        stores[name] = tiers.store
    caches = {name: cache for name, (cache, _) in places.items()}
    return _exchanged(caches, stores, {name: admitted for name, (_, admitted) in places.items()})


def _exchanged(
    caches: Mapping[Name, Table], stores: Mapping[Name, Table], admitted: Mapping[Name, Admitted]
) -> dict[Name, tuple[Tiers, PrefetchCounts]]:
    names = list(admitted)
    after, fetched = exchange([stores[name] for name in names], [admitted[name] for name in names])
    return {
        name: (Tiers(restore(caches[name], back), store), back.counts)
        for name, store, back in zip(names, after, fetched, strict=True)
    }


def step_and_prefetch(
    batches: Mapping[Name, tuple[Tiers, Batch, Batch | None]],
    step: Callable[[dict[Name, Table]], tuple[Mapping[Name, Table], Any]],
) -> tuple[dict[Name, tuple[Tiers, PrefetchCounts]], Any]:
    """A step, before which keys of the next one get places, and rows while it is done.

    Args:
      batches: tiers, the keys of the next step, and those of this one, which stay where they are.
      step: from the caches to the caches and a result.
    """
    caches, admitted = {}, {}
    for name, (tiers, coming, kept) in batches.items():
        caches[name], admitted[name] = admit(tiers.cache, *coming, kept)
    caches, result = step(caches)
    stores = {name: tiers.store for name, (tiers, _, _) in batches.items()}
    after = _exchanged(caches, stores, admitted)
    refused = jax.device_get({name: counts.refused for name, (_, counts) in after.items()})
    again = {name: (after[name][0], *batches[name][1]) for name in refused if refused[name]}
    for name, (tiers, more) in prefetch(again, True).items():
        after[name] = tiers, _both(after[name][1], more)
    return after, result


def _both(first: PrefetchCounts, more: PrefetchCounts) -> PrefetchCounts:
    """The counts of a batch that was prefetched twice."""
    sums = {name: getattr(first, name) + getattr(more, name) for name in _ADDED}
    return first._replace(refused=more.refused, **sums)


def known(
    tiers: Tiers, given: Any, mask: jax.Array | None
) -> tuple[Tiers, Bool[Array, "*batch"], Bool[Array, "*batch"]]:
    """Which keys of a batch the store alone has, and which the cache has."""
    cache, near = operations.contains(tiers.cache, given, valid=mask)
    asked = ask_store(tiers, given, mask, near)
    if asked is None:
        return tiers, jnp.zeros_like(near), near
    store, keys, valid, groups = asked
    store, behind = operations.contains(store, keys, valid=valid)
    behind = by_position(groups, from_store(cache, behind), near)
    return Tiers(cache, store), behind, near


def ask_store(
    tiers: Tiers, given: Any, mask: jax.Array | None, found: jax.Array
) -> tuple[Table, Keys, jax.Array, _index.Groups] | None:
    """What a store is to be asked of a batch that a cache was asked.

    Returns:
      The store, the distinct keys that were not found, on the store's device, which of them are
      meant, and whose they are; None if there is nothing to be asked.
    """
    groups = _missing(given, mask, found)
    words, count = groups.keys, groups.count
    if not is_traced(tiers.store.values) and not is_traced(count):
        if not int(count[0]):
            return None
        words = in_front(words, count[0])
        words, count = jax.device_put((words, count), device_of(tiers.store))
    return tiers.store, Keys(words), jnp.arange(words.shape[0], dtype=jnp.int32) < count, groups


def put_near(cache: Table, tree: Any) -> Any:
    """What a caller gave, on the cache's device."""
    if is_traced(cache.values):
        return tree
    device = device_of(cache)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.devices() == {device}:
            return leaf
        return jax.device_put(leaf, device) if cache.values.committed else np.asarray(leaf)

    return jax.tree.map(one, tree)


@jax.jit
def _missing(given: Any, mask: jax.Array | None, found: jax.Array) -> _index.Groups:
    keys, valid = _checks.flat_batch(given, mask)
    asked = ~found.reshape(-1) if valid is None else valid & ~found.reshape(-1)
    return _index.unique(keys, asked)


@jax.jit
def by_position(groups: _index.Groups, found: jax.Array, like: jax.Array) -> jax.Array:
    """What was found of distinct keys, in the form of a batch."""
    return _index.by_position(groups, found, False).reshape(like.shape)


def erase(
    tiers: Tiers, given: Any, mask: jax.Array | None
) -> tuple[Tiers, tuple[jax.Array, jax.Array]]:
    """Keys removed from both tables, and what each of them says of every position."""
    after = []
    for table in tiers:
        after.append(_erased(table, *put_near(table, (given, mask))))
    (cache, near), (store, behind) = after
    return Tiers(cache, store), (near, behind)


@in_place
def _erased(table: Table, given: Any, mask: jax.Array | None) -> tuple[Table, jax.Array]:
    table, result = _inserts.erase(table, *_checks.flat_batch(given, mask))
    return table, result.status


@jax.jit
def either(given: Any, mask: jax.Array | None, statuses: list[jax.Array]) -> EraseResult:
    """What came of a batch's removal out of several tables."""
    keys, valid = _checks.flat_batch(given, mask)
    gone = functools.reduce(jnp.logical_or, [status == Status.FOUND for status in statuses])
    unique, hits = (_index.unique(keys, chosen).count[0] for chosen in (valid, gone))
    status = jnp.where(gone, jnp.int32(Status.FOUND), statuses[0]).reshape(given.shape)
    return EraseResult(status, Counts(unique, hits, *(jnp.zeros_like(hits),) * 3))


# --- Between steps -------------------------------------------------------------------------------


def keys_of_cache_alone(tiers: Tiers) -> np.ndarray:
    """The keys, uint64, that the cache has and the store has not."""
    keys = _entries.keys_of(tiers.cache)
    return keys[~is_in(tiers.store, keys)]


def is_in(table: Table, keys: np.ndarray) -> np.ndarray:
    """Which of some keys, uint64 on the host, a table has."""
    device = device_of(table)
    found = [
        np.asarray(operations.contains(table, *jax.device_put((part,), device), valid=valid)[1])
        for part, valid in _entries.key_chunks(keys)
    ]
    return np.concatenate([*found, np.zeros(0, bool)])[: len(keys)]


def export_entries(tiers: Tiers, min_score: int | None, changed_since: Exported | None) -> Exported:
    """The entries of both tables of one device, each once."""
    cache, store = tiers
    near = _entries.export_entries(cache, min_score=min_score, changed_since=changed_since)
    if changed_since is not None:
        min_score = _entries.first_change([cache], changed_since)
    behind = _entries.export_entries(store, min_score=min_score)
    behind = _entries.chosen(behind, ~is_in(cache, behind.keys))
    both = _entries.join_entries([behind, near])
    return both._replace(shared=near.shared, clock=near.clock, epoch=near.epoch)


def import_entries(tiers: Tiers, own: Exported, latest: int) -> tuple[Tiers, tuple[Counts, Counts]]:
    """Tiers of one device with entries, each where its key is, and new ones in the store."""
    is_near = is_in(tiers.cache, own.keys)
    near, behind = (_entries.chosen(own, rows) for rows in (is_near, ~is_near))
    cache, overwritten = _entries.fill(tiers.cache, near, latest)
    store, counts = _entries.fill(tiers.store, behind, latest)
    for keys, valid in _entries.key_chunks(near.keys):  # whose copies may be younger now
        store, _ = _erased(store, *put_near(store, (keys, valid)))
    return Tiers(cache, store), (overwritten, counts)


# --- Checks --------------------------------------------------------------------------------------


def batch_of(
    call: str,
    table: Table | None,
    keys: Any,
    valid: Any,
    *,
    bags: bool = False,
    names: tuple[str, str] = ("keys", "valid"),
) -> tuple[Any, jax.Array | None]:
    """Keys and mask, checked, on the table's device, before a table is used up."""
    warn_of_part(call, "call tiered.prefetch outside of steps, with placement=")
    if bags and isinstance(keys, (Jagged, Padded)):
        check_no_mask(call, keys, valid, names)
        keys, valid = in_bags(call, keys)
    given = check_keys(call, names[0], keys)
    check_fixed(call, names[0], given.shape)
    mask = _checks.as_mask(call, names[1], valid, given.shape)
    return (given, mask) if table is None else put_near(table, (given, mask))


def check_no_mask(
    call: str, bags: Jagged | Padded, valid: Any, names: tuple[str, str] = ("keys", "valid")
) -> None:
    if valid is not None:
        keys, mask = names
        raise TypeError(
            f"{call}: {mask} must be None where {keys} are {type(bags).__name__}, which say "
            f"themselves what is padding, got {type(valid).__name__}"
        )


def in_bags(call: str, bags: Jagged | Padded) -> tuple[Keys, jax.Array | None]:
    """The keys of bags, and which are no padding."""
    batch, _ = bags_of(call, bags, "sum")
    return batch.keys, batch.valid


def check_apart(call: str, tables: Mapping[str, Table]) -> None:
    """Raises if two of some tables, which will be used up, are one."""
    owners: dict[int, str] = {}
    for name, table in tables.items():
        for leaf in jax.tree.leaves(table):
            other = owners.setdefault(id(leaf), name)
            if other != name and not is_traced(leaf):
                raise ValueError(
                    f"{call}: {name} must be another table than {other}, got one with the same "
                    "arrays: make a store for each by tiered.create_store(cache, capacity)"
                )


def check(call: str, tiers: Any) -> None:
    if not isinstance(tiers, Tiers):
        raise TypeError(
            f"{call}: tiers must be jax_hkv.tiered.Tiers, got {type(tiers).__name__}: make them by "
            "Tiers(cache, tiered.create_store(cache, capacity)); operations return (tiers, result)"
        )
    for name, table in tiers._asdict().items():
        check_table(call, f"tiers.{name}", table)
    cache, store = tiers
    for what, near, behind in (
        ("rows and optimizer rows", rows_of(cache), rows_of(store)),
        ("a policy", cache.policy.name, store.policy.name),
        ("a namespace", cache.index.namespace, store.index.namespace),
    ):
        if near != behind:
            raise ValueError(
                f"{call}: tiers.store must have {what} like the cache's, {near}, got {behind}: "
                "make it by tiered.create_store(cache, capacity), after opt.init(cache)"
            )
    if store.capacity < cache.capacity:
        raise ValueError(
            f"{call}: tiers.store must have room for what the cache gives up, {cache.capacity} "
            f"entries at least, got {store.capacity}: the order is Tiers(cache, store)"
        )
    check_apart(call, {"tiers.cache": cache, "tiers.store": store})


def check_outside(call: str, cache: Table) -> None:
    if is_traced(cache.values):
        raise TypeError(
            f"{call}: tiers.cache must be a table outside of jit, got one that is traced: call "
            "tiered.prefetch there, which is a part of the program, or this one between steps"
        )


def after_step(call: str, cache: Table, returned: Any) -> tuple[Table, Any]:
    """The cache that a step has returned, and its result, checked."""
    table, result = pair_of(call, returned, "the cache")
    name = "the cache that step returns"
    check_is_table(call, table, name)
    check_not_used_up(call, jax.tree.leaves(table), name)
    wanted, got = ((rows_of(own), own.capacity) for own in (cache, table))
    if wanted != got:
        raise ValueError(f"{call}: {name} must be that which it was given, {wanted}, got {got}")
    return table, result


def pair_of(call: str, returned: Any, tables: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"{call}: step must return {tables} and a result, got {type(returned).__name__}: "
            "return None beside them if there is none"
        )
    return returned


def check_table(call: str, argument: str, table: Any) -> None:
    check_is_table(call, table, argument)
    check_not_used_up(call, jax.tree.leaves(table), argument)
    check_one_device(call, table)
    devices = () if is_traced(table.values) else getattr(table.values, "devices", tuple)()
    if not is_traced(table.values) and len(devices) != 1:
        raise ValueError(
            f"{call}: {argument} must lie on one device, got one that {len(devices)} hold: put it "
            "on one by jax.device_put(table, device)"
        )
    if table.policy not in POLICIES:
        raise ValueError(
            f"{call}: {argument} must have a policy that admits every newcomer, "
            f"{', '.join(policy.name for policy in POLICIES)}, got {table.policy.name}: under it "
            "the cache would refuse ids that the store knows"
        )
    if table.admission is not None:
        raise ValueError(
            f"{call}: {argument} must have no admission rule, got {table.admission.rule}, which "
            "would turn ids away that the store knows: create the table without one"
        )


def rows_of(table: Table) -> str:
    return forms_of(table.values, table.optimizer.rows if table.optimizer else {})


def device_of(table: Table) -> Any:
    (device,) = table.values.devices()
    return device
