"""Training steps of models with tables: the same bits whatever transformation they are in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re

import flax
import flax.linen as nn
import gpu_programs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv

DIM, BATCH = 8, 48
OPTIMIZER = hkv.optim.adagrad(0.1)  # no quotient of small gradients, which would enlarge rounding
# LFU: its scores count occurrences, however they are divided over lookups.
TABLE = {"capacity": 512, "dim": DIM, "policy": hkv.Policy.LFU, "optimizer": OPTIMIZER}
COLLECTION = hkv.Collection(
    [hkv.TableConfig("users", **TABLE), hkv.TableConfig("items", **TABLE)],
    [hkv.Feature("user", "users"), hkv.Feature("seen", "items", "mean")],
)
SAVE_ROWS = jax.checkpoint_policies.save_only_these_names(hkv.ROWS_NAME)


class Block(nn.Module):
    @nn.compact
    def __call__(self, inputs, train):
        rows = hkv.linen.EmbedCollection(COLLECTION)(inputs, train=train)
        return nn.relu(nn.Dense(16)(jnp.concatenate([rows["user"], rows["seen"]], axis=-1)))


class Model(nn.Module):
    is_remat: bool = False

    @nn.compact
    def __call__(self, inputs, train=False):
        block = nn.remat(Block, policy=SAVE_ROWS, static_argnums=2) if self.is_remat else Block
        return nn.Dense(1)(block(name="block")(inputs, train))[:, 0]


class NnxModel(nnx.Module):
    def __init__(self, rngs, **options):
        self.embed = hkv.nnx.EmbedCollection(COLLECTION, **options)
        self.dense = nnx.Linear(2 * DIM, 1, rngs=rngs)

    def __call__(self, inputs, train=False):
        rows = self.embed(inputs, train=train)
        return self.dense(jnp.concatenate([rows["user"], rows["seen"]], axis=-1))[:, 0]


def loss_of(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def loss_fn(apply, inputs, labels):
    return loss_of(apply(inputs, train=True), labels)


def batches(rng, count=3):
    made = []
    for _ in range(count):
        inputs = {
            "user": rng.integers(0, 60, BATCH, dtype=np.int32),
            "seen": rng.integers(0, 60, (BATCH, 3), dtype=np.int32),
        }
        made.append((inputs, (rng.random(BATCH) < 0.5).astype(np.float32)))
    return made


def fresh_state(inputs, model=None, **options):
    options = {"tx": optax.sgd(0.1), **options}
    return hkv.linen.TrainState.create(model or Model(), jax.random.key(0), inputs, **options)


def run(state, made, loss=loss_fn):
    step = hkv.linen.train_step(loss, donate=False)
    infos = []
    for batch in made:
        state, info = step(state, *batch)
        infos.append(info)
    return state, infos


def table_of(state):
    (table,) = jax.tree.leaves(state.tables, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    return table


def assert_equal_trees(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_same_training(one, other, *, but=()):
    """Keys, scores and slots in bits; rows and parameters to the rounding of two executables."""
    for leaf in ("keys", "scores", "digests", "clock"):
        if leaf not in but:
            first, second = (getattr(table_of(state).index, leaf) for state in (one, other))
            np.testing.assert_array_equal(first, second, err_msg=leaf)
    pairs = [(one.params, other.params), (table_of(one).values, table_of(other).values)]
    for first, second in zip(*map(jax.tree.leaves, zip(*pairs, strict=True)), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6, atol=1e-6)


def counts(infos):
    """What became of the keys, summed over the steps and tables."""
    fields = ("hits", "inserted", "evicted", "refused")
    tables = [metrics for info in infos for metrics in info.tables.values()]
    return {field: sum(int(getattr(each, field)) for each in tables) for field in fields}


class LateTower(nn.Module):
    """A second table, which is looked up in training only."""

    @nn.compact
    def __call__(self, ids, train=False):
        embed = {"capacity": 128, "features": 4, "optimizer": hkv.optim.sgd(0.1)}
        rows = hkv.linen.Embed(**embed, name="first")(ids, train=train)
        if train:
            rows += hkv.linen.Embed(**embed, seed=1, name="second")(ids, train=train)
        return rows


@pytest.mark.parametrize("kind", ["frozen", "late"])
def test_tables_come_back_from_a_step_in_whatever_form_they_went_into_it(kind):
    """Frozen dicts of Flax, and a layer that `init` did not call."""
    ids = np.arange(20, dtype=np.int32)
    model = LateTower() if kind == "late" else hkv.linen.Embed(128, 4, optimizer=OPTIMIZER)
    state = fresh_state(ids, model)
    if kind == "frozen":
        state = dataclasses.replace(state, tables=flax.core.freeze(state.tables))
    step = hkv.linen.train_step(
        lambda apply, ids: jnp.square(apply(ids, train=True) - 1).mean(), donate=False
    )
    losses = []
    for number in range(2):
        is_new = kind == "late" and number == 0
        with pytest.warns(match="made anew") if is_new else contextlib.nullcontext():
            state, info = step(state, ids)
        losses.append(float(info.loss))
        assert all(int(own.skipped) == 0 for own in info.tables.values())
    assert losses[1] < losses[0] and len(info.tables) == (2 if kind == "late" else 1)
    assert all(int(own.hits) == 20 for own in info.tables.values())


@pytest.fixture
def made(rng):
    return batches(rng)


@pytest.fixture
def expected(made):
    return run(fresh_state(made[0][0]), made)


def test_two_runs_of_one_executable_give_the_same_bits(made):
    step = hkv.linen.train_step(loss_fn, donate=False)
    states = [fresh_state(made[0][0]) for _ in range(2)]
    for batch in made:
        states = [step(state, *batch)[0] for state in states]
    assert_equal_trees(*states)


def test_a_step_without_jit_trains_alike(made, expected):
    with jax.disable_jit():
        state, infos = run(fresh_state(made[0][0]), made)
    assert_same_training(state, expected[0])
    assert counts(infos) == counts(expected[1])


def test_a_scan_over_steps_trains_alike(made, expected):
    step = hkv.linen.train_step(loss_fn, donate=False)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *made)
    state, infos = jax.lax.scan(lambda s, b: step(s, *b), fresh_state(made[0][0]), stacked)
    assert_same_training(state, expected[0])
    losses = [info.loss for info in expected[1]]
    np.testing.assert_allclose(infos.loss, losses, rtol=1e-6)


def test_a_scan_over_nnx_steps_trains_alike(made):
    """In one program, with the state's arrays as the carry."""

    def nnx_loss(model, inputs, labels):
        return loss_of(model(inputs, train=True), labels)

    step = hkv.nnx.train_step(nnx_loss, donate=False)
    one, other = (hkv.nnx.TrainState(NnxModel(nnx.Rngs(0)), optax.sgd(0.1)) for _ in range(2))
    losses = [float(step(one, *batch).loss) for batch in made]
    graph, values = nnx.split(other)

    def turn(values, batch):
        state = nnx.merge(graph, values)
        info = step(state, *batch)
        return nnx.state(state), info.loss

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *made)
    values, scanned = jax.jit(lambda v, b: jax.lax.scan(turn, v, b))(values, stacked)
    np.testing.assert_allclose(scanned, losses, rtol=1e-6)
    nnx.update(other, values)
    for left, right in zip(*(jax.tree.leaves(nnx.state(own)) for own in (one, other)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)


def test_an_nnx_step_takes_a_state_that_flax_has_cached(made):
    """By ``nnx.cached_partial``: the same bits, the state itself is trained, traced once more."""
    traced = []

    def nnx_loss(model, inputs, labels):
        traced.append(model)
        return loss_of(model(inputs, train=True), labels)

    step = hkv.nnx.train_step(nnx_loss)
    one, other = (hkv.nnx.TrainState(NnxModel(nnx.Rngs(0)), optax.sgd(0.1)) for _ in range(2))
    infos = [step(one, *batch) for batch in made]
    once = len(traced)
    cached = nnx.cached_partial(step, other)
    assert_equal_trees([cached(*batch) for batch in made], infos)
    assert_equal_trees(nnx.state(one), nnx.state(other))
    assert len(traced) == 2 * once


def test_remat_trains_alike_and_inserts_once(made, expected):
    state, infos = run(fresh_state(made[0][0], Model(is_remat=True)), made)
    assert_same_training(state, expected[0])
    assert counts(infos) == counts(expected[1])


def micro_batched(apply, inputs, labels):
    """The same batch in three lookups, whose gradients are applied once."""
    losses = []
    for part in range(3):
        own = jax.tree.map(lambda leaf: leaf[part::3], (inputs, labels))  # noqa: B023
        losses.append(loss_of(apply(own[0], train=True), own[1]))
    return sum(losses) / 3


def test_micro_batches_train_alike(made, expected):
    """Lookups of the parts come to what one lookup comes to; only the clock ticks more often."""
    ordered = [
        jax.tree.map(lambda leaf: np.concatenate([leaf[part::3] for part in range(3)]), batch)
        for batch in made
    ]
    # The users of all parts come before the items of any: each part is a lookup of both.
    state, infos = run(fresh_state(made[0][0]), made, micro_batched)
    whole, whole_infos = run(fresh_state(made[0][0]), ordered)
    assert_same_entries(table_of(state), table_of(whole))
    np.testing.assert_allclose(
        *([info.loss for info in each] for each in (infos, whole_infos)), rtol=1e-6
    )
    assert counts(infos)["inserted"] == counts(expected[1])["inserted"]


def assert_same_entries(one, other):
    """Keys and scores in bits, rows to rounding, wherever in their bucket they are."""
    found = []
    for table in (one, other):
        entries = hkv.export_batch(table, 0, table.capacity)
        number = int(entries.count)
        keys = entries.keys.to_numpy()[:number]
        order = np.argsort(keys)
        scores = entries.scores.to_numpy()[:number]
        found.append((keys[order], scores[order], np.asarray(entries.values)[:number][order]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize("is_remat", [False, True])
def test_statuses_and_slots_of_a_lookup_are_those_without_jit(made, is_remat):
    """What the layers record, by position."""
    model = Model(is_remat)
    variables = model.init(jax.random.key(0), made[0][0])

    def lookups(variables, inputs):
        _, updated = model.apply(variables, inputs, train=True, mutable=hkv.linen.MUTABLE)
        (lookup,) = jax.tree.leaves(
            updated["lookups"], is_leaf=lambda leaf: isinstance(leaf, hkv.linen.Lookup)
        )
        result = lookup.result
        return result.keys.words, result.slots, result.status, result.unique_slots, result.counts

    eager = lookups(variables, made[0][0])
    assert_equal_trees(eager, jax.jit(lookups)(variables, made[0][0]))
    assert set(np.unique(eager[2])) == {hkv.Status.FOUND, hkv.Status.INSERTED}


class Recurrent(nn.Module):
    """Looks up one id a step of a sequence, inside nn.scan."""

    @nn.compact
    def __call__(self, ids, train=False):
        class Cell(nn.Module):
            @nn.compact
            def __call__(self, carry, ids):
                layer = hkv.linen.Embed(512, DIM, optimizer=OPTIMIZER)
                carry = jnp.tanh(nn.Dense(DIM)(carry) + layer(ids, train=train))
                return carry, None

        carry = jnp.zeros((ids.shape[0], DIM))
        # nn.scan cannot create what it carries (no Flax module's statistics either).
        initializing = self.is_initializing()
        cell = (
            Cell
            if initializing
            else nn.scan(
                Cell,
                variable_broadcast="params",
                variable_carry="tables",
                variable_axes={"lookups": 0, "perturbations": 0},
                split_rngs={"params": False},
                in_axes=1,
            )
        )
        carry, _ = cell(name="cell")(carry, ids[:, 0] if initializing else ids)
        return nn.Dense(1)(carry)[:, 0]


class Unrolled(nn.Module):
    @nn.compact
    def __call__(self, ids, train=False):
        class Cell(nn.Module):
            def setup(self):
                self.Embed_0 = hkv.linen.Embed(512, DIM, optimizer=OPTIMIZER)
                self.Dense_0 = nn.Dense(DIM)

            def __call__(self, carry, ids):
                return jnp.tanh(self.Dense_0(carry) + self.Embed_0(ids, train=train))

        carry, cell = jnp.zeros((ids.shape[0], DIM)), Cell(name="cell")
        for number in range(ids.shape[1]):
            carry = cell(carry, ids[:, number])
        return nn.Dense(1)(carry)[:, 0]


def test_a_layer_inside_nn_scan_trains_as_the_unrolled_one(rng):
    """The lookups of all turns are stacked; their gradients are applied once."""
    sequences = [
        (rng.integers(0, 60, (BATCH, 5), dtype=np.int32),
         (rng.random(BATCH) < 0.5).astype(np.float32))
        for _ in range(3)
    ]  # fmt: skip
    scanned, infos = run(fresh_state(sequences[0][0], Recurrent()), sequences)
    unrolled, expected = run(fresh_state(sequences[0][0], Unrolled()), sequences)
    assert_same_training(scanned, unrolled)
    assert counts(infos) == counts(expected) and counts(infos)["inserted"] == 60
    np.testing.assert_allclose(
        *([info.loss for info in each] for each in (infos, expected)), rtol=1e-6
    )


def test_a_step_counts_the_ids_of_each_table(made):
    """By the names that were declared, though they are one physical table; linen and nnx."""
    _, linen_infos = run(fresh_state(made[0][0]), made)
    _, nnx_infos = nnx_run(NnxModel(nnx.Rngs(0)), made)
    seen = {"users": set(), "items": set()}
    for (inputs, _), one, other in zip(made, linen_infos, nnx_infos, strict=True):
        ids = {"users": set(inputs["user"].tolist()), "items": set(inputs["seen"].ravel().tolist())}
        for name, own in ids.items():
            expected = hkv.Counts(len(own), len(own & seen[name]), len(own - seen[name]), 0, 0, 0)
            linen_name = f"block/EmbedCollection_0/{name}"
            for found in (one.counts[linen_name], other.counts[f"embed/{name}"]):
                assert jax.tree.map(int, found) == expected
            seen[name] |= own
        assert set(one.counts) == {f"block/EmbedCollection_0/{name}" for name in ids}


def test_evictions_and_rejections_are_counted_by_the_table_whose_ids_asked(rng):
    """In a table that is too small for both, their sum is that of the physical table."""
    settings = {"capacity": 64, "dim": DIM, "optimizer": OPTIMIZER}
    settings["admission"] = hkv.admission.probability(0.8)
    collection = hkv.Collection(
        [hkv.TableConfig("users", **settings), hkv.TableConfig("items", **settings)],
        [hkv.Feature("user", "users"), hkv.Feature("seen", "items", None)],
    )
    state = hkv.linen.TrainState.create(
        hkv.linen.EmbedCollection(collection),
        jax.random.key(0),
        {name: np.zeros((BATCH,), np.int32) for name in ("user", "seen")},
        tx=optax.sgd(0.1),
    )
    step = hkv.linen.train_step(
        lambda apply, ids: sum(jnp.sum(rows) for rows in apply(ids, train=True).values())
    )
    for _ in range(4):
        ids = {name: rng.integers(0, 1000, BATCH, dtype=np.int32) for name in ("user", "seen")}
        state, info = step(state, ids)
        (whole,) = info.tables.values()
        total = jax.tree.map(lambda *counts: int(sum(counts)), *info.counts.values())
        assert total == hkv.Counts(*(int(getattr(whole, name)) for name in hkv.Counts._fields))
    assert total.evicted > 0 and total.not_admitted > 0


def nnx_run(model, made, loss_scale=None):
    state = hkv.nnx.TrainState(model, optax.sgd(0.1), loss_scale)
    step = hkv.nnx.train_step(lambda model, x, labels: loss_of(model(x, train=True), labels))
    return state, [step(state, *batch) for batch in made]


def test_nnx_split_and_merge_keep_the_table_and_grad_leaves_it_alone(made):
    """nnx.grad by nnx.Param sees dense parameters only, and a merged copy trains alike."""
    model = NnxModel(nnx.Rngs(0))
    graph, params, tables = nnx.split(model, nnx.Param, hkv.nnx.TableVariable)
    assert set(params) == {"dense"} and set(tables) == {"embed"}
    copy = nnx.merge(graph, *jax.tree.map(jnp.copy, (params, tables)))

    def loss(model, inputs, labels):
        return loss_of(model(inputs), labels)

    gradients = nnx.jit(nnx.grad(loss))(model, *made[0])
    assert set(gradients) == {"dense"}
    one, infos = nnx_run(model, made)
    other, others = nnx_run(copy, made)
    assert_equal_trees(nnx.state(one), nnx.state(other))
    assert_equal_trees(infos, others)
    assert counts(infos)["inserted"] > 60


def infinite_on_request(model_call, inputs, labels):
    return loss_of(model_call(inputs, train=True), labels) * jnp.where(labels[0] < 0, jnp.inf, 1.0)


def is_seen(made):
    """A batch of ids that are in the table, with labels that make the loss infinite."""
    inputs, labels = made[0]
    return inputs, np.where(np.arange(BATCH) == 0, -1, labels).astype(np.float32)


def test_a_linen_step_with_infinite_gradients_changes_no_row_and_no_parameter(made):
    """The scale is halved; parameters, both optimizers' states and rows keep every bit."""
    scale = hkv.optim.LossScale.create(2.0**10)
    state = fresh_state(made[0][0], tx=optax.adam(0.1), loss_scale=scale)
    step = hkv.linen.train_step(infinite_on_request, donate=False)
    before, info = step(state, *made[0])
    assert info.finite and float(before.loss_scale.scale) == 2.0**10
    after, info = step(before, *is_seen(made))
    assert not info.finite and float(after.loss_scale.scale) == 2.0**9
    assert_equal_trees((before.params, before.opt_state), (after.params, after.opt_state))
    old, new = table_of(before), table_of(after)
    assert_equal_trees((old.values, old.optimizer), (new.values, new.optimizer))
    assert_equal_trees((old.index.keys, old.index.digests), (new.index.keys, new.index.digests))
    later, info = step(after, *made[1])
    assert info.finite and not np.array_equal(table_of(later).values, new.values)


def test_an_nnx_step_with_infinite_gradients_changes_no_row_and_no_parameter(made):
    scale = hkv.optim.LossScale.create(2.0**10)
    state = hkv.nnx.TrainState(NnxModel(nnx.Rngs(0)), optax.adam(0.1), scale)
    step = hkv.nnx.train_step(infinite_on_request)
    assert step(state, *made[0]).finite
    rows = ("values", "optimizer")

    def kept():
        (table,) = state.model.embed.tables.values()
        parts = nnx.state((state.model, state.optimizer), nnx.Any(nnx.Param, nnx.OptState))
        return jax.tree.map(np.array, (nnx.to_pure_dict(parts), [getattr(table, r) for r in rows]))

    before = kept()
    assert not step(state, *is_seen(made)).finite
    assert_equal_trees(before, kept())
    assert float(state.loss_scale.get_value().scale) == 2.0**9


def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(made, expected):
    scaled, _ = run(fresh_state(made[0][0], loss_scale=hkv.optim.LossScale.create(2.0**7)), made)
    assert_same_training(scaled, expected[0])


def embed(api, unseen, **options):
    """A layer of either kind as (function of ids and train, function that gives its parameters)."""
    options = {"optimizer": hkv.optim.sgd(0.1), "unseen": unseen, **options}
    return api(256, DIM, **options)


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize("unseen", ["initial", "zeros", "learned"])
@pytest.mark.parametrize("is_bag", [False, True])
def test_what_ids_without_a_row_get_in_evaluation(unseen, is_bag):
    """Their own first row, zeros, or one row for all of them, which is a parameter."""
    kinds = (hkv.linen.EmbedBag, hkv.nnx.EmbedBag) if is_bag else (hkv.linen.Embed, hkv.nnx.Embed)
    ids = np.array([[5], [6]], np.int32) if is_bag else np.array([5, 6], np.int32)
    layer = embed(kinds[0], unseen)
    variables = layer.init(jax.random.key(0), ids)
    twin = embed(kinds[1], unseen)
    given = np.arange(DIM, dtype=np.float32)
    expected = np.zeros((2, DIM), np.float32)
    if unseen == "learned":
        assert set(variables) == {"params", "tables"}
        variables = {**variables, "params": {"unseen": given}}
        twin.unseen_row.set_value(jnp.asarray(given))
        expected += given
    else:
        assert "params" not in variables
    if unseen == "initial":
        expected = np.asarray(hkv.initial_rows(variables["tables"]["table"], ids.reshape(-1)))
    for rows in (layer.apply(variables, ids), twin(ids)):
        np.testing.assert_array_equal(rows, expected)
    trained, _ = layer.apply(variables, ids, train=True, mutable=hkv.linen.MUTABLE)
    own = hkv.initial_rows(variables["tables"]["table"], ids.reshape(-1))
    np.testing.assert_array_equal(trained, own)
    np.testing.assert_array_equal(twin(ids, train=True), own)


def test_the_learned_row_is_trained_by_ids_that_are_turned_away():
    """Ids seen once get no row here, so their gradient is the shared row's."""
    rule = hkv.admission.frequency(2, width=256)
    model = embed(hkv.linen.Embed, "learned", admission=rule)
    ids, target = np.array([1, 2, 2, 3], np.int32), jnp.ones((4, DIM))
    state = hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, ids: jnp.sum((apply(ids, train=True) - target) ** 2))
    after, info = step(state, ids)
    (metrics,) = info.tables.values()
    assert int(metrics.not_admitted) == 2 and int(metrics.inserted) == 1
    np.testing.assert_allclose(after.params["unseen"], 0.1 * 2 * 2 * np.ones(DIM), rtol=1e-6)
    np.testing.assert_array_equal(after.apply(np.array([1], np.int32))[0], after.params["unseen"])


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
def test_a_collection_learns_a_row_for_each_table(made):
    """Ids without a row add their table's row by their weight: half of it, for one of two."""
    inputs = {"user": np.array([3, 4], np.int32), "seen": np.array([[3, 4], [4, 4]], np.int32)}
    given = {"users": np.full(DIM, 7, np.float32), "items": np.full(DIM, 5, np.float32)}
    layer = hkv.linen.EmbedCollection(COLLECTION, unseen="learned")
    variables = layer.init(jax.random.key(0), inputs)
    params = {f"unseen_{name}": row for name, row in given.items()}
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, params)
    # Users 3 and item 3 get rows: a batch of one example each.
    first = {"user": np.array([3], np.int32), "seen": np.array([[3]], np.int32)}
    _, updated = layer.apply(variables, first, train=True, mutable=hkv.linen.MUTABLE)
    variables = {"params": params, "tables": updated["tables"]}
    own = layer.apply(variables, first)
    rows = layer.apply(variables, inputs)
    np.testing.assert_array_equal(rows["user"], np.stack([own["user"][0], given["users"]]))
    half = 0.5 * own["seen"][0] + 2.5
    np.testing.assert_allclose(rows["seen"], np.stack([half, given["items"]]), rtol=1e-6)

    gradient = jax.grad(lambda p: sum(
        jnp.sum(row) for row in layer.apply({**variables, "params": p}, inputs).values()
    ))(params)  # fmt: skip
    np.testing.assert_array_equal(gradient["unseen_users"], np.ones(DIM))
    np.testing.assert_array_equal(gradient["unseen_items"], np.full(DIM, 1.5))

    twin = hkv.nnx.EmbedCollection(COLLECTION, unseen="learned")
    for name, row in given.items():
        getattr(twin, f"unseen_{name}").set_value(jnp.asarray(row))
    twin(first, train=True)
    for name, row in twin(inputs).items():
        np.testing.assert_array_equal(row, rows[name])


def test_a_choice_for_unseen_ids_that_is_none_is_named():
    ids = np.array([1], np.int32)
    with pytest.raises(ValueError, match="unseen must be one of"):
        hkv.linen.Embed(128, DIM, unseen="mean").init(jax.random.key(0), ids)
    with pytest.raises(ValueError, match="unseen must be one of"):
        hkv.nnx.Embed(128, DIM, unseen="mean")
    with pytest.raises(ValueError, match="unseen must be one of"):
        hkv.nnx.EmbedCollection(COLLECTION, unseen="mean")


def test_init_of_a_collection_can_be_evaluated_abstractly(made):
    """A model of tables that fit nowhere costs nothing to describe."""
    huge = hkv.Collection(
        [hkv.TableConfig("users", 2**30, 128, optimizer=hkv.optim.adam(1e-3))],
        [hkv.Feature("user", "users")],
    )
    shapes = jax.eval_shape(
        hkv.linen.EmbedCollection(huge).init, jax.random.key(0), {"user": made[0][0]["user"]}
    )
    (table,) = jax.tree.leaves(shapes, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    assert table.capacity == 2**30 and table.nbytes > 2**39
    assert set(shapes) == {"tables"}


def test_clipping_bounds_rows_and_dense_parameters_together(made):
    """A step with a bound of zero moves nothing; with none it does."""
    sgd = hkv.optim.sgd(1.0)
    config = hkv.TableConfig("users", 512, DIM, optimizer=sgd)
    collection = hkv.Collection([config], [hkv.Feature("user", "users")])

    class Sum(nn.Module):
        @nn.compact
        def __call__(self, ids, train=False):
            rows = hkv.linen.EmbedCollection(collection)({"user": ids}, train=train)["user"]
            return jnp.sum(rows * self.param("w", nn.initializers.ones, (DIM,)))

    ids = made[0][0]["user"]
    moved, norms = {}, {}
    for bound in (None, 0.5, np.inf):
        state = hkv.linen.TrainState.create(Sum(), jax.random.key(0), ids, tx=optax.sgd(1.0))
        step = hkv.linen.train_step(lambda apply, ids: apply(ids, train=True), max_norm=bound)
        table = table_of(state)
        first = np.asarray(hkv.initial_rows(table, np.unique(ids)))
        after, info = step(state, ids)
        norms[bound] = info.grad_norm
        rows = np.asarray(hkv.find(table_of(after), np.unique(ids))[1].values)
        moved[bound] = np.concatenate([(rows - first).ravel(), np.ravel(after.params["w"]) - 1])
    assert np.linalg.norm(moved[None]) > 5 and norms[None] is None
    np.testing.assert_array_equal(moved[np.inf], moved[None])
    for bound in (0.5, np.inf):
        np.testing.assert_allclose(norms[bound], np.linalg.norm(moved[None]), rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(moved[0.5]), 0.5, rtol=1e-4)
    factor = 0.5 / np.linalg.norm(moved[None])
    np.testing.assert_allclose(moved[0.5], moved[None] * factor, atol=2e-6)


def test_a_step_of_26_features_is_one_lookup_and_one_update():
    """One physical table; nothing as large as a table is copied, and Python is never called."""
    step, arguments = gpu_programs.collection_step(donate=True)
    hlo = step.lower(*arguments).compile().as_text()
    calls = re.findall(r'custom_call_target="([^"]+)"', hlo)
    native = sorted(call.removeprefix("jax_hkv.") for call in calls if "hkv" in call)
    assert native.count("upsert") == native.count("unique") == 1, native
    assert native.count("update_adam") == 1 and "verify_slots" not in native, native
    assert native.count("divide_weights") == 1 and len(native) <= 10, native
    assert "callback" not in hlo
    assert hkv.testing.copies_in(hlo, table_of(arguments[0])) == []


def test_a_table_that_a_state_has_lost_is_named():
    """Flax makes an empty one, which the step trains."""

    ids = np.arange(8, dtype=np.int32)

    class Two(nn.Module):
        @nn.compact
        def __call__(self, ids, train=False):
            return sum(
                hkv.linen.Embed(256, DIM, optimizer=OPTIMIZER, name=name)(ids, train=train)
                for name in ("a", "b")
            )

    state = hkv.linen.TrainState.create(Two(), jax.random.key(0), ids, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, ids: jnp.mean(apply(ids, train=True)), donate=False)
    step(state, ids)
    lost = state.replace(tables={"a": state.tables["a"]})
    with pytest.warns(match=r"\['b/table'\], which .*\*\*state\.tables.* made anew, emp") as seen:
        step(lost, ids)
    assert [warning.filename for warning in seen] == [__file__]


def test_over_devices_a_table_that_a_state_has_lost_is_an_error():
    """There a state keeps its form."""
    embed = functools.partial(hkv.linen.Embed, 256, DIM, optimizer=OPTIMIZER, axis_name="device")

    class Two(nn.Module):
        @nn.compact
        def __call__(self, ids, train=False):
            return embed(name="a")(ids, train=train) + embed(name="b")(ids, train=train)

    placement = hkv.sharding.Placement(jax.make_mesh((1,), ("device",), devices=jax.devices()[:1]))
    ids = np.arange(8, dtype=np.int32)
    state = placement.create(
        lambda: hkv.linen.TrainState.create(Two(), jax.random.key(0), ids, tx=optax.sgd(0.1))
    )
    step = hkv.linen.train_step(
        lambda apply, ids: jnp.mean(apply(ids, train=True)), placement=placement
    )
    with pytest.raises(ValueError, match=r"the tables \['b/table'\].*\*\*state\.tables"):
        step(state.replace(tables={"a": state.tables["a"]}), placement.put(ids))
