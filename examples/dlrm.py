"""A small DLRM, and its loss.

The model is that of Naumov et al., "Deep Learning Recommendation Model for Personalization and
Recommendation Systems", 2019.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

HIDDEN = 64  # units of a hidden layer: enough for the built-in log, and quick on two cores
INITIAL_STDDEV = 0.1  # of embedding rows; measured: 0.05 and 0.1 learn equally fast


class Inputs(NamedTuple):
    """One padded batch.

    Attributes:
        labels: float32[n], 1 for a click.
        integers: float32[n, 13], NaN where missing.
        keys: what the embedding looks up, of leading shape [n, k], k ids a row.
        valid: bool[n], False for padding.
    """

    labels: jax.Array
    integers: jax.Array
    keys: Any
    valid: jax.Array


def magnitudes(integers: jax.Array) -> jax.Array:
    """Returns the logarithms of integers, with their signs; 0 where missing."""
    return jnp.nan_to_num(jnp.sign(integers) * jnp.log1p(jnp.abs(integers)))


class Dlrm(nn.Module):
    """Integers through an MLP, dot products of all pairs of vectors, another MLP."""

    dim: int

    @nn.compact
    def __call__(self, integers: jax.Array, rows: jax.Array) -> jax.Array:
        """Returns logits float32[n] of integers [n, 13] and embedding rows [n, 26, dim]."""
        missing = jnp.isnan(integers)
        features = jnp.concatenate([magnitudes(integers), missing], axis=1)
        bottom = nn.Dense(self.dim)(nn.relu(nn.Dense(HIDDEN)(features)))
        vectors = jnp.concatenate([bottom[:, None], rows], axis=1)
        # Each pair's product stands here twice: picking one of them out costs more than it saves.
        products = jnp.einsum("nid,njd->nij", vectors, vectors).reshape(len(rows), -1)
        top = nn.relu(nn.Dense(HIDDEN)(jnp.concatenate([bottom, products], axis=1)))
        return nn.Dense(1)(nn.relu(nn.Dense(HIDDEN // 2)(top)))[:, 0]


def loss_and_logits(
    model: Dlrm, inputs: Inputs, params: Any, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss in nats over the rows that are not padding, and the logits."""
    logits = model.apply(params, inputs.integers, rows)
    assert isinstance(logits, jax.Array)
    return mean_loss(logits, inputs), logits


def mean_loss(logits: jax.Array, inputs: Inputs) -> jax.Array:
    """Returns the mean loss in nats over the rows that are not padding."""
    losses = optax.sigmoid_binary_cross_entropy(logits, inputs.labels)
    return jnp.sum(losses, where=inputs.valid) / jnp.maximum(inputs.valid.sum(), 1)
