"""Collections of features of one id each: nothing is added up, with the bits that bags have."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from combinations import each
from many_devices import assert_same_bits

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.sharding import Placement

BATCH, DIM, STEPS = 32, 4, 4
ADAM = hkv.optim.adam(1e-2)
FEATURES = [
    hkv.Feature("user", "users"),
    hkv.Feature("item", "items", None),
    hkv.Feature("shown", "items", "mean"),
    hkv.Feature("city", "cities", "sqrtn"),
]
# Two positions of nobody: no id more, but then the group has bags.
NOBODY = hkv.Feature("nobody", "cities")


def collection(features, dtype):
    options = {"dtype": dtype, "optimizer": ADAM, "init": hkv.initializers.uniform(-1.0, 1.0)}
    tables = [hkv.TableConfig(name, 256, DIM, **options) for name in ("users", "items", "cities")]
    return hkv.Collection(tables, features)


def batches():
    rng = np.random.default_rng(7)
    for _ in range(STEPS):
        ids = rng.zipf(1.4, (4, BATCH)).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        user, item, shown, city = map(hkv.Keys.from_numpy, ids)
        yield {
            "user": user,
            "item": item,
            "shown": hkv.Padded(shown.reshape(BATCH, 1), valid=rng.random((BATCH, 1)) < 0.7),
            "city": city.reshape(BATCH, 1),
            "nobody": hkv.Padded(
                hkv.Keys.from_numpy(np.zeros((BATCH, 2), np.uint64)),
                valid=np.zeros((BATCH, 2), bool),
            ),
        }


def step_of(declared, **axis):
    (group,) = declared.groups

    def step(tables, inputs):
        inputs = {feature.name: inputs[feature.name] for feature in declared.features}
        tables, found = declared.lookup(tables, inputs, train=True, **axis)
        result = found.results[group.name]
        rows = declared.spread(found.rows, found.parts)

        def loss(rows):
            own = declared.spread(rows, found.parts)
            return sum(jnp.sum(jnp.sin(own[feature.name])) for feature in FEATURES)

        gradients = jax.grad(loss)(found.rows)[group.name]
        update = functools.partial(sharding.update, ADAM) if axis else ADAM.update
        table = update(tables[group.name], result, gradients)
        status = result.status[: len(FEATURES) * BATCH]
        return {group.name: table}, (
            {feature.name: rows[feature.name] for feature in FEATURES},
            result.counts,
            None if axis else status,
        )

    return step, group.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_one_device_they_train_as_with_bags(dtype):
    seen = []
    for features in (FEATURES, [*FEATURES, NOBODY]):
        declared = collection(features, dtype)
        step, _ = step_of(declared)
        text = str(jax.make_jaxpr(step)(declared.create(), next(batches())))
        assert ("pool_rows[" in text) == (NOBODY in features), text
        tables, step, outputs = declared.create(), jax.jit(step), []
        for inputs in batches():
            tables, output = step(tables, inputs)
            assert all(rows.dtype == jnp.float32 for rows in output[0].values())
            outputs.append(output)
        seen.append((tables, outputs))
    assert_same_bits(*seen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fill", ["initial", 0.0])
def test_reads_are_those_with_bags(dtype, fill):
    plain, bags = collection(FEATURES, dtype), collection([*FEATURES, NOBODY], dtype)
    inputs, other, *_ = batches()
    tables, _ = jax.jit(step_of(bags)[0])(bags.create(), inputs)
    rows, slots = [], []
    for declared in (plain, bags):
        own = {feature.name: other[feature.name] for feature in declared.features}
        _, found = declared.lookup(tables, own, fill=fill)
        learned = {name: jnp.full(DIM, 0.5) for name in ("users", "items", "cities")}
        raised = declared.with_unseen(found.rows, found, learned)
        spread = declared.spread(raised, found.parts)
        rows.append({feature.name: spread[feature.name] for feature in FEATURES})
        slots.append(found.slots[declared.groups[0].name][: len(FEATURES) * BATCH])
    assert_same_bits(*rows)
    assert_same_bits(*slots)
    assert (slots[0] < 0).any() and (slots[0] >= 0).any()


@pytest.mark.parametrize("replicas, dtype", each([False, True], ["float32", "bfloat16"]))
def test_over_devices_they_train_as_with_bags(dtype, replicas):
    """Rows that owners return in the table's dtype are rows of bags in float32."""
    mesh = jax.make_mesh((2,), ("device",), devices=jax.devices("cpu")[:2])
    placement = Placement(mesh)
    exchange = sharding.Exchange("device", replicas)
    seen = []
    for features in (FEATURES, [*FEATURES, NOBODY]):
        declared = collection(features, dtype)
        one, name = step_of(declared, axis_name=exchange)

        def gathered(tables, inputs, one=one):
            tables, (rows, counts, _) = one(tables, inputs)
            rows = jax.tree.map(lambda own: jax.lax.all_gather(own, "device", tiled=True), rows)
            return tables, (rows, counts)

        tables = placement.create(lambda declared=declared: declared.create(exchange))
        step, outputs = placement.step(gathered), []
        for inputs in batches():
            tables, output = step(tables, placement.put(inputs))
            outputs.append(output)
        seen.append((placement.shards(tables[name]), outputs))
    assert_same_bits(*seen)
