"""What is checked of tiers, of batches of their keys, and of steps, before a table is used up.

See :mod:`jax_hkv.tiered`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from jax_hkv import _checks, _tiers
from jax_hkv._bag_parts import whole_bags
from jax_hkv._checks import check_not_used_up
from jax_hkv._compat import is_traced
from jax_hkv._feature_bags import bags_of
from jax_hkv._keys import Keys, check_fixed, check_keys
from jax_hkv._namespaces import keys_are
from jax_hkv._placed import is_saved
from jax_hkv._tier_types import Admits, Tiers
from jax_hkv._warnings import warn_of_part
from jax_hkv.features import Jagged, Padded, as_bagged, check_whose_bags
from jax_hkv.table import Table, check_one_device, forms_of
from jax_hkv.table import check_table as check_is_table

LOST = (
    "make the step with donate=False. Where the step of step_and_prefetch has raised, nothing was "
    "returned, and its tiers are lost: restore them from a checkpoint, and catch such an error "
    "inside of the step, which returns the tables then (of ExchangeOverflow those of its "
    "`outputs`, or in nnx of the model)"
)

_PLACED = (
    "give the placement= that it was made with (admit, exchange, restore, find and contains have "
    'no such form: docs/sharding.md, "Stores behind a table over devices")'
)


def admits_of(call: str, insert: Any, touch: Any) -> Admits:
    """What a prefetch is to do with the keys of a batch."""
    inserts, touches = (
        _checks.as_bool(call, name, given) for name, given in (("insert", insert), ("touch", touch))
    )
    return Admits.ALL if inserts else Admits.KNOWN if touches else Admits.UNNOTICED


def batch_of(
    call: str,
    table: Table,
    keys: Any,
    valid: Any,
    *,
    bags: bool = False,
    names: tuple[str, str] = ("keys", "valid"),
    micro_batches: int = 1,
    is_placed: bool = False,
) -> tuple[Any, jax.Array | None]:
    """Keys and mask, checked, on the table's device, before a table is used up.

    Those that a placement has put stay where they are.
    """
    warn_of_part(call, "call tiered.prefetch outside of steps, with placement=")
    check_whose_bags(call, names[0], keys, table.index.namespace)
    if bags and isinstance(keys, (Jagged, Padded)):
        check_no_mask(call, keys, valid, names)
        own_call = call if names[0] == "keys" else f"{call}, {names[0]}"
        keys, valid = in_bags(own_call, keys, micro_batches)
    given = check_keys(call, names[0], keys)
    check_fixed(call, names[0], given.shape)
    mask = _checks.as_mask(call, names[1], valid, given.shape)
    if is_placed:
        return given, mask
    for name, argument in zip(names, (given, mask), strict=True):
        for leaf in jax.tree.leaves(argument):
            if not isinstance(leaf, jax.Array) or is_traced(leaf):
                continue
            if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
                raise ValueError(
                    f"{call}: {name} must be known to this process, got an array of which other "
                    "processes hold parts: give all of them on the host, in every process"
                )
    return _tiers.put_near(table, (given, mask))


def check_no_mask(
    call: str, bags: Jagged | Padded, valid: Any, names: tuple[str, str] = ("keys", "valid")
) -> None:
    if valid is not None:
        keys, mask = names
        raise TypeError(
            f"{call}: {mask} must be None where {keys} are {type(bags).__name__}, which say "
            f"themselves what is padding, got {type(valid).__name__}: give "
            f"{'its own valid' if isinstance(bags, Padded) else 'Padded(bags, valid)'}"
        )


def in_bags(call: str, bags: Jagged | Padded, micro_batches: int) -> tuple[Keys, jax.Array | None]:
    """The keys of bags, and which are no padding."""
    batch = as_bagged(*bags_of(call, whole_bags(call, "keys", bags, micro_batches), "sum"))
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


def check(call: str, tiers: Any, may_be_saved: bool = False) -> None:
    if not isinstance(tiers, Tiers):
        raise TypeError(
            f"{call}: tiers must be jax_hkv.tiered.Tiers, got {type(tiers).__name__}: make them by "
            "Tiers(cache, tiered.create_store(cache, capacity)); operations return (tiers, result)"
        )
    if isinstance(tiers.store, (tuple, list)):
        raise TypeError(
            f"{call}: tiers.store must be one table where no placement is given, got "
            f"{len(tiers.store)}, of the parts of a cache over devices: {_PLACED}; for "
            "export_changes make Tiers(*pair) of each of zip(placement.shards(cache), store)"
        )
    for name, table in tiers._asdict().items():
        check_table(call, f"tiers.{name}", table, may_be_saved)
    cache, store = tiers
    for what, near, behind in (
        ("rows and optimizer rows", rows_of(cache), rows_of(store)),
        ("a policy", cache.policy.name, store.policy.name),
        ("keys", keys_are(cache.index.namespace), keys_are(store.index.namespace)),
        ("a seed", cache.seed, store.seed),
        ("an initializer", str(cache.initializer), str(store.initializer)),
        ("a name", repr(cache.name), repr(store.name)),
    ):
        if near != behind:
            raise ValueError(
                f"{call}: tiers.store must have {what} like the cache's, {near}, got {behind}: "
                "make it by tiered.create_store(cache, capacity), after opt.init(cache); what "
                "another one holds comes by export_entries and tiered.import_entries"
            )
    if store.capacity < cache.capacity:
        raise ValueError(
            f"{call}: tiers.store must have room for what the cache gives up, {cache.capacity} "
            f"entries at least, got {store.capacity}: the order is Tiers(cache, store); of a cache "
            "that has grown grow the store, by jax_hkv.resize"
        )
    check_apart(call, {"tiers.cache": cache, "tiers.store": store})


def check_outside(call: str, cache: Table, argument: str, inside: str) -> None:
    if is_traced(cache.values):
        raise TypeError(
            f"{call}: {argument} must be outside of jit, got what is traced: call {inside} there, "
            "which is a part of the program, or this one between steps"
        )


def check_step(call: str, step: Any, coming: Any, coming_valid: Any = None) -> None:
    if not callable(step):
        raise TypeError(
            f"{call}: step must be a function of tables, got {type(step).__name__} {step!r}"
        )
    if coming is None and coming_valid is not None:
        raise TypeError(
            f"{call}: coming_valid must be None where coming is, got {type(coming_valid).__name__}"
        )


def after_step(call: str, cache: Table, returned: Any) -> tuple[Table, Any]:
    """The cache that a step has returned, and its result, checked."""
    table, result = pair_of(call, returned, "the cache")
    name = "the table that step returns"
    check_is_table(call, table, name)
    check_not_used_up(call, jax.tree.leaves(table), name)
    if is_traced(table.values):
        raise TypeError(
            f"{call}: {name} must be outside of jit, got what is traced: call this between steps"
        )
    wanted, got = (
        (rows_of(own), own.capacity, own.policy.name, own.index.namespace) for own in (cache, table)
    )
    if wanted != got:
        raise ValueError(f"{call}: {name} must be that which it was given, {wanted}, got {got}")
    lay, lies = (getattr(own.values, "sharding", None) for own in (cache, table))
    if lay is None or lies is None or not lies.is_equivalent_to(lay, table.values.ndim):
        raise ValueError(f"{call}: {name} must lie where it lay, {lay}, got one on {lies}")
    return table, result


def pair_of(call: str, returned: Any, tables: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"{call}: step must return {tables} and a result, got {type(returned).__name__}: "
            "return None beside them if there is none"
        )
    return returned


def check_alive(call: str, argument: str, table: Any) -> None:
    check_not_used_up(call, jax.tree.leaves(table), argument, LOST)


def check_table(call: str, argument: str, table: Any, may_be_saved: bool = False) -> None:
    check_is_table(call, table, argument)
    check_alive(call, argument, table)
    if table.clock.shape != (2,):
        raise TypeError(
            f"{call}: {argument} must be a table of one device where no placement is given, got "
            f"clocks uint32{list(table.clock.shape)}, of a table over devices (or of stacked "
            f"tables): {_PLACED}"
        )
    check_one_device(call, table, may_be_shapes=True)  # of jax.eval_shape: map_tables asks so
    is_here = not (is_traced(table.values) or isinstance(table.values, jax.ShapeDtypeStruct))
    is_here = is_here and not (may_be_saved and is_saved(table))
    devices = getattr(table.values, "devices", tuple)() if is_here else ()
    if is_here and len(devices) != 1:
        raise ValueError(
            f"{call}: {argument} must lie on one device, got one that {len(devices)} hold: put it "
            "on one by jax.device_put(table, device)"
        )
    if table.policy not in _tiers.POLICIES:
        raise ValueError(
            f"{call}: {argument} must have a policy that admits every newcomer, "
            f"{', '.join(policy.name for policy in _tiers.POLICIES)}, got {table.policy.name}: "
            "under it the cache would refuse ids that the store knows"
        )
    if table.admission is not None:
        raise ValueError(
            f"{call}: {argument} must have no admission rule, got {table.admission.rule}, which "
            "would turn ids away that the store knows: create the table without one"
        )


def rows_of(table: Table) -> str:
    return forms_of(table.values, table.optimizer.rows if table.optimizer else {})
