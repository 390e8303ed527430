"""The table: an index, rows and optimizer rows."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int32, Num

from jax_hkv import _trees, initializers
from jax_hkv import index as _index
from jax_hkv import rows as _rows
from jax_hkv._checks import (
    as_float_dtype,
    as_initializer,
    as_integer,
    as_replicas,
    check_arrays,
    check_not_used_up,
)
from jax_hkv._compat import is_used_up
from jax_hkv._ffi import FLOATS
from jax_hkv._keys import Keys
from jax_hkv._warnings import warn
from jax_hkv.admission import Admission, Frequency, Probability, check_rule
from jax_hkv.index import LANES, MAX_SLOTS, Groups, Index, Policy, Status

Result = TypeVar("Result")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptimizerRows:
    """An optimizer's state that lies in the table.

    Attributes:
      rows: by name, as are the others: leaves of a row each, ``[slots, ...]``, which are evicted
        and moved with the row. Of :func:`jax_hkv.optim.adam` "mu" and "nu".
      fresh: what a new row starts with, ``[1, ...]`` for each of `rows`.
      shared: leaves that all rows share ("count"), with a leading axis of 1.
      skipped: ``uint32[1]``, updates that were dropped because their slot held another key by then.
      structure: static, how the leaves make up the optimizer's state.
    """

    rows: dict[str, Num[Array, "S ..."]]
    fresh: dict[str, Num[Array, "1 ..."]]
    shared: dict[str, Num[Array, "1 ..."]]
    skipped: jax.Array
    structure: Any = dataclasses.field(metadata={"static": True})


@_trees.register
@dataclasses.dataclass(frozen=True)
class Table:
    """A dynamic embedding table as a value: every operation returns a new one.

    Make one with :func:`create`. Under ``jax.jit`` with the table donated nothing is copied.

    Attributes:
      index: digests, keys, scores, occupancy, oldest, clock and epoch.
      values: ``dtype[slots, dim]``, rows by slot; rows of empty slots have no meaning.
      optimizer: optimizer rows, or None.
      admission: which absent keys get a row, or None: all.
      initializer: static, the first value of a row.
      seed: static, of the first values.
      replicas: static, whether each device of a mesh holds the whole table, not a part of it, or
        how many whole tables the devices hold together.
    """

    index: Index
    values: Float[Array, "S dim"]
    optimizer: OptimizerRows | None
    admission: Admission | None
    initializer: initializers.Initializer = _trees.static(told_by="values")
    seed: int = _trees.static(told_by="values")
    replicas: bool | int = _trees.static(told_by="values")

    def __post_init__(self) -> None:
        if is_without_integers(self):
            warn(
                "jax_hkv: a table was filtered for arrays of floats, as parameters are: its rows "
                "would be some, with a gradient and optimizer state as large as the table, and "
                "weight decay changes all of them. A table is no parameter: give "
                "is_leaf=lambda leaf: isinstance(leaf, jax_hkv.Table) to what filters a model "
                "(eqx.filter, eqx.partition), look ids up outside of what is differentiated, and "
                "update rows by an optimizer of jax_hkv.optim"
            )

    def _identity(self) -> tuple[Any, ...]:
        """What of its own settings none of its arrays can be read without."""
        return self.initializer, self.seed, self.replicas

    @property
    def capacity(self) -> int:
        """Slots, a multiple of 128; of all devices, or of each of replicas, seen from outside."""
        return math.prod(self.values.shape[:-1]) // self.copies

    @property
    def copies(self) -> int:
        """Whole tables among the leaves: of replicas seen from outside all of them."""
        parts = max(1, math.prod(self.clock.shape) // 2)
        return parts // self.parts_on(parts)

    def parts_on(self, devices: int) -> int:
        """Parts of the table, or of each of its replicas, that are on so many devices."""
        if self.replicas is True:
            return 1
        return max(1, devices // max(1, self.replicas))

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self.values.shape[-1]

    @property
    def dtype(self) -> np.dtype:
        """Element type of the rows."""
        return np.dtype(self.values.dtype)

    @property
    def policy(self) -> Policy:
        """How entries are scored."""
        return self.index.policy

    @property
    def choices(self) -> int:
        """Candidate buckets of a key."""
        return self.index.choices

    @property
    def name(self) -> str:
        """For error messages, and by which a store of another table is known."""
        return self.index.name

    @property
    def digests(self) -> jax.Array:
        """``uint8[B, 128]``."""
        return self.index.digests

    @property
    def keys(self) -> jax.Array:
        """``uint32[B, 128, 2]``."""
        return self.index.keys

    @property
    def scores(self) -> jax.Array:
        """``uint32[B, 128, 2]``."""
        return self.index.scores

    @property
    def occupancy(self) -> jax.Array:
        """``int32[B]``."""
        return self.index.occupancy

    @property
    def clock(self) -> jax.Array:
        """``uint32[2]``."""
        return self.index.clock

    @property
    def epoch(self) -> jax.Array:
        """``uint32[1]``."""
        return self.index.epoch

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        leaves = jax.tree.leaves(self)
        return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)

    def __repr__(self) -> str:
        # JAX unflattens with objects that are no arrays, and so do users, with dtypes say.
        if not all(len(getattr(leaf, "shape", ())) for leaf in (self.values, self.clock)):
            return f"Table({self.name!r})"
        return (
            f"Table({self.name!r}, capacity={self.capacity:,}, dim={self.dim}, "
            f"dtype={self.dtype.name}, policy={self.policy.name}, choices={self.choices}, "
            f"{f'replicas={self.replicas}, ' if self.replicas else ''}bytes={self.nbytes:,}"
            f"{', used up' if is_used_up(self.values) else ''})"
        )


class Counts(NamedTuple):
    """What became of the distinct keys of a batch; ``int32`` scalars.

    Of all but removals, size_after + evicted = size_before + inserted. Of those without a row,
    `refused` ones found no room, and `not_admitted` ones were turned away by the rule of the
    table's admission, or by the caller's `admit`.
    """

    unique: Int32[Array, ""]
    hits: Int32[Array, ""]
    inserted: Int32[Array, ""]
    evicted: Int32[Array, ""]
    refused: Int32[Array, ""]
    not_admitted: Int32[Array, ""]


# Which statuses each of them is a sum of.
STATUSES_OF = {
    "unique": tuple(Status),
    "hits": (Status.FOUND,),
    "inserted": (Status.INSERTED, Status.EVICTED),
    "evicted": (Status.EVICTED,),
    "refused": (Status.REFUSED,),
    "not_admitted": (Status.NOT_ADMITTED,),
}


def no_counts(zero: Int32[Array, ""] | None = None) -> Counts:
    """The counts of an empty batch; made of a zero, if its type or its device matters."""
    return Counts(*[jnp.int32(0) if zero is None else zero] * len(Counts._fields))


class Entries(NamedTuple):
    """Entries that left a table or were read from it; compact, zero behind `count`.

    `optimizer` are their optimizer rows, by name. `count` is one number; in the report of a step
    over devices there is one for each.
    """

    keys: Keys
    scores: Keys
    values: Float[Array, "n dim"]
    optimizer: dict[str, Num[Array, "n ..."]]
    count: Int32[Array, "*devices"]


class FindResult(NamedTuple):
    """Rows, whether the keys are present, and their slots (-1: absent)."""

    values: Float[Array, "*batch dim"]
    found: Bool[Array, "*batch"]
    slots: Int32[Array, "*batch"]


class ScoredFindResult(NamedTuple):
    """:class:`FindResult` and, last, the entries' scores, zero where keys are absent or masked."""

    values: Float[Array, "*batch dim"]
    found: Bool[Array, "*batch"]
    slots: Int32[Array, "*batch"]
    scores: Keys


class Bags(NamedTuple):
    """What the `n` positions of a pooled lookup add to the rows of its `b` bags.

    Position `i` adds ``weights[i]`` times its row to bag ``sources[i]``, so the gradient of its row
    is ``weights[i] * d_pooled[sources[i]]``.

    Attributes:
      sources: the bag of each position; of padding the next one, or `b`, which is none.
      splits: where bags begin and, of the last one, end: bag `j` is positions ``splits[j]`` to
        ``splits[j + 1] - 1``.
      weights: the given ones over the divisor of the bag's combiner; None: all are one.
      ends: where bags end that have padding behind them: bag `j` is positions ``splits[j]`` to
        ``ends[j] - 1``. None: where the next one begins.
    """

    sources: Int32[Array, " n"]
    splits: Int32[Array, " splits"]
    weights: Float32[Array, " n"] | None
    ends: Int32[Array, " b"] | None = None

    @property
    def factors(self) -> Float32[Array, " n"]:
        """The weights, ones written out."""
        return jnp.ones(self.sources.shape, jnp.float32) if self.weights is None else self.weights


class InsertResult(NamedTuple):
    """What `find_or_insert` returns, and what an optimizer's update needs.

    Attributes:
      values: rows of the keys; initial rows where refused or not admitted, zeros where masked.
      keys: of the batch.
      slots: valid until the next operation that inserts or removes; -1 where there is no row.
      status: see :class:`Status`.
      counts: of distinct keys.
      evicted: the entries that were evicted, if asked for.
      groups: the distinct keys of the batch.
      unique_slots: of the distinct keys.
      bags: of a pooled lookup, whose values are rows of bags; else None.
    """

    values: Float[Array, "*batch dim"]
    keys: Keys
    slots: Int32[Array, "*ids"]
    status: Int32[Array, "*ids"]
    counts: Counts
    evicted: Entries | None
    groups: Groups
    unique_slots: Int32[Array, " n"]
    bags: Bags | None = None


class WriteResult(NamedTuple):
    """What an operation that writes rows returns; `evicted` is None unless asked for."""

    slots: Int32[Array, "*batch"]
    status: Int32[Array, "*batch"]
    counts: Counts
    evicted: Entries | None = None


class EraseResult(NamedTuple):
    """FOUND for what was erased; `counts.hits` keys were."""

    status: Int32[Array, "*batch"]
    counts: Counts


class Settings(NamedTuple):
    """What the rows of a table are and who gets one; see :func:`create`."""

    dim: int
    dtype: Any
    policy: Policy
    choices: int
    init: Any
    seed: int
    admission: Frequency | Probability | None

    def checked(self, call: str, **names: str) -> Settings:
        """In the types that a table needs, with the default initializer; raises in their name.

        Args:
          call: for errors.
          **names: of fields that the call has other names for.
        """
        check_rule(call, self.admission)
        return Settings(
            dim=as_integer(call, names.get("dim", "dim"), self.dim, 1, MAX_SLOTS),
            dtype=as_float_dtype(call, names.get("dtype", "dtype"), self.dtype),
            policy=_as_policy(call, self.policy),
            choices=as_integer(call, "choices", self.choices, 1, 2),
            init=as_initializer(call, names.get("init", "init"), self.init),
            seed=as_integer(call, "seed", self.seed, 0, 2**64 - 1),
            admission=self.admission,
        )

    def check_made_so(self, call: str, table: Table, **names: str) -> None:
        """Raises where they, checked ones, are not those of a table, which would decide, silently.

        Args:
          call: a lookup that trains, for errors.
          table: that it was given.
          **names: of fields that the call has other names for.
        """
        starting = None if self.admission is None else jax.eval_shape(self.admission.start)
        mine, its = (each and each.rule for each in (starting, table.admission))
        for name, wanted, got in (
            ("dtype", self.dtype, table.dtype),
            ("policy", self.policy, table.policy),
            ("choices", self.choices, table.choices),
            ("init", self.init.for_dim(self.dim), table.initializer),
            ("seed", self.seed, table.seed),
            ("admission", mine, its),
        ):
            if wanted != got:
                mine, its = (getattr(each, "name", each) for each in (wanted, got))
                raise ValueError(
                    f"{call}: {names.get(name, name)} must be that of the table that it trains, "
                    f"{its}, got {mine}: a table is what it was made as; say so here, or make a "
                    "new one and import the entries"
                )


def _as_policy(call: str, policy: Any) -> Policy:
    """A policy, or the integer of one; members of other enumerations are integers too."""
    is_other = isinstance(policy, (bool, enum.Enum)) and not isinstance(policy, Policy)
    number: Any = "" if is_other else policy
    try:
        return Policy(operator.index(number))
    except (TypeError, ValueError):
        raise ValueError(
            f"{call}: policy must be one of {', '.join(map(str, Policy.__members__))} of "
            f"jax_hkv.Policy, got {policy!r}"
        ) from None


def create(
    capacity: int,
    dim: int,
    *,
    dtype: Any = jnp.float32,
    policy: Policy = Policy.LRU,
    choices: int = 1,
    init: initializers.Initializer | None = None,
    seed: int = 0,
    name: str = "table",
    admission: Frequency | Probability | None = None,
    replicas: bool | int = False,
) -> Table:
    """An empty table.

    Args:
      capacity: entries; rounded up to whole buckets of 128.
      dim: elements of a row.
      dtype: of the rows: float32, bfloat16 or float16, or its name.
      policy: how entries are scored, hence which is evicted from a full bucket.
      choices: candidate buckets of a key. Two fill a table to 98 % before anything is evicted
        (one: 70 to 80 % of 16,000 to a million slots, more of fewer) and keep better entries, for a
        second probe; in batches of up to a quarter of the slots (as many keys as slots at once:
        89 %).
      init: first values of rows, by default ``variance_scaling(1.0, "normal")`` as ``nn.Embed``.
      seed: of the first values, 0 to 2**64 - 1. A row's first value is a function of (seed, key)
        alone: tables of one seed begin with equal rows for equal keys. Where that matters, give
        them different seeds.
      name: appears in error messages.
      admission: which absent keys ``find_or_insert`` inserts, from ``jax_hkv.admission``; None:
        all. The other writes insert what they are told to.
      replicas: of a table over the devices of a mesh, whether each of them holds the whole table,
        and all do the same to it (docs/sharding.md, "Replicas"), not a part of it, which is split
        by keys; or how many whole tables they hold together, each split over the devices along the
        last axes (1 is False). On one device True changes only names of leaves in a checkpoint.

    Raises:
      ValueError, TypeError: naming the argument.

    Example:
      >>> table = create(1000, dim=4)
      >>> table.capacity
      1024
    """
    buckets = buckets_of("create", capacity)
    if not isinstance(name, str):
        raise TypeError(f"create: name must be a str, got {type(name).__name__} {name!r}")
    given = Settings(dim, dtype, policy, choices, init, seed, admission).checked("create")
    return Table(
        index=_index.create(buckets, given.policy, given.choices, name),
        values=_rows.new(jnp.zeros((1, given.dim), given.dtype), buckets * LANES),
        optimizer=None,
        admission=None if admission is None else admission.start(),
        initializer=given.init.for_dim(given.dim),
        seed=given.seed,
        replicas=as_replicas("create", replicas),
    )


def buckets_of(call: str, capacity: Any) -> int:
    """The buckets of a table of a checked capacity."""
    return -(-as_integer(call, "capacity", capacity, 1, MAX_SLOTS // LANES * LANES) // LANES)


def is_one_result(result: Any) -> bool:
    """Whether it is what an operation returned, or nothing of the kind, and no sequence of such."""
    is_tuple = hasattr(result, "_fields")
    return not hasattr(result[0], "_fields") if is_tuple else not isinstance(result, Iterable)


def is_without_integers(table: Table) -> bool:
    """Whether a filter has left of a table what its dtype makes look like parameters."""
    has_none = getattr(table.index, "digests", table) is None
    return has_none and getattr(table.values, "dtype", None) is not None


def check_table(call: str, table: Any, argument: str = "table") -> None:
    """Raises unless `table` is a Table."""
    if isinstance(table, Table):
        if is_without_integers(table):
            raise TypeError(
                f"{call}: {argument} must be a whole jax_hkv Table, got one without its integers: "
                "it was filtered for arrays of floats; give the model's own, or filter with "
                "is_leaf=lambda leaf: isinstance(leaf, jax_hkv.Table)"
            )
        return
    remedy = ""
    if hasattr(table, "cache") and hasattr(table, "store"):
        remedy = ": tiers are for jax_hkv.tiered, a step takes tiers.cache"
    elif isinstance(table, tuple):
        remedy = ": operations return (table, result), unpack them"
    elif hasattr(table, "get_value"):
        remedy = ": take the variable's .get_value()"
    elif isinstance(table, dict):
        remedy = ": restore a checkpoint into a target, jax.eval_shape(make_table)"
    kind = type(table).__name__
    raise TypeError(f"{call}: {argument} must be a jax_hkv Table, got {kind}{remedy}")


def check_live(call: str, table: Any, *, may_be_shapes: bool = False) -> None:
    """Raises unless `table` is a Table of arrays that no step has used up."""
    check_table(call, table)
    own = table.index  # leaf by leaf: to flatten a table takes ten times as long
    rows = table.optimizer.rows.values() if table.optimizer else ()
    given = (own.digests, own.keys, own.scores, own.occupancy, own.oldest, *rows)
    check_arrays(call, () if may_be_shapes else given, "table")
    check_not_used_up(call, [table.clock, table.values], "table")


def check_dim(call: str, table: Any, argument: str, dim: int) -> None:
    """Raises unless `table`, which a caller has put there, is a Table of rows of that length."""
    check_table(call, table, argument)
    if table.dim != dim:
        raise ValueError(
            f"{call}: {argument} must have rows of {dim} elements, got dim {table.dim}: put one "
            f"there that was made with dim={dim}"
        )


_STACKED = (
    "of tables that are stacked. A Placement of mode 'pmap' stacks the parts of one table: inside "
    "Placement.step and Placement.run it is this device's part, and import_entries of "
    "jax_hkv.sharding.export_entries(placement.shards(table)) makes one table of them. (nn.scan "
    "over layers and nnx.vmap stack tables too: look ids up outside of the scan, in one table, "
    "with the layer's number in the id, and scan over the rows)"
)
_TO_ONE = (
    "To make one table of the parts, use import_entries of "
    "jax_hkv.sharding.export_entries(placement.shards(table))"
)
_OVER_DEVICES = (
    "of a table over several devices (or of several tables that were stacked). Inside "
    "jax.shard_map, jax.pmap, Placement.step or Placement.run it is this device's part: what takes "
    "keys is there in jax_hkv.sharding (find, find_or_insert, insert_or_assign, assign, erase, "
    f"...), which knows whose they are; the rest works on the part as it is. {_TO_ONE}"
)
_NOT_A_PART = (  # of operations that are those of jax_hkv.sharding already
    "of a table over several devices (or of several tables that were stacked), where each device "
    "gives its own part: call this in a function of Placement.step or Placement.run, or in a "
    "jax.shard_map whose in_specs and out_specs split the table along all axes of the exchange, "
    "P('device') or P(('node', 'device')), not P(), which gives every device all of the parts. Of "
    "layers in a state of Placement.create, train_step and jax_hkv.nnx.run are given placement=. "
    f"{_TO_ONE}"
)


def check_one_device(
    call: str, table: Any, *, is_part: bool = False, may_be_shapes: bool = False
) -> None:
    """Raises unless `table` is the Table of one device, which is all that native calls can work on.

    A table over devices seen from outside shard_map, or several stacked ones, have longer leaves.
    A device's part is what calls want that are for parts alone.
    """
    check_live(call, table, may_be_shapes=may_be_shapes)
    if table.clock.shape != (2,):
        over_devices = _NOT_A_PART if is_part else _OVER_DEVICES
        raise TypeError(
            f"{call}: table must be that of one device, whose clock is uint32[2], got clocks "
            f"uint32{list(table.clock.shape)} "
            f"{_STACKED if len(table.clock.shape) == 2 else over_devices}"
        )
    if table.clock.dtype != jnp.uint32:
        raise TypeError(
            f"{call}: table must have a clock of uint32, got {table.clock.dtype}: what casts or "
            "averages all leaves (jax.tree.map, optax.incremental_update) changes whose the rows "
            "are. Change table.values alone; averages of rows are a table of their own "
            "(docs/guide.md, by assign)"
        )
    if table.values.dtype not in FLOATS:
        raise TypeError(
            f"{call}: table must have rows of float32, bfloat16 or float16, got "
            f"{table.values.dtype}: rows of other numbers lie in those of a type of their size, by "
            'jax.lax.bitcast_convert_type (docs/serving.md, "Rows of int8")'
        )
    own = () if table.optimizer is None else table.optimizer.rows.values()
    counts = [leaf.shape[0] for leaf in (table.values, *own)]
    if any(count != table.index.slots for count in counts):
        raise ValueError(
            f"{call}: table must have a row in every leaf for each of the {table.index.slots} "
            f"slots of its index, got {counts} rows (values, then optimizer rows): leaves of "
            "tables of different capacities do not go together; entries move from one to another "
            "by jax_hkv.sharding.export_entries and import_entries"
        )


def with_clock(table: Table, clock: jax.Array) -> Table:
    """The table after a native call that returned the clock."""
    return dataclasses.replace(table, index=dataclasses.replace(table.index, clock=clock))


def gather_values(
    table: Table, slots: jax.Array, *, fill: float = 0.0, initial: Any = None, dtype: Any = None
) -> tuple[Table, jax.Array]:
    """Rows by slot; see :func:`jax_hkv.rows.gather` for positions without one."""
    options: dict[str, Any] = {"fill": fill, "initial": initial, "dtype": dtype}
    clock, values = _rows.gather(table.index.clock, table.values, slots, name=table.name, **options)
    return with_clock(table, clock), values


def scatter_values(
    table: Table, slots: jax.Array, sources: jax.Array | None, values: jax.Array
) -> Table:
    """Writes rows; see :func:`jax_hkv.rows.scatter`."""
    clock, values = _rows.scatter(
        table.index.clock, table.values, slots, sources, values, name=table.name
    )
    return dataclasses.replace(with_clock(table, clock), values=values)


def gather_optimizer(table: Table, slots: jax.Array) -> tuple[Table, dict[str, jax.Array]]:
    """Optimizer rows by slot, zero where the slot is -1."""
    gathered = {}
    clock = table.index.clock
    for name, leaf in table.optimizer.rows.items() if table.optimizer else ():
        clock, gathered[name] = _rows.gather(clock, leaf, slots, name=table.name)
    return with_clock(table, clock), gathered


def scatter_optimizer(
    table: Table, slots: jax.Array, sources: jax.Array | None, values: Mapping[str, jax.Array]
) -> Table:
    """Writes optimizer rows, leaf by leaf; see :func:`jax_hkv.rows.scatter`."""
    if table.optimizer is None:
        return table
    clock = table.index.clock
    rows = {}
    for name, leaf in table.optimizer.rows.items():
        clock, rows[name] = _rows.scatter(
            clock, leaf, slots, sources, values[name], name=table.name
        )
    optimizer = dataclasses.replace(table.optimizer, rows=rows)
    return dataclasses.replace(with_clock(table, clock), optimizer=optimizer)


def forms_of(
    values: Any, optimizer: Mapping[str, Any], shared: Mapping[str, Any] | None = None
) -> str:
    """What the rows of entries look like, and what those of a table share."""
    rows = tuple((name, leaf.dtype, leaf.shape[1:]) for name, leaf in sorted(optimizer.items()))
    common = None
    if shared is not None:
        common = tuple((name, leaf.dtype, leaf.shape) for name, leaf in sorted(shared.items()))
    return _forms_of((values.dtype, values.shape[1:]), rows, common)


@functools.lru_cache(maxsize=256)  # asked at every prefetch of tiers, whose tables stay the same
def _forms_of(
    values: tuple[Any, tuple[Any, ...]],
    optimizer: tuple[tuple[str, Any, tuple[Any, ...]], ...],
    shared: tuple[tuple[str, Any, tuple[Any, ...]], ...] | None,
) -> str:
    def form(dtype: Any, shape: Iterable[Any]) -> str:
        return f"{dtype.name}[{', '.join(map(str, shape))}]"

    rows = {name: form(dtype, ("n", *shape)) for name, dtype, shape in optimizer}
    own = f"values {form(values[0], ('n', *values[1]))}, optimizer {rows}"
    if shared is None:
        return own
    return f"{own} and shared { {name: form(dtype, shape) for name, dtype, shape in shared} }"


def entries_at(
    table: Table,
    keys: jax.Array,
    scores: jax.Array,
    slots: jax.Array,
    count: jax.Array | None = None,
) -> tuple[Table, Entries]:
    """What stands in slots, before anything overwrites it; without a count they are counted."""
    table, values = gather_values(table, slots)
    table, optimizer = gather_optimizer(table, slots)
    if count is None:
        count = jnp.sum(slots >= 0, dtype=jnp.int32)
    return table, Entries(Keys(keys), Keys(scores), values, optimizer, count)


def one_more(count: jax.Array) -> jax.Array:
    """A ``uint32`` count that is one higher, and stops at 2**32 - 1."""
    return count + (count < jnp.uint32(2**32 - 1)).astype(jnp.uint32)


def jitted(*static: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """One compiled function when called eagerly; inlined into the caller's otherwise."""
    return functools.partial(jax.jit, static_argnames=static, inline=True)
