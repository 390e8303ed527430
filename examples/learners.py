"""Train steps of the DLRM: over a table, over a table's frozen rows, over a dense embedding."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from criteo import CATEGORIES, INTEGERS
from dlrm import INITIAL_STDDEV, Dlrm, Inputs, loss_and_logits
from flax import linen as nn

import jax_hkv as hkv


class State(NamedTuple):
    """What a train step changes; `table` is None for a dense embedding."""

    params: Any
    moments: Any
    table: Any
    steps: jax.Array  # uint32, the score of a key under the policy CUSTOM


class Outcome(NamedTuple):
    """What a train step reports: logits float32[n], the loss, and the table's counts and size."""

    logits: jax.Array
    loss: jax.Array
    counts: hkv.Counts
    size: jax.Array


class Learner(NamedTuple):
    """A model with its embedding.

    Attributes:
        state: the first one; `State`, or what the step of another model changes.
        step: (state, inputs) -> (state, outcome), jitted; the state is donated.
        logits: (state, inputs) -> float32[n], jitted; changes nothing.
        encode: keys uint64[n, k] -> `Inputs.keys`.
        capacity: rows of the embedding.
    """

    state: Any
    step: Callable[[Any, Inputs], tuple[Any, Outcome]]
    logits: Callable[[Any, Inputs], jax.Array]
    encode: Callable[[np.ndarray], Any]
    capacity: int


def table_learner(
    table: hkv.Table,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    epoch_steps: int,
    is_frozen: bool,
) -> Learner:
    """Returns a DLRM over a table: training inserts keys, prediction does not.

    Args:
        table: an empty table.
        optimizer: for the dense parameters and for the rows.
        seed: of the dense parameters.
        epoch_steps: how long an epoch is, for the policies that know epochs.
        is_frozen: leave the rows at their first, random values.
    """
    model, row_optimizer = Dlrm(table.dim), hkv.optim.sparse(optimizer)
    takes_scores = table.policy == hkv.Policy.CUSTOM
    params = first_params(model, seed)
    state = State(params, optimizer.init(params), row_optimizer.init(table), jnp.uint32(0))

    @partial(jax.jit, donate_argnums=0)
    def step(state: State, inputs: Inputs) -> tuple[State, Outcome]:
        valid = jnp.repeat(inputs.valid[:, None], CATEGORIES, axis=1)
        scores = jnp.full(valid.shape, state.steps) if takes_scores else None
        table = hkv.advance_epoch(state.table, state.steps // epoch_steps)
        table, found = hkv.find_or_insert(table, inputs.keys, scores=scores, valid=valid)
        loss_of = partial(loss_and_logits, model, inputs)
        with_gradients = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (loss, logits), (gradients, row_gradients) = with_gradients(state.params, found.values)
        if not is_frozen:
            table = row_optimizer.update(table, found, row_gradients)
        outcome = Outcome(logits, loss, found.counts, hkv.size(table))
        return updated(optimizer, state._replace(table=table), gradients), outcome

    @jax.jit
    def logits(state: State, inputs: Inputs) -> jax.Array:
        # A key that training never kept looks as every new key did in training: its first row.
        _, found = hkv.find(state.table, inputs.keys, fill="initial")
        return loss_and_logits(model, inputs, state.params, found.values)[1]

    return Learner(state, step, logits, hkv.Keys.from_numpy, table.capacity)


def dense_learner(
    vocabulary: np.ndarray, dim: int, optimizer: optax.GradientTransformation, *, seed: int
) -> Learner:
    """Returns the same DLRM with an `nn.Embed` that has one row for every key.

    Args:
        vocabulary: uint64[v], every key, sorted.
        dim: numbers in a row.
        optimizer: for all parameters.
        seed: of the parameters.
    """
    model, first_rows = Dlrm(dim), nn.initializers.normal(stddev=INITIAL_STDDEV)
    embed = nn.Embed(len(vocabulary), dim, embedding_init=first_rows)
    # The model's own parameters are the same as over a table, so that only the embedding differs.
    params = {
        "model": first_params(model, seed),
        "embed": embed.init(jax.random.key(seed), jnp.zeros(1, jnp.int32)),
    }
    state = State(params, optimizer.init(params), None, jnp.uint32(0))

    def loss_of(params: Any, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        rows: Any = embed.apply(params["embed"], inputs.keys)
        return loss_and_logits(model, inputs, params["model"], rows)

    @partial(jax.jit, donate_argnums=0)
    def step(state: State, inputs: Inputs) -> tuple[State, Outcome]:
        with_gradients = jax.value_and_grad(loss_of, has_aux=True)
        (loss, logits), gradients = with_gradients(state.params, inputs)
        keys, none = inputs.valid.sum() * CATEGORIES, jnp.int32(0)
        counts = hkv.Counts(*[none] * len(hkv.Counts._fields))._replace(unique=keys, hits=keys)
        outcome = Outcome(logits, loss, counts, jnp.int32(len(vocabulary)))
        return updated(optimizer, state, gradients), outcome

    @jax.jit
    def logits(state: State, inputs: Inputs) -> jax.Array:
        return loss_of(state.params, inputs)[1]

    return Learner(state, step, logits, partial(np.searchsorted, vocabulary), len(vocabulary))


def first_params(model: Dlrm, seed: int) -> Any:
    """Returns the dense parameters to begin with."""
    rows = jnp.zeros((1, CATEGORIES, model.dim))
    return model.init(jax.random.key(seed), jnp.zeros((1, INTEGERS)), rows)


def updated(optimizer: Any, state: State, gradients: Any) -> State:
    """Returns the state after the optimizer's step on the dense parameters."""
    updates, moments = optimizer.update(gradients, state.moments, state.params)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, moments=moments, steps=state.steps + 1)
