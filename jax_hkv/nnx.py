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
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_hkv import _layer_arguments as _arguments
from jax_hkv import _layers, _table_counts, initializers, pooled
from jax_hkv._bag_parts import as_count
from jax_hkv._checked_steps import host_checked
from jax_hkv._checks import as_bool
from jax_hkv._compat import zeros_of
from jax_hkv._layer_arguments import Unseen
from jax_hkv._layers import StepInfo
from jax_hkv._mapped import Aux
from jax_hkv._nnx_devices import Alone, Placed, abstract, cacheable, place, run
from jax_hkv._nnx_steps import (
    GRAPH_MODE,
    LOOKUP,
    ROWS,
    Layer,
    Lookup,
    LossScaleVariable,
    Owner,
    RowPerturbation,
    TableVariable,
    forget,
    in_micro_batches,
    layers_of,
    names_of,
    path_text,
    pinned,
    places_of,
    row_shapes,
    trainable,
)
from jax_hkv._options import Combiner, Only
from jax_hkv._placement import Placement
from jax_hkv._stages import Step
from jax_hkv._table_counts import TableCounts
from jax_hkv.collection import Collection
from jax_hkv.index import Policy
from jax_hkv.optim import LossScale, Optimizer
from jax_hkv.table import Settings, Table

__all__ = [
    "Embed",
    "EmbedBag",
    "EmbedCollection",
    "RowGradients",
    "Step",
    "StepInfo",
    "TableVariable",
    "TrainState",
    "Unseen",
    "abstract",
    "place",
    "run",
    "train_step",
    "update_tables",
    "value_and_grad",
]

Model = TypeVar("Model", bound=nnx.Module)

_UNSEEN = "unseen_{}"


class Embed(Layer):
    """An embedding layer over a dynamic table: any 64-bit id, no vocabulary.

    Args:
      capacity: entries that the table holds. Ids are spread over buckets by a hash, so a table of
        as many entries as ids evicts some already: of 10,000 ids in 10,000 entries 3 %, with
        ``choices=2`` less than 0.1 % in small batches. Ask for half as many again, or for both.
      features: elements of an embedding.
      dtype: of the output; None: that of the rows, of an :class:`EmbedBag` float32.
      param_dtype: of the rows.
      policy: which entries a full table evicts.
      choices: candidate buckets of an id, 1 or 2.
      embedding_init: first rows, from ``jax_hkv.initializers``.
      seed: of the first rows, 0 to 2**64 - 1. A first row is a function of (seed, id) alone:
        ``nnx.Rngs`` play no part, and layers of one seed begin with equal rows for equal ids. Where
        that matters (two towers whose ids overlap), give them different seeds.
      optimizer: whose rows the table carries, and which updates it; None: for ``train=False`` only.
      admission: which new ids get a row, from ``jax_hkv.admission``; None: all of them.
      unseen: what ids without a row get (in evaluation; in training those that got none):
        "initial", the row that they would start with; "zeros"; or "learned", one row for all of
        them, a parameter.
      name: for error messages.
      axis_name: of the mesh axis that the table and the batches are spread over, or a
        :class:`jax_hkv.sharding.Exchange`; the model is made by :func:`place` then. `capacity` is
        that of all devices together (of each replica). None: one device.
      return_evicted: whether `evicted` of a step's report carries the entries that had to go.
      rngs: for code that gives every layer of nnx some; they play no part, see `seed`.
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
        unseen: Unseen = "initial",
        name: str = "embed",
        axis_name: Any = None,
        return_evicted: bool = False,
        rngs: Any = None,
    ):
        super().__init__()
        call = type(self).__name__
        _arguments.check_outputs(call, dtype, unseen, return_evicted)
        settings = _arguments.as_settings(
            call,
            Settings(features, param_dtype, policy, choices, embedding_init, seed, admission),
        )
        self.features = features
        self.dtype = dtype
        self.optimizer = optimizer
        self.unseen = unseen
        self.axis_name = axis_name
        self.return_evicted = return_evicted
        self._settings = settings
        self.table = TableVariable(
            _arguments.new_table(call, name, axis_name, capacity, optimizer, settings)
        )
        if unseen == "learned":
            self.unseen_row = nnx.Param(jnp.zeros((features,), param_dtype))

    def __call__(
        self,
        ids: Any,
        *,
        train: bool = False,
        valid: Any = None,
        scores: Any = None,
        admit: Any = None,
        values: Any = None,
    ) -> Float[Array, "*batch features"]:
        """Embeddings of ids.

        Args:
          ids: Keys or integers, of any shape, or a :class:`jax_hkv.Padded`; or a
            :class:`jax_hkv.Jagged` of n ids, with ``[n, features]`` rows, zeros for its padding.
          train: whether unseen ids are inserted. Otherwise the table is left alone.
          valid: ``bool`` of the ids' shape; masked positions get zeros.
          scores: for training under CUSTOM, or as counts; see :func:`jax_hkv.find_or_insert`.
          admit: ``bool`` of the ids' shape: of training, which positions let new ids in; None: all.
          values: ``[*ids, features]`` of the table's type: of unseen ids, instead of the initial
            rows, which they are inserted with (not differentiated), or, with ``unseen="initial"``,
            stand for without being inserted.
        """
        train = as_bool(type(self).__name__, "train", train)
        ids, valid = _layers.each_id(type(self).__name__, ids, valid)
        table, found = _layers.look_up(
            *(self, self._own(train), ids),
            axis_name=self.axis_name,
            train=train,
            valid=valid,
            values=values,
            scores=scores,
            admit=admit,
            pinned=pinned(self.table),
        )
        rows = self._record("table", found.result) if train else found.values
        self._store("table", table, train)
        rows = _layers.with_unseen(rows, found, valid, self._unseen_row())
        return _layers.cast(self, rows)

    def _own(self, train: bool) -> Table:
        table = _layers.checked_table(self, "table", self.features)
        call = type(self).__name__
        _arguments.check_given_table(call, table, self._settings, train=train)
        return table

    def _unseen_row(self) -> Any:
        if self.unseen == "learned":
            return self.unseen_row.get_value()
        return None if self.unseen == "initial" else 0.0

    def _owners(self) -> Iterator[Owner]:
        yield Owner("table", "table", self.optimizer)


class EmbedBag(Embed):
    """An embedding layer for several ids an example: their rows are combined.

    Args:
      capacity: see :class:`Embed`.
      features: see :class:`Embed`.
      combiner: "sum", "mean" or "sqrtn"; see :func:`jax_hkv.find_pooled`.
      **options: of :class:`Embed`.
    """

    def __init__(self, capacity: int, features: int, *, combiner: Combiner = "sum", **options: Any):
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
        admit: Any = None,
    ) -> Float[Array, "*batch features"]:
        """The combined embeddings of bags of ids; float32 unless `dtype` says otherwise.

        Args:
          ids: ``[*batch, hotness]`` (one axis is one bag, and an error in training), or a
            :class:`jax_hkv.Padded` or :class:`jax_hkv.Jagged`.
          train: see :class:`Embed`.
          valid: ``bool`` of the ids' shape; masked ids are not in their bag.
          weights: ``float32`` of the ids' shape; differentiable.
          scores: see :class:`Embed`.
          admit: see :class:`Embed`.
        """
        train = as_bool(type(self).__name__, "train", train)
        batch, layout = given = _layers.as_batch(self, ids, weights, valid, train)
        unseen = self._unseen_row()
        table, found = _layers.look_up_bags(
            *(self, self._own(train), given),
            axis_name=self.axis_name,
            train=train,
            scores=scores,
            admit=admit,
            pinned=pinned(self.table),
        )
        self._store("table", table, train)
        rows = self._record("table", found.result) if train else found.values
        rows = pooled.with_unseen(rows, batch, found.slots, unseen)
        return _layers.cast(self, rows.reshape(*layout.batch, self.features))


class EmbedCollection(Layer):
    """The embeddings of many features, a lookup for each physical table.

    Args:
      collection: the tables and features; its tables name their optimizers.
      dtype: of the outputs; None: float32.
      unseen: see :class:`Embed`; "learned" is a row for each table.
      axis_name: see :class:`Embed`.
      return_evicted: see :class:`Embed`.
      rngs: see :class:`Embed`.
    """

    def __init__(
        self,
        collection: Collection,
        *,
        dtype: Any = None,
        unseen: Unseen = "initial",
        axis_name: Any = None,
        return_evicted: bool = False,
        rngs: Any = None,
    ):
        super().__init__()
        call = type(self).__name__
        _arguments.check_collection(call, collection)
        _arguments.check_outputs(call, dtype, unseen, return_evicted)
        self.collection = collection
        self.return_evicted = return_evicted
        self.dtype = dtype
        self.axis_name = axis_name
        self.unseen: Unseen = unseen
        for config in collection.tables if unseen == "learned" else ():
            row = nnx.Param(jnp.zeros((config.dim,), config.dtype))
            setattr(self, _UNSEEN.format(config.name), row)
        for owner, group in zip(self._owners(), collection.groups, strict=True):
            setattr(self, owner.attribute, TableVariable(group.create(axis_name)))

    def __call__(
        self,
        inputs: Mapping[str, Any],
        *,
        train: bool = False,
        partial: bool = False,
        scores: Mapping[str, Any] | None = None,
        admit: Mapping[str, Any] | None = None,
    ) -> dict[str, Float[Array, " ..."]]:
        """The rows of each feature, by name; see :meth:`jax_hkv.Collection.lookup`.

        Args:
          inputs: of every feature: ids, a :class:`jax_hkv.Padded` or a :class:`jax_hkv.Jagged`.
          train: see :class:`Embed`; tables without an optimizer are only read.
          partial: whether `inputs` may be of some features only.
          scores: of some features, by name, or of all; see :meth:`jax_hkv.Collection.lookup`.
          admit: of some features, by name, or of all; see there.
        """
        train = as_bool(type(self).__name__, "train", train)
        held = {own.name: pinned(getattr(self, own.attribute)) for own in self._owners()}
        options = {"partial": partial, "scores": scores, "admit": admit, "pinned": held}
        tables, looked_up = _layers.look_up_features(
            *(self, self.tables, inputs), axis_name=self.axis_name, train=train, **options
        )
        rows = dict(looked_up.rows)
        for owner, group in zip(self._owners(), self.collection.groups, strict=True):
            result = looked_up.results[group.name]
            self._store(owner.attribute, tables[group.name], train)
            if result is not None:
                rows[group.name] = self._record(owner.attribute, result, group.counts(result))
        if self.unseen == "learned":
            learned = {
                config.name: getattr(self, _UNSEEN.format(config.name)).get_value()
                for config in self.collection.tables
            }
            rows = self.collection.with_unseen(rows, looked_up, learned)
        spread = self.collection.spread(rows, looked_up.parts)
        return {name: _layers.cast(self, own) for name, own in spread.items()}

    @property
    def tables(self) -> dict[str, Table]:
        """The physical tables, by the names of their groups."""
        return {
            group.name: _layers.checked_table(self, owner.attribute, group.tables[0].dim)
            for owner, group in zip(self._owners(), self.collection.groups, strict=True)
        }

    def set_tables(self, tables: Mapping[str, Table]) -> None:
        """Changes the physical tables to what became of them outside of the layer."""
        self.collection.check_tables(f"{type(self).__name__}.set_tables", tables)
        for owner, group in zip(self._owners(), self.collection.groups, strict=True):
            getattr(self, owner.attribute).set_value(tables[group.name])

    def _owners(self) -> Iterator[Owner]:
        for group in self.collection.groups:
            yield Owner(f"table_{group.name}", group.name, group.optimizer)


class RowGradients(NamedTuple):
    """What the training lookups of a table left for its update.

    What is done to gradients is done to `gradients` alone: ``rows._replace(gradients=...)``. Those
    of two batches are those of both, one after the other (see docs/migration.md, "Counts").

    Attributes:
      results: of the lookups, keys and slots as integers among them, which stay what they are; rows
        of an output in bfloat16 are in it.
      gradients: by their rows, in their dtype.
      counts: of the tables that are in the table, by the layer's path and their names, for each
        lookup.
    """

    results: list[Any]
    gradients: list[jax.Array]
    counts: list[TableCounts | None]


def value_and_grad(
    loss_fn: Callable[..., Any], *, wrt: Any = nnx.Param, has_aux: bool = False
) -> Callable[..., tuple[Any, Any, dict[str, RowGradients]]]:
    """Differentiates a loss with respect to dense parameters and to the rows looked up.

    Args:
      loss_fn: of the model and other arguments; returns a scalar (and, with `has_aux`, more).
      wrt: filter of the dense parameters.
      has_aux: as for ``nnx.value_and_grad``.

    Returns:
      A function of the same arguments that returns the loss (with `has_aux`: loss and the rest),
      the gradients of `wrt` as ``nnx.grad`` gives them, and those of the rows by the path of their
      table, for :func:`update_tables`. The model's tables have the new ids.
    """
    _arguments.check_loss_fn("nnx.value_and_grad", "model", loss_fn, has_aux)
    state = nnx.DiffState(0, nnx.Any(wrt, RowPerturbation))
    differentiate = nnx.value_and_grad(loss_fn, argnums=state, has_aux=has_aux, **GRAPH_MODE)

    def compute(
        model: nnx.Module, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any, dict[str, RowGradients]]:
        try:
            for _, layer in layers_of(model):
                layer.is_recording = True
            shapes = row_shapes(loss_fn, model, args, kwargs)
            for path, layer in layers_of(model):
                for name, shape in shapes.get(names_of(path), {}).items():
                    setattr(layer, name, RowPerturbation(zeros_of(shape)))
            value, gradients = differentiate(model, *args, **kwargs)
            rows, dense = nnx.split_state(gradients, RowPerturbation, ...)
            return value, dense, _row_gradients(model, rows)
        except (TypeError, ValueError) as error:
            owners = [own.attribute for _, layer in layers_of(model) for own in layer._owners()]
            _layers.explain_structure(error, [LOOKUP.format(own, 0) for own in owners])
            raise
        finally:
            forget(model)

    return compute


def _row_gradients(model: nnx.Module, rows: Any) -> dict[str, RowGradients]:
    """What the layers recorded, with the gradients of the perturbations, by path of the table."""
    flat = {names_of(path): leaf.get_value() for path, leaf in nnx.to_flat_state(rows)}
    names = {id(variable): where for where, (variable, _) in places_of(model).items()}
    lookups = [
        (lookup, path, owner.attribute, number, names[id(getattr(layer, owner.attribute))])
        for path, layer in layers_of(model)
        for owner in layer._owners()
        for number, (_, lookup) in enumerate(layer._lookups(owner.attribute))
    ]
    found: dict[str, RowGradients] = {where: RowGradients([], [], []) for *_, where in lookups}
    for lookup, path, attribute, number, where in sorted(lookups, key=lambda own: own[0].turn):
        own, looked = found[where], lookup.get_value()
        own.results.append(looked.result)
        own.gradients.append(flat[names_of((*path, ROWS.format(attribute, number)))])
        own.counts.append(looked.counts and looked.counts.under(path_text(path)))
    return found


def update_tables(model: nnx.Module, row_gradients: dict[str, RowGradients], **extra: Any) -> None:
    """One step of their optimizers on the rows that the model's layers looked up.

    Args:
      model: it is changed.
      row_gradients: of :func:`value_and_grad`. Rows whose id has lost its slot since are skipped,
        and counted by the table.
      **extra: for the optimizers (`apply`, `learning_rate`, ...).

    Raises:
      ValueError: if the model has no such table, or if a layer that was trained has no optimizer.
    """
    places = places_of(model)
    _arguments.check_row_gradients(row_gradients)
    if not places.keys() >= row_gradients.keys():
        raise ValueError(
            f"nnx.update_tables: row_gradients must be of the model's tables {sorted(places)}, got "
            f"{sorted(row_gradients)}"
        )
    tables = {}
    for where, (results, gradients, _) in row_gradients.items():
        variable, by = places[where]
        own = variable.get_value()
        tables[where] = _layers.updated(where, own, by.optimizer, results, gradients, extra)
    for where, table in tables.items():  # behind all errors: the model has all steps, or none
        places[where][0].set_value(table)


# What a skipped step leaves as it was, beside the rows: parameters, statistics, both optimizers.
_SKIPPED = nnx.Not(nnx.Any(TableVariable, Lookup, RowPerturbation, nnx.RngState, nnx.Intermediate))
# What devices find out by themselves, each from its part of a batch: their mean is kept.
_STATISTICS = nnx.Not(nnx.Any(TableVariable, nnx.Param, nnx.RngState))


class TrainState(nnx.Module, Generic[Model]):
    """Everything that a training step changes: the model with its tables, and the optimizers.

    Args:
      model: that holds layers of this module.
      tx: an ``optax.GradientTransformation`` for the dense parameters. It is given gradients, state
        and parameters: one that wants more (``reduce_on_plateau``, ``lbfgs``) is not for
        :func:`train_step`. ``clip_by_global_norm`` in it sees dense gradients only; `max_norm` of
        :func:`train_step` is the bound of dense ones and rows together.
      loss_scale: to train in half precision with; `tx` works in float32 then.
    """

    def __init__(self, model: Model, tx: Any, loss_scale: LossScale | None = None):
        is_model, expected = isinstance(model, nnx.Pytree), "a flax.nnx.Module"
        _arguments.check_state("TrainState", model, is_model, expected, tx, loss_scale)
        self.model = model
        self.optimizer = nnx.Optimizer(model, _layers.for_dense(tx, loss_scale), wrt=nnx.Param)
        state, paths = self.optimizer.opt_state, trainable(model)
        _layers.check_dense_state("TrainState", state, paths, loss_scale)
        nnx.update(self.optimizer, _layers.copied(nnx.state(self.optimizer)))  # tx may hold arrays
        scale = _layers.copied(loss_scale)
        self.loss_scale = None if scale is None else LossScaleVariable(scale)

    @overload
    def map_tables(
        self, fn: Callable[[Table], Table], *, has_aux: Literal[False] = False, only: Only = None
    ) -> None: ...

    @overload
    def map_tables(
        self, fn: Callable[[Table], tuple[Table, Aux]], *, has_aux: Literal[True], only: Only = None
    ) -> dict[str, Aux]: ...

    def map_tables(
        self, fn: Callable[[Table], Any], *, has_aux: bool = False, only: Only = None
    ) -> dict[str, Any] | None:
        """Changes every table by a function.

        Args:
          fn: of a table to a table, as :func:`jax_hkv.advance_epoch`, or with `has_aux` to (table,
            anything), as ``jax.jit(lambda table: jax_hkv.expire(table, 30), donate_argnums=0)``,
            which copies no table.
          has_aux: whether `fn` returns more than the table: what became of it, say.
          only: the path of a table, or paths of several, as :attr:`StepInfo.tables` has them (of
            one that layers share the first layer's).

        Returns:
          With `has_aux` what `fn` returned of each table, by its path.

        Raises:
          TypeError: if `fn` returns anything else. A jitted `fn` is asked about all tables first.
          ValueError: if `only` has a path that no table has.
        """
        places = places_of(self.model)
        tables = [(where, own.get_value()) for where, (own, _) in places.items()]
        changed, aux = _layers.changed(fn, tables, has_aux, only)
        for (own, _), table in zip(places.values(), changed, strict=True):
            own.set_value(table)
        return aux if has_aux else None


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    max_norm: float | None = None,
    micro_batches: int = 1,
    donate: bool = True,
    placement: Placement | None = None,
    check_overflow: bool = True,
) -> Step[StepInfo]:
    """A jitted training step of a model with tables.

    Args:
      loss_fn: of the model and the step's arguments; returns a scalar, or (scalar, anything) with
        `has_aux`.
      has_aux: as for ``jax.grad``.
      max_norm: the bound of the norm of all gradients together, dense ones and rows.
      micro_batches: as for :func:`jax_hkv.linen.train_step`; random streams go on from part to
        part, and ``nnx.Intermediate`` that a model sows is dropped. Its calls change arrays alone.
      donate: whether the arrays of the state are used up, so that nothing is copied.
      placement: of the state (see :func:`place`), on several devices: then each of them gets its
        part of every argument (see :meth:`jax_hkv.sharding.Placement.put`), `loss_fn` sees one
        device's part, and the loss is the mean of theirs.
      check_overflow: as for :func:`jax_hkv.linen.train_step`, with what it raises.

    Returns:
      A function of (state, *args) that changes the :class:`TrainState` and returns a
      :class:`jax_hkv.nnx.StepInfo`.

    Raises:
      TypeError, ValueError: naming the argument.
      ValueError: while tracing, if `loss_fn` looks up no table with an optimizer by a call with
        ``train=True``: the dense parameters alone would be trained. If it leaves out some of them,
        a ``UserWarning`` names these once; where tasks take turns, ``warnings.filterwarnings``
        silences it.
    """
    _arguments.check_step("model", loss_fn, has_aux, max_norm, donate, placement)
    devices = _layers.Devices(() if placement is None else placement.axes)
    micro_batches = as_count("train_step", micro_batches)

    def step(state: TrainState, *args: Any) -> StepInfo:
        scale = None if state.loss_scale is None else state.loss_scale.get_value()

        def scaled_loss(model: nnx.Module, *args: Any) -> Any:
            loss, aux = _layers.loss_and_aux(loss_fn(model, *args), has_aux)
            return _layers.scaled(devices.part(loss), scale, micro_batches), (loss, aux)

        nnx.pop(state.model, nnx.Intermediate)  # what an earlier step has sown
        parts = (state.model, state.optimizer)
        before = jax.tree.map(lambda leaf: leaf, nnx.state(parts, _SKIPPED))  # the arrays as such
        differentiate = value_and_grad(scaled_loss, has_aux=True)
        if micro_batches == 1:
            (_, (loss, aux)), dense, rows = differentiate(state.model, *args)
        else:
            dense, ((_, (loss, aux)), rows) = in_micro_batches(
                differentiate, state.model, args, micro_batches
            )
        _layers.check_trained(trainable(state.model), rows)
        results = {where: own.results for where, own in rows.items()}
        gradients = {where: own.gradients for where, own in rows.items()}
        overflow = _layers.strict_overflow(results)
        evicted = _layers.evicted(results, micro_batches)
        dense, gradients, finite, scale, norm = _layers.prepared(
            *(devices.total(dense), gradients, results, scale, max_norm, devices, overflow),
            (loss, nnx.state(parts, _SKIPPED), before),
        )
        with _arguments.wants_gradients_alone():
            state.optimizer.update(state.model, dense)
        if finite is not None:
            nnx.update(parts, _layers.kept_unless(finite, nnx.state(parts, _SKIPPED), before))
        extra = {} if finite is None else {"apply": finite}
        clipped = {where: own._replace(gradients=gradients[where]) for where, own in rows.items()}
        update_tables(state.model, clipped, **extra)
        if state.loss_scale is not None:
            state.loss_scale.set_value(scale)
        tables = {where: own.get_value() for where, (own, _) in places_of(state.model).items()}
        measured = {
            where: devices.measured(tables[where], own, where) for where, own in results.items()
        }
        counts = _table_counts.total(each for own in rows.values() for each in own.counts if each)
        loss, aux = devices.mean(jnp.mean(loss)), devices.stacked(aux)
        return StepInfo(loss, aux, measured, counts, finite, overflow, evicted, norm)

    def step_of_one(state: TrainState, *args: Any) -> StepInfo:
        info = step(state, *args)
        nnx.pop(state.model, nnx.Intermediate)  # what a model sows is of this call only
        nnx.update(state.model, devices.mean(nnx.state(state.model, _STATISTICS)))
        return info

    if placement is None:
        jitted = Alone(nnx.jit(step, donate_argnums=0 if donate else None, **GRAPH_MODE))
    else:
        jitted = Placed(placement, step_of_one, donate)

    options = (placement, micro_batches, check_overflow, nnx.state)
    return cacheable(host_checked(jitted, TrainState, lambda info: info, *options))
