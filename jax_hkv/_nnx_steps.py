"""Pieces of a training step of flax.nnx."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from flax import nnx

from jax_hkv import _layers, _micro_batches, _pins
from jax_hkv._table_counts import TableCounts
from jax_hkv.optim import Optimizer
from jax_hkv.table import Table

# For Flax's transformations, whatever the caller has set (``nnx.set_graph_mode``): layers record
# lookups as attributes, for which a tree has no room. Older versions of Flax know only this.
GRAPH_MODE: dict[str, Any] = {
    name: True
    for name in ("graph", "graph_updates")
    if name in inspect.signature(nnx.jit).parameters
}


LOOKUP = "lookup_{}_{}"
ROWS = "rows_{}_{}"


class TableVariable(nnx.Variable[Table]):
    """Holds a :class:`jax_hkv.Table`.

    In a training step also how many of its lookups have been recorded, by whichever layers share
    it, and the slots that they hold: in the value, so that Flax's programs for one number are not
    taken for another. (Metadata of a Variable that nnx.jit has not made stay behind in it.)
    """

    def get_value(self, **index: Any) -> Table:
        """The table."""
        return _pins.recorded(super().get_value(**index), 0, ())

    def set_value(self, value: Table, **index: Any) -> None:
        """Another table; the lookups that have been recorded stay so."""
        super().set_value(_pins.recorded(value, *self.record()), **index)

    def record(self) -> tuple[int, tuple[jax.Array, ...]]:
        """How many lookups have been recorded, and slots that later ones are to leave alone."""
        return _pins.record_of(super().get_value())

    def set_record(self, lookups: int, pins: tuple[jax.Array, ...]) -> None:
        """So many have been, which hold these."""
        if lookups or pins or self.record() != (0, ()):
            super().set_value(_pins.recorded(super().get_value(), lookups, pins))


class Looked(NamedTuple):
    """What a training lookup returned, and the counts of the tables that are in its table."""

    result: Any
    counts: TableCounts | None


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


def take_turn(variable: Any, result: Any) -> int:
    """Records a lookup; how many there have been before it. Of another Variable nobody knows."""
    if not isinstance(variable, TableVariable):
        return 0
    turn, pins = variable.record()
    own = _pins.slots_of([result])
    variable.set_record(turn + 1, pins if own is None else (*pins, own))
    return turn


def pinned(variable: Any) -> jax.Array | None:
    """The slots that a step's lookups of a table hold."""
    return (
        _pins.slots_of((), *variable.record()[1]) if isinstance(variable, TableVariable) else None
    )


class Owner(NamedTuple):
    """An attribute that holds a table, the table's name, and who updates it."""

    attribute: str
    name: str
    optimizer: Optimizer | None


class Layer(nnx.Module):
    """What the layers have in common: tables, who updates them, and a record of lookups."""

    def __init__(self) -> None:
        self.is_recording = False  # whether lookups are kept for an update

    def _owners(self) -> Iterator[Owner]:
        """The attributes that hold tables."""
        raise NotImplementedError

    def _store(self, attribute: str, table: Table, train: bool) -> None:
        # After a read the entries are the same. In a training step what comes later is ordered
        # behind it; elsewhere the model is left alone, so that it can be called in any trace.
        if train or self.is_recording:
            getattr(self, attribute).set_value(table)

    def _lookups(self, attribute: str) -> list[tuple[str, Lookup]]:
        return list(numbered(self, LOOKUP, attribute))

    def _record(self, attribute: str, result: Any, counts: Any = None) -> jax.Array:
        """Keeps the result of a lookup for the update; its rows carry their gradient out."""
        if not self.is_recording:
            if any(own.optimizer for own in self._owners() if own.attribute == attribute):
                _layers.warn_of_no_update(type(self).__name__, "nnx")
            return result.values
        number = len(self._lookups(attribute))
        turn = take_turn(getattr(self, attribute), result)  # layers that share a table go by it
        lookup = Lookup(Looked(result, counts), turn=turn)
        setattr(self, LOOKUP.format(attribute, number), lookup)
        perturbation = getattr(self, ROWS.format(attribute, number), None)
        return result.values if perturbation is None else result.values + perturbation.get_value()

    def _forget(self) -> None:
        """Removes what lookups left, so that a model has the same structure before every step."""
        self.is_recording = False
        for owner in self._owners():
            variable = getattr(self, owner.attribute)
            if isinstance(variable, TableVariable):
                variable.set_record(0, ())
            for pattern in (LOOKUP, ROWS):
                for name, _ in list(numbered(self, pattern, owner.attribute)):
                    delattr(self, name)


def layers_of(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], Layer]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Layer):
            yield tuple(path), module


def forget(model: nnx.Module) -> None:
    for _, layer in layers_of(model):
        layer._forget()


def path_text(path: tuple[Any, ...]) -> str:
    return "/".join(names_of(path))


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(str, path))


def row_shapes(
    loss_fn: Callable[..., Any], model: nnx.Module, args: Any, kwargs: Any
) -> dict[tuple[str, ...], dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of the rows that each layer looks up, by its names and that of the perturbation."""
    graph, state = nnx.split((model, args, kwargs))  # arguments can be objects that change too

    def run(state: Any) -> dict[tuple[str, ...], dict[str, jax.Array]]:
        copy, args, kwargs = nnx.merge(graph, state)
        loss_fn(copy, *args, **kwargs)
        return {
            names_of(path): {
                ROWS.format(owner.attribute, number): lookup.get_value().result.values
                for owner in layer._owners()
                for number, (_, lookup) in enumerate(layer._lookups(owner.attribute))
            }
            for path, layer in layers_of(copy)
        }

    return jax.eval_shape(run, state)


def places_of(model: nnx.Module) -> dict[str, tuple[TableVariable, Owner]]:
    """Where the tables are, and who updates them, by path; of what layers share the first one's.

    Raises:
      ValueError: if layers that share a table have different optimizers.
    """
    places: dict[int, tuple[str, TableVariable, Owner]] = {}
    for path, layer in layers_of(model):
        for owner in layer._owners():
            variable = getattr(layer, owner.attribute)
            own = path_text((*path, owner.name))
            where, _, first = places.setdefault(id(variable), (own, variable, owner))
            if first.optimizer is None:
                places[id(variable)] = where, variable, owner
            elif owner.optimizer not in (None, first.optimizer):
                raise ValueError(
                    f"nnx: layers that share a table must have one optimizer, got another one at "
                    f"{own!r} than at {where!r}: give both the same object"
                )
    by_path = {where: (variable, owner) for where, variable, owner in places.values()}
    if len(by_path) < len(places):
        raise ValueError(
            "nnx: tables must lie at different paths, got several at one, since a name has a slash "
            f"in it: {sorted(where for where, *_ in places.values())}"
        )
    return by_path


def trainable(model: nnx.Module) -> list[str]:
    """The paths of the tables that have an optimizer and its rows."""
    places = places_of(model).items()
    return [where for where, (own, by) in places if by.optimizer and own.get_value().optimizer]


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

    def one(values: Any, pins: dict[str, jax.Array], *part: Any) -> tuple[Any, Any, Any]:
        model = nnx.merge(graph, values)
        places = places_of(model) if pins else {}
        for where, slots in pins.items():
            places[where][0].set_record(0, (slots,))
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
    values, dense, rest = _micro_batches.scan(
        *(one, values, args, count, like),
        lambda rest: {where: own.results for where, own in rest[1].items()},
    )
    nnx.update(model, values)
    return dense, rest
