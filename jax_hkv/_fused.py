"""Optimizers whose arithmetic is native: one pass over the rows that a batch touched.

The formulas, in the order of their roundings, are in docs/semantics.md, section 10.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt32

from jax_hkv import _updates
from jax_hkv._checks import (
    as_bool,
    as_flag,
    as_float_dtype,
    as_integer,
    as_number,
    as_whole,
    is_real,
)
from jax_hkv._compat import is_traced
from jax_hkv._options import Arrays, Flag, Number
from jax_hkv.table import (
    InsertResult,
    Table,
    check_one_device,
    check_table,
)

# A number, or a function of the number of updates before this one, int32 as optax's schedules have
# it: they subtract from it, which an unsigned number does not survive.
LearningRate = float | np.floating[Any] | Callable[[Any], Any]

_MOST_COUNT = np.uint32(2**31 - 1)  # that a schedule is told, whatever comes after
_LARGEST = float(np.finfo(np.float32).max)
_RATE = "learning_rate"  # where it lies in the table
_OF_OPTAX = "hyperparams."  # where those of optax.inject_hyperparams do, by their names
_STATES = "hyperparams_states."  # where its schedules keep what they count

_ONE_ALPHA = (
    "what its rows keep is for one alpha, and another would shrink or grow them; give ftrl a "
    "number, or take an optimizer with a schedule, optim.adagrad, say"
)


@dataclasses.dataclass(frozen=True)
class _Form:
    """What optimizer rows are, whatever the numbers of their optimizer: they may change in between.

    Attributes:
      name: of the rule.
      states: their names.
    """

    name: str
    states: tuple[str, ...]
    state_dtype: Any
    count_per_row: bool
    stochastic_rounding: bool
    injects_rate: bool

    def __str__(self) -> str:
        flags = ("count_per_row", "stochastic_rounding", "injects_rate")
        options = [name for name in flags if getattr(self, name)]
        rows = f"{', '.join(self.states) or 'no rows'} in {self.state_dtype.name}"
        return f"{self.name} ({', '.join([rows, *options])})"


@dataclasses.dataclass(frozen=True)
class _Rule:
    """An optimizer without its learning rate.

    Attributes:
      name: of the native operation, behind "update_".
      constants: of the native operation.
      starts: the name and the fresh value of each of its states, named as in optax if it has them.
      row_state: the name of the state that is one number a row, and not one an element; the last.
      injects_rate: whether the learning rate lies in the table.
    """

    name: str
    constants: tuple[tuple[str, float], ...]
    starts: tuple[tuple[str, float], ...]
    row_state: str | None
    state_dtype: Any
    count_per_row: bool
    stochastic_rounding: bool
    seed: int
    injects_rate: bool = False

    @property
    def form(self) -> _Form:
        """Of the rows that belong to it."""
        return _Form(
            *(self.name, tuple(name for name, _ in self.starts)),
            *(self.state_dtype, self.count_per_row, self.stochastic_rounding, self.injects_rate),
        )


@dataclasses.dataclass(frozen=True)
class FusedOptimizer:
    """An optimizer with a native update; made by :func:`jax_hkv.optim.adam` and its like."""

    rule: _Rule
    learning_rate: LearningRate

    def __repr__(self) -> str:
        rate, rule = self.learning_rate, self.rule
        given = ["rate by a schedule" if callable(rate) else f"rate {rate}"]
        starts = [(f"{name} from", start) for name, start in rule.starts if start]
        constants = [*rule.constants, *starts]
        given += [f"{name} {number}" for name, number in constants if math.isfinite(number)]
        return f"<{rule.form}, {', '.join(given)}>"

    def init(self, table: Table) -> Table:
        """The table with this optimizer's rows, fresh for every slot.

        Args:
          table: whose rows will be optimized; optimizer rows that it has are replaced.

        Raises:
          TypeError: if it is no table of one device.
          ValueError: if rows are to be rounded stochastically that are not bfloat16.
        """
        check_one_device("optim.init", table)
        rule = self.rule
        _updates.check_rounding(table, rule.stochastic_rounding)
        fresh = {}
        for name, start in rule.starts:
            row = (1,) if name == rule.row_state else (1, table.dim)
            fresh[name] = jnp.full(row, start, rule.state_dtype)
        count = {"count": jnp.zeros((1,), jnp.uint32)}
        if rule.count_per_row:
            fresh |= count
        rate: dict[str, jax.Array] = {}
        if rule.injects_rate:
            assert not callable(self.learning_rate)
            rate = {_RATE: jnp.full((1,), self.learning_rate, jnp.float32)}
        rows = _updates.optimizer_rows(fresh, count | rate, rule.form, table)
        return dataclasses.replace(table, optimizer=rows)

    def update(
        self,
        table: Table,
        result: InsertResult | Sequence[InsertResult],
        row_gradients: Float[Arrays, "*batch dim"] | Sequence[Float[Arrays, "*batch dim"]],
        *,
        learning_rate: Number | None = None,
        apply: Flag | None = None,
    ) -> Table:
        """The table after one step of the optimizer on the rows of a batch.

        See :meth:`jax_hkv.optim.SparseOptimizer.update`.

        Args:
          table: after the :func:`jax_hkv.find_or_insert` that gave the result.
          result: of that call; or the results of several lookups, which make one step together.
          row_gradients: like ``result.values``; or as many of them as there are results.
          learning_rate: of this step, instead of the optimizer's own; traced if need be. Not of
            FTRL, which has one for all steps.
          apply: a bool, traced if need be; where it is False nothing changes, not even the count.

        Raises:
          ValueError, TypeError: naming the argument.
        """
        check_one_device("optim.update", table)
        rule = self.rule
        if rule.name == "ftrl" and learning_rate is not None:
            raise TypeError(f"optim.update: FTRL takes no learning_rate: {_ONE_ALPHA}")
        apply = as_flag("optim.update", "apply", apply)
        before = _updates.rows_of(table, rule.form)
        count = before.shared["count"]
        own = before.shared[_RATE] if rule.injects_rate else self.learning_rate
        rate = _rate(own if learning_rate is None else learning_rate, count)
        arguments = table, result, row_gradients, rate, apply
        if _updates.are_known(arguments):
            return _updates.optim_update_at_once(rule, *arguments)
        return _updates.optim_update(rule, *arguments)


def inject_learning_rate(optimizer: FusedOptimizer) -> FusedOptimizer:
    """The same optimizer with its learning rate in the table, where it can be changed.

    What ``optax.inject_hyperparams`` is for transformations: the rate is an array in
    ``table.optimizer.shared``, which :func:`set_learning_rate` changes between steps, nothing is
    traced anew, and a checkpoint has it.

    Args:
      optimizer: a native one, with a number as its rate: the one that `init` puts into the table.

    Raises:
      TypeError: if it is another one: FTRL has one rate for all steps, a schedule makes its own.

    Example:
      >>> import jax_hkv as hkv
      >>> opt = inject_learning_rate(hkv.optim.adam(0.1))
      >>> table = opt.init(hkv.create(128, 2))
      >>> set_learning_rate(table, 0.01).optimizer.shared["learning_rate"].tolist()
      [0.009999999776482582]
    """
    call = "optim.inject_learning_rate"
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"{call}: optimizer must be a native one, of optim.adam, say, got "
            f"{type(optimizer).__name__}: of optim.sparse take an "
            "optax.inject_hyperparams(...) transformation"
        )
    if optimizer.rule.name == "ftrl":
        raise TypeError(f"{call}: optimizer must not be FTRL: {_ONE_ALPHA}")
    if callable(optimizer.learning_rate):
        raise TypeError(
            f"{call}: optimizer must have a number as its learning rate, got a schedule, which "
            "makes the rate of every step"
        )
    return dataclasses.replace(
        optimizer, rule=dataclasses.replace(optimizer.rule, injects_rate=True)
    )


def set_learning_rate(table: Table, learning_rate: Number) -> Table:
    """The table with another learning rate, where its optimizer's lies in it.

    Args:
      table: made by an optimizer of :func:`inject_learning_rate`, or by ``optim.sparse`` of an
        ``optax.inject_hyperparams`` transformation; also one over several devices.
      learning_rate: one number; traced if need be.

    Raises:
      TypeError: if it is not one number.
      ValueError: if the table holds no learning rate, several, or that of a schedule, which makes
        one in every step, or if a number of Python or NumPy is not finite in float32.
    """
    return _with_hyperparam("optim.set_learning_rate", table, _RATE, _RATE, learning_rate)


def set_hyperparam(table: Table, name: str, value: Number) -> Table:
    """The table with another weight decay, say, of ``optax.inject_hyperparams``.

    Args:
      table: made by ``optim.sparse`` of such a transformation; also one over several devices.
      name: as the function that was injected calls it.
      value: one number; traced if need be.

    Raises:
      TypeError, ValueError: as :func:`set_learning_rate`, which this is for other names.
    """
    call = "optim.set_hyperparam"
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"{call}: name must be a str, got {type(name).__name__} {name!r}: give that of a "
            "number which optax.inject_hyperparams was given"
        )
    return _with_hyperparam(call, table, name, "value", value)


def _with_hyperparam(call: str, table: Table, name: str, argument: str, value: Any) -> Table:
    check_table(call, table)
    optimizer, what = table.optimizer, name.replace("_", " ")
    shared, by_row = (optimizer.shared, optimizer.rows) if optimizer else ({}, {})

    def ending(end: str) -> Iterator[list[str]]:
        for each in (shared, by_row):
            yield [leaf for leaf in each if f".{leaf}".endswith(end) and _STATES not in leaf]

    leaves, own = ending(f".{_OF_OPTAX}{name}")
    if name == _RATE and not leaves and not own:  # native, or of a transformation of one's own
        leaves, own = ending(f".{name}")
    if own:
        raise ValueError(
            f"{call}: table must hold one {what} for all rows, got one for each row in "
            f"table.optimizer.rows[{own[0]!r}]: make its optimizer by optim.sparse without "
            "count_per_row=True"
        )
    if optimizer is None or len(leaves) != 1:
        native = "optim.inject_learning_rate, or by " if name == _RATE else ""
        raise ValueError(
            f"{call}: table must hold one {what} in table.optimizer.shared, got "
            f"{leaves or 'none'} among {sorted(shared)}: make its optimizer by {native}"
            f"optim.sparse of optax.inject_hyperparams of a function that has a {name}"
        )
    (leaf,) = leaves
    own_state = f"{leaf.removesuffix(_OF_OPTAX + name)}{_STATES}{name}"
    if any(f"{other}.".startswith(f"{own_state}.") for other in shared):
        raise ValueError(
            f"{call}: table must hold a number as its {what}, got a schedule, which makes the "
            f"{what} of every step: give optax.inject_hyperparams a number"
        )
    old = shared[leaf]
    number = _one_number(call, argument, value).reshape(()).astype(old.dtype)
    if jnp.issubdtype(old.dtype, jnp.integer):
        number = as_whole(call, argument, value, old.dtype)  # float32 does not hold them all
    # The old one, replaced everywhere: it lies on the devices, and varies over them, as that does.
    new = jnp.where(jnp.isnan(old), number, jnp.clip(old, number, number)).astype(old.dtype)
    rows = dataclasses.replace(optimizer, shared=shared | {leaf: new})
    return dataclasses.replace(table, optimizer=rows)


def _rate(given: Any, count: UInt32[Array, " 1"]) -> Float32[Array, " 1"]:
    """The learning rate of a step that so many went before."""
    source = "learning_rate"
    if callable(given):
        source = "what the schedule learning_rate returns"
        given = given(jnp.minimum(count[0], _MOST_COUNT).astype(jnp.int32))
    return _one_number("optim.update", source, given)


def _one_number(call: str, argument: str, given: Any) -> Float32[Array, " 1"]:
    rate = given if hasattr(given, "dtype") else np.asarray(given)
    if not is_real(rate.dtype) or rate.size != 1:
        raise TypeError(
            f"{call}: {argument} must be one number, got {rate.dtype}{list(rate.shape)}: give "
            "a float or an array of one; rates of several tables or groups go to an update each"
        )
    if not isinstance(rate, jax.Array):  # of one on a device the host would wait for the value
        _check_finite(call, argument, rate.item())
    return jnp.asarray(rate, jnp.float32).reshape(1)


def _check_finite(call: str, argument: str, rate: Any) -> None:
    if not abs(rate) <= _LARGEST:
        raise ValueError(
            f"{call}: {argument} must be finite, got {rate}; updates are in float32, "
            f"which holds {_LARGEST:.2g} at most"
        )


def _constant(call: str, argument: str, value: Any) -> float:
    """A number from 0 on; one that is traced is none."""
    number = as_number(call, argument, value, "a number from 0 on")
    if not 0 <= number <= _LARGEST:
        raise ValueError(
            f"{call}: {argument} must be a number from 0 on, got {value}; updates are in float32, "
            f"which holds {_LARGEST:.2g} at most"
        )
    return number


def _max_gradient(call: str, value: Any) -> float:
    """A bound of the elements of gradients; infinity where there is none."""
    if value is None:
        return math.inf
    bound = as_number(call, "max_gradient", value, "a positive number or None")
    if not bound <= _LARGEST or np.float32(bound) <= 0:
        raise ValueError(
            f"{call}: max_gradient must be a positive number of float32 or None, got {value}: "
            "None clips nothing"
        )
    return bound


def _optimizer(
    make: Callable[..., FusedOptimizer],
    name: str,
    learning_rate: Any,
    constants: dict[str, Any],
    starts: tuple[tuple[str, float], ...],
    options: dict[str, Any],
    *,
    row_state: str | None = None,
) -> FusedOptimizer:
    """An optimizer; `make` is the function that errors name, `name` the native operation's."""
    call = f"optim.{make.__name__}"
    is_one = isinstance(learning_rate, (jax.Array, np.ndarray)) and learning_rate.shape == ()
    if isinstance(learning_rate, numbers.Real) or (is_one and not is_traced(learning_rate)):
        learning_rate = as_number(call, "learning_rate", learning_rate)
    if not callable(learning_rate) and not isinstance(learning_rate, float):
        raise TypeError(
            f"{call}: learning_rate must be a number or a function of the step count, got "
            f"{type(learning_rate).__name__}: rates that are arrays go to update(learning_rate=...)"
        )
    if isinstance(learning_rate, float):
        _check_finite(call, "learning_rate", learning_rate)
    known = {"state_dtype", "count_per_row", "stochastic_rounding", "seed", "max_gradient"}
    if not options.keys() <= known:
        own = [name for name in inspect.signature(make).parameters if name != "options"]
        has_one = ": optim.adamw, rowwise_adam and rowwise_adagrad have a weight_decay"
        remedy = has_one if "weight_decay" in options else ""
        raise TypeError(
            f"{call}: arguments are {own + sorted(known)}, got {sorted(options.keys() - known)}"
            f"{remedy}"
        )
    dtype = as_float_dtype(call, "state_dtype", options.get("state_dtype", jnp.float32))
    for _, start in starts:
        with np.errstate(over="ignore"):
            held = float(np.asarray(start, np.float64).astype(dtype))
        if not np.isfinite(held) or (held == 0) != (start == 0):
            raise ValueError(
                f"{call}: initial_accumulator_value must be a number of state_dtype, got {start}, "
                f"which is {held} as {dtype.name}"
            )
    rule = _Rule(
        name=name,
        constants=tuple(
            (own, value if own == "nesterov" else _constant(call, own, value))
            for own, value in constants.items()
        )
        + (("max_gradient", _max_gradient(call, options.get("max_gradient"))),),
        starts=starts,
        row_state=row_state,
        state_dtype=dtype,
        count_per_row=as_bool(call, "count_per_row", options.get("count_per_row", False)),
        stochastic_rounding=as_bool(
            call, "stochastic_rounding", options.get("stochastic_rounding", False)
        ),
        seed=as_integer(call, "seed", options.get("seed", 0), 0, 2**64 - 1),
    )
    return FusedOptimizer(rule, learning_rate)


def sgd(
    learning_rate: LearningRate,
    momentum: float | None = None,
    nesterov: bool = False,
    **options: Any,
) -> FusedOptimizer:
    """Stochastic gradient descent; with `momentum`, of the touched rows only.

    Args:
      learning_rate: a number, or a schedule: a function of the step count.
      momentum: decay of the trace, None for none.
      nesterov: whether the trace is looked ahead of.
      **options: see :func:`adam`.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    is_ahead = as_bool("optim.sgd", "nesterov", nesterov)
    if momentum is None:
        if is_ahead:
            raise ValueError(
                "optim.sgd: momentum must be a number where nesterov is True, got None: give 0.9, "
                "say, or leave nesterov out"
            )
        return _optimizer(sgd, "sgd", learning_rate, {}, (), options)
    constants = {"momentum": momentum, "nesterov": int(is_ahead)}
    return _optimizer(sgd, "momentum", learning_rate, constants, (("trace", 0.0),), options)


def adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.1,
    eps: float = 1e-7,
    **options: Any,
) -> FusedOptimizer:
    """Adagrad with one accumulator an element (Duchi, Hazan, Singer, 2011), as ``optax.adagrad``.

    Args:
      learning_rate: a number, or a schedule.
      initial_accumulator_value: of new rows.
      eps: inside the root.
      **options: see :func:`adam`.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    call = "optim.adagrad"
    start = _constant(call, "initial_accumulator_value", initial_accumulator_value)
    starts = (("sum_of_squares", start),)
    return _optimizer(adagrad, "adagrad", learning_rate, {"eps": eps}, starts, options)


def rowwise_adagrad(
    learning_rate: LearningRate,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    **options: Any,
) -> FusedOptimizer:
    """Adagrad with one accumulator a row: the mean of its squared gradients (FBGEMM).

    Args:
      learning_rate: a number, or a schedule.
      initial_accumulator_value: of new rows.
      eps: outside the root.
      weight_decay: of a row, each time that it is updated, times the learning rate: decoupled from
        the gradients and their squares, as in :func:`adamw` (FBGEMM's mode DECOUPLE).
      **options: see :func:`adam`.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    call = "optim.rowwise_adagrad"
    start = _constant(call, "initial_accumulator_value", initial_accumulator_value)
    constants = {"eps": eps, "weight_decay": weight_decay}
    return _optimizer(
        rowwise_adagrad,
        "rowwise_adagrad",
        learning_rate,
        constants,
        (("sum_of_mean_squares", start),),
        options,
        row_state="sum_of_mean_squares",
    )


def adam(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    **options: Any,
) -> FusedOptimizer:
    """Adam (Kingma, Ba, 2015) on the touched rows: the moments of other rows do not decay.

    Args:
      learning_rate: a number, or a schedule: a function of the step count. It is an operand of the
        compiled step: another value of `update`'s `learning_rate` retraces nothing.
      b1: decay of the first moment.
      b2: decay of the second.
      eps: outside the root.
      eps_root: inside the root.
      **options: for every optimizer of this kind:
        `state_dtype`: of the optimizer rows, float32 (the default), bfloat16 or float16. Half
        types halve their memory, and are another optimizer: they are rounded to nearest, so that
        an accumulator stands still once it is 256 (bfloat16) or 2,048 (float16) times what a step
        adds; in bfloat16 a second moment with ``b2=0.999`` does not decay, in float16 small ones
        are zero.
        `count_per_row`: whether a row counts its own updates; otherwise the table's are counted. A
        schedule is told the table's count in either case.
        `stochastic_rounding`: of bfloat16 rows, by random bits that are a function of `seed`, key,
        step and element alone.
        `seed`: of these, 0 to 2**64 - 1.
        `max_gradient`: the sum of a row's gradients is clipped to at most this in every element,
        as by FBGEMM's ``gradient_clipping`` and by ``optax.clip``; None, the default, for no bound.
        Norms are clipped by ``max_norm`` of ``train_step``.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> import jax_hkv as hkv
      >>> opt = hkv.optim.adam(1e-3)
      >>> table = opt.init(hkv.create(128, dim=2))
      >>> table, result = hkv.find_or_insert(table, np.array([1, 2], np.int32))
      >>> table = opt.update(table, result, jnp.ones_like(result.values))
      >>> int(table.optimizer.shared["count"][0])
      1
    """
    constants = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "weight_decay": 0.0}
    return _adam(adam, learning_rate, constants, options)


def adamw(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 1e-4,
    **options: Any,
) -> FusedOptimizer:
    """Adam with decoupled weight decay (Loshchilov, Hutter, 2019), lazily: of touched rows only.

    Args:
      learning_rate: a number, or a schedule.
      b1: decay of the first moment.
      b2: decay of the second.
      eps: outside the root.
      eps_root: inside the root.
      weight_decay: of a row, each time that it is updated, times the learning rate.
      **options: see :func:`adam`.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    constants = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "weight_decay": weight_decay}
    return _adam(adamw, learning_rate, constants, options)


def rowwise_adam(
    learning_rate: LearningRate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    weight_decay: float = 0.0,
    **options: Any,
) -> FusedOptimizer:
    """Adam with one second moment a row, of the mean of its squared gradients (FBGEMM).

    TorchRec's PARTIAL_ROWWISE_ADAM. It takes little more than half of the memory of :func:`adam`.

    Args:
      learning_rate: a number, or a schedule.
      b1: decay of the first moment, which every element has.
      b2: decay of the second.
      eps: outside the root.
      eps_root: inside the root.
      weight_decay: of a row, each time that it is updated, times the learning rate: decoupled, as
        in :func:`adamw`.
      **options: see :func:`adam`.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    constants = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root, "weight_decay": weight_decay}
    return _adam(rowwise_adam, learning_rate, constants, options, row_state="row_nu")


def _adam(
    make: Callable[..., FusedOptimizer],
    learning_rate: LearningRate,
    constants: dict[str, Any],
    options: dict[str, Any],
    row_state: str | None = None,
) -> FusedOptimizer:
    call = f"optim.{make.__name__}"
    for name in ("b1", "b2"):
        if not _constant(call, name, constants[name]) < 1:
            raise ValueError(f"{call}: {name} must be below 1, got {constants[name]}")
    name = "rowwise_adam" if row_state else "adam"
    starts = (("mu", 0.0), (row_state or "nu", 0.0))
    return _optimizer(make, name, learning_rate, constants, starts, options, row_state=row_state)


def ftrl(
    learning_rate: float,
    l1: float = 0.0,
    l2: float = 0.0,
    beta: float = 0.0,
    initial_accumulator_value: float = 0.1,
    **options: Any,
) -> FusedOptimizer:
    """FTRL-proximal, whose rows become sparse under `l1` (McMahan et al., 2013).

    Of a row's first value, or one that was assigned, only a part remains after its next update:
    almost nothing where the gradient is small against the root of the accumulator. So begin with
    ``initializers.zeros()``.

    Args:
      learning_rate: alpha of the paper, a positive number: the same for all steps.
      l1: lambda 1.
      l2: lambda 2.
      beta: of the paper.
      initial_accumulator_value: of the squared gradients of new rows.
      **options: see :func:`adam`.

    Raises:
      TypeError, ValueError: naming the argument.
    """
    call = "optim.ftrl"
    if callable(learning_rate):
        raise TypeError(f"{call}: learning_rate must be a number, got a function: {_ONE_ALPHA}")
    alpha = as_number(call, "learning_rate", learning_rate)
    with np.errstate(over="ignore", divide="ignore"):
        is_usable = alpha > 0 and np.isfinite(1 / np.float32(alpha))
    if not is_usable:
        raise ValueError(
            f"{call}: learning_rate must be a positive number, and 1 / learning_rate a float32, "
            f"got {alpha}"
        )
    start = _constant(call, "initial_accumulator_value", initial_accumulator_value)
    constants = {"l1": l1, "l2": l2, "beta": beta}
    starts = (("sum_of_squares", start), ("linear", 0.0))
    return _optimizer(ftrl, "ftrl", alpha, constants, starts, options)
