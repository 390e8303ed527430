"""Embedding layers for flax.linen.

Tables live in a variable collection of their own, ``"tables"``, so that neither ``params`` nor the
dense optimizer ever sees them. A training step looks like this::

    zeros = hkv.linen.perturbations(model, variables, ids, train=True)

    def loss_fn(params, perturbations):
        variables = {"params": params, "tables": tables, "perturbations": perturbations}
        logits, updated = model.apply(variables, ids, train=True, mutable=hkv.linen.MUTABLE)
        return loss(logits, labels), updated

    (loss, updated), (gradients, row_gradients) = jax.value_and_grad(
        loss_fn, argnums=(0, 1), has_aux=True)(params, zeros)
    tables = hkv.linen.update_tables(optimizer, updated, row_gradients)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float

from jax_hkv import initializers
from jax_hkv import operations as _operations
from jax_hkv.admission import Frequency, Probability
from jax_hkv.index import Policy
from jax_hkv.optim import Optimizer
from jax_hkv.table import Table, create

TABLES = "tables"
LOOKUPS = "lookups"
PERTURBATIONS = "perturbations"

# What `apply` must be allowed to change in a training step.
MUTABLE = (TABLES, LOOKUPS)


class Embed(nn.Module):
    """An embedding layer over a dynamic table: any 64-bit id, no vocabulary.

    Attributes:
      capacity: entries that the table holds.
      features: elements of an embedding.
      dtype: of the output; None: that of the rows.
      param_dtype: of the rows.
      policy: which entries a full table evicts.
      choices: candidate buckets of an id, 1 or 2.
      embedding_init: first rows, from ``jax_hkv.initializers``.
      seed: of the first rows.
      optimizer: whose rows the table carries; None for a table that is never trained.
      admission: which unseen ids get a row, from ``jax_hkv.admission``; None: all.
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
    admission: Frequency | Probability | None = None

    @nn.compact
    def __call__(
        self, ids: Any, *, train: bool = False, valid: Any = None, scores: Any = None
    ) -> Float[Array, "*batch features"]:
        """Embeddings of ids.

        Args:
          ids: Keys or integers, of any shape.
          train: whether unseen ids are inserted. Otherwise (and in ``init``) they get the row that
            they would start with, and the table is left alone.
          valid: ``bool`` of the ids' shape; masked positions get zeros.
          scores: for training under CUSTOM, or as counts; see :func:`jax_hkv.find_or_insert`.
        """
        variable = self.variable(TABLES, "table", self._create)
        if not train or self.is_initializing():
            table, found = _operations.find(variable.value, ids, valid=valid, fill="initial")
            if self.is_mutable_collection(TABLES) and not self.is_initializing():
                variable.value = table  # the same entries; what comes later is ordered behind
            return self._cast(found.values)
        if not (self.is_mutable_collection(TABLES) and self.is_mutable_collection(LOOKUPS)):
            raise ValueError(
                f"{type(self).__name__} {self.name or ''}: train=True changes the table. Call "
                f"apply(..., mutable={list(MUTABLE)}), or pass train=False to evaluate"
            )
        variable.value, result = _operations.find_or_insert(
            variable.value, ids, scores=scores, valid=valid
        )
        number = len(self.get_variable(LOOKUPS, "results", ()))
        self.sow(LOOKUPS, "results", result)
        return self._cast(self.perturb(f"rows_{number}", result.values, PERTURBATIONS))

    def _create(self) -> Table:
        table = create(
            self.capacity,
            self.features,
            dtype=self.param_dtype,
            policy=self.policy,
            choices=self.choices,
            init=self.embedding_init,
            seed=self.seed,
            name=self.name or "embed",
            admission=self.admission,
        )
        return table if self.optimizer is None else self.optimizer.init(table)

    def _cast(self, rows: jax.Array) -> jax.Array:
        return rows if self.dtype is None else rows.astype(self.dtype)


def perturbations(
    module: nn.Module, variables: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Zeros in the shape of the rows that a call looks up; their gradient is that of the rows.

    Args:
      module: that holds :class:`Embed` layers.
      variables: its variables; only their shapes matter.
      *args: of the call.
      **kwargs: of the call.
    """
    clean = {name: tree for name, tree in variables.items() if name not in (PERTURBATIONS, LOOKUPS)}

    def call(variables: Any) -> Any:
        return module.apply(variables, *args, mutable=[*MUTABLE, PERTURBATIONS], **kwargs)[1]

    shapes = jax.eval_shape(call, clean).get(PERTURBATIONS, {})
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def update_tables(
    optimizer: Optimizer, updated: Mapping[str, Any], row_gradients: Any, **extra: Any
) -> Any:
    """The ``"tables"`` collection after one step of an optimizer on the rows that were looked up.

    Args:
      optimizer: that the layers were made with.
      updated: what ``apply(..., mutable=MUTABLE)`` returned: tables and lookups.
      row_gradients: of the perturbations.
      **extra: for the optimizer.
    """
    tables: dict[Any, Any] = flatten_dict(
        updated[TABLES], is_leaf=lambda _, leaf: isinstance(leaf, Table)
    )
    gradients: dict[Any, Any] = flatten_dict(row_gradients)
    lookups: dict[Any, Any] = flatten_dict(updated[LOOKUPS])
    for (*path, _), results in lookups.items():
        names = [(*path, f"rows_{number}") for number in range(len(results))]
        if not gradients.keys() >= set(names):
            raise ValueError(
                f"linen.update_tables: {'/'.join(path)} made {len(results)} lookups, but "
                "row_gradients has fewer: the variables given to apply must not hold the "
                f'"{LOOKUPS}" of an earlier step'
            )
        rows = [gradients[name] for name in names]
        result = results if len(results) > 1 else results[0]
        gradient = rows if len(rows) > 1 else rows[0]
        where = (*path, "table")
        tables[where] = optimizer.update(tables[where], result, gradient, **extra)
    return unflatten_dict(tables)
