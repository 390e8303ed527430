"""The DLRM over a table on the accelerator, before a larger one in the host's memory."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from dlrm import Dlrm, Inputs, loss_and_logits
from learners import Learner, Outcome, State

import jax_hkv as hkv

# The others refuse a key whose score is low, whatever the store has of it.
POLICIES = (hkv.Policy.LRU, hkv.Policy.LFU, hkv.Policy.EPOCH_LRU)


class Tiers(NamedTuple):
    """A learner's state over the smaller table, and the store, which lies in the host's memory."""

    near: State
    store: hkv.Table


def tiered_learner(
    near: Learner, make_store: Callable[[], hkv.Table], optimizer: optax.GradientTransformation
) -> Learner:
    """Returns a learner that trains as over one table of the store's capacity, bit for bit.

    Before a step its keys get places in the smaller table. What had to go for them goes to the
    store, with scores and optimizer rows, and what the store has of them comes back, so that the
    step finds all of its keys. Nothing is lost as long as a batch finds room in the smaller table
    (none of its keys is refused) and everything in the store: an outcome's `evicted` counts what
    is lost, that of refused keys which the step itself puts in the place of others included.

    Args:
        near: of `table_learner`, over the smaller table, under one of `POLICIES`.
        make_store: () -> the larger table, empty.
        optimizer: of the smaller one.
    """
    device = next(iter(near.state.table.keys.devices()))
    host = jax.local_devices(backend="cpu")[-1]
    with jax.default_device(host):
        store = jax.device_put(hkv.optim.sparse(optimizer).init(make_store()), host)
    model = Dlrm(store.dim)

    @partial(jax.jit, donate_argnums=0)
    def admit(table: hkv.Table, inputs: Inputs) -> Any:
        valid = jnp.broadcast_to(inputs.valid[:, None], inputs.keys.shape)
        table, found = hkv.find_or_insert(table, inputs.keys, valid=valid, return_evicted=True)
        is_new = hkv.is_new(found.status)
        return table, (found.keys, is_new, found.evicted), found.counts

    @partial(jax.jit, donate_argnums=0)
    def exchange(store: hkv.Table, keys: Any, is_new: Any, evicted: Any) -> Any:
        store, back = hkv.export_keys(store, keys, valid=is_new)
        store, kept = hkv.import_batch(store, evicted)
        return store, back, kept.counts

    @partial(jax.jit, donate_argnums=0)
    def restore(table: hkv.Table, entries: hkv.Entries) -> Any:
        return hkv.import_batch(table, entries)[0]

    def step(state: Tiers, inputs: Inputs) -> tuple[Tiers, Outcome]:
        table, leaving, counts = admit(state.near.table, inputs)
        store, back, kept = exchange(state.store, *jax.device_put(leaving, host))
        table = restore(table, jax.device_put(back, device))
        after, outcome = near.step(state.near._replace(table=table), inputs)
        lost = jax.device_put(kept.evicted + kept.refused, device) + outcome.counts.evicted
        return Tiers(after, store), outcome._replace(counts=counts._replace(evicted=lost))

    @jax.jit
    def rows_of(table: hkv.Table, inputs: Inputs) -> Any:
        found = hkv.find(table, inputs.keys, fill="initial")[1]
        return found.values, found.found

    @jax.jit
    def logits_of(params: Any, inputs: Inputs, rows: Any, is_near: Any, stored: Any) -> jax.Array:
        rows = jnp.where(is_near[..., None], rows, stored)
        return loss_and_logits(model, inputs, params, rows)[1]

    def logits(state: Tiers, inputs: Inputs) -> jax.Array:
        stored, _ = rows_of(state.store, jax.device_put(inputs, host))
        rows, is_near = rows_of(state.near.table, inputs)
        return logits_of(state.near.params, inputs, rows, is_near, jax.device_put(stored, device))

    return near._replace(state=Tiers(near.state, store), step=step, logits=logits)
