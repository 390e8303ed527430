"""Dense parameters that are split along other axes of a mesh than the tables."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="it wants four devices")

DIM, WIDTH, EXAMPLES = 4, 64, 8
ADAM = hkv.optim.adam(0.01)
COLUMNS = P(None, "model")
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


class Model(nn.Module):
    """A table, and a kernel that may be annotated."""

    axis_name: Any = "data"
    is_annotated: bool = False

    @nn.compact
    def __call__(self, ids, train=False):
        embed = hkv.linen.Embed(2048, DIM, optimizer=ADAM, axis_name=self.axis_name, name="embed")
        init = nn.initializers.lecun_normal()
        if self.is_annotated:
            init = nn.with_partitioning(init, tuple(COLUMNS))
        rows = embed(ids, train=train).reshape(len(ids), -1)
        hidden = nn.tanh(nn.Dense(WIDTH, kernel_init=init, name="dense")(rows))
        return nn.Dense(1)(hidden)[:, 0]


class NnxModel(nnx.Module):
    """The same in nnx."""

    def __init__(
        self, rngs, is_annotated=False, names=tuple(COLUMNS), inputs=3 * DIM, axis_name="data"
    ):
        self.embed = hkv.nnx.Embed(2048, DIM, optimizer=ADAM, axis_name=axis_name)
        init = nnx.initializers.lecun_normal()
        bias_init = nnx.initializers.zeros_init()
        if is_annotated:
            init = nnx.with_partitioning(init, names)
            bias_init = nnx.with_partitioning(bias_init, names[-1:])
        self.dense = nnx.Linear(inputs, WIDTH, kernel_init=init, bias_init=bias_init, rngs=rngs)
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, ids, train=False):
        rows = self.embed(ids, train=train).reshape(len(ids), -1)
        return self.last(nnx.tanh(self.dense(rows)))[:, 0]


def loss_fn(call, ids, labels):
    return jnp.mean((call(ids, train=True) - labels) ** 2)


def placement_of(kind, axes="data"):
    mesh = jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2, devices=jax.devices()[:4]
    )
    return hkv.sharding.Placement(mesh, axis_name=axes)


def batches(placement, steps=4):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        ids = rng.integers(0, 100, (EXAMPLES, 3)).astype(np.int32)
        yield placement.put((ids, rng.normal(size=EXAMPLES).astype(np.float32)))


def split(tree, mesh, spec=COLUMNS):
    """With the arrays of a kernel's shape, of Adam's too, split."""

    def one(leaf):
        is_kernel = leaf.shape == (3 * DIM, WIDTH)
        return jax.device_put(leaf, NamedSharding(mesh, spec)) if is_kernel else leaf

    return jax.tree.map(one, tree)


def linen_state(placement, axis_name="data", **options):
    ids = np.zeros((EXAMPLES // placement.devices, 3), np.int32)
    model = Model(axis_name, **options)
    make = hkv.linen.TrainState.create
    return placement.create(lambda: make(model, jax.random.key(0), ids, tx=optax.adam(0.01)))


def with_split(state, mesh, spec=COLUMNS):
    params, opt_state = split((state.params, state.opt_state), mesh, spec)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def kernels_of(state):
    """Those of the parameters and of Adam's moments."""
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return [leaf for leaf in leaves if leaf.shape == (3 * DIM, WIDTH)]


def trained(state, placement):
    """The losses of some steps, and the state behind them."""
    step, losses = hkv.linen.train_step(loss_fn, placement=placement), []
    for batch in batches(placement):
        state, info = step(state, *batch)
        losses.append(float(info.loss))
    return losses, state


def entries_of(placement, table):
    exported = hkv.sharding.export_entries(placement.shards(table))
    order = np.argsort(exported.keys)
    return exported.keys[order], exported.scores[order], exported.values[order]


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_split_along_another_axis_stay_split(kind):
    """They, and Adam's moments; losses and rows are those of whole ones but for rounding."""
    placement = placement_of(kind)
    whole_losses, whole = trained(linen_state(placement), placement)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is split along")
        losses, after = trained(with_split(linen_state(placement), placement.mesh), placement)
    assert [leaf.sharding.spec for leaf in kernels_of(after)] == [COLUMNS] * 3
    assert all(leaf.sharding.is_fully_replicated for leaf in kernels_of(whole))
    np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
    keys, scores, values = entries_of(placement, after.tables["embed"]["table"])
    expected = entries_of(placement, whole.tables["embed"]["table"])
    np.testing.assert_array_equal(keys, expected[0])
    np.testing.assert_array_equal(scores, expected[1])
    np.testing.assert_allclose(values, expected[2], atol=1e-5)


def test_no_parameter_and_no_table_is_gathered_in_such_a_step():
    """But for updates of what came whole: the bias behind the split kernel, and the next kernel."""
    placement = placement_of("Auto")
    state = with_split(linen_state(placement), placement.mesh)
    step = hkv.linen.train_step(loss_fn, placement=placement)
    compiled = step.lower(state, *next(batches(placement))).compile()
    gathered = re.findall(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", compiled.as_text())
    assert all(np.prod([int(size) for size in shape.split(",")]) == WIDTH for shape in gathered)
    own = [
        jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(state.tables)
    ]
    table = jax.tree.unflatten(jax.tree.structure(state.tables), own)
    assert hkv.testing.copies_in(compiled.as_text(), table) == []
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(
        leaf.size * leaf.dtype.itemsize for leaf in own
    )


def test_annotated_parameters_of_linen_are_split():
    """By ``nn.get_sharding``; a state that is not put so stays whole."""
    placement = placement_of("Auto")
    losses, after = trained(linen_state(placement, is_annotated=True), placement)
    assert all(leaf.sharding.is_fully_replicated for leaf in kernels_of(after))
    state = linen_state(placement, is_annotated=True)
    parts = (state.params, state.opt_state)
    put = jax.device_put(parts, nn.get_sharding(parts, placement.mesh))
    state = dataclasses.replace(state, params=put[0], opt_state=put[1])
    assert {leaf.sharding.spec for leaf in kernels_of(state)} == {COLUMNS}
    again, after = trained(state, placement)
    assert {leaf.sharding.spec for leaf in kernels_of(after)} == {COLUMNS}
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    np.testing.assert_allclose(losses, trained(linen_state(placement), placement)[0], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_annotated", [False, True])
def test_parameters_of_nnx_are_split(kind, is_annotated):
    """As they are annotated, or put by hand; evaluation too takes them as they are."""
    placement = placement_of(kind)
    results = []
    for is_split in (True, False):
        has_names = is_annotated and is_split
        state = hkv.nnx.place(
            lambda has_names=has_names: hkv.nnx.TrainState(
                NnxModel(nnx.Rngs(0), has_names), optax.adam(0.01)
            ),
            placement,
        )
        if is_split and not is_annotated:
            nnx.update(state, split(nnx.state(state), placement.mesh))
        moments = state.optimizer.opt_state[0].mu["dense"]["kernel"]
        step, losses = hkv.nnx.train_step(loss_fn, placement=placement), []
        for batch in batches(placement):
            losses.append(float(step(state, *batch).loss))
        for variable in (state.model.dense.kernel, moments):
            spec = variable.get_value().sharding.spec
            assert spec == COLUMNS if is_split else not any(spec)
        evaluate = hkv.nnx.run(lambda model, ids: model(ids), placement)
        results.append((losses, evaluate(state.model, next(batches(placement))[0])))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-4)


def test_annotations_along_the_axes_of_tables_leave_parameters_whole():
    placement = placement_of("Auto")
    message = r"nnx.place: dense/kernel is annotated to be split along \['data'\], and tables"
    with pytest.warns(UserWarning, match=message):
        model = hkv.nnx.place(lambda: NnxModel(nnx.Rngs(0), True, ("data", None)), placement)
    assert model.dense.kernel.get_value().sharding.is_fully_replicated


def test_parameters_that_stay_whole_are_warned_of_once():
    placement = placement_of("Auto")

    def make():
        return hkv.nnx.TrainState(NnxModel(nnx.Rngs(0), True, ("data", None)), optax.adam(0.01))

    with pytest.warns(UserWarning) as warned:
        hkv.nnx.place(make, placement)
    messages = [str(each.message) for each in warned]
    assert len(messages) == 1 and "dense/kernel (and 2 more) is annotated" in messages[0], messages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("data", "model"), (None, "model")], ids=str)
def test_an_axis_of_one_device_splits_nothing(kind, names):
    """Neither is it warned of, nor does it keep a parameter from its split along another axis."""
    mesh = jax.make_mesh((1, 4), ("data", "model"), axis_types=(KINDS[kind],) * 2)
    placement = hkv.sharding.Placement(mesh, axis_name="data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = hkv.nnx.place(
            lambda: hkv.nnx.TrainState(NnxModel(nnx.Rngs(0), True, names), optax.adam(0.01)),
            placement,
        )
    kernel = state.model.dense.kernel
    assert kernel.get_value().sharding.spec == COLUMNS
    assert kernel.get_value().addressable_shards[0].data.shape == (12, WIDTH // 4)
    whole = hkv.nnx.TrainState(NnxModel(nnx.Rngs(0), axis_name=None), optax.adam(0.01))
    steps = hkv.nnx.train_step(loss_fn, placement=placement), hkv.nnx.train_step(loss_fn)
    for batch in batches(placement):
        losses = [
            float(step(own, *batch).loss) for step, own in zip(steps, (state, whole), strict=True)
        ]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    assert kernel.get_value().addressable_shards[0].data.shape == (12, WIDTH // 4)


@pytest.mark.parametrize("make", [hkv.nnx.place, hkv.nnx.abstract])
def test_an_annotation_with_an_axis_that_the_mesh_lacks_is_named(make):
    placement = hkv.sharding.Placement(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))
    message = r"dense/bias must be annotated with axes of the mesh, \['data'\], got \['model'\]"
    with pytest.raises(ValueError, match=rf"nnx.{make.__name__}: {message}.*make the mesh with"):
        make(lambda: NnxModel(nnx.Rngs(0), True), placement)


def test_annotations_that_do_not_fit_are_named_or_left_out():
    """Of factored moments, which have a parameter's annotation but not its shape, the latter."""
    placement = placement_of("Auto")
    with pytest.raises(ValueError, match=r"nnx.place: dense/kernel must be of a shape that its an"):
        hkv.nnx.place(lambda: NnxModel(nnx.Rngs(0), True, ("model", None), 5), placement)
    tx = optax.adafactor(0.01, min_dim_size_to_factor=2)  # keeps [1] where it has no moment
    state = hkv.nnx.place(lambda: hkv.nnx.TrainState(NnxModel(nnx.Rngs(0), True), tx), placement)
    assert state.model.dense.kernel.get_value().sharding.spec == COLUMNS
    train_step = hkv.nnx.train_step(loss_fn, placement=placement)
    losses = [float(train_step(state, *batch).loss) for batch in batches(placement)]
    assert np.isfinite(losses).all()


@pytest.mark.parametrize("kind", KINDS)
def test_orbax_restores_annotated_parameters_split(kind, tmp_path):
    """Into what `abstract` tells, of which nothing is made."""
    placement = placement_of(kind)

    def make():
        return hkv.nnx.TrainState(NnxModel(nnx.Rngs(0), True), optax.adam(0.01))

    state = hkv.nnx.place(make, placement)
    train_step = hkv.nnx.train_step(loss_fn, placement=placement)
    every = list(batches(placement))
    train_step(state, *every[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.split(state)[1])
    graph, shapes = hkv.nnx.abstract(make, placement)
    with ocp.StandardCheckpointer() as checkpointer:
        resumed = nnx.merge(graph, checkpointer.restore(tmp_path / "state", shapes))
    assert resumed.model.dense.kernel.get_value().sharding.spec == COLUMNS
    losses = [float(train_step(own, *every[1]).loss) for own in (state, resumed)]
    assert losses[0] == losses[1]


def test_an_axis_that_a_step_is_not_manual_along_is_named():
    placement = placement_of("Auto")
    step = placement.step(
        lambda table, ids: hkv.sharding.find_or_insert(table, ids, axis_name=("data", "model"))
    )
    table = placement.create(lambda: hkv.create(256, DIM))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(
            NameError, match=r"no mesh axis .* along the placement's own axes alone"
        ):
            step(table, placement.put(np.arange(8)))


def test_parameters_that_are_split_as_tables_are_are_warned_of():
    """Every step would gather them, and hand them back whole."""
    placement = placement_of("Auto")
    state = with_split(linen_state(placement), placement.mesh, P("data", None))
    step = hkv.linen.train_step(loss_fn, placement=placement)
    batch = next(batches(placement))
    message = r"state.params\['dense'\]\['kernel'\] is split along \['data'\], as tables"
    with pytest.warns(UserWarning, match=message) as caught:
        state, _ = step(state, *batch)
    assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once, and whole now
        step(state, *batch)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_table_of_one_device_in_pieces_is_warned_of(api):
    """As by a loop that splits every array whose first axis can be split."""
    mesh = placement_of("Auto").mesh

    def put(leaf):
        is_long = leaf.ndim > 0 and leaf.shape[0] % 2 == 0 and leaf.shape[0] > 2
        return jax.device_put(leaf, NamedSharding(mesh, P("data") if is_long else P()))

    ids, labels = np.zeros((EXAMPLES, 3), np.int32), np.zeros(EXAMPLES, np.float32)
    if api == "linen":
        make = hkv.linen.TrainState.create
        state = make(Model(axis_name=None), jax.random.key(0), ids, tx=optax.adam(0.01))
        state = jax.tree.map(put, state)
    else:
        model = NnxModel(nnx.Rngs(0), axis_name=None)
        state = hkv.nnx.TrainState(model, optax.adam(0.01))
        nnx.update(state, jax.tree.map(put, nnx.state(state)))
    step = getattr(hkv, api).train_step(loss_fn)
    with pytest.warns(UserWarning, match="a table of one device has its rows in pieces on 4 devi"):
        step(state, ids, labels)


def test_what_came_whole_comes_back_whole():
    """XLA would leave it split; the second step has the program of the first. Tables likewise."""
    placement = placement_of("Auto")
    state = with_split(linen_state(placement), placement.mesh)
    before = [leaf.sharding for leaf in jax.tree.leaves(state)]
    _, after = trained(state, placement)
    for own, then in zip(jax.tree.leaves(after), before, strict=True):
        assert own.sharding.is_equivalent_to(then, own.ndim)

    def step(state, ids):
        table, tower, bias = state
        table = dataclasses.replace(table, values=table.values * tower[0, :DIM])
        return (table, tower, bias + tower.sum(0)), tower.sum()

    tower = jax.device_put(jnp.ones((2, WIDTH)), NamedSharding(placement.mesh, COLUMNS))
    table = placement.create(lambda: hkv.create(256, DIM))
    state, total = placement.step(step)(
        (table, tower, jnp.zeros(WIDTH)), placement.put(np.arange(8))
    )
    assert state[0].values.sharding.spec == P("data") and state[1].sharding.spec == COLUMNS
    assert state[2].sharding.is_fully_replicated and total.sharding.is_fully_replicated
    with pytest.raises(
        ValueError, match=r"Placement.shards: state\[1\] is split along \['model'\]"
    ):
        placement.shards(state)


def test_a_leaf_that_loses_its_split_axis_comes_back_whole():
    placement = placement_of("Auto")
    table = placement.create(lambda: hkv.create(256, DIM))
    weights = jax.device_put(jnp.ones((8, 8)), NamedSharding(placement.mesh, COLUMNS))
    step = placement.step(lambda state, _: ((state[0], state[1].sum(1)), None))
    (_, sums), _ = step((table, weights), placement.put(np.zeros(2, np.float32)))
    assert sums.tolist() == [8.0] * 8


def test_a_table_that_is_given_optimizer_rows_comes_out_split_as_ever():
    """The state has another form then, whose other leaves nobody knows of."""
    placement = placement_of("Auto")
    tower = jax.device_put(jnp.ones((2, WIDTH)), NamedSharding(placement.mesh, COLUMNS))
    table = placement.create(lambda: hkv.create(256, DIM))
    step = placement.step(lambda state, ids: ((ADAM.init(state[0]), state[1] + 1), None))
    table, tower = step((table, tower), placement.put(np.arange(8)))[0]
    assert all(leaf.sharding.spec == P("data") for leaf in jax.tree.leaves(table))
    assert len(jax.tree.leaves(table.optimizer)) == 6 and tower.shape == (2, WIDTH)


@pytest.mark.parametrize("kind", KINDS)
def test_transformations_of_optax_are_prepared_on_such_meshes(kind):
    """What they are asked while tracing knows of no mesh."""
    placement = placement_of(kind)
    opt = hkv.optim.sparse(optax.adam(0.1))
    table = placement.create(lambda: opt.init(hkv.create(256, DIM)))
    assert sorted(table.optimizer.rows) == ["0.mu", "0.nu"]


def test_a_step_in_a_program_of_the_callers_leaves_tables_as_ever():
    """There nobody knows how parameters are split; random keys and counts pass through, too."""
    placement = placement_of("Auto")

    def step(state, ids):
        table, tower, key = state
        table, found = hkv.sharding.find_or_insert(table, ids, axis_name="data")
        table = dataclasses.replace(table, values=table.values * tower[0, :DIM])
        return (table, tower + 1, jax.random.split(key)[0]), found.counts

    table = placement.create(lambda: hkv.create(256, DIM))
    tower = jax.device_put(jnp.ones((2, WIDTH)), NamedSharding(placement.mesh, COLUMNS))
    state, one = (table, tower, jax.random.key(0)), placement.step(step, donate=False)
    batch = placement.put(np.arange(8, dtype=np.int32))
    alone, counts = one(state, batch)
    assert int(counts.inserted) == 8 and alone[1].sharding.spec == COLUMNS
    twice, _ = jax.jit(
        lambda state, ids: jax.lax.scan(lambda own, _: one(own, ids), state, None, 2)
    )(state, batch)
    for own in (alone[0], twice[0]):
        assert all(leaf.sharding.spec == P("data") for leaf in jax.tree.leaves(own))
    np.testing.assert_array_equal(twice[1], 3)
    step = placement.step(lambda state, ids: (state, state[2]), donate=False)
    assert jax.random.key_data(step(state, batch)[1]).tolist() == [0, 0]


def test_a_second_step_has_the_program_of_the_first():
    placement = placement_of("Auto")
    traces = []

    def counting(apply, ids, labels):
        traces.append(1)
        return loss_fn(apply, ids, labels)

    state = with_split(linen_state(placement), placement.mesh)
    step = hkv.linen.train_step(counting, placement=placement)
    every = list(batches(placement))
    state, _ = step(state, *every[0])
    first = len(traces)
    for batch in every[1:]:
        state, _ = step(state, *batch)
    assert len(traces) == first
