"""Behaviour 32, as far as a plain pytree goes: Orbax saves and restores a table unharmed."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx, serialization

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx
from jax_hkv import sharding
from jax_hkv.optim import LossScale

ADAM = hkv.optim.adam(0.1)


def random_keys(rng, count):
    return hkv.Keys.from_numpy(rng.integers(-(2**63), 2**63 - 1, count))


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, target))


def restore_in_part(path, target):
    """What the target has by the same names; the rest of it stays."""
    arguments = ocp.args.PyTreeRestore(
        target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path, args=arguments)


def assert_same_bits(tree, other):
    for got, expected in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.mark.parametrize("optimizer", [None, optax.adam(0.1)])
def test_orbax_restores_every_bit_of_a_table(rng, tmp_path, optimizer):
    """32: on the same layout, equal bits; the keys survive x64 off."""
    opt = None if optimizer is None else hkv.optim.sparse(optimizer)
    table = hkv.create(512, 4, policy=hkv.Policy.EPOCH_LFU, choices=2)
    table = table if opt is None else opt.init(table)
    keys = random_keys(rng, 300)
    table, result = hkv.find_or_insert(table, keys)
    if opt is not None:
        table = opt.update(table, result, result.values)

    save(tmp_path / "step", table)
    restored = restore(tmp_path / "step", table)

    assert isinstance(restored, hkv.Table) and repr(restored) == repr(table)
    assert_same_bits(restored, table)
    restored, found = hkv.find(restored, keys)
    assert bool(found.found.all())
    if opt is not None:  # a step resumes where it stopped
        again, result = hkv.find_or_insert(restored, keys)
        continued = opt.update(again, result, result.values)
        table, result = hkv.find_or_insert(table, keys)
        np.testing.assert_array_equal(
            continued.values, opt.update(table, result, result.values).values
        )


def test_the_newer_interface_of_orbax_restores_every_bit(rng, tmp_path):
    """Of a model's state, over devices, whose ids it then still finds."""
    v1 = pytest.importorskip("orbax.checkpoint.experimental.v1")
    mesh = jax.make_mesh((2,), ("device",), devices=jax.devices("cpu")[:2])
    placement = sharding.Placement(mesh)
    ids = placement.put(random_keys(rng, 64))

    class Model(nnx.Module):
        def __init__(self):
            self.embed = hkv.nnx.Embed(512, 4, optimizer=ADAM, axis_name="device")

    def make():
        return hkv.nnx.TrainState(Model(), optax.sgd(0.1))

    def loss_of(model, ids):
        return jnp.sum(model.embed(ids, train=True) ** 2)

    state = hkv.nnx.place(make, placement)
    step = hkv.nnx.train_step(loss_of, placement=placement)
    step(state, ids)
    save, load = (getattr(v1, name, getattr(v1, f"{name}_pytree")) for name in ("save", "load"))
    save(tmp_path / "step", nnx.state(state))
    graph, abstract = hkv.nnx.abstract(make, placement)
    restored = nnx.merge(graph, load(tmp_path / "step", abstract))
    assert_same_bits(nnx.state(restored), nnx.state(state))
    losses = [step(each, ids).loss for each in (state, restored)]
    assert losses[0] == losses[1] and int(hkv.size(restored.model.embed.table.get_value())) == 64


OTHER_SETTINGS = {
    "policy": (hkv.Policy.LFU, "policy=LRU)", "policy=LFU)"),
    "choices": (2, "choices=1)", "choices=2)"),
    "seed": (2**64 - 1, "seed=0)", f"seed={2**64 - 1})"),
    "replicas": (True, "seed=0)", "seed=0, replicas=True)"),
    "init": (hkv.initializers.constant(-0.0), "constant(0.0), seed", "constant(-0.0), seed"),
    "admission": (
        hkv.admission.frequency(3, width=64),
        "counters(rule=frequency(2, width=64, depth=4))",
        "counters(rule=frequency(3, width=64, depth=4))",
    ),
}
SETTINGS = {"init": hkv.initializers.zeros(), "admission": hkv.admission.frequency(2, width=64)}


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("setting", OTHER_SETTINGS)
def test_a_table_is_not_restored_into_one_of_other_settings(rng, tmp_path, setting, ocdbt):
    """32: the shapes are the same, and scores, places and first rows would be taken for others."""
    other, saved, expected = OTHER_SETTINGS[setting]
    table, _ = hkv.find_or_insert(hkv.create(128, 4, **SETTINGS), random_keys(rng, 50))
    target = hkv.create(128, 4, **SETTINGS | {setting: other})
    assert [leaf.shape for leaf in jax.tree.leaves(target)] == [
        leaf.shape for leaf in jax.tree.leaves(table)
    ]
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "step", table)
    with pytest.raises(ValueError) as error:
        restore(tmp_path / "step", target)
    assert saved in str(error.value) and expected in str(error.value)
    same = hkv.create(128, 4, name="another", **SETTINGS)
    assert_same_bits(restore(tmp_path / "step", same), table)

    as_bytes = serialization.to_bytes(table)
    with pytest.raises(ValueError, match=rf"missing: .*{re.escape(expected)}.*unknown: .*"):
        serialization.from_bytes(target, as_bytes)
    assert_same_bits(serialization.from_bytes(same, as_bytes), table)
    state = serialization.to_state_dict(table)
    name = next(name for name, leaf in state.items() if np.asarray(leaf).dtype == np.float32)
    for wrong, got in ((np.float64, "float64"), (np.dtype(">f4"), ">f4")):
        cast = state | {name: np.asarray(state[name]).astype(wrong)}
        with pytest.raises(ValueError, match=rf"must be float32\[.*got {got}\["):
            serialization.from_state_dict(same, cast)


def test_a_checkpoint_restored_in_part_leaves_out_what_is_of_other_settings(rng, tmp_path):
    """32: shapes stay in the place of arrays, and the first call meets them."""
    keys = random_keys(rng, 50)
    table, _ = hkv.find_or_insert(hkv.create(128, 4), keys)
    save(tmp_path / "step", table)

    partly = functools.partial(restore_in_part, tmp_path / "step")
    assert_same_bits(partly(jax.eval_shape(lambda: hkv.create(128, 4))), table)
    other = partly(jax.eval_shape(lambda: hkv.create(128, 4, seed=1)))
    assert isinstance(other.values, jax.ShapeDtypeStruct)
    with pytest.raises(TypeError, match="ShapeDtypeStruct"):
        hkv.find(other, keys)
    # Where arrays are given they stay: no table is put together of two, whatever is another one's.
    for options in ({"seed": 1}, {"choices": 2}, {"policy": hkv.Policy.LFU}):
        fresh = hkv.create(128, 4, **options)
        assert_same_bits(partly(fresh).index, fresh.index)
    for options in ({"seed": 1}, {"init": hkv.initializers.zeros()}, {"replicas": True}):
        fresh = hkv.create(128, 4, **options)
        assert_same_bits(partly(fresh), fresh)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_gets_a_feature_more_from_a_checkpoint(rng, tmp_path, seed):
    """As the tutorial says: what was there comes with all its bits, and the rest is fresh.

    A table that is made otherwise by now, of another seed, comes as a whole or not at all.
    """

    class Model(linen.Module):
        names: tuple[str, ...]
        seed: int = 0

        @linen.compact
        def __call__(self, ids, train=False):
            heads = []
            for name in self.names:
                own = {"seed": self.seed, "choices": 1 + self.seed} if name == "b" else {}
                embed = hkv.linen.Embed(256, 4, optimizer=hkv.optim.adam(0.1), name=name, **own)
                heads.append(linen.Dense(1, name=f"{name}_head")(embed(ids, train=train)))
            return sum(heads)

    def state_of(*names, **options):
        model = Model(names, **options)
        return hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=tx)

    tx = optax.adam(0.1)
    ids = rng.integers(0, 200, 40).astype(np.int32)
    step = hkv.linen.train_step(lambda apply, x: (apply(x, train=True) ** 2).mean())
    saved, _ = step(state_of("a", "b"), ids)
    save(tmp_path / "state", saved)
    make = functools.partial(state_of, "a", "b", "c", seed=seed)
    restored = restore_in_part(tmp_path / "state", jax.eval_shape(make))
    state = jax.tree.map(
        lambda got, first: first if isinstance(got, jax.ShapeDtypeStruct) else got, restored, make()
    )
    for name in ("a", "b"):
        assert_same_bits(state.params[f"{name}_head"], saved.params[f"{name}_head"])
    assert_same_bits(state.opt_state[0].mu["a_head"], saved.opt_state[0].mu["a_head"])
    assert_same_bits(state.tables["a"], saved.tables["a"])
    expected = make().tables["b"] if seed else saved.tables["b"]
    assert_same_bits(state.tables["b"], expected)
    assert int(hkv.size(state.tables["c"]["table"])) == 0
    _, info = step(state, ids)
    was_there = {name: int(own.hits) > 0 for name, own in info.tables.items()}
    assert was_there == {"a/table": True, "b/table": seed == 0, "c/table": False}


def test_states_of_layers_are_not_restored_into_those_of_other_settings(tmp_path):
    """32: in linen and in nnx, wherever the table lies in the state."""
    ids, tx = np.arange(20, dtype=np.int32), optax.adam(0.1)

    def linen_state(policy):
        model = hkv.linen.Embed(256, 4, optimizer=ADAM, policy=policy)
        return hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=tx)

    def nnx_state(policy):
        return nnx.state(hkv.nnx.Embed(256, 4, optimizer=ADAM, policy=policy))

    for make in (linen_state, nnx_state):
        save(tmp_path / make.__name__, make(hkv.Policy.LRU))
        assert_same_bits(
            restore(tmp_path / make.__name__, make(hkv.Policy.LRU)), make(hkv.Policy.LRU)
        )
        with pytest.raises(ValueError, match="policy=LFU"):
            restore(tmp_path / make.__name__, make(hkv.Policy.LFU))


@pytest.mark.parametrize(
    "other", [hkv.optim.sgd(0.1, momentum=0.9), hkv.optim.sparse(optax.adagrad(0.1))]
)
def test_a_table_is_not_restored_into_one_of_another_optimizer(rng, tmp_path, other):
    """Their rows have equal shapes: only names tell a sum of squares from a momentum."""
    opt = hkv.optim.adagrad(0.1)
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, 4)), random_keys(rng, 50))
    table = opt.update(table, result, result.values)
    save(tmp_path / "step", table)
    target = other.init(hkv.create(128, 4))
    assert [leaf.shape for leaf in jax.tree.leaves(target.optimizer.rows)] == [(128, 4)]
    with pytest.raises(ValueError, match="sum_of_squares"):
        restore(tmp_path / "step", target)


@pytest.mark.parametrize("choices", [1, 2])
def test_every_chunk_of_a_table_is_asked_for_misplaced_entries(rng, choices):
    """A sound table has none, whatever was evicted and erased; a wrong digest or bucket is one."""
    table = hkv.create(20_000, 1, choices=choices)
    for _ in range(2):
        keys = random_keys(rng, 20_000)
        table, _ = hkv.find_or_insert(table, keys)
    table, _ = hkv.erase(table, keys[::7])
    assert int(hkv.misplaced(table)) == 0

    slots = rng.choice(np.flatnonzero(np.asarray(table.digests)), 50, replace=False)
    digests = np.array(table.digests).reshape(-1)
    digests[slots] = digests[slots] % 255 + 1  # not 0, which is an empty lane
    index = dataclasses.replace(table.index, digests=jnp.asarray(digests.reshape(-1, 128)))
    assert int(hkv.misplaced(dataclasses.replace(table, index=index))) == 50

    halves = jax.tree.map(lambda leaf: jnp.roll(leaf, 3, axis=0), table.index)
    moved = dataclasses.replace(halves, clock=table.clock, epoch=table.epoch)
    moved = dataclasses.replace(table, index=moved)
    found = hkv.contains(moved, hkv.export_batch(table, 0, table.capacity).keys)[1]
    assert int(hkv.misplaced(moved)) == int(hkv.size(table)) - int(found.sum()) > 10_000


def test_asking_for_misplaced_entries_copies_no_table():
    """Neither of a table that is donated nor of one that is kept."""
    table = hkv.create(20_000, 4)
    hkv.testing.assert_no_table_copies(lambda table: (table, hkv.misplaced(table)), table)
    program = jax.jit(hkv.misplaced).lower(table).compile().as_text()
    assert not hkv.testing.copies_in(program, [table])


def placed(mode, devices=4, **kwargs):
    """A placement, its empty table, and a training step."""
    mesh = jax.make_mesh((devices,), ("device",), devices=jax.devices("cpu")[:devices])
    placement = sharding.Placement(mesh, mode=mode)

    def step(table, keys):
        table, found = sharding.find_or_insert(table, keys, axis_name="device")
        return sharding.update(ADAM, table, found, jnp.sin(found.values)), found.counts

    table = placement.create(lambda: ADAM.init(hkv.create(1024 // devices, 4, **kwargs)))
    return placement, table, placement.step(step)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_orbax_restores_every_bit_of_a_table_over_devices(rng, tmp_path, mode):
    """32: on the same devices, and the step after is the same too."""
    options = {"policy": hkv.Policy.LFU, "choices": 2}
    placement, table, step = placed(mode, **options)
    table, _ = step(table, placement.put(random_keys(rng, 400)))
    save(tmp_path / "step", table)
    restored = restore(tmp_path / "step", placed(mode, **options)[1])

    assert [leaf.sharding for leaf in jax.tree.leaves(restored)] == [
        leaf.sharding for leaf in jax.tree.leaves(table)
    ]
    assert_same_bits(restored, table)
    count = placement.run(lambda table: hkv.misplaced(table)[None])
    assert not np.asarray(count(restored)).any()
    batch = placement.put(random_keys(rng, 400))
    assert_same_bits(step(restored, batch), step(table, batch))


def test_a_table_over_devices_with_fewer_choices_is_seen_to_be_misplaced(rng):
    """Each device counts its own."""
    placement, table, step = placed("shard_map", choices=2)
    for _ in range(8):  # the choice between two buckets looks at what stood there before
        table, _ = step(table, placement.put(random_keys(rng, 100)))
    index = dataclasses.replace(table.index, choices=1)
    counts = placement.run(lambda table: hkv.misplaced(table)[None])(
        dataclasses.replace(table, index=index)
    )
    assert counts.shape == (4,) and (np.asarray(counts) > 0).all()


@pytest.mark.parametrize("devices", [1, 2])
def test_exported_entries_are_saved_and_come_to_other_devices(rng, tmp_path, devices):
    """32: a checkpoint that any number of devices can go on from, times beyond 32 bits included."""
    keys = random_keys(rng, 400)
    options = {"admission": hkv.admission.frequency(1, width=64), "policy": hkv.Policy.LFU}
    placement, table, step = placed("shard_map", **options)
    table, _ = step(table, placement.put(keys))
    exported = sharding.export_entries(placement.shards(table))._replace(clock=2**40 + 3)
    save(tmp_path / "entries", exported)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = sharding.Exported(**checkpointer.restore(tmp_path / "entries"))

    assert_same_bits(restored, exported)
    assert restored.clock == 2**40 + 3
    other, target, step = placed("shard_map", devices, **options)
    target, counts = sharding.import_entries(other, target, restored)
    assert int(counts.inserted) == len(exported.keys) == 400
    again = sharding.export_entries(other.shards(target))
    order, expected = np.argsort(again.keys), np.argsort(exported.keys)
    for got, wanted in zip(
        (again.keys, again.scores, again.values, *again.optimizer.values()),
        (exported.keys, exported.scores, exported.values, *exported.optimizer.values()),
        strict=True,
    ):
        np.testing.assert_array_equal(got[order], wanted[expected])
    assert_same_bits(again[4:7], exported[4:7])
    _, counts = step(target, other.put(keys))
    assert int(counts.hits) == 400


ONE_DEVICE_CALLS = {
    "find": lambda t, k: hkv.find(t, k),
    "find_or_insert": lambda t, k: hkv.find_or_insert(t, k),
    "find_pooled": lambda t, k: hkv.find_pooled(t, k[None]),
    "find_or_insert_pooled": lambda t, k: hkv.find_or_insert_pooled(t, k[None]),
    "clear": lambda t, k: hkv.clear(t),
    "size_if": lambda t, k: hkv.size_if(t, lambda keys, scores, rows: rows[:, 0] > 0),
    "expire": lambda t, k: hkv.expire(t, 1),
    "misplaced": lambda t, k: hkv.misplaced(t),
    "export_batch": lambda t, k: hkv.export_batch(t, 0, 4),
    "sharding.export_entries": lambda t, k: sharding.export_entries(t),
    "sharding.find": lambda t, k: sharding.find(t, k, axis_name="device"),
}


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize("call", ONE_DEVICE_CALLS)
def test_a_table_over_devices_given_to_a_call_for_one_names_the_remedy(call, mode):
    """31: what is restored of several devices is not the table of one."""
    _, table, _ = placed(mode, policy=hkv.Policy.EPOCH_LRU)
    keys = hkv.Keys.from_numpy(np.arange(4))
    clocks = r"\[8\]" if mode == "shard_map" else r"\[4, 2\]"
    message = rf"^{call}: table must be.*uint32\[2\], got.*{clocks}.*Placement\.step.*import"
    with pytest.raises(TypeError, match=message):
        ONE_DEVICE_CALLS[call](table, keys)
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda table: ONE_DEVICE_CALLS[call](table, keys), table)


KEYS = hkv.Keys.from_numpy(np.array([5, -1, 2**40]))
NODES = {
    "keys": lambda: KEYS,
    "bags": lambda: hkv.Jagged.from_lists([[5, 6], []], capacity=4, weights=[[0.5, 2.0], []]),
    "bags of 64-bit splits": lambda: hkv.Jagged(KEYS, np.array([0, 1, 3])),
    "padded ids": lambda: hkv.Padded(KEYS, valid=np.array([True, False, True])),
    "a table": lambda: filled(),
    "an index": lambda: filled().index,
    "optimizer rows": lambda: filled().optimizer,
    "sightings": lambda: filled().admission,
}


def filled():
    rule = hkv.admission.frequency(2, width=64)
    table = hkv.optim.adam(0.1).init(hkv.create(128, 4, admission=rule))
    return hkv.find_or_insert(table, np.array([5, 6, 5], np.int32))[0]


@pytest.mark.parametrize("name", NODES)
def test_flax_serialization_takes_every_node_alone(name):
    node = NODES[name]()
    target = jax.tree.map(np.zeros_like, node)
    restored = serialization.from_bytes(target, serialization.to_bytes(node))
    assert jax.tree.structure(restored) == jax.tree.structure(node)
    jax.tree.map(np.testing.assert_array_equal, restored, node)
    assert [leaf.dtype for leaf in jax.tree.leaves(restored)] == [
        leaf.dtype for leaf in jax.tree.leaves(node)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flax_serialization_keeps_every_bit(dtype):
    """Of a whole state, as bytes."""
    model = hkv.linen.Embed(256, 4, optimizer=hkv.optim.adam(0.1), param_dtype=dtype)
    ids, tx = np.arange(100, dtype=np.int32), optax.adam(0.1)

    def make(model):
        scale = LossScale.create()
        return hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=tx, loss_scale=scale)

    state, _ = hkv.linen.train_step(lambda apply, ids: apply(ids, train=True).sum())(
        make(model), ids
    )
    saved = serialization.to_bytes(state)
    restored = serialization.from_bytes(make(model), saved)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    with pytest.raises(ValueError, match=r"TrainState\.tables.* must be .* as in the target, got"):
        serialization.from_bytes(make(model.clone(capacity=512)), saved)
    with pytest.raises(ValueError, match="must have the leaves of the target; missing"):
        serialization.from_bytes(make(model.clone(optimizer=hkv.optim.sgd(0.1))), saved)
