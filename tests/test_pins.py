"""What a step's lookups have brought, its later ones do not evict before the update."""

from __future__ import annotations

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from combinations import pairs, seldom
from flax import nnx
from many_devices import Case

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.index import Policy
from jax_hkv.sharding import Exchange, Placement

DIM, CAPACITY, RATE = 4, 512, 0.5
BY_TIME = (Policy.LRU, Policy.EPOCH_LRU)
SGD = hkv.optim.sgd(RATE)
OLD, FIRST, SECOND = (
    np.arange(start, start + count, dtype=np.int32)
    for start, count in ((0, 2 * CAPACITY), (10_000, 64), (20_000, 96))
)


def scores_of(policy, ids):
    return hkv.Keys.from_numpy(np.ones(ids.shape, int)) if policy is Policy.CUSTOM else None


def fillings(policy):
    """How often ids come, with which a table is filled, for new ones to have the lowest scores.

    EPOCH_LFU and CUSTOM take none that counts less than everything there is: with the same they go
    to the first lanes of their buckets, and would go first themselves.
    """
    return 3 if policy is Policy.LFU else 1


def with_later_scores(table):
    """By time new entries have the highest scores, but where others were imported with later ones.

    Or where the epoch was set back, which to the scores is the same.
    """
    if table.policy not in BY_TIME:
        return table
    entries = hkv.export_batch(table, 0, table.capacity)
    later = hkv.Keys(entries.scores.words + jnp.array([0, 9], jnp.uint32))
    return hkv.import_batch(table, entries._replace(scores=later))[0]


def full_table(policy, choices=1):
    table = SGD.init(hkv.create(CAPACITY, DIM, policy=policy, choices=choices))
    for _ in range(fillings(policy)):
        table, _ = hkv.find_or_insert(table, OLD, scores=scores_of(policy, OLD))
    assert int(hkv.size(table)) == CAPACITY
    return with_later_scores(table)


def kept(table, ids):
    return int(hkv.contains(table, ids)[1].sum())


# --- Operations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [False, True], ids=["rows", "bags"])
@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("policy", Policy)
def test_a_lookup_leaves_alone_what_the_pinned_ones_hold(policy, choices, pooled, platform):
    """And nothing else; an update is of all of them."""
    look_up = hkv.find_or_insert_pooled if pooled else hkv.find_or_insert
    shape = (-1, 2) if pooled else (-1,)
    first, second = FIRST.reshape(shape), SECOND.reshape(shape)
    table = full_table(policy, choices)

    def given(ids):
        return {"scores": scores_of(policy, ids)}

    table, brought = look_up(table, first, **given(first))
    assert int(brought.counts.evicted) == len(FIRST)
    free, _ = look_up(table, second, **given(second))
    assert kept(free, FIRST) < len(FIRST)
    table, more = jax.jit(look_up)(table, second, pinned=brought, **given(second))
    assert int(more.counts.evicted) == len(SECOND)
    assert kept(table, FIRST) == len(FIRST)
    slopes = [jnp.ones_like(each.values) for each in (brought, more)]
    updated = SGD.update(table, [brought, more], slopes)
    assert updated.optimizer.skipped.tolist() == [0]
    ids = np.concatenate([FIRST, SECOND])
    change = hkv.find(updated, ids)[1].values - hkv.initial_rows(table, ids)
    np.testing.assert_allclose(change, -RATE, rtol=1e-5)


def test_pins_are_results_or_slots_or_lists_of_them():
    table = full_table(Policy.LFU)
    table, first = hkv.find_or_insert(table, FIRST)
    table, second = hkv.find_or_insert(table, SECOND, pinned=first)
    third = np.arange(30_000, 30_100, dtype=np.int32)
    both = np.concatenate([first.slots, second.slots, [-1, -1]]).astype(np.int32)
    tables = [
        hkv.find_or_insert(table, third, pinned=pinned)[0]
        for pinned in ([first, second], both, [first, jnp.asarray(second.slots)])
    ]
    for each in tables:
        assert kept(each, np.concatenate([FIRST, SECOND])) == len(FIRST) + len(SECOND)
        for leaf, other in zip(*map(jax.tree.leaves, (each, tables[0])), strict=True):
            np.testing.assert_array_equal(leaf, other)
    plain, none = (hkv.find_or_insert(table, third, pinned=own)[0] for own in (None, []))
    assert kept(plain, FIRST) == kept(none, FIRST) < len(FIRST)


def test_where_all_of_a_bucket_is_pinned_newcomers_are_refused():
    """As those of one lookup of all are, for whom there is no room."""
    table = hkv.create(128, DIM, policy=Policy.LFU)
    table, brought = hkv.find_or_insert(table, OLD[:128])
    table, more = hkv.find_or_insert(table, SECOND, pinned=brought)
    assert int(more.counts.refused) == len(SECOND) and kept(table, OLD[:128]) == 128


@pytest.mark.parametrize(
    ("pinned", "got"),
    {
        "a read": (lambda table: hkv.find(table, FIRST)[1], "FindResult"),
        "a write": (lambda table: hkv.erase(table, FIRST)[1], "EraseResult"),
        "keys": (lambda _: FIRST.astype(np.int64), "int64"),
        "a dict": (lambda _: {"slots": FIRST}, "dict"),
        "a table": (lambda table: table, "Table"),
    }.values(),
)
@pytest.mark.parametrize("name", ["find_or_insert", "find_or_insert_pooled"])
def test_anything_else_is_refused(name, pinned, got):
    table = full_table(Policy.LFU)
    with pytest.raises(TypeError, match=rf"^{name}: pinned must be .*got .*{got}"):
        getattr(hkv, name)(table, SECOND[:, None], pinned=pinned(table))


# --- Many devices --------------------------------------------------------------------------------

AXES = ("node", "device")
FOUR = Case(shape=(4,), capacity=CAPACITY)
LEVELS = dataclasses.replace(FOUR, exchange=Exchange(AXES), shape=(2, 2), names=AXES)
EXCHANGES = {
    "one hop": (FOUR, {}),
    "levels": (LEVELS, {}),
    "a second round": (FOUR, {"distinct": 0.02}),
    "replicas": (FOUR, {"replicas": True}),
    "pmap": (dataclasses.replace(FOUR, mode="pmap"), {}),
}


@pytest.mark.parametrize("pooled", [False, True], ids=["rows", "bags"])
@pytest.mark.parametrize("name", seldom(EXCHANGES, {"pmap", "levels"}))
def test_owners_leave_alone_what_they_have_brought_for_any_device(name, pooled):
    case, fields = EXCHANGES[name]
    case = dataclasses.replace(
        case,
        exchange=dataclasses.replace(case.exchange, **fields),
        options=(("policy", Policy.LFU),),
    )
    placement, axis = case.placement, {"axis_name": case.exchange}
    look_up = sharding.find_or_insert_pooled if pooled else sharding.find_or_insert
    old = np.arange(case.devices * CAPACITY * 2, dtype=np.int32)
    shape = (-1, 2) if pooled else (-1,)
    first, second = (
        np.arange(start, start + case.devices * count, dtype=np.int32).reshape(shape)
        for start, count in ((10_000, 64), (20_000, 96))
    )

    def filled(table, ids):
        return sharding.find_or_insert(table, ids, **axis)[0], jnp.int32(0)

    def step(pins, table, ids, more):
        table, brought = look_up(table, ids, **axis)
        table, result = look_up(table, more, pinned=brought if pins else None, **axis)
        slopes = [jnp.ones_like(each.values) for each in (brought, result)]
        table = sharding.update(SGD, table, [brought, result], slopes)
        _, found = sharding.contains(table, ids, **axis)
        return table, (jax.lax.psum(found.found.sum(), case.exchange.axes), brought.overflow)

    lost = []
    for pins in (False, True):
        table = placement.create(lambda: SGD.init(case.table()))
        fill = placement.step(filled)
        for _ in range(3):
            table, _ = fill(table, placement.put(old))
        table, (there, overflow) = placement.step(partial(step, pins))(
            table, *placement.put((first, second))
        )
        assert (int(overflow) > 0) == ("distinct" in fields)
        lost.append(first.size - int(there))
    assert lost[0] > 0 and lost[1] == 0


# --- Layers --------------------------------------------------------------------------------------


def embed(module, policy, way, axis_name=None):
    kind = module.EmbedBag if way == "bags" else module.Embed
    return kind(CAPACITY, DIM, policy=policy, optimizer=SGD, axis_name=axis_name)


def looked_up(layer, policy, way, ids, train):
    """Embeddings of ids, each a bag of one where they are bags."""
    ids = ids[:, None] if way == "bags" else ids
    scores = scores_of(policy, ids)
    if way == "collection":
        named = None if scores is None else {"ids": scores}
        return layer({"ids": ids}, train=train, scores=named)["ids"]
    return layer(ids, train=train, scores=scores)


class Linen(nn.Module):
    """Looks up two arrays, by a layer or a collection that is called twice."""

    policy: Policy
    way: str
    axis_name: str | None = None

    @nn.compact
    def __call__(self, first, second, train=False):
        layer = embed(hkv.linen, self.policy, self.way, self.axis_name)
        if self.way == "collection":
            layer = hkv.linen.EmbedCollection(collection(self.policy), axis_name=self.axis_name)
        return [looked_up(layer, self.policy, self.way, ids, train) for ids in (first, second)]


class Nnx(nnx.Module):
    """The same; or by two layers that share a table."""

    def __init__(self, policy, way, axis_name=None):
        self.policy, self.way = policy, way
        if way == "collection":
            self.one = self.other = hkv.nnx.EmbedCollection(collection(policy), axis_name=axis_name)
            return
        self.one = embed(hkv.nnx, policy, way, axis_name)
        self.other = embed(hkv.nnx, policy, way, axis_name) if way == "tied" else self.one
        if way == "tied":
            self.other.table = self.one.table

    def __call__(self, first, second, train=False):
        return [
            looked_up(layer, self.policy, self.way, ids, train)
            for layer, ids in ((self.one, first), (self.other, second))
        ]


def collection(policy):
    table = hkv.TableConfig("ids", CAPACITY, DIM, policy=policy, optimizer=SGD)
    return hkv.Collection([table], [hkv.Feature("ids", "ids")])


def loss_of(rows):
    return sum(jnp.sum(each) for each in rows)


def with_tables(state, change, placement=None):
    """A state after a change of its tables."""
    split = change if placement is None else placement.step(lambda table: (change(table), ()))
    changed = split if placement is None else lambda table: split(table)[0]
    if isinstance(state, hkv.nnx.TrainState):
        for _, variable in nnx.to_flat_state(nnx.state(state, hkv.nnx.TableVariable)):
            variable.set_value(changed(variable.get_value()))
        return state
    is_table = lambda node: isinstance(node, hkv.Table)  # noqa: E731
    return state.replace(tables=jax.tree.map(changed, state.tables, is_leaf=is_table))


def table_of(state):
    if isinstance(state, hkv.nnx.TrainState):
        model = state.model.one
        return (model.table if hasattr(model, "table") else model.table_ids).get_value()
    is_table = lambda node: isinstance(node, hkv.Table)  # noqa: E731
    (table,) = jax.tree.leaves(state.tables, is_leaf=is_table)
    return table


def runner(api, policy, way, placement=None, axis_name=None, **options):
    """A state, and a function of it and of ids to the next one and the report on its table."""
    if api == "linen":
        model, ids = Linen(policy, way, axis_name), np.zeros((4,), np.int32)
        make = partial(hkv.linen.TrainState.create, model, jax.random.key(0), ids, ids)
        make = partial(make, tx=optax.sgd(0.1))
        state = make() if placement is None else placement.create(make)
        loss = lambda apply, *ids: loss_of(apply(*ids, train=True))  # noqa: E731
    else:
        make = lambda: hkv.nnx.TrainState(Nnx(policy, way, axis_name), optax.sgd(0.1))  # noqa: E731
        state = make() if placement is None else hkv.nnx.place(make, placement)
        loss = lambda model, *ids: loss_of(model(*ids, train=True))  # noqa: E731
    step = getattr(hkv, api).train_step(loss, placement=placement, **options)

    def run(state, *ids):
        done = step(state, *(ids if placement is None else placement.put(ids, **options)))
        state, info = (state, done) if api == "nnx" else done
        (report,) = info.tables.values()
        return state, report

    return state, run


def trained(api, policy, way, placement=None, axis_name=None, **options):
    """The table after a step of new ids, into one that was full."""
    state, run = runner(api, policy, way, placement, axis_name, **options)
    for _ in range(fillings(policy)):
        state, _ = run(state, *np.split(OLD, 2))
    state = with_tables(state, with_later_scores, placement)
    state, report = run(state, np.resize(FIRST, 96), SECOND)
    return table_of(state), report


WAYS = {
    "linen": ("twice", "bags", "collection"),
    "nnx": ("twice", "bags", "tied", "collection"),
}
PARTS = {"whole": {}, "micro-batches": {"micro_batches": 4}}
CASES = [
    (api, policy, way, parts)
    for api, ways in WAYS.items()
    for policy in Policy
    for way in ways
    for parts in PARTS
]
DAILY = {
    (api if way in WAYS[api] else "nnx", policy, way, parts)
    for api, policy, way, parts in pairs(WAYS, Policy, WAYS["nnx"], PARTS)
}


@pytest.mark.parametrize(("api", "policy", "way", "parts"), seldom(CASES, set(CASES) - DAILY))
def test_a_step_trains_all_that_its_lookups_have_brought(api, policy, way, parts):
    """However often a table is looked up, and in however many parts."""
    table, report = trained(api, policy, way, **PARTS[parts])
    assert int(report.evicted) > 0
    skipped = int(table.optimizer.skipped[0])
    ids = np.concatenate([FIRST, SECOND])
    assert (skipped, kept(table, ids)) == (0, len(ids))
    change = hkv.find(table, ids)[1].values - hkv.initial_rows(table, ids)
    times = np.where(np.isin(ids, FIRST[:32]), 2, 1)[:, None]  # 96 places for 64 ids
    scale = 1 / PARTS[parts].get("micro_batches", 1)
    np.testing.assert_allclose(change, np.broadcast_to(-RATE * scale * times, change.shape), 1e-5)


SPREADS = {
    "one hop": ((2,), "device"),
    "levels": ((2, 2), Exchange(AXES)),
    "a second round": ((2,), Exchange("device", distinct=0.05)),
    "replicas": ((2,), Exchange("device", replicas=True)),
}


SPREAD_CASES = [("linen", name, Policy.LFU) for name in SPREADS]
SPREAD_CASES += [("nnx", "one hop", Policy.LFU), ("nnx", "levels", Policy.EPOCH_LRU)]
SPREAD_CASES += [("linen", "one hop", Policy.LRU)]


@pytest.mark.parametrize(
    ("api", "spread", "policy", "parts"),
    seldom(
        [(*case, parts) for case in SPREAD_CASES for parts in PARTS],
        [(*case, "whole") for case in SPREAD_CASES[1:4]]
        + [(*case, "micro-batches") for case in SPREAD_CASES[4::2]],
    ),
)
def test_devices_train_all_that_their_lookups_have_brought(api, spread, policy, parts):
    shape, exchange = SPREADS[spread]
    names = AXES if len(shape) > 1 else ("device",)
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    placement = Placement(jax.make_mesh(shape, names, devices=devices), names)
    table, _ = trained(api, policy, "twice", placement, exchange, **PARTS[parts])
    assert int(np.sum(table.optimizer.skipped)) == 0
    copies = len(devices) if spread == "replicas" else 1
    there = sum(kept(part, np.append(FIRST, SECOND)) for part in placement.shards(table))
    assert there == copies * (len(FIRST) + len(SECOND))


@pytest.mark.parametrize("api", WAYS)
@pytest.mark.parametrize("policy", BY_TIME)
def test_where_a_steps_own_ids_fill_a_bucket_later_ones_are_refused(policy, api):
    """And have no update; nothing that was brought loses the one that it is to get."""
    ids = np.arange(4 * CAPACITY, dtype=np.int32)
    state, run = runner(api, policy, "twice")
    state, report = run(state, *np.split(ids, 2))
    table = table_of(state)
    assert table.optimizer.skipped.tolist() == [0]
    assert (int(report.inserted), int(report.refused)) == (CAPACITY, len(ids) - CAPACITY)
    assert kept(table, ids[: len(ids) // 2]) == CAPACITY


class Turn(nn.Module):
    """Looks the same ids up in each turn of a scan."""

    policy: Policy

    @nn.compact
    def __call__(self, carry, ids):
        return carry, embed(hkv.linen, self.policy, "twice")(ids, train=not self.is_initializing())


class Scanned(nn.Module):
    policy: Policy
    axes: object

    @nn.compact
    def __call__(self, ids):
        turn = Turn(self.policy)
        if self.is_initializing():  # what is carried is there before
            return turn(0, ids)[1]
        scan = nn.scan(Turn.__call__, variable_carry="tables", variable_axes=self.axes)
        return scan(turn, 0, jnp.stack([ids, ids]))[1]


AXES_OF_TURNS = {
    "names": {"lookups": 0, "perturbations": 0},
    "a filter": {nn.DenyList(("params", "tables")): 0},
}


@pytest.mark.parametrize("parts", [2, 4])  # two are as many as there are turns
@pytest.mark.parametrize("axes", AXES_OF_TURNS)
@pytest.mark.parametrize("policy", [p for p in Policy if p is not Policy.CUSTOM])
def test_pins_of_micro_batches_go_into_scans(policy, axes, parts):
    model = Scanned(policy, AXES_OF_TURNS[axes])
    ids = np.arange(10_000, 10_000 + 160, dtype=np.int32)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=optax.sgd(0.1))
    state = with_tables(state, lambda _: full_table(policy))
    step = hkv.linen.train_step(lambda apply, ids: loss_of(apply(ids)), micro_batches=parts)
    state, info = step(state, ids)
    (report,) = info.tables.values()
    assert int(report.evicted) == len(ids)
    assert table_of(state).optimizer.skipped.tolist() == [0]
    assert kept(table_of(state), ids) == len(ids)


@pytest.mark.parametrize("mutable", [True, nn.DenyList("params")], ids=["all", "a filter"])
def test_pins_are_in_no_output(mutable):
    seen = []

    def loss(apply, *ids):
        rows, sown = apply(*ids, train=True, mutable=mutable)
        seen.append(sown)
        return loss_of(rows) + loss_of(jax.tree.leaves(sown)), sown

    model = Linen(Policy.LRU, "twice")
    state = hkv.linen.TrainState.create(model, jax.random.key(0), FIRST, FIRST, tx=optax.sgd(0.1))
    losses = [
        hkv.linen.train_step(loss, has_aux=True, donate=False, micro_batches=parts)(
            state, FIRST, FIRST
        )[1].loss
        for parts in (1, 4)
    ]
    assert losses[0] == pytest.approx(4 * losses[1])
    assert all(set(sown) <= {"params"} for sown in seen)


def full_variables(model):
    """Of a linen model, its table full."""
    ids = np.zeros((4,), np.int32)
    variables = model.init(jax.random.key(0), ids, ids)
    (path, _), *_ = jax.tree_util.tree_leaves_with_path(
        variables["tables"], is_leaf=lambda node: isinstance(node, hkv.Table)
    )
    where, name = (each.key for each in path)
    return {"tables": {where: {name: full_table(model.policy)}}}


def test_steps_by_hand_pin_too():
    """An apply of linen, and `value_and_grad` of nnx."""
    model = Linen(Policy.LFU, "twice")
    variables = full_variables(model)
    zeros = hkv.linen.perturbations(model, variables, FIRST, SECOND, train=True)

    def loss(zeros):
        given = {**variables, "perturbations": zeros}
        rows, updated = model.apply(given, FIRST, SECOND, train=True, mutable=hkv.linen.MUTABLE)
        return loss_of(rows), updated

    slopes, updated = jax.grad(loss, has_aux=True)(zeros)
    (by_linen,) = jax.tree.leaves(
        hkv.linen.update_tables(updated, slopes),
        is_leaf=lambda node: isinstance(node, hkv.Table),
    )
    module = Nnx(Policy.LFU, "tied")
    module.one.table.set_value(full_table(Policy.LFU))
    differentiate = hkv.nnx.value_and_grad(lambda m, *ids: loss_of(m(*ids, train=True)))
    hkv.nnx.update_tables(module, differentiate(module, FIRST, SECOND)[2])
    by_nnx = module.one.table.get_value()
    for table in (by_linen, by_nnx):
        assert table.optimizer.skipped.tolist() == [0]
        assert kept(table, np.append(FIRST, SECOND)) == len(FIRST) + len(SECOND)
    np.testing.assert_array_equal(by_linen.values, by_nnx.values)


def test_a_collections_lookups_pin_what_they_are_told():
    layers = collection(Policy.LFU)
    (group,) = layers.groups
    brought = []
    tables = {group.name: full_table(Policy.LFU)}
    for ids in (FIRST, SECOND):
        pinned = {group.name: [None, *brought]}  # of lookups that left it out there is none
        tables, found = layers.lookup(tables, {"ids": ids}, train=True, pinned=pinned)
        brought.append(found.results[group.name])
    assert kept(tables[group.name], FIRST) == len(FIRST)
    third = {"ids": np.arange(30_000, 30_096, dtype=np.int32)}
    free, _ = layers.lookup(tables, third, train=True)
    held, _ = layers.lookup(tables, third, train=True, pinned=found.results)
    assert kept(free[group.name], SECOND) < kept(held[group.name], SECOND) == len(SECOND)
    for wrong, got in ((found, "CollectionRows"), ({"other": None}, r"\['other'\]")):
        with pytest.raises(TypeError, match=rf"pinned must be the results .*\['ids'\], got {got}"):
            layers.lookup(tables, third, train=True, pinned=wrong)
    with pytest.raises(TypeError, match="of 'ids': pinned must be what earlier lookups .* float"):
        layers.lookup(tables, third, train=True, pinned={group.name: np.ones(3)})


@pytest.mark.parametrize("policy", Policy)
def test_slots_are_kept_for_later_lookups_until_the_update(policy):
    seen = []

    def loss(model, first, second):
        rows = model(first, second, train=True)
        seen.append(model.one.table.record())
        assert type(model.one.table.get_value()) is hkv.Table
        return loss_of(rows)

    state = hkv.nnx.TrainState(Nnx(policy, "tied"), optax.sgd(0.1))
    hkv.nnx.train_step(loss)(state, FIRST, SECOND)
    assert all(lookups == 2 for lookups, _ in seen)
    sizes = [[pin.size for pin in pins] for _, pins in seen]
    assert sizes[-1] == [FIRST.size, SECOND.size]
    assert state.model.one.table.record() == (0, ())
