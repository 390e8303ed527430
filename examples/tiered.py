"""The DLRM over a table on the accelerator, before a larger one in the host's memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from dlrm import Dlrm, Inputs, loss_and_logits
from learners import Learner, Outcome, State

import jax_hkv as hkv


class Tiered(NamedTuple):
    """A learner's state over the smaller table, and the store behind it."""

    near: State
    store: hkv.Table


def tiered_learner(near: Learner, capacity: int) -> Learner:
    """Returns a learner that trains as over one table of the store's capacity, bit for bit.

    Nothing is lost as long as a batch finds room in the smaller table (none of its keys is refused)
    and everything in the store: an outcome's `evicted` counts what is lost, that of refused keys
    which the step itself puts in the place of others included.

    Args:
        near: of `table_learner`, over the smaller table.
        capacity: of the store.
    """
    table = near.state.table
    store = hkv.tiered.create_store(table, capacity, device=jax.local_devices(backend="cpu")[-1])
    model = Dlrm(table.dim)

    def step(state: Tiered, inputs: Inputs) -> tuple[Tiered, Outcome]:
        valid = jnp.broadcast_to(inputs.valid[:, None], inputs.keys.shape)
        tiers = hkv.tiered.Tiers(state.near.table, state.store)
        (table, store), counts = hkv.tiered.prefetch(tiers, inputs.keys, valid=valid)
        after, outcome = near.step(state.near._replace(table=table), inputs)
        counts = outcome.counts._replace(
            unique=counts.unique,
            hits=counts.hits,
            inserted=counts.inserted,
            evicted=counts.dropped + outcome.counts.evicted,
            refused=counts.refused,
        )
        return Tiered(after, store), outcome._replace(counts=counts)

    @jax.jit
    def logits_of(params: Any, inputs: Inputs, rows: jax.Array) -> jax.Array:
        return loss_and_logits(model, inputs, params, rows)[1]

    def logits(state: Tiered, inputs: Inputs) -> jax.Array:
        tiers = hkv.tiered.Tiers(state.near.table, state.store)
        _, found = hkv.tiered.find(tiers, inputs.keys, fill="initial")
        return logits_of(state.near.params, inputs, found.values)

    return near._replace(state=Tiered(near.state, store), step=step, logits=logits)
