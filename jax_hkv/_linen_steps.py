"""Pieces of flax.linen's layers and steps: what tables, lookups and other collections become."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
from flax.core.scope import in_filter
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Int32

from jax_hkv import _layers, _pins
from jax_hkv._checks import as_bool
from jax_hkv._compat import vary, zeros_of
from jax_hkv._exchange import as_exchange
from jax_hkv._placed import is_table
from jax_hkv._table_counts import TableCounts
from jax_hkv._warnings import lookup_of_layer
from jax_hkv.optim import Optimizer
from jax_hkv.table import Table, check_dim

TABLES = "tables"
LOOKUPS = "lookups"
PERTURBATIONS = "perturbations"

# What `apply` must be allowed to change in a training step.
MUTABLE = (TABLES, LOOKUPS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookup:
    """What a training lookup left for the update.

    Attributes:
      result: of the lookup; rows of an output in bfloat16 are in it.
      counts: of the tables of a collection that are in its table.
      optimizer: static, who updates its table.
    """

    result: Any
    counts: TableCounts | None
    optimizer: Optimizer | None = dataclasses.field(metadata={"static": True})


class TableVariable:
    """Flax's variable of a table, without the slots that earlier micro-batches hold in it."""

    def __init__(self, variable: Any) -> None:
        self._variable = variable
        self.name: Any = variable.name

    @property
    def value(self) -> Table:
        return _pins.recorded(self._variable.value, 0, ())

    @value.setter
    def value(self, table: Table) -> None:
        self._variable.value = _pins.recorded(table, 0, self.pins)

    @property
    def pins(self) -> tuple[jax.Array, ...]:
        return _pins.record_of(self._variable.value)[1]


def with_pins(tables: Any, pins: Mapping[Any, jax.Array]) -> Any:
    """A collection of tables with the slots that are held in some, by path; without any: plain."""

    def one(path: Any, table: Table) -> Table:
        names = tuple(getattr(each, "key", None) for each in path)
        return _pins.recorded(table, 0, (pins[names],) if names in pins else ())

    return jax.tree_util.tree_map_with_path(one, tables, is_leaf=is_table)


class Layer(nn.Module):
    """What the layers have in common: a table's variable, and a record of its lookups."""

    def _begin(self, train: bool) -> bool:
        """Whether this call trains; `init` and evaluation never insert."""
        if not as_bool(type(self).__name__, "train", train) or self.is_initializing():
            return False
        if not (self.is_mutable_collection(TABLES) and self.is_mutable_collection(LOOKUPS)):
            raise ValueError(
                f"{type(self).__name__} {self.name or ''}: train=True changes the table. Train by "
                "linen.train_step, or by hand with linen.perturbations and linen.update_tables, "
                f"apply(..., mutable={list(MUTABLE)}) (in nn.vmap look up outside of it and pass "
                "rows in); or pass train=False to evaluate"
            )
        return True

    def _looked_up(
        self, look_up: Callable[..., tuple[Any, Any]], *given: Any, **options: Any
    ) -> Any:
        """A lookup along axes; in `init` on each device alone: first rows are the same anywhere."""
        exchange = as_exchange(self.axis_name)
        if exchange is None or not self.is_initializing():
            return look_up(self, *given, axis_name=exchange, **options)
        with lookup_of_layer("init", is_right=True):
            return vary(look_up(self, *given, axis_name=None, **options), exchange.axes)

    def _table(self, name: str, dim: int, *create: Any) -> TableVariable:
        variable = TableVariable(self.variable(TABLES, name, *create))
        check_dim(type(self).__name__, variable.value, name, dim)
        return variable

    def _store(self, variable: TableVariable, table: Table) -> None:
        # After a read the entries are the same: what comes later is ordered behind it.
        if self.is_mutable_collection(TABLES) and not self.is_initializing():
            variable.value = table

    def _pinned(self, variable: TableVariable) -> Int32[Array, " p"] | None:
        """What earlier lookups of the step hold in a table."""
        earlier = [lookup.result for lookup in self.get_variable(LOOKUPS, variable.name, ())]
        return _pins.slots_of(earlier, *variable.pins)

    def _record(
        self, name: str, result: Any, optimizer: Optimizer | None, counts: Any = None
    ) -> jax.Array:
        """Keeps the result of a lookup for the update; its rows carry their gradient out."""
        rows = f"{name}_rows_{len(self.get_variable(LOOKUPS, name, ()))}"
        is_given = self.has_variable(PERTURBATIONS, rows)
        is_seen = is_given or self.is_mutable_collection(PERTURBATIONS)
        if optimizer is not None and not is_seen:
            _layers.warn_of_no_update(type(self).__name__, "linen")
        self.sow(LOOKUPS, name, Lookup(result, counts, optimizer))
        return self.perturb(rows, result.values, PERTURBATIONS)


def next_of(old: Any, new: Any) -> Any:
    """A collection (of statistics) after a step; one that a model sows into is left as it was."""
    return new if jax.tree.structure(old) == jax.tree.structure(new) else old


def asked(mutable: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The collections that a call was asked for, but for those of this module's layers."""
    own = (*MUTABLE, PERTURBATIONS)
    names = [name for name in after if name not in own and in_filter(mutable, name)]
    return {name: _of_this_call(before.get(name, {}), after[name]) for name in names}


def _of_this_call(before: Any, after: Any) -> Any:
    """A collection after a call, without what `init` or an earlier call has sown into it."""
    earlier: Any = flatten_dict(before)
    found: dict[Any, Any] = {}
    for path, leaf in flatten_dict(after).items():
        sown = earlier.get(path)
        if isinstance(sown, tuple) and isinstance(leaf, tuple):
            is_kept = len(leaf) >= len(sown) and all(map(operator.is_, sown, leaf))
            leaf = leaf[len(sown) :] if is_kept else leaf
            if not leaf:
                continue
        found[path] = leaf
    return unflatten_dict(found)


def zeros_of_rows(call: Callable[[Any], Any], variables: Mapping[str, Any]) -> Any:
    clean = {name: tree for name, tree in variables.items() if name not in (PERTURBATIONS, LOOKUPS)}
    shapes = jax.eval_shape(call, clean).get(PERTURBATIONS, {})
    return jax.tree.map(zeros_of, shapes)


def lookups_of(updated: Mapping[str, Any]) -> dict[Any, list[Lookup]]:
    """The lookups of each table, by the table's path."""
    flat: dict[Any, Any] = flatten_dict(updated.get(LOOKUPS, {}))
    return {path: list(kept) for path, kept in flat.items()}


def by_path(tables: Any) -> dict[Any, Any]:
    return flatten_dict(tables, is_leaf=lambda _, leaf: is_table(leaf))


def named(tables: Any) -> tuple[list[tuple[str, Table]], Any]:
    """Tables with their paths as texts, and the structure that they are the leaves of."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tables, is_leaf=is_table)
    keystr = jax.tree_util.keystr
    return [(keystr(path, simple=True, separator="/"), own) for path, own in leaves], structure


def results_of(lookups: dict[Any, list[Lookup]]) -> dict[Any, list[Any]]:
    """What the lookups of each table have returned, by the table's path."""
    return {path: [lookup.result for lookup in kept] for path, kept in lookups.items()}


def trainable(tables: Any) -> list[str]:
    """The paths of the tables that have an optimizer."""
    flat = by_path(tables)
    return ["/".join(path) for path, table in flat.items() if table.optimizer is not None]


def gradients_of(
    lookups: dict[Any, list[Lookup]], row_gradients: Any
) -> dict[Any, list[jax.Array]]:
    """The row gradients of each lookup, by the path of its table."""
    flat: dict[Any, Any] = flatten_dict(row_gradients)
    gradients = {}
    for path, kept in lookups.items():
        *scope, name = path
        names = [(*scope, f"{name}_rows_{number}") for number in range(len(kept))]
        if not flat.keys() >= set(names):
            raise ValueError(
                f"linen.update_tables: {'/'.join(path)} was looked up {len(kept)} times, but "
                "row_gradients has fewer: the variables given to apply must not hold the "
                f'"{LOOKUPS}" of an earlier step'
            )
        gradients[path] = [flat[name] for name in names]
    return gradients
