"""The Flax layers: training inserts, evaluation and init do not, and both learn."""

from __future__ import annotations

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_hkv as hkv

FEATURES = 8
SPARSE = hkv.optim.sparse(optax.adam(0.05))
DENSE = optax.adam(1e-2)


class LinenModel(nn.Module):
    """Two lookups of one table anywhere inside a model."""

    dtype: object = None

    @nn.compact
    def __call__(self, ids, train=False):
        embed = hkv.linen.Embed(1024, FEATURES, optimizer=SPARSE, dtype=self.dtype)
        x = embed(ids, train=train) + 0.5 * embed(ids[:, ::-1], train=train)
        return nn.Dense(1)(x.mean(axis=1))[:, 0]


class NnxModel(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.embed = hkv.nnx.Embed(1024, FEATURES, optimizer=SPARSE)
        self.dense = nnx.Linear(FEATURES, 1, rngs=rngs)

    def __call__(self, ids, train=False):
        x = self.embed(ids, train=train) + 0.5 * self.embed(ids[:, ::-1], train=train)
        return self.dense(x.mean(axis=1))[:, 0]


def batches(rng, count=60, size=64):
    """The label is what most of the three ids say."""
    secret = rng.random(200) < 0.5
    for _ in range(count):
        ids = rng.integers(0, 200, (size, 3))
        yield (ids + 1).astype(np.int32) * -7, (secret[ids].sum(axis=1) > 1).astype(np.float32)


def loss_of(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels).mean()


def linen_step(model):
    @jax.jit
    def step(params, tables, state, ids, labels):
        variables = {"params": params, "tables": tables}
        zeros = hkv.linen.perturbations(model, variables, ids, train=True)

        def loss_fn(params, perturbations):
            variables = {"params": params, "tables": tables, "perturbations": perturbations}
            logits, updated = model.apply(variables, ids, train=True, mutable=hkv.linen.MUTABLE)
            return loss_of(logits, labels), updated

        (loss, updated), (gradients, rows) = jax.value_and_grad(
            loss_fn, argnums=(0, 1), has_aux=True
        )(params, zeros)
        tables = hkv.linen.update_tables(updated, rows)
        updates, state = DENSE.update(gradients, state, params)
        return optax.apply_updates(params, updates), tables, state, loss

    return step


def test_a_linen_model_learns_and_evaluation_never_inserts(rng):
    """Training inserts; init and evaluation cannot."""
    model = LinenModel()
    variables = model.init(jax.random.key(0), np.zeros((2, 3), np.int32), train=True)
    params, tables = variables["params"], variables["tables"]
    assert int(hkv.size(tables["Embed_0"]["table"])) == 0
    step = linen_step(model)
    state = DENSE.init(params)
    losses = []
    for ids, labels in batches(rng):
        params, tables, state, loss = step(params, tables, state, ids, labels)
        losses.append(float(loss))
    assert losses[0] > 0.6 and losses[-1] < 0.4
    assert step._cache_size() == 1
    table = tables["Embed_0"]["table"]
    assert int(hkv.size(table)) == 200
    evaluate = jax.jit(lambda ids: model.apply({"params": params, "tables": tables}, ids))
    unseen = evaluate(np.full((4, 3), 10**6, np.int32))
    assert np.isfinite(np.asarray(unseen)).all() and int(hkv.size(table)) == 200


def test_the_linen_step_copies_no_table(rng):
    """30: through the layers too."""
    model = LinenModel()
    ids, labels = next(batches(rng))
    variables = model.init(jax.random.key(0), ids)
    state = DENSE.init(variables["params"])
    hkv.testing.assert_no_table_copies(
        linen_step(model), variables["params"], variables["tables"], state, ids, labels
    )


def test_row_gradients_through_the_perturbation_are_those_of_the_rows(rng):
    """The gradient that the table gets is the loss's gradient by the looked-up rows."""
    model = LinenModel()
    ids, labels = next(batches(rng))
    variables = model.init(jax.random.key(0), ids)
    zeros = hkv.linen.perturbations(model, variables, ids, train=True)

    def loss_fn(perturbations):
        logits, _ = model.apply(
            {**variables, "perturbations": perturbations}, ids, train=True,
            mutable=hkv.linen.MUTABLE,
        )  # fmt: skip
        return loss_of(logits, labels)

    rows = hkv.initial_rows(variables["tables"]["Embed_0"]["table"], ids)
    dense = variables["params"]["Dense_0"]

    def plain(first, second):
        x = (first + 0.5 * second).mean(axis=1)
        return loss_of((x @ dense["kernel"] + dense["bias"])[:, 0], labels)

    gradients = jax.grad(loss_fn)(zeros)["Embed_0"]
    expected = jax.grad(plain, argnums=(0, 1))(rows, rows[:, ::-1])
    np.testing.assert_allclose(gradients["table_rows_0"], expected[0], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(gradients["table_rows_1"], expected[1], rtol=1e-6, atol=1e-8)


def test_linen_init_can_be_evaluated_abstractly():
    """eval_shape of init allocates nothing, and the shapes are those of init."""
    ids = np.zeros((2, 3), np.int32)
    shapes = jax.eval_shape(LinenModel().init, jax.random.key(0), ids)
    variables = LinenModel().init(jax.random.key(0), ids)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), variables
    )
    assert set(shapes) == {"params", "tables"} and "Embed_0" not in shapes["params"]


def test_training_without_mutable_tables_says_how_to_call():
    """31: the remedy is in the message."""
    ids = np.zeros((2, 3), np.int32)
    variables = LinenModel().init(jax.random.key(0), ids)
    with pytest.raises(ValueError, match=r"linen\.train_step, .*mutable=\['tables', 'lookups'\]"):
        LinenModel().apply(variables, ids, train=True)
    with pytest.warns(UserWarning, match=r"nothing trains .*hkv\.linen\.train_step"):
        LinenModel().apply(variables, ids, train=True, mutable=hkv.linen.MUTABLE)


def test_the_output_type_can_differ_from_the_rows():
    """bfloat16 compute with float32 rows."""
    ids = np.zeros((2, 3), np.int32)
    model = hkv.linen.Embed(128, FEATURES, dtype=jnp.bfloat16)
    rows, variables = model.init_with_output(jax.random.key(0), ids)
    assert rows.dtype == jnp.bfloat16
    assert variables["tables"]["table"].dtype == np.float32


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_step_leaves_every_array_of_a_state_in_its_type(api):
    """Parameters in half precision, whose gradients are float32 while they lose the loss scale."""
    ids, scale = np.zeros((2, 3), np.int32), hkv.optim.LossScale.create(8.0)
    options = {"optimizer": SPARSE, "param_dtype": jnp.bfloat16, "unseen": "learned"}
    if api == "linen":
        model = hkv.linen.Embed(1024, FEATURES, **options)
        state = hkv.linen.TrainState.create(
            model, jax.random.key(0), ids, tx=DENSE, loss_scale=scale
        )
        step = hkv.linen.train_step(lambda apply, ids: apply(ids, train=True).sum(), max_norm=1.0)
        after, _ = step(jax.tree.map(jnp.copy, state), ids)
    else:
        model = hkv.nnx.Embed(1024, FEATURES, **options)
        after = hkv.nnx.TrainState(model, DENSE, scale)
        state = jax.tree.map(jnp.copy, nnx.state(after))
        hkv.nnx.train_step(lambda model, ids: model(ids, train=True).sum(), max_norm=1.0)(
            after, ids
        )
        after = nnx.state(after)
    kinds = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (state, after)]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_small_gradients_train_half_parameters_under_a_loss_scale(api, dtype):
    """float16 has no number for the squares of theirs, nor for Adam's eps."""
    x, scale, tx = jnp.ones((2, 4)), hkv.optim.LossScale.create(2.0**15), optax.adam(0.125)

    def loss_of_outputs(outputs):
        return outputs.astype(jnp.float32).mean() * 1e-4

    if api == "linen":
        model = nn.Dense(1, param_dtype=dtype, dtype=dtype)
        state = hkv.linen.TrainState.create(model, jax.random.key(0), x, tx=tx, loss_scale=scale)
        before = state.params["kernel"]
        step = hkv.linen.train_step(lambda apply, x: loss_of_outputs(apply(x)), donate=False)
        for _ in range(3):
            state, info = step(state, x)
        after = state.params["kernel"]
    else:
        model = nnx.Linear(4, 1, param_dtype=dtype, dtype=dtype, rngs=nnx.Rngs(0))
        state = hkv.nnx.TrainState(model, tx, scale)
        before = jnp.copy(model.kernel.get_value())
        step = hkv.nnx.train_step(lambda model, x: loss_of_outputs(model(x)))
        for _ in range(3):
            info = step(state, x)
        after = state.model.kernel.get_value()
    assert info.finite and after.dtype == dtype
    np.testing.assert_allclose(np.float32(before) - np.float32(after), 3 * 0.125, atol=0.02)


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_jitted_function_of_tables_is_tried_on_all_before_it_uses_one_up(api, is_partial):
    policies = {"dated": hkv.Policy.EPOCH_LRU, "plain": hkv.Policy.LRU}
    collection = hkv.Collection(
        [hkv.TableConfig(name, 128, 2, policy=own) for name, own in policies.items()],
        [hkv.Feature(name, name) for name in policies],
    )
    ids = {name: np.zeros(3, np.int32) for name in policies}
    if api == "linen":
        model = hkv.linen.EmbedCollection(collection)
        state = hkv.linen.TrainState.create(model, jax.random.key(0), ids, tx=DENSE)
        tables = state.tables
    else:
        state = hkv.nnx.TrainState(hkv.nnx.EmbedCollection(collection), DENSE)
        tables = state.model.tables
    a_day = jax.jit(lambda table, epochs=30: hkv.expire(table, epochs)[0], donate_argnums=0)
    a_day = functools.partial(a_day, epochs=20) if is_partial else a_day
    with pytest.raises(ValueError, match="expire: the policy of table 'plain' must be"):
        state.map_tables(a_day)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(tables))


def test_an_nnx_model_learns_and_evaluation_never_inserts(rng):
    """The nnx twin, under nnx.jit, without a retrace."""
    model = NnxModel(nnx.Rngs(0))
    dense = nnx.Optimizer(model, DENSE, wrt=nnx.Param)
    traces = []

    def loss_fn(model, ids, labels):
        return loss_of(model(ids, train=True), labels)

    @nnx.jit
    def step(model, dense, ids, labels):
        traces.append(1)
        loss, gradients, rows = hkv.nnx.value_and_grad(loss_fn)(model, ids, labels)
        dense.update(model, gradients)
        hkv.nnx.update_tables(model, rows)
        return loss

    losses = [float(step(model, dense, ids, labels)) for ids, labels in batches(rng)]
    assert losses[0] > 0.6 and losses[-1] < 0.4
    assert len(traces) == 1
    table = model.embed.table.get_value()
    assert int(hkv.size(table)) == 200
    evaluated = nnx.jit(lambda model, ids: model(ids))(model, np.full((4, 3), 10**6, np.int32))
    assert np.isfinite(np.asarray(evaluated)).all()
    assert int(hkv.size(model.embed.table.get_value())) == 200


@pytest.mark.parametrize("by_hand", [False, True], ids=["train_step", "by hand"])
def test_the_nnx_step_copies_no_table(rng, by_hand):
    """A module that the step changes is what the step leaves behind."""

    def loss_fn(model, ids, labels):
        return loss_of(model(ids, train=True), labels)

    def step(state, ids, labels):
        loss, gradients, rows = hkv.nnx.value_and_grad(loss_fn)(state.model, ids, labels)
        state.optimizer.update(state.model, gradients)
        hkv.nnx.update_tables(state.model, rows)
        return loss

    state = hkv.nnx.TrainState(NnxModel(nnx.Rngs(0)), DENSE)
    batch = next(batches(rng))
    checked = step if by_hand else hkv.nnx.train_step(loss_fn)
    hkv.testing.assert_no_table_copies(checked, state, *batch)

    def stale(state, ids, labels):
        before = state.model.embed.table.get_value()
        return checked(state, ids, labels), hkv.find(before, ids)[1].values

    # Of a program for a GPU, where rows are read before they are written, those of the index alone.
    leaf = r"f32\[1024,8\]" if jax.default_backend() == "cpu" else r"u32\[8,128,2\]"
    with pytest.raises(AssertionError, match=rf"copies of table-sized(.|\n)*{leaf}"):
        hkv.testing.assert_no_table_copies(stale, state, *batch)


def in_the_loss(call, ids, labels):
    """The loss of a batch, and what the model said of it before it trained on it."""
    before = call(ids)
    return loss_of(call(ids, train=True), labels), before


def progressive_steps():
    """By name: a state, and a step that evaluates a batch before it trains on it."""
    ids = np.zeros((64, 3), np.int32)
    linen = hkv.linen.TrainState.create(LinenModel(), jax.random.key(0), ids, tx=DENSE)
    nnx_state = hkv.nnx.TrainState(NnxModel(nnx.Rngs(0)), DENSE)
    train = hkv.linen.train_step(lambda call, ids, labels: loss_of(call(ids, train=True), labels))

    def threaded(state, ids, labels):
        before, read = state.apply(ids, mutable=["tables"])
        state, info = train(state.replace(tables=read["tables"]), ids, labels)
        return state, info._replace(aux=before)

    return {
        "linen, in the loss": (linen, hkv.linen.train_step(in_the_loss, has_aux=True)),
        "linen, threaded": (linen, threaded),
        "nnx, in the loss": (nnx_state, hkv.nnx.train_step(in_the_loss, has_aux=True)),
    }


@pytest.mark.parametrize("name", progressive_steps())
def test_a_batch_is_evaluated_and_then_trained_on_without_a_copy(name, rng):
    """Progressive validation, by the ways that docs/guide.md names."""
    state, step = progressive_steps()[name]
    batch = next(batches(rng))
    hkv.testing.assert_no_table_copies(step, state, *batch)
    is_nnx = name.startswith("nnx")
    expected = state.model(batch[0]) if is_nnx else state.apply(batch[0])
    info = step(state, *batch) if is_nnx else step(state, *batch)[1]
    np.testing.assert_allclose(info.aux, expected, rtol=1e-5, atol=1e-6)


def test_a_linen_state_is_replaced_as_those_of_flax_are():
    state = hkv.linen.TrainState.create(
        LinenModel(), jax.random.key(0), np.zeros((2, 3), np.int32), tx=DENSE
    )
    other = state.replace(step=jnp.int32(7))
    assert int(other.step) == 7 and other.params is state.params
    with pytest.raises(TypeError, match="steps"):
        state.replace(steps=7)


def test_nnx_tables_are_no_parameters_and_survive_split_and_merge():
    """Filters for nnx.Param never see a table."""
    model = NnxModel(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    assert set(params) == {"dense"}
    merged = nnx.merge(graph, params, rest)
    assert merged.embed.table.get_value().capacity == 1024


def test_linen_and_nnx_give_the_same_rows():
    """Rows are functions of seed and key alone."""
    ids = np.arange(6, dtype=np.int32)
    linen_rows, _ = hkv.linen.Embed(128, FEATURES, seed=5).init_with_output(jax.random.key(0), ids)
    np.testing.assert_array_equal(linen_rows, hkv.nnx.Embed(128, FEATURES, seed=5)(ids))


def test_layers_give_rows_to_the_ids_that_their_admission_admits():
    """Training turns rare ids away; they get the row that they would start with."""
    ids = np.array([1, 2, 2], np.int32)
    rule = hkv.admission.frequency(2, width=64)
    layer = hkv.linen.Embed(128, FEATURES, admission=rule)
    variables = layer.init(jax.random.key(0), ids)
    rows, updated = layer.apply(variables, ids, train=True, mutable=hkv.linen.MUTABLE)
    assert int(hkv.size(updated["tables"]["table"])) == 1
    np.testing.assert_array_equal(rows, layer.apply(variables, ids))
    other = hkv.nnx.Embed(128, FEATURES, admission=rule)
    other(ids, train=True)
    assert int(hkv.size(other.table.get_value())) == 1


class Tensor:
    """An array of another library, for all that JAX knows."""

    def __dlpack__(self):
        raise NotImplementedError


def state_of(api, layer, ids, loss_scale=None):
    """The state of one layer of either kind."""
    tx = optax.sgd(0.1)
    if api == "nnx":
        return hkv.nnx.TrainState(layer, tx, loss_scale)
    return hkv.linen.TrainState.create(layer, jax.random.key(0), ids, tx=tx, loss_scale=loss_scale)


def layer_step(api, layer, ids, scale=1.0, loss_scale=None, **options):
    """A step of one layer of either kind, from the loss ``scale * sum``; gives its table."""
    state = state_of(api, layer, ids, loss_scale)
    step = getattr(hkv, api).train_step(
        lambda layer, x: scale * layer(x, train=True).sum(), **options
    )

    def run(ids):
        if api == "linen":
            return step(state, ids)[0].tables["table"]
        step(state, ids)
        return state.model.table.get_value()

    return run


@pytest.mark.parametrize("kind", ["Embed", "EmbedBag"])
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_gradients_of_a_float32_output_reach_half_rows_in_float32(api, kind):
    """In float16 this gradient would be 0; normalised it moves the row by the rate."""
    layer = getattr(getattr(hkv, api), kind)(
        256,
        4,
        dtype=jnp.float32,
        param_dtype=jnp.float16,
        optimizer=hkv.optim.rowwise_adagrad(0.01, eps=1e-12),
        embedding_init=hkv.initializers.zeros(),
    )
    ids = np.array([[1]], np.int32)
    table = layer_step(api, layer, ids, scale=1e-8)(ids)
    rows = hkv.find(table, np.array([1], np.int32))[1].values
    assert rows.dtype == jnp.float16
    np.testing.assert_allclose(rows.astype(jnp.float32), -0.01, rtol=2e-3)


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_bag_is_not_made_of_a_whole_batch(api):
    """[batch] ids are examples to `Embed`; to `EmbedBag` they would be one bag for all of them."""
    layer = getattr(hkv, api).EmbedBag(256, 4, optimizer=hkv.optim.sgd(0.1))
    run = layer_step(api, layer, np.zeros((4, 1), np.int32))
    with pytest.raises(ValueError, match=r"EmbedBag: ids must .*, got \[4\], .*ids\[:, None\]"):
        run(np.zeros(4, np.int32))


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_an_array_of_another_library_is_named_by_a_step(api):
    layer = getattr(hkv, api).Embed(256, 4, optimizer=hkv.optim.sgd(0.1))
    run = layer_step(api, layer, np.zeros(4, np.int32))
    with pytest.raises(TypeError, match=r"arguments\[0\] is an .*Tensor: make keys .*from_numpy"):
        run(Tensor())


@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_a_layer_inside_a_transformation_of_a_loss_is_told_of(api):
    """Its table cannot come back from there; the errors of JAX and Flax say nothing of layers."""
    layer = getattr(hkv, api).Embed(256, 4, optimizer=hkv.optim.sgd(0.1))
    ids = np.arange(4, dtype=np.int32)
    state = state_of(api, layer, ids)

    def loss(model, ids):
        return jax.checkpoint(lambda ids: model(ids, train=True).sum())(ids)

    with pytest.raises(Exception, match="racer|Cannot mutate") as raised:
        getattr(hkv, api).train_step(loss)(state, ids)
    assert "take Flax's own (nn.remat" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("mode", [True, 3, "sum"])
def test_what_python_decides_by_is_no_argument_of_a_step(api, mode):
    layer = getattr(hkv, api).Embed(256, 4, optimizer=hkv.optim.sgd(0.1))
    ids = np.arange(4, dtype=np.int32)

    def loss(model, ids, mode):
        factor = sum(range(mode)) if mode == 3 else 2 if mode else 1
        return model(ids, train=True).sum() * factor

    step = getattr(hkv, api).train_step(loss)
    with pytest.raises(Exception, match="boolean|integer|Error interpreting argument") as raised:
        step(state_of(api, layer, ids), ids, mode)
    assert "train_step(functools.partial(loss_fn" in "".join(raised.value.__notes__)


def test_layers_of_nnx_take_random_streams_as_others_do():
    """And begin with the rows that they have without them, by their seed."""
    collection = hkv.Collection([hkv.TableConfig("a", 128, 4)], [hkv.Feature("f", "a", "sum")])
    ids = np.arange(4, dtype=np.int32).reshape(2, 2)
    layers = [
        (functools.partial(hkv.nnx.Embed, 128, 4), ids),
        (functools.partial(hkv.nnx.EmbedBag, 128, 4), ids),
        (functools.partial(hkv.nnx.EmbedCollection, collection), {"f": ids}),
    ]
    for make, given in layers:
        jax.tree.map(np.testing.assert_array_equal, make()(given), make(rngs=nnx.Rngs(7))(given))


# --- What a model sows ---------------------------------------------------------------------------


def test_a_loss_may_have_a_penalty_on_parameters_of_linen():
    """By the half of their squares alone, a rate of 0.5 halves them; as the guide has it."""
    ids = np.arange(6, dtype=np.int32).reshape(3, 2)
    state = hkv.linen.TrainState.create(LinenModel(), jax.random.key(0), ids, tx=optax.sgd(0.5))
    before = jax.tree.map(np.asarray, state.params)

    def loss_fn(apply, ids):
        params = apply(method=lambda model: model.variables["params"])
        squares = sum((leaf**2).sum() for leaf in jax.tree.leaves(params))
        return 0 * apply(ids, train=True).sum() + 0.5 * squares

    state, _ = hkv.linen.train_step(loss_fn)(state, ids)
    assert any(leaf.any() for leaf in jax.tree.leaves(before))
    jax.tree.map(lambda old, new: np.testing.assert_allclose(new, old / 2), before, state.params)


class Sowing(nn.Module):
    """A part of the loss that is sown, and returned too."""

    axis_name: object = None

    @nn.compact
    def __call__(self, ids, train=False):
        options = {"optimizer": hkv.optim.sgd(0.1), "axis_name": self.axis_name}
        rows = hkv.linen.Embed(1024, FEATURES, **options)(ids, train=train)
        rows = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(rows))
        penalty = jnp.square(rows - 1).mean()
        self.sow("losses", "penalty", penalty)
        return rows.sum(axis=-1), penalty


def returned(call, ids):
    outputs, penalty = call(ids, train=True)
    return outputs.mean() + 3 * penalty


def sown(call, ids):
    (outputs, _), own = call(ids, train=True, mutable=["losses"])
    assert set(own) == {"losses"} and len(own["losses"]["penalty"]) == 1
    return outputs.mean() + 3 * own["losses"]["penalty"][0]


def sown_state(loss, ids, devices, **options):
    """After two steps, on one device or on several."""

    def make(axis_name=None):
        model = Sowing(axis_name)
        return hkv.linen.TrainState.create(model, jax.random.key(0), ids[:4], tx=optax.sgd(0.1))

    if devices == 1:
        state, placed = make(), ids
    else:
        mesh = jax.make_mesh((devices,), ("device",), devices=jax.devices()[:devices])
        placement = hkv.sharding.Placement(mesh)
        options["placement"] = placement
        state, placed = placement.create(functools.partial(make, "device")), placement.put(ids)
    step = hkv.linen.train_step(loss, **options)
    for _ in range(2):
        state, info = step(state, placed)
    return dataclasses.replace(state, model=None), info


@pytest.mark.parametrize(("devices", "parts"), [(1, 1), (1, 2), (2, 2)])
def test_what_a_model_sows_can_be_a_part_of_the_loss(devices, parts, rng):
    """With the gradients and statistics of the loss that the model returns."""
    if len(jax.devices()) < devices:
        pytest.skip(f"it wants {devices} devices, there is {len(jax.devices())}")
    ids = rng.integers(0, 200, 64, dtype=np.int32)
    one, other = (sown_state(loss, ids, devices, micro_batches=parts) for loss in (returned, sown))
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6, atol=1e-6)
    assert not np.array_equal(one[0].params["Dense_0"]["kernel"], one[0].params["Dense_0"]["bias"])


class TwoTowers(nn.Module):
    """Each tower sows its own loss, and in evaluation another one."""

    def setup(self):
        self.embed = hkv.linen.Embed(256, 4, optimizer=hkv.optim.sgd(0.1))

    def __call__(self, ids, train=False):
        if not train:
            self.sow("losses", "evaluated", 1000.0)
        return self.user(ids, train), self.item(ids, train)

    def user(self, ids, train):
        return self._tower("of user", 1.0, ids, train)

    def item(self, ids, train):
        return self._tower("of item", 10.0, ids, train)

    def _tower(self, name, loss, ids, train):
        self.sow("losses", name, loss)
        return self.embed(ids, train=train).sum()


def test_a_call_returns_what_it_has_sown_and_not_what_init_or_another_call_has():
    ids, seen = np.arange(8, dtype=np.int32), []

    def loss_fn(apply, ids):
        loss = 0.0
        for tower in (TwoTowers.user, TwoTowers.item, TwoTowers.user):
            outputs, sown = apply(ids, True, method=tower, mutable="losses")
            seen.append(sown["losses"])
            loss += 1e-3 * outputs + sum(jax.tree.leaves(sown))
        return loss

    key = jax.random.key(0)
    state = hkv.linen.TrainState.create(TwoTowers(), key, ids, tx=optax.sgd(0.1))
    assert len(jax.tree.leaves(state.variables["losses"])) == 3, "as init has sown them"
    state, info = hkv.linen.train_step(loss_fn)(state, ids)
    assert [list(sown) for sown in seen[:3]] == [["of user"], ["of item"], ["of user"]]
    assert all(len(losses) == 1 for sown in seen for losses in sown.values())
    assert float(info.loss) == pytest.approx(12.0, abs=0.1)


FORMS = {
    "no": (False, None),
    "nothing": ([], set()),
    "a name": ("losses", {"losses"}),
    "statistics": (("losses", "batch_stats"), {"losses", "batch_stats"}),
    "tables": (["tables", "lookups", "perturbations"], set()),
    "all": (True, {"params", "losses", "batch_stats"}),
    "all but": (nn.DenyList("losses"), {"params", "batch_stats"}),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_call_returns_the_collections_that_it_is_asked_for_as_flax_does(name):
    """Each call its own; those of the layers stay with the step."""
    mutable, expected = FORMS[name]
    ids = np.arange(8, dtype=np.int32)
    state = hkv.linen.TrainState.create(Sowing(), jax.random.key(0), ids, tx=DENSE)
    seen = []

    def loss(call, ids):
        for _ in range(2):
            returned = call(ids, train=True, mutable=mutable)
            (outputs, _), own = (returned, None) if expected is None else returned
            seen.append(own if own is None else {n: jax.tree.map(jnp.shape, own[n]) for n in own})
        return outputs.mean()

    hkv.linen.train_step(loss)(state, ids)
    assert all(own is None if expected is None else set(own) == expected for own in seen)
    assert all(own["losses"] == {"penalty": ((),)} for own in seen if own and "losses" in own)


# --- Layers of a stack ---------------------------------------------------------------------------


class Stack(nn.Module):
    """Layers in a scan, each of which adds rows: of its own table, or of one table for all."""

    is_outside: bool

    @nn.compact
    def __call__(self, ids, train=False):
        embed = functools.partial(hkv.linen.Embed, 1024, FEATURES, optimizer=hkv.optim.sgd(0.1))

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, carry, rows):
                rows = embed()(ids, train=train) if rows is None else rows
                return jnp.tanh(nn.Dense(FEATURES)(carry + rows)), None

        axes = {"params": 0, "tables": 0, "lookups": 0, "perturbations": 0}
        layers = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=3)
        numbers = 1000 * jnp.arange(3, dtype=jnp.int32)[:, None]
        rows = embed(name="embed")(ids + numbers, train=train) if self.is_outside else None
        return layers()(jnp.zeros((len(ids), FEATURES)), rows)[0].sum(axis=-1)


def test_tables_that_a_scan_stacks_are_named_with_what_to_do_instead():
    """Of which the message speaks: one table, looked up outside of the scan."""
    ids = np.arange(8, dtype=np.int32)
    step = hkv.linen.train_step(lambda call, ids: jnp.square(call(ids, train=True) - 1).mean())

    def state(is_outside):
        return hkv.linen.TrainState.create(Stack(is_outside), jax.random.key(0), ids, tx=DENSE)

    message = (
        r"update: table must be that of one device.*\[3, 2\].*stacked.*outside.*layer's number"
    )
    with pytest.raises(TypeError, match=message):
        step(state(is_outside=False), ids)
    after, info = step(state(is_outside=True), ids)
    assert int(info.tables["embed/table"].inserted) == 24
    assert float(step(after, ids)[1].loss) < float(info.loss)


def test_a_layer_that_flax_maps_in_training_is_told_to_look_up_outside():
    model = nn.vmap(
        LinenModel, variable_axes={"params": 0, "tables": None}, split_rngs={"params": True},
        in_axes=(None, None), axis_size=2,
    )  # fmt: skip
    ids = np.zeros((2, 3), np.int32)
    state = hkv.linen.TrainState.create(model(), jax.random.key(0), ids, False, tx=DENSE)
    with pytest.raises(ValueError, match=r"in nn\.vmap look up outside of it and pass rows in"):
        hkv.linen.train_step(lambda call, ids: call(ids, True).mean())(state, ids)
