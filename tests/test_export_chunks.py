"""Exports in chunks: what one export has, so many entries at a time."""

from __future__ import annotations

import itertools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from many_devices import Case, Many, assert_same_bits, entries_of, sorted_by_key, zipf_batch
from test_expire import warnings_of

import jax_hkv as hkv
from jax_hkv import _entries, sharding, tiered
from jax_hkv import index as _index

DIM = 3
ADAM = hkv.optim.adam(0.1, count_per_row=True)


def made(capacity=1024, **options):
    return ADAM.init(hkv.create(capacity, DIM, **options))


def trained(ids, **options):
    """A table after two steps, in which half of the ids came."""
    table = made(**options)
    for own in np.array_split(np.asarray(ids, np.int32), 2):
        table, found = hkv.find_or_insert(table, own)
        table = ADAM.update(table, found, 0.5 * found.values)
    return table


def read(table):
    """Entries in the order of slots, from the leaves, in NumPy."""
    occupied = np.asarray(table.digests).reshape(-1) != 0
    words = (np.asarray(own).reshape(-1, 2)[occupied] for own in (table.keys, table.scores))
    keys, scores = (own.astype(np.uint64) @ np.array([1, 2**32], np.uint64) for own in words)
    rows = table.values, dict(table.optimizer.rows)
    return keys, scores, *jax.tree.map(lambda leaf: np.asarray(leaf)[occupied], rows)


def joined(chunks):
    """Chunks, each by itself an export, as one."""
    first, *others = chunks
    for other in others:
        assert_same_bits(*(jax.tree.map(np.asarray, own[4:]) for own in (other, first)))
    entries = jax.tree.map(lambda *own: np.concatenate(own), *(chunk[:4] for chunk in chunks))
    return sharding.Exported(*entries, *first[4:])


def assert_are(chunks, exported, entries):
    chunks = list(chunks)
    count = len(exported.keys)
    full, rest = divmod(count, entries)
    assert [len(own.keys) for own in chunks] == [entries] * full + [rest] * (rest > 0)
    assert_same_bits(joined(chunks)[:4], exported[:4])
    assert_same_bits(*(jax.tree.map(np.asarray, own[4:]) for own in (chunks[0], exported)))


TABLE = trained(
    np.random.default_rng(0).permutation(5000)[:600],
    dtype=jnp.bfloat16,
    policy=hkv.Policy.EPOCH_LRU,
    admission=hkv.admission.frequency(1, width=64, depth=1),
)


@pytest.mark.parametrize("entries", [7, 200, 10**9])
def test_chunks_are_the_entries_of_one_export_in_its_order(entries):
    """Rows, optimizer rows, time and sightings in every bit, of as many entries but in the last."""
    exported = sharding.export_entries(TABLE)
    assert len(exported.keys) > 500
    assert_same_bits(exported[:4], read(TABLE))
    assert_are(sharding.export_chunks(TABLE, entries), exported, entries)


def test_one_program_reads_all_chunks_of_tables_with_any_number_of_entries():
    table, _ = jax.jit(hkv.erase)(TABLE, np.arange(2500, dtype=np.int32))
    chunks = sharding.export_chunks(TABLE, 100)
    next(chunks)
    exported = sharding.export_entries(TABLE)
    with jax.log_compiles(), warnings_of("jax") as records:
        assert len(list(chunks)) > 4
        assert len(sharding.export_entries(table).keys) < len(exported.keys)
    assert [text for text in records if "Compiling" in text] == []


def test_increments_come_in_chunks():
    ids = np.arange(900, dtype=np.int32)
    earlier = sharding.export_entries(table := trained(ids))
    table, _ = hkv.find_or_insert(table, ids[500:])
    changed = sharding.export_entries(table, changed_since=earlier)
    assert 300 < len(changed.keys) <= 400
    assert_are(sharding.export_chunks(table, 70, changed_since=earlier), changed, 70)
    oldest = earlier.clock + 1
    assert_are(sharding.export_chunks(table, 70, min_score=oldest), changed, 70)
    assert int(changed.scores.min()) >= oldest


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_chunks_go_through_the_parts_of_a_table_over_devices(mode, rng):
    """Whatever mesh is set while they are taken."""
    many = Many(Case(shape=(4,), mode=mode, options=(("choices", 2),)))
    many.step(zipf_batch(rng, (400,)))
    exported = sharding.export_entries(many.parts)
    sizes = [int(hkv.size(part)) for part in many.parts]
    assert len(exported.keys) == sum(sizes) > 100
    entries = sizes[0] + 1  # the first chunk has one of the second part
    chunks = sharding.export_chunks(many.parts, entries)
    with jax.set_mesh(many.case.mesh):
        assert_are(chunks, exported, entries)


@pytest.mark.parametrize("entries", [64, 10**4])
def test_chunks_of_tiers_have_each_entry_once(entries):
    cache = made(256)
    tiers = tiered.Tiers(cache, tiered.create_store(cache, 2048))
    for first in (0, 100, 90, 290, 0):  # those that come back are in the store, too
        tiers, _ = tiered.prefetch(tiers, np.arange(first, first + 100, dtype=np.int32))
    assert int(hkv.size(tiers.store)) + int(hkv.size(tiers.cache)) > tiered.size(tiers) == 300
    exported = tiered.export_entries(tiers)
    assert sorted(exported.keys) == [*range(200), *range(290, 390)]
    near, behind = map(read, tiers)
    alone = ~np.isin(behind[0], near[0])
    order = jax.tree.map(lambda a, b: np.concatenate([a[alone], b]), behind, near)
    assert_same_bits(exported[:4], order)
    with jax.log_compiles(), warnings_of("jax") as records:
        chunks = list(tiered.export_chunks(tiers, entries))
    assert sum("Compiling jit(_contains)" in text for text in records) <= 1  # for all chunks
    assert_are(chunks, exported, entries)


def parts_after(target, exports):
    """What imports make of four empty parts, or of tiers that know some of the keys; and counts."""
    total = np.zeros(6, int)
    if target == "tiers":
        cache = made(policy=hkv.Policy.LFU)
        tiers = tiered.Tiers(cache, tiered.create_store(cache, 4096))
        tiers, _ = tiered.prefetch(tiers, np.arange(500, 700, dtype=np.int32))
        for exported in exports:
            tiers, counts = tiered.import_entries(tiers, exported)
            total += [int(count) for count in counts]
        return [entries_of(own) for own in tiers], total
    placement = Case(shape=(4,)).placement
    table = placement.create(lambda: made(policy=hkv.Policy.LFU))
    for exported in exports:
        table, counts = sharding.import_entries(placement, table, exported)
        total += [int(count) for count in counts]
    return [entries_of(own) for own in placement.shards(table)], total


@pytest.mark.parametrize("target", ["four devices", "tiers"])
def test_chunks_imported_one_after_the_other_are_one_import(target, tmp_path):
    """Out of files: rows, scores, step counts and time, and what the counts say."""
    table = trained(range(600), policy=hkv.Policy.LFU)
    table, _ = hkv.find(table, np.arange(100, dtype=np.int32), touch=True)
    for number, chunk in enumerate(sharding.export_chunks(table, 100)):
        sharding.save_entries(tmp_path / f"{number}", chunk)
    files = list(tmp_path.iterdir())
    assert len(files) > 5
    one, counts = parts_after(target, [sharding.export_entries(table)])
    several, total = parts_after(target, map(sharding.load_entries, files))
    assert_same_bits(*(jax.tree.map(np.asarray, parts) for parts in (several, one)))
    assert total.tolist() == counts.tolist() and total[0] == int(hkv.size(table))
    assert any(len(set(own.scores.tolist())) > 1 for own in one)


def test_a_table_without_entries_is_one_chunk_with_its_time():
    table = hkv.clear(trained(range(9)))
    (chunk,) = sharding.export_chunks(table, 5)
    assert chunk.keys.shape == (0,) and chunk.clock == int(table.clock[0]) > 1
    assert chunk.shared["count"].tolist() == [2]


def test_chunks_are_of_the_table_as_it_was_given():
    """What an operation returns is another table; one that uses the table up is named."""
    exported = sharding.export_entries(TABLE)
    table = jax.tree.map(jnp.copy, TABLE)
    chunks = sharding.export_chunks(table, 100)
    taken = [next(chunks)]
    hkv.erase(table, np.arange(5000, dtype=np.int32))
    taken += itertools.islice(chunks, 2)
    assert_same_bits(joined(taken)[:4], jax.tree.map(lambda leaf: leaf[:300], exported[:4]))
    jax.jit(hkv.clear, donate_argnums=0)(table)
    with pytest.raises(RuntimeError, match="export_chunks: table was used up .* take all chunks"):
        list(chunks)
    for call in (sharding.export_chunks, sharding.export_entries):
        for options in ({}, {"changed_since": exported}):
            with pytest.raises(RuntimeError, match=f"{call.__name__}: table was used up"):
                call(table, **options)


def test_what_is_wrong_with_chunks_is_named_before_the_first():
    for entries, kind, message in (
        (0, ValueError, "export_chunks: entries must be from 1 to"),
        (1.5, TypeError, "export_chunks: entries must be an integer, got float"),
    ):
        with pytest.raises(kind, match="sharding." + message):
            sharding.export_chunks(TABLE, entries)
        cache = hkv.create(128, 2)
        with pytest.raises(kind, match="tiered." + message):
            tiered.export_chunks(tiered.Tiers(cache, tiered.create_store(cache, 256)), entries)
    with pytest.raises(TypeError, match="export_chunks: tables must be a jax_hkv Table, got int"):
        sharding.export_chunks(5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="export_chunks: tables must be .* got none"):
        sharding.export_chunks([])
    with pytest.raises(ValueError, match="export_chunks: changed_since must be an export of an e"):
        later = sharding.export_entries(TABLE)._replace(clock=2**40)
        sharding.export_chunks(TABLE, changed_since=later)


def test_the_host_holds_a_few_chunks_and_never_two_exports():
    """Of NumPy's memory; a chunk's share of the device's is smaller still."""
    table = hkv.create(2**14, 64)
    for ids in np.split(np.arange(2**13, dtype=np.int32), 8):
        table, _ = hkv.find_or_insert(table, ids)

    def peak_of(export):
        export()  # compiled, and imported what is
        tracemalloc.start()
        try:
            export()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def in_chunks():
        for chunk in sharding.export_chunks(table, 512):
            assert chunk.values.size

    whole = int(hkv.size(table)) * (64 * 4 + 16)
    assert whole > 2**20
    assert peak_of(lambda: sharding.export_entries(table)) < 1.3 * whole
    assert peak_of(in_chunks) < 3 * 512 * (64 * 4 + 16) < whole / 3


def test_a_saved_table_is_put_on_a_device_once(monkeypatch):
    """Not for each piece that is read: of a large table that was most of the time."""
    table, _ = hkv.find_or_insert(hkv.create(2048, DIM), np.arange(900, dtype=np.int32))
    given, export_batch = [], _entries.export_batch
    monkeypatch.setattr(
        _entries,
        "export_batch",
        lambda own, *args: (given.append(own.values), export_batch(own, *args))[1],
    )
    chunks = list(sharding.export_chunks(jax.device_get(table), 256))
    assert_same_bits(entries_of(table)[:3], sorted_by_key(sharding.join_entries(chunks))[:3])
    assert len(given) > 8 and all(values is given[0] for values in given[:8])


def test_a_native_export_of_more_slots_than_rows_is_refused(platform):
    table = hkv.create(256, DIM, name="ads")
    offset = jnp.int32(0)
    jax.block_until_ready(_index.export(table.index, table.values, offset, 8, None))
    with pytest.raises(jax.errors.JaxRuntimeError, match="values: expected a row for each slot"):
        jax.block_until_ready(_index.export(table.index, table.values[1:], offset, 8, None))
