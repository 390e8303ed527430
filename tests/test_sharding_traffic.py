"""What an exchange moves between devices, counted in compiled steps."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jax_hkv as hkv
from jax_hkv.sharding import Exchange, Placement

DEVICES, DIM = 8, 32
OPTIMIZER = hkv.optim.adam(1e-2)
KEY_BYTES, ROW_BYTES, STATUS_BYTES = 8, 4 * DIM, 4


def mesh_of(*shape: int):
    names = ("node", "device")[-len(shape) :]
    devices = jax.devices("cpu")[: np.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape), devices=devices)


def power_law(exponent: float, most: int, shape, rng) -> np.ndarray:
    """The floor of a power law from 1 to `most`."""
    power = 1.0 - exponent
    return np.floor((1 + rng.random(shape) * (float(most) ** power - 1)) ** (1 / power)).astype(int)


def traffic_of(mesh, exchange: Exchange, batch: tuple[int, ...], *, pooled: bool = False):
    """Of a training step whose batch on each device has this shape."""
    placement = Placement(mesh)
    make = partial(hkv.create, 1024, DIM, replicas=exchange.replicas)
    tables = jax.eval_shape(lambda: placement.create(lambda: OPTIMIZER.init(make())))
    lookup = hkv.sharding.find_or_insert_pooled if pooled else hkv.sharding.find_or_insert

    def step(table, words, gradients):
        table, result = lookup(table, hkv.Keys(words), axis_name=exchange)
        table = hkv.sharding.update(OPTIMIZER, table, result, gradients)
        total = jax.lax.psum(jnp.sum(result.values), exchange.axes)
        return table, (total, result.counts, jax.lax.psum(jnp.sum(result.status), exchange.axes))

    rows = (batch[0] * DEVICES, DIM) if pooled else (batch[0] * DEVICES, *batch[1:], DIM)
    arguments = (
        jax.ShapeDtypeStruct((batch[0] * DEVICES, *batch[1:], 2), jnp.uint32),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )
    compiled = placement.step(step).lower(tables, *arguments).compile()
    return hkv.sharding.traffic(compiled, mesh)


def room(positions: int, exchange: Exchange, peers: int = DEVICES) -> int:
    """Places for each peer: the mean, and six standard deviations."""
    mean = positions * exchange.distinct / peers
    return min(positions, int(np.ceil(exchange.slack * mean + 6 * np.sqrt(mean))))


def test_an_exchange_moves_keys_rows_statuses_and_gradients_once():
    exchange = Exchange("device", distinct=0.5)
    found = traffic_of(mesh_of(DEVICES), exchange, (4096,))
    places = DEVICES * room(4096, exchange)
    keys = places * KEY_BYTES + DEVICES * KEY_BYTES  # one header for each peer
    expected = keys + places * (2 * ROW_BYTES + STATUS_BYTES)
    assert found.bytes("all-to-all") == expected
    assert found.sent("all-to-all") == expected * (DEVICES - 1) // DEVICES
    always = [one for one in found.collectives if not one.may_not_run]
    assert [one.kind for one in always].count("all-to-all") == 4
    small = found.bytes("all-reduce")
    assert small == found.bytes() - found.bytes("all-to-all")
    assert 0 < small < 100, "counts of a few bytes are summed"


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"strict": True, "replicas": True}])
def test_owners_know_what_found_no_room_without_a_reduction(options):
    """Each would wait for all devices once more between their keys and the first insertion."""
    placement = Placement(mesh_of(DEVICES))
    exchange = Exchange("device", distinct=0.5, **options)

    def step(table, keys):
        table, result = hkv.sharding.find_or_insert(table, keys, axis_name=exchange)
        return table, (result.values, result.overflow)

    make = partial(hkv.create, 1024, DIM, replicas=exchange.replicas)
    table = jax.eval_shape(lambda: placement.create(make))
    keys = jax.ShapeDtypeStruct((1024 * DEVICES,), jnp.int32)
    compiled = placement.step(step).lower(table, keys).compile()
    assert hkv.sharding.traffic(compiled, placement.mesh).bytes("all-reduce") == 0


def test_what_moves_is_proportional_to_distinct_keys_not_to_occurrences():
    rng = np.random.default_rng(0)
    shape = (65_536 // DEVICES, 26)
    keys = hkv.Keys.from_numpy(power_law(1.05, 10**7, shape, rng))
    distinct = hkv.sharding.distinct_in(keys)
    merged = traffic_of(mesh_of(DEVICES), Exchange("device", distinct=distinct), shape)
    each = traffic_of(mesh_of(DEVICES), Exchange("device", deduplicate=False), shape)
    assert each.bytes("all-to-all") >= 2.5 * merged.bytes("all-to-all")
    fewer = traffic_of(mesh_of(DEVICES), Exchange("device", distinct=distinct / 2), shape)
    assert fewer.bytes("all-to-all") == pytest.approx(merged.bytes("all-to-all") / 2, rel=0.05)


def test_room_that_was_measured_holds_the_distinct_keys():
    rng = np.random.default_rng(1)
    keys = power_law(1.05, 10**7, (65_536 // DEVICES, 26), rng)
    exchange = Exchange("device", distinct=hkv.sharding.distinct_in(hkv.Keys.from_numpy(keys)))
    unique = hkv.Keys.from_numpy(np.unique(keys))
    owners = np.asarray(hkv.sharding.owners(unique, DEVICES))
    assert np.bincount(owners).max() <= room(keys.size, exchange)


def row_bytes(found) -> int:
    """Sent in rows and gradients: what is float32 and as wide as a row."""
    return sum(
        one.sent
        for one in found.collectives
        if not one.may_not_run
        and one.kind in ("all-to-all", "all-gather")
        and "f32" in one.operands
    )


def test_sums_of_bags_of_100_ids_are_ten_times_fewer_bytes_than_their_rows():
    bags = (256, 100)
    partial = traffic_of(mesh_of(DEVICES), Exchange("device"), bags, pooled=True)
    whole = traffic_of(mesh_of(DEVICES), Exchange("device", partial=False), bags, pooled=True)
    assert row_bytes(partial) == 2 * (DEVICES - 1) * bags[0] * ROW_BYTES
    assert row_bytes(whole) >= 10 * row_bytes(partial)


def test_owners_pool_only_where_that_moves_fewer_bytes():
    for hotness, pays in ((4, False), (16, True)):
        by_itself = traffic_of(mesh_of(DEVICES), Exchange("device"), (256, hotness), pooled=True)
        asked = traffic_of(
            mesh_of(DEVICES), Exchange("device", partial=pays), (256, hotness), pooled=True
        )
        assert row_bytes(by_itself) == row_bytes(asked)


def cross_node(found, per_node: int) -> int:
    """Messages of a device to other nodes."""
    return sum(
        one.group_size - (per_node if "device" in one.axes else 1)
        for one in found.collectives
        if one.kind == "all-to-all" and "node" in one.axes and not one.may_not_run
    )


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 4), (4, 2)])
def test_two_levels_divide_messages_between_nodes_by_the_devices_of_a_node(nodes, per_node):
    axes = ("node", "device")
    mesh = mesh_of(nodes, per_node)
    levels = traffic_of(mesh, Exchange(axes, distinct=0.5), (1024,))
    flat = traffic_of(mesh, Exchange(axes, distinct=0.5, levels=False), (1024,))
    assert cross_node(flat, per_node) == 4 * (nodes - 1) * per_node
    assert cross_node(flat, per_node) == per_node * cross_node(levels, per_node)


def test_replicas_gather_keys_and_gradients_and_no_rows():
    found = traffic_of(mesh_of(DEVICES), Exchange("device", replicas=True, distinct=0.5), (1024,))
    mean = 1024 * 0.5
    places = int(np.ceil(mean + 6 * np.sqrt(mean)))
    assert found.bytes("all-to-all") == 0
    assert found.bytes("all-gather") == (places + 1) * KEY_BYTES + places * ROW_BYTES


def test_a_second_round_stands_apart_and_a_strict_exchange_has_none():
    exchange = Exchange("device", distinct=0.5)
    found = traffic_of(mesh_of(DEVICES), exchange, (1024,))
    assert any(one.may_not_run for one in found.collectives)
    strict = traffic_of(mesh_of(DEVICES), Exchange("device", distinct=0.5, strict=True), (1024,))
    assert not any(one.may_not_run for one in strict.collectives)
    assert strict.bytes() == found.bytes()


def test_one_device_exchanges_nothing():
    mesh = mesh_of(1)
    placement = Placement(mesh)
    table = placement.create(lambda: OPTIMIZER.init(hkv.create(1024, DIM)))

    def step(table, keys):
        table, result = hkv.sharding.find_or_insert(table, keys, axis_name="device")
        return hkv.sharding.update(OPTIMIZER, table, result, result.values), result.counts

    compiled = placement.step(step).lower(table, jnp.arange(64)).compile()
    assert hkv.sharding.traffic(compiled, mesh).sent() == 0
