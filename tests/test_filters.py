"""Frameworks that filter a model's leaves by their types, as Equinox does, and tables in models."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_hkv as hkv

DIM = 4
IDS = np.arange(8, dtype=np.int32).reshape(4, 2)
OPT = hkv.optim.adagrad(0.1)
MESSAGE = "a table was filtered for arrays of floats"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """A table among parameters; its activation is a leaf, as in ``eqx.nn.MLP``."""

    table: hkv.Table
    weights: jax.Array
    activation: Callable[[jax.Array], jax.Array]

    def __call__(self, rows: jax.Array) -> jax.Array:
        return self.activation(rows.reshape(len(rows), -1) @ self.weights)


def model() -> Model:
    table = OPT.init(hkv.create(1024, DIM))
    return Model(table, jnp.ones((2 * DIM,)) / 8, jax.nn.gelu)


def is_table(leaf: Any) -> bool:
    return isinstance(leaf, hkv.Table)


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def is_inexact(leaf: Any) -> bool:
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def partition(tree: Any, is_one: Callable[[Any], bool], is_leaf: Any = None) -> tuple[Any, Any]:
    """As ``eqx.partition``."""
    own = jax.tree.map(lambda leaf: leaf if is_one(leaf) else None, tree, is_leaf=is_leaf)
    others = jax.tree.map(lambda leaf: None if is_one(leaf) else leaf, tree, is_leaf=is_leaf)
    return own, others


def combine(*trees: Any) -> Any:
    """As ``eqx.combine``, of which a leaf of the first tree may be a whole table of the second."""
    return jax.tree.map(
        lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None),
        *trees,
        is_leaf=lambda leaf: leaf is None,
    )


def step(model: Model, state: Any, ids: Any, labels: Any) -> tuple[Model, Any, jax.Array]:
    """A training step whose table is no parameter."""
    table, found = hkv.find_or_insert(model.table, ids)
    params, rest = partition(model, is_inexact, is_leaf=is_table)

    def loss_fn(params: Any, rows: jax.Array) -> jax.Array:
        return jnp.mean((combine(params, rest)(rows) - labels) ** 2)

    loss, (grads, row_grads) = jax.value_and_grad(loss_fn, (0, 1))(params, found.values)
    updates, state = optax.adamw(0.1).update(grads, state, params)
    after = combine(optax.apply_updates(params, updates), rest)
    return dataclasses.replace(after, table=OPT.update(table, found, row_grads)), state, loss


def test_a_table_that_is_filtered_for_parameters_is_warned_of():
    """Its rows would decay: by the idiom of Equinox they are parameters."""
    with pytest.warns(UserWarning, match=MESSAGE) as caught:
        params, rest = partition(model(), is_inexact)
    assert caught[0].filename == __file__
    assert params.table.values is not None and rest.table.values is None
    assert "Table(" in repr(params.table)  # which tells what it can


@pytest.mark.filterwarnings("error")
def test_other_filters_and_transformations_are_not_warned_of():
    own = model()
    combine(*partition(own, is_array))
    combine(*partition(own, is_inexact, is_leaf=is_table))
    jax.eval_shape(lambda: own.table)
    jax.jit(lambda table: table)(own.table)
    jax.tree.map(lambda _: 0, own.table)
    jax.vmap(lambda table, ids: hkv.contains(table, ids)[1], (None, 0))(own.table, IDS)


def test_a_filtered_table_is_named_by_operations():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = partition(model(), is_inexact)[0].table
    with pytest.raises(TypeError, match="find: table must be a whole jax_hkv Table, got one with"):
        hkv.find(table, IDS)


def test_gradients_by_a_whole_result_are_named():
    table, found = hkv.find_or_insert(model().table, IDS)
    gradients = partition(found, is_inexact)[0]
    for result, given in ((found, gradients), ([found], [gradients])):
        with pytest.raises(TypeError, match=r"row_gradients .* whole result: give its values"):
            OPT.update(table, result, given)
    with pytest.raises(TypeError, match="result must be what find_or_insert returned, got one wit"):
        OPT.update(table, gradients, gradients.values)


def test_a_model_with_a_table_trains_as_its_parts_do():
    """Bit for bit; the table is donated and not copied, in a model with leaves of any type."""
    labels = np.ones(4, np.float32)
    whole = model()
    state = optax.adamw(0.1).init(partition(whole, is_inexact, is_leaf=is_table)[0])
    hkv.testing.assert_no_table_copies(step, whole, state, IDS, labels)
    table, weights = model().table, whole.weights
    alone = optax.adamw(0.1).init(weights)
    losses = []
    for _ in range(5):
        whole, state, loss = step(whole, state, IDS, labels)
        table, found = hkv.find_or_insert(table, IDS)

        def loss_fn(weights, rows):
            logits = jax.nn.gelu(rows.reshape(len(rows), -1) @ weights)
            return jnp.mean((logits - labels) ** 2)

        gradients = jax.grad(loss_fn, (0, 1))(weights, found.values)
        updates, alone = optax.adamw(0.1).update(gradients[0], alone, weights)
        weights = optax.apply_updates(weights, updates)
        table = OPT.update(table, found, gradients[1])
        losses.append(float(loss))
    np.testing.assert_array_equal(whole.weights, weights)
    jax.tree.map(np.testing.assert_array_equal, whole.table, table)
    assert losses[-1] < losses[0]


def test_copies_are_found_beside_leaves_that_are_no_arrays():
    def stale(model):
        table, _ = hkv.find_or_insert(model.table, IDS)
        return dataclasses.replace(model, table=table), model.table.values

    with pytest.raises(AssertionError, match="copies of table-sized arrays"):
        hkv.testing.assert_no_table_copies(stale, model())
