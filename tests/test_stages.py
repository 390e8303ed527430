"""Steps that are traced, lowered and compiled ahead are called as the steps themselves are."""

from __future__ import annotations

import copy
import gc
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv
from jax_hkv.sharding import Exchange, ExchangeOverflow, Placement

SGD = hkv.optim.sgd(0.5)
WIDE = np.array([2**40 + 5, 7, 8, 2**63 + 9], np.uint64)
CUT = "64 numbers, which JAX would cut"
MODES = ("shard_map", "pmap")
STAGES = {
    "lowered": lambda step, *args: step.lower(*args).compile(),
    "traced": lambda step, *args: step.trace(*args).lower().compile(),
}


def mesh_of(kind):
    types = (jax.sharding.AxisType[kind],)
    return jax.make_mesh((4,), ("device",), types, devices=jax.devices("cpu")[:4])


@pytest.fixture
def mesh():
    return mesh_of("Explicit")


class Linen(nn.Module):
    axis_name: object = None

    @nn.compact
    def __call__(self, ids, train=False):
        embed = hkv.linen.Embed(256, 4, optimizer=SGD, axis_name=self.axis_name)
        return nn.Dense(1)(embed(ids, train=train))


class Model(nnx.Module):
    def __init__(self, axis_name=None):
        self.embed = hkv.nnx.Embed(256, 4, optimizer=SGD, axis_name=axis_name)
        self.dense = nnx.Linear(4, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids, train=False):
        return self.dense(self.embed(ids, train=train))


def loss_of(model, ids):
    return jnp.mean((model(ids, train=True) - 1) ** 2)


def of_kind(kind, axis_name=None, placement=None):
    """A step, how a state is made, and how both give the next state and the report."""
    dense = optax.sgd(0.1)
    if kind == "linen":
        example = hkv.Keys.from_numpy(WIDE)

        def make():
            key = jax.random.key(0)
            return hkv.linen.TrainState.create(Linen(axis_name), key, example, tx=dense)

        step = hkv.linen.train_step(loss_of, placement=placement)
        make_state = make if placement is None else lambda: placement.create(make)
        return step, make_state, lambda run, state, *args: run(state, *args)

    def make_nnx():
        return hkv.nnx.TrainState(Model(axis_name), dense)

    def call(run, state, *args):
        info = run(state, *args)
        return state, info

    step = hkv.nnx.train_step(loss_of, placement=placement)
    make = make_nnx if placement is None else lambda: hkv.nnx.place(make_nnx, placement)
    return step, make, call


def bits_of(state):
    leaves = jax.tree.leaves(nnx.state(state) if isinstance(state, nnx.Module) else state)
    return [np.array(leaf) for leaf in leaves]  # copies: what NumPy looks at is not donated


def assert_equal_steps(step, compiled, make, call, batches):
    own, other = make(), make()
    for batch in batches:
        own, info = call(step, own, batch)
        other, expected = call(compiled, other, batch)
        for a, b in zip(jax.tree.leaves(info), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(bits_of(own), bits_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_compiled_step_is_the_step(kind, stage):
    step, make, call = of_kind(kind)
    keys = hkv.Keys.from_numpy(WIDE)
    compiled = STAGES[stage](step, make(), keys)
    assert_equal_steps(
        step, compiled, make, call, [keys, hkv.Keys.from_numpy(WIDE + np.uint64(1)), keys]
    )
    assert "jax_hkv" in compiled.as_text() and compiled.memory_analysis() is not None
    assert hkv.sharding.traffic(compiled).collectives == ()


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_compiled_step_looks_at_what_it_is_given(kind):
    step, make, call = of_kind(kind)
    state, ids = make(), np.arange(4, dtype=np.int32)
    compiled = step.lower(state, ids).compile()
    before = bits_of(state)
    for run in (compiled, step.lower, step.trace, step.eval_shape):
        with pytest.raises(TypeError, match=f"^train_step: arguments.0. holds uint{CUT}"):
            run(state, WIDE)
        with pytest.raises(TypeError, match="^train_step: state must be a .* got builtins.int"):
            run(3, ids)
    for a, b in zip(before, bits_of(state), strict=True):
        np.testing.assert_array_equal(a, b)
    used, _ = call(compiled, state, ids)
    if kind == "linen":
        with pytest.raises(RuntimeError, match="train_step: state.*used up"):
            compiled(state, ids)
        assert call(compiled, used, ids)[1].loss.shape == ()
        other = used.replace(params={"Dense_0": {"kernel": jnp.ones((4, 1))}})
        with pytest.raises(TypeError, match="input pytree does not match"):  # JAX's own
            compiled(other, ids)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_shapes_are_enough_to_compile_ahead(kind):
    step, make, call = of_kind(kind)
    ids = np.arange(4, dtype=np.int32)
    abstract = jax.eval_shape(make) if kind == "linen" else nnx.eval_shape(make)
    compiled = step.lower(abstract, jax.ShapeDtypeStruct((4,), np.int32)).compile()
    assert_equal_steps(step, compiled, make, call, [ids, ids + 2])
    shapes = step.eval_shape(abstract, jax.ShapeDtypeStruct((4,), np.int32))
    info = shapes[1] if kind == "linen" else shapes
    assert info.loss.shape == () and info.loss.dtype == jnp.float32


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_a_compiled_step_of_a_model_that_sows_is_called_again():
    """What a step has sown is there until the next one, and no part of what is compiled."""

    class Sowing(Model):
        def __call__(self, ids, train=False):
            rows = self.embed(ids, train=train)
            self.sow(nnx.Intermediate, "rows", rows)
            return self.dense(rows)

    step, ids = hkv.nnx.train_step(loss_of), np.arange(4, dtype=np.int32)
    own, other = (hkv.nnx.TrainState(Sowing(), optax.sgd(0.1)) for _ in range(2))
    own.model(ids)
    sown = own.model.rows
    compiled = step.lower(own, ids).compile()
    assert own.model.rows is sown
    for _ in range(3):
        info, expected = compiled(own, ids), step(other, ids)
        assert info.loss == expected.loss
        np.testing.assert_array_equal(own.model.rows[0], other.model.rows[0])
    plain = hkv.nnx.TrainState(Model(), optax.sgd(0.1))
    with pytest.raises(ValueError, match="^train_step: state and arguments must be of the stru"):
        compiled(plain, ids)


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_compiled_step_is_called_by_a_cached_partial(mesh, is_placed):
    placement = Placement(mesh) if is_placed else None
    axis = placement.axes[0] if placement else None
    step, make, _ = of_kind("nnx", axis, placement)
    ids = np.arange(16, dtype=np.int32)
    ids = placement.put(ids) if placement else ids
    own, other = make(), make()
    run = nnx.cached_partial(step.lower(own, ids).compile(), own)
    for _ in range(2):
        assert run(ids).loss == step(other, ids).loss


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shapes_over_devices_lie_where_batches_are_put(kind):
    placement = Placement(mesh_of(kind))
    ids = placement.put(np.arange(16, dtype=np.int32))
    shape = jax.ShapeDtypeStruct(ids.shape, ids.dtype)
    for own in ("linen", "nnx"):
        step, make, call = of_kind(own, placement.axes[0], placement)
        compiled = step.lower(make(), shape).compile()
        assert_equal_steps(step, compiled, make, call, [ids])
        info = step.eval_shape(make(), shape)
        info = info[1] if own == "linen" else info
        assert info.loss.shape == () and info.tables

    def read(table, ids):
        return hkv.sharding.find(table, ids, axis_name=placement.axes[0])[1].values

    def insert(table, ids):
        return hkv.sharding.find_or_insert(table, ids, axis_name=placement.axes[0])[0], ()

    table = placement.create(lambda: hkv.create(256, 4))
    on_host = jax.tree.map(np.asarray, table)
    run, step = placement.run(read), placement.step(insert)
    for state in (table, on_host):
        assert run.eval_shape(state, shape).shape == (16, 4)
        step.lower(state, shape).compile()
        assert step.trace(state, shape).lower().as_text() == step.lower(state, shape).as_text()
    if kind == "Explicit":
        for stage in (step.lower, step.trace, step.eval_shape):
            with pytest.raises(ValueError, match=r"^Placement.step: .*give placement.put\(batch"):
                stage(table, np.arange(16, dtype=np.int32))
    with pytest.raises(TypeError, match="^Placement.step: .* JAX would cut"):
        step.lower(table, np.full(16, 2**40))
    shapes = jax.eval_shape(lambda: on_host)
    assert step.lower(shapes, shape).as_text() == step.lower(table, ids).as_text()
    for given in ((), (table,)):
        for call in (step, step.lower):
            with pytest.raises(TypeError, match="^Placement.step: the state and the batch must be"):
                call(*given, **{"ids": ids} if given else {})
    with pytest.raises(ValueError) as uneven:
        run.lower(table, jax.ShapeDtypeStruct((15,), np.int32))
    assert "must be a multiple of the 4 devices" in "".join(uneven.value.__notes__)

    def mistaken(table, ids):
        raise ValueError("a mistake of one's own")

    for given in (ids, shape, jax.ShapeDtypeStruct((16,), np.int32, sharding=ids.sharding)):
        with pytest.raises(ValueError, match="^a mistake of one's own"):
            placement.run(mistaken).lower(table, given)


def test_a_step_by_pmap_has_no_other_stages(mesh):
    step, make, _ = of_kind("linen", "device", Placement(mesh, mode="pmap"))
    for stage in (step.trace, step.eval_shape):
        with pytest.raises(TypeError, match=r'"pmap" has no trace nor eval_shape: take lower'):
            stage(make(), Placement(mesh, mode="pmap").put(np.arange(16, dtype=np.int32)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_compiled_step_over_devices_is_the_step(kind, mode, mesh):
    placement = Placement(mesh, mode=mode)
    step, make, call = of_kind(kind, placement.axes[0], placement)
    own = [WIDE + np.uint64(number) for number in range(placement.devices)]
    batches = [
        placement.put(hkv.Keys.from_numpy(np.concatenate(own) + np.uint64(shift)))
        for shift in (0, 3)
    ]
    compiled = step.lower(make(), batches[0]).compile()
    assert_equal_steps(step, compiled, make, call, batches)
    with pytest.raises((TypeError, ValueError), match=f"train_step: arguments.0. .*({CUT}|put)"):
        compiled(make(), WIDE)
    if mode == "shard_map":
        traced = step.trace(make(), batches[0]).lower().compile()
        assert_equal_steps(step, traced, make, call, batches)


def test_a_state_of_another_structure_is_refused(mesh):
    placement = Placement(mesh)
    step, make, _ = of_kind("nnx", placement.axes[0], placement)
    ids = placement.put(hkv.Keys.from_numpy(np.arange(4 * placement.devices)))
    compiled = step.lower(make(), ids).compile()
    state = make()
    state.model.more = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="train_step: state and arguments must be of the"):
        compiled(state, ids)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_compiled_step_raises_for_an_exchange_that_overflows(kind, mesh):
    placement = Placement(mesh)
    exchange = Exchange(placement.axes[0], distinct=0.02, slack=0.1, strict=True)
    step, make, _ = of_kind(kind, exchange, placement)
    ids = placement.put(hkv.Keys.from_numpy(np.arange(64 * placement.devices)))
    compiled = step.lower(make(), ids).compile()
    with pytest.raises(ExchangeOverflow, match="found no room") as caught:
        compiled(make(), ids)
    info = caught.value.outputs
    assert not bool((info[1] if kind == "linen" else info).finite)


@pytest.mark.parametrize("mode", MODES)
def test_functions_of_a_placement_are_compiled_ahead(mode, mesh):
    placement = Placement(mesh, mode=mode)

    def insert(table, ids):
        table, result = hkv.sharding.find_or_insert(table, ids, axis_name=placement.axes[0])
        return table, jax.lax.psum(jnp.sum(result.status), placement.axes[0])

    def read(table, ids):
        return hkv.sharding.find(table, ids, axis_name=placement.axes[0])[1].values

    def create():
        return placement.create(lambda: hkv.create(256, 4))

    keys = placement.put(hkv.Keys.from_numpy(np.arange(8 * placement.devices, dtype=np.uint64)))
    step, run = placement.step(insert), placement.run(read)
    compiled = step.lower(create(), keys).compile()
    table, report = compiled(create(), keys)
    expected, own = step(create(), keys)
    np.testing.assert_array_equal(report, own)
    np.testing.assert_array_equal(table.keys, expected.keys)
    reading = run.lower(table, keys).compile()
    np.testing.assert_array_equal(reading(table, keys), run(table, keys))
    assert np.asarray(reading(table, keys)).any()
    wide = np.full(8 * placement.devices, 2**40)
    for call, name in ((compiled, "step"), (reading, "run")):
        with pytest.raises(TypeError, match=f"^Placement.{name}: .* JAX would cut"):
            call(table, wide)


def test_a_checked_function_has_what_jitted_functions_have():
    table, _ = hkv.find_or_insert(hkv.create(128, 4), hkv.Keys.from_numpy(WIDE))

    @hkv.checked
    @jax.jit
    def predict(table, ids):
        return hkv.find(table, ids)[1].values

    keys, ids = hkv.Keys.from_numpy(WIDE), np.array([7, 8, 9, 10])
    expected = predict(table, keys)
    assert expected.any() and predict.eval_shape(table, keys).shape == (4, 4)
    for make in STAGES.values():
        np.testing.assert_array_equal(make(predict, table, keys)(table, keys), expected)
        with pytest.raises(TypeError, match=rf"^predict: arguments\[1\] holds uint{CUT}"):
            make(predict, table, ids)(table, WIDE)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in hkv.CUSTOM_CALLS]
    exported = jax.export.export(predict, disabled_checks=checks)(table, keys)
    np.testing.assert_array_equal(exported.call(table, keys), expected)
    assert copy.deepcopy(predict) is predict and copy.copy(predict) is predict  # as functions
    predict.clear_cache()
    with pytest.raises(TypeError, match="not callable"):
        predict.lower(table, keys)(table, keys)


@pytest.mark.parametrize("name", ["run", "self", "fn", "call"])
def test_arguments_have_any_name(name):
    given = hkv.checked(jax.jit(lambda one, **others: one + others[name]))
    other = hkv.checked(lambda one, **others: one + others[name])
    assert [int(each(1, **{name: 2})) for each in (given, other)] == [3, 3]
    compiled = given.lower(1, **{name: 2}).compile()
    assert name == "self" or int(compiled(1, **{name: 2})) == 3  # JAX's own takes no such name
    step, make, _ = of_kind("nnx")
    with pytest.raises(TypeError, match="must be given by position, got"):
        step(make(), **{name: 1})


@pytest.mark.parametrize("kind", ["linen", "nnx", "step", "run"])
def test_what_a_function_closes_over_goes_with_it(kind, mesh):
    """At once: Python's collector of cycles knows nothing of a device's memory."""

    class Held:
        pass

    placement = Placement(mesh)
    held = Held()
    ids = placement.put(np.arange(16, dtype=np.int32))

    def loss(model, ids, held=held):
        return loss_of(model, ids)

    def read(table, ids, held=held):
        return hkv.sharding.find(table, ids, axis_name="device")[1].values

    if kind in ("step", "run"):
        table = placement.create(lambda: hkv.create(256, 4))
        made = getattr(placement, kind)(read)
        if kind == "run":
            made(table, ids)
    else:
        made = getattr(hkv, kind).train_step(loss, placement=placement)
        make = of_kind(kind, "device", placement)[1]
        made(make(), ids)
        jax.clear_caches()
    alive = weakref.ref(held)
    gc.collect()
    gc.disable()
    try:
        del made, loss, read, held
        jax.clear_caches()
        assert alive() is None
    finally:
        gc.enable()


def test_a_checked_method_is_bound():
    class Server:
        def __init__(self):
            self.table, _ = hkv.find_or_insert(hkv.create(128, 4), np.array([7]))

        @hkv.checked
        @jax.jit
        def predict(self, ids):
            return hkv.find(self.table, ids)[1].values

    jax.tree_util.register_pytree_node(
        Server, lambda own: ((own.table,), None), lambda _, leaves: _server(Server, leaves)
    )
    server = Server()
    assert server.predict(np.array([7])).any()
    with pytest.raises(TypeError, match=f"^predict: .*{CUT}"):
        server.predict(WIDE)


def _server(kind, leaves):
    made = object.__new__(kind)
    (made.table,) = leaves
    return made
