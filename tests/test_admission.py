"""Which absent keys get a row."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import orbax.checkpoint as ocp
import pytest
from combinations import daily, pairs
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracle_admission import AdmittingOracle
from test_sharding_traffic import mesh_of

import jax_hkv as hkv
from jax_hkv import sharding
from jax_hkv.sharding import Placement

FREQUENCY = {"sightings": 3, "width": 301, "depth": 3}
THRESHOLD = {"threshold": 2**30}
RULES = [
    pytest.param(hkv.admission.frequency(3, width=301, depth=3), FREQUENCY, id="frequency"),
    pytest.param(hkv.admission.probability(0.25), THRESHOLD, id="probability"),
    pytest.param(
        hkv.admission.frequency(2, width=901, depth=3, aging=True),
        {"sightings": 2, "width": 901, "depth": 3, "aging": True},
        id="aging",
    ),
    pytest.param(  # halved by every batch
        hkv.admission.frequency(2, width=61, depth=2, aging=True),
        {"sightings": 2, "width": 61, "depth": 2, "aging": True},
        id="aging in every batch",
    ),
]
POLICIES = ["LRU", "LFU", "EPOCH_LFU", "CUSTOM"]
SGD = hkv.optim.sparse(optax.sgd(0.1, momentum=0.9))


def numbers(*ids):
    return hkv.Keys.from_numpy(np.array(ids, np.int64))


def names(result):
    return [hkv.Status(status).name for status in result.status.reshape(-1).tolist()]


def assert_equal_leaves(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), strict=True)


@pytest.mark.parametrize(
    "choices, policy, rule_number", daily(pairs, [1, 2], POLICIES, range(len(RULES)))
)
def test_random_batches_do_what_the_oracle_does(rng, twin, rule_number, policy, choices):
    """Duplicates, masks, evictions, refusals by the policy, offered rows: equal in every bit."""
    rule, settings = RULES[rule_number].values
    init = hkv.initializers.normal(1.0)
    seed = int(rng.integers(0, 2**64, dtype=np.uint64))
    both = twin(256, 3, policy=policy, choices=choices, init=init, seed=seed, admission=rule)
    both.oracle = AdmittingOracle.of(both.table, **settings)
    universe = rng.integers(0, 2**64, 1500, np.uint64)
    happened = dict.fromkeys(("hits", "inserted", "evicted", "refused", "not_admitted"), 0)
    for number in range(25):
        length = 200
        keys = rng.choice(universe, length)
        frequent = rng.random(length) < rng.choice([0, 0.5])
        keys[frequent] = rng.choice(universe[:20], int(frequent.sum()))
        valid = rng.random(length) < rng.choice([0.0, 0.8, 1.0], p=[0.1, 0.4, 0.5])
        scores = rng.integers(0, 2**40, length).astype(np.uint64) if policy == "CUSTOM" else None
        offered = number % 2 == 1
        rows = rng.standard_normal((length, 3)).astype(np.float32) if offered else None
        outcome = both.find_or_insert(keys, rows, scores, valid, return_evicted=offered)
        for name in happened:
            happened[name] += getattr(outcome.counts, name)
        if number % 5 == 4:
            both.erase(rng.choice(universe, 50))
    if policy != "CUSTOM":
        del happened["refused"]  # few policies turn away whom the rule lets in
    if settings.get("width") == 61:
        happened |= {"evicted": 1, "refused": 1}  # too few get in
    print(happened)
    assert min(happened.values()) > 0


@pytest.mark.parametrize("policy", ["LFU", "CUSTOM"])
@pytest.mark.parametrize(
    ("rule", "settings"), [pytest.param(None, {}, id="no rule"), RULES[0], RULES[2]]
)
def test_a_callers_own_admission_does_what_the_oracle_does(rng, twin, rule, settings, policy):
    """Any valid position lets its key in, if the rule does; who is there is found and scored."""
    both = twin(128, 3, policy=policy, init=hkv.initializers.normal(1.0), admission=rule)
    both.oracle = AdmittingOracle.of(both.table, **settings)
    universe = rng.integers(0, 2**64, 600, np.uint64)
    seen, mixed = np.zeros(6, np.int64), 0
    for number in range(40):
        keys = rng.choice(universe[: 600 if number % 2 else 100], 150)
        valid, admit = rng.random(150) < 0.8, rng.random(150) < 0.4
        scores = rng.integers(0, 2**40, 150).astype(np.uint64) if policy == "CUSTOM" else None
        rows = rng.standard_normal((150, 3)).astype(np.float32)
        outcome = both.find_or_insert(keys, rows, scores, valid, True, admit)
        seen += outcome.counts
        new = np.isin(outcome.status, (oracle.INSERTED, oracle.EVICTED))
        mixed += int((new & ~admit).sum())  # another position of the key has let it in
    counts = oracle.Counts(*seen)
    assert min(counts.hits, counts.inserted, counts.evicted, counts.not_admitted, mixed) > 0


def test_sampled_negatives_are_no_sightings():
    """What they show, nobody has chosen; they are found once they are there."""
    table, ids = hkv.create(1024, 2, admission=hkv.admission.frequency(3)), numbers(5, 6, 6)
    admit = np.array([False, True, False])
    for seen in range(1, 5):
        table, result = hkv.find_or_insert(table, ids, admit=admit)
        assert names(result) == {3: ["NOT_ADMITTED", "INSERTED", "FOUND"]}.get(
            seen, ["NOT_ADMITTED", *(["FOUND"] if seen > 3 else ["NOT_ADMITTED"]) * 2]
        )
    table, result = hkv.find_or_insert(table, numbers(5, 5))
    assert names(result) == ["NOT_ADMITTED"] * 2  # two of three
    table, result = hkv.find_or_insert(table, ids)
    assert names(result) == ["INSERTED", "FOUND", "FOUND"]


def test_who_names_no_admission_of_its_own_has_the_program_of_before():
    table, keys = hkv.create(1024, 2), numbers(*range(20))
    admit = np.arange(20) % 2 == 0

    def calls(**given):
        program = str(jax.make_jaxpr(partial(hkv.find_or_insert, **given))(table, keys))
        return program.count("unique["), program.count("find_slots[")

    assert calls() == calls(admit=None) == (1, 0) and calls(admit=admit) == (2, 1)

    def steps(table, masks):
        return jax.lax.scan(lambda t, mask: hkv.find_or_insert(t, keys, admit=mask), table, masks)

    masks = np.stack([admit, np.zeros(20, bool), ~admit])
    hkv.testing.assert_no_table_copies(steps, table, masks)
    table, results = jax.jit(steps)(table, masks)
    assert results.counts.not_admitted.tolist() == [10, 10, 0]
    assert results.counts.hits.tolist() == [0, 10, 10]
    _, result = hkv.find_or_insert(table, keys.reshape(4, 5), admit=masks[1].reshape(4, 5))
    assert names(result) == ["FOUND"] * 20
    for wrong in (admit[:3], admit.astype(np.int32), "all"):
        with pytest.raises(
            TypeError, match=r"find_or_insert: admit must be bool\[20\] like the keys"
        ):
            hkv.find_or_insert(table, keys, admit=wrong)


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("hotness", [1, 4])
@pytest.mark.parametrize(("rule", "settings"), [pytest.param(None, {}, id="no rule"), RULES[0]])
def test_bags_let_in_whom_their_positions_admit(rng, rule, settings, hotness, combiner):
    """As the same ids one by one; those without a row add their initial ones."""
    bags = one = hkv.create(512, 3, init=hkv.initializers.normal(1.0), admission=rule)
    seen = np.zeros(6, np.int64)
    for _ in range(8):
        keys = hkv.Keys.from_numpy(rng.integers(0, 40, (40, hotness), np.uint64))
        given = {"valid": rng.random(keys.shape) < 0.8, "admit": rng.random(keys.shape) < 0.4}
        bags, result = hkv.find_or_insert_pooled(bags, keys, combiner=combiner, **given)
        one, expected = hkv.find_or_insert(one, keys, **given)
        sums = hkv.pool(expected.values, combiner=combiner, valid=given["valid"])
        np.testing.assert_array_equal(result.values, sums)
        assert_equal_leaves(bags, one)
        np.testing.assert_array_equal(result.status, expected.status)
        np.testing.assert_array_equal(result.slots, expected.slots)
        assert result.counts == expected.counts
        seen += [int(n) for n in result.counts]
    counts = oracle.Counts(*seen)
    assert min(counts.hits, counts.inserted, counts.not_admitted) > 0
    with pytest.raises(TypeError, match=r"find_or_insert_pooled: admit must be bool\[40, "):
        hkv.find_or_insert_pooled(one, keys, admit=given["admit"][:3])


def test_a_jagged_batch_has_a_flag_for_each_of_its_ids():
    bags = hkv.Jagged.from_lists([[5, 6], [], [7, 5, 8]])
    admit = np.array([True, False, False, False, True])
    table, result = hkv.find_or_insert_pooled(hkv.create(128, 2), bags, admit=admit)
    assert names(result) == ["INSERTED", "NOT_ADMITTED", "NOT_ADMITTED", "FOUND", "INSERTED"]
    assert int(hkv.size(table)) == 2


def test_a_key_gets_a_row_in_the_batch_of_its_last_sighting_needed():
    table = hkv.create(128, 2, admission=hkv.admission.frequency(3))
    table, result = hkv.find_or_insert(table, numbers(5, 6, 6, 7, 7, 7))
    assert names(result) == ["NOT_ADMITTED"] * 3 + ["INSERTED", "FOUND", "FOUND"]
    assert result.slots.tolist()[:3] == [-1] * 3 and int(hkv.size(table)) == 1
    assert [int(count) for count in result.counts] == [3, 0, 1, 0, 0, 2]
    np.testing.assert_array_equal(result.values, hkv.initial_rows(table, result.keys))
    table, result = hkv.find_or_insert(table, numbers(5, 6), valid=np.array([False, True]))
    assert names(result) == ["MISSING", "INSERTED"]
    table, result = hkv.find_or_insert(table, numbers(5))
    assert names(result) == ["NOT_ADMITTED"]
    _, result = hkv.find_or_insert(table, numbers(5))
    assert names(result) == ["INSERTED"]


def test_a_full_sketch_never_counts_too_few(rng):
    """However many keys share its cells, a key is in after its sightings."""
    table = hkv.create(1024, 2, admission=hkv.admission.frequency(3, width=7, depth=2))
    keys = hkv.Keys.from_numpy(rng.integers(0, 2**64, 300, np.uint64))
    for _ in range(3):
        table, _ = hkv.find_or_insert(table, keys)
    assert bool(hkv.contains(table, keys)[1].all())


def test_few_rare_keys_slip_into_a_wide_sketch(rng):
    """A key that is seen once gets in only where others share its cells in all rows."""
    table = hkv.create(20_000, 1, admission=hkv.admission.frequency(2, width=2**16, depth=4))
    step = jax.jit(hkv.find_or_insert, donate_argnums=0)
    inserted = 0
    for _ in range(20):
        keys = hkv.Keys.from_numpy(rng.integers(0, 2**64, 1000, np.uint64))
        table, result = step(table, keys)
        inserted += int(result.counts.inserted)
    # A cell is taken with probability 1 - e^(-20000 / 65536) = 0.26 at the end: 0.26^4 = 0.5 %.
    assert inserted < 0.01 * 20_000


@pytest.mark.parametrize(
    ("sightings", "batches", "low", "high"),
    [(2, 8, 0.13, 0.19), (3, 16, 0.002, 0.02), (3, 32, 0.43, 0.55), (5, 32, 0.0, 0.001)],
)
def test_a_summary_says_how_many_unseen_keys_a_full_sketch_lets_in(sightings, batches, low, high):
    """As documented: 8 batches have as many keys, each seen once, as a row has counters."""
    rng = np.random.default_rng(sightings)
    rule = hkv.admission.frequency(sightings, width=8192)
    table = hkv.create(2**16, 2, choices=2, admission=rule)
    assert hkv.metrics.summarize(table).admits_unseen == 0
    step = jax.jit(hkv.find_or_insert, donate_argnums=0)
    for _ in range(batches):
        keys = hkv.Keys.from_numpy(rng.integers(0, 2**64, 1024, np.uint64))
        table, _ = step(table, keys)
    share = hkv.metrics.summarize(table).admits_unseen
    assert share is not None and low <= share <= high
    keys = hkv.Keys.from_numpy(rng.integers(0, 2**64, 20_000, np.uint64))
    _, result = hkv.find_or_insert(table, keys)
    let_in = 1 - int(result.counts.not_admitted) / keys.size
    assert abs(let_in - share) < 5 * np.sqrt(share / keys.size) + 1e-3
    assert f"admits unseen    {share:.4f}" in str(hkv.metrics.summarize(table))
    halved = hkv.metrics.summarize(hkv.halve_sightings(table)).admits_unseen
    assert halved is not None and halved <= share / 4 + 1e-6


def test_tables_without_a_sketch_have_no_share_of_unseen_keys():
    for rule in (None, hkv.admission.probability(0.5)):
        summary = hkv.metrics.summarize(hkv.create(128, 2, admission=rule))
        assert summary.admits_unseen is None and "unseen" not in str(summary)


def test_counters_stop_at_the_sightings_and_do_not_wrap():
    """A cell that others fill for years must not start again from zero."""
    table = hkv.create(128, 2, admission=hkv.admission.frequency(2**31 - 1, width=1, depth=1))
    assert table.admission is not None
    full = dataclasses.replace(table.admission, counters=jnp.full((1, 1), 2**31 - 2, jnp.uint32))
    table, result = hkv.find_or_insert(
        dataclasses.replace(table, admission=full), numbers(*range(64))
    )
    assert names(result) == ["INSERTED"] * 64
    assert table.admission is not None and table.admission.counters is not None
    assert table.admission.counters.tolist() == [[2**31 - 1]]


def test_present_keys_are_not_counted_and_an_evicted_one_counts_from_what_is_held():
    table = hkv.create(128, 2, admission=hkv.admission.frequency(3))
    table, _ = hkv.insert_or_assign(table, numbers(5), jnp.ones((1, 2), jnp.float32))
    for _ in range(5):
        table, result = hkv.find_or_insert(table, numbers(5))
        assert names(result) == ["FOUND"]
    table, _ = hkv.erase(table, numbers(5))
    for expected in ("NOT_ADMITTED", "NOT_ADMITTED", "INSERTED"):
        table, result = hkv.find_or_insert(table, numbers(5))
        assert names(result) == [expected]
    table, _ = hkv.erase(table, numbers(5))
    table, result = hkv.find_or_insert(table, numbers(5))
    assert names(result) == ["INSERTED"]


def test_a_probability_is_that_part_of_the_keys_and_the_draw_changes_with_the_clock(rng):
    table = hkv.create(200_000, 1, admission=hkv.admission.probability(0.1), seed=3)
    keys = hkv.Keys.from_numpy(rng.integers(0, 2**64, 50_000, np.uint64))
    table, first = hkv.find_or_insert(table, keys)
    _, second = hkv.find_or_insert(table, keys)
    deviation = (50_000 * 0.1 * 0.9) ** 0.5
    assert abs(int(first.counts.inserted) - 5000) < 6 * deviation
    assert abs(int(second.counts.inserted) - 0.1 * (50_000 - int(first.counts.inserted))) < (
        6 * deviation
    )
    other = hkv.create(200_000, 1, admission=hkv.admission.probability(0.1), seed=4)
    _, elsewhere = hkv.find_or_insert(other, keys)
    both = (first.slots >= 0) & (elsewhere.slots >= 0)
    assert abs(int(both.sum()) - 500) < 6 * 500**0.5


@pytest.mark.parametrize(
    "rule", [hkv.admission.frequency(1), hkv.admission.probability(1.0)], ids=["1", "1.0"]
)
def test_a_rule_that_admits_everything_is_none(rule):
    """The program is the one without admission, native call by native call."""
    table, plain = hkv.create(128, 2, admission=rule), hkv.create(128, 2)
    programs = [jax.make_jaxpr(hkv.find_or_insert)(t, numbers(1, 2)) for t in (table, plain)]
    assert table.admission is None and str(programs[0]) == str(programs[1])
    assert str(programs[1]).count("unique[") == 1 and "find_slots" not in str(programs[1])


@pytest.mark.parametrize(("rule", "settings"), RULES)
def test_jit_scan_and_eager_calls_give_the_same_bits(rng, rule, settings):
    batches = hkv.Keys.from_numpy(rng.integers(0, 300, (6, 80)))
    eager, jitted, start = (hkv.create(256, 4, admission=rule) for _ in range(3))
    traces = []

    def step(table, keys):
        traces.append(keys)
        return hkv.find_or_insert(table, keys)

    compiled = jax.jit(step, donate_argnums=0)
    for batch in batches:
        eager, expected = hkv.find_or_insert(eager, batch)
        jitted, result = compiled(jitted, batch)
        assert_equal_leaves(result, expected)
    assert len(traces) == 1
    scanned, results = jax.jit(lambda t, b: jax.lax.scan(step, t, b))(start, batches)
    assert_equal_leaves(jax.tree.map(lambda leaf: leaf[-1], results), expected)
    for other in (jitted, scanned):
        assert_equal_leaves(other, eager)


def test_x64_changes_nothing(rng):
    ids = rng.integers(-(2**63), 2**63 - 1, (3, 200))
    tables = []
    for enabled in (False, True):
        with jax.enable_x64(enabled):
            for rule in (hkv.admission.frequency(2, width=100), hkv.admission.probability(0.5)):
                table = hkv.create(256, 2, admission=rule, seed=2**64 - 1)
                for batch in (*ids, ids[0]):
                    table, _ = hkv.find_or_insert(table, hkv.Keys.from_numpy(batch))
                tables.append(table)
    assert_equal_leaves(tables[:2], tables[2:])


def test_shard_map_gives_every_device_its_own_sketch(rng):
    mesh = jax.make_mesh(
        (4,), ("device",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4]
    )
    rule = hkv.admission.frequency(2, width=64)
    tables = [hkv.create(256, 2, admission=rule) for _ in range(4)]
    joined = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *tables)
    keys = hkv.Keys.from_numpy(rng.integers(0, 60, (4 * 50,)))

    def step(table, keys):
        table, result = hkv.find_or_insert(table, keys)
        return table, result.status

    specs = (P("device"), P("device"))
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs))
    joined, status = step(joined, keys)
    for device, table in enumerate(tables):
        part = slice(50 * device, 50 * device + 50)
        table, result = hkv.find_or_insert(table, keys[part])
        assert status[part].tolist() == result.status.tolist()
        assert joined.admission is not None and table.admission is not None
        np.testing.assert_array_equal(
            np.asarray(joined.admission.counters)[4 * device : 4 * device + 4],
            table.admission.counters,
        )


@pytest.mark.parametrize(("rule", "settings"), RULES)
@pytest.mark.parametrize("choices", [1, 2])
def test_a_step_copies_neither_table_nor_sketch(rule, settings, choices):
    table = SGD.init(hkv.create(1024, 8, choices=choices, admission=rule))

    def step(table, keys):
        table, result = hkv.find_or_insert(table, keys)
        table = SGD.update(table, result, result.values)
        return table, result.counts

    def steps(table, batches):
        return jax.lax.scan(step, table, batches)

    batches = hkv.Keys.from_numpy(np.arange(60).reshape(3, 20))
    hkv.testing.assert_no_table_copies(step, table, batches[0])
    hkv.testing.assert_no_table_copies(steps, table, batches)


def test_keys_that_were_turned_away_are_not_trained_nor_counted_as_stale():
    table = SGD.init(hkv.create(128, 2, admission=hkv.admission.frequency(2, width=64)))
    table, result = hkv.find_or_insert(table, numbers(1, 2, 2))
    table = SGD.update(table, result, jnp.ones((3, 2), jnp.float32))
    _, found = hkv.find(table, numbers(1, 2))
    assert found.found.tolist() == [False, True]
    np.testing.assert_allclose(found.values[1], result.values[1] - 0.2, rtol=1e-6)
    assert table.optimizer is not None and table.optimizer.skipped.tolist() == [0]
    # Two lookups of a step: the first turns the key away, the second admits it.
    table, one = hkv.find_or_insert(table, numbers(7))
    table, two = hkv.find_or_insert(table, numbers(7))
    table = SGD.update(
        table, [one, two], [jnp.ones((1, 2), jnp.float32), jnp.ones((1, 2), jnp.float32)]
    )
    np.testing.assert_allclose(hkv.find(table, numbers(7))[1].values, two.values - 0.1, rtol=1e-6)


def test_orbax_keeps_the_sketch(tmp_path):
    table = hkv.create(128, 2, admission=hkv.admission.frequency(2, width=64))
    table, _ = hkv.find_or_insert(table, numbers(1, 2, 3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", table)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, table)
        restored = checkpointer.restore(tmp_path / "step", shapes)
    assert_equal_leaves(restored, table)
    assert names(hkv.find_or_insert(restored, numbers(3, 4))[1]) == ["INSERTED", "NOT_ADMITTED"]


def test_halving_forgets_half_of_the_sightings():
    table = hkv.create(128, 2, admission=hkv.admission.frequency(4, width=64))
    table, _ = hkv.find_or_insert(table, numbers(1, 1, 1))
    table = hkv.halve_sightings(table)
    table, result = hkv.find_or_insert(table, numbers(1, 1))
    assert names(result) == ["NOT_ADMITTED"] * 2  # 3 // 2 + 2
    _, result = hkv.find_or_insert(table, numbers(1))
    assert names(result) == ["INSERTED"]


def test_other_writes_insert_what_they_are_told_to():
    table = hkv.create(128, 2, admission=hkv.admission.frequency(9))
    table, result = hkv.insert_or_assign(table, numbers(1), jnp.ones((1, 2), jnp.float32))
    assert names(result) == ["INSERTED"]
    _, result = hkv.accum_or_assign(
        table, numbers(2), jnp.ones((1, 2), jnp.float32), np.array([False])
    )
    assert names(result) == ["INSERTED"]


ERRORS = {
    "admission.frequency: sightings must be from 1": lambda: hkv.admission.frequency(0),
    "admission.frequency: sightings must be an integer": lambda: hkv.admission.frequency(1.5),  # pyright: ignore
    "admission.frequency: width must be from 1": lambda: hkv.admission.frequency(2, width=2**30),
    "admission.frequency: depth must be from 1 to 16": lambda: hkv.admission.frequency(2, depth=0),
    "admission.probability: p must be a number": lambda: hkv.admission.probability("0.5"),  # pyright: ignore
    "admission.probability: p must be a number, got bool": lambda: hkv.admission.probability(True),
    r"admission.probability: p must be from .* jax_hkv.find": lambda: hkv.admission.probability(0),
    "p must be from .*, got nan": lambda: hkv.admission.probability(float("nan")),
    "create: admission must be None or come from": lambda: hkv.create(1, 1, admission=3),  # pyright: ignore
    "halve_sightings: the table 'table' counts no": lambda: hkv.halve_sightings(hkv.create(1, 1)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_bad_arguments_are_named(message):
    with pytest.raises((TypeError, ValueError), match=message):
        ERRORS[message]()


def test_a_probability_is_rounded_to_the_nearest_part_of_the_draws():
    for p, threshold in ((0.1, 429_496_730), (0.3, 1_288_490_189), (2.0**-32, 1)):
        assert hkv.admission.probability(p).threshold == threshold


def test_a_number_may_be_one_of_numpy_or_jax():
    """An array without axes, as everywhere."""
    for half in (np.float32(0.5), np.array(0.5), jnp.float32(0.5)):
        assert hkv.admission.probability(half) == hkv.admission.probability(0.5)  # pyright: ignore
        assert hkv.optim.adam(half, b1=half) == hkv.optim.adam(0.5, b1=0.5)  # pyright: ignore
    with pytest.raises(TypeError, match="admission.probability: p must be a number, got ndarray"):
        hkv.admission.probability(np.array([0.5]))  # pyright: ignore
    for wrong in (np.array([0.5]), np.array("0.5"), np.array(True)):
        with pytest.raises(TypeError, match="optim.adam: b1 must be a number from 0 on, got ndarr"):
            hkv.optim.adam(0.5, b1=wrong)  # pyright: ignore
    for wrong in (np.str_("0.5"), np.complex64(0.5)):
        with pytest.raises(TypeError, match="probability: p must be a number, got (str_|comp)"):
            hkv.admission.probability(wrong)  # pyright: ignore


def test_the_oracle_needs_no_admission_to_be_the_plain_one(rng):
    """A rule of one sighting, transcribed, is the oracle without admission."""
    table = hkv.create(128, 2)
    admitting = AdmittingOracle.of(table, sightings=1, width=5, depth=2)
    plain = oracle.Oracle.from_table(table)
    for _ in range(3):
        keys = rng.integers(0, 400, 100).astype(np.uint64)
        one, other = admitting.find_or_insert(keys), plain.find_or_insert(keys)
        np.testing.assert_array_equal(one.status, other.status)
        assert one.counts == other.counts


@pytest.mark.filterwarnings("ignore:admission.frequency. a sketch that ages")
def test_a_sketch_that_ages_goes_on_telling_rare_ids_from_frequent_ones():
    """For many times its width, where one that only grows lets everybody in."""
    share, rows = {}, {}
    for aging in (False, True):
        rule = hkv.admission.frequency(2, width=1024, aging=aging)
        table = hkv.create(2**15, 2, admission=rule)
        insert = jax.jit(hkv.find_or_insert, donate_argnums=0)
        for number in range(200):  # 16 of 80 come in every tenth batch, the others never again
            often = 16 * (number % 10) + np.arange(16)
            table, result = insert(table, numbers(*often, *(1_000 + 64 * number + np.arange(64))))
        share[aging] = float((result.status[16:] != hkv.Status.NOT_ADMITTED).mean())
        rows[aging] = int(hkv.contains(table, numbers(*range(160)))[1].sum())
    assert share[False] == 1 and share[True] < 0.2
    assert rows[False] == rows[True] == 160


def test_batches_that_are_large_for_a_sketch_that_ages_are_warned_of():
    """From half of its width on: ids of two batches in a row wait for another, most of them."""
    table = hkv.create(1024, 2, admission=hkv.admission.frequency(2, width=64, aging=True))
    hkv.find_or_insert(table, numbers(*range(32)))
    with pytest.warns(UserWarning, match="halves its counts for every 64 ids .* may have 33 "):
        hkv.find_or_insert(table, numbers(*range(33)))
    for _ in range(4):
        table, result = hkv.find_or_insert(table, numbers(*range(64)))
    assert int(result.counts.not_admitted) == 64  # what it warns of


@pytest.mark.parametrize("aging", [False, True])
def test_sightings_are_halved_by_hand_and_go_along_with_exports(aging):
    """Into a table of another age, or none."""
    rule = hkv.admission.frequency(9, width=512, aging=aging)
    table = hkv.create(1024, 2, admission=rule)
    counted = []
    for ids in (5, 5, 5, 6, 7):
        table, _ = hkv.find_or_insert(table, numbers(ids, ids, *range(100 * ids, 100 * ids + 200)))
        counted.append(int(table.admission.sightings().max()))
    if aging:
        assert table.admission.age.tolist()[0] == 1  # after 404 + 201 keys
    halved = hkv.halve_sightings(table)
    before, after = (np.asarray(own.admission.sightings()) for own in (table, halved))
    np.testing.assert_array_equal(after, before // 2)
    exported = hkv.sharding.export_entries(table)
    np.testing.assert_array_equal(exported.counters, before)
    for other in (rule, dataclasses.replace(rule, aging=not aging)):
        fresh = hkv.create(1024, 2, admission=other)
        for _ in range(3):
            fresh, _ = hkv.find_or_insert(fresh, numbers(*range(200)))
        own = np.asarray(fresh.admission.sightings())
        filled, _ = hkv.sharding.import_entries(None, fresh, exported)
        merged = np.asarray(filled.admission.sightings())
        np.testing.assert_array_equal(merged, np.maximum(own, before))
    with pytest.raises(ValueError, match="frequency: sightings must be from 1 to 255"):
        hkv.admission.frequency(256, aging=True)
    many = dataclasses.replace(hkv.admission.frequency(256), aging=True)
    with pytest.raises(ValueError, match="create: admission must have sightings up to 255 with"):
        hkv.create(1024, 2, admission=many)


def test_behind_the_last_period_nothing_is_halved():
    rule = hkv.admission.frequency(9, width=512, aging=True)
    table = hkv.create(1024, 2, admission=rule)
    last = dataclasses.replace(table.admission, age=np.array([2**24 - 2, 511], np.uint32))
    table = dataclasses.replace(table, admission=last)
    counts = []
    for _ in range(3):
        table, _ = hkv.find_or_insert(table, np.full(4, 5, np.int32))
        counts.append(int(table.admission.sightings().max()))
        last = dataclasses.replace(table.admission, age=table.admission.age.at[1].set(511))
        table = dataclasses.replace(table, admission=last)
    assert counts == [2, 6, 9]  # 4 halved at the end of the last but one
    table = hkv.halve_sightings(table)
    assert table.admission.age.tolist()[0] == 2**24 - 1
    assert int(table.admission.sightings().max()) == 9


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_sightings_of_all_parts_of_a_table_are_halved(mode):
    placement = hkv.sharding.Placement(mesh_of(2), mode=mode)
    rule = hkv.admission.frequency(9, width=1024, aging=True)
    table = placement.create(lambda: hkv.create(1024, 2, admission=rule))
    insert = placement.step(lambda t, k: hkv.sharding.find_or_insert(t, k, axis_name="device"))
    for _ in range(4):
        table, _ = insert(table, placement.put(np.arange(400, dtype=np.int32)))
    with pytest.raises(ValueError, match=r"age must be uint32\[2\], of one device, got uint32"):
        table.admission.sightings()
    before = [np.asarray(own.admission.sightings()) for own in placement.shards(table)]
    halved = hkv.halve_sightings(table)
    for own, was in zip(placement.shards(halved), before, strict=True):
        np.testing.assert_array_equal(own.admission.sightings(), was // 2)
        assert was.max() > 1


def test_sightings_that_are_halved_by_hand_end_no_period():
    rule = hkv.admission.frequency(9, width=64, aging=True)
    table, _ = hkv.find_or_insert(hkv.create(128, 2, admission=rule), np.arange(3, dtype=np.int32))
    assert hkv.halve_sightings(table).admission.age.tolist() == [1, 3]
    mesh = jax.make_mesh((4,), ("device",), devices=jax.devices("cpu")[:4])
    for mode in ("shard_map", "pmap"):
        placement = Placement(mesh, "device", mode)
        many = placement.create(lambda: hkv.create(128, 2, admission=rule))
        ages = np.asarray(hkv.halve_sightings(many).admission.age).reshape(-1, 2)
        assert ages.tolist() == [[1, 0]] * 4


def test_many_sightings_go_into_a_sketch_that_ages_as_many_as_it_needs():
    """Whose counts have 8 bits beside their period."""
    many = hkv.create(128, 2, admission=hkv.admission.frequency(1000, width=64))
    many, _ = hkv.find_or_insert(many, np.full(300, 5, np.int32))
    rule = hkv.admission.frequency(9, width=64, aging=True)
    filled, _ = sharding.import_entries(
        None, hkv.create(128, 2, admission=rule), sharding.export_entries(many)
    )
    assert int(filled.admission.sightings().max()) == 9
    halved = hkv.halve_sightings(filled)
    assert int(halved.admission.sightings().max()) == 4


def test_the_share_of_unseen_ids_is_that_of_the_sightings_that_are_left():
    rule = hkv.admission.frequency(3, width=8, depth=1, aging=True)
    table, _ = hkv.find_or_insert(hkv.create(128, 2, admission=rule), np.full(2, 5, np.int32))
    assert hkv.metrics.summarize(table).admits_unseen == 1 / 8
    assert hkv.metrics.summarize(hkv.halve_sightings(table)).admits_unseen == 0
