"""A table over simulated devices, beside the tables of one device that it must be equal to."""

from __future__ import annotations

import dataclasses
import operator
from functools import partial, reduce
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from oracle_sharding import owner_of

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.sharding import Exchange, Placement

DIM = 4
ADAM = hkv.optim.adam(1e-2)
UNIVERSE = 5000  # keys
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Batch(NamedTuple):
    """What a step is fed: keys are 64-bit words on the host, and Keys on devices."""

    keys: Any
    slopes: Any
    valid: Any = None
    scores: Any = None
    weights: Any = None


class Seen(NamedTuple):
    """What a step reports, of all devices' batches."""

    values: Any
    status: Any
    counts: hkv.Counts
    overflow: Any


@dataclasses.dataclass(frozen=True)
class Case:
    """A way to spread a table.

    Attributes:
      exchange: how.
      shape: of the mesh, along `names`.
      names: of its axes.
      mode: of the placement.
      capacity: of one device.
      combiner: of pooled features; None: a row for each key.
      attracted: whether the loss pulls rows to the slopes; otherwise the slopes are the gradients.
      options: of the table.
      scored: whether steps are given scores.
    """

    exchange: Exchange = Exchange("device")
    shape: tuple[int, ...] = (8,)
    names: tuple[str, ...] = ("device",)
    mode: Any = "shard_map"
    capacity: int = 128
    combiner: str | None = None
    attracted: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    scored: bool = False

    @property
    def mesh(self) -> Any:
        count = int(np.prod(self.shape))
        return jax.make_mesh(self.shape, self.names, devices=jax.devices("cpu")[:count])

    @property
    def placement(self) -> Placement:
        return Placement(self.mesh, self.exchange.axes, self.mode)

    @property
    def devices(self) -> int:
        return self.placement.devices

    @property
    def parts(self) -> int:
        """Of the table, or of each of its replicas."""
        replicas = self.exchange.replicas
        return 1 if replicas is True else self.devices // max(1, replicas)

    def table(self, capacity: int | None = None) -> hkv.Table:
        capacity = self.capacity if capacity is None else capacity
        options = dict(self.options) | {"replicas": self.exchange.replicas}
        return ADAM.init(hkv.create(capacity, DIM, **options))


def loss(case: Case, rows: jax.Array, slopes: jax.Array) -> jax.Array:
    if case.attracted:
        return 0.5 * jnp.sum(jnp.square(rows - slopes))
    return jnp.sum(rows * slopes.astype(rows.dtype))


def slopes_of(case: Case, rows: jax.Array, slopes: jax.Array) -> jax.Array:
    return jax.grad(partial(loss, case))(rows, slopes)


def looked_up(module: Any, case: Case, table: hkv.Table, batch: Batch, **axis: Any) -> Any:
    """find_or_insert or its pooled variant, of the package or of its sharding."""
    more = {"valid": batch.valid, "scores": batch.scores, **axis}
    if case.combiner is None:
        return module.find_or_insert(table, batch.keys, **more)
    more |= {"combiner": case.combiner, "weights": batch.weights}
    return module.find_or_insert_pooled(table, batch.keys, **more)


def everywhere(case: Case, array: jax.Array) -> jax.Array:
    """The batches of all devices; XLA gathers nothing of none."""
    if not array.shape[0]:
        return array
    return jax.lax.all_gather(array, case.exchange.axes, tiled=True)


def step_on_many(case: Case, table: hkv.Table, batch: Batch) -> tuple[hkv.Table, Seen]:
    table, result = looked_up(sharding, case, table, batch, axis_name=case.exchange)
    gradients = slopes_of(case, result.values, batch.slopes)
    table = sharding.update(ADAM, table, result, gradients)
    values, status = everywhere(case, result.values), everywhere(case, result.status)
    return table, Seen(values, status, result.counts, result.overflow)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def step_on_one(case: Case, table: hkv.Table, batch: Batch) -> tuple[hkv.Table, Seen]:
    table, result = looked_up(hkv, case, table, batch)
    gradients = slopes_of(case, result.values, batch.slopes)
    table = ADAM.update(table, result, gradients)
    return table, Seen(result.values, result.status, result.counts, jnp.int32(0))


def on_device(batch: Batch) -> Batch:
    """A batch whose 64-bit words are pairs."""

    def one(leaf: Any) -> Any:
        return hkv.Keys.from_numpy(leaf) if leaf.dtype == np.uint64 else leaf

    return jax.tree.map(one, batch)


def zipf_batch(
    rng: Any, shape: tuple[int, ...], *, scored: bool = False, bags: bool = False
) -> Batch:
    """Few keys often and many rarely, gradients whose sums are exact; the first device has none."""
    common, rare = rng.zipf(1.5, shape), rng.integers(0, UNIVERSE, shape)
    keys = np.where(rng.random(shape) < 0.4, common % UNIVERSE, rare).astype(np.uint64) * GOLDEN
    valid = rng.random(shape) < 0.9
    valid[: max(1, shape[0] // 8)] = False
    rows = shape[:1] if bags else shape
    slopes = (rng.integers(-8, 9, (*rows, DIM)) / 8).astype(np.float32)
    scores = rng.integers(0, 2**40, shape).astype(np.uint64) if scored else None
    return Batch(keys, slopes, valid, scores)


def features_and_labels(rng: Any, third: str) -> tuple[Any, np.ndarray]:
    """A batch of 64 examples for a table of few ids, one of many, and one of ids of 41 bits."""
    ids = {"country": rng.integers(0, 50, (64, 1)), "user": rng.integers(0, 999, (64, 3))}
    ids[third] = rng.integers(2**40, 2**40 + 600, (64, 2))
    labels = rng.integers(0, 2, 64).astype(np.float32)
    return jax.tree.map(hkv.Keys.from_numpy, ids), labels


def tables_of(tree: Any) -> list[hkv.Table]:
    """The tables in a pytree, by their names."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, hkv.Table))
    tables = [node for node in nodes if isinstance(node, hkv.Table)]
    return sorted(tables, key=lambda table: table.name)


class Many:
    """A table over devices, and its compiled step."""

    def __init__(self, case: Case):
        self.case = case
        self.placement = case.placement
        self.table = self.placement.create(case.table)
        self.compiled = self.placement.step(partial(step_on_many, case))

    def step(self, batch: Batch) -> Seen:
        self.table, seen = self.compiled(self.table, self.placement.put(on_device(batch)))
        return jax.tree.map(np.asarray, seen)

    @property
    def parts(self) -> list[hkv.Table]:
        return self.placement.shards(self.table)


class One:
    """A table of one device."""

    def __init__(self, case: Case, capacity: int | None = None):
        # One compiled step for all cases that ask the same of one device.
        self.case = Case(combiner=case.combiner, attracted=case.attracted)
        self.table = case.table(capacity)

    def step(self, batch: Batch) -> Seen:
        self.table, seen = step_on_one(self.case, self.table, on_device(batch))
        return jax.tree.map(np.asarray, seen)


class Apart:
    """A table of one device for each owner, fed the whole batch with the others' keys masked."""

    def __init__(self, case: Case):
        self.ones = [One(case) for _ in range(case.parts)]

    def step(self, batch: Batch) -> Seen:
        owner = owner_of(batch.keys.reshape(-1), len(self.ones)).reshape(batch.keys.shape)
        valid = np.ones(batch.keys.shape, bool) if batch.valid is None else batch.valid
        masks = [valid & (owner == number) for number in range(len(self.ones))]
        seen = [
            one.step(batch._replace(valid=mask)) for one, mask in zip(self.ones, masks, strict=True)
        ]
        # A masked position has zeros for a row, and MISSING, which is 0.
        values = reduce(operator.add, (each.values for each in seen))
        status = sum(each.status for each in seen)
        counts = hkv.Counts(*(sum(own) for own in zip(*(s.counts for s in seen), strict=True)))
        return Seen(values, status, counts, np.int32(0))


def bits(leaf: Any) -> np.ndarray:
    array = np.ascontiguousarray(leaf)
    return array.reshape(-1).view(np.uint8)


def assert_same_bits(actual: Any, expected: Any) -> None:
    """Every leaf of two trees has the same bits."""
    pairs = zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, leaf), wanted in pairs:
        where = jax.tree_util.keystr(path)
        assert leaf.shape == wanted.shape, f"{where}: {leaf.shape}, not {wanted.shape}"
        np.testing.assert_array_equal(bits(leaf), bits(wanted), err_msg=where)


def assert_seen(actual: Seen, expected: Seen, tolerance: float = 0.0) -> None:
    """The same statuses and counts, and rows within a tolerance."""
    np.testing.assert_array_equal(actual.status, expected.status)
    assert [int(n) for n in actual.counts] == [int(n) for n in expected.counts]
    if tolerance:
        np.testing.assert_allclose(actual.values, expected.values, atol=tolerance, rtol=tolerance)
    else:
        assert_same_bits(actual.values, expected.values)


def entries_of(tables: Any) -> sharding.Exported:
    """All entries of a table or its parts, in the order of their keys, without sightings."""
    return sorted_by_key(sharding.export_entries(tables)._replace(counters=None))


def sorted_by_key(exported: sharding.Exported) -> sharding.Exported:
    """The same entries in the order of their keys."""
    order = np.argsort(exported.keys)
    return exported._replace(
        keys=exported.keys[order],
        scores=exported.scores[order],
        values=exported.values[order],
        optimizer={name: leaf[order] for name, leaf in exported.optimizer.items()},
    )


def assert_entries(actual: Any, expected: Any, tolerance: float = 0.0) -> None:
    """The same keys, scores, time and shared state; rows and optimizer rows within a tolerance."""
    actual, expected = entries_of(actual), entries_of(expected)
    rows = ("values", "optimizer")
    for name in sharding.Exported._fields:
        pair = getattr(actual, name), getattr(expected, name)
        if name not in rows or not tolerance:
            assert_same_bits(*(jax.tree.map(np.asarray, own) for own in pair))
            continue
        for leaf, wanted in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_allclose(leaf, wanted, atol=tolerance, rtol=tolerance, err_msg=name)


def turns(layer, ids, train):
    """A linen layer's rows of ids, looked up in turns of a scan, which do not pin."""
    if layer.is_initializing():
        return layer(ids[0])
    scan = nn.scan(
        lambda layer, carry, now: (carry, layer(now, train=train)),
        variable_carry="tables",
        variable_axes={"lookups": 0, "perturbations": 0},
    )
    return scan(layer, 0, jnp.stack(ids))[1]
