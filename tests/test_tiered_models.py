"""Models whose tables have stores behind them learn what those of large tables learn."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from many_devices import assert_same_bits
from test_tiered import by_key, host, made, tiers_of

import jax_hkv as hkv
from jax_hkv import sharding, tiered

DIM = 4
ADAM = hkv.optim.adam(0.05)
DENSE = optax.adam(1e-2)
SMALL, LARGE = 256, 4096


def assert_same_entries(tiers, one):
    assert_same_bits(
        by_key(tiered.export_entries(tiers))[0][0::2], by_key(sharding.export_entries(one))[0][0::2]
    )


class LinenModel(nn.Module):
    capacity: int

    @nn.compact
    def __call__(self, ids, train=False):
        embed = hkv.linen.Embed(self.capacity, DIM, optimizer=ADAM, name="embed")
        return nn.Dense(1)(embed(ids, train=train).sum(axis=1))[:, 0]


class NnxModel(nnx.Module):
    def __init__(self, capacity):
        self.embed = hkv.nnx.Embed(capacity, DIM, optimizer=ADAM)
        self.dense = nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids, train=False):
        return self.dense(self.embed(ids, train=train).sum(axis=1))[:, 0]


def loss_of(apply, ids, labels):
    return optax.sigmoid_binary_cross_entropy(apply(ids, train=True), labels).mean()


def batches(rng, count=25):
    for _ in range(count):
        ids = rng.integers(0, 1000, (32, 3)).astype(np.int32)
        yield ids, (ids.sum(axis=1) % 2).astype(np.float32)


def test_a_linen_model_trains_and_evaluates_through_its_cache(rng):
    step = hkv.linen.train_step(loss_of)
    ids = np.zeros((32, 3), np.int32)
    small, large = (
        hkv.linen.TrainState.create(LinenModel(size), jax.random.key(0), ids, tx=DENSE)
        for size in (SMALL, LARGE)
    )
    store = tiered.create_store(small.tables["embed"]["table"], LARGE, device=host())

    def prefetch(state, store, ids, **options):
        tiers = tiered.Tiers(state.tables["embed"]["table"], store)
        tiers, counts = tiered.prefetch(tiers, ids, **options)
        tables = {**state.tables, "embed": {"table": tiers.cache}}
        return state.replace(tables=tables), tiers.store, counts

    for ids, labels in batches(rng):
        small, store, counts = prefetch(small, store, ids)
        small, info = step(small, ids, labels)
        large, wanted = step(large, ids, labels)
        assert int(info.tables["embed/table"].inserted) == 0
        assert float(info.loss) == float(wanted.loss)
        assert int(counts.refused) == int(counts.dropped) == 0
    assert int(counts.restored) > 10
    assert_same_bits(small.params, large.params)
    cache, one = (state.tables["embed"]["table"] for state in (small, large))
    assert_same_entries(tiered.Tiers(cache, store), one)
    ids = rng.integers(0, 1500, (32, 3)).astype(np.int32)
    small, store, counts = prefetch(small, store, ids, insert=False)
    assert int(counts.restored) > 10
    assert_same_bits(small.apply(ids), large.apply(ids))


def test_an_nnx_model_trains_through_its_cache(rng):
    step = hkv.nnx.train_step(loss_of)
    small, large = (hkv.nnx.TrainState(NnxModel(size), DENSE) for size in (SMALL, LARGE))
    layer = small.model.embed
    store = tiered.create_store(layer.table.get_value(), LARGE, device=host())
    for ids, labels in batches(rng):
        tiers, counts = tiered.prefetch(tiered.Tiers(layer.table.get_value(), store), ids)
        layer.table.set_value(tiers.cache)
        store = tiers.store
        info = step(small, ids, labels)
        assert float(info.loss) == float(step(large, ids, labels).loss)
        assert int(counts.refused) == int(counts.dropped) == 0
    assert_same_bits(nnx.state(small.model.dense), nnx.state(large.model.dense))
    tiers = tiered.Tiers(layer.table.get_value(), store)
    assert_same_entries(tiers, large.model.embed.table.get_value())


FROZEN = hkv.TableConfig("frozen", SMALL, 2)


def collection_of(capacity):
    return hkv.Collection(
        [
            hkv.TableConfig("users", capacity, DIM, optimizer=ADAM),
            hkv.TableConfig("items", capacity, DIM, optimizer=ADAM),
            hkv.TableConfig("words", capacity, 2, optimizer=ADAM, policy=hkv.Policy.LFU),
            FROZEN,
        ],
        [
            hkv.Feature("user", "users"),
            hkv.Feature("seen", "items", "mean"),
            hkv.Feature("item", "items"),
            hkv.Feature("word", "words", "sum"),
            hkv.Feature("constant", "frozen"),
        ],
    )


def inputs_of(rng):
    bags = [rng.integers(0, 1500, rng.integers(0, 4)).tolist() for _ in range(32)]
    return {
        "user": rng.integers(0, 900, 32).astype(np.int32),
        "seen": hkv.Jagged.from_lists(bags, capacity=128),
        "item": hkv.Keys.from_numpy(rng.integers(0, 900, 32) + 2**40),
        "word": hkv.Padded(
            rng.integers(0, 1200, (32, 3)).astype(np.int32), jnp.asarray(rng.random((32, 3)) < 0.7)
        ),
        "constant": np.arange(32, dtype=np.int32),
    }


NAMES = ["users+items", "words"]  # of tables that are trained


def trainer_of(collection):
    """A donating step of all features, and their rows before it."""

    def train(tables, inputs):
        tables, found = collection.lookup(tables, inputs, train=True)
        after = dict(tables)
        for name in NAMES:
            after[name] = ADAM.update(tables[name], found.results[name], 0.5 * found.rows[name])
        return after, collection.spread(found.rows, found.parts)

    return jax.jit(train, donate_argnums=0)


def test_a_collection_prefetches_all_of_its_tables(rng):
    """Fused ones, and none without an optimizer or a store; both stay equal to large ones."""
    small, large = (collection_of(size) for size in (SMALL, LARGE))
    tables, ones = small.create(), large.create()
    stores = {name: tiered.create_store(tables[name], LARGE, device=host()) for name in NAMES}
    steps = [trainer_of(own) for own in (small, large)]
    restored = 0
    for _ in range(20):
        inputs = inputs_of(rng)
        tables, stores, counts = small.prefetch(tables, stores, inputs)
        assert list(counts) == NAMES
        assert not any(int(each.refused) + int(each.dropped) for each in counts.values())
        restored += sum(int(each.restored) for each in counts.values())
        tables, rows = steps[0](tables, inputs)
        ones, wanted = steps[1](ones, inputs)
        assert_same_bits(rows, wanted)
    assert restored > 200 and int(hkv.size(tables["frozen"])) == 0
    for name in NAMES:
        assert_same_entries(tiered.Tiers(tables[name], stores[name]), ones[name])
    inputs = inputs_of(rng)
    tables, stores, _ = small.prefetch(tables, stores, inputs, insert=False)
    rows, wanted = (
        collection.spread(*(lambda found: (found.rows, found.parts))(found))
        for collection, found in (
            (small, small.lookup(tables, inputs)[1]),
            (large, large.lookup(ones, inputs)[1]),
        )
    )
    assert_same_bits(rows, wanted)
    both = {name: tiered.Tiers(tables[name], stores[name]) for name in NAMES}
    sizes, wanted = small.sizes(both), large.sizes(ones)
    assert list(sizes) == ["users", "items", "words"]
    assert all(int(sizes[name]) == int(wanted[name]) for name in sizes)
    ids = {"users": np.arange(1200, dtype=np.int32), "words": np.arange(300, dtype=np.int32)}
    both, erased = small.on_tables(tiered.erase, both, ids)
    ones, wanted = large.on_tables(hkv.erase, ones, ids)
    assert_same_bits(erased, wanted)
    tables |= {name: own.cache for name, own in both.items()}
    stores = {name: own.store for name, own in both.items()}
    assert int(small.sizes(stores)["users"]) == 0 == int(small.sizes(tables)["users"])
    _, gone = small.on_tables(hkv.contains, stores, ids)
    assert not gone["users"].any()
    some = {"word": inputs["word"]}
    tables, stores, counts = small.prefetch(tables, stores, some, partial=True)
    assert list(counts) == ["words"]


def test_orbax_keeps_both_tables_where_they_lie(tmp_path, rng):
    tiers = tiers_of(SMALL, LARGE)
    for _ in range(8):
        tiers, _ = tiered.prefetch(tiers, rng.integers(0, 1000, 96).astype(np.int32))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tiers", tiers)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, tiers_of(SMALL, LARGE))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "tiers", target)
    assert_same_bits(restored, tiers)
    assert restored.store.values.devices() == {host()}
    ids = rng.integers(0, 1000, 96).astype(np.int32)
    (restored, counts), (tiers, wanted) = (tiered.prefetch(own, ids) for own in (restored, tiers))
    assert_same_bits((restored, counts), (tiers, wanted))
    assert int(counts.restored) > 0


def of(**options):
    return lambda: tiered.create_store(made(128, **options), 1024)


def pair(**changes):
    tiers = tiers_of(128, 1024)
    return tiers._replace(
        **{name: change(getattr(tiers, name)) for name, change in changes.items()}
    )


def used_up():
    tiers = tiers_of(128, 1024)
    tiered.prefetch(tiers, np.arange(3, dtype=np.int32))
    return tiers


IDS = np.arange(3, dtype=np.int32)
COLLECTION = collection_of(128)
COLLECTION_OF_EQUALS = hkv.Collection(
    [hkv.TableConfig(name, 128, DIM, optimizer=hkv.optim.adam(0.1)) for name in "ab"],
    [hkv.Feature(name, name) for name in "ab"],
    fuse=False,
)
WRONG = {
    "a policy that refuses": (
        of(policy=hkv.Policy.EPOCH_LFU),
        ValueError,
        r"create_store: table must have a policy .* LRU, LFU, EPOCH_LRU, got EPOCH_LFU",
    ),
    "an admission rule": (
        of(admission=hkv.admission.probability(0.5)),
        ValueError,
        r"create_store: table must have no admission rule, got .*robability.*without one",
    ),
    "a store of another seed": (
        lambda: tiered.size(tiers_of(128, 1024)._replace(store=tiers_of(128, 1024, seed=5).store)),
        ValueError,
        "tiered.size: tiers.store must have a seed like the cache's, 0, got 5: make it by",
    ),
    "a store of other first rows": (
        lambda: tiered.size(
            tiers_of(128, 1024, init=hkv.initializers.zeros())._replace(
                store=tiers_of(128, 1024).store
            )
        ),
        ValueError,
        "tiered.size: tiers.store must have an initializer like the cache's",
    ),
    "no function of tables": (
        lambda: tiered.map_tables(tiers_of(128, 1024), None),
        TypeError,
        r"map_tables: fn must be a function from a table to a table, got NoneType: give jax_hkv",
    ),
    "no table": (
        lambda: tiered.create_store(tiers_of(128, 1024), 1024),
        TypeError,
        r"create_store: table must be a jax_hkv Table, got Tiers",
    ),
    "no capacity": (
        lambda: tiered.create_store(made(128), 0),
        ValueError,
        r"create_store: capacity must be",
    ),
    "one table": (
        lambda: tiered.prefetch(made(128), IDS),
        TypeError,
        r"prefetch: tiers must be jax_hkv\.tiered\.Tiers, got Table: make them by Tiers\(cache",
    ),
    "two tables in a tuple": (
        lambda: tiered.find((made(128), made(128)), IDS),
        TypeError,
        r"find: tiers must be jax_hkv\.tiered\.Tiers, got tuple",
    ),
    "a result in place of a table": (
        lambda: tiered.prefetch(pair(cache=lambda table: hkv.find(table, IDS)), IDS),
        TypeError,
        r"prefetch: tiers\.cache must be a jax_hkv Table, got tuple: operations return",
    ),
    "a store without optimizer rows": (
        lambda: tiered.erase(pair(store=lambda _: made(1024, None)), IDS),
        ValueError,
        r"erase: tiers\.store must have rows and optimizer rows like the cache's, .*'mu'.* got "
        r".*\{\}.* after opt\.init\(cache\)",
    ),
    "a store of another policy": (
        lambda: tiered.size(pair(store=lambda _: made(1024, policy=hkv.Policy.LFU))),
        ValueError,
        r"size: tiers\.store must have a policy like the cache's, LRU, got LFU",
    ),
    "tables of the host": (
        lambda: tiered.prefetch(pair(store=jax.device_get), IDS),
        ValueError,
        r"prefetch: tiers\.store must lie on one device, got one that 0 hold: .*device_put",
    ),
    "tiers that are used up": (
        lambda: tiered.prefetch(used_up(), IDS),
        RuntimeError,
        r"prefetch: tiers\.cache was used up",
    ),
    "one table twice": (
        lambda: tiered.prefetch(tiered.Tiers(*[made(128)] * 2), IDS),
        ValueError,
        r"prefetch: tiers\.store must be another table than tiers\.cache, .* same arrays",
    ),
    "tables the other way": (
        lambda: tiered.find(tiered.Tiers(*tiers_of(128, 1024)[::-1]), IDS),
        ValueError,
        r"find: tiers\.store must have room .* 1024 entries at least, got 128: the order is "
        r"Tiers\(cache, store\)",
    ),
    "a store smaller than its cache": (
        lambda: tiered.create_store(made(1024), 512),
        ValueError,
        r"create_store: capacity must be that of cache and store together, 1024 at least",
    ),
    "the name of a device": (
        lambda: tiered.create_store(made(128), 1024, device="cpu"),
        TypeError,
        r"create_store: device must be one of jax\.devices\(\) .* got str 'cpu'",
    ),
    "a mask beside bags": (
        lambda: tiered.prefetch(
            tiers_of(128, 1024),
            hkv.Jagged.from_lists([[1]], capacity=4),
            valid=np.ones(4, bool),
        ),
        TypeError,
        r"prefetch: valid must be None where keys are Jagged",
    ),
    "a mask of what is kept": (
        lambda: tiered.admit(made(128), IDS, keep=IDS, keep_valid=np.ones(4, bool)),
        TypeError,
        r"admit: keep_valid must be bool\[3\]",
    ),
    "a store of another policy, later": (
        lambda: tiered.exchange(made(1024), tiered.admit(made(128, policy=hkv.Policy.LFU), IDS)[1]),
        ValueError,
        r"exchange: admitted must be of a cache under the store's policy, LRU",
    ),
    "entries of another cache": (
        lambda: tiered.restore(
            made(128, None),
            tiered.exchange(made(1024), tiered.admit(made(128), IDS)[1])[1]._replace(
                entries=hkv.export_batch(made(128), 0, 4)
            ),
        ),
        ValueError,
        r"restore: fetched must have entries like the cache's, .*\{\}.* got .*'mu'",
    ),
    "ids that are none": (
        lambda: tiered.prefetch(tiers_of(128, 1024), np.ones(3)),
        TypeError,
        r"prefetch: keys must hold integers",
    ),
    "a mask of another shape": (
        lambda: tiered.admit(made(128), IDS, valid=np.ones(4, bool)),
        TypeError,
        r"admit: valid must be bool\[3\]",
    ),
    "no yes or no": (
        lambda: tiered.prefetch(tiers_of(128, 1024), IDS, insert="no"),
        TypeError,
        r"prefetch: insert must be True or False",
    ),
    "arguments in another order": (
        lambda: tiered.exchange(made(1024), made(128)),
        TypeError,
        r"exchange: admitted must be what tiered\.admit returned, got Table: .*order",
    ),
    "what was admitted given back": (
        lambda: tiered.restore(*tiered.admit(made(128), IDS)),
        TypeError,
        r"restore: fetched must be what tiered\.exchange returned, got Admitted",
    ),
    "a store of other rows": (
        lambda: tiered.exchange(made(1024, None), tiered.admit(made(128), IDS)[1]),
        ValueError,
        r"exchange: admitted must have entries like the store's, .*\{\}.* got .*'mu'",
    ),
    "entries of another policy": (
        lambda: tiered.import_entries(
            tiers_of(128, 1024), sharding.export_entries(made(128, policy=hkv.Policy.LFU))
        ),
        ValueError,
        r"import_entries: exported must have scores of Policy\.LRU",
    ),
    "both limits of an export": (
        lambda: tiered.export_entries(
            tiers_of(128, 1024), min_score=1, changed_since=sharding.export_entries(made(128))
        ),
        ValueError,
        r"export_entries: changed_since makes a min_score",
    ),
    "a store of no table": (
        lambda: COLLECTION.prefetch(
            COLLECTION.create(), {"users": made(128, None)}, inputs_of(np.random.default_rng(0))
        ),
        ValueError,
        r"Collection\.prefetch: stores must be a dict by names of some of the physical tables "
        r"\['users\+items', 'words', 'frozen'\], got \['users'\]: make them by \{name: tiered",
    ),
    "one store for two tables": (
        lambda: COLLECTION_OF_EQUALS.prefetch(
            COLLECTION_OF_EQUALS.create(), dict.fromkeys("ab", made(128)), {"a": IDS, "b": IDS}
        ),
        ValueError,
        "of 'a': tiers.store must have a name like the cache's, 'a', got 'table': make it by",
    ),
    "ids of a table that is not there": (
        lambda: COLLECTION.on_tables(
            hkv.erase, {"words": made(1024)}, {"words": IDS, "users": IDS}
        ),
        ValueError,
        r"on_tables: tables must have 'users\+items', which holds 'users', got \['words'\]",
    ),
    "sizes of other tables": (
        lambda: COLLECTION.sizes({"others": made(1024)}),
        ValueError,
        r"Collection\.sizes: tables must be those of create\(\)",
    ),
    "one store for all": (
        lambda: COLLECTION.prefetch(
            COLLECTION.create(), made(128), inputs_of(np.random.default_rng(0))
        ),
        ValueError,
        r"Collection\.prefetch: stores must be a dict .* got Table",
    ),
    "a store of another group": (
        lambda: COLLECTION.prefetch(
            COLLECTION.create(),
            {"words": made(1024, policy=hkv.Policy.LFU)},
            inputs_of(np.random.default_rng(0)),
        ),
        ValueError,
        r"prefetch of 'words': tiers\.store must have rows and optimizer rows like the cache's",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_tiers_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_store_has_first_rows_of_equal_bits_however_they_were_given():
    near, behind = (
        tiers_of(128, 1024, init=hkv.initializers.normal(number))
        for number in (0.1, np.float32(0.1))
    )
    assert tiered.size(near._replace(store=behind.store)) == 0


def test_ids_of_a_later_table_that_are_wrong_use_up_no_earlier_one():
    collection = collection_of(128)
    tables = collection.create()
    names = ["users+items", "words"]
    both = {
        name: tiered.Tiers(tables[name], tiered.create_store(tables[name], 1024)) for name in names
    }
    wrong = {
        "floats": {"users": IDS, "words": np.ones(3)},
        "64 bits": {"users": IDS, "words": np.array([2**40])},
        "no such table": {"users": IDS, "frozen": IDS},
    }
    for ids in wrong.values():
        with pytest.raises((TypeError, ValueError)):
            collection.on_tables(tiered.erase, both, ids)
    masks = {"users": np.ones(3, bool), "words": np.ones(4, bool)}
    with pytest.raises(TypeError, match=r"on_tables: valid must be bool\[3\]"):
        collection.on_tables(tiered.erase, both, {"users": IDS, "words": IDS}, valid=masks)
    assert [tiered.size(own) for own in both.values()] == [0, 0]


def test_tables_that_are_wrong_use_up_no_earlier_one():
    collection, names = collection_of(128), ["users+items", "words"]
    ids = {"users": IDS, "words": IDS}

    def made_anew():
        tables = collection.create()
        return {n: tiered.Tiers(tables[n], tiered.create_store(tables[n], 1024)) for n in names}

    def refused(kind, message, wrong, ids=ids, **options):
        first = wrong["users+items"]
        with pytest.raises(kind, match=message) as raised:
            collection.on_tables(tiered.erase, wrong, ids, **options)
        assert tiered.size(first) == 0  # it is there
        return getattr(raised.value, "__notes__", [])

    both = made_anew()
    message = (
        r"on_tables: tables must be Tiers, all .* Tiers of \['users\+items'\], but .*\['words'\]"
    )
    refused(TypeError, message, {**both, "words": both["words"].cache})
    tiered.erase(both["words"], IDS)
    refused(RuntimeError, r"on_tables of 'words': tiers\.cache was used up by an earlier", both)
    both, longer = made_anew(), {**ids, "words": np.arange(4, dtype=np.int32)}
    notes = refused(TypeError, r"valid must be bool\[4\]", both, longer, valid=np.ones(3, bool))
    assert notes == ["Collection.on_tables: of the table 'words'"]
    collection.on_tables(tiered.erase, both, ids, valid=np.ones(3, bool))  # of both


def test_one_store_of_two_tables_is_not_used_up_twice():
    tables = COLLECTION_OF_EQUALS.create()
    store = tiered.create_store(tables["a"], 1024)
    both = {name: tiered.Tiers(table, store) for name, table in tables.items()}
    message = "of 'b': tiers.store must have a name like the cache's, 'b', got 'a': make it"
    with pytest.raises(ValueError, match=message):
        COLLECTION_OF_EQUALS.on_tables(tiered.erase, both, {"a": IDS, "b": IDS})
    assert tiered.size(both["a"]) == 0


def test_a_jitted_function_of_tables_is_asked_about_both_before_it_uses_one_up():
    tiers = tiers_of(128, 1024, policy=hkv.Policy.EPOCH_LRU)

    @functools.partial(jax.jit, donate_argnums=0)
    def unpacked_nowhere(table):
        return hkv.expire(table, 30)

    @functools.partial(jax.jit, donate_argnums=0)
    def refuses_the_store(table):
        return hkv.insert_or_assign(table, IDS, np.ones((3, DIM + (table.capacity > 128))))[0]

    with pytest.raises(TypeError, match=r"Table, got tuple of fn\(tiers\.cache\): .*has_aux"):
        tiered.map_tables(tiers, unpacked_nowhere)
    with pytest.raises(ValueError, match="insert_or_assign: values must have shape"):
        tiered.map_tables(tiers, functools.partial(refuses_the_store))
    with pytest.raises(TypeError, match=r"fn must return \(table, anything\) with has_aux"):
        tiered.map_tables(tiers, jax.jit(hkv.advance_epoch, donate_argnums=0), has_aux=True)
    assert tiered.size(tiers) == 0
    tiers, _ = tiered.prefetch(tiers, IDS)
    tiers = tiered.map_tables(tiers, lambda table: hkv.advance_epoch(table, 9))
    tiers, (of_cache, of_store) = tiered.map_tables(tiers, unpacked_nowhere, has_aux=True)
    assert (int(of_cache), int(of_store)) == (0, 0)
    tiers = tiered.map_tables(tiers, lambda table: hkv.advance_epoch(table, 40))
    tiers, (of_cache, of_store) = tiered.map_tables(tiers, unpacked_nowhere, has_aux=True)
    assert (int(of_cache), int(of_store)) == (3, 0) and tiered.size(tiers) == 0


@pytest.mark.parametrize(
    "ids",
    [
        np.array([1, 2, 3], ">i4"),
        np.ma.array([1, 2, 3], mask=[0, 1, 0], dtype=np.int32),
        np.array([1, 2, 2**40]),
        np.ones(3, np.float32),
    ],
    ids=["bytes the other way", "masked", "64 bits", "floats"],
)
def test_wrong_ids_are_refused_by_a_compiled_program_too(ids):
    """Whose shape is that of right ones."""
    collection = hkv.Collection(
        [hkv.TableConfig("items", 128, DIM, optimizer=ADAM)],
        [hkv.Feature("item", "items"), hkv.Feature("bag", "items", "mean")],
    )
    tables = collection.create()
    stores = {name: tiered.create_store(table, 1024) for name, table in tables.items()}
    bag = hkv.Jagged(IDS, np.array([0, 2, 3], np.int32))
    tables, stores, _ = collection.prefetch(tables, stores, {"item": IDS, "bag": bag})
    for wrong in (
        {"item": ids, "bag": bag},
        {"item": IDS, "bag": hkv.Jagged(ids, bag.row_splits)},
    ):
        with pytest.raises(TypeError, match="keys|ids|endian"):
            collection.prefetch(tables, stores, wrong)
    splits = np.array([0, 2, 9], np.int32)
    with pytest.raises(ValueError, match="row_splits must"):
        collection.prefetch(tables, stores, {"item": IDS, "bag": hkv.Jagged(IDS, splits)})
    with pytest.raises(ValueError, match="row_splits must"):
        masked = hkv.Padded(hkv.Jagged(IDS, splits), np.ones(len(IDS), bool))
        collection.prefetch(tables, stores, {"item": IDS, "bag": masked})
    assert int(collection.sizes(tables)["items"]) == 3


def test_a_store_of_other_keys_is_refused():
    """Those of a collection with another order of its tables."""
    config = [hkv.TableConfig(name, 128, DIM, optimizer=ADAM) for name in ("users", "items")]
    features = [hkv.Feature(each.name, each.name) for each in config]
    near, far = (hkv.Collection(tables, features) for tables in (config, config[::-1]))
    (cache,), (other,) = near.create().values(), far.create().values()
    with pytest.raises(ValueError, match=r"tiers\.store must have keys like the cache's, keys"):
        tiered.find(tiered.Tiers(cache, tiered.create_store(other, 1024)), IDS)


def test_nothing_is_changed_by_what_is_refused():
    tiers = tiers_of(128, 1024)
    tiers, _ = tiered.prefetch(tiers, IDS)
    before = jax.tree.map(np.array, tiers)
    exported = sharding.export_entries(made(128, policy=hkv.Policy.LFU))
    for call in (
        lambda: tiered.import_entries(tiers, exported),
        lambda: tiered.prefetch(tiers, np.ones(3)),
        lambda: tiered.erase(tiers, IDS, valid=np.ones(4, bool)),
    ):
        with pytest.raises((TypeError, ValueError)):
            call()
    assert_same_bits(tiers, before)


def test_a_prefetch_inside_of_placement_says_that_it_knows_one_part():
    placement = sharding.Placement(jax.make_mesh((2,), ("device",), devices=jax.devices()[:2]))
    parts = placement.create(lambda: tiered.Tiers(made(128), made(1024)))
    step = placement.step(lambda tiers, ids: (tiered.prefetch(tiers, ids)[0], None))
    with pytest.warns(
        UserWarning, match=r"tiered\.prefetch: .* part of 2.*outside of steps, with placement="
    ):
        step(parts, placement.put(np.arange(8, dtype=np.int32)))
