"""Embedding layers for flax.linen.

Tables live in a variable collection of their own, ``"tables"``, so that neither ``params`` nor the
dense optimizer ever sees them. Training is a few lines::

    model = Model(...)                                  # holds Embed, EmbedBag or EmbedCollection
    state = hkv.linen.TrainState.create(model, jax.random.key(0), ids, dense, tx=optax.adam(1e-3))

    def loss_fn(apply, ids, dense, labels):
        logits = apply(ids, dense, train=True)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    train_step = hkv.linen.train_step(loss_fn)
    for batch in batches:
        state, info = train_step(state, *batch)

Whoever writes the step by hand calls ``apply(..., mutable=MUTABLE)``, differentiates by
:func:`perturbations` too, and gives their gradient to :func:`update_tables`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import unfreeze
from flax.core.scope import union_filters
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Float

from jax_hkv import (
    _layers,
    _micro_batches,
    _state_dicts,
    _table_counts,
    initializers,
    pooled,
)
from jax_hkv._bag_parts import as_count
from jax_hkv._checked_steps import host_checked
from jax_hkv._keys import Keys
from jax_hkv._layer_arguments import (
    Unseen,
    check_collection,
    check_given_table,
    check_outputs,
    check_state,
    check_step,
    check_updated,
    new_table,
)
from jax_hkv._layers import StepInfo
from jax_hkv._linen_steps import (
    LOOKUPS,
    MUTABLE,
    PERTURBATIONS,
    TABLES,
    Layer,
    Lookup,
    asked,
    by_path,
    gradients_of,
    lookups_of,
    named,
    next_of,
    results_of,
    trainable,
    with_pins,
    zeros_of_rows,
)
from jax_hkv._mapped import Aux
from jax_hkv._options import Only
from jax_hkv._placement import Placement
from jax_hkv._stages import Step
from jax_hkv._warnings import warn
from jax_hkv.admission import Admission
from jax_hkv.collection import Collection, TableConfig
from jax_hkv.features import Jagged, Padded
from jax_hkv.index import Index, Policy
from jax_hkv.optim import LossScale, Optimizer
from jax_hkv.table import OptimizerRows, Settings, Table

__all__ = [
    "LOOKUPS",
    "MUTABLE",
    "PERTURBATIONS",
    "TABLES",
    "Embed",
    "EmbedBag",
    "EmbedCollection",
    "Lookup",
    "Step",
    "StepInfo",
    "TrainState",
    "Unseen",
    "perturbations",
    "train_step",
    "update_tables",
]


class Embed(Layer):
    """An embedding layer over a dynamic table: any 64-bit id, no vocabulary.

    Attributes:
      capacity: entries that the table holds. Ids are spread over buckets by a hash, so a table of
        as many entries as ids evicts some already: of 10,000 ids in 10,000 entries 3 %, with
        ``choices=2`` less than 0.1 % in small batches. Ask for half as many again, or for both.
      features: elements of an embedding.
      dtype: of the output; None: that of the rows, of an :class:`EmbedBag` float32.
      param_dtype: of the rows.
      policy: which entries a full table evicts.
      choices: candidate buckets of an id, 1 or 2.
      embedding_init: first rows, from ``jax_hkv.initializers``.
      seed: of the first rows, 0 to 2**64 - 1. A first row is a function of (seed, id) alone: the
        key of ``model.init`` plays no part, and layers of one seed begin with equal rows for equal
        ids. Where that matters (two towers whose ids overlap), give them different seeds.
      optimizer: whose rows the table carries, and which updates it; None: for ``train=False`` only.
      admission: which new ids get a row, from ``jax_hkv.admission``; None: all of them.
      unseen: what ids without a row get (in evaluation; in training those that got none):
        "initial", the row that they would start with; "zeros"; or "learned", one row for all of
        them, a parameter.
      axis_name: of the mesh axis that the table and the batches are spread over, or a
        :class:`jax_hkv.sharding.Exchange`; the layer is called (and initialised) inside shard_map
        or pmap then. `capacity` is of all devices together, or each replica. None: one device.
      return_evicted: whether `evicted` of a step's report carries the entries that had to go.
    """

    capacity: int
    features: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    policy: Policy = Policy.LRU
    choices: int = 1
    embedding_init: initializers.Initializer | None = None
    seed: int = 0
    optimizer: Optimizer | None = None
    admission: Any = None
    unseen: Unseen = "initial"
    axis_name: Any = None
    return_evicted: bool = False

    @nn.compact
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
          train: whether unseen ids are inserted. Otherwise (and in ``init``) the table is left
            alone.
          valid: ``bool`` of the ids' shape; masked positions get zeros.
          scores: for training under CUSTOM, or as counts; see :func:`jax_hkv.find_or_insert`.
          admit: ``bool`` of the ids' shape: of training, which positions let new ids in; None: all.
          values: ``[*ids, features]`` of the table's type: of unseen ids, instead of the initial
            rows, which they are inserted with (not differentiated), or, with ``unseen="initial"``,
            stand for without being inserted.
        """
        ids, valid = _layers.each_id(type(self).__name__, ids, valid)
        variable = self._table("table", self.features, self._create)
        is_training = self._begins(train, variable.value)
        table, found = self._looked_up(
            *(_layers.look_up, variable.value, ids),
            train=is_training,
            valid=valid,
            values=values,
            scores=scores,
            admit=admit,
            pinned=self._pinned(variable) if is_training else None,
        )
        self._store(variable, table)
        rows = self._record("table", found.result, self.optimizer) if is_training else found.values
        rows = _layers.with_unseen(rows, found, valid, self._unseen_row())
        return _layers.cast(self, rows)

    def _unseen_row(self) -> Any:
        """The row of ids without one: None for their own, a number, or a parameter."""
        check_outputs(type(self).__name__, self.dtype, self.unseen, self.return_evicted)
        if self.unseen == "learned":
            init = nn.initializers.zeros
            return self.param("unseen", init, (self.features,), self.param_dtype)
        return None if self.unseen == "initial" else 0.0

    def _begins(self, train: bool, table: Table) -> bool:
        is_training = self._begin(train)
        call = " ".join([type(self).__name__, "/".join(self.path)])
        check_given_table(call.strip(), table, self._settings(), train=is_training)
        return is_training

    def _settings(self) -> Settings:
        return Settings(
            self.features,
            self.param_dtype,
            self.policy,
            self.choices,
            self.embedding_init,
            self.seed,
            self.admission,
        )

    def _create(self) -> Table:
        call = type(self).__name__
        name, given = "/".join(self.path) or call, self._settings()
        return new_table(call, name, self.axis_name, self.capacity, self.optimizer, given)


class EmbedBag(Embed):
    """An embedding layer for several ids an example: their rows are combined.

    Attributes:
      combiner: "sum", "mean" or "sqrtn"; see :func:`jax_hkv.find_pooled`.
    """

    combiner: pooled.Combiner = "sum"

    @nn.compact
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
        variable = self._table("table", self.features, self._create)
        batch, layout = given = _layers.as_batch(self, ids, weights, valid, train)
        unseen = self._unseen_row()
        is_training = self._begins(train, variable.value)
        table, found = self._looked_up(
            *(_layers.look_up_bags, variable.value, given),
            train=is_training,
            scores=scores,
            admit=admit,
            pinned=self._pinned(variable) if is_training else None,
        )
        self._store(variable, table)
        rows = self._record("table", found.result, self.optimizer) if is_training else found.values
        rows = pooled.with_unseen(rows, batch, found.slots, unseen)
        return _layers.cast(self, rows.reshape(*layout.batch, self.features))


class EmbedCollection(Layer):
    """The embeddings of many features, a lookup for each physical table.

    Attributes:
      collection: the tables and features; its tables name their optimizers.
      dtype: of the outputs; None: float32.
      unseen: see :class:`Embed`; "learned" is a row for each table.
      axis_name: see :class:`Embed`.
      return_evicted: see :class:`Embed`.
    """

    collection: Collection
    dtype: Any = None
    unseen: Unseen = "initial"
    axis_name: Any = None
    return_evicted: bool = False

    @nn.compact
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
        check_outputs(type(self).__name__, self.dtype, self.unseen, self.return_evicted)
        check_collection(type(self).__name__, self.collection)
        groups = self.collection.groups
        variables = {
            g.name: self._table(g.name, g.tables[0].dim, g.create, self.axis_name) for g in groups
        }
        is_training = self._begin(train)
        own = {name: variable.value for name, variable in variables.items()}
        options = {"partial": partial, "scores": scores, "admit": admit}
        if is_training:
            options["pinned"] = {name: self._pinned(each) for name, each in variables.items()}
        tables, looked_up = self._looked_up(
            *(_layers.look_up_features, own, inputs), train=is_training, **options
        )
        rows = dict(looked_up.rows)
        for group in groups:
            result = looked_up.results[group.name]
            self._store(variables[group.name], tables[group.name])
            if result is not None:
                counts = group.counts(result)
                rows[group.name] = self._record(group.name, result, group.optimizer, counts)
        if self.unseen == "learned":
            learned = {config.name: self._learned(config) for config in self.collection.tables}
            rows = self.collection.with_unseen(rows, looked_up, learned)
        spread = self.collection.spread(rows, looked_up.parts)
        return {name: _layers.cast(self, own) for name, own in spread.items()}

    def _learned(self, config: TableConfig) -> jax.Array:
        init = nn.initializers.zeros
        return self.param(f"unseen_{config.name}", init, (config.dim,), config.dtype)


def perturbations(
    module: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Zeros like the rows that a call looks up; their gradient is that of the rows.

    Args:
      module: that holds layers of this kind.
      variables: its variables; only their shapes matter.
      *args: of the call.
      **kwargs: of the call, which is one of training: others leave no rows, and are warned of.
    """

    def call(variables: Any) -> Any:
        return module.apply(variables, *args, mutable=[*MUTABLE, PERTURBATIONS], **kwargs)[1]

    zeros = zeros_of_rows(call, variables)
    if not zeros:
        warn(
            "linen.perturbations: the call looks up no rows in training, and has none to "
            "differentiate by: give train=True, as the model takes it. In an evaluation, "
            "differentiate by rows that one method of the model looks up and another one takes"
        )
    return zeros


def update_tables(updated: Mapping[str, Any], row_gradients: Any, **extra: Any) -> Any:
    """The ``"tables"`` collection after one step of its optimizers on the rows looked up.

    Args:
      updated: what ``apply(..., mutable=MUTABLE)`` returned: tables and lookups.
      row_gradients: of the perturbations.
      **extra: for the optimizers (`apply`, `learning_rate`, ...).

    Raises:
      TypeError: if `updated` has no tables.
      ValueError: if a layer that was trained has no optimizer.
    """
    check_updated(updated, TABLES)
    lookups = lookups_of(updated)
    gradients = gradients_of(lookups, row_gradients)
    return unflatten_dict(_updated_tables(updated, lookups, gradients, extra))


def _updated_tables(
    updated: Mapping[str, Any],
    lookups: dict[Any, list[Lookup]],
    gradients: dict[Any, list[jax.Array]],
    extra: dict[str, Any],
) -> dict[Any, Table]:
    """All tables by path, those that were looked up after a step of their optimizer."""
    tables = by_path(updated[TABLES])
    for path, kept in lookups.items():
        results = [lookup.result for lookup in kept]
        tables[path] = _layers.updated(
            "/".join(path), tables[path], kept[0].optimizer, results, gradients[path], extra
        )
    return tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step changes: dense parameters, tables, and both optimizers.

    Attributes:
      step: ``int32``, steps taken, and those that a loss scale or a strict exchange skipped.
      params: of the dense layers.
      opt_state: of `tx`.
      tables: with their optimizer rows.
      variables: other collections (``batch_stats``).
      loss_scale: for half precision, or None.
      model: static.
      tx: static, the optimizer of the dense parameters.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    tables: Any
    variables: Any
    loss_scale: LossScale | None
    model: nn.Module = dataclasses.field(metadata={"static": True})
    tx: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        model: nn.Module,
        rng: Any,
        *args: Any,
        tx: Any,
        loss_scale: LossScale | None = None,
        **kwargs: Any,
    ) -> TrainState:
        """A fresh state.

        Args:
          model: that holds layers of this module.
          rng: of ``model.init``.
          *args: an example of the model's inputs.
          tx: an ``optax.GradientTransformation`` for the dense parameters. It is given gradients,
            state and parameters: one that wants more (``reduce_on_plateau``, ``lbfgs``) is not for
            :func:`train_step`. ``clip_by_global_norm`` in it sees dense gradients only; `max_norm`
            of :func:`train_step` is the bound of dense ones and rows together.
          loss_scale: to train in half precision with; `tx` works in float32 then, also for half
            parameters.
          **kwargs: of ``model.init``.

        Raises:
          TypeError: if `tx` is no such transformation, `model` no Module of linen, or `loss_scale`
            no :class:`jax_hkv.optim.LossScale`.
        """
        is_model = hasattr(model, "init") and hasattr(model, "apply")
        expected = "a flax.linen.Module"
        check_state("TrainState.create", model, is_model, expected, tx, loss_scale)

        def first() -> tuple[Any, ...]:
            variables = dict(model.init(rng, *args, **kwargs))
            params, tables = variables.pop("params", {}), variables.pop(TABLES, {})
            for name in (LOOKUPS, PERTURBATIONS):
                variables.pop(name, None)
            opt_state = _layers.for_dense(tx, loss_scale).init(params)
            return jnp.zeros((), jnp.int32), params, opt_state, tables, variables

        # Jitted: many features take several times as long op by op.
        step, params, opt_state, tables, variables = jax.jit(first)()
        paths = trainable(tables)
        _layers.check_dense_state("TrainState.create", opt_state, paths, loss_scale)
        scale = _layers.copied(loss_scale)
        return cls(step, params, opt_state, tables, variables, scale, model, tx)

    def replace(self, **fields: Any) -> TrainState:
        """The state with other values in some of its fields, as that of a ``flax.struct``."""
        return dataclasses.replace(self, **fields)

    @overload
    def map_tables(
        self, fn: Callable[[Table], Table], *, has_aux: Literal[False] = False, only: Only = None
    ) -> TrainState: ...

    @overload
    def map_tables(
        self, fn: Callable[[Table], tuple[Table, Aux]], *, has_aux: Literal[True], only: Only = None
    ) -> tuple[TrainState, dict[str, Aux]]: ...

    def map_tables(
        self, fn: Callable[[Table], Any], *, has_aux: bool = False, only: Only = None
    ) -> TrainState | tuple[TrainState, dict[str, Any]]:
        """The state with its tables changed by a function.

        Args:
          fn: of a table to a table, as :func:`jax_hkv.advance_epoch`, or with `has_aux` to (table,
            anything), as ``jax.jit(lambda table: jax_hkv.expire(table, 30), donate_argnums=0)``,
            which copies no table.
          has_aux: whether `fn` returns more than the table: what became of it, say.
          only: the path of a table, or paths of several, as :attr:`StepInfo.tables` has them.

        Returns:
          The state; with `has_aux` also what `fn` returned of each table, by its path.

        Raises:
          TypeError: if `fn` returns anything else. A jitted `fn` is asked about all tables first.
          ValueError: if `only` has a path that no table has.
        """
        tables, structure = named(self.tables)
        changed, aux = _layers.changed(fn, tables, has_aux, only)
        state = self.replace(tables=structure.unflatten(changed))
        return (state, aux) if has_aux else state

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output in evaluation, which changes nothing; jit a function of the state."""
        variables = {"params": self.params, TABLES: self.tables, **self.variables}
        return self.model.apply(variables, *args, **kwargs)


def train_step(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    max_norm: float | None = None,
    micro_batches: int = 1,
    donate: bool = True,
    placement: Placement | None = None,
    check_overflow: bool = True,
) -> Step[tuple[TrainState, StepInfo]]:
    """A jitted training step of a model with tables.

    Args:
      loss_fn: of ``apply`` and the step's arguments; returns a scalar, or (scalar, anything) with
        `has_aux`. ``apply(*args, train=True)`` calls the model, as often as need be; with
        ``mutable=["losses"]``, as in Flax, it returns the outputs and what the call has sown there
        (a sum that `sow` keeps goes on from ``state.variables``: leave it out of them).
      has_aux: as for ``jax.grad``.
      max_norm: the bound of the norm of all gradients together, dense ones and rows.
      micro_batches: parts of the batch, one after the other, so that activations take the memory of
        one part. Every array among the arguments is cut along its first axis, which all of them
        share (single numbers are for all parts); a ``jax.random.key`` is split; a
        :class:`jax_hkv.Jagged` is one of each part, put together by
        :func:`jax_hkv.sharding.concatenate` (over devices those of one device after those of the
        other). Parameters and optimizers make one step, by the mean of the parts' losses (one over
        valid examples divides by a number that is the same for all parts); of a table each part is
        a time of its own, which evicts nothing that earlier ones hold. `aux` has a leading axis for
        the parts (over devices behind theirs).
      donate: whether the state that is given is used up, so that nothing is copied.
      placement: of the state, on several devices: then each of them gets its part of every
        argument (see :meth:`jax_hkv.sharding.Placement.put`), `loss_fn` sees one device's part, and
        the loss is the mean of theirs. The model's layers have an `axis_name`.
      check_overflow: whether a step with a strict exchange waits for its count of keys that found
        no room, and raises. Otherwise look at ``strict_overflow`` of the report now and then.

    Returns:
      A function of (state, *args) to the next state and a :class:`jax_hkv.linen.StepInfo`.

    Raises:
      TypeError, ValueError: naming the argument.
      ValueError: while tracing, if `loss_fn` looks up no table with an optimizer by a call with
        ``train=True``: the dense parameters alone would be trained. If it leaves out some of them,
        a ``UserWarning`` names these once; where tasks take turns, ``warnings.filterwarnings``
        silences it.
      ExchangeOverflow: see `check_overflow`; :class:`jax_hkv.sharding.ExchangeOverflow`.
    """
    check_step("apply", loss_fn, has_aux, max_norm, donate, placement)
    devices = _layers.Devices(() if placement is None else placement.axes)
    micro_batches = as_count("train_step", micro_batches)

    def differentiated(
        state: TrainState, collections: Any, pinned: Any, *args: Any
    ) -> tuple[Any, Any, Any]:
        """Collections after a lookup of (a part of) the batch, dense gradients, and the rest."""
        kept = [*MUTABLE, *state.variables]
        collections = {**collections, TABLES: with_pins(collections[TABLES], pinned)}

        def run(params: Any, perturbed: Any, collections: Any, also: Any = ()) -> Any:
            variables = dict(collections)
            given = {} if perturbed is None else {PERTURBATIONS: perturbed}

            def apply(*inputs: Any, mutable: Any = False, **kwargs: Any) -> Any:
                before = {"params": params, **given, **variables}
                changing = union_filters([*kept, *also], mutable)
                outputs, after = state.model.apply(before, *inputs, mutable=changing, **kwargs)
                variables.update({name: after[name] for name in (*kept, *also) if name in after})
                if mutable is False:
                    return outputs
                return outputs, asked(mutable, before, after)

            loss, aux = _layers.loss_and_aux(loss_fn(apply, *args), has_aux)
            scaled = _layers.scaled(devices.part(loss), state.loss_scale, micro_batches)
            return scaled, (loss, aux, variables)

        zeros = zeros_of_rows(
            lambda collections: run(state.params, None, collections, (PERTURBATIONS,))[1][2],
            collections,
        )
        (_, (loss, aux, updated)), gradients = jax.value_and_grad(
            run, argnums=(0, 1), has_aux=True
        )(state.params, zeros, collections)
        lookups = lookups_of(updated)
        after = {
            name: next_of(old, updated[name]) for name, old in collections.items() if name != TABLES
        }
        after[TABLES] = with_pins(updated[TABLES], {})
        return after, gradients[0], (loss, aux, lookups, gradients_of(lookups, gradients[1]))

    def step(state: TrainState, *args: Any) -> tuple[TrainState, StepInfo]:
        others = {TABLES: unfreeze(state.tables), **state.variables}
        differentiate = functools.partial(differentiated, state)
        if micro_batches == 1:
            updated, dense, rest = differentiate(others, {}, *args)
        else:
            updated, dense, rest = _micro_batches.scan(
                *(differentiate, others, args, micro_batches, state.params),
                lambda rest: results_of(rest[2]),
            )
        loss, aux, lookups, rows = rest
        _layers.check_new_tables(by_path(state.tables), by_path(updated[TABLES]), devices)
        _layers.check_trained(trainable(state.tables), map("/".join, lookups))
        results = results_of(lookups)
        by_name = {"/".join(path): own for path, own in results.items()}
        overflow = _layers.strict_overflow(by_name)
        evicted = _layers.evicted(by_name, micro_batches)
        dense, rows, finite, scale, norm = _layers.prepared(
            *(devices.total(dense), rows, results, state.loss_scale, max_norm, devices, overflow),
            (loss, {name: updated[name] for name in state.variables}, state.variables),
        )
        tx = _layers.for_dense(state.tx, state.loss_scale)
        params, opt_state = _layers.dense_update(tx, dense, state.opt_state, state.params, finite)
        extra = {} if finite is None else {"apply": finite}
        tables = _updated_tables(updated, lookups, rows, extra)
        measured = {
            "/".join(path): devices.measured(tables[path], results[path], "/".join(path))
            for path in lookups
        }
        counts = _table_counts.total(
            lookup.counts.under("/".join(path[:-1]))
            for path, kept in lookups.items()
            for lookup in kept
            if lookup.counts is not None
        )
        after = dataclasses.replace(
            state,
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            tables=unflatten_dict(tables),
            variables={
                name: devices.mean(_layers.kept_unless(finite, updated[name], old))
                for name, old in state.variables.items()
            },
            loss_scale=scale,
        )
        loss, aux = devices.mean(jnp.mean(loss)), devices.stacked(aux)
        return after, StepInfo(loss, aux, measured, counts, finite, overflow, evicted, norm)

    if placement is None:
        jitted = jax.jit(step, donate_argnums=0) if donate else jax.jit(step)
    else:
        jitted = placement.step(step, donate=donate)

    return host_checked(
        jitted, TrainState, lambda outputs: outputs[1], placement, micro_batches, check_overflow
    )


_state_dicts.register(
    *(Table, Index, OptimizerRows, Admission, Keys, Jagged, Padded, TrainState, LossScale),
    _table_counts.TableCounts,
)
