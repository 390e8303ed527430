"""What is checked of a collection, and of what is given to it, before anything is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_hkv import _tier_checks, _tier_parts
from jax_hkv._groups import Feature, Group, TableConfig
from jax_hkv._pins import pinned_slots
from jax_hkv._tier_types import Tiers
from jax_hkv.table import Table


def check_declared(tables: Sequence[TableConfig], features: Sequence[Feature]) -> None:
    """Raises unless they make a collection."""
    call = "Collection"
    for name, kind, given in (("tables", TableConfig, tables), ("features", Feature, features)):
        for each in given:
            if not isinstance(each, kind):
                raise TypeError(
                    f"{call}: {name} must be a list of {kind.__name__}, got one of "
                    f"{type(each).__name__} {each!r}"
                )
    by_name: dict[str, TableConfig] = {}
    for config in tables:
        other = by_name.get(config.name)
        by_name[config.name] = config
        if other is not None:
            fields = [field.name for field in dataclasses.fields(config)]
            differing = [f for f in fields if getattr(config, f) != getattr(other, f)]
            raise ValueError(
                f"{call}: the table {config.name!r} is declared twice, disagreeing in "
                f"{differing or 'nothing'}: declare it once, features may share it"
            )
    names = [feature.name for feature in features]
    for feature in features:
        if names.count(feature.name) > 1:
            raise ValueError(f"{call}: the feature {feature.name!r} is declared twice")
        if feature.table not in by_name:
            raise ValueError(
                f"{call}: the feature {feature.name!r} names the table {feature.table!r}, but "
                f"tables are {list(by_name)}"
            )
    idle = sorted(by_name.keys() - {feature.table for feature in features})
    if idle:
        raise ValueError(f"{call}: no feature is looked up in {idle}: leave those tables out")


def by_feature(
    call: str, argument: str, given: Any, inputs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What some features have, by name, {} for None; raises unless those are of the inputs."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{call}: {argument} must be a dict of features of the inputs, {list(inputs)}, got "
            f"{type(given).__name__}: give {{name: {argument}}}, as the feature's ids are"
        )
    unknown = [name for name in given if name not in inputs]
    if unknown:
        raise ValueError(
            f"{call}: {argument} must be of features of the inputs, {list(inputs)}, got {unknown}: "
            "leave out those of features that are not looked up"
        )
    return given


def pins_by_group(
    call: str, given: Any, groups: Sequence[Group], over_devices: bool
) -> dict[str, Any]:
    """The slots of which nothing is to be evicted, by group; {} for None."""
    names = [group.name for group in groups]
    pinned = {} if given is None else given
    if not isinstance(pinned, Mapping) or not set(pinned) <= set(names):
        found = list(pinned) if isinstance(pinned, Mapping) else type(pinned).__name__
        raise TypeError(
            f"{call}: pinned must be the results of an earlier lookup, a dict of some of {names}, "
            f"got {found}: give its `results`"
        )
    # Of groups that were not looked up, or read only, a lookup has None.
    each = {
        name: [result for result in own if result is not None] if isinstance(own, list) else own
        for name, own in pinned.items()
    }
    return {
        name: pinned_slots(f"{call} of {name!r}", own, over_devices=over_devices)
        for name, own in each.items()
    }


def check_names(call: str, groups: Sequence[Group], tables: Any, some: bool = False) -> None:
    """Raises unless they are named as the physical tables of the groups; `some`: of some groups."""
    names = [group.name for group in groups]
    if not isinstance(tables, Mapping):
        raise TypeError(
            f"{call}: tables must be the dict of those of create(), {names}, got "
            f"{type(tables).__name__}"
        )
    if not (set(tables) == set(names) or (some and tables and set(tables) <= set(names))):
        raise ValueError(
            f"{call}: tables must be those of create(), {names}, got "
            f"{list(tables)}: were they made by a collection with other tables?"
        )


def check_contents(
    call: str, groups: Sequence[Group], tables: Mapping[str, Any], tiers: bool = False
) -> None:
    """Raises unless each is a table, or `tiers`, that can be its group's."""
    for group in groups:
        if group.name in tables:
            own, argument = tables[group.name], f"tables[{group.name!r}]"
            is_cache = tiers and isinstance(own, Tiers)
            pair = (own.cache, f"{argument}.cache") if is_cache else (own, argument)
            group.check(call, *pair)


def check_by_table(
    call: str,
    argument: str,
    given: Any,
    ids: Iterable[str],
    tables: Sequence[TableConfig],
    features: Sequence[Feature],
) -> None:
    """Raises unless an argument is a dict of tables, the same as ids are given of."""
    known = [config.name for config in tables]
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{call}: {argument} must be a dict by names of the tables {known}, got "
            f"{type(given).__name__}"
        )
    unknown = [name for name in given if name not in known]
    if unknown:
        of_features = {f.name: f.table for f in features if f.name in unknown}
        hint = f": the tables of the features are {of_features}" if of_features else ""
        raise ValueError(
            f"{call}: {argument} must be by names of the tables {known}, got {unknown}{hint}"
        )
    if set(given) != set(ids):
        raise ValueError(
            f"{call}: {argument} must be of the tables that ids are of, {sorted(ids)}, got "
            f"{sorted(given)}"
        )


def check_of_one_kind(call: str, tables: Mapping[str, Any], placement: Any) -> None:
    """Raises unless all tables, or all tiers, can be given to one operation after the other.

    Tiers are used up by it, so that the last of them is looked at before the first.
    """
    tiers = {name: own for name, own in tables.items() if isinstance(own, Tiers)}
    if not tiers:
        return
    others = [name for name in tables if name not in tiers]
    if others:
        raise TypeError(
            f"{call}: tables must be Tiers, all that ids are of, or none, got Tiers of "
            f"{list(tiers)}, but a Table of {others}: call it for each kind by itself, with ids of "
            "those"
        )
    for name, own in tiers.items():
        # Parts of a cache over devices are looked at where it is known which they are.
        if placement is not None or not isinstance(own.store, (tuple, list)):
            _tier_parts.between_steps(f"{call} of {name!r}", own, placement)
    parts = {
        f"tables[{name!r}].{field}": table
        for name, own in tiers.items()
        for field, table in own._asdict().items()
    }
    for argument, table in parts.items():
        _tier_checks.check_alive(call, argument, table)
    _tier_checks.check_apart(call, parts)


def checked_pair(call: str, pair: Any) -> tuple[Any, Any]:
    """A table, or tiers, and a result, as an operation has to return them."""
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], (Table, Tiers))):
        raise TypeError(
            f"{call}: operation must return a table and a result, as jax_hkv.find and "
            f"jax_hkv.erase do, got {type(pair).__name__}"
        )
    return pair[0], pair[1]
