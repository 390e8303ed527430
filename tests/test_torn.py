"""Tables that were put together of arrays for another capacity are not trained on."""

from __future__ import annotations

import contextlib

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from test_sharding_traffic import mesh_of

import jax_hkv as hkv
from jax_hkv import _placed

SGD = hkv.optim.sgd(0.1)
IDS = np.arange(600, dtype=np.int32)


class Linen(nn.Module):
    capacity: int
    choices: int = 1

    @nn.compact
    def __call__(self, ids, train=False):
        embed = hkv.linen.Embed(
            self.capacity, 4, optimizer=SGD, choices=self.choices, seed=3, name="embed"
        )
        return embed(ids, train=train)


class Nnx(nnx.Module):
    def __init__(self, capacity, choices=1):
        self.embed = hkv.nnx.Embed(capacity, 4, optimizer=SGD, choices=choices, seed=3)

    def __call__(self, ids, train=False):
        return self.embed(ids, train=train)


def linen_state(*options):
    return hkv.linen.TrainState.create(Linen(*options), jax.random.key(0), IDS, tx=optax.sgd(0.1))


def linen_loss(apply, ids):
    return apply(ids, train=True).sum()


def restored(path, target):
    """As Orbax's own error proposes."""
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.eval_shape(lambda: target), strict=False)


@pytest.mark.parametrize("capacity", [1024, 4096])
@pytest.mark.parametrize("choices", [1, 2])
def test_a_checkpoint_that_was_cut_or_filled_up_is_not_trained_on(choices, capacity, tmp_path):
    state, _ = hkv.linen.train_step(linen_loss)(linen_state(2048, choices), IDS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    step = hkv.linen.train_step(linen_loss)
    torn = restored(tmp_path / "state", linen_state(capacity, choices))
    table = torn.tables["embed"]["table"]
    assert table.capacity == capacity and int(hkv.misplaced(table)) > 100
    jax.eval_shape(step, torn, IDS)  # of which nobody knows the entries
    for _ in range(2):
        with pytest.raises(ValueError, match="train_step: table 'embed' must have its entries wh"):
            step(torn, IDS)
    state, info = step(restored(tmp_path / "state", linen_state(2048, choices)), IDS)
    assert int(info.tables["embed/table"].hits) == len(IDS)


@pytest.mark.parametrize("choices", [1, 2])
def test_so_it_is_in_nnx_and_a_table_that_grew_is_sound(choices):
    state = hkv.nnx.TrainState(Nnx(2048, choices), optax.sgd(0.1))
    hkv.nnx.train_step(lambda model, ids: model(ids, train=True).sum())(state, IDS)
    small = state.model.embed.table.get_value()
    for table, is_torn in ((hkv.resize(small, 8192)[0], False), (small, True)):
        if is_torn:
            padded = jax.tree.map(
                lambda leaf: (
                    np.concatenate([leaf, np.zeros_like(leaf)]) if leaf.shape[0] > 2 else leaf
                ),
                small,
            )
            table = jax.tree.map(np.asarray, padded)
        state.model.embed.table.set_value(table)
        step = hkv.nnx.train_step(lambda model, ids: model(ids, train=True).sum())
        if is_torn:
            with pytest.raises(
                ValueError, match="elsewhere: its arrays were made for another capac"
            ):
                step(state, IDS)
        else:
            assert int(step(state, IDS).tables["embed/table"].hits) == len(IDS)
            small = state.model.embed.table.get_value()


def test_a_used_up_state_is_named_at_the_first_call_too():
    state = linen_state(1024)
    hkv.linen.train_step(linen_loss)(state, IDS)
    with pytest.raises(RuntimeError, match="train_step: state was used up by an earlier step"):
        hkv.linen.train_step(linen_loss)(state, IDS)


@pytest.mark.parametrize("before", ["used up", "empty", "sound and traced"])
def test_a_torn_state_is_seen_after_calls_that_met_no_entries(before, tmp_path):
    """Neither a call that failed nor a fresh state says anything of the next one's."""
    step = hkv.linen.train_step(linen_loss)
    state, _ = step(linen_state(2048), IDS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    step = hkv.linen.train_step(linen_loss)
    if before == "used up":
        used_up = linen_state(4096)
        hkv.linen.train_step(linen_loss)(used_up, IDS)
        with pytest.raises(RuntimeError, match="used up"):
            step(used_up, IDS)
    elif before == "empty":
        step(linen_state(4096), IDS)
    else:
        jax.eval_shape(lambda ids: step(state, ids)[1].loss, IDS)
    with pytest.raises(ValueError, match="its arrays were made for another capacity"):
        step(restored(tmp_path / "state", linen_state(4096)), IDS)


def test_a_state_that_a_program_holds_is_trained_from_the_first_call_on():
    state, _ = hkv.linen.train_step(linen_loss)(linen_state(2048), IDS)
    losses = [
        jax.jit(lambda ids, step=step: step(state, ids)[1].loss)(IDS) for step in fresh_steps()
    ]
    eager = hkv.linen.train_step(linen_loss, donate=False)(state, IDS)[1].loss
    assert float(losses[0]) == float(losses[1]) == float(eager)


def fresh_steps():
    """One that has seen nothing, and one that has been called."""
    yield hkv.linen.train_step(linen_loss)
    known = hkv.linen.train_step(linen_loss)
    known(linen_state(2048), IDS)
    yield known


def test_a_torn_table_on_every_device_is_seen(tmp_path):
    state, _ = hkv.linen.train_step(linen_loss)(linen_state(2048), IDS)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    everywhere = jax.sharding.NamedSharding(mesh_of(2), jax.sharding.PartitionSpec())
    torn = jax.device_put(restored(tmp_path / "state", linen_state(4096)), everywhere)
    with pytest.raises(ValueError, match="its arrays were made for another capacity"):
        hkv.linen.train_step(linen_loss)(torn, IDS)


@pytest.mark.parametrize("where", ["one device", "all devices"])
def test_steps_under_a_mesh_are_looked_at_too(where):
    mesh = mesh_of(2)
    losses = []
    for _ in range(2):
        state, step = linen_state(2048), hkv.linen.train_step(linen_loss)
        if where == "all devices":
            everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
            state = jax.device_put(state, everywhere)
        with jax.set_mesh(mesh) if losses else contextlib.nullcontext():
            for _ in range(3):
                state, info = step(state, IDS)
        losses.append(float(info.loss))
    assert losses[0] == losses[1]


def test_tables_that_differ_in_their_names_are_looked_at_by_one_program():
    class Many(nn.Module):
        @nn.compact
        def __call__(self, ids, train=False):
            layers = [hkv.linen.Embed(1280, 4, optimizer=SGD) for _ in range(5)]
            return sum(layer(ids, train=train).sum() for layer in layers)

    step = hkv.linen.train_step(lambda apply, ids: apply(ids, train=True))
    state = hkv.linen.TrainState.create(Many(), jax.random.key(0), IDS[:3], tx=optax.sgd(0.1))
    before = _placed._misplaced_of_some._cache_size()
    for _ in range(2):
        state, _ = step(state, IDS[:3])
    assert _placed._misplaced_of_some._cache_size() <= before + 1


def test_a_few_entries_of_a_large_table_are_enough(monkeypatch):
    """Else each step would wait for the one before it, to look again."""
    looks = []
    own = _placed._misplaced_of_some
    monkeypatch.setattr(_placed, "_misplaced_of_some", lambda index: looks.append(0) or own(index))
    state, step = linen_state(2**17), hkv.linen.train_step(linen_loss)
    for _ in range(5):
        state, _ = step(state, IDS[:3])
    assert len(looks) == 2  # an empty one, and one with three entries
