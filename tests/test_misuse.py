"""What users do wrong is named: by which call, which argument, and with a remedy."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx

IDS = np.arange(8, dtype=np.int32)
DIM = 4
SGD = hkv.optim.sgd(0.1)
USED_UP = "was used up by an earlier step, got arrays that were donated: go on with the "


class Towers(nn.Module):
    """Two layers of one shape."""

    @nn.compact
    def __call__(self, ids, train=False):
        layers = (hkv.linen.Embed(128, DIM, optimizer=SGD, name=name) for name in ("a", "b"))
        return sum(layer(ids, train=train) for layer in layers)


class NnxTowers(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.a, self.b = (hkv.nnx.Embed(128, DIM, optimizer=SGD, rngs=rngs) for _ in range(2))
        self.dense = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids, train=False):
        return self.dense(self.a(ids, train=train) + self.b(ids, train=train))


def loss_fn(apply, ids):
    return jnp.mean(apply(ids, train=True) ** 2)


def linen_state():
    return hkv.linen.TrainState.create(Towers(), jax.random.key(0), IDS, tx=optax.sgd(0.1))


@pytest.mark.parametrize("call", [hkv.find, hkv.contains, hkv.find_or_insert, hkv.erase])
def test_a_table_that_was_donated_is_named_by_operations(call):
    table = hkv.create(128, DIM)
    jax.jit(lambda table: hkv.find_or_insert(table, IDS)[0], donate_argnums=0)(table)
    with pytest.raises(RuntimeError, match=rf"{call.__name__}: table {USED_UP}table"):
        call(table, IDS)
    with pytest.raises(RuntimeError, match=f"size: table {USED_UP}table"):
        hkv.size(table)


def test_a_table_that_a_step_has_used_up_is_named_in_evaluation():
    state = linen_state()
    after, _ = hkv.linen.train_step(loss_fn)(state, IDS)
    with pytest.raises(RuntimeError, match=f"find: table {USED_UP}table"):
        state.apply(IDS)
    assert after.apply(IDS).shape == (8, DIM)


def test_one_table_in_two_places_of_a_state_is_named_in_linen():
    state = linen_state()
    tables = dict.fromkeys("ab", state.tables["a"])
    with pytest.raises(ValueError, match=r"train_step: state must hold every array once.*\['b'\]"):
        hkv.linen.train_step(loss_fn)(state.replace(tables=tables), IDS)
    apart = state.replace(tables=tables | {"b": jax.tree.map(jnp.copy, tables["b"])})
    _, info = hkv.linen.train_step(loss_fn)(apart, IDS)
    assert np.isfinite(info.loss)


def test_one_table_in_two_places_of_a_model_is_named_in_nnx():
    model = NnxTowers(nnx.Rngs(0))
    model.b.table.set_value(model.a.table.get_value())
    state = hkv.nnx.TrainState(model, optax.sgd(0.1))
    with pytest.raises(ValueError, match="train_step: state must hold every array once"):
        hkv.nnx.train_step(loss_fn)(state, IDS)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize("devices", [1, 2])
def test_one_array_in_two_places_of_a_placed_state_is_named(devices, mode):
    """Before JAX is asked: jaxlib ends the process, on a mesh of CPU devices."""
    mesh = jax.make_mesh((devices,), ("device",), devices=jax.devices("cpu")[:devices])
    placement = hkv.sharding.Placement(mesh, mode=mode)
    table = placement.create(lambda: hkv.create(128, DIM))

    def step(state, ids):
        tables = {
            name: hkv.sharding.find_or_insert(table, ids, axis_name="device")[0]
            for name, table in state.items()
        }
        return tables, jnp.int32(0)

    with pytest.raises(ValueError, match=r"Placement.step: state must hold every array once.*'b'"):
        placement.step(step)({"a": table, "b": table}, placement.put(IDS))
    after, _ = placement.step(step, donate=False)({"a": table, "b": table}, placement.put(IDS))
    assert int(after["a"].occupancy.sum()) == int(after["b"].occupancy.sum()) == len(IDS)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sharding.export_entries", hkv.sharding.export_entries),
        ("metrics.summarize", hkv.metrics.summarize),
    ],
)
def test_what_looks_at_a_table_on_the_host_is_refused_inside_of_jit(name, call):
    message = f"{name}: table must be looked at outside of jit, got a call that is traced: make it"
    table = hkv.create(128, DIM)
    with pytest.raises(TypeError, match=message):
        jax.jit(call)(table)
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda: call(table))()


def test_keys_are_not_made_of_traced_numbers_on_the_host():
    message = r"Keys.from_numpy: ids must be on the host, got int32\[8\] traced inside of jit"
    with pytest.raises(TypeError, match=message):
        jax.jit(hkv.Keys.from_numpy)(IDS)


def test_keys_are_no_list_of_ids():
    message = r"Jagged.from_lists: bag 1 must be a list or an array of integers, got Keys: give"
    with pytest.raises(TypeError, match=message):
        hkv.Jagged.from_lists([[5], hkv.Keys.from_numpy(IDS)])


def test_vmap_over_what_changes_a_table_says_where_it_begins():
    table = hkv.create(128, DIM)
    message = "jax.vmap of unique, with which all that changes a table begins: it looks at a batch"
    with pytest.raises(NotImplementedError, match=message):
        jax.vmap(lambda ids: hkv.find_or_insert(table, ids)[1].values)(IDS.reshape(2, 4))


@pytest.mark.parametrize("call", ["find_or_insert", "insert_or_assign", "assign", "erase"])
def test_arrays_of_another_rank_are_named(call):
    """31: rows and masks of as many elements, too."""
    table, rows = hkv.create(128, DIM), np.ones((8, DIM), np.float32)
    operation = getattr(hkv, call)
    given = {} if call in ("find_or_insert", "erase") else {"values": rows}
    for mask in (np.ones((8, 1), bool), np.ones((2, 4), bool), np.True_):
        with pytest.raises(TypeError, match=rf"{call}: valid must be bool\[8\] like the keys, got"):
            operation(table, IDS, **given, valid=mask)
    if call == "erase":
        return
    for other in (rows[0], rows.reshape(-1), rows[None], rows[:, :, None]):
        expected = rf"{call}: values must have shape \[8, {DIM}\].* got \[{other.shape[0]}"
        with pytest.raises(ValueError, match=expected):
            operation(table, IDS, values=other)
