"""Pieces of a training step of flax.nnx."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx

from jax_hkv import _micro_batches, _trees
from jax_hkv.table import Counts, Table

# For Flax's transformations, whatever the caller has set (``nnx.set_graph_mode``): layers record
# lookups as attributes, for which a tree has no room. Older versions of Flax know only this.
GRAPH_MODE: dict[str, Any] = {
    name: True
    for name in ("graph", "graph_updates")
    if name in inspect.signature(nnx.jit).parameters
}


class TableVariable(nnx.Variable[Table]):
    """Holds a :class:`jax_hkv.Table`.

    In a training step also how many of its lookups have been recorded, by whichever layers share
    it. The number is a part of the value because that goes wherever the table goes: through all of
    Flax's transformations, whose programs for one number are not taken for another. (Metadata of a
    Variable that nnx.jit has not made stay behind in it.)
    """

    def get_value(self, **index: Any) -> Table:
        """The table."""
        return _with_lookups(super().get_value(**index), 0)

    def set_value(self, value: Table, **index: Any) -> None:
        """Another table; the lookups that have been recorded stay so."""
        super().set_value(_with_lookups(value, self.recorded()), **index)

    def recorded(self) -> int:
        """How many lookups have been recorded."""
        return _lookups_of(super().get_value())

    def set_recorded(self, lookups: int) -> None:
        """So many have been."""
        if lookups != self.recorded():
            super().set_value(_with_lookups(super().get_value(), lookups))


class Looked(NamedTuple):
    """What a training lookup returned, and the counts of the tables that are in its table."""

    result: Any
    counts: dict[str, Counts]


class Lookup(nnx.Variable):
    """Holds a :class:`Looked`; it lives from the forward pass to the update."""


class RowPerturbation(nnx.Variable):
    """Zeros that are added to the rows of a lookup, so that their gradient can be taken."""


class LossScaleVariable(nnx.Variable):
    """Holds a :class:`jax_hkv.optim.LossScale`."""


def numbered(module: nnx.Module, pattern: str, attribute: str) -> Iterator[tuple[str, Any]]:
    """The attributes that a pattern names, from number 0 on."""
    number = 0
    while hasattr(module, pattern.format(attribute, number)):
        name = pattern.format(attribute, number)
        yield name, getattr(module, name)
        number += 1


def take_turn(variable: Any) -> int:
    """Records a lookup; how many there have been before it. Of another Variable nobody knows."""
    if not isinstance(variable, TableVariable):
        return 0
    turn = variable.recorded()
    variable.set_recorded(turn + 1)
    return turn


def end_turns(variable: Any) -> None:
    """No lookup has been recorded."""
    if isinstance(variable, TableVariable):
        variable.set_recorded(0)


@_trees.register
@dataclasses.dataclass(frozen=True)
class _RecordedTable(Table):
    """A table, of which so many lookups have been recorded."""

    lookups: int = _trees.static()


def _lookups_of(table: Table) -> int:
    return table.lookups if isinstance(table, _RecordedTable) else 0


def _with_lookups(table: Table, lookups: int) -> Table:
    """The table with that number; a plain one for 0. What is no table stays what it is."""
    if _lookups_of(table) == lookups or not isinstance(table, Table):
        return table
    fields = {field.name: getattr(table, field.name) for field in dataclasses.fields(Table)}
    return _RecordedTable(**fields, lookups=lookups) if lookups else Table(**fields)


def in_micro_batches(
    differentiate: Callable[..., Any], model: nnx.Module, args: Any, count: int
) -> tuple[Any, Any]:
    """What :func:`value_and_grad` returns of all parts: summed gradients, and the rest stacked."""
    kinds = (nnx.Pytree, nnx.Variable)
    for each in jax.tree.leaves(args, is_leaf=lambda node: isinstance(node, kinds)):
        if isinstance(each, kinds):
            raise TypeError(
                "train_step: arguments must be arrays where there are micro-batches, got the "
                f"{type(each).__name__} of nnx, whose changes would be lost: hold it in the model, "
                "or return what it is to know (has_aux=True)"
            )
    graph, values = nnx.split(model)

    def one(values: Any, *part: Any) -> tuple[Any, Any, Any]:
        model = nnx.merge(graph, values)
        value, dense, rows = differentiate(model, *part)
        nnx.pop(model, nnx.Intermediate)
        after, values = nnx.split(model)
        if after != graph:
            raise ValueError(
                "train_step: the model must change in its arrays alone where there are "
                "micro-batches, got other attributes, Variables or static values after a call: "
                "make all of them when the model is made"
            )
        return values, dense, (value, rows)

    like = nnx.state(model, nnx.Param)
    values, dense, rest = _micro_batches.scan(one, values, args, count, like)
    nnx.update(model, values)
    return dense, rest
