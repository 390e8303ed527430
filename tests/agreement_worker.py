"""What tests/test_processes.py starts: what processes must agree on, and what they are told if not.

python -m jax_hkv.launch --processes 2 --devices 2 agreement_worker.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import jax_hkv as hkv

DIM, LOCAL_BATCH, CAPACITY = 2, 32, 1024


def check_raises(call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except ValueError as error:
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError(f"nothing was raised of {words}")


def train_step(table: Any, ids: Any) -> Any:
    table, result = hkv.sharding.find_or_insert(table, ids, axis_name="device")
    return table, result.counts


def main() -> None:
    hkv.launch.initialize()
    own = jax.process_index()
    devices = np.array(jax.devices())
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.Mesh(devices, ("device",), axis_types=kinds)
    placement = hkv.sharding.Placement(mesh)

    def made(capacity: int = CAPACITY) -> Any:
        return placement.create(lambda: hkv.create(capacity, DIM))

    step = placement.step(train_step)
    check_forms(made, placement, own)
    check_axes_between_processes(devices, own)
    table = check_batches(step, made(), placement, own)
    check_growth(table, placement, own)
    check_changes(step, made, placement, own, Path(sys.argv[1]))
    check_absent(devices, own)
    check_checkpoint(placement, own)
    multihost_utils.sync_global_devices("all is done")
    print(f"process {own} agrees", flush=True)


def check_forms(made: Callable[[int], Any], placement: Any, own: int) -> None:
    check_raises(
        lambda: made(CAPACITY * (1 + own)),
        *("Placement.create: what make returns must be the same in every process", "settings"),
    )

    def other_policy() -> Any:
        return hkv.create(CAPACITY, DIM, policy=[hkv.Policy.LRU, hkv.Policy.LFU][own])

    check_raises(lambda: placement.create(other_policy), f"in process {own}")
    # Nobody is asked where nothing is made.
    assert jax.eval_shape(lambda: made(CAPACITY * (1 + own))).capacity == 4 * CAPACITY * (1 + own)
    nowhere = hkv.sharding.Placement(jax.sharding.AbstractMesh((4,), ("device",)))
    shape = jax.eval_shape(lambda: nowhere.create(lambda: hkv.create(CAPACITY, DIM)))
    assert shape.capacity == 4 * CAPACITY


def check_axes_between_processes(devices: np.ndarray, own: int) -> None:
    """Both processes hold all parts, each on devices of its own."""
    mesh = jax.sharding.Mesh(devices.reshape(2, 2), ("model", "device"))
    placement = hkv.sharding.Placement(mesh, "device")
    check_raises(
        lambda: placement.create(lambda: hkv.create(CAPACITY * (1 + own), DIM)),
        "another for the devices",
    )
    table = placement.create(lambda: hkv.create(CAPACITY, DIM))
    check_raises(lambda: hkv.grow(table, 1 << (13 + own), placement=placement), "max_capacity")
    larger = hkv.grow(table, 1 << 16, room=4000 * own, placement=placement)
    assert larger.capacity == 8192, larger.capacity


def check_batches(step: Any, table: Any, placement: Any, own: int) -> Any:
    """One that was not put would be this process's idea of the whole batch."""
    ids = np.arange(LOCAL_BATCH, dtype=np.int32) + 1000 * own
    for call in (
        lambda: step(table, ids),
        lambda: placement.run(lambda table, ids: ids)(table, ids),
        lambda: hkv.tiered.prefetch(
            hkv.tiered.Tiers(table, hkv.tiered.create_store(table, 4096, placement=placement)),
            ids,
            placement=placement,
        ),
    ):
        check_raises(call, "must lie on the 4 devices", "give placement.put(batch)")
    table, counts = step(table, placement.put(ids))
    assert int(counts.inserted) == 2 * LOCAL_BATCH
    return table


def check_growth(table: Any, placement: Any, own: int) -> None:
    most = 1 << (16 if own else 13)
    check_raises(
        lambda: hkv.grow(table, most, placement=placement),
        *("grow: max_capacity must be the same in every process", f"got {most}"),
    )
    larger = hkv.grow(table, 1 << 16, room=4000 * own, placement=placement)
    assert larger.capacity == 8192, larger.capacity


def check_changes(step: Any, made: Any, placement: Any, own: int, folder: Path) -> None:
    """A server over the same processes follows a table over both; each has exported its part."""
    table, server, since = made(), made(), None
    for turn in range(3):
        ids = np.arange(3 * LOCAL_BATCH, dtype=np.int32) + 1000 * own + 50 * turn
        table, _ = step(table, placement.put(ids))
        since = hkv.sharding.export_changes(placement.shards(table), since)
        hkv.sharding.save_changes(folder / f"{turn}-{own}", since)
        multihost_utils.sync_global_devices(f"turn {turn}")
        for process in range(2):
            changes = hkv.sharding.load_changes(folder / f"{turn}-{process}")
            server, _ = hkv.sharding.import_changes(placement, server, changes)
        one, other = (
            hkv.sharding.export_entries(placement.shards(each)) for each in (table, server)
        )
        orders = np.argsort(one.keys), np.argsort(other.keys)
        for field in ("keys", "scores", "values"):
            wanted, got = (
                getattr(each, field)[order]
                for each, order in zip((one, other), orders, strict=True)
            )
            assert np.array_equal(wanted, got), (turn, field)
    if own == 0:  # of a time that these changes do not begin at
        changes = hkv.sharding.load_changes(folder / "0-0")
        check_raises(
            lambda: hkv.sharding.import_changes(placement, server, changes), "import_changes"
        )


def check_checkpoint(placement: Any, own: int) -> None:
    """A state of two devices, which every process has read, goes to the four of both."""
    ids = np.arange(100, dtype=np.int32)
    two = hkv.sharding.Placement(jax.make_mesh((2,), ("device",), devices=jax.local_devices()))

    def made(parts: int) -> Any:
        table = hkv.optim.adam(0.1).init(hkv.create(4 * CAPACITY // parts, DIM))
        return {"table": table, "w": jax.numpy.ones(3), "key": jax.random.key(own)}

    state, _ = two.step(
        lambda state, ids: ({**state, "table": train_step(state["table"], ids)[0]}, None)
    )(two.create(lambda: made(2)), two.put(ids))
    w = np.arange(3, dtype=np.float32)
    saved = {**jax.device_get({**state, "key": 0}), "w": w, "key": jax.random.key(7)}
    absent = hkv.sharding.Placement(jax.sharding.AbstractMesh((2,), ("device",)))
    options = {"source": absent, "target": placement}
    state, moved = hkv.sharding.reshard(saved, placement.create(lambda: made(4)), **options)
    assert np.array_equal(np.asarray(state["w"]), w)
    assert (jax.random.key_data(state["key"]) == jax.random.key_data(jax.random.key(7))).all()
    exported = hkv.sharding.export_entries(placement.shards(state["table"]))
    assert int(moved["table"].inserted) == len(exported.keys) > 20
    told = np.zeros(100, np.int32)
    told[exported.keys.astype(int)] = 1
    assert (multihost_utils.process_allgather(told).sum(axis=0) == 1).all()
    state, counts = placement.step(train_step)(state["table"], placement.put(ids[:LOCAL_BATCH]))
    assert int(counts.hits) == LOCAL_BATCH
    check_raises(
        lambda: hkv.sharding.reshard(
            {"table": state}, {"table": placement.create(lambda: made(4)["table"])}, **options
        ),
        *("sharding.reshard: state must be NumPy arrays", "in every process"),
    )


def check_absent(devices: np.ndarray, own: int) -> None:
    """A mesh of process 0's devices is nobody else's."""
    placement = hkv.sharding.Placement(jax.sharding.Mesh(devices[:2], ("device",)))
    ids = np.arange(8, dtype=np.int32)
    if own == 0:
        assert placement.put(ids).shape == (8,)
        return
    for call in (lambda: placement.put(ids), lambda: placement.join([])):
        check_raises(call, "must have devices of this process, 1 of 2")


if __name__ == "__main__":
    main()
