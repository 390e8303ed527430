# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""Programs as typed users write them: pyright looks at them, and a test runs them.

What it is to refuse has a comment that says so, which it refuses where it is not needed.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from flax import linen as nn

import jax_hkv as hkv

IDS = np.arange(8, dtype=np.int32)
ROWS = np.ones((8, 2), np.float32)
CONFIGS = [hkv.TableConfig("t", 1024, 2, optimizer=hkv.optim.sgd(0.1))]
COLLECTION = hkv.Collection(CONFIGS, [hkv.Feature("f", "t", None)])


def names() -> None:
    """Those that there are not are known as such, although some modules come late."""
    if not TYPE_CHECKING:
        return
    hkv.find_or_isnert  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    hkv.Polcy  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def reads(with_scores: bool) -> None:
    table = hkv.create(1024, 2)
    assert_type(hkv.find(table, IDS)[1], hkv.FindResult)
    assert_type(hkv.find(table, IDS, return_scores=True)[1], hkv.ScoredFindResult)
    found = hkv.find(table, IDS, return_scores=with_scores)[1]
    assert_type(found, hkv.FindResult | hkv.ScoredFindResult)


class Frozen:
    """An optimizer of one's own."""

    def init(self, table: hkv.Table) -> hkv.Table:
        return table

    def update(
        self, table: hkv.Table, result: object, row_gradients: object, *, apply: object = None
    ) -> hkv.Table:
        return table


def updated(optimizer: hkv.optim.Optimizer, rate: float) -> hkv.Table:
    """By any optimizer; rows, rates and flags may be NumPy's."""
    table, result = hkv.find_or_insert(optimizer.init(hkv.create(1024, 2)), IDS)
    table = optimizer.update(table, result, ROWS)
    sgd = hkv.optim.sgd(np.float32(0.1))
    table = sgd.init(dataclasses.replace(table, optimizer=None))
    table = sgd.update(table, result, ROWS, apply=np.bool_(True))
    return sgd.update(table, result, ROWS, learning_rate=np.float32(rate))


def lists() -> hkv.Padded:
    ids: list[npt.NDArray[np.uint64]] = [np.array([2**63], np.uint64), np.array([1], np.uint64)]
    weights = [np.ones(1, np.float32), np.ones(1, np.float32)]
    hkv.Jagged.from_lists(ids, weights=weights)
    return hkv.Padded.from_lists(ids, weights=weights)


def over_devices() -> None:
    mesh = jax.make_mesh((1,), ("device",))
    hkv.sharding.Placement(jax.sharding.AbstractMesh((4,), ("device",)))
    placement = hkv.sharding.Placement(mesh)

    def look_up(table: hkv.Table, keys: hkv.Keys) -> tuple[hkv.Table, hkv.metrics.Metrics]:
        table, found = hkv.sharding.find_or_insert(table, keys, axis_name="device")
        return table, hkv.metrics.of(table, found)

    def read(table: hkv.Table, keys: hkv.Keys) -> jax.Array:
        return hkv.sharding.find(table, keys, axis_name="device")[1].values

    def create() -> hkv.Table:
        return hkv.create(1024, 2)

    table = placement.create(create)
    keys = placement.put(hkv.Keys.from_numpy(IDS))
    assert_type(keys, hkv.Keys)
    assert_type(placement.abstract(create), hkv.Table)
    step = placement.step(look_up)
    hkv.sharding.traffic(step.lower(table, keys).compile())
    table, report = step(table, keys)
    assert_type(table, hkv.Table)
    assert_type(report, hkv.metrics.Metrics)
    assert_type(placement.run(read)(table, keys), jax.Array)
    if TYPE_CHECKING:
        report.no_such_count  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def by_table() -> None:
    tables, found = COLLECTION.on_tables(hkv.contains, COLLECTION.create(), {"t": IDS})
    assert_type(tables, dict[str, hkv.Table])
    assert found["t"].shape == IDS.shape
    _, scored = COLLECTION.on_tables(hkv.find, tables, {"t": IDS}, return_scores=True)
    assert scored["t"].scores.shape == IDS.shape
    store = hkv.tiered.create_store(tables["t"], 2048)
    tiers = {"t": hkv.tiered.Tiers(tables["t"], store)}
    tiers, erased = COLLECTION.on_tables(hkv.tiered.erase, tiers, {"t": IDS})
    assert_type(tiers, dict[str, hkv.tiered.Tiers])
    both, counts = hkv.tiered.map_tables(tiers["t"], resized, has_aux=True)
    assert_type(both, hkv.tiered.Tiers)
    assert_type(counts, list[hkv.Counts])
    assert erased["t"]


class Model(nn.Module):
    unseen: hkv.linen.Unseen = "initial"

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool = False) -> jax.Array:
        optimizer = hkv.optim.sgd(0.1)
        return hkv.linen.Embed(1024, 2, optimizer=optimizer, unseen=self.unseen)(ids, train=train)


Trained = hkv.linen.Step[tuple[hkv.linen.TrainState, hkv.linen.StepInfo]]


def trained(step: Trained, state: hkv.linen.TrainState) -> hkv.linen.StepInfo:
    _, info = step(state, jnp.asarray(IDS))
    return info


def resized(table: hkv.Table) -> tuple[hkv.Table, hkv.Counts]:
    return hkv.resize(table, 2048)


def main() -> None:
    reads(True)
    for optimizer in (hkv.optim.adam(0.1), hkv.optim.sparse(optax.adam(0.1)), Frozen()):
        updated(optimizer, 0.2)
    lists()
    over_devices()
    by_table()
    state = hkv.linen.TrainState.create(
        Model(), jax.random.key(0), jnp.asarray(IDS), tx=optax.sgd(0.1)
    )
    assert_type(state.map_tables(hkv.advance_epoch), hkv.linen.TrainState)
    state, counts = state.map_tables(resized, has_aux=True)
    assert_type(state, hkv.linen.TrainState)
    assert_type(counts, dict[str, hkv.Counts])
    trained(hkv.linen.train_step(lambda apply, ids: apply(ids, train=True).sum()), state)
    if TYPE_CHECKING:
        state.map_tables(resized)  # pyright: ignore[reportArgumentType]
