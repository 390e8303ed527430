"""Tables and batches that lie elsewhere than a call expects are named, with what to do."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_hkv as hkv
from jax_hkv import sharding, tiered

DIM, DEVICES = 2, 4
IDS = np.arange(64, dtype=np.int32)
SGD = hkv.optim.sgd(0.1)


def placement_of(*, reverse=False, kind=AxisType.Explicit, **axes):
    devices = jax.devices()[:DEVICES][:: -1 if reverse else 1]
    axes = axes or {"device": DEVICES}
    kinds = (kind,) * len(axes)
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
    return sharding.Placement(mesh)


def made(**options):
    return SGD.init(hkv.create(256, DIM, **options))


def found(table, ids):
    table, result = sharding.find_or_insert(table, ids, axis_name="device")
    return table, result.counts


@pytest.mark.parametrize(
    ("other", "name"),
    [({"reverse": True}, "device"), ({"node": 2, "device": 2}, "node")],
    ids=["reversed", "two levels"],
)
def test_arrays_on_another_mesh_are_named(other, name):
    own, other = placement_of(), placement_of(**other)
    step = own.step(found, donate=False)
    elsewhere = rf"must lie on the placement's mesh, .* got an array on the mesh {{'{name}'.*"
    with pytest.raises(ValueError, match=rf"Placement.step: state\..*{elsewhere}placement that it"):
        step(other.create(made), own.put(IDS))
    with pytest.raises(ValueError, match=rf"step: arguments\[0\].*{elsewhere}placement.put"):
        step(own.create(made), other.put(IDS))
    with pytest.raises(ValueError, match=rf"Placement.replicas_agree: state\..*{elsewhere}"):
        own.replicas_agree(other.create(made))


def test_parts_are_read_by_the_order_of_devices_alone():
    own = placement_of()
    with pytest.raises(ValueError, match=r"Placement.shards: state\..* in this order, got"):
        own.shards(placement_of(reverse=True).create(made))
    everywhere = NamedSharding(placement_of(reverse=True).mesh, P())
    copies = own.shards(jax.device_put(np.arange(3), everywhere))
    assert [copy.tolist() for copy in copies] == [[0, 1, 2]] * DEVICES
    split = placement_of(node=2, device=2)
    numbers = [part.tolist() for part in own.shards(split.put(np.arange(4, dtype=np.int32)))]
    assert numbers == [[0], [1], [2], [3]]


def test_a_state_that_was_used_up_is_named():
    placement = placement_of()
    table = placement.create(made)
    placement.step(lambda table: (table, None))(table)
    with pytest.raises(RuntimeError, match="Placement.shards: state was used up"):
        placement.shards(table)
    with pytest.raises(RuntimeError, match="Placement.replicas_agree: state was used up"):
        placement.replicas_agree(table)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_replicas_of_what_another_axis_splits_are_compared(kind):
    """Along the placement's axis; parts along the other one differ as they are to."""
    mesh = placement_of(kind=kind, device=2, model=2).mesh
    placement = sharding.Placement(mesh, "device")
    tower = np.arange(8, dtype=np.float32).reshape(2, 4)
    where = NamedSharding(mesh, P(None, "model"))
    assert placement.replicas_agree({"tower": jax.device_put(tower, where)})
    parts = {0: tower[:, :2], 1: tower[:, 2:], 2: tower[:, :2], 3: tower[:, 2:] + 1}
    apart = jax.make_array_from_single_device_arrays(
        tower.shape,
        where,
        [jax.device_put(parts[n], device) for n, device in enumerate(mesh.devices.flat)],
    )
    assert not placement.replicas_agree({"tower": apart})
    own = jax.device_put(tower, NamedSharding(mesh, P("device")))
    assert placement.replicas_agree({"moments": own})


def test_what_is_no_part_is_named_with_the_way_to_give_one():
    placement = placement_of(kind=AxisType.Auto)
    table = placement.create(made)
    remedy = r"in_specs and out_specs split the table .* train_step .* placement="
    mapped = jax.shard_map(
        found, mesh=placement.mesh, in_specs=(P(), P("device")), out_specs=P(), check_vma=False
    )
    with pytest.raises(TypeError, match=rf"sharding.find_or_insert: table must.*{remedy}"):
        jax.jit(mapped)(table, placement.put(IDS))
    with pytest.raises(TypeError, match=rf"sharding.update: table must.*{remedy}"):
        sharding.update(SGD, table, None, jnp.ones((64, DIM)))


def test_imports_inside_of_jit_are_named():
    placement = placement_of()
    exported = sharding.export_entries(hkv.find_or_insert(made(), IDS)[0])
    changes = sharding.export_changes(hkv.find_or_insert(made(), IDS)[0], None)
    for where, table in ((None, made()), (placement, placement.create(made))):
        for call, given in (("import_entries", exported), ("import_changes", changes)):
            put = getattr(sharding, call)
            with pytest.raises(TypeError, match=f"sharding.{call}: table .* outside of jit"):
                jax.jit(lambda table, put=put, where=where, given=given: put(where, table, given))(
                    table
                )


def test_a_summary_of_a_table_over_devices_is_that_of_its_parts():
    placement = placement_of()
    table, _ = placement.step(found)(placement.create(made), placement.put(IDS))
    with pytest.raises(TypeError, match=r"for part in placement.shards\(table\)"):
        hkv.metrics.summarize(table)
    parts = [hkv.metrics.summarize(part) for part in placement.shards(table)]
    assert sum(part.size for part in parts) == len(IDS)


def test_ids_that_were_not_put_are_named_by_tiers():
    placement = placement_of()
    cache = placement.create(made)
    tiers = tiered.Tiers(cache, tiered.create_store(cache, 4096, placement=placement))
    with pytest.raises(ValueError, match=r"tiered.prefetch: keys must lie on .*placement.put"):
        tiered.prefetch(tiers, IDS, placement=placement)
    with pytest.raises(ValueError, match="tiered.prefetch: valid must lie on"):
        tiered.prefetch(tiers, placement.put(IDS), valid=IDS < 9, placement=placement)
    with pytest.raises(ValueError, match="tiered.step_and_prefetch: coming must lie on"):
        tiered.step_and_prefetch(
            lambda table: (table, None), tiers, placement.put(IDS), IDS, placement=placement
        )


def test_steps_are_scanned_over_batches_that_are_split_behind_their_first_axis():
    """Others are named: with Explicit axes their types tell."""
    placement = placement_of()
    table, batches = placement.create(made), np.arange(8 * 64, dtype=np.int32).reshape(8, 64)

    def step(table, ids):
        table, result = sharding.find_or_insert(table, ids, axis_name="device")
        return table, result.counts.inserted

    run = jax.jit(lambda table, batches: jax.lax.scan(placement.step(step), table, batches))
    put = jax.device_put(batches, NamedSharding(placement.mesh, P(None, ("device",))))
    assert run(table, put)[1].sum() > 500
    with pytest.raises(ValueError, match=r"Placement.step: arguments\[0\] must be split along .*"):
        run(table, batches)


# --- Entries, and whether a table is one of replicas ---------------------------------------------


def test_parts_that_differ_in_what_is_static_are_not_joined():
    placement = placement_of()
    parts = placement.shards(placement.create(made))
    parts[1] = dataclasses.replace(parts[1], seed=5)
    with pytest.raises(ValueError, match="Placement.join: shards must be tables of one form"):
        placement.join(parts)


def filled(**options):
    return hkv.find_or_insert(made(**options), IDS)[0]


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_a_table_over_devices_is_not_made_with_entries(mode):
    """Each device would hold them all, also those that others own."""
    placement = sharding.Placement(placement_of().mesh, mode=mode)
    with pytest.raises(ValueError, match="Placement.create: make .* without entries, got 'table'"):
        placement.create(lambda: {"users": filled(), "items": made()})
    one = sharding.Placement(jax.make_mesh((1,), ("device",), devices=jax.devices()[:1]))
    assert int(hkv.size(one.create(filled))) == len(IDS)
    copies = placement.create(lambda: filled(replicas=True))
    assert [int(hkv.size(part)) for part in placement.shards(copies)] == [len(IDS)] * DEVICES


@pytest.mark.parametrize("by", ["entries", "reshard"])
def test_a_table_becomes_one_of_replicas_and_ceases_to_be(by):
    """As docs/sharding.md says."""
    placement = placement_of()

    def moved(table, replicas):
        fresh = placement.create(lambda: made(replicas=replicas))
        if by == "reshard":
            table, counts = sharding.reshard(table, fresh, source=placement, target=placement)
            return table, counts[""]
        exported = sharding.export_entries(placement.shards(table))
        return sharding.import_entries(placement, fresh, exported)

    table, _ = placement.step(found)(placement.create(made), placement.put(IDS))
    copies, counts = moved(table, True)
    assert int(counts.inserted) == DEVICES * len(IDS) and placement.replicas_agree(copies)
    assert copies.replicas and "replicas=True" in repr(copies)
    split, counts = moved(copies, False)
    assert int(counts.inserted) == len(IDS) and not split.replicas
    misplaced = placement.run(lambda table: sharding.misplaced(table, axis_name="device")[None])
    assert not misplaced(split).any()


def test_parts_of_a_sum_that_devices_hold_are_added_up():
    """What an Explicit mesh calls unreduced."""
    mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    table, optimizer, ids = hkv.create(128, 4), hkv.optim.sgd(1.0), np.arange(20, dtype=np.int32)

    def step(spec, table, x, w):
        table, result = hkv.find_or_insert(table, ids)
        slopes = jnp.einsum("nk,kd->nd", x, w, out_sharding=spec)
        return hkv.find(optimizer.update(table, result, slopes), ids)[1].values

    with jax.set_mesh(mesh):
        table = jax.device_put(optimizer.init(table), NamedSharding(mesh, P()))
        x = jax.device_put(jnp.arange(160.0).reshape(20, 8), P(None, "a"))
        w = jax.device_put(jnp.ones((8, 4)), P("a", None))
        whole, parts = (
            jax.jit(step, static_argnums=0)(spec, table, x, w)
            for spec in (P(None, None), P(None, None, unreduced={"a"}))
        )
    np.testing.assert_array_equal(whole, parts)
