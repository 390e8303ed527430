"""What a collection is made of: tables, features, and tables that are one physical table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, overload

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jax_hkv import initializers
from jax_hkv._changes import Changes
from jax_hkv._checks import as_integer, as_replicas
from jax_hkv._entries import check_exported, is_of
from jax_hkv._exchange import Exchange, as_exchange
from jax_hkv._exported import Exported, namespace_of
from jax_hkv._keys import Keys, as_keys
from jax_hkv._namespaces import (
    Namespace,
    NumberOf,
    as_array,
    in_namespace,
    keys_are,
    outside_namespace,
)
from jax_hkv._options import Combiner
from jax_hkv._sharded import ShardedResult
from jax_hkv._table_counts import TableCounts, of_one
from jax_hkv._warnings import warn
from jax_hkv.features import Jagged, Padded
from jax_hkv.index import Policy, Status, all_of, take, tally
from jax_hkv.optim import check_optimizer
from jax_hkv.pooled import COMBINERS
from jax_hkv.table import STATUSES_OF, Counts, InsertResult, Settings, Table, check_dim, create

_Entries = TypeVar("_Entries", Exported, Changes)
_Bags = TypeVar("_Bags", Jagged, Padded)


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A table of a collection.

    Attributes:
      name: of the table, for features, errors and metrics.
      capacity: entries that it adds to its physical table, of all devices or of each of replicas.
      dim: elements of a row.
      dtype: of the rows.
      policy: which entries a full table evicts. Under CUSTOM training lookups are given scores of
        all features of the table, see :meth:`Collection.lookup`.
      choices: candidate buckets of an id, 1 or 2.
      init: first rows, from ``jax_hkv.initializers``.
      seed: of the first rows, 0 to 2**64 - 1. A first row is a function of (seed, key) alone, so
        tables that are not fused (see :class:`Collection`; fused ones have different keys) begin
        with equal rows for equal ids unless their seeds differ.
      optimizer: whose rows the table carries; None for a table that is never trained. Give tables
        that shall be one physical table one object: see :class:`Collection`.
      admission: which new ids get a row, from ``jax_hkv.admission``.
      replicas: whether each device of a mesh has the whole table, as suits small ones, and those
        that are read more than trained, or how many whole tables the devices hold together (see
        :func:`jax_hkv.create`), whatever the axis name of the collection says; others are split by
        keys, unless that is an ``Exchange`` that says ``replicas=``, of all of them.
    """

    name: str
    capacity: int
    dim: int
    dtype: Any = jnp.float32
    policy: Policy = Policy.LRU
    choices: int = 1
    init: initializers.Initializer | None = None
    seed: int = 0
    optimizer: Any = None
    admission: Any = None
    replicas: bool | int = False

    def __post_init__(self) -> None:
        call = f"TableConfig {self.name!r}"
        if not isinstance(self.name, str):
            raise TypeError(f"{call}: name must be a str, got {type(self.name).__name__}")
        # Of all devices together; how many one can have is known where it is created.
        capacity = as_integer(call, "capacity", self.capacity, 1, 2**63 - 1)
        checked = self._settings.checked(call)
        replicas = as_replicas(call, self.replicas)
        own = {"capacity": capacity, "replicas": replicas}
        for name, value in (checked._asdict() | own).items():
            object.__setattr__(self, name, value)
        check_optimizer(call, self.optimizer)

    @property
    def _settings(self) -> Settings:
        return Settings(*(getattr(self, name) for name in Settings._fields))


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a collection.

    Attributes:
      name: of the feature.
      table: the name of its table; features may share one.
      combiner: of the rows of one example: "sum", "mean" or "sqrtn"; None: every id's row, times
        its weight where the inputs have weights.

    Raises:
      TypeError, ValueError: for a name that is no str, and for another combiner.
    """

    name: str
    table: str
    combiner: Combiner | None = "sum"

    def __post_init__(self) -> None:
        for argument, given in (("name", self.name), ("table", self.table)):
            if not isinstance(given, str):
                raise TypeError(
                    f"Feature {self.name!r}: {argument} must be a str, got {type(given).__name__}"
                )
        is_name = isinstance(self.combiner, str)
        if self.combiner is not None and not (is_name and self.combiner in COMBINERS):
            raise ValueError(
                f"Feature {self.name!r}: combiner must be one of "
                f"{', '.join(map(repr, COMBINERS))} or None, got {self.combiner!r}: None gives "
                "every id its row"
            )


@dataclasses.dataclass(frozen=True)
class Group:
    """Tables that are one physical table.

    Attributes:
      name: of the physical table.
      tables: that it holds, in the order of their numbers in the keys.
      features: that are looked up in it.
      bits: the highest bits of a key, which hold the number of the table.
    """

    name: str
    tables: tuple[TableConfig, ...]
    features: tuple[Feature, ...]
    bits: int

    def __repr__(self) -> str:
        config = self.tables[0]
        capacities = {each.name: each.capacity for each in self.tables}
        return (
            f"Group({self.name!r}, dim={config.dim}, {np.dtype(config.dtype).name}, "
            f"{config.policy.name}, tables={capacities}, features="
            f"{[feature.name for feature in self.features]}, optimizer={config.optimizer})"
        )

    @property
    def optimizer(self) -> Any:
        """Of all its tables."""
        return self.tables[0].optimizer

    @property
    def namespace(self) -> Namespace | None:
        """Of the keys; None: they are the ids of its only table."""
        names = tuple(config.name for config in self.tables)
        return Namespace(names, self.bits) if self.bits else None

    def check(self, call: str, table: Any, argument: str) -> None:
        """Raises unless a table, of whatever capacity and devices, holds what the group's holds."""
        config, remedy = self.tables[0], "put one there that came of the collection's create()"
        check_dim(call, table, argument, config.dim)
        for what, wanted, got in (
            ("rows of", np.dtype(config.dtype).name, table.dtype.name),
            ("the policy", config.policy.name, table.policy.name),
        ):
            if wanted != got:
                raise ValueError(
                    f"{call}: {argument} must have {what} {wanted}, got {got}: {remedy}"
                )
        # Not of fewer tables either: it would not tell later that it has keys of more.
        if table.index.namespace != self.namespace:
            raise ValueError(
                f"{call}: {argument} must have {keys_are(self.namespace)}, got "
                f"{keys_are(table.index.namespace)}: {remedy}, and its entries by import_entries; "
                "Group.take says what of another collection's table can come along"
            )

    def check_made_so(self, call: str, table: Table) -> None:
        """Raises where a table was made otherwise than the group's; see :class:`Settings`."""
        self.tables[0]._settings.check_made_so(call, table)

    def number(self, table: str) -> int:
        """Of one of the tables."""
        names = [config.name for config in self.tables]
        if table not in names:
            raise ValueError(f"Group {self.name!r}: table must be one of {names}, got {table!r}")
        return names.index(table)

    @overload
    def keys(self, table: str, ids: _Bags) -> _Bags: ...

    @overload
    def keys(self, table: str, ids: Any) -> Keys: ...

    def keys(self, table: str, ids: Any) -> Any:
        """The keys that ids of one of the tables have in the physical table.

        All operations on that take them: a warm start is ``jax_hkv.insert_or_assign`` with them.

        Args:
          table: by its name.
          ids: Keys or integers, of any shape; or a :class:`Jagged` or :class:`Padded` of them,
            which comes back with keys.

        Example:
          >>> import jax_hkv
          >>> collection = jax_hkv.Collection(
          ...     [TableConfig("users", 128, 2), TableConfig("items", 128, 2)],
          ...     [Feature("user", "users"), Feature("item", "items")])
          >>> tables, group = collection.create(), collection.group_of("items")
          >>> keys = group.keys("items", np.array([5], np.int32))
          >>> tables[group.name], _ = jax_hkv.insert_or_assign(
          ...     tables[group.name], keys, jnp.ones((1, 2), jnp.float32))
        """
        if isinstance(ids, (Jagged, Padded)):
            return dataclasses.replace(ids, ids=self.keys(table, ids.ids))
        keys = as_keys("Group.keys", "ids", ids)
        return in_namespace(keys, self.number(table), self.bits)

    def ids(self, table: str, keys: Any) -> tuple[Keys, Bool[Array, "*shape"]]:
        """The ids of one of the tables that keys of the physical table stand for: of an export.

        Args:
          table: by its name.
          keys: of the physical table, of any shape.

        Returns:
          The ids, and which of the keys are of the table; the ids of others have no meaning. Ids
          that were folded (see :class:`Collection`) are not to be had back: they come out as what
          they were folded to, and :meth:`keys` maps that to the same key.
        """
        number = self.number(table)
        keys = as_keys("Group.ids", "keys", keys)
        return outside_namespace(keys, self.bits), NumberOf(self.bits)(keys) == number

    def take(
        self, exported: _Entries, of: Group, *, names: Mapping[str, str] | None = None
    ) -> _Entries:
        """Those entries of another group's table that are of this group's tables, with its keys.

        So a collection that serves some of the tables, or has others beside them, takes what was
        trained: :func:`jax_hkv.sharding.import_entries` puts it into this group's table. Sightings
        of absent keys come along only between groups of the same tables.

        Args:
          exported: entries of the other group's table, or its :class:`jax_hkv.sharding.Changes`.
          of: the other group, whose keys have as many bits for the table's number, or none: ids
            that were folded for another number of bits are not to be had back.
          names: of tables of this group that the other one has by another name: by this group's
            names. Where both groups have tables that the other one lacks, without it a
            `UserWarning` says so: one may have been renamed.

        Raises:
          TypeError: if it is no export, or `of` no group.
          ValueError: if the export is of another group, if bits differ, if the groups have no table
            in common, or for names that are of no table, or of one twice.

        Example:
          >>> import jax_hkv as hkv
          >>> tables = [TableConfig("users", 128, 2), TableConfig("items", 128, 2)]
          >>> features = [Feature("user", "users"), Feature("item", "items")]
          >>> trained = hkv.Collection(tables, features).group_of("items")
          >>> table, _ = hkv.find_or_insert(
          ...     trained.create(), trained.keys("items", np.array([5, 6], np.int32)))
          >>> serving = hkv.Collection(tables[1:], features[1:], table_bits=1).group_of("items")
          >>> entries = serving.take(hkv.sharding.export_entries(table), of=trained)
          >>> served, _ = hkv.sharding.import_entries(None, serving.create(), entries)
          >>> hkv.contains(served, serving.keys("items", np.array([5], np.int32)))[1].tolist()
          [True]
        """
        call = f"Group {self.name!r}.take"
        if isinstance(exported, Changes):
            entries = self.take(exported.entries, of, names=names)
            common = self._in_common(call, of, names)
            has_all = self._has_tables_of(of, common)  # as many entries, then
            keys, scores, witnesses = exported.keys, exported.scores, exported.witnesses
            if keys is not None and scores is not None:
                kept, keys = self._taken(keys, of, common)
                order = np.argsort(keys)
                keys, scores = keys[order], scores[kept][order]
            if witnesses is not None:
                kept, own = self._taken(witnesses.keys, of, common)
                whole = witnesses.whole and has_all
                witnesses = witnesses._replace(keys=own, scores=witnesses.scores[kept], whole=whole)
            _, removed = self._taken(exported.removed, of, common)
            before = exported.before if has_all else None
            return Changes(entries, removed, exported.since, keys, before, scores, witnesses)
        check_exported(call, "exported", exported, "make one by export_entries")
        if not isinstance(of, Group):
            raise TypeError(
                f"{call}: of must be the group whose table was exported, got {type(of).__name__}: "
                "give collection.group_of(table)"
            )
        if not is_of(exported, of.namespace):
            raise ValueError(
                f"{call}: exported must be of the table of `of`, {keys_are(of.namespace)}, got "
                f"{keys_are(namespace_of(exported))}: give the group whose table was exported"
            )
        common = self._in_common(call, of, names)
        if of.bits not in (0, self.bits):
            remedy = f"make this collection with table_bits={of.bits}"
            if of.bits < (len(self.tables) - 1).bit_length():
                remedy = (
                    f"this collection's {len(self.tables)} tables need {self.bits}. Ids, if none "
                    "was folded, are given new keys, table by table: ids, own = of.ids(name, "
                    "Keys.from_numpy(exported.keys)), and where own the keys are self.keys(name, "
                    "ids), in exported._replace(keys=, namespace=self.namespace)"
                )
            raise ValueError(
                f"{call}: of must be a group whose keys have {self.bits} bits for the number of "
                f"their table, got one of {of.bits}: {remedy}"
            )
        if names is None and len(common) < min(len(self.tables), len(of.tables)):
            left = [config.name for config in of.tables if config.name not in common.values()]
            new = [config.name for config in self.tables if config.name not in common]
            warn(
                f"{call}: entries of the tables {left} are left out, and {new} get none: if a "
                f"table was renamed, say names={{{new[0]!r}: {left[0]!r}}}, otherwise names={{}}"
            )
        kept, keys = self._taken(exported.keys, of, common)
        has_all = self._has_tables_of(of, common) and of.bits == self.bits
        return exported.select(kept)._replace(
            keys=keys,
            counters=exported.counters if has_all else None,
            namespace=as_array(self.namespace),
        )

    def _in_common(self, call: str, of: Group, names: Mapping[str, str] | None) -> dict[str, str]:
        """Tables of both groups: by their names here, what the other one calls them."""
        mine, its = ([config.name for config in group.tables] for group in (self, of))
        given = {} if names is None else names
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{call}: names must be a dict of names of tables, got {type(given).__name__}: "
                "{'new name': 'old name'}"
            )
        common = {own: given.get(own, own) for own in mine if given.get(own, own) in its}
        unknown = {own: other for own, other in given.items() if common.get(own) != other}
        if unknown or len(set(common.values())) < len(common):
            raise ValueError(
                f"{call}: names must be from names of this group's tables, {mine}, to different "
                f"ones of the other's, {its}, got {given}: {{'new name': 'old name'}}"
            )
        if not common:
            raise ValueError(
                f"{call}: of must have tables of this group, {mine}, got one of {its}: of tables "
                f"that were renamed say names={{{mine[0]!r}: {its[0]!r}}}"
            )
        return common

    def _has_tables_of(self, other: Group, common: Mapping[str, str]) -> bool:
        """Whether both groups have the same tables, in the same order."""
        return [common.get(own.name) for own in self.tables] == [own.name for own in other.tables]

    def _taken(
        self, given: np.ndarray, of: Group, common: Mapping[str, str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which keys of another group are of tables of both, and what they are here."""
        keys = Keys.from_numpy(given)
        positions, words = [], []
        for name, other in common.items():
            ids, is_own = of.ids(other, keys)
            own = np.flatnonzero(is_own)
            positions.append(own)
            words.append(self.keys(name, ids).to_numpy().astype(np.uint64)[own])
        kept = np.concatenate([*positions, np.zeros(0, np.int64)])
        return kept, np.concatenate([*words, np.zeros(0, np.uint64)])

    def counts(self, result: InsertResult | ShardedResult) -> Mapping[str, Counts]:
        """What became of the distinct ids of each table.

        Here `evicted` is how many entries a table's ids displaced, of whatever table of the group.
        """
        if isinstance(result, ShardedResult):
            return result.by_table
        if len(self.tables) == 1:
            return of_one(self.tables[0].name, result.counts)
        groups = result.groups
        status = take(result.status.reshape(-1), groups.first)
        number = NumberOf(self.bits)(Keys(groups.keys))
        kinds = len(Status)
        size = len(self.tables) * kinds
        code = jnp.where(all_of(groups), number * kinds + status, size)
        counted = tally(code, size).reshape(-1, kinds, 1)
        names = tuple(config.name for config in self.tables)
        return TableCounts(jnp.sum(counted * _IS_OF_KIND[None], axis=1, dtype=jnp.int32), names)

    def exchange_of(self, axis_name: Any) -> Exchange | None:
        """The exchange of an axis name, of the replicas that the tables ask for, if they do."""
        exchange, replicas = as_exchange(axis_name), self.tables[0].replicas
        if exchange is None or not replicas:
            return exchange
        return dataclasses.replace(exchange, replicas=replicas)

    def create(self, axis_name: Any = None) -> Table:
        """The physical table, empty; this device's part of it where an axis name is given."""
        config = self.tables[0]
        capacity = sum(config.capacity for config in self.tables)
        exchange = self.exchange_of(axis_name)
        try:
            table = create(
                capacity if exchange is None else exchange.local_capacity(capacity),
                name=self.name,
                replicas=config.replicas if exchange is None else exchange.replicas,
                **config._settings._asdict(),
            )
            index = dataclasses.replace(table.index, namespace=self.namespace)
            table = dataclasses.replace(table, index=index)
            return table if config.optimizer is None else config.optimizer.init(table)
        except (TypeError, ValueError) as error:
            names = [config.name for config in self.tables]
            raise type(error)(f"Collection: tables {names}: {error}") from error


_IS_OF_KIND = np.array(
    [[status in STATUSES_OF[kind] for kind in Counts._fields] for status in Status], np.int32
)
