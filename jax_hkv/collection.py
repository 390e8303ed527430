"""Many features over few tables, declared once and looked up together.

Tables that agree in everything but name and capacity are one physical table; a model of 26 features
then costs one lookup. Ids of different tables are told apart by a number in the highest bits of the
key.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jax_hkv import (
    _collection_checks,
    _collection_tiers,
    _sharded,
    _tier_checks,
    _tier_parts,
    _tiers,
    pooled,
    whole_table,
)
from jax_hkv._bags import Bagged
from jax_hkv._checks import as_bool, as_integer, as_mask, as_row_dtype, check_function
from jax_hkv._feature_bags import as_one, bags_of, joined_masks, joined_scores
from jax_hkv._groups import Feature, Group, TableConfig
from jax_hkv._keys import Keys
from jax_hkv._namespaces import NumberOf
from jax_hkv._options import Fill
from jax_hkv._placement import Placement
from jax_hkv._tier_types import PrefetchCounts, Tiers
from jax_hkv._warnings import warn
from jax_hkv.features import Jagged, Padded
from jax_hkv.table import Table

State = TypeVar("State", Table, Tiers)
Result = TypeVar("Result")

_MOST_BITS = 16  # 65,536 tables; 48 bits are left for ids


class Part(NamedTuple):
    """The rows of a feature, which stand in their order among those of its group."""

    feature: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Collection:
    """The tables and features of a model.

    Args:
      tables: with different names.
      features: with different names; each table has at least one.
      fuse: whether tables that agree in dim, dtype, policy, choices, initialiser, seed, optimizer,
        admission and `replicas` are one physical table, which costs one lookup. They share its
        capacity then: what a busy table inserts evicts the least valuable entries of all of them.
        They share the optimizer's step count too, which every update of any of them advances.
        Optimizers agree if they are equal, and functions only if they are the same object:
        schedules, and the functions that make up an optax transformation, are new ones at every
        call. So make one optimizer and give it to all tables; `groups` shows which are together.
        Ids are exact below 2**(64 - b), b the bits of the number of tables (5 for 26), and ids
        above (64-bit hashes, negative numbers) are folded to 64 - b bits: of 10**8 hashes a table
        any two meet with probability 0.9 %.
      table_bits: of a key for the number of its table, where tables are fused; None: as few as they
        need. Keys of another number of bits are others, and so are folded ids, so a collection that
        will have more tables later on keeps what it has trained if the bits are given from the
        start (8 for 256 tables) and new tables are added behind the others: see docs/guide.md.

    Raises:
      TypeError, ValueError: naming what disagrees.

    Example:
      >>> collection = Collection(
      ...     [TableConfig("users", 1000, 8), TableConfig("items", 5000, 8)],
      ...     [Feature("user", "users"), Feature("seen", "items", "mean")])
      >>> [group.name for group in collection.groups]
      ['users+items']
    """

    tables: Sequence[TableConfig]
    features: Sequence[Feature]
    fuse: bool = True
    table_bits: int | None = None

    def __post_init__(self) -> None:
        for name in ("tables", "features"):
            given = getattr(self, name)
            is_list = isinstance(given, Iterable)
            object.__setattr__(self, name, tuple(given) if is_list else (given,))
        _collection_checks.check_declared(self.tables, self.features)
        object.__setattr__(self, "fuse", as_bool("Collection", "fuse", self.fuse))
        if self.table_bits is not None:
            as_integer("Collection", "table_bits", self.table_bits, 0, _MOST_BITS)
            if not self.fuse:
                raise ValueError(
                    "Collection: table_bits must be None where fuse=False, whose keys hold no "
                    f"number of a table, got {self.table_bits}"
                )
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise ValueError(
                f"Collection: physical tables have equal names: {names}: rename a table"
            )

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        """The physical tables."""
        together: dict[Any, list[TableConfig]] = {}
        for config in self.tables:
            together.setdefault(_agreement(config) if self.fuse else config.name, []).append(config)
        groups = []
        for configs in together.values():
            names = [config.name for config in configs]
            own = tuple(feature for feature in self.features if feature.table in names)
            groups.append(Group(_name_of(names), tuple(configs), own, self._bits(names)))
        return tuple(groups)

    def _bits(self, names: list[str]) -> int:
        """Of the keys of a physical table."""
        needed = (len(names) - 1).bit_length()
        if self.table_bits is None:
            return needed
        if needed > self.table_bits:
            raise ValueError(
                f"Collection: table_bits must be {needed} at least for the {len(names)} tables "
                f"{names}, which are fused, got {self.table_bits}"
            )
        return self.table_bits

    def group_of(self, table: str) -> Group:
        """The physical table that holds a table, by the table's own name.

        Raises:
          ValueError: if there is no such table.
        """
        for group in self.groups:
            if table in (config.name for config in group.tables):
                return group
        names = [config.name for config in self.tables]
        raise ValueError(f"Collection.group_of: table must be one of {names}, got {table!r}")

    def create(self, axis_name: Any = None) -> dict[str, Table]:
        """The physical tables, empty, by the names of their groups.

        Args:
          axis_name: of the mesh axis that they are spread over, inside shard_map or pmap.
        """
        return {group.name: group.create(axis_name) for group in self.groups}

    def sizes(
        self, tables: Mapping[str, Table | Tiers], *, placement: Placement | None = None
    ) -> dict[str, Int32[Array, ""]]:
        """Entries of each table, by its own name; of all devices, seen from outside of them.

        With "pmap" over several processes those of this process's devices: add them up.

        Args:
          tables: of :meth:`create`, or some of them; or :class:`jax_hkv.tiered.Tiers` of those, for
            use between steps, of which entries that stand in both tables count once.
          placement: of tiers over devices, whose parts in this process are counted.
        """
        _collection_checks.check_names("Collection.sizes", self.groups, tables, some=True)
        _collection_checks.check_contents("Collection.sizes", self.groups, tables, tiers=True)
        found = {}
        for group in self.groups:
            if group.name in tables:
                sizes = self._sizes_of(group, tables[group.name], placement)
                found |= {config.name: sizes[n] for n, config in enumerate(group.tables)}
        return found

    def _sizes_of(
        self, group: Group, table: Table | Tiers, placement: Placement | None
    ) -> Int32[Array, " tables"]:
        number_of, kinds = NumberOf(group.bits), len(group.tables)
        if isinstance(table, Tiers):
            parts = _tier_parts.between_steps("Collection.sizes", table, placement)
            return jnp.asarray(sum(_tiers.sizes_by(part, number_of, kinds) for part in parts))
        is_one = table.clock.shape == (2,)
        count = whole_table.sizes_by if is_one else whole_table.sizes_over_devices
        return count(table, number_of, kinds)

    def on_tables(
        self,
        operation: Callable[..., tuple[State, Any]],
        tables: Mapping[str, State],
        ids: Mapping[str, Any],
        *arguments: Mapping[str, Any],
        **options: Any,
    ) -> tuple[dict[str, State], dict[str, Any]]:
        """Calls an operation with ids of some tables, one table after the other as declared.

        Args:
          operation: of a table, keys and what else it takes, which returns a table and a result:
            ``jax_hkv.find``, ``contains``, ``insert_or_assign``, ``assign``, ``erase``,
            ``export_keys`` and others, or those of :mod:`jax_hkv.sharding`. Not jitted by itself:
            what changes tables copies them, unless this whole call is jitted and donates them. Or
            one of :mod:`jax_hkv.tiered`, of tiers: ``erase``, ``find``.
          tables: of :meth:`create`, or some of them: those with a store, say. Or
            :class:`jax_hkv.tiered.Tiers` of those, by the same names, which are used up.
          ids: of each table, by its own name: Keys or integers, of any shape; or bags, where the
            operation takes them (``find_pooled``).
          *arguments: what else it takes of each table, by name: rows.
          **options: for all tables; a dict has one for each, by name (``valid``, ``scores``).

        Returns:
          The tables, and the result of each by its own name. Keys and Entries in it are of the
          physical table: :meth:`Group.ids` makes ids of them.

        Raises:
          TypeError, ValueError: naming the argument; what the operation raises, with the table.

        Example:
          >>> import jax_hkv as hkv
          >>> collection = Collection([TableConfig("users", 128, 2), TableConfig("items", 128, 2)],
          ...                         [Feature("user", "users"), Feature("item", "items")])
          >>> ids, rows = {"items": jnp.array([5, 6])}, {"items": jnp.ones((2, 2), jnp.float32)}
          >>> write = functools.partial(collection.on_tables, hkv.insert_or_assign)
          >>> tables, _ = jax.jit(write, donate_argnums=0)(collection.create(), ids, rows)
          >>> tables, found = collection.on_tables(hkv.find, tables, ids)
          >>> found["items"].values.tolist()
          [[1.0, 1.0], [1.0, 1.0]]
        """
        call = "Collection.on_tables"
        expected = "of (table, keys, ...) to a table and a result", "give jax_hkv.find, say"
        check_function(call, "operation", operation, *expected)
        _collection_checks.check_names(call, self.groups, tables, some=True)
        by_table = {"ids": ids, **{f"arguments[{n}]": each for n, each in enumerate(arguments)}}
        by_table |= {name: each for name, each in options.items() if isinstance(each, Mapping)}
        for argument, given in by_table.items():
            _collection_checks.check_by_table(
                call, argument, given, ids, self.tables, self.features
            )
        tables, results = dict(tables), {}
        names = [config.name for config in self.tables if config.name in ids]
        keys = self._keys_of_tables(call, tables, ids, options.get("valid"))
        _collection_checks.check_contents(call, self.groups, tables, tiers=True)
        used = {group.name: tables[group.name] for group in map(self.group_of, names)}
        _collection_checks.check_of_one_kind(call, used, options.get("placement"))
        for name in names:
            group = self.group_of(name)
            own = [each[name] for each in arguments]
            own_options = {
                option: value[name] if isinstance(value, Mapping) else value
                for option, value in options.items()
            }
            try:
                pair = operation(tables[group.name], keys[name], *own, **own_options)
            except (TypeError, ValueError) as error:
                error.add_note(f"{call}: of the table {name!r}")
                raise
            tables[group.name], results[name] = _collection_checks.checked_pair(call, pair)
        return tables, results

    def _keys_of_tables(
        self, call: str, tables: Mapping[str, Any], ids: Mapping[str, Any], valid: Any
    ) -> dict[str, Keys]:
        """The keys of ids, all checked before the first operation, which may use a table up."""
        keys = {}
        for name in ids:
            group = self.group_of(name)
            if group.name not in tables:
                raise ValueError(
                    f"{call}: tables must have {group.name!r}, which holds {name!r}, got "
                    f"{list(tables)}: leave out the ids of tables that are not there"
                )
            try:
                keys[name] = group.keys(name, ids[name])
                mask = valid[name] if isinstance(valid, Mapping) else valid
                is_bags = isinstance(keys[name], (Jagged, Padded))  # which have masks of their own
                if is_bags and isinstance(tables[group.name], Tiers):  # would be used up by others
                    raise TypeError(
                        f"{call}: ids must be Keys or integers where tables are Tiers, got "
                        f"{type(ids[name]).__name__}: give its ids, with a mask, valid="
                    )
                if not is_bags:
                    as_mask(call, "valid", mask, keys[name].shape)
            except (TypeError, ValueError) as error:
                error.add_note(f"{call}: of the table {name!r}")
                raise
        return keys

    def keys(
        self, inputs: Mapping[str, Any], *, partial: bool = False
    ) -> dict[str, tuple[Keys, Bool[Array, " n"] | None]]:
        """The ids of a batch as keys of the physical tables: those that :meth:`lookup` looks up.

        What has to be done with all of them before a step is done in one call for each physical
        table. (Those without an optimizer are among them, which a training lookup leaves as they
        are.)

        Args:
          inputs: as for :meth:`lookup`.
          partial: as for :meth:`lookup`.

        Returns:
          By the names of the groups of which there are inputs: flat keys, and which of them are
          valid (None: all).
        """
        self.check_inputs("Collection.keys", inputs, partial)
        of_groups = {}
        for group in self.groups:
            if any(feature.name in inputs for feature in group.features):
                batch, _, _ = _batch(group, inputs)
                of_groups[group.name] = (batch.keys, batch.valid)
        return of_groups

    def prefetch(
        self,
        tables: Mapping[str, Table],
        stores: Mapping[str, Any],
        inputs: Mapping[str, Any],
        *,
        partial: bool = False,
        insert: bool = True,
        touch: bool = False,
        placement: Placement | None = None,
        micro_batches: int = 1,
    ) -> tuple[dict[str, Table], dict[str, Any], dict[str, PrefetchCounts]]:
        """Sees to it that the ids of a batch are in tables that have stores behind them.

        It comes before the step that looks them up, see :func:`jax_hkv.tiered.prefetch`. The places
        of all tables are made before the first table is waited for.

        Args:
          tables: of :meth:`create`, or those of a model; those with a store are used up outside of
            jit.
          stores: of :func:`jax_hkv.tiered.create_store`, by the names of their groups, not
            necessarily of all. They are used up like these.
          inputs: as for :meth:`lookup`.
          partial: as for :meth:`lookup`.
          insert: whether ids that neither a table nor its store has are inserted, in the tables
            that have an optimizer; in others known ids have the time of now. False before an
            evaluation.
          touch: with `insert=False`, for serving, see :func:`jax_hkv.tiered.prefetch`.
          placement: of tables over devices, outside of a step; `inputs` come from its `put` then.
          micro_batches: of the step that takes the batch: of each of them a :class:`jax_hkv.Jagged`
            is one, as for `Placement.put`.

        Returns:
          The tables, the stores, and the counts of each group with a store of which there are
          inputs.

        Raises:
          TypeError, ValueError: naming the argument.
          RuntimeError: if tables were used up before.

        Example:
          >>> import jax_hkv as hkv
          >>> collection = Collection(
          ...     [TableConfig("items", 128, 2, optimizer=hkv.optim.sgd(0.1))],
          ...     [Feature("item", "items")])
          >>> tables = collection.create()
          >>> stores = {name: hkv.tiered.create_store(table, 1000)
          ...           for name, table in tables.items()}
          >>> inputs = {"item": jnp.arange(100)}
          >>> tables, stores, counts = collection.prefetch(tables, stores, inputs)
          >>> int(counts["items"].inserted)
          100
        """
        return _collection_tiers.prefetch(
            self,
            tables,
            stores,
            inputs,
            partial=partial,
            admits=_tier_checks.admits_of("Collection.prefetch", insert, touch),
            placement=placement,
            micro_batches=micro_batches,
        )

    def step_and_prefetch(
        self,
        step: Callable[[dict[str, Table]], tuple[Mapping[str, Table], Result]],
        tables: Mapping[str, Table],
        stores: Mapping[str, Any],
        inputs: Mapping[str, Any],
        coming: Mapping[str, Any] | None,
        *,
        partial: bool = False,
        placement: Placement | None = None,
        micro_batches: int = 1,
    ) -> tuple[dict[str, Table], dict[str, Any], dict[str, PrefetchCounts], Result]:
        """A step of a batch that was prefetched, while the ids of the next one come near.

        The loop in which the host works while the device trains, for all tables of a model; see
        :func:`jax_hkv.tiered.step_and_prefetch` and docs/guide.md, "A second tier". Rows of tables
        without an optimizer are fetched after the step, not during it.

        Args:
          step: from all tables to all tables and a result. If it raises, tables and stores are
            lost: catch inside of it what is to be survived (an ExchangeOverflow); see there.
          tables: as for :meth:`prefetch`; used up.
          stores: as for :meth:`prefetch`; used up.
          inputs: of the step, as for :meth:`lookup`; their ids stay where they are.
          coming: inputs of the next step; None: there is none, and the step alone is done.
          partial: as for :meth:`lookup`, of both.
          placement: as for :meth:`prefetch`.
          micro_batches: as for :meth:`prefetch`, of both.

        Returns:
          The tables, the stores, the counts of `coming` by physical table (none if it is None), and
          the step's result.

        Raises:
          TypeError, ValueError: naming the argument; of what the step returned, behind it.
          RuntimeError: if tables were used up before.

        Example:
          >>> import jax_hkv as hkv
          >>> sgd = hkv.optim.sgd(0.1)
          >>> collection = Collection(
          ...     [TableConfig("items", 256, 2, optimizer=sgd)], [Feature("item", "items")])
          >>> tables = collection.create()
          >>> stores = {"items": hkv.tiered.create_store(tables["items"], 1000)}
          >>> batches = [{"item": jnp.arange(i, i + 100)} for i in (0, 50, 100)]
          >>> tables, stores, _ = collection.prefetch(tables, stores, batches[0])
          >>> for inputs, coming in zip(batches, [*batches[1:], None]):
          ...     def step(tables):
          ...         tables, found = collection.lookup(tables, inputs, train=True)
          ...         rows, result = found.rows["items"], found.results["items"]
          ...         return {"items": sgd.update(tables["items"], result, rows)}, result.counts
          ...     tables, stores, counts, of_step = collection.step_and_prefetch(
          ...         step, tables, stores, inputs, coming)
          >>> int(of_step.hits), counts
          (100, {})
        """
        after, result = _collection_tiers.step_and_prefetch(
            *(self, step, tables, stores, inputs, coming),
            partial=partial,
            placement=placement,
            micro_batches=micro_batches,
        )
        return *after, result

    def lookup(
        self,
        tables: Mapping[str, Table],
        inputs: Mapping[str, Any],
        *,
        train: bool = False,
        fill: Fill = "initial",
        axis_name: Any = None,
        partial: bool = False,
        return_evicted: bool = False,
        scores: Mapping[str, Any] | None = None,
        admit: Mapping[str, Any] | None = None,
        pinned: Any = None,
        dtype: Any = None,
    ) -> tuple[dict[str, Table], CollectionRows]:
        """Looks up all features, a call for each physical table.

        Args:
          tables: of :meth:`create`.
          inputs: of every feature: ids of shape ``[batch]`` or ``[*batch, hotness]``, a
            :class:`jax_hkv.Padded` (mask and weights beside them), or a :class:`jax_hkv.Jagged`.
          train: whether absent ids are inserted, in the tables that have an optimizer; of others,
            which are only read, a warning tells.
          fill: what ids without a row add: "initial", the rows that they would start with, or 0.
          axis_name: of the mesh axis that tables and batches are spread over, or a
            :class:`jax_hkv.sharding.Exchange`; inside shard_map or pmap.
          partial: whether `inputs` may be of some features only (one tower of a model, in serving),
            whose rows alone come back. Tables of none of them are returned as they are.
          return_evicted: whether the results of training carry the evicted entries.
          scores: of features in `inputs`, by name: of the shape of the feature's ids (of a Jagged's
            or Padded's `ids`), or one number; see :func:`jax_hkv.find_or_insert`. A training lookup
            needs them of all features of tables under CUSTOM; under LFU and EPOCH_LFU the ids of
            other features count once each. What is only read takes no notice of them.
          admit: of features in `inputs`, by name: ``bool`` of the shape of the feature's ids; see
            :func:`jax_hkv.find_or_insert`. An id enters a table if a position of one of the
            table's features lets it in, and all of a feature without a mask do. Not for what is
            only read.
          pinned: `results` of an earlier lookup whose update is to come, or lists of several, by
            group; see :func:`jax_hkv.find_or_insert`.
          dtype: of the rows; see :func:`jax_hkv.find_pooled`.

        Returns:
          The tables, and rows that :meth:`spread` gives to the features.

        Raises:
          ValueError: if a feature is missing, or a name is none of a feature; for scores that a
            table's policy does not take, or lacks, naming the feature.
          TypeError: naming the feature, for inputs, scores or masks of another form.

        Example:
          >>> import jax_hkv as hkv
          >>> collection = Collection(
          ...     [TableConfig("items", 128, 2, policy=hkv.Policy.LFU, optimizer=hkv.optim.sgd(1))],
          ...     [Feature("item", "items")])
          >>> ids = {"item": jnp.array([5, 6])}
          >>> tables, found = collection.lookup(
          ...     collection.create(), ids, train=True, scores={"item": 3})
          >>> hkv.sharding.export_entries(tables["items"]).scores.tolist()
          [3, 3]
        """
        call = "Collection.lookup"
        train = as_bool(call, "train", train)
        return_evicted = as_bool(call, "return_evicted", return_evicted)
        dtype = as_row_dtype(call, dtype)
        self.check_inputs(call, inputs, partial)
        self.check_tables(call, tables)
        pinned = _collection_checks.pins_by_group(call, pinned, self.groups, axis_name is not None)
        scores = _collection_checks.by_feature(call, "scores", scores, inputs)
        admit = _collection_checks.by_feature(call, "admit", admit, inputs)
        if train:
            self._warn_of_frozen(inputs)
        tables = dict(tables)
        rows: dict[str, Any] = {}
        results: dict[str, Any] = {}
        parts: list[tuple[Part, ...]] = []
        batches: dict[str, Bagged] = {}
        slots: dict[str, Any] = {}
        for group in self.groups:
            if all(feature.name not in inputs for feature in group.features):
                parts.append(())
                results[group.name] = None
                continue
            batch, own_parts, is_weighted = _batch(group, inputs)
            parts.append(own_parts)
            own_scores = own_admit = own_pinned = None
            trains = train and group.optimizer is not None
            if trains:
                group.check_made_so(f"{call} of {group.name!r}", tables[group.name])
                names = [part.feature for part in own_parts]
                own_scores = joined_scores(call, group.tables[0].policy, names, inputs, scores)
                own_admit = joined_masks(call, "admit", names, inputs, admit)
                own_pinned = pinned.get(group.name)
            tables[group.name], found = _sharded.of_batch(
                f"{call} of {group.name!r}",
                tables[group.name],
                batch,
                exchange=group.exchange_of(axis_name),
                is_weighted=is_weighted,
                train=trains,
                fill=fill,
                dtype=dtype,
                scores=own_scores,
                admit=own_admit,
                pinned=own_pinned,
                evicted=return_evicted,
                measure=group.counts,
            )
            rows[group.name], results[group.name] = found.values, found.result
            batches[group.name], slots[group.name] = batch, found.slots
        return tables, CollectionRows(rows, results, tuple(parts), batches, slots)

    def _warn_of_frozen(self, inputs: Mapping[str, Any]) -> None:
        """Of tables that a training lookup only reads, which a forgotten optimizer does too."""
        looked_up = {feature.table for feature in self.features if feature.name in inputs}
        frozen = [c.name for c in self.tables if c.optimizer is None and c.name in looked_up]
        if frozen:
            warn(
                f"Collection.lookup: with train=True the tables {frozen} are only read, no id is "
                "inserted and nothing trained: their TableConfig has no optimizer. Give it one, "
                "or, of tables that are meant to be frozen, silence this with "
                "warnings.filterwarnings"
            )

    def with_unseen(
        self,
        rows: Mapping[str, jax.Array],
        found: CollectionRows,
        unseen: Mapping[str, Float[Array, " dim"]],
    ) -> dict[str, Float[Array, "rows dim"]]:
        """Rows to which every id without one adds the row of its table for such ids.

        Args:
          rows: ``found.rows``, or those rows with a perturbation.
          found: of a lookup with ``fill=0.0``.
          unseen: a row for each table, by name; differentiable.
        """
        added = {}
        for group, parts in zip(self.groups, found.parts, strict=True):
            if not parts:
                continue
            table_of = {feature.name: feature.table for feature in group.features}
            own = [
                jnp.broadcast_to(
                    jnp.asarray(unseen[table_of[part.feature]], jnp.float32),
                    (math.prod(part.shape), rows[group.name].shape[-1]),
                )
                for part in parts
            ]
            share = pooled.unseen_shares(found.batches[group.name], found.slots[group.name])
            added[group.name] = rows[group.name] + share * jnp.concatenate(own)
        return added

    def spread(self, rows: Mapping[str, jax.Array], parts: Any) -> dict[str, Float[Array, " ..."]]:
        """The rows of each feature: ``[*batch, dim]``, or a row for every id without a combiner.

        Those of a :class:`jax_hkv.Jagged` are ``[n, dim]``, in the order of its ids.
        """
        outputs = {}
        for group, own_parts in zip(self.groups, parts, strict=True):
            if not own_parts:
                continue
            # Its derivative is one concatenation; that of slices a sum of as many padded arrays.
            sizes = [math.prod(part.shape) for part in own_parts]
            for part, own in zip(own_parts, jax.lax.split(rows[group.name], sizes), strict=True):
                outputs[part.feature] = own.reshape(*part.shape, own.shape[-1])
        return {f.name: outputs[f.name] for f in self.features if f.name in outputs}

    def check_tables(self, call: str, tables: Mapping[str, Any]) -> None:
        """Raises unless they are as those of :meth:`create`, of whatever capacity and devices."""
        _collection_checks.check_names(call, self.groups, tables)
        _collection_checks.check_contents(call, self.groups, tables)

    def check_inputs(
        self, call: str, inputs: Mapping[str, Any], partial: bool, argument: str = "inputs"
    ) -> None:
        """Raises unless they are named as the features, or with `partial` as some of them."""
        known = [feature.name for feature in self.features]
        partial = as_bool(call, "partial", partial)
        if not isinstance(inputs, Mapping):
            raise TypeError(
                f"{call}: {argument} must be a dict of the features {known}, got "
                f"{type(inputs).__name__}"
            )
        if set(inputs) == set(known) or (partial and inputs and set(inputs) <= set(known)):
            return
        missing, unknown = sorted(set(known) - set(inputs)), sorted(set(inputs) - set(known))
        raise ValueError(
            f"{call}: {argument} must be of {'some of ' if partial else ''}the features "
            f"{known}; missing: {missing}, "
            f"unknown: {unknown}" + ("" if unknown or partial else "; of some with partial=True")
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CollectionRows:
    """What a collection looked up, by group.

    Attributes:
      rows: ``[rows, dim]``, float32 unless `dtype` said otherwise; gradients by these train the
        table. Of the groups that were looked up, as `batches` and `slots`.
      results: for the optimizers: an InsertResult (over several devices a ShardedResult) in
        training, else None.
      parts: static, of each group: which rows are whose.
      batches: the ids that were looked up, as bags, unless each is one of its own.
      slots: of those ids, -1 where they have no row.
    """

    rows: dict[str, Float[Array, "rows dim"]]
    results: dict[str, Any]
    parts: tuple[tuple[Part, ...], ...] = dataclasses.field(metadata={"static": True})
    batches: dict[str, Bagged]
    slots: dict[str, Int32[Array, " n"]]


def _name_of(names: list[str]) -> str:
    """Of a physical table; it changes with the order of its tables, which is in the keys."""
    if len(names) < 4:
        return "+".join(names)
    fingerprint = zlib.crc32("\n".join(names).encode())
    return f"{names[0]}+{len(names) - 1} others {fingerprint:08x}"


def _agreement(config: TableConfig) -> Any:
    """What tables must agree in to be one physical table."""
    own = ("name", "capacity")
    fields = [field.name for field in dataclasses.fields(config) if field.name not in own]
    return tuple(getattr(config, name) for name in fields)


def _batch(group: Group, inputs: Mapping[str, Any]) -> tuple[Bagged, tuple[Part, ...], bool]:
    """All features of a group as one batch of bags, a bag for each row; whether any has weights."""
    batches, layouts, parts = [], [], []
    features = [feature for feature in group.features if feature.name in inputs]
    for feature in features:
        own, layout = bags_of(f"feature {feature.name!r}", inputs[feature.name], feature.combiner)
        batches.append(own)
        layouts.append(layout)
        parts.append(Part(feature.name, layout.batch))
    batch = as_one(
        batches,
        layouts=tuple(layouts),
        combiners=tuple(feature.combiner or "sum" for feature in features),
        numbers=tuple(group.number(feature.table) for feature in features),
        bits=group.bits,
    )
    is_weighted = any(layout.is_weighted for layout in layouts)
    return batch, tuple(parts), is_weighted
