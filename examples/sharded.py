"""The DLRM over a table that lies on several devices, each of which gets a part of every batch."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from criteo import CATEGORIES, UserError
from dlrm import Dlrm, Inputs
from learners import Learner, Outcome, State, first_params, updated

import jax_hkv as hkv

AXIS = "device"


def placement_on(devices: int, mode: hkv.sharding.Mode) -> hkv.sharding.Placement:
    """Returns a mesh of so many devices; without GPUs, the CPU stands in for all of them.

    Raises:
        UserError: if there are fewer devices.
    """
    with suppress(RuntimeError):  # after JAX has begun, there are as many as there are
        jax.config.update("jax_num_cpu_devices", devices)
    there_are = jax.devices()
    if len(there_are) < devices:
        raise UserError(f"--devices {devices}: there are {len(there_are)} {there_are[0].platform}s")
    mesh = jax.make_mesh((devices,), (AXIS,), devices=there_are[:devices])
    return hkv.sharding.Placement(mesh, mode=mode)


def sharded_learner(
    make_table: Callable[[int], hkv.Table],
    placement: hkv.sharding.Placement,
    optimizer: optax.GradientTransformation,
    *,
    capacity: int,
    dim: int,
    seed: int,
    epoch_steps: int,
    is_frozen: bool,
) -> Learner:
    """Returns what `table_learner` does, for a table over the devices of a placement.

    Args:
        make_table: from the capacity of one device to its empty part of the table.
        placement: of table and batches.
        optimizer: for the dense parameters and for the rows.
        capacity: rows of all devices together.
        dim: numbers in a row.
        seed: of the dense parameters.
        epoch_steps: how long an epoch is, for the policies that know epochs.
        is_frozen: leave the rows at their first, random values.
    """
    model, row_optimizer = Dlrm(dim), hkv.optim.sparse(optimizer)
    own_capacity = -(-capacity // placement.devices)

    def first() -> State:
        params = first_params(model, seed)
        table = row_optimizer.init(make_table(own_capacity))
        return State(params, optimizer.init(params), table, jnp.uint32(0))

    def step(state: State, inputs: Inputs) -> tuple[State, Outcome]:
        valid = jnp.repeat(inputs.valid[:, None], CATEGORIES, axis=1)
        takes_scores = state.table.policy == hkv.Policy.CUSTOM
        scores = jnp.full(valid.shape, state.steps) if takes_scores else None
        table = hkv.advance_epoch(state.table, state.steps // epoch_steps)
        table, found = hkv.sharding.find_or_insert(
            table, inputs.keys, axis_name=AXIS, scores=scores, valid=valid
        )
        loss_of = partial(_share_of_loss, model, inputs)
        with_gradients = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
        (loss, logits), (gradients, row_gradients) = with_gradients(state.params, found.values)
        if not is_frozen:
            table = hkv.sharding.update(row_optimizer, table, found, row_gradients)
        loss, gradients, size = jax.lax.psum((loss, gradients, hkv.size(table)), AXIS)
        logits = jax.lax.all_gather(logits, AXIS, tiled=True)
        outcome = Outcome(logits, loss, found.counts, size)
        return updated(optimizer, state._replace(table=table), gradients), outcome

    def logits(state: State, inputs: Inputs) -> jax.Array:
        _, found = hkv.sharding.find(state.table, inputs.keys, axis_name=AXIS, fill="initial")
        return _logits(model, state.params, inputs, found.values)

    train, predict = placement.step(step), placement.run(logits)
    return Learner(
        state=placement.create(first),
        step=lambda state, inputs: train(state, placement.put(inputs)),
        logits=lambda state, inputs: predict(state, placement.put(inputs)).reshape(-1),
        encode=hkv.Keys.from_numpy,
        capacity=make_table(own_capacity).capacity * placement.devices,
    )


def _share_of_loss(
    model: Dlrm, inputs: Inputs, params: Any, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What this device's rows add to the mean loss over all rows that are not padding; logits."""
    logits = _logits(model, params, inputs, rows)
    losses = optax.sigmoid_binary_cross_entropy(logits, inputs.labels)
    count = jax.lax.psum(inputs.valid.sum(), AXIS)
    return jnp.sum(losses, where=inputs.valid) / jnp.maximum(count, 1), logits


def _logits(model: Dlrm, params: Any, inputs: Inputs, rows: jax.Array) -> jax.Array:
    logits = model.apply(params, inputs.integers, rows)
    assert isinstance(logits, jax.Array)
    return logits
