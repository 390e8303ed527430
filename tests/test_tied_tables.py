"""Layers of nnx that share one table, as `decoder.embedding = encoder.embedding` has it."""

from __future__ import annotations

import contextlib
import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_expire import warnings_of

import jax_hkv as hkv

DIM, IDS = 8, 40
OPTIMIZERS = {
    "adagrad": lambda: hkv.optim.adagrad(0.1),
    "Adam": lambda: hkv.optim.adam(0.01),
    "a schedule": lambda: hkv.optim.sparse(optax.sgd(optax.linear_schedule(1.0, 0.0, 5))),
}


class Model(nnx.Module):
    """Rows of some ids against rows of others."""

    def __init__(self, optimizer, tie):
        self.inp = hkv.nnx.Embed(1024, DIM, optimizer=optimizer)
        self.out = self.inp if tie == "layer" else hkv.nnx.Embed(1024, DIM, optimizer=optimizer)
        if tie == "table":
            self.out.table = self.inp.table

    def __call__(self, ids, others, train=True):
        return jnp.sum(self.inp(ids, train=train) * self.out(others, train=train), axis=-1)


def loss_fn(model, ids, others, labels):
    return jnp.mean((model(ids, others) - labels) ** 2)


def batches(rng, count=5):
    for _ in range(count):
        ids, others = rng.integers(0, IDS, (2, 16), dtype=np.int32)
        yield ids, others, rng.random(16, np.float32)


def trained(tie, optimizer, made, **options):
    state = hkv.nnx.TrainState(Model(optimizer, tie), optax.sgd(0.1))
    step = hkv.nnx.train_step(loss_fn, **options)
    infos = [step(state, *batch) for batch in made]
    return state, infos


@pytest.mark.parametrize("options", [{}, {"max_norm": 0.05}, {"micro_batches": 2}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_shared_table_has_one_update_a_step(rng, name, options):
    """In bits what a layer that is called twice has: its count, its clipped norm, its rows."""
    made = list(batches(rng))
    one, of_layer = trained("layer", OPTIMIZERS[name](), made, **options)
    two, of_table = trained("table", OPTIMIZERS[name](), made, **options)
    for a, b in zip(of_layer, of_table, strict=True):
        assert a.loss == b.loss
        assert [*b.tables] == ["inp/table"]
        assert b.tables["inp/table"].hits == a.tables["inp/table"].hits
    tables = [state.model.inp.table.get_value() for state in (one, two)]
    wanted, found = (hkv.find(table, np.arange(IDS, dtype=np.int32))[1].values for table in tables)
    np.testing.assert_array_equal(found, wanted)
    assert two.model.out.table is two.model.inp.table
    counts = tables[1].optimizer.shared.values()
    assert all(int(count[0]) == len(made) for count in counts)


def test_a_layer_that_only_reads_shares_the_table_of_one_that_trains(rng):
    """Whichever comes first in the model."""

    class Reader(nnx.Module):
        def __init__(self):
            self.a_reader = hkv.nnx.Embed(1024, DIM)
            self.trainer = hkv.nnx.Embed(1024, DIM, optimizer=hkv.optim.sgd(0.1))
            self.a_reader.table = self.trainer.table

    state = hkv.nnx.TrainState(Reader(), optax.sgd(0.1))
    step = hkv.nnx.train_step(
        lambda model, ids: jnp.sum(
            model.trainer(ids, train=True) + model.a_reader(ids, train=False)
        )
    )
    ids = np.arange(3, dtype=np.int32)
    first = hkv.initial_rows(state.model.trainer.table.get_value(), ids)
    info = step(state, ids)
    assert [*info.tables] == ["a_reader/table"]
    np.testing.assert_allclose(state.model.a_reader(ids), first - 0.1, rtol=1e-6)


def test_two_optimizers_of_one_table_are_refused():
    model = Model(hkv.optim.sgd(0.1), "none")
    model.out = hkv.nnx.Embed(1024, DIM, optimizer=hkv.optim.sgd(0.2))
    model.out.table = model.inp.table
    with pytest.raises(
        ValueError, match=r"share a table must have one optimizer.*'out/table'.*same"
    ):
        hkv.nnx.TrainState(model, optax.sgd(0.1))


@pytest.mark.parametrize("mode", ["set_graph_mode", "set_graph_updates"])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=str)
def test_models_train_in_flax_modes_for_trees_too(rng, mode, options):
    if not hasattr(nnx, mode):
        pytest.skip("this Flax has no such mode")
    made = list(batches(rng, 2))
    losses = []
    for setting in (contextlib.nullcontext(), getattr(nnx, mode)(False)):
        with setting:
            _, infos = trained("none", hkv.optim.adam(0.1), made, **options)
        losses.append([float(info.loss) for info in infos])
    assert losses[0] == losses[1]


class Coder(nnx.Module):
    """Calls its first layer first, which comes last by its name."""

    def __init__(self):
        options = {"optimizer": hkv.optim.sgd(1.0), "return_evicted": True}
        self.encoder = hkv.nnx.Embed(128, DIM, **options)
        self.decoder = hkv.nnx.Embed(128, DIM, **options)
        self.decoder.table = self.encoder.table


def full_state():
    """Of a model whose table is full, and the ids in it."""
    state = hkv.nnx.TrainState(Coder(), optax.sgd(0.1))
    known = np.arange(128, dtype=np.int32)
    table, _ = hkv.find_or_insert(state.model.encoder.table.get_value(), known)
    state.model.encoder.table.set_value(table)
    return state, known


def test_what_a_shared_table_has_displaced_is_told_in_order_of_time():
    """Each lookup displaces what was there before the step, with the rows from then."""
    state, known = full_state()
    table = state.model.encoder.table.get_value()
    table, _ = hkv.assign(table, known[:1], np.full((1, DIM), 77.0, np.float32))
    state.model.encoder.table.set_value(table)

    def loss(model, first, second, third):
        rows = [model.encoder(first, train=True), model.encoder(second, train=True)]
        return sum(each.sum() for each in [*rows, model.decoder(third, train=True)])

    info = hkv.nnx.train_step(loss)(state, *np.split(known + 1000, [64, 104]))
    ((_, evicted),) = info.evicted.items()
    assert [int(each.count) for each in evicted] == [64, 40, 24]
    gone = [each.keys.to_numpy()[: int(each.count)] for each in evicted]
    assert sorted(np.concatenate(gone).tolist()) == known.tolist()
    store = hkv.create(4096, DIM, policy=table.policy)
    store = hkv.optim.sgd(1.0).init(store)
    for entries in reversed(evicted):
        store, _ = hkv.import_batch(store, entries)
    assert hkv.find(store, known[:1])[1].values.tolist() == [[77.0] * DIM]


def nested(embed, ids):
    """A helper of the user's, whose program nnx keeps."""
    return embed(ids, train=True)


def test_lookups_in_programs_that_flax_keeps_have_their_turn():
    """The second one of a step, however often its program has been taken for others."""
    kept = nnx.jit(nested)

    def loss(model, first, second, more):
        rows = model.decoder(first, train=True)
        return (rows.sum() + kept(model.encoder, second).sum()) * more.mean()

    step = hkv.nnx.train_step(loss)
    for places in (3, 5):
        state, known = full_state()
        first, second = np.split(known + 1000, [48])
        info = step(state, first, second, np.ones(places, np.float32))
        ((_, evicted),) = info.evicted.items()
        assert [int(each.count) for each in evicted] == [48, 80]
        assert type(state.model.encoder.table.get_value()) is hkv.Table


def test_a_table_that_a_loss_reads_and_writes_is_a_plain_one():
    """In what it returns, too; and the lookups around it keep their order."""

    def loss(model, first, second):
        before = model.encoder.table.get_value()
        rows = model.decoder(first, train=True)
        after = model.encoder.table.get_value()
        assert jax.tree.structure(before) == jax.tree.structure(after)
        model.encoder.table.set_value(hkv.advance_epoch(after))
        rows = [rows, model.encoder(second, train=True)]
        return sum(each.sum() for each in rows), model.encoder.table.get_value()

    state, known = full_state()
    info = hkv.nnx.train_step(loss, has_aux=True)(state, *np.split(known + 1000, [48]))
    ((_, evicted),) = info.evicted.items()
    assert [int(each.count) for each in evicted] == [48, 80]
    assert type(info.aux) is hkv.Table and int(info.aux.epoch[0]) == 1


def test_a_loop_of_the_users_compiles_a_kept_program_once():
    kept = nnx.jit(nested)
    model = Coder()
    differentiate = hkv.nnx.value_and_grad(
        lambda model, ids: model.encoder(ids, train=True).sum() + kept(model.decoder, ids).sum()
    )
    ids = np.arange(60, dtype=np.int32)
    for _ in range(2):
        hkv.nnx.update_tables(model, differentiate(model, ids)[2])
    with jax.log_compiles(), warnings_of("jax") as records:
        for _ in range(3):
            hkv.nnx.update_tables(model, differentiate(model, ids)[2])
    assert [text for text in records if "Compiling" in text] == []


@pytest.mark.parametrize("taken", [False, True])
def test_both_branches_of_a_condition_may_look_up(taken):
    class Switched(nnx.Module):
        def __init__(self):
            self.embed = hkv.nnx.Embed(256, DIM, optimizer=hkv.optim.sgd(1.0))

        def __call__(self, is_double, ids):
            one = lambda embed, ids: embed(ids, train=True).sum()  # noqa: E731
            other = lambda embed, ids: 2 * embed(ids + 50, train=True).sum()  # noqa: E731
            return nnx.cond(is_double, other, one, self.embed, ids)

    ids, asked = np.arange(9, dtype=np.int32), np.arange(59, dtype=np.int32)
    state = hkv.nnx.TrainState(Switched(), optax.sgd(0.1))
    start = hkv.initial_rows(state.model.embed.table.get_value(), asked)
    hkv.nnx.train_step(lambda model, *batch: model(*batch))(state, jnp.array(taken), ids)
    _, found = hkv.find(state.model.embed.table.get_value(), asked, fill="initial")
    expected = np.array(start)
    expected[50:] -= 2 * taken
    expected[:9] -= not taken
    np.testing.assert_allclose(found.values, expected, atol=1e-6)
    assert np.flatnonzero(found.found).tolist() == [*(ids + 50 * taken)]


def test_counts_are_named_by_the_layer_that_looked_up():
    """Not by the one whose name comes first."""

    class Both(nnx.Module):
        def __init__(self):
            config = hkv.TableConfig("x", 256, DIM, optimizer=hkv.optim.sgd(0.1))
            declared = hkv.Collection([config], [hkv.Feature("f", "x")])
            self.q = hkv.nnx.EmbedCollection(declared)
            self.embed = hkv.nnx.Embed(256, DIM, optimizer=config.optimizer)
            ((attribute, _, _),) = self.q._owners()
            self.embed.table = getattr(self.q, attribute)

    state = hkv.nnx.TrainState(Both(), optax.sgd(0.1))
    step = hkv.nnx.train_step(
        lambda model, ids: (
            model.q({"f": ids}, train=True)["f"].sum() + model.embed(ids, train=True).sum()
        )
    )
    info = step(state, np.arange(3, dtype=np.int32))
    assert [*info.tables] == ["embed/table"] and [*info.counts] == ["q/x"]
    assert int(info.counts["q/x"].inserted) == 3


def test_an_argument_that_holds_arrays_of_the_state_is_named(rng):
    state = hkv.nnx.TrainState(Model(hkv.optim.sgd(0.1), "layer"), optax.sgd(0.1))
    step = hkv.nnx.train_step(
        lambda model, target, *batch: (
            loss_fn(model, *batch) + jnp.sum(target(*batch[:2], train=False))
        )
    )
    batch = next(batches(rng))
    with pytest.raises(jax.errors.JaxRuntimeError, match="donated") as caught:
        step(state, nnx.clone(state.model), *batch)
    assert "copy.deepcopy" in "".join(caught.value.__notes__)
    step(state, copy.deepcopy(state.model), *batch)
