"""One process of tests/test_processes.py: trains a table that lies on the devices of all."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jax_hkv as hkv

LOCAL_DEVICES = 2
BATCH = 16  # of one device
LOCAL_BATCH = LOCAL_DEVICES * BATCH
CAPACITY, DIM, IDS = 1024, 4, 300
STEPS = (20, 17)  # of each part of the input: the second one is done first
EMPTY_STEP, SHORT = 3, 5  # a step without ids, and the ids of the last one
DEATH_STEP = 5
OPTIMIZER = hkv.optim.adam(0.05)


class Batch(NamedTuple):
    """Ids with a mask, and what the gradient of their rows is made of."""

    ids: Any
    valid: Any
    targets: Any


NONE = Batch(
    np.zeros(LOCAL_BATCH, np.int32),
    np.zeros(LOCAL_BATCH, bool),
    np.zeros((LOCAL_BATCH, DIM), np.float32),
)


def batches(part: int) -> Iterator[Batch]:
    """A part of the input, one batch a step."""
    random = np.random.default_rng(part)
    for step in range(STEPS[part]):
        count = SHORT if step == STEPS[part] - 1 else LOCAL_BATCH
        count = 0 if (part, step) == (0, EMPTY_STEP) else count
        yield Batch(
            random.integers(0, IDS, LOCAL_BATCH).astype(np.int32),
            np.arange(LOCAL_BATCH) < count,
            random.normal(size=(LOCAL_BATCH, DIM)).astype(np.float32),
        )


def gradients_of(rows: Any, batch: Batch) -> Any:
    """Of half the squared distance to the targets."""
    return jnp.where(batch.valid[..., None], rows - batch.targets, 0)


def backwards(batch: Batch) -> Batch:
    """The same positions, the last one first."""
    return Batch(*(leaf[::-1] for leaf in batch))


def halved(batch: Batch) -> Batch:
    """Its first half."""
    return Batch(*(leaf[: LOCAL_BATCH // 2] for leaf in batch))


def train_step(table: Any, batch: Batch) -> Any:
    table, result = hkv.sharding.find_or_insert(
        table, batch.ids, valid=batch.valid, axis_name="device"
    )
    gradients = gradients_of(result.values, batch)
    return hkv.sharding.update(OPTIMIZER, table, result, gradients), result.counts


def own_capacity() -> int:
    """Of one device, as a layer with an axis name finds it."""
    return hkv.sharding.Exchange("device").local_capacity(CAPACITY)


def restored(placement: Any, exported: Any) -> Any:
    """What a fresh table holds that is given what this process exported."""
    table = placement.create(lambda: OPTIMIZER.init(hkv.create(own_capacity(), DIM)))
    table, counts = hkv.sharding.import_entries(placement, table, exported)
    assert int(counts.inserted) == len(exported.keys)
    if placement.mode == "pmap":
        table = stepped(placement, table)
    return hkv.sharding.export_entries(placement.shards(table))


def stepped(placement: Any, table: Any) -> Any:
    """A table of joined parts after steps without ids, which leave its entries as they are."""
    step = placement.step(train_step)
    table, _ = step(table, placement.put(NONE))
    store = hkv.tiered.create_store(table, CAPACITY, placement=placement)
    ids, valid, _ = batch = placement.put(NONE)
    for _ in range(2):
        tiers, counts, _ = hkv.tiered.step_and_prefetch(
            lambda table: step(table, batch),
            hkv.tiered.Tiers(table, store),
            ids,
            ids,
            valid=valid,
            coming_valid=valid,
            placement=placement,
        )
        table, store = tiers
        assert int(counts.unique) == 0
    return step(table, batch)[0]


class Stored:
    """A step of a table whose parts have stores, to which everything goes now and then."""

    PERIOD = 3  # steps

    def __init__(self, placement: Any, step: Any, table: Any):
        self.placement, self.step, self.steps = placement, step, 0
        self.tiers = self.behind(table)
        self.restored = 0

    def behind(self, table: Any) -> Any:
        store = hkv.tiered.create_store(table, CAPACITY, placement=self.placement)
        return hkv.tiered.Tiers(table, store)

    def __call__(self, table: Any, batch: Any) -> Any:
        if self.steps % self.PERIOD == 1:
            exported = hkv.tiered.export_entries(self.tiers, placement=self.placement)
            table = self.placement.create(lambda: OPTIMIZER.init(hkv.create(own_capacity(), DIM)))
            self.tiers, counts = hkv.tiered.import_entries(
                self.behind(table), exported, placement=self.placement
            )
            assert int(counts.inserted) == len(exported.keys)
        self.steps += 1
        some = self.placement.put(np.arange(LOCAL_BATCH) < LOCAL_BATCH // 2) & batch.valid
        options = {"valid": some, "placement": self.placement}
        self.tiers, first = hkv.tiered.prefetch(self.tiers, batch.ids, **options)
        self.tiers, counts, _ = hkv.tiered.step_and_prefetch(
            lambda cache: (cache, None),
            self.tiers,
            batch.ids,
            batch.ids,
            coming_valid=batch.valid,
            **options,
        )
        assert int(counts.refused) == int(counts.dropped) == int(counts.absent) == 0
        assert int(counts.hits) >= int(first.unique)
        if jax.process_count() > 1:
            kind = (jax.sharding.AxisType.Auto,)  # those of Explicit axes are brought together
            auto = jax.sharding.Mesh(self.placement.mesh.devices, ("device",), axis_types=kind)
            ids = hkv.sharding.Placement(auto).put(np.arange(LOCAL_BATCH, dtype=np.int32))
            check_refused(lambda: hkv.tiered.erase(self.tiers, ids, placement=self.placement))
        self.restored += int(first.restored) + int(counts.restored)
        table, counts = self.step(self.tiers.cache, batch)
        self.tiers = self.tiers._replace(cache=table)
        return table, counts

    def exported(self) -> Any:
        """With the scores of a table that a prefetch has not looked up, at every third time."""
        assert self.restored > IDS // 3
        exported = hkv.tiered.export_entries(self.tiers, placement=self.placement)
        return exported._replace(scores=exported.scores // 3)


def check_refused(call: Any) -> None:
    """Before anything is changed: ids of which other processes have parts."""
    try:
        call()
    except ValueError as error:
        assert "keys must be known to this process" in str(error)
    else:
        raise AssertionError("ids of other processes were taken")


def check_growth(placement: Any, table: Any, exported: Any) -> None:
    """All processes see the entries of all, and double their parts together."""
    assert hkv.grow(table, 4 * CAPACITY, placement=placement) is table
    larger = hkv.grow(table, 4 * CAPACITY, room=CAPACITY // 2, placement=placement)
    parts = placement.shards(larger)
    assert [part.capacity for part in parts] == [CAPACITY // 2] * LOCAL_DEVICES
    again = hkv.sharding.export_entries(parts)
    old, new = np.argsort(exported.keys), np.argsort(again.keys)
    assert (exported.keys[old] == again.keys[new]).all()
    assert (exported.values[old] == again.values[new]).all()


def check_put_on_meshes() -> None:
    """Of which processes hold other numbers of devices, or one part on several."""
    devices, own = np.array(jax.devices()), jax.process_index()
    of_two = jax.sharding.Mesh(devices.reshape(2, 2), ("node", "device"))
    for mesh, axis_name, parts, given in (
        (jax.sharding.Mesh(devices[:3], ("device",)), None, 3, ((0, 1), (2,))),
        (of_two, "node", 2, ((0,), (1,))),
        (of_two, "device", 2, ((0, 1), (0, 1))),
    ):
        placement = hkv.sharding.Placement(mesh, axis_name)
        batch = np.repeat(given[own], 2)[:, None] * np.ones(DIM)
        put = placement.put(batch.astype(np.float32))
        assert put.shape == (2 * parts, DIM)
        for shard in put.addressable_shards:
            assert (np.asarray(shard.data) == shard.index[0].start // 2).all()


def die(how: str) -> None:
    print(f"ends by {how}", flush=True)
    if how == "raise":
        raise ValueError("the cause")
    if how == "exit":
        sys.exit(3)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", default="shard_map")
    parser.add_argument("--restore", action="store_true", help="what was exported, too")
    parser.add_argument("--store", action="store_true", help="behind the table")
    parser.add_argument("--other-order", action="store_true")
    parser.add_argument("--death", nargs=2, metavar=("PROCESS", "HOW"), default=("-1", ""))
    parser.add_argument("--half", type=int, default=-1, help="a process with smaller batches")
    parser.add_argument("--heartbeat", type=int, help="seconds, instead of the library's")
    return parser.parse_args()


def main() -> None:
    given = options()
    if given.other_order and os.environ["JAX_HKV_PROCESS"] == "0":
        time.sleep(1)  # process 1 is there before its coordinator
    others = {"heartbeat_timeout_seconds": given.heartbeat} if given.heartbeat else {}
    hkv.launch.initialize(**others)
    own = jax.process_index()
    placement = hkv.sharding.Placement(jax.make_mesh((4,), ("device",)), mode=given.mode)
    table = placement.create(lambda: OPTIMIZER.init(hkv.create(own_capacity(), DIM)))
    step = placement.step(train_step)
    stored = Stored(placement, step, table)
    step = stored if given.store else step
    steps = 0
    part = 1 - own if given.other_order else own
    given_batches, none = batches(part), NONE
    if given.half == own:
        given_batches, none = map(halved, given_batches), halved(NONE)
    for batch in hkv.sharding.synchronized(given_batches, none):
        batch = backwards(batch) if given.other_order else batch
        table, counts = step(table, placement.put(batch))
        steps += 1
        if steps == DEATH_STEP and own == int(given.death[0]):
            die(given.death[1])
    assert [part.capacity for part in placement.shards(table)] == [CAPACITY // 4] * LOCAL_DEVICES
    digests = placement.digests(table)
    exported = hkv.sharding.export_entries(placement.shards(table))
    if given.store:
        exported = stored.exported()
    else:
        check_growth(placement, table, exported)
    if given.mode == "shard_map":
        check_put_on_meshes()
    again = restored(placement, exported) if given.restore else exported
    np.savez(
        given.folder / f"{own}.npz",
        keys=exported.keys,
        scores=exported.scores,
        values=exported.values,
        restored=again.keys,
        restored_values=again.values,
        digests=digests,
        steps=steps,
        hits=int(counts.hits),
        **exported.optimizer,
    )
    print(f"trained {steps} steps on {len(jax.devices())} devices", flush=True)


if __name__ == "__main__":
    main()
