"""Optimizers for the rows that a batch touched.

:func:`sparse` takes any optax transformation; ``sgd``, ``adagrad``, ``rowwise_adagrad``,
``adam``, ``adamw``, ``rowwise_adam`` and ``ftrl`` do their arithmetic natively, in one pass. Both
kinds have ``init(table)`` and ``update(table, result, row_gradients)``. Of optax nothing is asked
but the form of its transformations: a pair of functions ``init(params)`` and
``update(updates, state, params)``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jax_hkv import _updates
from jax_hkv import index as _index
from jax_hkv._checks import as_bool, as_flag, as_float_dtype, as_integer
from jax_hkv._compat import at_once
from jax_hkv._fused import (
    FusedOptimizer,
    adagrad,
    adam,
    adamw,
    ftrl,
    inject_learning_rate,
    rowwise_adagrad,
    rowwise_adam,
    set_hyperparam,
    set_learning_rate,
    sgd,
)
from jax_hkv._gradients import LossScale, all_finite, clip_by_global_norm
from jax_hkv._keys import Keys
from jax_hkv._options import Arrays, Flag
from jax_hkv.table import (
    InsertResult,
    OptimizerRows,
    Table,
    check_one_device,
    gather_optimizer,
    gather_values,
    one_more,
    scatter_optimizer,
    scatter_values,
)

__all__ = [
    "FusedOptimizer",
    "LossScale",
    "Optimizer",
    "SparseOptimizer",
    "Transformation",
    "adagrad",
    "adam",
    "adamw",
    "all_finite",
    "clip_by_global_norm",
    "ftrl",
    "inject_learning_rate",
    "rowwise_adagrad",
    "rowwise_adam",
    "set_hyperparam",
    "set_learning_rate",
    "sgd",
    "sparse",
]

_ROW, _SHARED = "row", "shared"
_ROUNDINGS = "roundings"

# By keyword, or out of the dictionary of all.
_MISSES_ARGUMENTS = (TypeError, KeyError)

_APART = (
    "use a transformation that treats each row by itself, or let it see each row alone: "
    "optim.sparse(..., count_per_row=True)"
)
_REMEDY = (
    "Clip before it with optim.clip_by_global_norm, skip steps that are not finite with "
    f"update(..., apply=), {_APART}"
)


@runtime_checkable
class Transformation(Protocol):
    """What is needed of an ``optax.GradientTransformation``."""

    @property
    def init(self) -> Any:
        """From parameters to state."""

    @property
    def update(self) -> Any:
        """From (updates, state, params) to (updates, state)."""


@runtime_checkable
class Optimizer(Protocol):
    """What the layers need of an optimizer: one of :func:`sparse`, or a fused one.

    Whose update takes a learning rate is a :class:`FusedOptimizer`.
    """

    def init(self, table: Table) -> Table:
        """The table with fresh optimizer rows."""
        ...

    def update(self, table: Table, result: Any, row_gradients: Any, *, apply: Any = None) -> Table:
        """The table after one step."""
        ...


@dataclasses.dataclass(frozen=True)
class _Structure:
    """How a state is made up of row leaves and shared leaves, in the order of its flattening."""

    tree: Any
    kinds: tuple[tuple[str, str], ...]  # of each leaf: its name, and whether rows share it
    counts_roundings: bool = False  # beside them: how often rows were rounded by chance

    def __str__(self) -> str:
        leaves = [f"{name} ({kind})" for name, kind in self.kinds]
        leaves += [f"{_ROUNDINGS} ({_SHARED})"] * self.counts_roundings
        return f"{', '.join(leaves)} of {self.tree}"

    def join(self, row: Mapping[str, jax.Array], shared: Mapping[str, jax.Array]) -> Any:
        for name, leaf in shared.items():
            if np.ndim(leaf) == 0:
                raise TypeError(
                    f"optim.update: table.optimizer.shared[{name!r}] must have a leading axis of 1 "
                    f"(that of devices), got one number, {leaf}: give jnp.array([number])"
                )
        leaves = [row[name] if kind == _ROW else shared[name][0] for name, kind in self.kinds]
        return jax.tree.unflatten(self.tree, leaves)

    def split(self, state: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        leaves = list(zip(self.kinds, jax.tree.leaves(state), strict=True))
        return (
            {name: leaf for (name, kind), leaf in leaves if kind == _ROW},
            {name: leaf[None] for (name, kind), leaf in leaves if kind == _SHARED},
        )


@dataclasses.dataclass(frozen=True)
class SparseOptimizer:
    """An optax transformation that updates the rows of a batch only. Made by :func:`sparse`."""

    transformation: Transformation
    count_per_row: bool = False
    dtype: Any = np.dtype(np.float32)
    stochastic_rounding: bool = False
    seed: int = 0

    def init(self, table: Table) -> Table:
        """The table with this optimizer's rows, fresh for every slot.

        Args:
          table: whose rows will be optimized; optimizer rows that it has are replaced.

        Raises:
          TypeError: if it is no table of one device.
          ValueError: if a leaf of the optimizer's state is neither one value a row nor a scalar, if
            a row's first state depends on the row, if a row's update depends on other rows, if
            the transformation does not take rows, or if rows are to be rounded stochastically that
            are not bfloat16.
        """
        check_one_device("optim.init", table)
        _updates.check_rounding(table, self.stochastic_rounding)
        structure = self._structure(table)
        with at_once():
            state = self._init(jnp.zeros((1, table.dim), self.dtype))
            other = self._init(jnp.ones((1, table.dim), self.dtype))
            _check_no_micro_steps(state)
            fresh, shared = structure.split(state)
            if self.stochastic_rounding:
                shared[_ROUNDINGS] = jnp.zeros((1,), jnp.uint32)
            of_ones, _ = structure.split(other)
            for name, leaf in fresh.items():
                if not np.array_equal(np.asarray(leaf), np.asarray(of_ones[name]), equal_nan=True):
                    raise ValueError(
                        "optim.sparse: this transformation starts from the parameters (a copy of "
                        "them, say), but rows come and go, and a new row's state must not depend "
                        "on the row"
                    )
            self._check_update(table)
            if not self.count_per_row:
                _check_rows_are_apart_once(self.transformation, table.dim)
        rows = _updates.optimizer_rows(fresh, shared, structure, table)
        return dataclasses.replace(table, optimizer=rows)

    def update(
        self,
        table: Table,
        result: InsertResult | Sequence[InsertResult],
        row_gradients: Float[Arrays, "*batch dim"] | Sequence[Float[Arrays, "*batch dim"]],
        *,
        apply: Flag | None = None,
        **extra: Any,
    ) -> Table:
        """The table after one step of the optimizer on the rows of a batch.

        The gradients of equal keys are summed. A row whose slot holds another key by now (the
        result is stale) is skipped, and ``table.optimizer.skipped`` counts it; positions without a
        row are left out. Leaves that rows share (step counts) advance once a call.

        Args:
          table: after the :func:`jax_hkv.find_or_insert` that gave the result.
          result: of that call; or the results of several lookups (those of accumulated
            micro-batches, say), which make one step together, as if they had been one batch.
          row_gradients: like ``result.values``; or as many of them as there are results.
          apply: a bool, traced if need be; where it is False nothing changes, not even the count.
          **extra: passed on to the transformation's update, if it takes them (what
            ``optax.chain`` makes takes any). ``learning_rate`` is none of them.

        Raises:
          ValueError: if the table has no optimizer rows of this transformation, or if with `extra`
            a row's update depends on other rows.
          TypeError: naming the argument.
        """
        check_one_device("optim.update", table)
        apply = as_flag("optim.update", "apply", apply)
        _check_extra(self.transformation, extra)
        if extra and not self.count_per_row:
            _check_rows_are_apart_once(self.transformation, table.dim, *_kinds_of(extra))
        before = _updates.rows_of(table, self._structure(table))
        table, batch = _updates.batch_of(table, before, result, row_gradients, apply)
        # As native updates: a key without a position (of a slice, say) stays as it is.
        found = _index.occurrences(batch.groups)
        slots = jnp.where(found.counts > 0, batch.slots, _index.NO_SLOT)
        sums = functools.partial(_index.combine_some, batch.groups, batch.terms, found)
        move = functools.partial(self._moved, before=before, extra=extra)
        table, shared = _updates.in_parts(move, table, (slots, Keys(batch.groups.keys)), sums)
        optimizer = table.optimizer
        assert optimizer is not None
        if apply is not None:
            shared = jax.tree.map(functools.partial(jnp.where, apply), shared, before.shared)
        optimizer = dataclasses.replace(optimizer, shared=shared, skipped=batch.skipped)
        return dataclasses.replace(table, optimizer=optimizer)

    def _moved(
        self,
        table: Table,
        slots: Int32[Array, " n"],
        keys: Keys,
        sums: Float32[Array, "n dim"],
        *,
        before: OptimizerRows,
        extra: Mapping[str, Any],
    ) -> tuple[Table, dict[str, jax.Array]]:
        """Rows moved by the sums of their gradients, and what all rows share from there on."""
        table, params = gather_values(table, slots)
        table, state_rows = gather_optimizer(table, slots)
        params = params.astype(self.dtype)
        state = before.structure.join(state_rows, before.shared)
        try:
            updates, state = self._update(sums.astype(self.dtype), state, params, **extra)
        except _MISSES_ARGUMENTS as error:
            raise TypeError(
                "optim.update: the transformation's update fails with the arguments that it was "
                f"given, {sorted(extra) or 'none besides gradients, state and rows'} "
                f"({type(error).__name__}: {error}): what it wants more goes to update by keyword, "
                "update(..., value=loss) say, which no train_step does"
            ) from error
        new_rows, shared = before.structure.split(state)
        _check_state_dtypes(before.rows, new_rows)

        after = params + updates
        if self.stochastic_rounding:
            shared[_ROUNDINGS] = one_more(before.shared[_ROUNDINGS])
            rounding = keys, shared[_ROUNDINGS][0], self.seed
            after = _updates.rounded(after.astype(jnp.float32), *rounding)
        table = scatter_values(table, slots, None, after.astype(table.dtype))
        return scatter_optimizer(table, slots, None, new_rows), shared

    # With a count in every row, every row has a state of its own: the transformation sees one row.

    def _init(self, rows: jax.Array) -> Any:
        init = self.transformation.init
        return jax.vmap(init)(rows) if self.count_per_row else init(rows)

    def _update(self, sums: jax.Array, state: Any, params: jax.Array, **extra: Any) -> Any:
        def update(*args: Any) -> Any:
            return self.transformation.update(*args, **extra)

        return (jax.vmap(update) if self.count_per_row else update)(sums, state, params)

    def _check_update(self, table: Table) -> None:
        """Raises if the transformation's update of a row fails, but for arguments that it needs."""
        row = jax.ShapeDtypeStruct((1, table.dim), self.dtype)
        try:
            jax.eval_shape(lambda row: self._update(row, self._init(row), row), row)
        except _MISSES_ARGUMENTS:
            return  # an update that has them raises again
        except Exception as error:
            raise _failed("update of rows [1, dim]", error) from error

    def _structure(self, table: Table) -> _Structure:
        """Which leaves of the state follow the number of rows, seen at two different numbers."""
        rows = [jax.ShapeDtypeStruct((count, table.dim), self.dtype) for count in (2, 3)]
        try:
            two, three = (jax.eval_shape(self._init, each) for each in rows)
        except Exception as error:
            raise _failed("init of rows [n, dim]", error) from error
        leaves = jax.tree.leaves_with_path(two)
        kinds = [
            (name, _kind(path, leaf, other))
            for name, (path, leaf), other in zip(
                _names(leaves), leaves, jax.tree.leaves(three), strict=True
            )
        ]
        if self.stochastic_rounding and _ROUNDINGS in dict(kinds):
            raise ValueError(
                "optim.sparse: with stochastic_rounding a transformation's state must have no leaf "
                f"{_ROUNDINGS!r}, by which updates are counted, got {sorted(dict(kinds))}: "
                "give that leaf another name"
            )
        return _Structure(jax.tree.structure(two), tuple(kinds), self.stochastic_rounding)


def _failed(what: str, error: Exception) -> ValueError:
    is_native = str(error).startswith("optim.init: table must be")
    remedy = (
        "native optimizers are no part of an optax chain: take optax's own there, or the native "
        "one alone, whose max_gradient clips elements"
        if is_native
        else "use one that takes any array of parameters"
    )
    return ValueError(
        f"optim.sparse: the transformation's {what} fails ({type(error).__name__}: {error}): "
        f"{remedy}"
    )


def sparse(
    transformation: Transformation,
    *,
    count_per_row: bool = False,
    dtype: Any = jnp.float32,
    stochastic_rounding: bool = False,
    seed: int = 0,
) -> SparseOptimizer:
    """Makes an optax transformation update the rows that a batch touched, and no others.

    The transformation must treat rows alike and apart: its state is one leaf of row shape, or one
    value, for each row (moments, accumulators), or scalars (step counts), and the update of a row
    depends on that row alone. Norms over all rows belong before it: :func:`clip_by_global_norm`.

    Args:
      transformation: any ``optax.GradientTransformation``.
      count_per_row: whether scalars of the state (step counts) are kept for each row, so that a row
        counts its own updates, schedules included; otherwise all rows share them. The
        transformation sees one row ``[dim]`` then, not ``[n, dim]``: ``optax.centralize``, which
        leaves vectors as they are, centers no row.
      dtype: in which the transformation works and its state is kept, for half rows too: float32,
        unless memory is scarcer than exactness. In bfloat16 an accumulator stands still once it is
        256 times what a step adds; in float16 an eps of 1e-8 is 0, and a gradient of 0 makes Adam's
        row NaN.
      stochastic_rounding: of bfloat16 rows, whose small updates are lost otherwise, by random bits
        that are a function of `seed`, key, how many updates there were, which the table counts,
        and element.
      seed: of these, 0 to 2**64 - 1.

    Raises:
      TypeError: naming the argument. What mixes rows, or takes none, `init` refuses.

    Example:
      >>> import optax
      >>> import jax_hkv as hkv
      >>> opt = sparse(optax.adagrad(0.1))
      >>> table = opt.init(hkv.create(128, dim=2))
      >>> table, result = hkv.find_or_insert(table, np.array([1, 2], np.int32))
      >>> table = opt.update(table, result, jnp.ones_like(result.values))
    """
    _check_sparse(transformation)
    kind = as_float_dtype("optim.sparse", "dtype", dtype)
    is_per_row = as_bool("optim.sparse", "count_per_row", count_per_row)
    is_rounded = as_bool("optim.sparse", "stochastic_rounding", stochastic_rounding)
    if is_rounded and kind != np.float32:
        raise ValueError(
            "optim.sparse: stochastic_rounding rounds what is computed in float32, got "
            f"dtype={kind.name}: leave one of both out"
        )
    seed = as_integer("optim.sparse", "seed", seed, 0, 2**64 - 1)
    return SparseOptimizer(transformation, is_per_row, kind, is_rounded, seed)


def _is_native(optimizer: Any) -> bool:
    return isinstance(optimizer, (FusedOptimizer, SparseOptimizer))


def _methods(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("init", "update"))


def _check_sparse(transformation: Any) -> None:
    if _methods(transformation) and not _is_native(transformation):
        return
    remedy = "give optax.adam(1e-3), say"
    if _is_native(transformation):
        remedy = "an optimizer of jax_hkv.optim updates tables as it is, so leave sparse out"
    elif callable(transformation):
        remedy = f"call what makes one: {getattr(transformation, '__name__', 'optax.adam')}(...)"
    raise TypeError(
        "optim.sparse: transformation must be an optax.GradientTransformation, got "
        f"{type(transformation).__name__}: {remedy}"
    )


def check_optimizer(call: str, optimizer: Any) -> None:
    """Raises unless `optimizer` is None or can update a table."""
    if optimizer is None or (not isinstance(optimizer, tuple) and _methods(optimizer)):
        return
    raise TypeError(
        f"{call}: optimizer must come from jax_hkv.optim, got {type(optimizer).__name__}: take "
        "jax_hkv.optim.adam(1e-3), say, or wrap an optax transformation: jax_hkv.optim.sparse(tx)"
    )


def check_transformation(call: str, tx: Any) -> None:
    """Raises unless `tx` can update dense parameters."""
    if _methods(tx) and not _is_native(tx):
        return
    raise TypeError(
        f"{call}: tx must be an optax.GradientTransformation, for the dense parameters, got "
        f"{type(tx).__name__}: give optax.adam(1e-3), say (an nnx.Optimizer is made of it for you; "
        "those of jax_hkv.optim are for tables: a layer takes one as its optimizer)"
    )


def _check_extra(transformation: Transformation, extra: dict[str, Any]) -> None:
    """Raises for arguments of an update that the transformation would not look at."""
    if "learning_rate" in extra:
        raise TypeError(
            "optim.sparse: update takes no learning_rate, because the rate of an optax "
            "transformation is part of it: give the transformation a schedule (a function of the "
            "step count), take optax.inject_hyperparams, whose rate lies in "
            "table.optimizer.shared, or a native optimizer (jax_hkv.optim.adam, say), whose "
            "update takes one"
        )
    taken = inspect.signature(transformation.update).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        return
    unknown = sorted(extra.keys() - taken.keys())
    if unknown:
        raise TypeError(
            f"optim.sparse: update of this transformation takes {list(taken)}, got also {unknown}: "
            "leave them out, or use an optax.GradientTransformationExtraArgs that takes them"
        )


def _names(leaves: Sequence[tuple[Any, Any]]) -> list[str]:
    """A name for each leaf of a state: the way to it, "0.mu"."""
    ways = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    names = [way or "state" for way in ways]
    if len(set(names)) < len(names):  # keys "0" and 0 of two dictionaries, say
        names = [f"{number}.{name}" for number, name in enumerate(names)]
    return names


def _kind(path: Any, two: Any, three: Any) -> str:
    if jnp.issubdtype(two.dtype, jax.dtypes.extended):
        raise ValueError(
            f"optim.sparse: the optimizer's state{jax.tree_util.keystr(path)} is {two.dtype}, for "
            "random numbers, which rows would share or have by their position in a batch, so it "
            "mixes rows. Use a transformation without noise, and add it to the gradients of "
            "distinct ids (jax_hkv.unique) before the update"
        )
    if two.shape[:1] == (2,) and three.shape == (3, *two.shape[1:]):
        return _ROW
    if two.shape == three.shape == ():
        return _SHARED
    raise ValueError(
        f"optim.sparse: the optimizer's state{jax.tree_util.keystr(path)} has shape "
        f"{list(two.shape)} for rows of shape [2, dim]: neither a leaf with one entry a row nor a "
        f"scalar, so it mixes rows: {_APART}"
    )


def _check_state_dtypes(before: Mapping[str, jax.Array], after: Mapping[str, jax.Array]) -> None:
    for name, old in before.items():
        new = after[name]
        if old.dtype != new.dtype:
            raise ValueError(
                f"optim.update: the table's optimizer rows are {old.dtype}, but this optimizer "
                f"makes them {new.dtype}: call table = opt.init(table) with this optimizer, or "
                "make it with the dtype of the one that the table was initialised with: "
                "optim.sparse(..., dtype=)"
            )


def has_micro_steps(state: Any) -> bool:
    """Whether a state of optax is, or holds, one of MultiSteps, of apply_every or of sam."""
    return _holds(state, "MultiStepsState", "ApplyEvery", "SAMState")


def skips_steps(state: Any) -> bool:
    """Whether a state of optax is, or holds, one of apply_if_finite."""
    return _holds(state, "ApplyIfFiniteState")


def _holds(state: Any, *names: str) -> bool:
    def is_one(node: Any) -> bool:
        return type(node).__name__ in names

    return any(is_one(node) for node in jax.tree.leaves(state, is_leaf=is_one))


def _check_no_micro_steps(state: Any) -> None:
    """Raises for micro-steps of optax: rows that one did not touch would miss their turn."""
    if has_micro_steps(state):
        raise ValueError(
            "optim.sparse: optax.MultiSteps and apply_every count micro-steps for all rows, as "
            "does contrib.sam, but a batch touches some: give the results and gradients of several "
            "lookups to one update instead"
        )


def _kinds_of(extra: dict[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The arguments of an update without the values of their numbers, as something to look up."""
    leaves, tree = jax.tree.flatten(extra)

    def kind(leaf: Any) -> Any:
        if not isinstance(leaf, bool | int | float | np.generic | np.ndarray | jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(np.shape(leaf), jnp.result_type(leaf))

    return tree, tuple(map(kind, leaves))


def _of_kinds(tree: Any, kinds: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments for a trial, whose numbers are one."""

    def number(kind: Any) -> Any:
        is_number = isinstance(kind, jax.ShapeDtypeStruct)
        return jnp.ones(kind.shape, kind.dtype) if is_number else kind

    return {} if tree is None else jax.tree.unflatten(tree, list(map(number, kinds)))


def _check_rows_are_apart_once(*arguments: Any) -> None:
    """As below; again each time for what has no hash, an object of a plain dataclass, say."""
    try:
        hash(arguments)
    except TypeError:
        return _check_rows_are_apart.__wrapped__(*arguments)
    return _check_rows_are_apart(*arguments)


@functools.lru_cache
def _check_rows_are_apart(
    transformation: Transformation, dim: int, tree: Any = None, kinds: tuple[Any, ...] = ()
) -> None:
    """Raises if a row's update is seen to change with the other rows of a batch.

    Args:
      transformation: that a table is optimized by.
      dim: of its rows.
      tree: with `kinds`, what :func:`_kinds_of` says of an update's arguments. Without, an update
        that needs some is left to its first step, which has them.
      kinds: of the arguments' leaves.
    """
    try:
        with at_once(), jax.debug_nans(False), jax.debug_infs(False):
            where = _where_rows_mix(transformation, dim, _of_kinds(tree, kinds))
    except Exception as error:
        if tree is None and isinstance(error, _MISSES_ARGUMENTS):
            return
        raise ValueError(
            "optim.sparse: this transformation could not be tried on rows alone and together, to "
            f"see whether it mixes them ({type(error).__name__}: {error}). {_REMEDY}"
        ) from error
    if where is not None:
        raise ValueError(
            f"optim.sparse: the update of a row changes with the other rows of its batch (seen for "
            f"gradients {where}), so this transformation mixes rows: a norm over all of them, or "
            f"noise by position. {_REMEDY}"
        )


def _where_rows_mix(transformation: Transformation, dim: int, extra: dict[str, Any]) -> str | None:
    """For which gradients a row's update changes with the other rows, if for any.

    Two steps with three rows of very different gradients are compared with those of the same rows
    taken alone, at magnitudes on both sides of any threshold that a clipping could have.
    """
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(3, dim)), jnp.float32)
    directions = rng.normal(size=(3, dim)) * np.array([[1.0], [16.0], [1 / 64]])

    @jax.jit
    def steps(gradients: jax.Array, params: jax.Array) -> jax.Array:
        state = transformation.init(params)
        first, state = transformation.update(gradients, state, params, **extra)
        second, _ = transformation.update(-0.5 * gradients, state, params + first, **extra)
        return jnp.stack([first, second])

    probes = {f"of magnitude {size:.0e}": directions * size for size in (1e-8, 1e-4, 1.0, 1e4, 1e8)}
    probes["of which one is no number"] = directions * np.array([[np.nan], [1.0], [1.0]])
    for what, probe in probes.items():
        gradients = jnp.asarray(probe, jnp.float32)
        batch = np.asarray(steps(gradients, rows), np.float64)
        alone = [steps(gradients[i : i + 1], rows[i : i + 1]) for i in range(3)]
        single = np.concatenate([np.asarray(row, np.float64) for row in alone], axis=1)
        if not np.allclose(batch, single, rtol=1e-4, atol=0, equal_nan=True):
            return what
    return None
