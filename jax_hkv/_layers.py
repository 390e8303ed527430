"""What the layers for linen and for nnx have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from jax_hkv import _sharded, _sharded_updates, metrics, pooled, sharding
from jax_hkv import operations as _operations
from jax_hkv._bags import Bagged, Layout
from jax_hkv._checks import as_mask
from jax_hkv._compat import came_from, gathered, over
from jax_hkv._exchange import as_exchange
from jax_hkv._gradients import (
    LossScale,
    all_finite,
    clip_by_global_norm,
    of_rows,
    stay_finite,
)
from jax_hkv._layer_arguments import rows_dtype, wants_gradients_alone
from jax_hkv._mapped import mapped
from jax_hkv._options import Only
from jax_hkv._warnings import agree, lookup_of_layer, warn
from jax_hkv.features import Jagged, Padded, as_given
from jax_hkv.index import NO_SLOT, total_of
from jax_hkv.optim import has_micro_steps, skips_steps
from jax_hkv.table import Counts, Entries, Table, check_dim


class StepInfo(NamedTuple):
    """What a training step reports.

    Attributes:
      loss: of the batch, not scaled.
      aux: what the loss function returned beside it.
      tables: the metrics of each physical table, by its path; of several lookups (layers that share
        one, micro-batches) the sums, see :class:`jax_hkv.metrics.Metrics`.
      counts: what became of the ids of each table of a collection, by the collection's path and the
        table's name; see :meth:`jax_hkv.collection.Group.counts`.
      finite: whether the step was taken: gradients and new statistics were finite, the loss no NaN,
        and a strict exchange had room; None without a loss scale and such an exchange.
      strict_overflow: of the tables whose exchange between devices is strict: keys that found no
        room. The step was not taken then, and :func:`train_step` raises, unless it is told not to
        look (`check_overflow`) or is itself traced (in a scan), where this count is all that tells.
      evicted: of the layers with `return_evicted`, by path of the table: the entries that each
        lookup has displaced, one lookup (of one micro-batch) after the other. The first of equal
        keys is as it was before the step, later ones were brought by the step: import them in
        reverse order (:func:`jax_hkv.import_batch`).
      grad_norm: with `max_norm`, the norm of all gradients, dense ones and rows, before it was
        bounded (``float("inf")`` bounds nothing), NaN where one of them is; else None.

    Over several devices everything is that of all of them, and `aux` has a leading axis for them;
    entries have a `count` for each, and go back into the same devices' parts.
    """

    loss: Float[Array, ""]
    aux: Any
    tables: dict[str, metrics.Metrics]
    counts: Mapping[str, Counts]
    finite: Bool[Array, ""] | None
    strict_overflow: dict[str, Int32[Array, ""]]
    evicted: dict[str, list[Entries]]
    grad_norm: Float[Array, ""] | None


class Found(NamedTuple):
    """What a lookup of single ids gave: rows, slots (-1 for none), and a result in training.

    `offered` are the rows that were given for unseen ids, if any.
    """

    values: jax.Array
    slots: jax.Array
    result: Any
    offered: Any


def each_id(call: str, ids: Any, valid: Any) -> tuple[Any, Any]:
    """Ids and their mask; of bags those of all positions, one after the other."""
    bags = ids
    while isinstance(bags, (Jagged, Padded)):
        if bags.weights is not None:
            raise ValueError(
                f"{call}: ids must be a {type(bags).__name__} without weights where every id has "
                f"its row, got {type(bags.weights).__name__}{list(np.shape(bags.weights))}: "
                "multiply the rows by them"
            )
        bags = bags.ids
    given, _ = as_given(call, ids, None, valid, is_each=True)
    return given.keys, given.valid


def look_up(
    layer: Any,
    table: Table,
    ids: Any,
    *,
    axis_name: Any,
    train: bool,
    valid: Any,
    values: Any,
    **training: Any,
) -> tuple[Table, Found]:
    """Looks up single ids, over the devices of an axis if there is one.

    `values` are rows for unseen ids, or None, and `training` options of a lookup that trains.
    """
    dtype, offered = rows_dtype(layer, train=train, usual=table.dtype), None
    if values is not None:
        offered = _operations.rows_of("Embed", values, table, ids)
    exchange = as_exchange(axis_name)
    options: dict[str, Any] = {"valid": valid, "dtype": dtype}
    operations: Any = _operations
    if exchange is not None:
        options["axis_name"] = exchange if train else exchange.of_reads()
        operations = sharding
    if train:
        options |= {**training, "return_evicted": layer.return_evicted}
        options["values"] = None if offered is None else jax.lax.stop_gradient(offered)
    else:
        options["fill"] = "initial"
    is_right = table.replicas is True and not train
    with contextlib.nullcontext() if exchange else lookup_of_layer("Embed", is_right=is_right):
        lookup = operations.find_or_insert if train else operations.find
        table, result = lookup(table, ids, **options)
    if not train:
        slots = jnp.where(result.found, jnp.int32(0), NO_SLOT)
        return table, Found(result.values, slots, None, offered)
    slots = result.slots if exchange is None else _sharded.slots_like(result.status)
    return table, Found(result.values, slots, result, offered)


def as_batch(layer: Any, ids: Any, weights: Any, valid: Any, train: bool) -> tuple[Bagged, Layout]:
    """As that of :mod:`jax_hkv.pooled`, of a layer: ids along one axis that train are examples."""
    call = type(layer).__name__
    batch, layout = pooled.as_batch(call, layer.combiner, ids, weights, valid)
    if train and layout.batch == ():
        raise ValueError(
            f"{call}: ids must have the shape [*batch, hotness], or be a jax_hkv.Jagged, got "
            f"{list(layout.ids)}, which would be one bag for the whole batch: give ids[:, None] "
            "for bags of one id, ids[None] for one bag"
        )
    return batch, layout


def look_up_bags(
    layer: Any,
    table: Table,
    given: tuple[Bagged, Layout],
    *,
    axis_name: Any,
    admit: Any,
    **options: Any,
) -> tuple[Table, pooled.BagRows]:
    """The lookup of a layer's bags, of :func:`as_batch`; a learned row is added later."""
    call, (batch, layout) = type(layer).__name__, given
    own: dict[str, Any] = {"exchange": as_exchange(axis_name), "evicted": layer.return_evicted}
    own |= {"is_weighted": layout.is_weighted, **_of_rows(layer, options["train"])}
    admit = as_mask(call, "admit", admit, layout.ids)
    return _sharded.of_batch(call, table, batch, admit=admit, **own, **options)


def look_up_features(layer: Any, tables: Any, inputs: Any, **options: Any) -> Any:
    """The lookup of a layer's collection; a learned row of ids without one is added later."""
    own = _of_rows(layer, options["train"])
    own["return_evicted"] = layer.return_evicted
    return layer.collection.lookup(tables, inputs, **own, **options)


def _of_rows(layer: Any, train: bool) -> dict[str, Any]:
    """What ids without a row add, and the type in which rows come."""
    fill = "initial" if layer.unseen == "initial" else 0.0
    return {"fill": fill, "dtype": rows_dtype(layer, train=train)}


def with_unseen(rows: jax.Array, found: Found, valid: Any, unseen: Any) -> jax.Array:
    """Rows, where ids have none: the given row (None: those offered); zeros where masked."""
    unseen = found.offered if unseen is None else unseen
    if unseen is None:
        return rows
    absent = found.slots < 0
    own = absent if valid is None else absent & jnp.asarray(valid)
    replaced = jnp.where(own[..., None], jnp.asarray(unseen, rows.dtype), 0)
    return jnp.where(absent[..., None], replaced, rows)


def cast(layer: Any, rows: jax.Array) -> jax.Array:
    """In the dtype of a layer's output, which the lookup has checked; None: as they are."""
    return rows if layer.dtype is None else rows.astype(layer.dtype)


class Devices(NamedTuple):
    """The axes over which the devices of a training step work together; none on one device."""

    axes: tuple[str, ...] = ()

    def mean(self, tree: Any) -> Any:
        """The mean over the devices: of integers and bools the nearest; random keys are equal."""

        def one(leaf: Any) -> Any:
            kind = jnp.result_type(leaf)
            if jnp.issubdtype(kind, jnp.floating):
                return over(self.axes, jax.lax.pmean, leaf)
            if not (jnp.issubdtype(kind, jnp.integer) or kind == jnp.bool_):
                return leaf
            whole = jnp.asarray(leaf, jnp.uint8 if kind == jnp.bool_ else kind)
            unsigned = jnp.dtype(f"uint{jnp.iinfo(whole.dtype).bits}")  # holds differences
            least = over(self.axes, jax.lax.pmin, whole)  # of equal ones every bit stays
            excess = (whole - least).astype(unsigned).astype(jnp.float32)
            more = jnp.round(over(self.axes, jax.lax.pmean, excess)).astype(unsigned)
            return (least + more.astype(whole.dtype)).astype(kind)

        return jax.tree.map(one, tree) if self.axes else tree

    def total(self, tree: Any) -> Any:
        """The sum over the devices."""
        return over(self.axes, jax.lax.psum, tree)

    def every(self, flag: Bool[Array, ""]) -> Bool[Array, ""]:
        """Whether it holds on all devices."""
        return over(self.axes, jax.lax.pmin, flag.astype(jnp.int32)) > 0 if self.axes else flag

    def stacked(self, tree: Any) -> Any:
        """Every device's, along a leading axis."""
        return jax.tree.map(self._gathered, tree) if self.axes else tree

    def _gathered(self, leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):  # JAX gathers no typed ones
            words = self._gathered(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        shape = (math.prod(map(jax.lax.axis_size, self.axes)), *leaf.shape)
        if not leaf.size:
            return jnp.zeros(shape, leaf.dtype)
        for axis in reversed(self.axes):
            leaf = gathered(leaf, axis)
        return leaf.reshape(shape)

    def part(self, loss: jax.Array) -> jax.Array:
        """This device's share of the mean of all losses."""
        return loss / math.prod(jax.lax.axis_size(axis) for axis in self.axes)

    def measured(self, table: Table, results: list[Any], where: str) -> metrics.Metrics:
        """The metrics of a table and of its lookups, over all devices."""
        if self.axes and not _sharded.is_sharded(results):
            raise ValueError(
                f"train_step: {where} was looked up without an axis name, so that every device "
                f"trains a table of its own: give its layer axis_name={self.axes[-1]!r}"
            )
        for each in results if self.axes else ():
            if not agree(each.exchange.replicas, each.exchange.axes, self.axes):
                raise ValueError(
                    f"train_step: {where} was looked up over the axes {each.exchange.axes}, but "
                    f"the placement spreads it over {self.axes}: name the same axes in both, in "
                    "the same order"
                )
        return metrics.of(table, results)


def strict_overflow(results: dict[str, list[Any]]) -> dict[str, Int32[Array, ""]]:
    """Keys that found no room in strict exchanges, by path of the table."""
    found = {}
    for where, own in results.items():
        strict = [each for each in own if _sharded.is_strict(each)]
        if strict:
            found[where] = sum((total_of(each.overflow) for each in strict), jnp.int32(0))
    return found


def evicted(results: dict[str, list[Any]], parts: int) -> dict[str, list[Entries]]:
    """What lookups have displaced, where it is wanted, by path of the table, in order of time.

    Args:
      results: of the lookups, stacked where there are several parts.
      parts: micro-batches.
    """
    found = {}
    for where, own in results.items():
        wanted = [each.evicted for each in own if each.evicted]
        if wanted:
            of_parts = [_unstacked(each) for each in wanted]
            turns = [len(each) // parts for each in of_parts]
            found[where] = [
                entries
                for part in range(parts)
                for each, count in zip(of_parts, turns, strict=True)
                for entries in each[part * count : (part + 1) * count]
            ]
    return found


def _unstacked(entries: Entries) -> list[Entries]:
    """Those of each lookup, where a scan has stacked several."""
    axes = entries.count.ndim
    if axes == 0:
        return [entries]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[axes:]), entries)
    return [jax.tree.map(operator.itemgetter(n), flat) for n in range(entries.count.size)]


def taken(
    finite: Bool[Array, ""] | None, overflow: dict[str, Int32[Array, ""]]
) -> Bool[Array, ""] | None:
    """Whether a step is taken: it is finite, and no strict exchange overflowed."""
    for count in overflow.values():
        finite = count == 0 if finite is None else finite & (count == 0)
    return finite


def loss_and_aux(outputs: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """What a loss function returned, checked: otherwise all gradients might be zeros, silently."""
    is_pair = isinstance(outputs, (tuple, list)) and len(outputs) == 2
    pair: Any = outputs if has_aux and is_pair else (outputs, None)
    loss, aux = pair
    is_number = isinstance(loss, (jax.Array, np.ndarray, np.generic, float)) and not np.shape(loss)
    if has_aux == is_pair and is_number and jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        return jnp.asarray(loss), aux
    dtype, shape = getattr(loss, "dtype", None), getattr(loss, "shape", ())
    got = type(loss).__name__ if dtype is None else f"{dtype}{list(shape)}"
    raise TypeError(
        "train_step: loss_fn must return one floating-point number (with has_aux=True: a pair of "
        f"it and anything), got {got}: take a mean, or name what else it returns by has_aux"
    )


def scaled(loss: jax.Array, scale: LossScale | None, micro_batches: int) -> jax.Array:
    """The loss that is differentiated: a micro-batch's share of the mean, times the loss scale."""
    loss = loss if micro_batches == 1 else loss / micro_batches
    return loss if scale is None else loss * scale.scale.astype(loss.dtype)


def prepared(
    dense: Any,
    rows: dict[Any, list[jax.Array]],
    results: dict[Any, list[Any]],
    scale: LossScale | None,
    max_norm: float | None,
    devices: Devices,
    overflow: dict[str, Int32[Array, ""]],
    seen: tuple[Any, Any, Any],
) -> tuple[
    Any,
    dict[Any, list[jax.Array]],
    Bool[Array, ""] | None,
    LossScale | None,
    Float[Array, ""] | None,
]:
    """Gradients, not scaled but clipped; whether the step is taken; the next scale; the norm."""
    finite, norm, (loss, statistics, before) = None, None, seen
    if scale is not None:
        is_kept = ~jnp.isnan(loss).any() & stay_finite(statistics, before)
        trained = [of_rows(results[name], own) for name, own in rows.items()]
        finite, is_kept = devices.every(jnp.stack([all_finite(dense, trained), is_kept]))
        inverse = 1.0 / scale.scale
        dense, rows = jax.tree.map(
            lambda leaf: leaf * inverse.astype(leaf.dtype), widened((dense, rows))
        )
        scale = kept_unless(taken(None, overflow), scale.adjust(finite), scale)
        finite &= is_kept
    if max_norm is not None:
        order = list(results)
        dense, clipped, norm = clip_by_global_norm(
            max_norm, dense, [results[name] for name in order], [rows[name] for name in order]
        )
        rows = dict(zip(order, clipped, strict=True))
    return dense, rows, taken(finite, overflow), scale, norm


def widened(tree: Any) -> Any:
    """Half-precision leaves as float32."""

    def one(leaf: Any) -> Any:
        is_half = jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and leaf.dtype.itemsize < 4
        return leaf.astype(jnp.float32) if is_half else leaf

    return jax.tree.map(one, tree)


@dataclasses.dataclass(frozen=True)
class InFloat32:
    """A transformation whose state and arithmetic are float32 for half parameters too.

    Gradients that have lost their loss scale are too small for half types, and so are the moments
    made of them.
    """

    tx: Any

    def init(self, params: Any) -> Any:
        """As of the transformation."""
        return self.tx.init(widened(params))

    def update(self, gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        """As of the transformation; updates are float32."""
        return self.tx.update(widened(gradients), state, widened(params), **extra)


def for_dense(tx: Any, scale: LossScale | None) -> Any:
    """What updates dense parameters."""
    return tx if scale is None else InFloat32(tx)


def copied(tree: Any) -> Any:
    """Arrays of one's own, which can be donated."""
    return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), tree)


def kept_unless(finite: Bool[Array, ""] | None, new: Any, old: Any) -> Any:
    """The new arrays; where a step is skipped, those before it."""
    if finite is None:
        return new
    return jax.tree.map(lambda after, before: jnp.where(finite, after, before), new, old)


def dense_update(
    tx: Any, gradients: Any, opt_state: Any, params: Any, finite: Bool[Array, ""] | None
) -> tuple[Any, Any]:
    """Parameters and state after a step of an optax transformation; before it where not finite."""
    with wants_gradients_alone():
        updates, state = tx.update(gradients, opt_state, params)
    moved = jax.tree.map(lambda p, u: (widened(p) + widened(u)).astype(p.dtype), params, updates)
    return kept_unless(finite, (moved, state), (params, opt_state))


def updated(
    where: str, table: Table, optimizer: Any, results: list[Any], gradients: list[Any], extra: Any
) -> Table:
    """A table after its optimizer's step on all lookups of a training step."""
    if optimizer is None:
        raise ValueError(
            f"update_tables: {where} was looked up in training, but has no optimizer: give its "
            "layer one (optimizer=jax_hkv.optim.adam(1e-3)), or call it with train=False"
        )
    if _sharded.is_sharded(results):
        return _sharded_updates.update(optimizer, table, results, gradients, **extra)
    if len(results) == 1:
        return optimizer.update(table, results[0], gradients[0], **extra)
    return optimizer.update(table, results, gradients, **extra)


def changed(
    fn: Callable[[Table], Any],
    tables: list[tuple[str, Table]],
    has_aux: bool,
    only: Only,
) -> tuple[list[Table], dict[str, Any]]:
    """The tables of a state, given by path, after a function of some; and what else it returned.

    Raises unless it is a function of tables.
    """
    names = [name for name, _ in tables]
    wanted = names if only is None else [only] if isinstance(only, str) else only
    wanted = list(wanted) if isinstance(wanted, Iterable) else [wanted]
    if unknown := [path for path in wanted if path not in names]:
        raise ValueError(
            f"TrainState.map_tables: only must be paths of tables, {names}, got {unknown}: "
            "info.tables of a step is by these paths"
        )
    chosen = [name for name in names if name in wanted]
    before = [(f"the table {name!r}", table) for name, table in tables if name in wanted]
    made, aux = mapped("TrainState.map_tables", fn, before, has_aux)
    rest = iter(made)
    after = [next(rest) if name in wanted else table for name, table in tables]
    return after, dict(zip(chosen, aux, strict=True))


def check_dense_state(call: str, state: Any, trainable: Sequence[str], scale: Any) -> None:
    """Warns of steps that optax leaves out for dense parameters alone.

    Args:
      call: for the message.
      state: of optax.
      trainable: paths of the tables.
      scale: the loss scale, or None.
    """
    if trainable and scale is None and skips_steps(state):
        warn(
            f"{call}: tx is an optax.apply_if_finite, which skips steps of dense parameters alone: "
            "rows get the gradients that are not finite. To skip such steps for both, give "
            "loss_scale=jax_hkv.optim.LossScale.create(1.0), in any precision"
        )
    if trainable and has_micro_steps(state):
        warn(
            f"{call}: tx is an optax.MultiSteps, apply_every or contrib.sam, whose steps of dense "
            "parameters take several batches, but tables are updated in every step. To train both "
            "on several batches at once, make one batch of them, which "
            "train_step(micro_batches=4) goes through in parts; if rows are meant to move on, "
            "silence this with warnings.filterwarnings"
        )


_OWN_GRADIENTS = {
    "nnx": "outside hkv.nnx.train_step and hkv.nnx.value_and_grad inserts ids, but nothing trains "
    "their rows: nnx.grad and nnx.value_and_grad see dense parameters only. Take gradients with "
    "hkv.nnx.value_and_grad, and give them to hkv.nnx.update_tables",
    "linen": "without perturbations inserts ids, but nothing trains their rows: jax.grad sees "
    "params only. Train by hkv.linen.train_step, or differentiate by hkv.linen.perturbations as "
    "well and give their gradient to hkv.linen.update_tables",
}


def warn_of_no_update(layer: str, module: str) -> None:
    """Of an own loop, whose gradients pass tables by."""
    warn(
        f"{layer}: train=True {_OWN_GRADIENTS[module]}; where ids are only to be inserted, silence "
        "this with warnings.filterwarnings"
    )


def explain_structure(error: Exception, names: Sequence[str]) -> None:
    """Raises if JAX complains that a loop has given a model more than it had, by one of these."""
    text = str(error)
    is_named = any(re.search(rf"\b{re.escape(name)}\b", text) for name in names)
    is_counted = "number of leaves" in text and came_from("flax.nnx.transforms.iteration", error)
    if ("structure" in text and is_named) or is_counted:
        raise TypeError(
            "hkv.nnx: a lookup with train=True leaves its result in the layer, for the update, "
            "which nnx.scan, fori_loop and while_loop do not pass on, nor nnx.cond from one of "
            "its branches alone: look all ids up before, in one call, and pass rows in"
        ) from error


def checked_table(layer: Any, attribute: str, dim: int) -> Table:
    """The table of an nnx layer, which the layer's user may have set."""
    call, variable = type(layer).__name__, getattr(layer, attribute)
    if isinstance(variable, Table):
        raise TypeError(
            f"{call}: {attribute} must be an nnx Variable, got a Table: change a layer's table by "
            f"layer.{attribute}.set_value(table), and read it by layer.{attribute}.get_value()"
        )
    table = variable.get_value()
    check_dim(call, table, attribute, dim)
    return table


def check_new_tables(
    before: Iterable[tuple[str, ...]], after: Iterable[tuple[str, ...]], devices: Devices
) -> None:
    """Warns if a step makes tables that its state lacks: lost ones, or of layers new to it.

    Args:
      before: paths of the state's tables.
      after: of the tables after the model's call.
      devices: where a state keeps its form, so that there it is an error.
    """
    known = sorted("/".join(path) for path in before)
    new = sorted({"/".join(path) for path in after} - set(known))
    if not new:
        return
    message = (
        f"train_step: the model looks up the tables {new}, which state.tables lacks, having "
        f"{known}. If they were there before, give state.replace(tables={{**state.tables, name: "
        "...}) all of them; else have init call their layers"
    )
    if devices.axes:
        raise ValueError(message)
    warn(f"{message}, or silence this with warnings.filterwarnings: they are made anew, empty")


def check_trained(trainable: Iterable[str], looked_up: Iterable[str]) -> None:
    """Raises if a step trains none of the tables that have an optimizer, warns if only some.

    The loss falls without them too, by the dense parameters alone.
    """
    trained = set(looked_up)
    left = sorted(set(trainable) - trained)
    remedy = (
        "call the model with train=True, and have it pass that on to its layers (a table that is "
        "not to be trained needs no optimizer); around layers take Flax's transformations "
        "(nn.remat, nnx.remat), not JAX's, of whose inside a step of nnx sees no lookup"
    )
    if left and not trained:
        raise ValueError(
            f"train_step: loss_fn must look up tables in training, but looked up none of {left}: "
            f"{remedy}"
        )
    if left:
        warn(
            f"train_step: loss_fn looked up {sorted(trained)} in training, but not {left}, which "
            f"stay as they are. If that is not meant, {remedy}"
        )
