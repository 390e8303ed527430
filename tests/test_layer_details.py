"""What layers are given comes where it belongs; what steps report is all of it."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from test_layers import layer_step, state_of

import jax_hkv as hkv
from jax_hkv._namespaces import NumberOf
from jax_hkv.whole_table import sizes_over_devices

DIM = 4
IDS = np.array([1, 2, 3], np.int32)
SGD = hkv.optim.sgd(0.1)


class Two(nn.Module):
    """Two layers, of which those train that are named."""

    @nn.compact
    def __call__(self, ids, train=()):
        layers = [hkv.linen.Embed(256, DIM, optimizer=SGD, name=name) for name in ("a", "b")]
        return sum(layer(ids, train=layer.name in train) for layer in layers)


def assert_made_alike(table, expected):
    """Everything static of them, and the types and shapes of their arrays."""
    assert jax.tree.structure(table) == jax.tree.structure(expected)
    kinds = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(t)] for t in (table, expected)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("bag", ["Embed", "EmbedBag"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_layer_makes_its_table_of_all_that_it_is_given(api, bag):
    options = {
        "policy": hkv.Policy.LFU,
        "choices": 2,
        "seed": 7,
        "admission": hkv.admission.frequency(2, width=64),
    }
    init = hkv.initializers.normal(0.5)
    layer = getattr(getattr(hkv, api), bag)(
        200, DIM, param_dtype=jnp.bfloat16, embedding_init=init, **options
    )
    if api == "linen":
        table = layer.init(jax.random.key(0), IDS[None])["tables"]["table"]
    else:
        table = layer.table.get_value()
    table = dataclasses.replace(table, index=dataclasses.replace(table.index, name="table"))
    expected = hkv.create(200, DIM, dtype=jnp.bfloat16, init=init, **options)
    assert_made_alike(table, expected)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_learned_row_has_the_type_of_the_rows(api):
    declared = hkv.Collection(
        [hkv.TableConfig("a", 128, DIM, dtype=jnp.bfloat16)], [hkv.Feature("f", "a")]
    )
    one, several = getattr(hkv, api).Embed, getattr(hkv, api).EmbedCollection
    layers = [
        one(128, DIM, param_dtype="bfloat16", unseen="learned"),
        several(declared, unseen="learned"),
    ]
    for layer, inputs in zip(layers, (IDS, {"f": IDS}), strict=True):
        if api == "linen":
            params = layer.init(jax.random.key(0), inputs)["params"]
        else:
            params = nnx.state(layer, nnx.Param)
        assert [leaf.dtype for leaf in jax.tree.leaves(params)] == [jnp.bfloat16]


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_collection_gives_outputs_of_the_type_that_was_asked_for(api):
    declared = hkv.Collection([hkv.TableConfig("a", 128, DIM)], [hkv.Feature("f", "a")])
    layer = getattr(hkv, api).EmbedCollection(declared, dtype=jnp.bfloat16)
    inputs = {"f": IDS}
    rows = layer.init_with_output(jax.random.key(0), inputs)[0] if api == "linen" else layer(inputs)
    assert rows["f"].dtype == jnp.bfloat16


def test_a_skipped_nnx_step_goes_on_in_the_stream_of_random_numbers():
    class Noisy(nnx.Module):
        def __init__(self):
            self.rngs = nnx.Rngs(noise=0)
            self.embed = hkv.nnx.Embed(256, DIM, optimizer=SGD)

        def __call__(self, ids):
            rows = self.embed(ids, train=True)
            return rows * jax.random.normal(self.rngs.noise(), rows.shape)

    state = hkv.nnx.TrainState(Noisy(), optax.sgd(0.1), hkv.optim.LossScale.create(4.0))
    step = hkv.nnx.train_step(lambda model, ids, factor: (model(ids) * factor).sum())
    assert not step(state, IDS, jnp.float32(np.inf)).finite
    assert int(state.model.rngs.noise.count[...]) == 1


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("unseen", ["initial", "zeros", "learned"])
def test_masked_ids_get_zeros_whatever_unseen_ones_get(api, unseen):
    valid = np.array([True, False, True])
    layer = getattr(hkv, api).Embed(128, DIM, unseen=unseen)
    if api == "linen":
        variables = layer.init(jax.random.key(0), IDS)
        if unseen == "learned":
            variables = {**variables, "params": {"unseen": jnp.ones(DIM)}}
        rows = layer.apply(variables, IDS, valid=valid)
    else:
        if unseen == "learned":
            layer.unseen_row.set_value(jnp.ones(DIM))
        rows = layer(IDS, valid=valid)
    assert not np.asarray(rows[1]).any()
    assert np.asarray(rows[0]).any() == (unseen != "zeros")


@pytest.mark.parametrize("part", ["rows", "rows of two lookups", "dense"])
def test_a_step_is_skipped_if_any_gradient_is_not_finite(part):
    """Of the rows alone, or of the dense parameters alone."""
    lookups = 2 if part == "rows of two lookups" else 1

    class Apart(nn.Module):
        @nn.compact
        def __call__(self, ids, factors):
            layer = hkv.linen.Embed(256, DIM, optimizer=SGD)
            rows = sum(layer(ids, train=not self.is_initializing()) for _ in range(lookups))
            return (rows * factors[0]).sum() + (
                self.param("w", nn.initializers.ones, ()) * factors[1]
            )

    good = jnp.ones(2)
    bad = good.at[1 if part == "dense" else 0].set(jnp.inf)
    scale = hkv.optim.LossScale.create(4.0)
    state = hkv.linen.TrainState.create(
        Apart(), jax.random.key(0), IDS, good, tx=optax.sgd(0.1), loss_scale=scale
    )
    step = hkv.linen.train_step(lambda apply, *args: apply(*args), donate=False)
    assert step(state, IDS, good)[1].finite
    after, info = step(state, IDS, bad)
    assert not info.finite and float(after.loss_scale.scale) == 2.0
    np.testing.assert_array_equal(after.params["w"], 1.0)
    (table,) = jax.tree.leaves(after.tables, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    np.testing.assert_array_equal(hkv.find(table, IDS)[1].values, hkv.initial_rows(table, IDS))


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_the_bound_of_a_norm_is_that_of_gradients_without_their_loss_scale(api):
    rate, ids = hkv.optim.sgd(1.0), np.arange(16, dtype=np.int32)
    scale = hkv.optim.LossScale.create(2.0**10)

    def moved(bound):
        layer = getattr(hkv, api).Embed(256, DIM, optimizer=rate)
        table = layer_step(api, layer, ids, loss_scale=scale, max_norm=bound)(ids)
        return np.linalg.norm(hkv.find(table, ids)[1].values - hkv.initial_rows(table, ids))

    np.testing.assert_allclose([moved(1.0), moved(100.0)], [1.0, 8.0], rtol=1e-5)
    state = state_of(api, getattr(hkv, api).Embed(256, DIM, optimizer=rate), ids, scale)
    step = getattr(hkv, api).train_step(lambda call, ids: call(ids, train=True).sum(), max_norm=1.0)
    info = step(state, ids)[1] if api == "linen" else step(state, ids)
    np.testing.assert_allclose(info.grad_norm, 8.0, rtol=1e-5)


def test_counts_of_a_table_are_summed_over_the_lookups_of_a_step():
    declared = hkv.Collection(
        [hkv.TableConfig("a", 128, DIM, optimizer=SGD)], [hkv.Feature("f", "a")]
    )
    layer = hkv.linen.EmbedCollection(declared)
    first, second = {"f": IDS}, {"f": np.array([3, 4], np.int32)}
    state = hkv.linen.TrainState.create(layer, jax.random.key(0), first, tx=optax.sgd(0.1))

    def loss_fn(apply, *inputs):
        return sum(apply(each, train=True)["f"].sum() for each in inputs)

    _, info = hkv.linen.train_step(loss_fn)(state, first, second)
    assert jax.tree.map(int, info.counts["a"]) == hkv.Counts(5, 1, 4, 0, 0, 0)


def test_gradients_lose_their_scale_in_float32():
    """float16 has no number for what is left of them."""
    x, scale = jnp.ones((2, 4)), hkv.optim.LossScale.create(2.0**15)
    model = nn.Dense(1, param_dtype=jnp.float16, dtype=jnp.float16)
    state = hkv.linen.TrainState.create(
        model, jax.random.key(0), x, tx=optax.scale(-1e8), loss_scale=scale
    )
    step = hkv.linen.train_step(
        lambda apply, x: apply(x).astype(jnp.float32).mean() * 1e-9, donate=False
    )
    after, info = step(state, x)
    moved = np.float32(state.params["kernel"]) - np.float32(after.params["kernel"])
    assert info.finite
    np.testing.assert_allclose(moved, 0.1, rtol=0.02)


def test_weight_decay_of_half_parameters_is_taken_in_float32():
    x, scale = jnp.ones((2, 4)), hkv.optim.LossScale.create(2.0)
    model = nn.Dense(1, param_dtype=jnp.float16, dtype=jnp.float16)
    tx = optax.chain(optax.add_decayed_weights(1e-8), optax.scale(-1e7))
    state = hkv.linen.TrainState.create(model, jax.random.key(0), x, tx=tx, loss_scale=scale)
    step = hkv.linen.train_step(
        lambda apply, x: apply(x).astype(jnp.float32).mean() * 0, donate=False
    )
    after, _ = step(state, x)
    before = np.float32(state.params["kernel"])
    np.testing.assert_allclose(np.float32(after.params["kernel"]), 0.9 * before, rtol=2e-3)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_missing_feature_is_refused_by_the_layers_too(api):
    declared = hkv.Collection(
        [hkv.TableConfig("a", 128, DIM)], [hkv.Feature("f", "a"), hkv.Feature("g", "a")]
    )
    layer = getattr(hkv, api).EmbedCollection(declared)
    both = {"f": IDS, "g": IDS}
    if api == "linen":
        variables = layer.init(jax.random.key(0), both)
        call = functools.partial(layer.apply, variables)
    else:
        call = layer
    with pytest.raises(ValueError, match=r"missing: \['g'\]"):
        call({"f": IDS})
    assert set(call({"f": IDS}, partial=True)) == {"f"}


def test_the_dense_gradients_are_those_of_the_filter():
    class Other(nnx.Variable):
        pass

    class Model(nnx.Module):
        def __init__(self):
            self.embed = hkv.nnx.Embed(256, DIM, optimizer=SGD)
            self.other, self.param = Other(jnp.ones(())), nnx.Param(jnp.ones(()))

        def __call__(self, ids):
            return (self.embed(ids, train=True) * self.other[...] * self.param[...]).sum()

    differentiate = hkv.nnx.value_and_grad(lambda model, ids: model(ids), wrt=Other)
    _, dense, rows = differentiate(Model(), IDS)
    assert set(nnx.to_pure_dict(dense)) == {"other"} and set(rows) == {"embed/table"}


def test_an_update_that_fails_for_one_table_changes_no_other_one():
    class Pair(nnx.Module):
        def __init__(self):
            self.a = hkv.nnx.Embed(256, DIM, optimizer=SGD)
            self.b = hkv.nnx.Embed(256, DIM)

        def __call__(self, ids):
            return self.a(ids, train=True) + self.b(ids, train=True)

    model = Pair()
    _, _, rows = hkv.nnx.value_and_grad(lambda model, ids: model(ids).sum())(model, IDS)
    assert list(rows) == ["a/table", "b/table"]
    before = model.a.table.get_value()
    with pytest.raises(ValueError, match="update_tables: b/table .* has no optimizer"):
        hkv.nnx.update_tables(model, rows)
    np.testing.assert_array_equal(model.a.table.get_value().values, before.values)


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize("bag", ["Embed", "EmbedBag"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_scores_that_a_layer_is_given_are_those_of_its_table(api, bag):
    layer = getattr(getattr(hkv, api), bag)(128, DIM, optimizer=SGD, policy=hkv.Policy.CUSTOM)
    scores = np.array([[7, 8, 9]], np.uint32)
    if api == "linen":
        variables = layer.init(jax.random.key(0), IDS[None])
        _, updated = layer.apply(
            variables, IDS[None], train=True, scores=scores, mutable=hkv.linen.MUTABLE
        )
        table = updated["tables"]["table"]
    else:
        layer(IDS[None], train=True, scores=scores)
        table = layer.table.get_value()
    assert sorted(hkv.sharding.export_entries(table).scores.tolist()) == [7, 8, 9]


def test_a_state_counts_its_steps_and_takes_the_arguments_of_init():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids, *, width=1, train=False):
            return nn.Dense(width)(hkv.linen.Embed(256, DIM, optimizer=SGD)(ids, train=train))

    state = hkv.linen.TrainState.create(Model(), jax.random.key(0), IDS, tx=optax.sgd(0.1), width=3)
    assert state.params["Dense_0"]["kernel"].shape == (DIM, 3)
    step = hkv.linen.train_step(lambda apply, ids: apply(ids, train=True, width=3).sum())
    for _ in range(2):
        state, _ = step(state, IDS)
    assert int(state.step) == 2


def test_perturbations_are_those_of_the_call_that_is_given():
    model = Two()
    variables = model.init(jax.random.key(0), IDS)
    zeros = hkv.linen.perturbations(model, variables, IDS, train=("b",))
    assert set(zeros) == {"b"}


def test_perturbations_of_an_evaluation_are_none_and_warned_of():
    variables = Two().init(jax.random.key(0), IDS)
    with pytest.warns(
        UserWarning, match="linen.perturbations: the call looks up no rows in training"
    ):
        assert hkv.linen.perturbations(Two(), variables, IDS) == {}


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
def test_perturbations_of_a_later_step_are_those_of_its_lookups_alone():
    """Where the variables still hold the record of an earlier one."""
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    variables = model.init(jax.random.key(0), IDS)
    _, updated = model.apply(variables, IDS, train=True, mutable=hkv.linen.MUTABLE)
    zeros = hkv.linen.perturbations(model, {**variables, **updated}, IDS, train=True)
    assert set(zeros) == {"table_rows_0"}


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize(
    ("options", "step"), [({"learning_rate": 0.5}, 0.5), ({"apply": False}, 0)]
)
def test_options_of_an_update_by_hand_are_those_of_the_optimizer(options, step):
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    variables = model.init(jax.random.key(0), IDS)
    rows, updated = model.apply(variables, IDS, train=True, mutable=hkv.linen.MUTABLE)
    gradients = {"table_rows_0": jnp.ones_like(rows)}
    tables = hkv.linen.update_tables(updated, gradients, **options)
    np.testing.assert_allclose(rows - hkv.find(tables["table"], IDS)[1].values, step, rtol=1e-5)


def test_flax_serialization_takes_leaves_in_any_order():
    table = SGD.init(hkv.create(128, DIM, policy=hkv.Policy.EPOCH_LRU))
    table, _ = hkv.find_or_insert(hkv.advance_epoch(table, 3), IDS)
    state = serialization.to_state_dict(table)
    backwards = dict(reversed(state.items()))
    restored = serialization.from_state_dict(
        SGD.init(hkv.create(128, DIM, policy=hkv.Policy.EPOCH_LRU)), backwards
    )
    jax.tree.map(np.testing.assert_array_equal, restored, table)


def test_a_collection_makes_its_tables_of_all_that_they_are_declared_with():
    options = {
        "dtype": jnp.bfloat16,
        "policy": hkv.Policy.EPOCH_LFU,
        "choices": 2,
        "init": hkv.initializers.normal(0.25),
        "seed": 7,
        "admission": hkv.admission.frequency(2, width=64),
    }
    declared = hkv.Collection([hkv.TableConfig("a", 200, DIM, **options)], [hkv.Feature("f", "a")])
    table, expected = declared.create()["a"], hkv.create(200, DIM, name="a", **options)
    assert_made_alike(table, expected)


@pytest.mark.parametrize("combiner", ["sum", None])
def test_masks_and_weights_of_single_ids_count(combiner):
    declared = hkv.Collection([hkv.TableConfig("a", 128, DIM)], [hkv.Feature("f", "a", combiner)])
    valid, weights = np.array([True, False, True]), np.array([1.0, 2.0, 3.0], np.float32)
    tables = declared.create()
    rows = np.asarray(hkv.initial_rows(tables["a"], IDS))
    expected = {
        "both": (hkv.Padded(IDS, valid, weights), rows * (valid * weights)[:, None]),
        "mask": (hkv.Padded(IDS, valid=valid), rows * valid[:, None]),
        "weights": (hkv.Padded(IDS, weights=weights), rows * weights[:, None]),
    }
    for name, (padded, wanted) in expected.items():
        _, found = declared.lookup(tables, {"f": padded})
        spread = declared.spread(found.rows, found.parts)["f"]
        np.testing.assert_allclose(spread, wanted, rtol=1e-6, err_msg=name)


def one_of(name, combiner=None):
    return hkv.Collection(
        [hkv.TableConfig(name, 256, DIM)], [hkv.Feature(f"f_{name}", name, combiner)]
    )


KEY = jax.random.key(0)


def use(flax, kind, *args, inputs=IDS, **options):
    """Makes a layer, and calls it."""
    layer = getattr(flax, kind)(*args, **options)
    return layer.init(KEY, inputs) if flax is hkv.linen else layer(inputs)


def start(flax, **options):
    """A training state."""
    options = {"model": flax.Embed(256, DIM, optimizer=SGD), "tx": optax.sgd(0.1), **options}
    if flax is hkv.linen:
        return flax.TrainState.create(options.pop("model"), KEY, IDS, **options)
    return flax.TrainState(**options)


WRONG = {
    "a loss scale that is a number": (
        lambda flax: start(flax, loss_scale=1024.0),
        r"loss_scale must be a jax_hkv\.optim\.LossScale, .* got float: .*LossScale\.create\(1024"),
    "a model of the other module": (
        lambda flax: start(flax, model=OTHER[flax].Embed(256, DIM, optimizer=SGD)),
        r"model must be a flax\.\w+\.Module, got jax_hkv\.\w+\.Embed: one of linen goes to"),
    "the class of a model": (
        lambda flax: start(flax, model=flax.Embed),
        r"model must be .*, got the class Embed: give an instance, Embed\(\.\.\.\)"),
    "a mesh for a placement": (
        lambda flax: flax.train_step(lambda *_: 0.0, placement=jax.make_mesh((1,), ("device",))),
        r"train_step: placement must be .* got Mesh: make one .*sharding\.Placement\(mesh\)"),
    "a state for a loss": (
        lambda flax: flax.train_step(start(flax)),
        r"train_step: loss_fn must be a function of \(\w+, \*args\) to a loss, got TrainState: "),
    "no function of tables": (
        lambda flax: start(flax).map_tables(None),
        "map_tables: fn must be a function from a table to a table, got NoneType: give jax_hkv"),
    "tables for a collection": (
        lambda flax: use(flax, "EmbedCollection", [hkv.TableConfig("a", 128, DIM)]),
        r"EmbedCollection: collection must be a jax_hkv\.Collection, .*Collection\(tables, feat"),
    "an output in no type": (
        lambda flax: use(flax, "Embed", 128, DIM, dtype="x"),
        "Embed: dtype must be floating-point, got 'x': give jnp.bfloat16"),
    "an output in a flag": (
        lambda flax: use(flax, "EmbedBag", 128, DIM, dtype=True, inputs=IDS[None]),
        "EmbedBag: dtype must be floating-point, got True: give jnp.bfloat16"),
    "outputs in integers": (
        lambda flax: use(
            flax, "EmbedCollection", one_of("a"), dtype="int8", inputs={"f_a": IDS}),
        "EmbedCollection: dtype must be floating-point, got int8, which would cut"),
    "rows in no type": (
        lambda flax: use(flax, "Embed", 128, DIM, dtype=jnp.bfloat16, param_dtype=jnp.float64),
        "Embed: param_dtype must be float32, bfloat16 or float16, got float64"),
    "features that are no integer": (
        lambda flax: use(flax, "EmbedBag", 128, 16.0, inputs=IDS[None]),
        "EmbedBag: features must be an integer, got float 16.0"),
    "a capacity that is no integer": (
        lambda flax: use(flax, "Embed", "large", DIM),
        "Embed: capacity must be an integer, got str 'large'"),
    "first rows that are a number": (
        lambda flax: use(flax, "Embed", 128, DIM, embedding_init=0.1),
        "Embed: embedding_init must come from jax_hkv.initializers"),
}  # fmt: skip
OTHER = {hkv.linen: hkv.nnx, hkv.nnx: hkv.linen}


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_layers_states_and_steps_is_named(name, api):
    call, message = WRONG[name]
    with pytest.raises(TypeError, match=message):
        call(getattr(hkv, api))


@pytest.mark.parametrize("layer", ["Embed", "EmbedBag", "EmbedCollection"])
def test_a_table_that_does_not_fit_a_linen_layer_is_refused(layer):
    """Put there by hand: its rows would go on into the model."""
    if layer == "EmbedCollection":
        model, name, inputs = hkv.linen.EmbedCollection(one_of("a")), "a", {"f_a": IDS}
    else:
        model, name, inputs = getattr(hkv.linen, layer)(256, DIM), "table", IDS[:, None]
    model.init(jax.random.key(0), inputs)
    with pytest.raises(ValueError, match=rf"{layer}: {name} must have rows of {DIM} .*dim={DIM}"):
        model.apply({"tables": {name: hkv.create(256, DIM + 1)}}, inputs)


PADDED = {
    "a mask": ({"valid": np.ones((2, 2), bool)}, r"valid must be bool\[2, 3\] .*got bool\[2, 2\]"),
    "a mask of integers": (
        {"valid": np.ones((2, 3), int)},
        r"valid must be bool\[2, 3\] .*got int",
    ),
    "weights": ({"weights": np.ones((2, 1), "f")}, r"weights must be float32\[2, 3\].*\[2, 1\]"),
}


@pytest.mark.parametrize("combiner", [None, "mean"])
@pytest.mark.parametrize("name", PADDED)
def test_what_does_not_fit_padded_ids_is_named_by_their_shape(name, combiner):
    """Not by the shape of their bags, which have an axis more."""
    given, message = PADDED[name]
    declared = one_of("a", combiner)
    inputs = {"f_a": hkv.Padded(np.ones((2, 3), np.int32), **given)}
    with pytest.raises(TypeError, match=message):
        declared.lookup(declared.create(), inputs)


def test_a_flat_mask_of_ids_with_a_combiner_is_named_by_its_shape():
    declared = one_of("a", "sum")
    inputs = {"f_a": hkv.Padded(np.ones(3, np.int32), valid=np.ones((3, 1), bool))}
    with pytest.raises(TypeError, match=r"valid must be bool\[3\] .*got bool\[3, 1\]"):
        declared.lookup(declared.create(), inputs)


def test_a_step_that_debugging_runs_again_is_not_said_to_be_an_earlier_one():
    """JAX runs a step again to find where a NaN comes from, which has used its state up."""
    model = hkv.linen.Embed(256, DIM, optimizer=SGD)
    state = hkv.linen.TrainState.create(model, jax.random.key(0), IDS, tx=optax.sgd(0.1))
    step = hkv.linen.train_step(lambda apply, ids, factor: (apply(ids, train=True) * factor).sum())
    state, _ = step(state, IDS, np.float32(1))
    with jax.debug_nans(True), pytest.raises(RuntimeError, match="or by this one, in which JAX"):
        step(state, IDS, np.float32("nan"))


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_sizes_of_tables_over_devices_are_those_of_all_parts(mode):
    names = ("a", "b", "c")
    declared = hkv.Collection(
        [hkv.TableConfig(name, 512, DIM) for name in names],
        [hkv.Feature(f"f_{name}", name, None) for name in names],
    )
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("cpu")[:2])
    placement = hkv.sharding.Placement(mesh, mode=mode)
    ids = {name: np.arange(20 * (n + 1), dtype=np.int32) for n, name in enumerate(names)}

    def insert(tables, ids):
        insert = hkv.sharding.find_or_insert
        tables, found = declared.on_tables(insert, tables, ids, axis_name="d")
        return tables, found["a"].counts

    tables = placement.create(lambda: declared.create(axis_name="d"))
    parts = [own.capacity for part in placement.shards(tables) for own in part.values()]
    assert parts == [3 * 512 // 2] * 2, "each has its share"
    assert [int(size) for size in declared.sizes(tables).values()] == [0] * 3
    tables, _ = placement.step(insert)(tables, placement.put(ids))
    sizes = {name: int(size) for name, size in declared.sizes(tables).items()}
    assert sizes == {"a": 20, "b": 40, "c": 60}
    sizes = {name: int(size) for name, size in jax.jit(declared.sizes)(tables).items()}
    assert sizes == {"a": 20, "b": 40, "c": 60}


@pytest.mark.filterwarnings("ignore:.*nothing trains their rows")
@pytest.mark.parametrize("unseen", ["initial", "zeros", "learned"])
@pytest.mark.parametrize("bag", ["Embed", "EmbedBag"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_what_refused_ids_get_in_training(api, bag, unseen):
    rule = hkv.admission.frequency(2, width=64)
    layer = getattr(getattr(hkv, api), bag)(128, DIM, optimizer=SGD, admission=rule, unseen=unseen)
    ids, given = IDS[:, None], np.arange(DIM, dtype=np.float32)
    if api == "linen":
        variables = layer.init(jax.random.key(0), ids)
        if unseen == "learned":
            variables = {**variables, "params": {"unseen": given}}
        table = variables["tables"]["table"]
        rows, _ = layer.apply(variables, ids, train=True, mutable=hkv.linen.MUTABLE)
    else:
        if unseen == "learned":
            layer.unseen_row.set_value(jnp.asarray(given))
        table = layer.table.get_value()
        rows = layer(ids, train=True)
    own = np.asarray(hkv.initial_rows(table, IDS))
    expected = {"initial": own, "zeros": 0 * own, "learned": 0 * own + given}[unseen]
    np.testing.assert_array_equal(rows.reshape(3, DIM), expected)


def test_a_table_by_itself_has_the_counts_of_its_physical_table():
    declared = hkv.Collection(
        [hkv.TableConfig("a", 128, DIM, optimizer=SGD)], [hkv.Feature("f", "a")]
    )
    tables, found = declared.lookup(
        declared.create(), {"f": np.arange(128, dtype=np.int32)}, train=True
    )
    tables, found = declared.lookup(tables, {"f": np.array([5, 500], np.int32)}, train=True)
    counts = declared.groups[0].counts(found.results["a"])["a"]
    assert jax.tree.map(int, counts) == hkv.Counts(2, 1, 1, 1, 0, 0)


def many_tables(count):
    names = [f"t{number}" for number in range(count)]
    tables = [hkv.TableConfig(name, 128, DIM, optimizer=SGD) for name in names]
    return hkv.Collection(tables, [hkv.Feature(f"f_{name}", name, None) for name in names])


def test_sizes_over_devices_are_counted_at_once():
    """A sum for each table read all slots of all devices as often as there are tables."""
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("cpu")[:2])

    def program(count):
        (group,) = many_tables(count).groups
        table = hkv.sharding.Placement(mesh).create(lambda: group.create("d"))
        number_of = NumberOf(group.bits)
        return jax.jit(lambda table: sizes_over_devices(table, number_of, count)).lower(table)

    few, many = (program(count).as_text().count("\n") for count in (2, 40))
    assert few == many


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_weights_of_a_feature_are_not_cast(dtype):
    declared = hkv.Collection([hkv.TableConfig("a", 128, DIM)], [hkv.Feature("f", "a")])
    padded = hkv.Padded(IDS[None], weights=np.ones((1, 3), dtype))
    with pytest.raises(TypeError, match="feature 'f': weights must be float32"):
        declared.lookup(declared.create(), {"f": padded})


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
@pytest.mark.parametrize("scale", [None, 4.0])
def test_a_model_that_sows_is_traced_no_more_than_twice(scale):
    class Sowing(nnx.Module):
        def __init__(self):
            self.embed = hkv.nnx.Embed(256, DIM, optimizer=SGD)

        def __call__(self, ids):
            rows = self.embed(ids, train=True)
            self.sow(nnx.Intermediate, "norm", jnp.linalg.norm(rows))
            return rows.sum()

    scale = None if scale is None else hkv.optim.LossScale.create(scale)
    state = hkv.nnx.TrainState(Sowing(), optax.sgd(0.1), scale)
    traced = []

    def loss_fn(model, ids):
        traced.append(ids)
        return model(ids)

    step = hkv.nnx.train_step(loss_fn)
    seen = []
    for _ in range(4):
        step(state, IDS)
        seen.append(len(traced))
    assert seen[1] == seen[2] == seen[3]  # the second step finds what the first has sown


@pytest.mark.skipif(not hasattr(nnx, "capture"), reason="an older Flax")
def test_what_nnx_captures_in_a_step_comes_out_as_aux():
    class Sowing(nnx.Module):
        def __init__(self):
            self.embed = hkv.nnx.Embed(256, DIM, optimizer=SGD)

        def __call__(self, ids):
            rows = self.embed(ids, train=True)
            self.sow(nnx.Intermediate, "rows", rows)
            return rows.sum()

    def loss_fn(model, ids):
        return nnx.capture(model, nnx.Intermediate)(ids)

    state = hkv.nnx.TrainState(Sowing(), optax.sgd(0.1))
    before = hkv.initial_rows(state.model.embed.table.get_value(), IDS)
    info = hkv.nnx.train_step(loss_fn, has_aux=True)(state, IDS)
    (seen,) = jax.tree.leaves(info.aux)
    np.testing.assert_array_equal(seen, before)
    assert int(hkv.size(state.model.embed.table.get_value())) == len(IDS)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_state_that_a_step_has_used_up_is_named(api):
    """On one device as on several; what else is deleted is not taken for it."""

    def loss(model, ids):
        return model(ids, train=True).sum()

    if api == "linen":
        layer = hkv.linen.Embed(256, DIM, optimizer=SGD)
        state = hkv.linen.TrainState.create(layer, jax.random.key(0), IDS, tx=optax.sgd(0.1))
        twin, after = state, lambda outputs: outputs[0]
    else:
        state = hkv.nnx.TrainState(hkv.nnx.Embed(256, DIM, optimizer=SGD), optax.sgd(0.1))
        graph, values = nnx.split(state)
        twin = nnx.merge(graph, jax.tree.map(lambda leaf: leaf, values))
        after = lambda outputs: state  # noqa: E731
    step = getattr(hkv, api).train_step(loss)
    state = after(step(state, IDS))
    with pytest.raises(RuntimeError, match="train_step: state was used up .* that came out of it"):
        step(twin, IDS)
    deleted = jnp.asarray(IDS)
    deleted.delete()
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        step(state, deleted)
    step(state, IDS)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_arguments_of_a_step_that_are_given_by_name_are_refused(api):
    step = getattr(hkv, api).train_step(lambda model, ids: model(ids, train=True).sum())
    for positional in ((), (None,)):
        with pytest.raises(TypeError, match=r"train_step: .*by position, got \['ids', 'state'\]"):
            step(*positional, state=None, ids=IDS)
    with pytest.raises(TypeError, match="train_step: state must be .* got builtins.NoneType"):
        step()


def test_an_error_of_a_loss_is_its_own_whatever_it_names():
    """Only a loop that has changed a model is told of lookups."""

    def lookup_table_0(model, ids):
        return model(ids, train=True).sum()

    state = hkv.nnx.TrainState(hkv.nnx.Embed(256, DIM, optimizer=SGD), optax.sgd(0.1))
    step = hkv.nnx.train_step(lambda model, ids: lookup_table_0(model))  # pyright: ignore
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'ids'"):
        step(state, IDS)
