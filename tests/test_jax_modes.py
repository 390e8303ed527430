"""What JAX can be told, and programs rely on: meshes that are set, Explicit axes, leak checks."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_hkv as hkv
import jax_hkv.nnx
from jax_hkv import _build, sharding

DIM, DEVICES = 4, 4
ADAM = hkv.optim.adam(0.1)
IDS = np.arange(64, dtype=np.int32)


@pytest.fixture
def mesh():
    return jax.make_mesh((DEVICES,), ("device",), devices=jax.devices("cpu")[:DEVICES])


def placed(mesh):
    placement = sharding.Placement(mesh)
    return placement, placement.create(lambda: ADAM.init(hkv.create(256, DIM)))


def trained(table, keys):
    table, found = sharding.find_or_insert(table, keys, axis_name="device")
    return sharding.update(ADAM, table, found, jnp.ones_like(found.values)), found.counts


# --- Copies over devices -------------------------------------------------------------------------


def test_copies_of_a_table_over_devices_are_seen(mesh):
    """Compiled for several devices a copy has the shape of one device's part."""

    def stale(table, keys):
        after, _ = trained(table, keys)
        _, before = sharding.find(table, keys, axis_name="device")
        return after, jnp.sum(before.values)[None] * 0

    placement, table = placed(mesh)
    keys = placement.put(IDS)
    assert not hkv.testing.table_copies(placement.step(trained), table, keys)
    assert hkv.testing.table_copies(placement.step(stale), table, keys)
    with pytest.raises(AssertionError, match="copies of table-sized arrays"):
        hkv.testing.assert_no_table_copies(placement.step(stale), table, keys)


# --- A mesh that is set --------------------------------------------------------------------------


def test_entries_are_exported_and_imported_where_a_mesh_is_set(mesh):
    """As JAX's tutorials begin; steps go on from what was imported."""
    placement, table = placed(mesh)
    _, empty = placed(mesh)
    step = placement.step(trained)
    with jax.set_mesh(mesh):
        table, _ = step(table, placement.put(IDS))
        exported = sharding.export_entries(placement.shards(table))
        moved, counts = sharding.import_entries(placement, empty, exported)
        assert sorted(exported.keys.tolist()) == IDS.tolist() and int(counts.inserted) == 64
        _, again = step(moved, placement.put(IDS))
        assert jax.sharding.get_mesh() == mesh
    assert int(again.hits) == 64


def test_a_table_on_all_devices_of_a_mesh_is_filled_as_one(mesh):
    """Such as `create` makes where a mesh is set."""
    exported = sharding.export_entries(hkv.find_or_insert(hkv.create(128, DIM), IDS)[0])
    everywhere = jax.device_put(hkv.create(128, DIM), NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="import_entries: table must lie on one device, got .* 4"):
        sharding.import_entries(None, everywhere, exported)
    on_host = jax.device_get(hkv.create(128, DIM))
    table, counts = sharding.import_entries(None, on_host, exported)
    assert int(counts.inserted) == 64 == int(hkv.size(table))


# --- Batches with Explicit sharding --------------------------------------------------------------

SPLIT = (
    np.arange(32, dtype=np.int32).reshape(8, 4),
    np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 4, 4),
    np.linspace(0.5, 2, 32, dtype=np.float32).reshape(8, 4),
)


def pooled(table, keys, rows, weights):
    found = hkv.find_pooled(table, keys, weights=weights, combiner="mean")[1].values
    return jnp.sum(found**2) + jnp.sum(hkv.pool(rows, weights=weights, combiner="sqrtn") ** 2)


COLLECTION = hkv.Collection(
    [hkv.TableConfig(name, 128, DIM, optimizer=ADAM) for name in ("a", "b")],
    [hkv.Feature("x", "a"), hkv.Feature("y", "b", "mean"), hkv.Feature("z", "b", None)],
)


def of_collection(table, keys, rows, weights):
    features = {"x": keys, "y": hkv.Padded(keys, valid=keys > 3), "z": keys[:, 0]}
    (group,) = COLLECTION.groups
    index = dataclasses.replace(table.index, namespace=group.namespace)
    table = ADAM.init(dataclasses.replace(table, index=index))
    return COLLECTION.lookup({group.name: table}, features, train=True)[1].rows


CALLS = {
    "pooled": pooled,
    "gradients": jax.grad(pooled, argnums=(2, 3)),
    "expand": jax.grad(
        lambda table, keys, rows, weights: jnp.sum(
            hkv.unique(keys.reshape(-1)).expand(rows.reshape(32, 4)) ** 2
        ),
        argnums=2,
    ),
    "accum_or_assign": lambda table, keys, rows, weights: hkv.accum_or_assign(
        table, keys, rows, keys > 3
    ),
    "hotness": lambda table, keys, rows, weights: hkv.find_or_insert(table, keys.T)[1].slots,
    "collection": of_collection,
}
SUMMED_BY_XLA = ("pooled", "gradients")  # in an order that is the executable's own


@pytest.mark.parametrize("call", CALLS)
def test_a_batch_that_its_type_says_is_split_gives_what_one_does_that_is_not(mesh, call):
    """30: with the table on all devices, outside shard_map; in bits but for sums of XLA's."""
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), IDS[:20])
    expected = jax.jit(CALLS[call])(table, *SPLIT)
    with jax.set_mesh(mesh):
        everywhere = jax.device_put(table, NamedSharding(mesh, P()))
        split = jax.device_put(SPLIT, NamedSharding(mesh, P("device")))
        got = jax.jit(CALLS[call])(everywhere, *split)
    near = {"rtol": 1e-5, "atol": 1e-6} if call in SUMMED_BY_XLA else {"rtol": 0, "atol": 0}
    for leaf, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(wanted), **near)


# --- Leaks, strict types -------------------------------------------------------------------------

BY_PREDICATE = {
    "erase_if": lambda table, least: hkv.erase_if(table, lambda k, s, r: hkv.less(k, least)),
    "size_if": lambda table, least: hkv.size_if(table, lambda k, s, r: hkv.less(k, least)),
    "export_batch_if": lambda table, least: hkv.export_batch_if(
        table, lambda k, s, r: hkv.less(k, least), 0, 64
    ),
}


@pytest.mark.parametrize("call", BY_PREDICATE)
def test_a_predicate_over_traced_values_keeps_no_trace(call):
    """A cache of JAX's kept each trace of a program, with its predicate."""
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), IDS)
    least = hkv.Keys.from_numpy(np.array(10))
    with jax.checking_leaks():
        traced = jax.jit(BY_PREDICATE[call])(table, least)
    eager = BY_PREDICATE[call](table, least)
    jax.tree.map(np.testing.assert_array_equal, traced, eager)


def test_a_placement_keeps_no_trace(mesh):
    placement = sharding.Placement(mesh)
    with jax.checking_leaks():
        made = placement.create(lambda: ADAM.init(hkv.create(256, DIM)))
        shapes = placement.abstract(lambda: ADAM.init(hkv.create(256, DIM)))
        exported = sharding.export_entries(placement.shards(made), min_score=1)
    assert jax.tree.structure(made) == jax.tree.structure(shapes) and not len(exported.keys)


@pytest.mark.parametrize("exchange", ["owners", "replicas"])
@pytest.mark.parametrize("x64", [False, True])
def test_no_type_is_promoted_silently(mesh, exchange, x64):
    """With `jax_numpy_dtype_promotion` "strict" JAX names every place that relies on it."""
    rule = hkv.admission.frequency(2, width=64)
    axis = "device" if exchange == "owners" else sharding.Exchange("device", replicas=True)

    def step(table, keys):
        table, found = sharding.find_or_insert(table, keys, axis_name=axis)
        return sharding.update(ADAM, table, found, jnp.ones_like(found.values)), found.counts

    with jax.enable_x64(x64), jax.numpy_dtype_promotion("strict"):
        placement = sharding.Placement(mesh)
        options = {"admission": rule, "replicas": exchange == "replicas"}
        table = placement.create(lambda: ADAM.init(hkv.create(256, DIM, **options)))
        run = placement.step(step)
        for _ in range(3):
            table, counts = run(table, placement.put(IDS))
        distinct = hkv.unique(IDS)
        assert int(counts.hits) == 64 and distinct.valid.all()


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int16", "int64"])
def test_an_offset_that_is_traced_may_be_any_integer(dtype):
    """x64 makes 64 bits of a loop's counter."""
    table, _ = hkv.find_or_insert(hkv.create(300, DIM), IDS)
    with jax.enable_x64(True) if dtype == "int64" else contextlib.nullcontext():
        count = jax.jit(lambda table, offset: hkv.export_batch(table, offset, 384).count)
        assert int(count(table, jnp.asarray(0, dtype))) == 64
        assert int(count(table, jnp.asarray(np.iinfo(dtype).max, dtype))) == 0
        with pytest.raises(TypeError, match=r"offset must be one integer, got float32\[\]"):
            count(table, jnp.float32(0))


# --- What is not an array ------------------------------------------------------------------------


def test_an_nnx_state_uses_up_no_array_of_its_transformation():
    """A rate that is an array is the caller's, who makes another state with it."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = hkv.nnx.Embed(128, DIM, optimizer=ADAM)
            self.dense = nnx.Linear(DIM, 1, rngs=rngs)

        def __call__(self, ids):
            return self.dense(self.embed(ids, train=True))

    rate = jnp.float32(0.1)
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=rate)
    step = hkv.nnx.train_step(lambda model, ids: jnp.mean(model(ids) ** 2))
    losses = [float(step(hkv.nnx.TrainState(Model(nnx.Rngs(0)), tx), IDS).loss) for _ in range(2)]
    assert losses[0] == losses[1] and not rate.is_deleted()


def test_a_transformation_without_a_hash_is_tried_like_others():
    @dataclasses.dataclass
    class Plain:
        inner: optax.GradientTransformation

        def init(self, params):
            return self.inner.init(params)

        def update(self, updates, state, params=None):
            return self.inner.update(updates, state, params)

    opt = hkv.optim.sparse(Plain(optax.sgd(0.5)))
    table, result = hkv.find_or_insert(opt.init(hkv.create(128, DIM)), IDS)
    after = opt.update(table, result, jnp.ones((64, DIM), jnp.float32))
    np.testing.assert_array_equal(
        hkv.find(after, IDS)[1].values, np.asarray(result.values) - np.float32(0.5)
    )
    with pytest.raises(ValueError, match="mixes rows"):
        hkv.optim.sparse(Plain(optax.clip_by_global_norm(1.0))).init(hkv.create(128, DIM))


def test_sizes_of_tables_may_be_numbers_of_jax():
    made = hkv.TableConfig("a", jnp.int32(1000), jnp.int32(DIM), seed=np.uint64(3))
    assert made == hkv.TableConfig("a", 1000, DIM, seed=3)
    (group,) = hkv.Collection([made], [hkv.Feature("x", "a")]).groups
    assert hash(group) and group.tables == (made,)


def test_a_jaxlib_without_headers_is_not_asked_for_its_version(monkeypatch, tmp_path):
    """Images leave them out; a version that is known is compared as before."""

    class Module:
        __name__ = "jax_hkv._newer"
        xla_ffi_version = (99, 0)
        built_with_jaxlib = "9.9"

    with pytest.raises(ImportError, match=r"built with jaxlib 9\.9 \(XLA FFI \(99, 0\)\)"):
        _build.check_jaxlib(Module)
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(tmp_path))
    _build.check_jaxlib(Module)


def is_rematerializing():
    return jax.config.jax_compiler_enable_remat_pass  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def compiling():
    """Whether XLA was to use its pass, for each program that was compiled."""
    seen = []

    def note(event, seconds, **_):
        if "backend_compile" in event:
            seen.append(is_rematerializing())

    jax.monitoring.register_event_duration_secs_listener(note)
    yield seen
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.parametrize("stage", ["called", "lowered", "traced"])
@pytest.mark.parametrize("kind", ["linen", "nnx", "placement"])
def test_steps_are_compiled_without_the_pass_that_counts_their_tables_twice(
    kind, stage, mesh, compiling
):
    """What a GPU's compiler makes of that stands in test_gpu_program.py."""
    jax.config.update("jax_compiler_enable_remat_pass", True)  # whatever this process began with
    seen, ids = [], np.arange(8, dtype=np.int32)

    def loss_of(rows):
        seen.append(is_rematerializing())
        return jnp.mean(rows)

    if kind == "linen":
        model = hkv.linen.Embed(128, 2, optimizer=hkv.optim.sgd(0.1))
        state = hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=optax.sgd(0.1))
        step = hkv.linen.train_step(lambda apply, ids: loss_of(apply(ids, train=True)))
    elif kind == "nnx":
        model = hkv.nnx.Embed(128, 2, optimizer=hkv.optim.sgd(0.1))
        state = hkv.nnx.TrainState(model, optax.sgd(0.1))
        step = hkv.nnx.train_step(lambda model, ids: loss_of(model(ids, train=True)))
    else:
        placement = sharding.Placement(mesh)
        state, ids = placement.create(lambda: hkv.create(128, 2)), placement.put(ids)
        step = placement.step(lambda table, ids: (table, loss_of(jax.lax.psum(ids, "device"))))
    compiling.clear()
    if stage == "called":
        step(state, ids)
    elif stage == "lowered":
        step.lower(state, ids).compile()
    else:
        step.trace(state, ids).lower().compile()
    assert seen and not any(seen) and is_rematerializing()
    assert compiling and not any(compiling)


def test_scores_of_a_batch_are_read_behind_its_lookup_without_a_copy():
    """Counts of LFU, by which a sampled softmax corrects for popularity; as the guide has it."""
    opt = hkv.optim.sgd(0.5)

    def step(table, ids):
        table, result = hkv.find_or_insert(table, ids)
        counts = table.index.scores.reshape(-1, 2)[result.slots]
        return opt.update(table, result, result.values * counts[:, :1]), counts

    table = opt.init(hkv.create(1024, 4, policy=hkv.Policy.LFU))
    ids = jnp.array([5, 5, 7, 9], jnp.int32)
    hkv.testing.assert_no_table_copies(step, table, ids)
    for seen in (1, 2):
        table, counts = step(table, ids)
        np.testing.assert_array_equal(counts, [[2 * seen, 0], [2 * seen, 0], [seen, 0], [seen, 0]])
