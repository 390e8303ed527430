"""Memory of a data loader that is filled anew: JAX on CPUs reads NumPy's own while a step runs."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest
from many_devices import assert_same_bits
from test_sharding_traffic import mesh_of

import jax_hkv as hkv

# Where keys come to was asked twice of a mask, and of keys: another answer wrote behind the scratch
# memory, or brought equal keys to different places.
REFILLS = """
import sys
import jax, numpy as np, jax_hkv as hkv
count, rng = 65536, np.random.default_rng(0)

def aligned(shape, dtype):  # so that JAX takes it as it is
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 64, np.uint8)
    begin = -buffer.ctypes.data % 64
    return buffer[begin : begin + size].view(dtype).reshape(shape)

valid, words = aligned(count, np.bool_), aligned((count, 2), np.uint32)
valid[:] = True
def insert(table, keys, valid):
    return hkv.find_or_insert(table, keys, valid=valid)

step = jax.jit(insert, donate_argnums=0)
table = hkv.create(2**18, 16)
for _ in range(100):
    ids = rng.integers(0, 40_000, count)
    if sys.argv[1] == "mask":
        valid[:] = rng.random(count) < 0.5
        keys = hkv.Keys.from_numpy(ids)
    else:
        words[:, 0] = ids
        keys = hkv.Keys(words)
    table, _ = step(table, keys, valid)
keys = table.keys.reshape(-1, 2)[:, 0][(table.index.digests != 0).reshape(-1)]
print(len(np.unique(keys)) == len(keys) == int(hkv.size(table)), int(hkv.misplaced(table)))
"""


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there JAX takes a copy")
@pytest.mark.parametrize("what", ["mask", "keys"])
def test_memory_that_changes_while_it_is_read_harms_no_table(what):
    run = subprocess.run(
        [sys.executable, "-P", "-c", REFILLS, what], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "True 0\n"), run.stderr[-2000:]


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there JAX takes a copy")
@pytest.mark.parametrize("lookup", [hkv.find_or_insert, hkv.insert_and_evict, hkv.find])
def test_flags_of_other_bytes_than_0_and_1_are_true(lookup, rng):
    """NumPy lets bytes be looked at as flags, and JAX reads such memory as it is."""
    numbers = rng.integers(0, 4, 1024 + 64).astype(np.uint8) * 85
    begin = -numbers.ctypes.data % 64
    flags = numbers[begin : begin + 1000].view(np.bool_)
    ids, rows = np.arange(1000, dtype=np.int32), np.ones((1000, 2), np.float32)
    given = (rows,) if lookup is hkv.insert_and_evict else ()
    tables, results = zip(
        *(
            jax.jit(lookup)(hkv.create(2048, 2), ids, *given, valid=valid)
            for valid in (flags, flags.view(np.uint8) != 0)
        ),
        strict=True,
    )
    assert_same_bits(tables[0], tables[1])
    assert_same_bits(results[0], results[1])


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_put_copies_what_lies_on_the_host(mode):
    placement = hkv.sharding.Placement(mesh_of(2), mode=mode)
    buffer = np.zeros(2 * 4096 + 16, np.int32)
    begin = -buffer.ctypes.data % 64 // 4
    ids = buffer[begin : begin + 4096]
    view = ids.view()
    view.flags.writeable = False
    put = placement.put({"ids": ids, "view": view, "keys": hkv.Keys.from_numpy(ids)})
    buffer[:] = 7
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(put))


def test_a_batch_is_put_at_once(monkeypatch):
    """Leaf by leaf it takes twice the time."""
    placement, puts, put = hkv.sharding.Placement(mesh_of(2)), [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *given: puts.append(given) or put(*given))
    batch = {"ids": hkv.Keys.from_numpy(np.arange(8)), "key": jax.random.key(0), "day": 3}
    batch |= {str(number): np.full((8, 2), number, np.float32) for number in range(20)}
    after = placement.put(batch)
    assert len(puts) == 1
    assert after["day"] == 3 and after["ids"].to_numpy().tolist() == list(range(8))
    assert all((np.asarray(after[str(number)]) == number).all() for number in range(20))


@pytest.mark.parametrize("call", ["step", "run"])
@pytest.mark.parametrize("form", ["host", "device", "device, within"])
def test_bags_that_devices_would_cut_are_refused(call, form):
    """31 bags have 32 splits, which four devices share evenly: most bags were lost, silently."""
    placement = hkv.sharding.Placement(mesh_of(4))
    table = placement.create(lambda: hkv.create(1024, 2))
    bags = hkv.Jagged.from_lists([[i, i + 100] for i in range(31)], capacity=64)
    of_each = bags.for_parts(4, capacity=20, batch=32)
    place = jax.sharding.NamedSharding(placement.mesh, jax.sharding.PartitionSpec("device"))
    if form != "host":
        bags, of_each = jax.device_put((bags, of_each), place)
    if form == "device, within":
        bags, of_each = hkv.Padded(bags), hkv.Padded(of_each)

    def step(table, bags):
        table, found = hkv.sharding.find_or_insert_pooled(table, bags, axis_name="device")
        return table, found.counts

    def run(table, bags):
        return hkv.sharding.find_pooled(table, bags, axis_name="device")[1].values

    compiled = placement.step(step) if call == "step" else placement.run(run)
    for _ in range(2):  # whoever runs a cell again is told again
        with pytest.raises(ValueError, match=rf"Placement.{call}: a Jagged must be .*for_parts\(4"):
            compiled(table, bags)
    result = compiled(table, of_each)
    if call == "step":
        assert int(result[1].inserted) == 62
    else:
        assert result.shape == (32, 2)


def test_a_batch_that_does_not_divide_is_told_how_to():
    placement = hkv.sharding.Placement(mesh_of(4))
    table = placement.create(lambda: hkv.create(1024, 2))
    run = placement.run(
        lambda table, ids: hkv.sharding.find(table, ids, axis_name="device")[1].values
    )
    with pytest.raises(ValueError, match="divisible") as caught:
        run(table, np.arange(31, dtype=np.int32))
    assert any("multiple of the 4 devices: pad it" in note for note in caught.value.__notes__)


def test_bags_of_a_new_shape_are_looked_at_and_traces_tell_nothing():
    placement = hkv.sharding.Placement(mesh_of(4))
    table = placement.create(lambda: hkv.create(1024, 2))
    place = jax.sharding.NamedSharding(placement.mesh, jax.sharding.PartitionSpec("device"))

    def bags(count):
        lists = [[i, i + 100] for i in range(count)]
        return jax.device_put(hkv.Jagged.from_lists(lists, capacity=64), place)

    run = placement.run(
        lambda table, bags: hkv.sharding.find_pooled(table, bags, axis_name="device")[1].values
    )
    jax.eval_shape(run, table, bags(31))
    with pytest.raises(ValueError, match="a Jagged must be one for each of the 4 devices"):
        run(table, bags(31))
    good = hkv.Jagged.from_lists([[1], [2], [3]]).for_parts(4, capacity=8, batch=4)
    for _ in range(2):
        assert run(table, placement.put(good)).shape == (4, 2)
    with pytest.raises(ValueError, match="a Jagged must be one for each of the 4 devices"):
        run(table, bags(27))


def test_what_is_no_jagged_of_each_device_is_left_to_the_call():
    """Bags of several steps, and what is malformed, of which the operation speaks."""
    placement = hkv.sharding.Placement(mesh_of(2))
    table = placement.create(lambda: hkv.create(1024, 2))
    step = placement.run(
        lambda table, bags: jax.lax.map(
            lambda own: hkv.sharding.find_pooled(table, own, axis_name="device")[1].values,
            jax.tree.map(lambda leaf: leaf[0], bags),
        )
    )
    one = hkv.Jagged.from_lists([[1, 2], [3]], capacity=4)
    stacked = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (2, 3, *np.shape(leaf))), one)
    assert step(table, stacked).shape == (6, 2, 2)
    find = placement.run(
        lambda table, bags: hkv.sharding.find_pooled(table, bags, axis_name="device")[1].values
    )
    for ids in ([1, 2, 3, 4], None):
        wrong = hkv.Jagged(ids, np.zeros(4, np.int32))
        with pytest.raises(TypeError, match=r"must be jax_hkv.Keys or an integer array, got"):
            find(table, wrong)
