"""Steps that go through their batch in parts: those of the whole batch, in less memory."""

from __future__ import annotations

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import each
from flax import nnx
from test_training import (
    Model,
    NnxModel,
    assert_equal_trees,
    assert_same_entries,
    batches,
    fresh_state,
    loss_fn,
    loss_of,
    table_of,
)

import jax_hkv as hkv
from jax_hkv import _micro_batches
from jax_hkv.optim import LossScale
from jax_hkv.sharding import Placement

PARTS = 3
NEAR = {"rtol": 1e-5, "atol": 1e-6}


def nnx_loss(model, inputs, labels):
    return loss_of(model(inputs, train=True), labels)


def in_parts(call, inputs, labels):
    """The loss of a model that is called for one part of the batch after the other."""
    losses = []
    for part in range(PARTS):
        count = len(labels) // PARTS
        own = jax.tree.map(
            lambda leaf: leaf[part * count : (part + 1) * count],  # noqa: B023
            (inputs, labels),
        )
        losses.append(loss_of(call(own[0], train=True), own[1]))
    return sum(losses) / PARTS


class Linen:
    """A state of linen, and its steps."""

    loss_fn = staticmethod(loss_fn)

    def __init__(self, made, **options):
        self.state = fresh_state(made[0][0], **options)

    def run(self, made, loss_fn=loss_fn, **options):
        step = hkv.linen.train_step(loss_fn, **options)
        infos = []
        for batch in made:
            self.state, info = step(self.state, *batch)
            infos.append(info)
        return infos

    @property
    def table(self):
        return table_of(self.state)

    @property
    def dense(self):
        return self.state.params, self.state.opt_state


class Nnx:
    """The same of nnx."""

    loss_fn = staticmethod(nnx_loss)

    def __init__(self, made, **options):
        del made
        self.state = hkv.nnx.TrainState(NnxModel(nnx.Rngs(0)), **{"tx": optax.sgd(0.1)} | options)

    def run(self, made, loss_fn=nnx_loss, **options):
        step = hkv.nnx.train_step(loss_fn, **options)
        return [step(self.state, *batch) for batch in made]

    @property
    def table(self):
        return next(iter(self.state.model.embed.tables.values()))

    @property
    def dense(self):
        parts = self.state.model, self.state.optimizer
        return nnx.state(parts, nnx.Not(hkv.nnx.TableVariable))


APIS = [Linen, Nnx]


def assert_same(one, other):
    assert_same_entries(one.table, other.table)
    for a, b in zip(jax.tree.leaves(one.dense), jax.tree.leaves(other.dense), strict=True):
        np.testing.assert_allclose(a, b, **NEAR)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("options", [{}, {"max_norm": 0.05}], ids=["plain", "clipped"])
def test_a_step_in_micro_batches_is_the_step_whose_loss_calls_the_model_for_each(api, options, rng):
    """One update of tables and of dense parameters, by the gradients of all parts."""
    made = batches(rng)
    tx = optax.sgd(0.1, momentum=0.9)  # Adam's steps are as large where gradients are but rounding
    one, other = api(made, tx=tx), api(made, tx=tx)
    infos = one.run(made, micro_batches=PARTS, **options)
    expected = other.run(made, in_parts, **options)
    assert_same(one, other)
    for info, should in zip(infos, expected, strict=True):
        np.testing.assert_allclose(info.loss, should.loss, rtol=1e-5)
        assert_equal_trees((info.tables, info.counts), (should.tables, should.counts))
    assert int(infos[-1].tables[next(iter(infos[-1].tables))].hits) > 0


@pytest.mark.parametrize("api", APIS)
def test_micro_batches_come_near_to_the_whole_batch(api, rng):
    """Slots may differ, and nothing else does: LFU counts occurrences however they are divided."""
    made = batches(rng)
    one, other = api(made), api(made)
    losses = [info.loss for info in one.run(made, micro_batches=4)]
    np.testing.assert_allclose(losses, [info.loss for info in other.run(made)], rtol=1e-5)
    assert_same(one, other)


@pytest.mark.parametrize("api", APIS)
def test_one_part_that_is_not_finite_skips_the_whole_step(api, rng):
    """With a loss scale: ids are inserted, and every bit of what trains stays."""
    made = batches(rng)
    own = api(made, loss_scale=LossScale.create(2.0**10))
    (info,) = own.run(made[:1], micro_batches=PARTS)
    assert bool(info.finite)
    labels = np.array(made[1][1])
    labels[-1] = np.nan  # of the last part
    before = hkv.sharding.export_entries(own.table)
    dense = jax.tree.map(np.array, own.dense)
    (info,) = own.run([(made[1][0], labels)], micro_batches=PARTS)
    assert not bool(info.finite) and np.isnan(info.loss)
    after = hkv.sharding.export_entries(own.table)
    assert len(after.keys) > len(before.keys)
    assert_equal_trees(own.dense, dense)
    place = {int(key): number for number, key in enumerate(after.keys)}
    rows = after.values[[place[int(key)] for key in before.keys]]
    np.testing.assert_array_equal(rows, before.values)


class HalfModel(nn.Module):
    """One dense parameter, in bfloat16."""

    @nn.compact
    def __call__(self, ids, slopes, train=False):
        rows = hkv.linen.Embed(128, 1, optimizer=hkv.optim.sgd(0.1))(ids, train=train)
        bias = self.param("bias", nn.initializers.zeros, (), jnp.bfloat16)
        return rows[:, 0] + bias * slopes


def test_gradients_of_half_parameters_are_added_in_float32_and_come_as_they_are():
    """One by one 64 small ones would be lost; a state of optax keeps its types in a scan."""
    slopes = np.full(128, 2.0**-9, np.float32).reshape(64, 2)
    slopes[0] = 1
    slopes, ids = slopes.reshape(-1), np.arange(128, dtype=np.int32)
    sgd = optax.trace(0.9)
    state = hkv.linen.TrainState.create(HalfModel(), jax.random.key(0), ids, slopes, tx=sgd)

    def loss(apply, ids, slopes):
        return 64 * apply(ids, slopes, train=True).mean()

    step = hkv.linen.train_step(loss, micro_batches=64, donate=False)
    after, _ = step(state, ids, slopes)
    (trace,) = jax.tree.leaves(after.opt_state)
    assert trace.dtype == jnp.bfloat16
    assert float(trace) == float(jnp.bfloat16(1 + 63 / 512)) > 1.1
    jax.lax.scan(lambda state, _: step(state, ids, slopes), state, length=2)


class Statistics(nn.Module):
    """Normalises with running statistics, and drops elements out."""

    @nn.compact
    def __call__(self, ids, key=None, train=False):
        rows = hkv.linen.Embed(256, 4, optimizer=hkv.optim.sgd(0.1))(ids, train=train)
        rows = nn.BatchNorm(momentum=0.5, use_running_average=not train)(rows)
        rows = nn.Dropout(0.5, deterministic=not train, rng_collection="dropout")(rows, rng=key)
        self.sow("intermediates", "rows", rows)
        return nn.Dense(1)(rows)[:, 0]


def test_statistics_pass_through_all_parts_and_each_has_a_random_key_of_its_own(rng):
    ids = rng.integers(0, 100, 64, dtype=np.int32)
    state = hkv.linen.TrainState.create(Statistics(), jax.random.key(0), ids, tx=optax.sgd(0.0))

    def loss(apply, ids, key, weight):
        outputs = apply(ids, key, train=True)
        return outputs.mean() * weight, (jax.random.key_data(key), weight)

    step = hkv.linen.train_step(loss, has_aux=True, micro_batches=2, donate=False)
    after, info = step(state, ids, jax.random.key(1), 0.5)
    keys, weights = info.aux
    assert keys.shape == (2, 2) and keys[0].tolist() != keys[1].tolist()
    assert weights.tolist() == [0.5, 0.5]
    mean = np.zeros(4)
    initial = np.asarray(hkv.initial_rows(table_of(state), ids))
    for part in (initial[:32], initial[32:]):
        mean = 0.5 * mean + 0.5 * part.mean(axis=0)
    got = after.variables["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(got, mean, rtol=1e-4, atol=1e-6)


def test_nnx_statistics_and_random_streams_pass_through_all_parts(rng):
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.embed = hkv.nnx.Embed(256, 4, optimizer=hkv.optim.sgd(0.1))
            self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.dense = nnx.Linear(4, 1, rngs=rngs)

        def __call__(self, ids):
            rows = self.dropout(self.norm(self.embed(ids, train=True)))
            return self.dense(rows)[:, 0]

    ids = rng.integers(0, 100, 64, dtype=np.int32)
    state = hkv.nnx.TrainState(Own(nnx.Rngs(0)), optax.sgd(0.0))
    initial = np.asarray(hkv.initial_rows(state.model.embed.table.get_value(), ids))
    step = hkv.nnx.train_step(lambda model, ids: model(ids).mean(), micro_batches=2)
    graph = nnx.graphdef(state)
    step(state, ids)
    assert nnx.graphdef(state) == graph
    assert int(state.model.dropout.rngs.count.get_value()) == 2
    mean = np.zeros(4)
    for part in (initial[:32], initial[32:]):
        mean = 0.5 * mean + 0.5 * part.mean(axis=0)
    np.testing.assert_allclose(state.model.norm.mean.get_value(), mean, rtol=1e-4, atol=1e-6)


class Wide(nn.Module):
    """Whose activations take more memory than anything else."""

    @nn.compact
    def __call__(self, ids, train=False):
        rows = hkv.linen.Embed(1024, 8, optimizer=hkv.optim.adam(0.1))(ids, train=train)
        for _ in range(4):
            rows = nn.relu(nn.Dense(512)(rows))
        return nn.Dense(1)(rows)[:, 0]


def test_micro_batches_take_less_memory_and_copy_no_table():
    ids = np.arange(4096, dtype=np.int32)
    state = jax.eval_shape(
        lambda: hkv.linen.TrainState.create(Wide(), jax.random.key(0), ids, tx=optax.sgd(0.1))
    )

    def step_of(count):
        return hkv.linen.train_step(
            lambda apply, ids: jnp.square(apply(ids, train=True)).mean(), micro_batches=count
        )

    one, many = (
        step_of(count).lower(state, ids).compile().memory_analysis().temp_size_in_bytes
        for count in (1, 16)
    )
    assert many < one / 4
    hkv.testing.assert_no_table_copies(step_of(16), state, ids)


@pytest.mark.parametrize("api, mode", each(["linen", "nnx"], ["shard_map", "pmap"]))
def test_each_device_goes_through_its_part_in_micro_batches(api, mode, rng):
    """The step of one device with as many micro-batches in all, but for the order of sums."""
    mesh = jax.make_mesh((2,), ("device",), devices=jax.devices("cpu")[:2])
    placement = Placement(mesh, mode=mode)
    ids = rng.integers(0, 200, (3, 64), dtype=np.int32)
    sgd = optax.sgd(0.1)
    embed = {"capacity": 1024, "features": 4, "optimizer": hkv.optim.adagrad(0.1)}

    def loss(call, ids):
        return jnp.square(call(ids, train=True) - 1).mean()

    def entries(tables):
        exported = hkv.sharding.export_entries(tables)
        order = np.argsort(exported.keys)
        return exported.keys[order], exported.values[order]

    if api == "linen":

        def make(axis_name=None):
            model = hkv.linen.Embed(**embed, axis_name=axis_name)
            return hkv.linen.TrainState.create(model, jax.random.key(0), ids[0], tx=sgd)

        state, one = placement.create(functools.partial(make, "device")), make()
        step = hkv.linen.train_step(loss, micro_batches=4, placement=placement)
        alone = hkv.linen.train_step(loss)
        for batch in ids:
            state, info = step(state, placement.put(batch))
            one, expected = alone(one, batch)
        parts, whole = placement.shards(table_of(state)), table_of(one)
    else:

        def make_nnx(axis_name=None):
            return hkv.nnx.TrainState(hkv.nnx.Embed(**embed, axis_name=axis_name), sgd)

        many, one = hkv.nnx.place(lambda: make_nnx("device"), placement), make_nnx()
        step = hkv.nnx.train_step(loss, micro_batches=4, placement=placement)
        alone = hkv.nnx.train_step(loss)
        for batch in ids:
            info, expected = step(many, placement.put(batch)), alone(one, batch)
        parts = placement.shards(many.model.table.get_value())
        whole = one.model.table.get_value()
    np.testing.assert_allclose(info.loss, expected.loss, rtol=1e-5)
    assert int(info.tables["table"].inserted) == int(expected.tables["table"].inserted)
    for got, should in zip(entries(parts), entries(whole), strict=True):
        np.testing.assert_allclose(got, should, **NEAR)


KEY = np.asarray(jax.random.PRNGKey(0))
BAGS = hkv.Jagged.from_lists([[1, 2], [3]] * 24)
REFUSED = {
    "no number": ({"micro_batches": True}, None, TypeError, "micro_batches must be an integer"),
    "none": ({"micro_batches": 0}, None, ValueError, "micro_batches must be from 1"),
    "rest": ({"micro_batches": 5}, None, ValueError, r"arguments\[0\].* of 48 .* 5 micro-batches"),
    "weights": ({"micro_batches": 2}, np.ones(2), ValueError, r"arguments\[1\].*48 where .*\[0\]"),
    "a raw key": (
        {"micro_batches": 4},
        KEY,
        ValueError,
        r"arguments\[0\].*2 for 4.*jax\.random\.key",
    ),
    "jagged": (
        {"micro_batches": 5},
        BAGS,
        ValueError,
        r"arguments\[1\] must have a first axis .* 48 for 5",
    ),
    "one Jagged": (
        {"micro_batches": 3},
        BAGS,
        ValueError,
        r"arguments\[0\] must be a Jagged of each of the 3 .* got 49 row_splits of 72 positions "
        r"beside arrays of \[48\] examples.*sharding\.concatenate",
    ),
    "as many Jagged as others": (
        {"micro_batches": 4},
        hkv.sharding.concatenate([hkv.Jagged.from_lists([[1]] * 24)] * 2),
        ValueError,
        r"arguments\[0\] must be a Jagged of each of the 4 .* got 50 row_splits",
    ),
    "splits of a part": (
        {"micro_batches": 2},
        hkv.Jagged(np.zeros(96, np.int32), np.arange(50, dtype=np.int32)),
        ValueError,
        r"row_splits of a Jagged of each of 2 micro-batches must start at 0.*end at 48 ",
    ),
}


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("case", REFUSED)
def test_batches_that_cannot_be_cut_are_refused(api, case, rng):
    """31: before anything changes."""
    options, inputs, error, message = REFUSED[case]
    made = batches(rng, 1)
    own = api(made)
    given = made if inputs is None else [(inputs, made[0][1])]
    with pytest.raises(error, match=f"train_step: {message}"):
        own.run(given, **options)


def test_objects_that_parts_would_change_are_refused(rng):
    """Of nnx, which a step of the whole batch may change."""
    made = batches(rng, 1)
    (inputs, labels), own = made[0], Nnx(made)

    def loss(model, inputs, labels, seen):
        seen.update(values=labels)
        return nnx_loss(model, inputs, labels)

    with pytest.raises(TypeError, match="Average of nnx, whose changes would be lost: hold it in"):
        own.run([(inputs, labels, nnx.metrics.Average())], loss, micro_batches=2)


def test_an_nnx_model_that_changes_in_more_than_its_arrays_is_refused(rng):
    """A count of calls, say, which would be lost."""

    class Counting(NnxModel):
        calls = 0

        def __call__(self, inputs, train=False):
            self.calls += 1
            return super().__call__(inputs, train)

    made = batches(rng, 1)
    state = hkv.nnx.TrainState(Counting(nnx.Rngs(0)), optax.sgd(0.1))
    with pytest.raises(ValueError, match="must change in its arrays alone"):
        hkv.nnx.train_step(nnx_loss, micro_batches=2)(state, *made[0])


class Growing(nn.Module):
    """A variable that changes its type in the first call."""

    @nn.compact
    def __call__(self, ids, train=False):
        seen = self.variable("seen", "mean", jnp.zeros, (), jnp.bfloat16)
        rows = hkv.linen.Embed(128, 4, optimizer=hkv.optim.sgd(0.1))(ids, train=train)
        if train:
            seen.value = rows.mean()
        return rows


def test_a_variable_that_does_not_keep_its_form_is_named():
    ids = np.arange(20, dtype=np.int32)
    state = fresh_state(ids, Growing())
    step = hkv.linen.train_step(
        lambda apply, ids: apply(ids, train=True).mean(), micro_batches=2, donate=False
    )
    with pytest.raises(ValueError, match=r"\['seen'\]\['mean'\] .*bfloat16.* got float32"):
        step(state, ids)


def test_micro_batches_of_keys_and_padded_features_are_cut_alike(rng):
    """Every array of an argument, 64-bit ids as well."""
    made = batches(rng)

    def padded(inputs):
        ids = hkv.Keys.from_numpy(inputs["seen"].astype(np.int64))
        valid = np.ones(inputs["seen"].shape, bool)
        return {"user": hkv.Keys.from_numpy(inputs["user"]), "seen": hkv.Padded(ids, valid)}

    one, other = Linen(made), Linen(made)
    one.run([(padded(inputs), labels) for inputs, labels in made], micro_batches=2)
    other.run(made, micro_batches=2)
    assert_same(one, other)
    assert isinstance(one.state.model, Model)


def jagged_and_padded(rng, parts, count):
    """Bags of `count` examples of each part, some empty: one after the other, and padded."""
    lengths = rng.integers(0, 4, (parts, count))
    valid = np.arange(3) < lengths[..., None]
    ids = rng.integers(0, 60, valid.shape).astype(np.int64) * 2**40
    bags = [
        hkv.Jagged.from_lists([own[kept] for own, kept in zip(*part, strict=True)], capacity=64)
        for part in zip(ids, valid, strict=True)
    ]
    padded = hkv.Padded(hkv.Keys.from_numpy(ids.reshape(-1, 3)), valid.reshape(-1, 3))
    return hkv.sharding.concatenate(bags), padded


@pytest.mark.parametrize("api", APIS)
def test_micro_batches_take_a_jagged_of_each_part(api, rng):
    """The same training as of bags that are padded."""
    made = batches(rng)
    pairs = [jagged_and_padded(rng, PARTS, len(made[0][1]) // PARTS) for _ in made]
    runs = []
    for kind in (0, 1):
        given = [
            ({**inputs, "seen": pair[kind]}, labels)
            for (inputs, labels), pair in zip(made, pairs, strict=True)
        ]
        runs.append(api(made))
        infos = runs[-1].run(given, micro_batches=PARTS)
        assert sum(int(each.inserted) for each in infos[0].tables.values()) > 60
    assert_same(*runs)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_each_device_takes_a_jagged_of_each_of_its_micro_batches(mode, rng):
    mesh = jax.make_mesh((2,), ("device",), devices=jax.devices("cpu")[:2])
    placement = Placement(mesh, mode=mode)

    def make():
        model = hkv.linen.EmbedBag(
            1024, 4, combiner="mean", optimizer=hkv.optim.sgd(0.1), axis_name="device"
        )
        ids = hkv.Keys.from_numpy(np.zeros((8, 3), np.int64))
        return hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=optax.sgd(0.1))

    def loss(call, bags, slopes):
        ids, more = bags, {}
        if isinstance(bags, hkv.Padded):
            ids, more = bags.ids, {"valid": bags.valid}
        return (call(ids, train=True, **more)[:, 0] * slopes).mean()

    step = hkv.linen.train_step(loss, micro_batches=PARTS, placement=placement)
    entries = []
    pairs = [jagged_and_padded(rng, 2 * PARTS, 8) for _ in range(3)]
    slopes = rng.normal(size=(3, 2 * PARTS * 8)).astype(np.float32)
    for kind in (0, 1):
        state = placement.create(make)
        for pair, own in zip(pairs, slopes, strict=True):
            batch = placement.put((pair[kind], own), micro_batches=PARTS)
            state, _ = step(state, *batch)
        exported = hkv.sharding.export_entries(placement.shards(table_of(state)))
        order = np.argsort(exported.keys)
        entries.append((exported.keys[order], exported.values[order]))
    np.testing.assert_array_equal(entries[0][0], entries[1][0])
    np.testing.assert_allclose(entries[0][1], entries[1][1], **NEAR)
    with pytest.raises(
        ValueError, match=r"one for each of 2 devices, .*put\(batch, micro_batches=\)"
    ):
        placement.put(pairs[0][0])


def test_bags_of_other_examples_than_the_arrays_are_refused():
    bags = hkv.Jagged.from_lists([[1, 2], [3]] * 3).for_parts(2)
    with pytest.raises(ValueError, match=r"must be a Jagged of each of the 2 .* \[8\] examples"):
        _micro_batches._cut((bags, np.zeros(8, np.float32)), 2)


class Bags(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, bags, train=False):
        layer = hkv.linen.EmbedBag(
            1024, 4, optimizer=hkv.optim.sgd(0.1), axis_name=self.axis_name, name="embed"
        )
        return layer(bags, train=train) * self.param("w", nn.initializers.ones, (4,))


@pytest.mark.parametrize("mode", ["one", "shard_map", "pmap"])
def test_bags_on_devices_are_of_as_many_parts_as_the_step_takes(mode):
    """Most of their ids would be lost: their shapes fit, and there is no array beside them."""
    one = hkv.Jagged.from_lists([[0]] * 4, capacity=24)
    all_bags = hkv.Jagged.from_lists([[3 * i, 3 * i + 1, 3 * i + 2] for i in range(16)])
    if mode == "one":
        placement, count, axis_name = None, 1, None
        put = functools.partial(jax.tree.map, jnp.asarray)
    else:
        mesh = jax.make_mesh((2,), ("device",), devices=jax.devices()[:2])
        placement, count, axis_name = hkv.sharding.Placement(mesh, mode=mode), 2, "device"
        put = None

    def made():
        def make():
            model = Bags(axis_name)
            return hkv.linen.TrainState.create(model, jax.random.key(0), one, tx=optax.sgd(0.0))

        return make() if placement is None else placement.create(make)

    def step_of(parts):
        return hkv.linen.train_step(
            lambda apply, bags: apply(bags, train=True).sum(),
            micro_batches=parts,
            placement=placement,
        )

    def bags_of(parts):
        bags = all_bags.for_parts(parts * count, capacity=48 // (parts * count))
        return put(bags) if placement is None else placement.put(bags, micro_batches=parts)

    for parts in (1, 2, 4):
        step = step_of(parts)
        for _ in range(2):
            _, info = step(made(), bags_of(parts))
            assert int(np.asarray(info.tables["embed/table"].inserted).reshape(-1)[0]) == 48
        for others in {1, 2, 4} - {parts}:
            state, bags = made(), bags_of(others)
            with pytest.raises(ValueError, match="train_step: .*Jagged"):
                step(state, bags)


def test_each_of_several_bags_of_one_shape_is_looked_at():
    """The first says nothing of the second. A loss that takes a slice cuts by itself."""
    good = jax.tree.map(jnp.asarray, hkv.Jagged.from_lists([[1, 2, 3], [4], [5, 6]]))
    bad = hkv.Jagged(good.ids, jnp.array([0, 3, 0, 3], jnp.int32))
    step = hkv.linen.train_step(
        lambda apply, one, other: apply(one, train=True).sum() + apply(other, train=True).sum()
    )

    def made():
        return hkv.linen.TrainState.create(Bags(), jax.random.key(0), good, tx=optax.sgd(0.0))

    for _ in range(2):
        state = made()
        with pytest.raises(ValueError, match="train_step: a Jagged must be one for all examples"):
            step(state, good, bad)
    step(made(), good, good)
    behind = hkv.Jagged(good.ids, good.row_splits[1:])  # the first bag is padding
    _, info = step(made(), behind, behind)
    assert int(info.tables["embed/table"].inserted) == 3
    sliced = hkv.linen.train_step(
        lambda apply, stacked: apply(jax.tree.map(lambda leaf: leaf[0], stacked), train=True).sum()
    )
    stacked = jax.tree.map(lambda *both: jnp.stack(both), good, good)
    _, info = sliced(made(), stacked)
    assert int(info.tables["embed/table"].inserted) == 6


def test_a_function_of_placement_is_warned_of_bags_for_micro_batches():
    """A lookup takes the first part alone; a step in micro-batches cuts them, and is not warned."""
    placement = hkv.sharding.Placement(jax.make_mesh((2,), ("device",), devices=jax.devices()[:2]))
    all_bags = hkv.Jagged.from_lists([[3 * i, 3 * i + 1, 3 * i + 2] for i in range(16)])
    one = hkv.Jagged.from_lists([[0]] * 4, capacity=24)

    def make():
        return hkv.linen.TrainState.create(
            Bags("device"), jax.random.key(0), one, tx=optax.sgd(0.0)
        )

    state = placement.create(make)
    step = hkv.linen.train_step(
        lambda apply, bags: apply(bags, train=True).sum(), micro_batches=2, placement=placement
    )
    apply = placement.run(lambda state, bags: state.apply(bags))
    bags = placement.put(all_bags.for_parts(4, capacity=12), micro_batches=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, _ = step(state, bags)
        assert apply(state, placement.put(all_bags.for_parts(2, capacity=24))).shape == (16, 4)
    with pytest.warns(UserWarning, match=r"Placement\.run: a Jagged has several parts on each"):
        apply(state, bags)
    with pytest.warns(UserWarning, match=r"Placement\.step: a Jagged has several parts on each"):
        placement.step(lambda state, bags: (state, None))(state, bags)
