"""A table on the accelerator before a larger one in the host's memory.

What the small table, the cache, gives up goes to the large one, the store, with its score and
optimizer rows, and comes back when its key does. So the two train as one table of the store's
capacity does, with the same bits in every row, as long as a batch finds room in the cache and all
entries in the store.

    tiers = hkv.tiered.Tiers(cache, hkv.tiered.create_store(cache, 10**8))
    for keys, labels in batches:
        tiers, counts = hkv.tiered.prefetch(tiers, keys)       # all of them are in the cache now
        cache, loss = train_step(tiers.cache, keys, labels)    # as if there were no store
        tiers = tiers._replace(cache=cache)

The store has an index of its own. Of a table over devices each part has a store (`placement=`).
docs/guide.md, "A second tier", has the loops of Flax's layers, and the one in which the host works
while the accelerator trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, overload

import jax
from jaxtyping import Array, Bool

from jax_hkv import _checks, _tier_checks, _tier_parts, _tiers, operations
from jax_hkv._bag_parts import as_count
from jax_hkv._compat import of_one_device
from jax_hkv._mapped import Aux, mapped
from jax_hkv._options import Fill
from jax_hkv._placed import is_shape
from jax_hkv._placement import Placement
from jax_hkv._tier_entries import export_chunks, export_entries, import_entries
from jax_hkv._tier_types import Admits, PrefetchCounts, Tiers
from jax_hkv._tiers import Admitted, Fetched
from jax_hkv.index import LANES, MAX_SLOTS
from jax_hkv.table import (
    EraseResult,
    FindResult,
    ScoredFindResult,
    Table,
    buckets_of,
    forms_of,
)

__all__ = [
    "Admitted",
    "Fetched",
    "PrefetchCounts",
    "Tiers",
    "admit",
    "contains",
    "create_store",
    "erase",
    "exchange",
    "export_chunks",
    "export_entries",
    "find",
    "import_entries",
    "map_tables",
    "prefetch",
    "restore",
    "size",
    "step_and_prefetch",
]


Result = TypeVar("Result")


@overload
def create_store(
    table: Table, capacity: int, *, device: Any = ..., placement: None = ...
) -> Table: ...
@overload
def create_store(
    table: Table, capacity: int, *, device: Any = ..., placement: Placement
) -> tuple[Table, ...]: ...


@of_one_device
def create_store(
    table: Table, capacity: int, *, device: Any = None, placement: Placement | None = None
) -> Table | tuple[Table, ...]:
    """An empty table to stand behind another one, in the host's memory.

    Args:
      table: the cache, with its optimizer's rows; it is only read. The store has its settings,
        and rows and optimizer rows like its. It may be the shapes of one, of
        :meth:`Placement.abstract` say.
      capacity: entries, of cache and store together; rounded up to whole buckets of 128. Where all
        are to be kept, buckets want room: one and a half times the expected entries with one
        candidate bucket, 1.1 times with two.
      device: of the store; None: the first one of JAX's backend "cpu".
      placement: of a cache over devices. Each of its parts in this process gets a store, of the
        part of `capacity` that comes to it. The cache is split by keys.

    Returns:
      The store; with a placement, a tuple of them. Of shapes the shapes of that, on `device`, which
        a checkpoint is restored into.

    Raises:
      TypeError, ValueError: naming the argument; also for a table under a policy that refuses
        newcomers (EPOCH_LFU, CUSTOM) or with an admission rule, which would turn ids away that the
        store knows, and for one of replicas.
      RuntimeError: if JAX was told to do without the CPU.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.optim.adam(1e-3).init(hkv.create(1024, 8))
      >>> store = create_store(cache, 100_000)
      >>> store.capacity, store.policy.name, sorted(store.optimizer.rows)
      (100096, 'LRU', ['mu', 'nu'])
    """
    call = "tiered.create_store"
    is_of_shapes, caches, share = is_shape(table), [table], capacity
    if placement is not None:
        placement = _tier_parts.check_placement(call, placement, may_be_absent=is_of_shapes)
        parts_of = _tier_parts.shapes_of if is_of_shapes else _tier_parts.caches_of
        caches = parts_of(call, placement, table)
        most = MAX_SLOTS * placement.devices
        share = -(-_checks.as_integer(call, "capacity", capacity, 1, most) // placement.devices)
    for cache in caches:
        if not is_of_shapes:
            _checks.check_arrays(call, jax.tree.leaves(cache), "table")
        _tier_checks.check_table(call, "table", cache)
    buckets = buckets_of(call, share)
    if buckets * LANES < caches[0].capacity:
        raise ValueError(
            f"{call}: capacity must be that of cache and store together, {table.capacity} at "
            f"least as the cache's, got {capacity}"
        )
    device = _tiers.host(call) if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(
            f"{call}: device must be one of jax.devices() or jax.devices('cpu'), or None for the "
            f"host's CPU, got {type(device).__name__} {device!r}"
        )
    make = _tiers.emptied_shape if is_of_shapes else _tiers.emptied
    stores = tuple(make(cache, buckets, device) for cache in caches)
    return stores[0] if placement is None else stores


# --- Before a step -------------------------------------------------------------------------------


def prefetch(
    tiers: Tiers,
    keys: Any,
    *,
    valid: Any = None,
    insert: bool = True,
    touch: bool = False,
    placement: Placement | None = None,
    micro_batches: int = 1,
) -> tuple[Tiers, PrefetchCounts]:
    """Sees to it that the keys of a batch are in the cache, before a step looks them up there.

    It is :func:`admit`, :func:`exchange` and :func:`restore`, one after the other. For one table
    it would be a `find_or_insert`: new keys get their first rows, and under LRU and EPOCH_LRU
    known ones the time of now. Under LFU it counts nothing: the step that follows does. (For
    ``admit=`` and ``values=`` of that step it is too late: new keys are there already.) Called
    inside of jit it is part of the program, the store on the same device; outside, it waits for
    the device to know how many entries have to move, and moves those.

    Args:
      tiers: which are used up outside of jit, as by a donating step.
      keys: of any shape: Keys, or an integer array; or bags of them, a :class:`jax_hkv.Jagged` or
        :class:`jax_hkv.Padded`.
      valid: ``bool`` of the keys' shape; False masks a position. None: all are valid.
      insert: whether keys that neither table has are inserted. False is for an evaluation through
        a layer or a step that looks into the cache alone: rows come to where it finds them, with
        their scores, no time passes, and unseen keys stay unseen.
      touch: with `insert=False`, whether time passes, and known keys have the time of now, as if
        they had been inserted again: for serving, where the cache is to hold what is asked for.
        (What comes with an old score is what leaves next.) With `insert=True` they have it anyway.
      placement: of a cache over devices, outside of a step; `keys` and `valid` are those of all
        devices then, of `Placement.put`. They go to their owners, whose parts are tables of one
        device from there on. ("pmap" copies the parts twice, "shard_map" does not.)
      micro_batches: of the step that takes the batch: of each of them a :class:`jax_hkv.Jagged` is
        one, as for `Placement.put`.

    Returns:
      The tables, and :class:`PrefetchCounts`, over this process's devices.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if tables were used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2)
      >>> tiers = Tiers(cache, create_store(cache, 1024))
      >>> for ids in np.arange(400, dtype=np.int32).reshape(4, 100):
      ...     tiers, counts = prefetch(tiers, ids)
      >>> int(counts.inserted), int(counts.evicted), size(tiers)
      (100, 100, 400)
      >>> tiers, counts = prefetch(tiers, np.array([5, 6, 1000]), insert=False)
      >>> int(counts.restored), int(counts.inserted), hkv.contains(tiers.cache, ids[:1])[1].tolist()
      (2, 0, [True])
    """
    call = "tiered.prefetch"
    admits = _tier_checks.admits_of(call, insert, touch)
    count = as_count(call, micro_batches)
    if placement is not None:
        placement = _tier_parts.check_placement(call, placement)
        batch = _tier_parts.batch_of(call, placement, tiers, keys, valid)
        own, kinds = {"keys": tiers}, {"keys": admits}
        keys_of = _tier_parts.OneTable(call, count)
        return _tier_parts.prefetch(call, placement, own, kinds, keys_of, batch)["keys"]
    _tier_checks.check(call, tiers)
    given, mask = _tier_checks.batch_of(
        call, tiers.cache, keys, valid, bags=True, micro_batches=count
    )
    return _tiers.prefetch({"keys": (tiers, given, mask, admits)})["keys"]


def step_and_prefetch(
    step: Callable[[Table], tuple[Table, Result]],
    tiers: Tiers,
    keys: Any,
    coming: Any,
    *,
    valid: Any = None,
    coming_valid: Any = None,
    placement: Placement | None = None,
    micro_batches: int = 1,
) -> tuple[Tiers, PrefetchCounts | None, Result]:
    """A step of a batch whose keys are in the cache, while those of the next one come there.

    It is :func:`admit`, the step, :func:`exchange` and :func:`restore`: the host works while the
    device trains. For one table it would be a `find_or_insert` of `coming`, and then the step. Keys
    of `coming` that find no room beside those of `keys`, or that the step displaces, are prefetched
    behind it, and have its time as their score. For use outside of jit, after a :func:`prefetch` of
    the first batch; of a model's tables see :meth:`jax_hkv.Collection.step_and_prefetch`.

    Args:
      step: from the cache to the cache and a result; it is called once, and should wait for
        nothing. If it raises, the tiers are lost, the store too, which lacks what has left the
        cache, and what the step has made of the cache (in nnx a model): catch inside of it what is
        to be survived, and return the cache (of :class:`jax_hkv.sharding.ExchangeOverflow` that in
        its `outputs`). Without a placement it sees no mesh that is set.
      tiers: which are used up.
      keys: of the step, see :func:`prefetch`; they stay in the cache.
      coming: keys of the next step; None: there is none, and the step alone is done.
      valid: of `keys`, see :func:`prefetch`.
      coming_valid: of `coming`, likewise.
      placement: of a cache over devices. The step takes it whole then, and `keys` and `coming` are
        of `Placement.put`; the device is waited for to know how many keys each owner gets.
      micro_batches: see :func:`prefetch`, of both.

    Returns:
      The tiers; :class:`PrefetchCounts` of `coming`, over this process's devices, where `absent`
      are keys of the step that were not there, which must be none; and the step's result.

    Raises:
      TypeError, ValueError: naming the argument; of what the step returned, behind it.
      RuntimeError: if tables were used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(256, 2)
      >>> tiers = Tiers(cache, create_store(cache, 1024))
      >>> batches = list(np.arange(400, dtype=np.int32).reshape(4, 100))
      >>> tiers, _ = prefetch(tiers, batches[0])
      >>> for keys, coming in zip(batches, [*batches[1:], None]):
      ...     def step(cache):
      ...         cache, found = hkv.find_or_insert(cache, keys)
      ...         return cache, found.counts
      ...     tiers, counts, of_step = step_and_prefetch(step, tiers, keys, coming)
      >>> int(of_step.hits), size(tiers), counts
      (100, 400, None)
    """
    call = "tiered.step_and_prefetch"
    count = as_count(call, micro_batches)
    _tier_checks.check_step(call, step, coming, coming_valid)

    def stepped(tables: Mapping[str, Table]) -> Any:
        cache, result = _tier_checks.after_step(call, tiers.cache, step(tables["keys"]))
        return {"keys": cache}, result

    names = ("coming", "coming_valid")
    if placement is None:
        stepped = of_one_device(stepped)
        _tier_checks.check(call, tiers)
        _tier_checks.check_outside(call, tiers.cache, "tiers.cache", "tiered.prefetch")
        kept = _tier_checks.batch_of(call, tiers.cache, keys, valid, bags=True, micro_batches=count)
    else:
        placement = _tier_parts.check_placement(call, placement)
        batch = _tier_parts.batch_of(call, placement, tiers, keys, valid)
    if coming is None:
        if placement is not None:
            _tier_parts.parts_of(call, placement, tiers)  # which checks them
        tables, result = stepped({"keys": tiers.cache})
        return tiers._replace(cache=tables["keys"]), None, result
    if placement is None:
        given = _tier_checks.batch_of(
            *(call, tiers.cache, coming, coming_valid),
            bags=True,
            names=names,
            micro_batches=count,
        )
        own = {"keys": (tiers, given, kept, Admits.ALL)}
        after, result = _tiers.step_and_prefetch(own, stepped)
    else:
        given = _tier_parts.batch_of(call, placement, tiers, coming, coming_valid, names)
        both = batch, given
        keys_of = _tier_parts.OneTable(call, count)
        after, result = _tier_parts.step_and_prefetch(
            call, placement, {"keys": tiers}, {"keys": Admits.ALL}, keys_of, both, stepped
        )
    tiers, counts = after["keys"]
    return tiers, counts, result


@of_one_device
def admit(
    cache: Table, keys: Any, *, valid: Any = None, keep: Any = None, keep_valid: Any = None
) -> tuple[Table, Admitted]:
    """Gives the keys of a batch places in the cache, those that it does not have with first rows.

    The first third of :func:`prefetch`, on the cache's device. It waits for nothing. From here to
    :func:`restore` the cache has first rows of keys that the store knows, and what it has evicted
    is in neither table: train the batch before, whose keys are to be kept then, and erase, export,
    save and evaluate later.

    Args:
      cache: which is used up outside of jit.
      keys: see :func:`prefetch`.
      valid: see :func:`prefetch`.
      keep: other keys that are in the cache, in the same forms, and stay there: those of the batch
        that is trained before :func:`restore`. Those that are not there are counted as `absent`,
        and would be trained for nothing.
      keep_valid: of `keep`, as `valid` of `keys`.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if the table was used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache, admitted = admit(hkv.create(128, 2), np.array([5, 6, 5], np.int32))
      >>> int(admitted.count), int(admitted.evicted[0].count)
      (2, 0)
    """
    call = "tiered.admit"
    _tier_checks.check_table(call, "cache", cache)
    batch = _tier_checks.batch_of(call, cache, keys, valid, bags=True)
    if keep is None:
        return _tiers.admit(cache, *batch)
    names = ("keep", "keep_valid")
    kept = _tier_checks.batch_of(call, cache, keep, keep_valid, bags=True, names=names)
    return _tiers.admit(cache, *batch, kept)


@of_one_device
def exchange(store: Table, admitted: Admitted) -> tuple[Table, Fetched]:
    """Puts what has left the cache into the store, and reads what the store has of new keys.

    The second third of :func:`prefetch`, on the store's device. Outside of jit it waits for
    `admitted`, and moves as many entries as there are, rounded up to a power of two.

    Args:
      store: which is used up outside of jit.
      admitted: of :func:`admit`.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if the table was used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2)
      >>> store = create_store(cache, 1024)
      >>> for ids in (np.arange(128), np.arange(128, 256)):
      ...     cache, admitted = admit(cache, ids.astype(np.int32))
      ...     store, fetched = exchange(store, admitted)
      ...     cache = restore(cache, fetched)
      >>> int(fetched.counts.evicted), int(hkv.size(store))
      (128, 128)
    """
    call = "tiered.exchange"
    _tier_checks.check_table(call, "store", store)
    if not isinstance(admitted, Admitted):
        raise TypeError(
            f"{call}: admitted must be what tiered.admit returned, got {type(admitted).__name__}: "
            "the order is (store, admitted), and admit returns (cache, admitted)"
        )
    leaving = admitted.evicted[0]
    own, given = _tier_checks.rows_of(store), forms_of(leaving.values, leaving.optimizer)
    if own != given:
        raise ValueError(
            f"{call}: admitted must have entries like the store's, {own}, got {given}: make the "
            "store by tiered.create_store(cache, capacity)"
        )
    if (admitted.time is None) != store.policy.counts:
        raise ValueError(
            f"{call}: admitted must be of a cache under the store's policy, {store.policy.name}, "
            "got one of another: make the store by tiered.create_store(cache, capacity)"
        )
    (store,), (fetched,) = _tiers.exchange([store], [admitted])
    return store, fetched


@of_one_device
def restore(cache: Table, fetched: Fetched) -> Table:
    """Gives the keys that the store knew their rows, scores and optimizer rows.

    The last third of :func:`prefetch`, on the cache's device, before another :func:`admit`.

    Args:
      cache: which is used up outside of jit.
      fetched: of :func:`exchange`.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if the table was used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2)
      >>> cache, admitted = admit(cache, np.array([5], np.int32))
      >>> store, fetched = exchange(create_store(cache, 1024), admitted)
      >>> hkv.find(restore(cache, fetched), np.array([5], np.int32))[1].found.tolist()
      [True]
    """
    call = "tiered.restore"
    _tier_checks.check_table(call, "cache", cache)
    if not isinstance(fetched, Fetched):
        raise TypeError(
            f"{call}: fetched must be what tiered.exchange returned, got {type(fetched).__name__}: "
            "the order is (cache, fetched), and exchange returns (store, fetched)"
        )
    if fetched.entries is not None:
        own = _tier_checks.rows_of(cache)
        given = forms_of(fetched.entries.values, fetched.entries.optimizer)
        if own != given:
            raise ValueError(
                f"{call}: fetched must have entries like the cache's, {own}, got {given}: give "
                "what came of this cache's own tiered.admit"
            )
    return _tiers.restore(cache, fetched)


# --- Reads and removals, of both -----------------------------------------------------------------


# fmt: off
@overload
def find(
    tiers: Tiers, keys: Any, *, valid: Any = ..., fill: Fill = ...,
    dtype: Any = ..., return_scores: Literal[False] = ...,
) -> tuple[Tiers, FindResult]: ...
@overload
def find(
    tiers: Tiers, keys: Any, *, valid: Any = ..., fill: Fill = ...,
    dtype: Any = ..., return_scores: Literal[True],
) -> tuple[Tiers, ScoredFindResult]: ...
@overload
def find(
    tiers: Tiers, keys: Any, *, valid: Any = ..., fill: Fill = ...,
    dtype: Any = ..., return_scores: bool,
) -> tuple[Tiers, FindResult | ScoredFindResult]: ...
# fmt: on


@of_one_device
def find(
    tiers: Tiers,
    keys: Any,
    *,
    valid: Any = None,
    fill: Fill = 0.0,
    return_scores: bool = False,
    dtype: Any = None,
) -> tuple[Tiers, Any]:
    """Looks up rows in both tables, which stay as they are: for evaluation and serving.

    It finds out what the cache has not by merging equal keys, which ``jax.vmap`` refuses.

    Args:
      tiers: to look in. Outside of jit what the cache has not is asked of the store's device.
      keys: of any shape.
      valid: see :func:`prefetch`.
      fill: the row of absent keys, see :func:`jax_hkv.find`.
      return_scores: whether the scores of the entries come with their rows, see there.
      dtype: the type in which rows come, see there.

    Returns:
      The tables, and rows ``[*keys.shape, dim]``, found and slots: of the cache, -1 for what the
      store has; and scores, if they were asked for, in whichever table the entry is.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if tables were used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2, init=hkv.initializers.constant(0.5))
      >>> tiers = Tiers(cache, create_store(cache, 1024))
      >>> for ids in np.arange(200, dtype=np.int32).reshape(2, 100):
      ...     tiers, _ = prefetch(tiers, ids)
      >>> tiers, result = find(tiers, np.arange(300, dtype=np.int32))
      >>> int(result.found.sum()), result.values[198:201, 0].tolist()
      (200, [0.5, 0.5, 0.0])
    """
    call = "tiered.find"
    _tier_checks.check(call, tiers)
    given, mask = _tier_checks.batch_of(call, tiers.cache, keys, valid)
    scored: Any = _checks.as_bool(call, "return_scores", return_scores)
    kind = {"return_scores": scored, "dtype": _checks.as_row_dtype(call, dtype)}
    cache, near = operations.find(tiers.cache, given, valid=mask, fill=fill, **kind)
    asked = _tiers.ask_store(tiers, given, mask, near.found)
    if asked is None:
        return tiers, near
    store, distinct, is_meant, groups = asked
    store, behind = operations.find(store, distinct, valid=is_meant, **kind)
    scores = behind.scores if scored else None
    behind = _tiers.from_store(tiers.cache, (behind.values, behind.found, scores))
    return Tiers(cache, store), _tiers.with_rows(near, groups, *behind)


@of_one_device
def contains(tiers: Tiers, keys: Any, *, valid: Any = None) -> tuple[Tiers, Bool[Array, "*batch"]]:
    """Whether keys are present in one of the tables; masked positions are not.

    Args:
      tiers: to look in.
      keys: of any shape.
      valid: see :func:`prefetch`.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if tables were used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2)
      >>> tiers, _ = prefetch(Tiers(cache, create_store(cache, 1024)), np.array([5], np.int32))
      >>> contains(tiers, np.array([5, 6], np.int32))[1].tolist()
      [True, False]
    """
    call = "tiered.contains"
    _tier_checks.check(call, tiers)
    batch = _tier_checks.batch_of(call, tiers.cache, keys, valid)
    tiers, behind, near = _tiers.known(tiers, *batch)
    return tiers, near | behind


@of_one_device
def erase(
    tiers: Tiers, keys: Any, *, valid: Any = None, placement: Placement | None = None
) -> tuple[Tiers, EraseResult]:
    """Removes keys from both tables.

    Args:
      tiers: which are used up outside of jit.
      keys: of any shape.
      valid: see :func:`prefetch`.
      placement: of a cache over devices, outside of a step; every process gives the same keys, on
        the host, and gets what its own parts had.

    Returns:
      The tables, and FOUND for what one of them had; `counts.hits` distinct keys were there.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if tables were used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2)
      >>> tiers = Tiers(cache, create_store(cache, 1024))
      >>> for ids in np.arange(200, dtype=np.int32).reshape(2, 100):
      ...     tiers, _ = prefetch(tiers, ids)
      >>> tiers, result = erase(tiers, np.arange(150, 250, dtype=np.int32))
      >>> int(result.counts.hits), size(tiers)
      (50, 150)
    """
    call = "tiered.erase"
    parts = _tier_parts.between_steps(call, tiers, placement)
    given, mask = _tier_checks.batch_of(call, parts[0].cache, keys, valid)
    after = [_tiers.erase(part, given, mask) for part in parts]
    statuses = [status for _, both in after for status in both]
    statuses = _tiers.put_near(after[0][0].cache, statuses)
    whole = _tier_parts.whole_of(placement, [part for part, _ in after])
    return whole, _tiers.either(given, mask, statuses)


# --- Between steps -------------------------------------------------------------------------------


@overload
def map_tables(
    tiers: Tiers,
    fn: Callable[[Table], Table],
    *,
    has_aux: Literal[False] = False,
    placement: Placement | None = None,
) -> Tiers: ...


@overload
def map_tables(
    tiers: Tiers,
    fn: Callable[[Table], tuple[Table, Aux]],
    *,
    has_aux: Literal[True],
    placement: Placement | None = None,
) -> tuple[Tiers, list[Aux]]: ...


@of_one_device
def map_tables(
    tiers: Tiers,
    fn: Callable[[Table], Any],
    *,
    has_aux: bool = False,
    placement: Placement | None = None,
) -> Tiers | tuple[Tiers, list[Any]]:
    """Both tables after a function of whole tables: the passing of an epoch, an expiry.

    Args:
      tiers: which are used up if `fn` uses up what it is given.
      fn: from a table of one device to a table: ``jax_hkv.advance_epoch``, or a jitted function of
        it and :func:`jax_hkv.expire`; with `has_aux` to (table, anything). Not what erases by rows,
        or what has high scores: the store has old copies, of lower scores, of what the cache has.
      has_aux: whether `fn` returns more than the table: what became of it, say.
      placement: of a cache over devices, whose parts it is given one by one.

    Returns:
      The tiers; with `has_aux` also what `fn` returned of the cache and of the store, a list (over
      devices of one part after the other).

    Raises:
      TypeError: if `fn` returns no table, or another argument is wrong. A `fn` that is jitted
        itself is asked about all tables before it uses one up.
      RuntimeError: if tables were used up before.

    Example:
      >>> import jax_hkv as hkv
      >>> cache = hkv.create(128, 2, policy=hkv.Policy.EPOCH_LRU)
      >>> tiers = map_tables(Tiers(cache, create_store(cache, 1024)), hkv.advance_epoch)
      >>> int(tiers.cache.epoch[0]), int(tiers.store.epoch[0])
      (1, 1)
    """
    call = "tiered.map_tables"
    tables = [table for part in _tier_parts.between_steps(call, tiers, placement) for table in part]
    names = [f"fn(tiers.{name})" for name in Tiers._fields] * (len(tables) // len(Tiers._fields))
    check = functools.partial(_tier_checks.check_table, call)
    after, aux = mapped(call, fn, list(zip(names, tables, strict=True)), has_aux, check)
    pairs = zip(after[::2], after[1::2], strict=True)
    whole = _tier_parts.whole_of(placement, [Tiers(*pair) for pair in pairs])
    return (whole, aux) if has_aux else whole


@of_one_device
def size(tiers: Tiers, *, placement: Placement | None = None) -> int:
    """Entries of both tables, those that stand in both once. For use between steps.

    Args:
      tiers: to read.
      placement: of a cache over devices, whose parts in this process are counted.

    Raises:
      TypeError, ValueError: naming the argument.
      RuntimeError: if tables were used up before.

    Example:
      >>> import numpy as np, jax_hkv as hkv
      >>> cache = hkv.create(128, 2)
      >>> size(Tiers(cache, create_store(cache, 1024)))
      0
    """
    return sum(map(_tiers.size, _tier_parts.between_steps("tiered.size", tiers, placement)))
