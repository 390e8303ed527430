"""Layers whose tables lie on several devices train as those of one device."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import jax_hkv as hkv
from jax_hkv.sharding import Exchange, Placement

AXIS = "device"
BATCH, STEPS, DIM = 64, 12, 8
CAPACITY = 1 << 15
# With a larger eps than usual: Adam divides by the root of a square, so that the last bits of a
# gradient of almost nothing would be as large as those of any other.
OPTIMIZER = hkv.optim.adam(1e-2, eps=1e-3)
DENSE = optax.adam(1e-2, eps=1e-3)
MODES = ("shard_map", "pmap")
SELDOM = pytest.mark.slow  # what other tests show of smaller programs
ONCE = ("shard_map", pytest.param("pmap", marks=SELDOM))


def mesh_of(devices: int, *shape: int):
    names = ("node", AXIS)[-len(shape) :] if shape else (AXIS,)
    return jax.make_mesh(
        shape or (devices,),
        names,
        axis_types=(AxisType.Auto,) * len(names),
        devices=jax.devices("cpu")[:devices],
    )


def collection():
    return hkv.Collection(
        [
            hkv.TableConfig("users", CAPACITY, DIM, optimizer=OPTIMIZER),
            hkv.TableConfig("items", CAPACITY, DIM, optimizer=OPTIMIZER),
            hkv.TableConfig("words", CAPACITY, 4, optimizer=hkv.optim.adagrad(0.1)),
        ],
        [
            hkv.Feature("user", "users"),
            hkv.Feature("seen", "items", "mean"),
            hkv.Feature("item", "items", None),
            hkv.Feature("text", "words", "sqrtn"),
        ],
    )


class Linen(nn.Module):
    axis_name: object = None

    @nn.compact
    def __call__(self, batch, *, train=False):
        rows = hkv.linen.EmbedCollection(collection(), axis_name=self.axis_name)(
            {name: batch[name] for name in ("user", "seen", "item", "text")}, train=train
        )
        tags = hkv.linen.EmbedBag(
            CAPACITY, 4, optimizer=OPTIMIZER, axis_name=self.axis_name, unseen="learned"
        )(batch["tags"], valid=batch["valid"], weights=batch["weights"], train=train)
        one = hkv.linen.Embed(
            CAPACITY, 4, optimizer=OPTIMIZER, policy=hkv.Policy.LFU, axis_name=self.axis_name
        )(batch["one"], train=train)
        hidden = jnp.concatenate([*rows.values(), tags, one], axis=-1)
        hidden = nn.BatchNorm(use_running_average=not train, axis_name=bn_axis(self, train))(hidden)
        return nn.Dense(1)(nn.relu(nn.Dense(16)(hidden)))[:, 0]


def bn_axis(module, train):
    if not train or module.is_initializing() or module.axis_name is None:
        return None
    name = module.axis_name
    return name.axes if isinstance(name, Exchange) else name


class Nnx(nnx.Module):
    def __init__(self, rngs, axis_name=None):
        self.rows = hkv.nnx.EmbedCollection(collection(), axis_name=axis_name)
        self.tags = hkv.nnx.EmbedBag(
            CAPACITY, 4, optimizer=OPTIMIZER, axis_name=axis_name, unseen="learned"
        )
        self.one = hkv.nnx.Embed(
            CAPACITY, 4, optimizer=OPTIMIZER, policy=hkv.Policy.LFU, axis_name=axis_name
        )
        self.hidden = nnx.Linear(3 * DIM + 4 + 4 + 4, 16, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, batch, *, train=False):
        rows = self.rows(
            {name: batch[name] for name in ("user", "seen", "item", "text")}, train=train
        )
        tags = self.tags(batch["tags"], valid=batch["valid"], weights=batch["weights"], train=train)
        one = self.one(batch["one"], train=train)
        hidden = jnp.concatenate([*rows.values(), tags, one], axis=-1)
        return self.out(nnx.relu(self.hidden(hidden)))[:, 0]


class Small(nn.Module):
    axis_name: object = None

    @nn.compact
    def __call__(self, batch, *, train=False):
        layer = hkv.linen.Embed(1024, 4, optimizer=OPTIMIZER, axis_name=self.axis_name)
        return nn.Dense(1)(layer(batch["user"], train=train))[:, 0]


def small_state(placement, axis_name=AXIS):
    example = jax.tree.map(lambda leaf: leaf[: BATCH // placement.devices], next(batches()))
    return placement.create(
        lambda: hkv.linen.TrainState.create(Small(axis_name), jax.random.key(0), example, tx=DENSE)
    )


def ids(rng, *shape):
    return hkv.Keys.from_numpy(rng.zipf(1.3, shape).astype(np.uint64) * np.uint64(0x9E3779B9))


def batches(seed=0, count=STEPS):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield {
            "user": ids(rng, BATCH),
            "seen": ids(rng, BATCH, 5),
            "item": ids(rng, BATCH),
            "text": ids(rng, BATCH, 3),
            "tags": ids(rng, BATCH, 4),
            "valid": rng.random((BATCH, 4)) < 0.8,
            "weights": rng.random((BATCH, 4)).astype(np.float32),
            "one": ids(rng, BATCH),
            "labels": rng.integers(0, 2, BATCH).astype(np.float32),
        }


def loss_of(logits, batch):
    return optax.sigmoid_binary_cross_entropy(logits, batch["labels"]).mean()


def linen_loss(apply, batch):
    return loss_of(apply(batch, train=True), batch)


def nnx_loss(model, batch):
    return loss_of(model(batch, train=True), batch)


def tables_of(tree):
    found = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, hkv.Table))
    return [node for node in found if isinstance(node, hkv.Table)]


def entries(tables):
    exported = hkv.sharding.export_entries(tables)
    order = np.argsort(exported.keys)
    return [
        array[order]
        for array in jax.tree.leaves(
            (exported.keys, exported.scores, exported.values, exported.optimizer)
        )
    ]


def assert_equal_entries(one, parts, tolerance=1e-6):
    for actual, expected in zip(entries(parts), entries(one), strict=True):
        if actual.dtype.kind == "u":
            np.testing.assert_array_equal(actual, expected)
        else:
            np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)


def reports(infos):
    """What does not depend on how many devices there are."""
    counts = [{name: tuple(map(int, own)) for name, own in info.counts.items()} for info in infos]
    hits = [
        {
            name: (int(own.hits), int(own.inserted), int(own.unique))
            for name, own in i.tables.items()
        }
        for i in infos
    ]
    return counts, hits


def train_linen(placement=None, axis_name=None, count=STEPS, **options):
    model = Linen(axis_name)
    example = next(batches())
    if placement is not None:
        example = jax.tree.map(lambda leaf: leaf[: BATCH // placement.devices], example)

    def make():
        return hkv.linen.TrainState.create(model, jax.random.key(0), example, tx=DENSE)

    state = make() if placement is None else placement.create(make)
    step = hkv.linen.train_step(linen_loss, placement=placement, **options)
    infos = []
    for batch in batches(count=count):
        state, info = step(state, batch if placement is None else placement.put(batch))
        infos.append(info)
    return state, infos


def make_nnx(placement=None, axis_name=None):
    def make():
        return hkv.nnx.TrainState(Nnx(nnx.Rngs(0), axis_name), DENSE)

    return make() if placement is None else hkv.nnx.place(make, placement)


def train_nnx(placement=None, axis_name=None):
    state = make_nnx(placement, axis_name)
    step = hkv.nnx.train_step(nnx_loss, placement=placement)
    infos = [step(state, b if placement is None else placement.put(b)) for b in batches()]
    return state, infos


@functools.cache
def reference(kind):
    state, infos = {"linen": train_linen, "nnx": train_nnx}[kind]()
    return (nnx.state(state) if kind == "nnx" else state), infos


def assert_equal_training(kind, placement, state, infos, tolerance=1e-6):
    expected, expected_infos = reference(kind)
    for one, parts in zip(
        tables_of(expected), zip(*map(tables_of, placement.shards(state)), strict=True), strict=True
    ):
        assert_equal_entries(one, list(parts), tolerance)
    np.testing.assert_allclose(
        [float(info.loss) for info in infos],
        [float(info.loss) for info in expected_infos],
        rtol=1e-5,
    )
    assert reports(infos) == reports(expected_infos)


@pytest.mark.parametrize(
    ("mode", "devices"),
    [
        ("shard_map", 8),
        pytest.param("pmap", 8, marks=SELDOM),
        pytest.param("shard_map", 1, marks=SELDOM),
        pytest.param("pmap", 2, marks=SELDOM),
    ],
)
def test_a_linen_model_trains_on_several_devices_as_on_one(mode, devices):
    placement = Placement(mesh_of(devices), mode=mode)
    state, infos = train_linen(placement, AXIS)
    assert_equal_training("linen", placement, state, infos)


@pytest.mark.parametrize("mode", ONCE)
def test_an_nnx_model_trains_on_several_devices_as_on_one(mode):
    placement = Placement(mesh_of(4), mode=mode)
    state, infos = train_nnx(placement, AXIS)
    assert_equal_training("nnx", placement, nnx.state(state), infos)


def test_an_exchange_of_two_levels_trains_as_one_device():
    placement = Placement(mesh_of(8, 2, 4))
    state, infos = train_linen(placement, ("node", AXIS))
    assert_equal_training("linen", placement, state, infos)


def test_keys_that_overflow_take_a_second_round_and_train_as_on_one_device():
    placement = Placement(mesh_of(8))
    exchange = Exchange(AXIS, distinct=0.02, slack=0.1)
    state, infos = train_linen(placement, exchange)
    assert_equal_training("linen", placement, state, infos)
    overflow = [int(own.overflow) for info in infos for own in info.tables.values()]
    assert min(max(overflow), len(overflow)) > 0


def test_replicas_train_as_one_device_and_stay_equal():
    placement = Placement(mesh_of(4))
    state, infos = train_linen(placement, Exchange(AXIS, replicas=True))
    expected, expected_infos = reference("linen")
    assert placement.replicas_agree(state.tables)
    for one, replica in zip(
        tables_of(expected), tables_of(placement.shards(state)[3]), strict=True
    ):
        assert_equal_entries(one, replica)
    assert reports(infos) == reports(expected_infos)


@pytest.mark.parametrize("mode", ONCE)
def test_gradients_are_clipped_by_the_norm_over_all_devices(mode):
    expected, expected_infos = train_linen(count=4, max_norm=0.05)
    placement = Placement(mesh_of(4), mode=mode)
    state, infos = train_linen(placement, AXIS, count=4, max_norm=0.05)
    for one, parts in zip(
        tables_of(expected), zip(*map(tables_of, placement.shards(state)), strict=True), strict=True
    ):
        assert_equal_entries(one, list(parts))
    np.testing.assert_allclose(
        [float(info.loss) for info in infos], [float(info.loss) for info in expected_infos], 1e-5
    )


@SELDOM
def test_both_modes_give_the_same_bits():
    states = []
    for mode in MODES:
        placement = Placement(mesh_of(4), mode=mode)
        state, _ = train_linen(placement, AXIS, count=6)
        states.append([jax.tree.map(np.asarray, own) for own in placement.shards(state)])
    first, second = map(jax.tree.leaves, states)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def scaled_linen(placement, batch):
    model = Linen(AXIS)
    example = jax.tree.map(lambda leaf: leaf[: BATCH // placement.devices], batch)
    return placement.create(
        lambda: hkv.linen.TrainState.create(
            model,
            jax.random.key(0),
            example,
            tx=DENSE,
            loss_scale=hkv.optim.LossScale.create(1024.0),
        )
    )


def test_a_step_is_skipped_on_all_devices_if_one_has_a_gradient_that_is_not_finite():
    placement = Placement(mesh_of(4))
    first, second = batches(count=2)
    state = scaled_linen(placement, first)
    step = hkv.linen.train_step(linen_loss, placement=placement)
    state, info = step(state, placement.put(first))
    assert bool(info.finite)
    before = jax.tree.map(np.asarray, (state.params, state.variables))
    rows = [
        entries(list(parts)) for parts in zip(*map(tables_of, placement.shards(state)), strict=True)
    ]
    second["labels"][-1] = np.nan  # of the last device
    seen = first | {"labels": second["labels"]}  # the ids are there already
    state, info = step(state, placement.put(seen))
    assert not bool(info.finite)
    assert float(state.loss_scale.scale) == 512.0
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.variables))
    after = [
        entries(list(parts)) for parts in zip(*map(tables_of, placement.shards(state)), strict=True)
    ]
    for old, new in zip(rows, after, strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        for a, b in zip(old[2:], new[2:], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_strict_exchange_that_overflows_raises_and_leaves_the_state_as_it_was():
    placement = Placement(mesh_of(8))
    exchange = Exchange(AXIS, distinct=0.02, slack=0.1, strict=True)
    batch = next(batches())
    model = Linen(exchange)
    example = jax.tree.map(lambda leaf: leaf[: BATCH // 8], batch)
    state = placement.create(
        lambda: hkv.linen.TrainState.create(model, jax.random.key(0), example, tx=DENSE)
    )
    params = jax.tree.map(np.asarray, state.params)
    step = hkv.linen.train_step(linen_loss, placement=placement)
    with pytest.raises(
        hkv.sharding.ExchangeOverflow, match="found no room .* raise distinct="
    ) as e:
        step(state, placement.put(batch))
    after, info = e.value.outputs
    jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(np.asarray, after.params))
    assert all(int(jnp.sum(table.occupancy)) == 0 for table in tables_of(after.tables))
    assert not bool(info.finite)
    # Where nobody looks, or can raise, the report says it.
    unchecked = hkv.linen.train_step(linen_loss, placement=placement, check_overflow=False)
    after, seen = unchecked(after, placement.put(batch))
    assert not seen.finite and sum(map(int, seen.strict_overflow.values())) > 0
    with pytest.raises(TypeError, match="check_overflow must be True or False"):
        hkv.nnx.train_step(linen_loss, placement=placement, check_overflow=None)
    again = jax.tree.map(lambda leaf: leaf[None], placement.put(batch))
    _, scanned = jax.lax.scan(step, after, again)
    for where, count in info.strict_overflow.items():
        assert scanned.strict_overflow[where].tolist() == [int(count)]
    assert scanned.finite.tolist() == [False]


# --- Whole states on other devices ---------------------------------------------------------------


def dense_of(state):
    """The bits of all that is no table."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, hkv.Table))
    dense = [leaf for leaf in leaves if not isinstance(leaf, hkv.Table)]
    keys = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in dense]
    data = [
        np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        for leaf, is_key in zip(dense, keys, strict=True)
    ]
    return [leaf.tobytes() for leaf in data]


@SELDOM
def test_a_linen_state_goes_to_other_devices_and_back_and_trains_on():
    eight, two = Placement(mesh_of(8)), Placement(mesh_of(2), mode="pmap")
    state, _ = train_linen(eight, AXIS, count=4)
    before = [entries(parts) for parts in zip(*map(tables_of, eight.shards(state)), strict=True)]
    moved, counts = hkv.sharding.reshard(
        state, train_linen(two, AXIS, count=0)[0], source=eight, target=two
    )
    alone, _ = hkv.sharding.reshard(moved, train_linen(count=0)[0], source=two)
    again, _ = hkv.sharding.reshard(alone, train_linen(eight, AXIS, count=0)[0], target=eight)

    assert len(counts) == len(before) == 4
    assert {path.rpartition("/")[0] for path in counts} == {
        f"tables/{layer}" for layer in ("EmbedCollection_0", "EmbedBag_0", "Embed_0")
    }
    for own, (keys, *_) in zip(counts.values(), before, strict=True):
        assert int(own.inserted) == len(keys) > 0 and int(own.evicted + own.refused) == 0
    for placement, other in ((two, moved), (None, alone), (eight, again)):
        shards = [other] if placement is None else placement.shards(other)
        for expected, parts in zip(before, zip(*map(tables_of, shards), strict=True), strict=True):
            for a, b in zip(expected, entries(parts), strict=True):
                assert a.tobytes() == b.tobytes()
        assert dense_of(shards[0]) == dense_of(eight.shards(state)[0])
    batch = next(batches(seed=9))
    step = hkv.linen.train_step(linen_loss, placement=eight)
    (_, info), (_, expected) = (step(each, eight.put(batch)) for each in (again, state))
    assert float(info.loss) == float(expected.loss)
    assert reports([info]) == reports([expected])


def test_an_nnx_state_with_replicas_goes_to_one_device():
    four = Placement(mesh_of(4))

    class Seen(nnx.Module):
        def __init__(self, own, everyones):
            self.users = hkv.nnx.Embed(1024, 4, optimizer=OPTIMIZER, axis_name=own)
            self.words = hkv.nnx.Embed(1024, 4, optimizer=OPTIMIZER, axis_name=everyones)
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
            self.out = nnx.Linear(8, 1, rngs=nnx.Rngs(0))

        def __call__(self, batch, *, train=False):
            rows = [layer(batch["user"], train=train) for layer in (self.users, self.words)]
            hidden = self.dropout(jnp.concatenate(rows, -1), deterministic=not train)
            return self.out(hidden)[:, 0]

    def make(*axes):
        return hkv.nnx.TrainState(Seen(*axes), DENSE)

    state = hkv.nnx.place(lambda: make(AXIS, Exchange(AXIS, replicas=True)), four)
    step = hkv.nnx.train_step(nnx_loss, placement=four)
    for batch in batches(count=3):
        step(state, four.put(batch))
    old, target = nnx.state(state), make(None, None)

    values, counts = hkv.sharding.reshard(old, nnx.state(make(None, None)), source=four)
    nnx.update(target, values)
    users, words = (len(entries([own])[0]) for own in tables_of(nnx.state(target)))
    assert users == words == sum(int(own.inserted) for own in counts.values()) // 2 > 0
    assert dense_of(nnx.state(target)) == dense_of(four.shards(old)[0])


def test_replicas_and_what_the_host_holds_go_from_two_devices_to_four(monkeypatch):
    two, four = Placement(mesh_of(2)), Placement(mesh_of(4))
    keys = np.arange(100, dtype=np.int32)

    def make():
        host = {"epoch": 0, "rate": 0.0, "is_warm": False, "seen": np.zeros(3)}
        return {"table": hkv.create(512, 4, replicas=True)} | host

    def start(placement):
        made = make()
        return made | {"table": placement.create(lambda: made["table"])}

    find_or_insert = jax.jit(lambda table: hkv.find_or_insert(table, keys)[0])
    state = start(two) | {"epoch": 2**40, "rate": 0.1, "is_warm": True, "seen": np.arange(3.0)}
    state["table"] = two.run(find_or_insert)(state["table"])
    moved, counts = hkv.sharding.reshard(state, start(four), source=two, target=four)
    expected = entries(two.shards(state["table"])[:1])
    for shard in four.shards(moved["table"]):
        for a, b in zip(entries([shard]), expected, strict=True):
            assert a.tobytes() == b.tobytes()
    assert int(counts["table"].inserted) == 4 * 100
    for name in ("epoch", "rate", "is_warm"):
        assert type(moved[name]) is type(state[name]) and moved[name] == state[name]
    assert moved["seen"].tolist() == [0, 1, 2] and moved["seen"] is not state["seen"]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="must be NumPy arrays, the same in all of the 2"):
        hkv.sharding.reshard(make(), make())
    with pytest.raises(ValueError, match="lie on the 2 devices .* got a leaf of type int"):
        two.shards(state)


def test_states_that_do_not_fit_are_told_apart_before_anything_moves():
    two = Placement(mesh_of(2))
    make = functools.partial(hkv.create, 128, 4)
    state, few = {"table": make(), "bias": jnp.ones(3, "float32")}, jnp.ones(2, "float32")
    for fresh, options, kind, message in (
        ({"table": make()}, {}, ValueError, r"missing: \['bias'\], unknown: \[\]"),
        (state | {"bias": few}, {}, ValueError, r"at bias, float32\[3\], got float32\[2\]"),
        (state | {"bias": make()}, {}, ValueError, r"at bias, float32\[3\], got a table"),
        (state | {"table": hkv.create(128, 5)}, {}, ValueError, "same dim, dtype and optimizer"),
        (state, {"source": 2}, TypeError, "source must be a jax_hkv.sharding.Placement, or None"),
        (state, {"source": two}, ValueError, "the state must lie on the 2 devices"),
    ):
        with pytest.raises(kind, match=message):
            hkv.sharding.reshard(state, fresh, **options)
    assert not state["table"].values.is_deleted()
    named = {"a/b": jnp.ones(1), "a": {"b": jnp.zeros(2)}, "table": make()}
    moved, counts = hkv.sharding.reshard(named, jax.tree.map(jnp.copy, named))
    assert dense_of(moved) == dense_of(named) and [*counts] == ["['table']"]


@pytest.mark.parametrize("mode", ONCE)
def test_evaluation_gives_the_rows_of_all_devices_and_changes_nothing(mode):
    placement = Placement(mesh_of(4), mode=mode)
    state, _ = train_linen(placement, AXIS)
    batch = next(batches(seed=5))
    expected = reference("linen")[0].apply(batch)
    evaluate = placement.run(lambda state, batch: state.apply(batch))
    before = jax.tree.map(np.asarray, state.tables)
    actual = np.asarray(evaluate(state, placement.put(batch))).reshape(-1)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.tables))


@SELDOM
def test_an_nnx_model_is_evaluated_on_all_devices():
    placement = Placement(mesh_of(4))
    state, _ = train_nnx(placement, AXIS)
    batch = next(batches(seed=5))
    model = make_nnx().model
    graph = nnx.graphdef(model)
    expected = nnx.merge(graph, reference("nnx")[0]["model"])(batch)
    evaluate = hkv.nnx.run(lambda model, batch: model(batch), placement)
    actual = evaluate(state.model, placement.put(batch))
    np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_batches_of_other_data_are_not_traced_again():
    traces = []

    def counted(apply, batch):
        traces.append(None)
        return linen_loss(apply, batch)

    placement = Placement(mesh_of(2))
    state = small_state(placement)
    step = hkv.linen.train_step(counted, placement=placement)
    seen = []
    for batch in batches(count=3):
        state, _ = step(state, placement.put(batch))
        seen.append(len(traces))
    assert seen[0] == seen[1] == seen[2]


def test_aux_has_a_leading_axis_for_the_devices():
    placement = Placement(mesh_of(2))
    state = small_state(placement)

    def loss(apply, batch):
        return linen_loss(apply, batch), {"labels": batch["labels"]}

    step = hkv.linen.train_step(loss, placement=placement, has_aux=True)
    batch = next(batches())
    _, info = step(state, placement.put(batch))
    np.testing.assert_array_equal(info.aux["labels"].reshape(-1), batch["labels"])


def test_a_layer_without_an_axis_name_in_a_step_of_many_devices_is_an_error():
    placement = Placement(mesh_of(2))
    state = small_state(placement, None)
    step = hkv.linen.train_step(linen_loss, placement=placement)
    with pytest.raises(ValueError, match="without an axis name.* axis_name='device'"):
        step(state, placement.put(next(batches())))


@pytest.mark.parametrize("mode", ONCE)
def test_a_step_of_many_devices_that_trains_no_table_is_an_error(mode):
    placement = Placement(mesh_of(2), mode=mode)
    state, batch = small_state(placement), placement.put(next(batches()))
    step = hkv.linen.train_step(lambda apply, x: loss_of(apply(x), x), placement=placement)
    with pytest.raises(ValueError, match=r"none of \['Embed_0/table'\]: call .*train=True"):
        step(state, batch)


def test_a_batch_that_was_not_put_says_where_it_belongs():
    placement = Placement(mesh_of(4))
    state, step = small_state(placement), hkv.linen.train_step(linen_loss, placement=placement)
    batch = next(batches())
    elsewhere = jax.tree.map(jnp.asarray, batch)  # on one device
    named = r"train_step: arguments\[0\]\['item'\].* must lie on the 4 devices.*placement.put"
    for wrong in (batch, elsewhere):
        with pytest.raises(ValueError, match=named):
            step(state, wrong)
    bags = [hkv.Jagged.from_lists([[1, 2], [3]], capacity=4)] * 4
    with pytest.raises(ValueError, match="must lie on the 4 devices"):
        step(state, hkv.sharding.concatenate(bags))
    step(state, placement.put(batch))


def test_a_layer_outside_of_its_mesh_says_where_it_belongs():
    layer = hkv.linen.Embed(128, 4, axis_name=AXIS)
    with pytest.raises(NameError, match=r"inside jax\.shard_map or jax\.pmap"):
        layer.init(jax.random.key(0), jnp.arange(4))


def test_a_layer_over_other_axes_than_the_placement_is_an_error():
    placement = Placement(mesh_of(8, 2, 4))
    state = small_state(placement, AXIS)
    step = hkv.linen.train_step(linen_loss, placement=placement)
    with pytest.raises(ValueError, match="looked up over the axes.*name the same axes"):
        step(state, placement.put(next(batches())))


def test_an_optimizer_of_one_device_says_who_updates_a_table_of_several():
    placement = Placement(mesh_of(2))

    def step(table, keys):
        table, result = hkv.sharding.find_or_insert(table, keys, axis_name=AXIS)
        return OPTIMIZER.update(table, result, result.values), 0

    table = placement.create(lambda: OPTIMIZER.init(hkv.create(128, 4)))
    with pytest.raises(TypeError, match=r"got ShardedResult.*jax_hkv\.sharding\.update"):
        placement.step(step)(table, placement.put(np.arange(4, dtype=np.int32)))


@pytest.mark.parametrize("mode", MODES)
def test_padded_batches_train_as_one_batch_without_padding(mode):
    """As docs/sharding.md says: the sum of a device's losses by the mean number of examples."""

    def loss_of(apply, batch, labels, total):
        logits = apply(batch, train=True)
        losses = optax.sigmoid_binary_cross_entropy(logits, labels)
        return jnp.sum(losses, where=batch["real"]) / total(jnp.sum(batch["real"]))

    class Masked(nn.Module):
        axis_name: str | None = None

        @nn.compact
        def __call__(self, batch, *, train=False):
            layer = hkv.linen.Embed(1024, 4, optimizer=hkv.optim.sgd(1.0), axis_name=self.axis_name)
            return nn.Dense(1)(layer(batch["ids"], valid=batch["real"], train=train))[:, 0]

    rng = np.random.default_rng(0)
    real = np.repeat([1, 1, 0, 1], 4) * (np.arange(16) % 5 != 3) > 0
    ids = rng.integers(0, 30, 16, dtype=np.int32)
    batch, labels = {"ids": ids, "real": real}, (ids % 2).astype(np.float32)
    placement = Placement(mesh_of(4), mode=mode)

    def make(axis_name=None, count=16):
        inputs = {"ids": np.zeros(count, np.int32), "real": np.ones(count, bool)}
        return hkv.linen.TrainState.create(
            Masked(axis_name), jax.random.key(0), inputs, tx=optax.sgd(1.0)
        )

    def mean_of_devices(count):
        return jax.lax.pmean(count, AXIS)

    one, own = hkv.linen.train_step(functools.partial(loss_of, total=lambda n: n))(
        make(), batch, labels
    )
    many, info = hkv.linen.train_step(
        functools.partial(loss_of, total=mean_of_devices), placement=placement
    )(placement.create(lambda: make(AXIS, 4)), *placement.put((batch, labels)))
    np.testing.assert_allclose(info.loss, own.loss, rtol=1e-6)
    params = placement.shards(many.params)[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), params, one.params)
    rows = [
        hkv.sharding.export_entries(tables)
        for tables in (
            one.tables["Embed_0"]["table"],
            placement.shards(many.tables["Embed_0"]["table"]),
        )
    ]
    order = [np.argsort(each.keys) for each in rows]
    np.testing.assert_array_equal(rows[0].keys[order[0]], rows[1].keys[order[1]])
    np.testing.assert_allclose(rows[0].values[order[0]], rows[1].values[order[1]], rtol=1e-5)
