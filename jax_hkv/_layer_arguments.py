"""What layers, states and steps for linen and for nnx are given: checked where it comes in."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from jax_hkv._checks import as_bool, as_integer, check_function
from jax_hkv._exchange import as_exchange
from jax_hkv._gradients import LossScale, as_bound
from jax_hkv._namespaces import keys_are
from jax_hkv._placement import check_placement
from jax_hkv.collection import Collection
from jax_hkv.optim import check_optimizer, check_transformation
from jax_hkv.table import Settings, Table, buckets_of, create

Unseen = Literal["initial", "zeros", "learned"]


def check_outputs(call: str, dtype: Any, unseen: Unseen, return_evicted: Any) -> None:
    """Raises unless a layer's outputs can be these; `unseen`: what ids without a row get."""
    check_dtype(call, dtype)
    as_bool(call, "return_evicted", return_evicted)
    if unseen not in get_args(Unseen):
        raise ValueError(f"{call}: unseen must be one of {list(get_args(Unseen))}, got {unseen!r}")


def check_dtype(call: str, dtype: Any) -> None:
    """Raises unless rows can come out in it; None is the type of the rows."""
    try:
        if dtype is None or jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return
        got = f"{jnp.dtype(dtype).name}, which would cut embeddings"
    except (TypeError, ValueError):
        got = repr(dtype)
    raise TypeError(
        f"{call}: dtype must be floating-point, got {got}: give jnp.bfloat16, say, or None for "
        "that of the rows"
    )


def rows_dtype(layer: Any, *, train: bool, usual: Any = jnp.float32) -> Any:
    """The type in which a lookup gives the rows of a layer; None: the usual one.

    That of the output, but for float16 in place of another: gradients are like rows, and it has not
    their range; nor that of rows which a model widens at once. Learned rows are added to rows as
    they are.
    """
    check_dtype(type(layer).__name__, layer.dtype)
    kind = None if layer.dtype is None else jnp.dtype(layer.dtype)
    if kind is None or kind == usual:
        return None
    if kind in (jnp.float32, jnp.bfloat16) and layer.unseen != "learned":
        return kind
    return jnp.dtype(jnp.float32) if train else None


def check_collection(call: str, collection: Any) -> None:
    """Raises unless it is one."""
    if not isinstance(collection, Collection):
        raise TypeError(
            f"{call}: collection must be a jax_hkv.Collection, got {type(collection).__name__}: "
            "make one of tables and of the features that are looked up in them, "
            "jax_hkv.Collection(tables, features)"
        )


def check_updated(updated: Any, tables: str) -> None:
    """Raises unless they are collections of linen, with that of tables."""
    if not isinstance(updated, Mapping) or tables not in updated:
        got = list(updated) if isinstance(updated, Mapping) else type(updated).__name__
        raise TypeError(
            f"linen.update_tables: updated must have the collection {tables!r}, got {got}: give "
            "what apply(..., mutable=linen.MUTABLE) returned beside the outputs"
        )


def check_row_gradients(given: Any) -> None:
    """Raises unless they are by tables, as those of nnx."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"nnx.update_tables: row_gradients must be a dict by tables, got "
            f"{type(given).__name__}: give the last result of nnx.value_and_grad(loss_fn)(...)"
        )
    for where, rows in given.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(rows, "results", None)):
            name = jax.tree_util.keystr(path[-1:], simple=True)
            if name in ("slots", "inverse") and not jnp.issubdtype(leaf.dtype, jnp.integer):
                raise TypeError(
                    f"nnx.update_tables: row_gradients[{where!r}].results must be what "
                    f"value_and_grad returned, got {name} as {leaf.dtype}: scale, clip or cast the "
                    "gradients alone, rows._replace(gradients=jax.tree.map(fn, rows.gradients))"
                )


# Of settings in layers, which name them as Flax does.
_FIELDS = {"dim": "features", "dtype": "param_dtype", "init": "embedding_init"}


def as_settings(call: str, given: Settings) -> Settings:
    """What a layer says of its table, checked, in the types that a table needs."""
    return given.checked(call, **_FIELDS)


def check_given_table(call: str, table: Table, given: Settings, *, train: bool) -> None:
    """Raises for a table that a layer was given and would not have made, as far as it matters.

    Its keys must be ids; where the layer trains it, all must be as the layer says.
    """
    if table.index.namespace is not None:
        raise ValueError(
            f"{call}: table must be one whose keys are ids, got a collection's fused one, of "
            f"{keys_are(table.index.namespace)}: make an EmbedCollection of it, or look it up by "
            "jax_hkv.find and Group.keys. Of its entries, Group.ids gives ids that none folded"
        )
    if train:
        as_settings(call, given).check_made_so(call, table, **_FIELDS)


def new_table(
    call: str, name: str, axis_name: Any, capacity: Any, optimizer: Any, given: Settings
) -> Table:
    """The table of a layer, empty; this device's part of it where an axis name is given.

    Args:
      call: the layer, in whose words errors are.
      name: of the table.
      axis_name: of the layer, or None.
      capacity: of all devices together, or of each of replicas.
      optimizer: of the layer, or None.
      given: the settings, which layers know by other names than tables.
    """
    check_optimizer(call, optimizer)
    settings = as_settings(call, given)._asdict()
    exchange = as_exchange(axis_name)
    if exchange is not None:
        capacity = exchange.local_capacity(as_integer(call, "capacity", capacity, 1, 2**63 - 1))
    buckets_of(call, capacity)
    replicas = False if exchange is None else exchange.replicas
    table = create(capacity, name=name, replicas=replicas, **settings)
    return table if optimizer is None else optimizer.init(table)


def check_loss_fn(call: str, first: str, loss_fn: Any, has_aux: Any) -> None:
    """Raises unless it can be called; `first`: what it is given before the arguments."""
    as_bool(call, "has_aux", has_aux)
    remedy = "the state or the model, and the batch, go to the function that this returns"
    check_function(call, "loss_fn", loss_fn, f"of ({first}, *args) to a loss", remedy)


def check_step(
    first: str, loss_fn: Any, has_aux: Any, max_norm: Any, donate: Any, placement: Any
) -> None:
    """Raises unless a training step can be made of these; see :func:`check_loss_fn`."""
    check_loss_fn("train_step", first, loss_fn, has_aux)
    if max_norm is not None:
        as_bound("train_step", max_norm)
    as_bool("train_step", "donate", donate)
    if placement is not None:
        check_placement("train_step", placement, ", or None for a state of one device")


def check_state(
    call: str, model: Any, is_model: bool, expected: str, tx: Any, loss_scale: Any
) -> None:
    """Raises unless a training state can be made of these.

    Args:
      call: for the message.
      model: of the state.
      is_model: whether an instance can be one.
      expected: what it is to be.
      tx: for the dense parameters.
      loss_scale: or None.
    """
    if isinstance(model, type):
        raise TypeError(
            f"{call}: model must be {expected}, got the class {model.__name__}: give an instance, "
            f"{model.__name__}(...)"
        )
    if not is_model:
        raise TypeError(
            f"{call}: model must be {expected}, got "
            f"{type(model).__module__}.{type(model).__name__}: one of linen goes to "
            "jax_hkv.linen.TrainState.create, one of nnx to jax_hkv.nnx.TrainState"
        )
    check_transformation(call, tx)
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"{call}: loss_scale must be a jax_hkv.optim.LossScale, or None, got "
            f"{type(loss_scale).__name__}: give jax_hkv.optim.LossScale.create(1024.0), say"
        )


@contextlib.contextmanager
def wants_gradients_alone() -> Iterator[None]:
    """Raises of a transformation of dense parameters that asks for more: a chain tells it last."""
    try:
        yield
    except TypeError as error:
        if not re.search(r"update\w*\(\) missing \d+ required keyword-only", str(error)):
            raise
        raise TypeError(
            "train_step: tx must need gradients, its state and parameters alone, got one that asks "
            f"for more ({error}), as optax.contrib.reduce_on_plateau and optax.lbfgs do: leave it "
            "out, and change the rate of an optax.inject_hyperparams between steps"
        ) from error
