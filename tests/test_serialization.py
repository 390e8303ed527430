"""Programs that `jax.export` writes, with tables among what they take and return."""

from __future__ import annotations

import dataclasses
import importlib
import itertools

import jax
import numpy as np
import pytest

import jax_hkv as hkv
from jax_hkv import _serialization

IDS = np.array([5, -1, 5, 9], np.int64)
KEYS = hkv.Keys.from_numpy(IDS)
BAGS = hkv.Jagged.from_lists([[5, 6, 7], [], [5]], capacity=8)
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in hkv.CUSTOM_CALLS]

ADMISSIONS = (None, hkv.admission.frequency(2, width=64), hkv.admission.probability(0.5))
INITIALIZERS = (
    hkv.initializers.constant(-0.0),
    hkv.initializers.constant(np.inf),
    hkv.initializers.uniform(-0.1, 1 / 3),
    hkv.initializers.variance_scaling(0.7, "normal"),
)
SETTINGS = [
    {"policy": policy, "choices": choices, "admission": admission, "init": init}
    for (policy, choices, admission), init in zip(
        itertools.product(hkv.Policy, (1, 2), ADMISSIONS), itertools.cycle(INITIALIZERS)
    )
]


def filled(**settings) -> hkv.Table:
    table = hkv.create(256, 4, seed=7, name="users", **settings)
    scores = {"scores": KEYS} if table.policy is hkv.Policy.CUSTOM else {}
    return hkv.find_or_insert(table, KEYS, **scores)[0]


def nodes(tree, kinds):
    """All nodes of these classes in a pytree."""
    found = []

    def note(node):
        if isinstance(node, kinds):
            found.append(node)
        return False

    jax.tree.flatten(tree, is_leaf=note)
    return found


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_static_of_a_table_is_read_as_it_was_written(settings):
    parts = nodes(filled(**settings), _serialization._NODES)
    assert {"Table", "Index"} <= {type(part).__name__ for part in parts}
    for part in parts:
        static = jax.tree.structure(part).node_data()[1]
        again = _serialization.read(_serialization.written(static))
        assert again == static
        assert [type(setting) for setting in again] == [type(setting) for setting in static]


def exported(function, *args, **options):
    return jax.export.export(jax.jit(function), disabled_checks=CHECKS, **options)(*args)


CALLS = {
    "find": lambda table, keys, bags: hkv.find(table, keys, fill="initial"),
    "find_or_insert": lambda table, keys, bags: hkv.find_or_insert(table, keys),
    "insert_and_evict": lambda table, keys, bags: hkv.insert_and_evict(
        table, keys, jax.numpy.ones((4, 4))
    ),
    "erase": lambda table, keys, bags: hkv.erase(table, keys),
    "find_pooled": lambda table, keys, bags: hkv.find_pooled(table, bags),
    "find_or_insert_pooled": lambda table, keys, bags: hkv.find_or_insert_pooled(table, bags),
    "unique": lambda table, keys, bags: hkv.unique(keys),
    "export_batch": lambda table, keys, bags: hkv.export_batch(table, 0, 128),
    "metrics": lambda table, keys, bags: hkv.metrics.of(*hkv.find_or_insert(table, keys)),
    "padded": lambda table, keys, bags: hkv.Padded(keys, keys.words[:, 0] > 1),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_program_that_was_written_takes_and_returns_what_it_did(call):
    """A table with a sketch, of two candidate buckets, with its clock, keys and bags of ids."""
    pytest.importorskip("flatbuffers", reason="jax.export writes programs with it")
    table = filled(choices=2, admission=ADMISSIONS[1])
    program = exported(CALLS[call], table, KEYS, BAGS)
    again = jax.export.deserialize(program.serialize())
    assert again.in_tree == program.in_tree and again.out_tree == program.out_tree
    expected = jax.jit(CALLS[call])(table, KEYS, BAGS)
    result = again.call(table, KEYS, BAGS)
    jax.tree.map(np.testing.assert_array_equal, result, expected)


def test_the_package_can_be_imported_anew():
    """As IPython's autoreload does: what is registered already is no error."""
    importlib.reload(_serialization)


def test_a_program_for_two_platforms_has_the_bits_of_one():
    table = filled()
    program = exported(CALLS["find_or_insert"], table, KEYS, BAGS, platforms=["cpu", "cuda"])
    assert program.platforms == ("cpu", "cuda")
    result = jax.device_get(program.call(table, KEYS, BAGS))
    jax.tree.map(np.testing.assert_array_equal, result, hkv.find_or_insert(table, KEYS))


def test_a_program_refuses_a_table_of_other_settings():
    table = filled()
    program = exported(CALLS["find"], table, KEYS, BAGS)
    with pytest.raises(ValueError, match="EPOCH_LRU"):
        program.call(filled(policy=hkv.Policy.EPOCH_LRU), KEYS, BAGS)


def test_optimizer_rows_are_not_written_and_the_error_says_what_to_do():
    pytest.importorskip("flatbuffers", reason="jax.export writes programs with it")
    table = hkv.optim.adam(0.1).init(filled())
    with pytest.raises(ValueError, match=r"optimizer rows cannot be written.*replace\(table, opt"):
        exported(CALLS["find"], table, KEYS, BAGS).serialize()
    bare = dataclasses.replace(table, optimizer=None)
    assert exported(lambda t, k, b: hkv.find(t, k)[1], bare, KEYS, BAGS).serialize()
