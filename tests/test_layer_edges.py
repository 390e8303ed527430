"""What goes wrong around layers and collections is named; what looks alike behaves alike."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv
from jax_hkv import whole_table

DIM = 4
SGD = hkv.optim.sgd(0.1)
IDS = np.array([1, 2, 3], np.int32)


def collection(*names, **options):
    options = {"capacity": 128, "dim": DIM, "optimizer": SGD, **options}
    return hkv.Collection(
        [hkv.TableConfig(name, **options) for name in names],
        [hkv.Feature(f"f_{name}", name) for name in names],
    )


class NnxModel(nnx.Module):
    def __init__(self, **options):
        self.embed = hkv.nnx.Embed(256, DIM, optimizer=SGD, **options)

    def __call__(self, ids, train=False):
        return self.embed(ids, train=train)


def apis(**options):
    """A training step of either kind, and a function that gives its table."""
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    states = [hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=optax.sgd(0.1))]
    linen_step = hkv.linen.train_step(lambda apply, ids: apply(ids, train=True).sum(), **options)

    def step_linen(ids):
        states[0], info = linen_step(states[0], ids)
        return info

    nnx_state = hkv.nnx.TrainState(NnxModel(), optax.sgd(0.1))
    nnx_step = hkv.nnx.train_step(lambda model, ids: model(ids, train=True).sum(), **options)
    return {
        "linen": (step_linen, lambda: states[0].tables["table"]),
        "nnx": (
            lambda ids: nnx_step(nnx_state, ids),
            lambda: nnx_state.model.embed.table.get_value(),
        ),
    }


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_ids_that_jit_would_cut_are_refused_and_small_ones_are_not(api, request):
    """NumPy's integers are 64-bit ones: those that fit are taken, those that do not are named."""
    step, table = apis()[api]
    before = int(hkv.size(table()))
    if not request.config.getoption("--x64"):
        for ids in (np.array([5, 5 + 2**32]), np.array([2**32], np.uint64)):
            with pytest.raises(TypeError, match=r"arguments\[0\] holds u?int64.*Keys.from_numpy"):
                step(ids)
    assert int(hkv.size(table())) == before
    step(hkv.Keys.from_numpy(np.array([5, 5 + 2**32])))
    step(np.array([5, -7]))
    assert int(hkv.size(table())) == before + 3


def entrances(ids):
    """Where ids are given outside a trace: what each of them makes of these, for evaluation."""
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=optax.sgd(0.1))
    declared = collection("a")
    bags = hkv.Jagged(ids, np.arange(len(ids) + 1, dtype=np.int32))
    return {
        "create": lambda: hkv.linen.TrainState.create(
            model, jax.random.key(0), ids, tx=optax.sgd(0.1)
        ).apply(ids),
        "apply": lambda: state.apply(ids),
        "init": lambda: model.init_with_output(jax.random.key(0), ids)[0],
        "nnx": lambda: NnxModel()(ids),
        "bag": lambda: hkv.nnx.EmbedBag(256, DIM)(bags),
        "feature": lambda: hkv.nnx.EmbedCollection(declared)({"f_a": ids})["f_a"],
        "constant of a jit": lambda: jax.jit(lambda: state.apply(ids))(),
        "operation": lambda: hkv.find(hkv.create(256, DIM), ids, fill="initial")[1].values,
    }


@pytest.mark.parametrize("entrance", entrances(IDS))
def test_numpy_integers_of_64_bits_are_taken_where_32_hold_them(entrance, request):
    """They are NumPy's default, and mean the ids that they would mean as 32-bit ones."""
    for ids in (
        np.array([5, -7, 2**31 - 1, -(2**31)], np.int32),
        np.array([5, 2**31, 2**32 - 1], np.uint32),
    ):
        wide = ids.astype(f"{ids.dtype.kind}8")
        rows = np.asarray(entrances(ids)[entrance]())
        np.testing.assert_array_equal(rows, entrances(wide)[entrance]())
        np.testing.assert_array_equal(rows, entrances(hkv.Keys.from_numpy(wide))[entrance]())
    if not request.config.getoption("--x64"):
        for ids in (np.array([5, 2**31]), np.array([2**32], np.uint64)):
            with pytest.raises(TypeError, match=r"NumPy u?int64.*Keys\.from_numpy"):
                entrances(ids)[entrance]()


@pytest.mark.parametrize("layer", [hkv.nnx.Embed, hkv.nnx.EmbedBag])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_negative_scores_are_refused(layer, kind):
    """As keys they would be the largest there are."""
    with pytest.raises(ValueError, match="scores are unsigned, got -1"):
        layer(256, DIM, policy=hkv.Policy.LFU)(
            IDS[None], train=True, scores=np.array([[2, -1, 1]], kind)
        )


@pytest.mark.parametrize("number", [5, -7])
def test_an_id_is_one_key_whichever_way_it_came(number):
    table, _ = hkv.find_or_insert(hkv.create(256, DIM), hkv.Keys.from_numpy(number))
    for given in (np.int64(number), np.int32(number), jnp.int32(number), np.array(number)):
        for contains in (hkv.contains, jax.jit(hkv.contains)):
            assert contains(table, given)[1], given


@pytest.mark.parametrize("splits", [[0, 1, 9], [0, 3, 1], [1, 2, 3]])
def test_row_splits_that_do_not_fit_are_refused_before_a_step(splits):
    bags = hkv.Jagged(IDS, np.array(splits, np.int32))
    layer = hkv.linen.EmbedBag(256, DIM, optimizer=SGD)
    good = hkv.Jagged.from_lists([[1, 2], [3]])
    state = hkv.linen.TrainState.create(layer, jax.random.key(0), good, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, bags: apply(bags, train=True).sum())
    with pytest.raises(ValueError, match="row_splits of a Jagged must start at 0"):
        step(state, bags)


def test_tables_in_another_order_are_not_taken_for_each_other():
    """Their number is in the keys: the name of the physical table says which it is."""
    tables = collection(*"abcd").create()
    inputs = {f"f_{name}": IDS for name in "abcd"}
    collection(*"abcd").lookup(tables, inputs)
    with pytest.raises(ValueError, match="tables must be those of create"):
        collection(*"acbd").lookup(tables, inputs)


@pytest.mark.parametrize(
    "declare, kind, message",
    [
        (lambda: hkv.Collection(
            [hkv.TableConfig("a", 128, 4), hkv.TableConfig("b", 128, 4),
             hkv.TableConfig("a+b", 128, 8)],
            [hkv.Feature(f"f_{name}", name) for name in ("a", "b", "a+b")],
        ), ValueError, "physical tables have equal names"),
        (lambda: collection("a", "a"), ValueError, "table 'a' is declared twice"),
        (lambda: collection("a", optimizer=optax.adam(1e-3)), TypeError,
         "TableConfig 'a': optimizer must come from jax_hkv.optim"),
        (lambda: collection("a", capacity=-10), ValueError,
         "TableConfig 'a': capacity must be from 1"),
        (lambda: collection("a", dim=0), ValueError, "TableConfig 'a': dim must be from 1"),
        (lambda: collection("a", dtype="int32"), TypeError,
         "TableConfig 'a': dtype must be float32, bfloat16 or float16, got int32"),
        (lambda: collection("a", policy="lru"), ValueError,
         "TableConfig 'a': policy must be one of LRU"),
        (lambda: collection("a", init=3), TypeError, "TableConfig 'a': init must come from"),
        (lambda: hkv.TableConfig(7, 128, 4), TypeError, "TableConfig 7: name must be a str"),
        (lambda: collection("a", "b", capacity=2**31).create(), ValueError,
         "Collection: tables ['a', 'b']: create: capacity must be"),
        (lambda: hkv.nnx.Embed(128, DIM, optimizer=optax.adam(1e-3)), TypeError,
         "Embed: optimizer must come from jax_hkv.optim"),
        (lambda: hkv.nnx.Embed(128, DIM, embedding_init=nn.initializers.normal(0.1)), TypeError,
         "Embed: embedding_init must come from jax_hkv.initializers"),
        (lambda: hkv.linen.EmbedBag(128, DIM, embedding_init=nn.initializers.normal(0.1)).init(
            jax.random.key(0), IDS[None]), TypeError,
         "EmbedBag: embedding_init must come from jax_hkv.initializers"),
        (lambda: collection("a", init=nn.initializers.normal(0.1)), TypeError,
         "TableConfig 'a': init must come from jax_hkv.initializers"),
        (lambda: hkv.linen.Embed(128, DIM, optimizer=optax.adam(1e-3)).init(
            jax.random.key(0), IDS), TypeError, "Embed: optimizer must come from jax_hkv.optim"),
        (lambda: collection("a").lookup(collection("a").create(), {"f_a": IDS}, fill="zeros"),
         ValueError, 'fill must be "initial" or 0, got \'zeros\''),
        (lambda: hkv.optim.LossScale.create(-1.0), ValueError, "scale must be from"),
        (lambda: hkv.optim.LossScale.create(period=0), ValueError, "period must be"),
        (lambda: hkv.optim.clip_by_global_norm(-1.0, {}, [], []), ValueError,
         "max_norm must be positive"),
        (lambda: hkv.optim.adam(float("nan")), ValueError, "learning_rate must be finite"),
        (lambda: hkv.optim.sparse(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation())
         .init(hkv.create(128, DIM)), ValueError, "give the results and gradients of several"),
        (lambda: hkv.optim.sparse(optax.apply_if_finite(optax.sgd(1.0), 5))
         .init(hkv.create(128, DIM)), ValueError, "of which one is no number"),
        (lambda: hkv.nnx.update_tables(NnxModel(), {"other": hkv.nnx.RowGradients([], [], [])}),
         ValueError, "must be of the model's tables ['embed/table'], got ['other']"),
    ],
)  # fmt: skip
def test_a_wrong_declaration_is_named(declare, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        declare()


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
def test_evaluation_of_an_nnx_model_changes_nothing_and_works_in_any_trace():
    model = NnxModel()
    model(IDS, train=True)
    values = model.embed.table.get_value().values
    rows = model(IDS)
    assert model.embed.table.get_value().values is values
    np.testing.assert_array_equal(jax.jit(lambda ids: model(ids))(IDS), rows)
    np.testing.assert_array_equal(jax.lax.map(lambda i: model(i[None])[0], jnp.asarray(IDS)), rows)
    assert jax.eval_shape(lambda ids: model(ids), IDS).shape == rows.shape


def test_an_nnx_step_takes_arguments_that_change():
    """Random streams, say."""
    state = hkv.nnx.TrainState(NnxModel(), optax.sgd(0.1))

    def loss_fn(model, ids, rngs):
        return (model(ids, train=True) * jax.random.normal(rngs.noise(), (3, DIM))).sum()

    step = hkv.nnx.train_step(loss_fn, donate=False)
    rngs = nnx.Rngs(noise=0)
    losses = [float(step(state, IDS, rngs).loss) for _ in range(2)]
    assert losses[0] != losses[1] and int(rngs.noise.count[...]) == 2


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
def test_gradients_of_an_earlier_nnx_batch_go_to_its_own_rows():
    """They carry their keys; what happened to the model since does not matter."""
    model, one, other = NnxModel(), np.array([1, 2], np.int32), np.array([7, 8], np.int32)
    differentiate = hkv.nnx.value_and_grad(lambda model, ids: model(ids, train=True).sum())
    _, _, rows = differentiate(model, one)
    differentiate(model, other)
    model(np.array([9], np.int32), train=True)
    first = [np.asarray(model(ids)) for ids in (one, other)]
    hkv.nnx.update_tables(model, rows)
    np.testing.assert_allclose(model(one), first[0] - 0.1, rtol=1e-6)
    np.testing.assert_array_equal(model(other), first[1])


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
def test_an_error_in_an_nnx_loss_leaves_the_model_usable():
    model = NnxModel()

    def wrong(model, ids):
        model(ids, train=True)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        hkv.nnx.value_and_grad(wrong)(model, IDS)
    assert set(nnx.to_pure_dict(nnx.state(model))["embed"]) == {"table"}
    assert model(np.array([4, 5], np.int32), train=True).shape == (2, DIM)


def test_weights_are_differentiable_where_the_table_is_read_again():
    """The clock of a differentiated lookup goes on to a read."""
    table = hkv.create(256, DIM)
    keys = hkv.Keys.from_numpy(np.array([[1, 2], [3, 4]]))

    def loss(weights, table):
        table, pooled = hkv.find_or_insert_pooled(table, keys, weights=weights)
        table, found = hkv.find(table, keys)
        return jnp.sum(pooled.values * found.values[:, 0])

    gradient = jax.jit(jax.grad(loss))(jnp.ones((2, 2), jnp.float32), table)
    rows = hkv.initial_rows(table, keys)
    np.testing.assert_allclose(gradient, jnp.sum(rows * rows[:, :1], axis=-1), rtol=1e-5)


class LinenNormed(nn.Module):
    @nn.compact
    def __call__(self, ids, train=False):
        x = hkv.linen.Embed(256, DIM, optimizer=SGD)(ids, train=train)
        return nn.BatchNorm(use_running_average=not train)(x)


class NnxNormed(nnx.Module):
    def __init__(self):
        self.embed = hkv.nnx.Embed(256, DIM, optimizer=SGD)
        self.norm = nnx.BatchNorm(DIM, rngs=nnx.Rngs(0))

    def __call__(self, ids, factor, train=False):
        return self.norm(self.embed(ids, train=train) * factor, use_running_average=not train)


def test_a_skipped_step_keeps_the_statistics_of_batch_norm():
    scale = hkv.optim.LossScale.create(4.0)
    state = hkv.nnx.TrainState(NnxNormed(), optax.sgd(0.1), scale)
    step = hkv.nnx.train_step(lambda m, ids, factor: jnp.sum(m(ids, factor, train=True) ** 2))
    assert step(state, IDS, jnp.float32(1.0)).finite
    before = np.asarray(state.model.norm.mean[...])
    assert not step(state, IDS, jnp.float32(np.inf)).finite
    np.testing.assert_array_equal(state.model.norm.mean[...], before)
    assert before.any()

    linen = hkv.linen.TrainState.create(
        LinenNormed(), jax.random.key(0), IDS, tx=optax.sgd(0.1), loss_scale=scale
    )
    linen_step = hkv.linen.train_step(
        lambda apply, ids, factor: jnp.sum((apply(ids, train=True) * factor) ** 2), donate=False
    )
    after, info = linen_step(linen, IDS, jnp.float32(np.inf))
    assert not info.finite
    jax.tree.map(np.testing.assert_array_equal, after.variables, linen.variables)
    after, _ = linen_step(linen, IDS, jnp.float32(1.0))
    assert not np.array_equal(
        *(s.variables["batch_stats"]["BatchNorm_0"]["mean"] for s in (after, linen))
    )


def test_a_linen_model_that_sows_keeps_its_structure():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, ids, train=False):
            rows = hkv.linen.Embed(256, DIM, optimizer=SGD)(ids, train=train)
            self.sow("losses", "norm", jnp.sum(rows**2))
            return rows

    state = hkv.linen.TrainState.create(Sowing(), jax.random.key(0), IDS, tx=optax.sgd(0.1))
    traces = []

    def loss_fn(apply, ids):
        traces.append(1)
        return apply(ids, train=True).sum()

    step = hkv.linen.train_step(loss_fn)
    for number in range(3):
        state, _ = step(state, IDS)
        if number == 0:
            first = len(traces)
    assert len(traces) == first


def test_a_table_without_an_optimizer_is_only_read_beside_trained_ones():
    declared = hkv.Collection(
        [hkv.TableConfig("a", 128, DIM, optimizer=SGD), hkv.TableConfig("fixed", 128, DIM)],
        [hkv.Feature("f_a", "a"), hkv.Feature("f_fixed", "fixed")],
    )
    inputs = {"f_a": IDS, "f_fixed": IDS}
    layer = hkv.linen.EmbedCollection(declared)
    state = hkv.linen.TrainState.create(layer, jax.random.key(0), inputs, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(
        lambda apply, x: sum(rows.sum() for rows in apply(x, train=True).values())
    )
    state, info = step(state, inputs)
    assert {name: int(hkv.size(table)) for name, table in state.tables.items()} == {
        "a": 3, "fixed": 0,
    }  # fmt: skip
    assert set(info.tables) == {"a"}
    twin = hkv.nnx.TrainState(hkv.nnx.EmbedCollection(declared), optax.sgd(0.1))
    nnx_step = hkv.nnx.train_step(
        lambda model, x: sum(rows.sum() for rows in model(x, train=True).values())
    )
    assert set(nnx_step(twin, inputs).tables) == {"a"}
    assert int(hkv.size(twin.model.tables["fixed"])) == 0


def test_a_lookup_of_a_collection_can_be_jitted_and_sizes_compile_once():
    declared = collection("a", "b")
    tables = declared.create()
    inputs = {"f_a": IDS, "f_b": IDS}
    lookup = jax.jit(declared.lookup, static_argnames="train")
    tables, found = lookup(tables, inputs, train=True)
    assert declared.spread(found.rows, found.parts)["f_a"].shape == (3, DIM)
    declared.sizes(tables)
    before = whole_table.sizes_by._cache_size()
    assert {name: int(size) for name, size in declared.sizes(tables).items()} == {"a": 3, "b": 3}
    assert whole_table.sizes_by._cache_size() == before > 0


def test_a_loss_scale_serves_two_states():
    shared = hkv.optim.LossScale.create(8.0)
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    step = hkv.linen.train_step(lambda apply, ids: apply(ids, train=True).sum())
    for _ in range(2):
        state = hkv.linen.TrainState.create(
            model, jax.random.key(0), IDS, tx=optax.sgd(0.1), loss_scale=shared
        )
        step(state, IDS)


@pytest.mark.parametrize("opt", [SGD, hkv.optim.sparse(optax.adam(0.1))])
def test_a_python_bool_says_whether_to_apply(opt):
    table = opt.init(hkv.create(128, DIM))
    table, result = hkv.find_or_insert(table, IDS)
    skipped = opt.update(table, result, jnp.ones((3, DIM), jnp.float32), apply=False)
    jax.tree.map(np.testing.assert_array_equal, skipped.values, table.values)
    applied = opt.update(table, result, jnp.ones((3, DIM), jnp.float32), apply=True)
    assert (np.asarray(applied.values) != np.asarray(table.values)).any()


def test_masks_and_weights_of_a_feature_can_be_lists():
    declared = collection("a")
    padded = hkv.Padded(IDS[None], valid=[[True, True, False]], weights=[[1.0, 2.0, 3.0]])
    _, found = declared.lookup(declared.create(), {"f_a": padded})
    rows = np.asarray(hkv.initial_rows(declared.create()["a"], IDS))
    np.testing.assert_allclose(found.rows["a"][0], rows[0] + 2 * rows[1], rtol=1e-6)


@pytest.mark.parametrize(
    "tx, got",
    [
        (nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(0.1), wrt=nnx.Param),
         "Optimizer"),
        (SGD, "FusedOptimizer"),
        (hkv.optim.sparse(optax.sgd(0.1)), "SparseOptimizer"),
        (optax.sgd, "function"),
    ],
)  # fmt: skip
def test_an_optimizer_that_is_none_for_dense_parameters_is_named(tx, got):
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    message = f"TrainState.*: tx must be an optax.GradientTransformation.*got {got}: give optax"
    with pytest.raises(TypeError, match=message):
        hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=tx)
    with pytest.raises(TypeError, match=message):
        hkv.nnx.TrainState(NnxModel(), tx)


def test_what_is_no_state_of_a_step_is_named():
    """States of the other module, a model, and arguments in another order."""
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=optax.sgd(0.1))
    twin = hkv.nnx.TrainState(NnxModel(), optax.sgd(0.1))
    wrong = {"linen": (twin, model, IDS), "nnx": (state, twin.model, IDS)}
    for api, given in wrong.items():
        step = getattr(hkv, api).train_step(lambda model, ids: model(ids, train=True).sum())
        for each in given:
            got = f"{type(each).__module__}.{type(each).__name__}"
            with pytest.raises(TypeError, match=rf"state.*jax_hkv\.{api}\.TrainState.*got {got}: "):
                step(each, IDS)


class Tower(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return hkv.linen.Embed(256, DIM)(ids)


class Towers(nn.Module):
    @nn.compact
    def __call__(self, ids):
        return [Tower(name=name)(ids) for name in TOWERS]


def test_tables_of_linen_layers_are_named_by_their_path():
    tables = Towers().init(jax.random.key(0), IDS)["tables"]
    names = [tables[tower]["Embed_0"]["table"].name for tower in TOWERS]
    assert names == ["user/Embed_0", "item/Embed_0"]
    alone = hkv.linen.EmbedBag(256, DIM).init(jax.random.key(0), IDS[None])["tables"]
    assert alone["table"].name == "EmbedBag"


LOSSES = {
    r"int32\[\]": lambda rows: (rows > 0).sum(dtype="int32"),
    r"bool\[\]": lambda rows: (rows > 0).any(),
    r"float32\[3, 4\]": lambda rows: rows,
    "tuple": lambda rows: (rows.sum(), {}),
    "NoneType": lambda rows: None,
}


@pytest.mark.parametrize("got", LOSSES)
def test_a_loss_that_is_no_number_is_refused(got):
    """By a number without a derivative every gradient would be zero, and nothing would be said."""
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, ids: LOSSES[got](apply(ids, train=True)))
    nnx_state = hkv.nnx.TrainState(NnxModel(), optax.sgd(0.1))
    nnx_step = hkv.nnx.train_step(lambda model, ids: LOSSES[got](model(ids, train=True)))
    for own, own_state in ((step, state), (nnx_step, nnx_state)):
        with pytest.raises(TypeError, match=f"one floating-point number.*, got {got}: take a mean"):
            own(own_state, IDS)


def test_a_loss_with_more_beside_it_is_a_pair():
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, ids: apply(ids, train=True).sum(), has_aux=True)
    with pytest.raises(TypeError, match=r"a pair of it and anything\), got float32\[\]"):
        step(state, IDS)


TOWERS = ("user", "item")


class LinenTowers(nn.Module):
    """Two tables, and a third without an optimizer, which is never trained."""

    @nn.compact
    def __call__(self, ids, train=()):
        rows = [
            hkv.linen.Embed(256, DIM, optimizer=SGD, name=name)(ids, train=name in train)
            for name in TOWERS
        ]
        frozen = hkv.linen.Embed(256, DIM, name="frozen")(ids)
        return nn.Dense(1)(rows[0] * rows[1] + frozen)


class NnxTowers(nnx.Module):
    def __init__(self):
        self.user = hkv.nnx.Embed(256, DIM, optimizer=SGD)
        self.item = hkv.nnx.Embed(256, DIM, optimizer=SGD)
        self.frozen = hkv.nnx.Embed(256, DIM)
        self.dense = nnx.Linear(DIM, 1, rngs=nnx.Rngs(0))

    def __call__(self, ids, train=()):
        rows = [getattr(self, name)(ids, train=name in train) for name in TOWERS]
        return self.dense(rows[0] * rows[1] + self.frozen(ids))


def step_of_towers(api, train):
    """A training step that trains the towers named."""

    def loss_fn(model, ids):
        return (model(ids, train=train) ** 2).mean()

    if api == "nnx":
        state = hkv.nnx.TrainState(NnxTowers(), optax.sgd(0.1))
        return lambda: hkv.nnx.train_step(loss_fn)(state, IDS)
    state = hkv.linen.TrainState.create(LinenTowers(), jax.random.key(0), IDS, tx=optax.sgd(0.1))
    return lambda: hkv.linen.train_step(loss_fn)(state, IDS)[1]


def test_an_nnx_layer_that_nobody_will_train_says_so():
    """The usual loop of nnx inserts ids and trains dense parameters alone."""
    model = NnxTowers()
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def loss_fn(model, train):
        return (model(IDS, train=train) ** 2).mean()

    with pytest.warns(UserWarning, match=r"Embed: .*hkv\.nnx\.value_and_grad") as caught:
        _, gradients = nnx.value_and_grad(lambda model: loss_fn(model, ("user",)))(model)
    assert [Path(warning.filename).name for warning in caught] == ["test_layer_edges.py"]
    optimizer.update(model, gradients)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hkv.nnx.value_and_grad(loss_fn)(model, ("user", "item"))
        loss_fn(model, ())
        hkv.nnx.Embed(256, DIM)(IDS, train=True)  # it has no optimizer to wait for


def test_a_table_that_does_not_fit_an_nnx_layer_is_refused():
    model = NnxTowers()
    model.user.table.set_value(hkv.create(128, DIM + 1))
    with pytest.raises(ValueError, match=rf"Embed: table .* {DIM} .*got dim {DIM + 1}"):
        model(IDS)
    model.user.table = hkv.create(128, DIM)
    with pytest.raises(TypeError, match=r"Embed: table .*\.set_value\(table\)"):
        model(IDS)
    features = hkv.nnx.EmbedCollection(collection("a"))
    features.table_a.set_value(hkv.create(128, DIM + 1))
    with pytest.raises(ValueError, match=rf"EmbedCollection: table_a .* {DIM} .*dim {DIM + 1}"):
        features({"f_a": IDS})


WAITING = optax.MultiSteps(optax.sgd(0.1), 4)
LEFT_OUT = {
    "MultiSteps.*tables are updated in every": WAITING.gradient_transformation(),
    "apply_if_finite.*rows get.*LossScale": optax.apply_if_finite(optax.sgd(0.1), 5),
}


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("message", LEFT_OUT)
def test_steps_that_dense_parameters_alone_leave_out_are_noted(api, message):
    """Rows wait for no micro-steps, and are poisoned by gradients that are not finite."""
    tx = optax.chain(optax.clip(1.0), LEFT_OUT[message])

    def state_of(linen, of_nnx):
        if api == "nnx":
            return hkv.nnx.TrainState(of_nnx(), tx)
        return hkv.linen.TrainState.create(linen(), jax.random.key(0), IDS, tx=tx)

    with pytest.warns(UserWarning, match=f"TrainState.*{message}") as caught:
        state_of(LinenTowers, NnxTowers)
    assert [Path(warning.filename).name for warning in caught] == ["test_layer_edges.py"]
    with warnings.catch_warnings():  # a table that nothing trains waits for nobody
        warnings.simplefilter("error")
        state_of(lambda: hkv.linen.Embed(128, DIM), lambda: hkv.nnx.Embed(128, DIM))


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_step_that_trains_no_table_is_refused(api):
    """Its loss would fall all the same, by the dense parameters alone."""
    with pytest.raises(ValueError, match=r"\['item/table', 'user/table'\].*call .*train=True"):
        step_of_towers(api, ())()


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_step_that_trains_some_tables_names_the_others_once(api):
    """Tasks may take turns, so this is no error."""
    with pytest.warns(UserWarning, match=r"train_step: .*\['item/table'\].*train=True") as caught:
        assert set(step_of_towers(api, ("user",))().tables) == {"user/table"}
    assert len([each for each in caught if "item/table" in str(each.message)]) == 1


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_step_that_trains_all_tables_with_an_optimizer_says_nothing(api):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(step_of_towers(api, TOWERS)().tables) == {"item/table", "user/table"}


def test_a_model_whose_tables_have_no_optimizer_trains_its_dense_part():
    class Frozen(nn.Module):
        @nn.compact
        def __call__(self, ids):
            return nn.Dense(1)(hkv.linen.Embed(256, DIM)(ids))

    state = hkv.linen.TrainState.create(Frozen(), jax.random.key(0), IDS, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, ids: (apply(ids) ** 2).mean(), donate=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after, info = step(state, IDS)
    assert not info.tables
    kernels = [each.params["Dense_0"]["kernel"] for each in (state, after)]
    assert not np.array_equal(*kernels)


def test_a_collection_that_is_not_trained_is_refused_by_the_names_of_its_tables():
    declared = collection("a", "b")
    inputs = {"f_a": IDS, "f_b": IDS}
    layer = hkv.linen.EmbedCollection(declared)
    state = hkv.linen.TrainState.create(layer, jax.random.key(0), inputs, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, x: sum(rows.sum() for rows in apply(x).values()))
    with pytest.raises(ValueError, match=r"\['a\+b'\]"):
        step(state, inputs)
