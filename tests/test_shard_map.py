"""Layers in a shard_map of the user's own, which may track what differs between devices."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import pairs
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_hkv as hkv

DIM, DEVICES = 2, 4
SGD = hkv.optim.sgd(1.0)
IDS = np.arange(8, dtype=np.int32)
# The gradient of an id's row; a sum over devices would show in every digit.
FACTORS = np.float32(10.0 ** np.arange(8) / 1e4)


@pytest.fixture(
    scope="module", params=[{"device": DEVICES}, {"device": DEVICES, "model": 2}], ids=str
)
def placement(request):
    """Where there is another axis, it stays with the compiler."""
    kinds = (AxisType.Auto,) * len(request.param)
    mesh = jax.make_mesh(tuple(request.param.values()), tuple(request.param), axis_types=kinds)
    return hkv.sharding.Placement(mesh, "device")


class NnxModel(nnx.Module):
    def __init__(self, axis_name):
        self.embed = hkv.nnx.Embed(1024, DIM, optimizer=SGD, axis_name=axis_name)


def by_linen(axis_name):
    layer = hkv.linen.Embed(1024, DIM, optimizer=SGD, axis_name=axis_name)

    def step(variables, ids, factors):
        zeros = hkv.linen.perturbations(layer, variables, ids, train=True)

        def loss(zeros):
            given = {**variables, "perturbations": zeros}
            rows, updated = layer.apply(given, ids, train=True, mutable=hkv.linen.MUTABLE)
            return jnp.sum(rows * factors[:, None]), updated

        gradients, updated = jax.grad(loss, has_aux=True)(zeros)
        tables = hkv.linen.update_tables(updated, gradients)
        return {"tables": tables}, jax.tree.leaves(gradients)[0]

    return lambda: layer.init(jax.random.key(0), IDS[:2]), step


def by_nnx(axis_name):
    graph = None

    def make():
        nonlocal graph
        graph, values = nnx.split(NnxModel(axis_name))
        return values

    def step(values, ids, factors):
        model = nnx.merge(graph, values)
        _, _, rows = hkv.nnx.value_and_grad(
            lambda model: jnp.sum(model.embed(ids, train=True) * factors[:, None])
        )(model)
        hkv.nnx.update_tables(model, rows)
        return nnx.state(model), rows["embed/table"].gradients[0]

    return make, step


@pytest.mark.parametrize(
    "api, axis_name, check_vma", pairs([by_linen, by_nnx], ["device", None], [True, False])
)
def test_each_device_has_the_gradients_of_its_own_rows(api, axis_name, check_vma, placement):
    """Tables split over the devices, and one for each."""
    make, step = api(axis_name)
    state = placement.create(make)
    split = P("device")
    mapped = jax.shard_map(
        step,
        mesh=placement.mesh,
        axis_names={"device"},
        in_specs=split,
        out_specs=split,
        check_vma=check_vma,
    )
    state, gradients = jax.jit(mapped)(state, *placement.put((IDS, FACTORS)))
    np.testing.assert_array_equal(gradients, np.broadcast_to(FACTORS[:, None], (8, DIM)))
    assert_moved_by_factors(placement, state)


def assert_moved_by_factors(placement, state):
    first = np.asarray(hkv.initial_rows(hkv.create(128, DIM), IDS))
    rows = dict(rows_of(placement, state))
    assert rows.keys() == set(range(8))
    for number, factor in enumerate(FACTORS):
        np.testing.assert_allclose(rows[number], first[number] - factor, rtol=1e-6)


def rows_of(placement, state):
    """What all devices' tables hold."""
    (table,) = (
        leaf
        for leaf in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, hkv.Table))
        if isinstance(leaf, hkv.Table)
    )
    for part in placement.shards(table):
        entries = hkv.export_batch(part, 0, part.capacity)
        count = int(entries.count)
        yield from zip(
            entries.keys.to_numpy()[:count].tolist(), entries.values[:count], strict=True
        )


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_whole_step_trains_each_devices_own_table(check_vma, placement):
    layer = hkv.linen.Embed(1024, DIM, optimizer=SGD)

    def make():
        return hkv.linen.TrainState.create(layer, jax.random.key(0), IDS[:2], tx=optax.sgd(0.1))

    step = hkv.linen.train_step(
        lambda apply, ids, factors: jnp.sum(apply(ids, train=True) * factors[:, None]), donate=False
    )
    state = placement.create(make)
    specs = placement.specs(state)
    mapped = jax.shard_map(
        lambda state, *own: step(state, *own)[0],
        mesh=placement.mesh,
        in_specs=(specs, P("device"), P("device")),
        out_specs=specs,
        axis_names={"device"},
        check_vma=check_vma,
    )
    state = jax.jit(mapped)(state, *placement.put((IDS, FACTORS)))
    assert_moved_by_factors(placement, state)


# --- Outside of jit ------------------------------------------------------------------------------


def of_two():
    """A placement, and a table over its devices."""
    placement = hkv.sharding.Placement(jax.make_mesh((2,), ("device",), devices=jax.devices()[:2]))
    return placement, placement.create(lambda: SGD.init(hkv.create(256, DIM)))


@pytest.mark.slow  # only jaxlib 0.11.2 makes it another path
def test_operations_run_in_a_shard_map_that_is_not_jitted():
    """Every operation is a program of its own: of operands without elements one ended jaxlib's."""
    placement, table = of_two()
    split = P("device")
    call = functools.partial(hkv.sharding.contains, axis_name="device")
    mapped = jax.shard_map(
        lambda table, ids: call(table, ids)[1].found,
        mesh=placement.mesh,
        in_specs=(split, split),
        out_specs=split,
    )
    assert not mapped(table, placement.put(IDS)).any()


@pytest.mark.slow
def test_a_step_runs_without_jit():
    """As who looks for an error has it."""

    def step(table, ids):
        table, found = hkv.sharding.find_or_insert(table, ids, axis_name="device")
        table = hkv.sharding.update(SGD, table, found, jnp.ones_like(found.values))
        return table, found.counts

    placement, table = of_two()
    expected, _ = placement.step(step, donate=False)(table, placement.put(IDS))
    with jax.disable_jit():
        table, counts = placement.step(step)(table, placement.put(IDS))
    assert int(counts.inserted) == len(IDS)
    for one, other in zip(jax.tree.leaves(table), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def layer_of(kind, unseen):
    """A layer over devices, and its input, where an id is one of a row each."""
    init = hkv.initializers.uniform(0.5, 1.0)
    own = {"unseen": unseen, "axis_name": "device"}
    if kind == "EmbedCollection":
        config = hkv.TableConfig("t", 1024, DIM, init=init)
        collection = hkv.Collection([config], [hkv.Feature("f", "t", "sum")])
        layer = hkv.linen.EmbedCollection(collection, **own)
        return layer, lambda ids, valid: {"f": hkv.Padded(ids[:, None], valid[:, None])}
    layer = getattr(hkv.linen, kind)(1024, DIM, embedding_init=init, **own)
    if kind == "EmbedBag":
        return layer, lambda ids, valid: hkv.Padded(ids[:, None], valid[:, None])
    return layer, hkv.Padded


@pytest.mark.parametrize("kind", ["Embed", "EmbedBag", "EmbedCollection"])
@pytest.mark.parametrize("unseen", ["initial", "zeros"])
@pytest.mark.parametrize("check_vma", [False, True])
def test_init_gives_the_rows_of_an_empty_table_and_sends_nothing(
    kind, check_vma, unseen, placement
):
    """Its program was as large as a step's: most of the time that `Placement.create` took."""
    layer, input_of = layer_of(kind, unseen)
    ids = np.array([3, 4, 5, 3, 2**31 - 1, 0, 7, 8], np.int32)
    valid = ids != 4

    def first(ids, valid):
        return layer.init_with_output(jax.random.key(0), input_of(ids, valid))[0]

    def read(ids, valid):
        variables = layer.init(jax.random.key(0), input_of(ids, valid))
        return layer.apply(variables, input_of(ids, valid))

    split = {"in_specs": (P("device"), P("device")), "out_specs": P("device")}
    options = {"mesh": placement.mesh, "axis_names": {"device"}, "check_vma": check_vma, **split}
    rows, sends = {}, {}
    for name, fn in (("init", first), ("apply", read)):
        program = jax.jit(jax.shard_map(fn, **options)).lower(ids, valid).compile()
        (rows[name],) = jax.tree.leaves(program(ids, valid))
        sends[name] = "all-to-all" in program.as_text()
    np.testing.assert_array_equal(rows["init"], rows["apply"])
    assert rows["init"].any() == (unseen == "initial")
    assert sends == {"init": False, "apply": True}


def test_init_is_right_in_functions_of_a_placement_and_varies_as_a_call(placement):
    """It warned that a part of a table is read, and gave equal ids rows of another type."""
    ids = np.array([3, 4, 5, 3, 2**31 - 1, 0, 7, 8], np.int32)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            rows = hkv.linen.Embed(1024, DIM, axis_name="device")(ids)
            bags = hkv.linen.EmbedBag(1024, DIM, axis_name="device")(ids[:, None])
            device = jnp.float32(jax.lax.axis_index("device"))
            return jax.lax.scan(lambda c, _: (c + device, None), rows + bags, None, length=2)[0]

    def first(ids):
        return Model().init_with_output(jax.random.key(0), ids)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        placement.run(lambda _, ids: first(ids))(np.int32(0), placement.put(ids))
    same = {"in_specs": P(), "out_specs": P("device"), "axis_names": {"device"}}
    rows = jax.jit(jax.shard_map(first, mesh=placement.mesh, check_vma=True, **same))(ids)
    assert rows.shape == (len(ids) * DEVICES, DIM)
