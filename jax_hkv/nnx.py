"""Embedding layers for flax.nnx.

Tables are Variables of a type of their own, so that neither ``nnx.Param`` filters nor the dense
optimizer ever see them. A training step looks like this::

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model, dense, ids, labels):
        loss, gradients, row_gradients = hkv.nnx.value_and_grad(loss_fn)(model, ids, labels)
        dense.update(model, gradients)
        hkv.nnx.update_tables(sparse, model, row_gradients)
        return loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jax_hkv import initializers
from jax_hkv import operations as _operations
from jax_hkv.admission import Frequency, Probability
from jax_hkv.index import Policy
from jax_hkv.optim import Optimizer
from jax_hkv.table import create

_LOOKUP = "lookup_{}"
_ROWS = "rows_{}"


class TableVariable(nnx.Variable):
    """Holds a :class:`jax_hkv.Table`."""


class Lookup(nnx.Variable):
    """What a training lookup returned; it lives from the forward pass to the update."""


class RowPerturbation(nnx.Variable):
    """Zeros that are added to the rows of a lookup, so that their gradient can be taken."""


class Embed(nnx.Module):
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
      optimizer: whose rows the table carries; None for a table that is never trained.
      name: for error messages.
      admission: which unseen ids get a row, from ``jax_hkv.admission``; None: all.
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
        name: str = "embed",
        admission: Frequency | Probability | None = None,
    ):
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
        self.dtype = dtype
        self.is_recording = False  # whether lookups are kept for an update
        self.table = TableVariable(table if optimizer is None else optimizer.init(table))

    def __call__(
        self, ids: Any, *, train: bool = False, valid: Any = None, scores: Any = None
    ) -> Float[Array, "*batch features"]:
        """Embeddings of ids.

        Args:
          ids: Keys or integers, of any shape.
          train: whether unseen ids are inserted. Otherwise they get the row that they would start
            with, and the table is left alone.
          valid: ``bool`` of the ids' shape; masked positions get zeros.
          scores: for training under CUSTOM, or as counts; see :func:`jax_hkv.find_or_insert`.
        """
        if not train:
            table = self.table.get_value()
            table, found = _operations.find(table, ids, valid=valid, fill="initial")
            self.table.set_value(table)  # the same entries; what comes later is ordered behind
            return self._cast(found.values)
        table, result = _operations.find_or_insert(
            self.table.get_value(), ids, scores=scores, valid=valid
        )
        self.table.set_value(table)
        if not self.is_recording:
            return self._cast(result.values)
        number = len(list(_numbered(self, _LOOKUP)))
        setattr(self, _LOOKUP.format(number), Lookup(result))
        perturbation = getattr(self, _ROWS.format(number), None)
        rows = result.values if perturbation is None else result.values + perturbation.get_value()
        return self._cast(rows)

    def _cast(self, rows: jax.Array) -> jax.Array:
        return rows if self.dtype is None else rows.astype(self.dtype)


def _numbered(module: nnx.Module, name: str) -> Iterator[tuple[str, Any]]:
    """The attributes name_0, name_1, ... that a module has."""
    number = 0
    while hasattr(module, name.format(number)):
        yield name.format(number), getattr(module, name.format(number))
        number += 1


def _embeds(model: nnx.Module) -> Iterator[tuple[str, Embed]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Embed):
            yield "/".join(map(str, path)), module


def _forget(model: nnx.Module) -> None:
    """Removes what lookups left, so that a model has the same structure before every step."""
    for _, embed in _embeds(model):
        embed.is_recording = False
        for name in (_LOOKUP, _ROWS):
            for attribute, _ in list(_numbered(embed, name)):
                delattr(embed, attribute)


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
        for _, embed in _embeds(model):
            embed.is_recording = True
        shapes = _row_shapes(loss_fn, model, args, kwargs)
        for path, embed in _embeds(model):
            for number, shape in enumerate(shapes.get(path, ())):
                zeros = jnp.zeros(shape.shape, shape.dtype)
                setattr(embed, _ROWS.format(number), RowPerturbation(zeros))
        value, gradients = differentiate(model, *args, **kwargs)
        rows, dense = nnx.split_state(gradients, RowPerturbation, ...)
        return value, dense, rows

    return compute


def _row_shapes(
    loss_fn: Callable[..., Any], model: nnx.Module, args: Any, kwargs: Any
) -> dict[str, list[jax.ShapeDtypeStruct]]:
    """Shapes of the rows that each layer looks up, in order of its calls."""
    graph, state = nnx.split(model)

    def run(state: Any) -> dict[str, list[jax.Array]]:
        copy = nnx.merge(graph, state)
        loss_fn(copy, *args, **kwargs)
        return {
            path: [lookup.get_value().values for _, lookup in _numbered(embed, _LOOKUP)]
            for path, embed in _embeds(copy)
        }

    return jax.eval_shape(run, state)


def update_tables(
    optimizer: Optimizer, model: nnx.Module, row_gradients: Any, **extra: Any
) -> None:
    """One step of an optimizer on the rows that the model's layers looked up; changes the model.

    Args:
      optimizer: that the layers were made with.
      model: after the forward pass of :func:`value_and_grad`.
      row_gradients: from there.
      **extra: for the optimizer.
    """
    gradients = {
        "/".join(map(str, path)): leaf.get_value()
        for path, leaf in nnx.to_flat_state(row_gradients)
    }
    for path, embed in _embeds(model):
        lookups = [lookup.get_value() for _, lookup in _numbered(embed, _LOOKUP)]
        if not lookups:
            continue
        prefix = f"{path}/" if path else ""
        rows = [gradients[prefix + _ROWS.format(number)] for number in range(len(lookups))]
        result = lookups if len(lookups) > 1 else lookups[0]
        gradient = rows if len(rows) > 1 else rows[0]
        table = optimizer.update(embed.table.get_value(), result, gradient, **extra)
        embed.table.set_value(table)
    _forget(model)
