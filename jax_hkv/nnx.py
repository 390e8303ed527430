"""Embedding layers for flax.nnx.

Tables are Variables of a type of their own, so that neither ``nnx.Param`` filters nor the dense
optimizer ever see them. Training is a few lines::

    model = Model(..., rngs=nnx.Rngs(0))                # holds Embed, EmbedBag or EmbedCollection
    state = hkv.nnx.TrainState(model, tx=optax.adam(1e-3))

    def loss_fn(model, ids, dense, labels):
        logits = model(ids, dense, train=True)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    train_step = hkv.nnx.train_step(loss_fn)
    for batch in batches:
        info = train_step(state, *batch)

Whoever writes the step by hand uses :func:`value_and_grad` and :func:`update_tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_hkv import _layers, initializers, metrics, pooled
from jax_hkv import operations as _operations
from jax_hkv._layers import StepInfo
from jax_hkv.collection import Collection
from jax_hkv.index import Policy
from jax_hkv.optim import LossScale, Optimizer
from jax_hkv.table import Counts, Table, create

_LOOKUP = "lookup_{}_{}"
_ROWS = "rows_{}_{}"
_UNSEEN = "unseen_{}"


class TableVariable(nnx.Variable):
    """Holds a :class:`jax_hkv.Table`."""


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


class _Layer(nnx.Module):
    """What the layers have in common: tables, who updates them, and a record of lookups."""

    def __init__(self) -> None:
        self.is_recording = False  # whether lookups are kept for an update

    def _owners(self) -> Iterator[tuple[str, Optimizer | None]]:
        """The attributes that hold tables, and their optimizers."""
        raise NotImplementedError

    def _lookups(self, attribute: str) -> list[tuple[str, Lookup]]:
        return list(_numbered(self, _LOOKUP, attribute))

    def _record(self, attribute: str, result: Any, counts: Any = None) -> jax.Array:
        """Keeps the result of a lookup for the update; its rows carry their gradient out."""
        if not self.is_recording:
            return result.values
        number = len(self._lookups(attribute))
        setattr(self, _LOOKUP.format(attribute, number), Lookup(Looked(result, counts or {})))
        perturbation = getattr(self, _ROWS.format(attribute, number), None)
        return result.values if perturbation is None else result.values + perturbation.get_value()

    def _forget(self) -> None:
        """Removes what lookups left, so that a model has the same structure before every step."""
        self.is_recording = False
        for attribute, _ in self._owners():
            for pattern in (_LOOKUP, _ROWS):
                for name, _ in list(_numbered(self, pattern, attribute)):
                    delattr(self, name)


class Embed(_Layer):
    """An embedding layer over a dynamic table: any 64-bit id, no vocabulary.

    Args:
      capacity: entries that the table holds.
      features: elements of an embedding.
      dtype: of the output; None: that of the rows.
      param_dtype: of the rows.
      policy: which entries a full table evicts.
      choices: candidate buckets of an id, 1 or 2.
      embedding_init: first rows, from ``jax_hkv.initializers``.
      seed: of the first rows.
      optimizer: whose rows the table carries, and which updates it; None: it is never trained.
      admission: which new ids get a row, from ``jax_hkv.admission``; None: all of them.
      unseen: what ids without a row get (in evaluation; in training those that were refused):
        "initial", the row that they would start with; "zeros"; or "learned", one row for all of
        them, a parameter.
      name: for error messages.
    """

    def __init__(
        self,
        capacity: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        policy: Policy = Policy.LRU,
        choices: int = 1,
        embedding_init: initializers.Initializer | None = None,
        seed: int = 0,
        optimizer: Optimizer | None = None,
        admission: Any = None,
        unseen: _layers.Unseen = "initial",
        name: str = "embed",
    ):
        super().__init__()
        _layers.check_unseen(type(self).__name__, unseen)
        table = create(
            capacity,
            features,
            dtype=param_dtype,
            policy=policy,
            choices=choices,
            init=embedding_init,
            seed=seed,
            name=name,
            admission=admission,
        )
        self.features = features
        self.dtype = dtype
        self.optimizer = optimizer
        self.unseen = unseen
        self.table = TableVariable(table if optimizer is None else optimizer.init(table))
        if unseen == "learned":
            self.unseen_row = nnx.Param(jnp.zeros((features,), param_dtype))

    def __call__(
        self, ids: Any, *, train: bool = False, valid: Any = None, scores: Any = None
    ) -> Float[Array, "*batch features"]:
        """Embeddings of ids.

        Args:
          ids: Keys or integers, of any shape.
          train: whether unseen ids are inserted. Otherwise the table is left alone.
          valid: ``bool`` of the ids' shape; masked positions get zeros.
          scores: for training under CUSTOM, or as counts; see :func:`jax_hkv.find_or_insert`.
        """
        if train:
            table, result = _operations.find_or_insert(
                self.table.get_value(), ids, scores=scores, valid=valid
            )
            rows = self._record("table", result)
        else:
            table, result = _operations.find(
                self.table.get_value(), ids, valid=valid, fill="initial"
            )
            rows = result.values
        self.table.set_value(table)  # after a read: the same entries; what comes later is behind
        rows = _layers.with_unseen(rows, result.slots, valid, self._unseen_row())
        return _layers.cast(rows, self.dtype)

    def _unseen_row(self) -> Any:
        if self.unseen == "learned":
            return self.unseen_row.get_value()
        return None if self.unseen == "initial" else 0.0

    def _owners(self) -> Iterator[tuple[str, Optimizer | None]]:
        yield "table", self.optimizer


class EmbedBag(Embed):
    """An embedding layer for several ids an example: their rows are combined.

    Args:
      capacity: see :class:`Embed`.
      features: see :class:`Embed`.
      combiner: "sum", "mean" or "sqrtn"; see :func:`jax_hkv.find_pooled`.
      **options: of :class:`Embed`.
    """

    def __init__(self, capacity: int, features: int, *, combiner: str = "sum", **options: Any):
        super().__init__(capacity, features, **options)
        pooled.check_combiner(type(self).__name__, combiner)
        self.combiner = combiner

    def __call__(
        self,
        ids: Any,
        *,
        train: bool = False,
        valid: Any = None,
        weights: Any = None,
        scores: Any = None,
    ) -> Float[Array, "*batch features"]:
        """The combined embeddings of bags of ids; float32 unless `dtype` says otherwise.

        Args:
          ids: ``[*batch, hotness]``, or a :class:`jax_hkv.Jagged`.
          train: see :class:`Embed`.
          valid: ``bool`` of the ids' shape; masked ids are not in their bag.
          weights: ``float32`` of the ids' shape; differentiable.
          scores: see :class:`Embed`.
        """
        batch, layout = pooled.as_batch(type(self).__name__, self.combiner, ids, weights, valid)
        unseen = self._unseen_row()
        fill = "initial" if unseen is None else 0.0
        table, found = pooled.of_batch(
            type(self).__name__,
            self.table.get_value(),
            batch,
            train=train,
            fill=fill,
            scores=scores,
        )
        self.table.set_value(table)
        rows = self._record("table", found.result) if train else found.values
        rows = pooled.with_unseen(rows, batch, found.slots, unseen)
        return _layers.cast(rows.reshape(*layout.batch, self.features), self.dtype)


class EmbedCollection(_Layer):
    """The embeddings of many features, a lookup for each physical table.

    Args:
      collection: the tables and features; its tables name their optimizers.
      dtype: of the outputs; None: float32.
      unseen: see :class:`Embed`; "learned" is a row for each table.
    """

    def __init__(
        self, collection: Collection, *, dtype: Any = None, unseen: _layers.Unseen = "initial"
    ):
        super().__init__()
        self.collection = collection
        self.dtype = dtype
        _layers.check_unseen(type(self).__name__, unseen)
        self.unseen: _layers.Unseen = unseen
        for config in collection.tables if unseen == "learned" else ():
            row = nnx.Param(jnp.zeros((config.dim,), config.dtype))
            setattr(self, _UNSEEN.format(config.name), row)
        for (attribute, _), group in zip(self._owners(), collection.groups, strict=True):
            setattr(self, attribute, TableVariable(group.create()))

    def __call__(
        self, inputs: Mapping[str, Any], *, train: bool = False
    ) -> dict[str, Float[Array, ...]]:
        """The rows of each feature, by name; see :meth:`jax_hkv.Collection.lookup`.

        Args:
          inputs: of every feature: ids, a :class:`jax_hkv.Padded` or a :class:`jax_hkv.Jagged`.
          train: see :class:`Embed`.
        """
        attributes = [attribute for attribute, _ in self._owners()]
        tables, looked_up = self.collection.lookup(
            self.tables, inputs, train=train, fill=_layers.fill_of(self.unseen)
        )
        rows = dict(looked_up.rows)
        for attribute, group in zip(attributes, self.collection.groups, strict=True):
            getattr(self, attribute).set_value(tables[group.name])
            if train:
                result = looked_up.results[group.name]
                assert result is not None
                rows[group.name] = self._record(attribute, result, group.counts(result))
        if self.unseen == "learned":
            learned = {
                config.name: getattr(self, _UNSEEN.format(config.name)).get_value()
                for config in self.collection.tables
            }
            rows = self.collection.with_unseen(rows, looked_up, learned)
        spread = self.collection.spread(rows, looked_up.parts)
        return {name: _layers.cast(own, self.dtype) for name, own in spread.items()}

    @property
    def tables(self) -> dict[str, Table]:
        """The physical tables, by the names of their groups."""
        pairs = zip(self._owners(), self.collection.groups, strict=True)
        return {group.name: getattr(self, name).get_value() for (name, _), group in pairs}

    def _owners(self) -> Iterator[tuple[str, Optimizer | None]]:
        for number, group in enumerate(self.collection.groups):
            yield f"table_{number}", group.tables[0].optimizer


def _numbered(module: nnx.Module, pattern: str, attribute: str) -> Iterator[tuple[str, Any]]:
    """The attributes that a pattern names, from number 0 on."""
    number = 0
    while hasattr(module, pattern.format(attribute, number)):
        name = pattern.format(attribute, number)
        yield name, getattr(module, name)
        number += 1


def _layers_of(model: nnx.Module) -> Iterator[tuple[tuple[Any, ...], _Layer]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, _Layer):
            yield tuple(path), module


def _forget(model: nnx.Module) -> None:
    for _, layer in _layers_of(model):
        layer._forget()


def value_and_grad(
    loss_fn: Callable[..., Any], *, wrt: Any = nnx.Param, has_aux: bool = False
) -> Callable[..., tuple[Any, Any, Any]]:
    """Differentiates a loss with respect to dense parameters and to the rows looked up.

    Args:
      loss_fn: of the model and other arguments; returns a scalar (and, with `has_aux`, more).
      wrt: filter of the dense parameters.
      has_aux: as for ``nnx.value_and_grad``.

    Returns:
      A function of the same arguments that returns the loss (with `has_aux`: loss and the rest),
      the gradients of `wrt` as ``nnx.grad`` gives them, and those of the rows, for
      :func:`update_tables`.
    """
    state = nnx.DiffState(0, nnx.Any(wrt, RowPerturbation))
    differentiate = nnx.value_and_grad(loss_fn, argnums=state, has_aux=has_aux)

    def compute(model: nnx.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        _forget(model)
        for _, layer in _layers_of(model):
            layer.is_recording = True
        shapes = _row_shapes(loss_fn, model, args, kwargs)
        for path, layer in _layers_of(model):
            for name, shape in shapes.get(_path_text(path), {}).items():
                setattr(layer, name, RowPerturbation(jnp.zeros(shape.shape, shape.dtype)))
        value, gradients = differentiate(model, *args, **kwargs)
        rows, dense = nnx.split_state(gradients, RowPerturbation, ...)
        return value, dense, rows

    return compute


def _path_text(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _row_shapes(
    loss_fn: Callable[..., Any], model: nnx.Module, args: Any, kwargs: Any
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of the rows that each layer looks up, by layer and name of the perturbation."""
    graph, state = nnx.split(model)

    def run(state: Any) -> dict[str, dict[str, jax.Array]]:
        copy = nnx.merge(graph, state)
        loss_fn(copy, *args, **kwargs)
        return {
            _path_text(path): {
                _ROWS.format(attribute, number): lookup.get_value().result.values
                for attribute, _ in layer._owners()
                for number, (_, lookup) in enumerate(layer._lookups(attribute))
            }
            for path, layer in _layers_of(copy)
        }

    return jax.eval_shape(run, state)


class Place(NamedTuple):
    """Where a table is that was looked up, and the counts of its lookups."""

    path: tuple[Any, ...]
    layer: _Layer
    attribute: str
    optimizer: Optimizer | None
    counts: list[dict[str, Counts]]


def _looked_up(
    model: nnx.Module, row_gradients: Any
) -> tuple[dict[str, Place], dict[str, list[Any]], dict[str, list[Any]]]:
    """Of each table that was looked up: where it is, the results, and the row gradients."""
    flat = {_path_text(path): leaf.get_value() for path, leaf in nnx.to_flat_state(row_gradients)}
    places: dict[str, Place] = {}
    results: dict[str, list[Any]] = {}
    gradients: dict[str, list[Any]] = {}
    for path, layer in _layers_of(model):
        for attribute, optimizer in layer._owners():
            lookups = layer._lookups(attribute)
            if not lookups:
                continue
            where = _path_text((*path, attribute))
            looked = [lookup.get_value() for _, lookup in lookups]
            counts = [each.counts for each in looked]
            places[where] = Place(path, layer, attribute, optimizer, counts)
            results[where] = [each.result for each in looked]
            names = [_ROWS.format(attribute, number) for number in range(len(lookups))]
            gradients[where] = [flat[_path_text((*path, name))] for name in names]
    return places, results, gradients


def update_tables(model: nnx.Module, row_gradients: Any, **extra: Any) -> None:
    """One step of their optimizers on the rows that the model's layers looked up.

    Args:
      model: after the forward pass of :func:`value_and_grad`; it is changed.
      row_gradients: from there.
      **extra: for the optimizers (`apply`, `learning_rate`, ...).

    Raises:
      ValueError: if a layer that was trained has no optimizer.
    """
    places, results, gradients = _looked_up(model, row_gradients)
    _update(places, results, gradients, extra)
    _forget(model)


def _update(
    places: dict[str, Place],
    results: dict[str, list[Any]],
    gradients: dict[str, list[Any]],
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Updates every table in its place; their metrics."""
    measured = {}
    for where, place in places.items():
        variable = getattr(place.layer, place.attribute)
        table = _layers.updated(
            where, variable.get_value(), place.optimizer, results[where], gradients[where], extra
        )
        variable.set_value(table)
        measured[where] = metrics.of(table, results[where])
    return measured


class TrainState(nnx.Module):
    """Everything that a training step changes: the model with its tables, and the optimizers.

    Args:
      model: that holds layers of this module.
      tx: an ``optax.GradientTransformation`` for the dense parameters.
      loss_scale: to train in half precision with.
    """

    def __init__(self, model: nnx.Module, tx: Any, loss_scale: LossScale | None = None):
        self.model = model
        self.optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        self.loss_scale = None if loss_scale is None else LossScaleVariable(loss_scale)


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    max_norm: float | None = None,
    donate: bool = True,
) -> Callable[..., StepInfo]:
    """A jitted training step of a model with tables.

    Args:
      loss_fn: of the model and the step's arguments; returns a scalar, or (scalar, anything) with
        `has_aux`.
      has_aux: as for ``jax.grad``.
      max_norm: the bound of the norm of all gradients together, dense ones and rows.
      donate: whether the arrays of the state are used up, so that nothing is copied.

    Returns:
      A function of (state, *args) that changes the :class:`TrainState` and returns a
      :class:`jax_hkv.nnx.StepInfo`: loss, aux, the metrics of each table, its counts, and whether
      the gradients were finite.
    """

    def step(state: TrainState, *args: Any) -> StepInfo:
        scale = None if state.loss_scale is None else state.loss_scale.get_value()

        def scaled_loss(model: nnx.Module, *args: Any) -> Any:
            value = loss_fn(model, *args)
            loss, aux = value if has_aux else (value, None)
            return _layers.scaled(loss, scale), (loss, aux)

        (_, (loss, aux)), dense, rows = value_and_grad(scaled_loss, has_aux=True)(
            state.model, *args
        )
        places, results, gradients = _looked_up(state.model, rows)
        dense, gradients, finite, scale = _layers.prepared(
            dense, gradients, results, scale, max_norm
        )
        _dense_update(state, dense, finite)
        extra = {} if finite is None else {"apply": finite}
        measured = _update(places, results, gradients, extra)
        counts: dict[str, Counts] = {}
        for place in places.values():
            counts |= _layers.summed(place.counts, _path_text(place.path))
        _forget(state.model)
        if state.loss_scale is not None:
            state.loss_scale.set_value(scale)
        return StepInfo(loss, aux, measured, counts, finite)

    return nnx.jit(step, donate_argnums=0) if donate else nnx.jit(step)


def _dense_update(state: TrainState, gradients: Any, finite: Any) -> None:
    """A step of the dense optimizer; none where the gradients are not finite."""
    changed = (state.model, state.optimizer)
    before = [nnx.state(part, nnx.Any(nnx.Param, nnx.OptState)) for part in changed]
    before = jax.tree.map(lambda leaf: leaf, before)  # a copy of the structure, not of the arrays
    state.optimizer.update(state.model, gradients)
    if finite is None:
        return
    for part, old in zip(changed, before, strict=True):
        new = nnx.state(part, nnx.Any(nnx.Param, nnx.OptState))
        nnx.update(part, jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old))
