"""Memory of a data loader that is filled anew: JAX on CPUs reads NumPy's own while a step runs."""

from __future__ import annotations

import subprocess
import sys

import jax
import numpy as np
import pytest
from test_sharding_traffic import mesh_of

import jax_hkv as hkv

# Where keys come to was asked twice of the mask: another answer wrote behind the scratch memory.
REFILLS = """
import sys
import jax, numpy as np, jax_hkv as hkv
count, rng = 65536, np.random.default_rng(0)
buffer = np.zeros(count + 64, np.bool_)
begin = -buffer.ctypes.data % 64
valid = buffer[begin : begin + count]           # aligned, so that JAX takes it as it is
insert = lambda table, keys, valid: hkv.find_or_insert(table, keys, valid=valid)
step = jax.jit(insert, donate_argnums=0)
table = hkv.create(2**18, 16)
for _ in range(100):
    valid[:] = rng.random(count) < 0.5
    table, _ = step(table, hkv.Keys.from_numpy(rng.integers(0, 40_000, count)), valid)
print(int(hkv.size(table)) <= 40_000, int(hkv.misplaced(table)))
"""


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there JAX takes a copy")
def test_a_mask_that_changes_while_it_is_read_ends_no_process():
    run = subprocess.run(
        [sys.executable, "-c", REFILLS], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "True 0\n"), run.stderr[-2000:]


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_put_copies_what_lies_on_the_host(mode):
    placement = hkv.sharding.Placement(mesh_of(1), mode=mode)
    count = 4096
    buffer = np.zeros(count + 16, np.int32)
    begin = -buffer.ctypes.data % 64 // 4
    ids = buffer[begin : begin + count]
    put = placement.put({"ids": ids, "valid": np.ones(count, bool)})
    if mode == "shard_map":  # pmap's batch stays on the host
        ids[:] = 7
        assert not np.asarray(put["ids"]).any()


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
