"""What programs look like when XLA has compiled them for a GPU; none is needed for that."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_programs
import pytest

import jax_hkv as hkv

PROGRAMS = Path(__file__).with_name("gpu_programs.py")
BATCHES = [
    f"{name}_{choices}"
    for choices in (1, 2)
    for name in (
        "find",
        "find_touch",
        "find_initial",
        "find_pooled",
        "contains",
        "initial_rows",
        "find_or_insert",
        "find_or_insert_pooled",
        "insert_or_assign",
        "insert_and_evict",
        "accum_or_assign",
        "assign",
        "erase",
        "scored_insert",
        "admitting_insert",
        "aging_insert",
    )
]
WHOLE = ["advance_epoch", "clear", "size", "load_factor", "export_batch", "export_batch_if"]
WHOLE += ["halve_sightings", "export_keys", "import_batch", "sample"]
WHOLE += ["tiered_admit", "tiered_admit_in_pieces", "tiered_restore", "tiered_prefetch"]
STRAIGHT = [
    "train_step",
    "collection_step",
    "concurrent_step",
    "single_ids_step",
    "jagged_step",
    "evicting_step",
    "shard_map_step",
    "leading_axis_step",
    *WHOLE,
    *BATCHES,
]
EXCHANGES = [
    "exchange_step",
    "ragged_exchange_step",
    "pooled_exchange_step",
    "levels_exchange_step",
    "flat_exchange_step",
    "replicas_exchange_step",
    "node_replicas_exchange_step",
    "two_rounds_exchange_step",
    "writing_exchange_step",
    "tiers_exchange_step",
    "deltas_exchange_step",
]
# Of XLA's own, copies included: the flags that say what was found, or the counts; in steps dense
# layers too.
KERNELS = {"find_1": 1, "contains_1": 1, "insert_or_assign_1": 1, "find_or_insert_1": 3}
KERNELS |= {"insert_and_evict_1": 1, "export_batch": 2}
KERNELS |= {"assign_1": 1, "erase_1": 1, "find_touch_1": 1, "export_keys": 3, "import_batch": 3}
KERNELS |= {"train_step": 11, "shard_map_step": 11, "collection_step": 27, "micro_batches_step": 60}
KERNELS |= {"single_ids_step": 22, "evicting_step": 29, "concurrent_step": 27}
KERNELS |= {"jagged_step": 42}
LOOPS = [
    "scan_of_steps",
    "step_in_parts",
    "micro_batches_step",
    "erase_if",
    "expire",
    "resize",
    "zero_empty_rows",
    "size_if",
    "misplaced",
]


def find_module(name):
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What `gpu_programs.py` found, by program."""
    if not any(find_module(f"jax_plugins.xla_cuda{major}") for major in (12, 13)):
        pytest.skip("no CUDA plugin of jax: pip install jax[cuda13]")
    if find_module("jax_hkv._cuda") is None:
        pytest.skip("jax_hkv was built without its CUDA module")
    environment = {name: os.environ[name] for name in os.environ if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, str(PROGRAMS), str(tmp_path_factory.mktemp("dump"))],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_kernels_are_loaded_before_a_program_begins():
    """Where they are launched they could wait for a collective, and it for them."""
    if find_module("jax_hkv._cuda") is None:
        pytest.skip("jax_hkv was built without its CUDA module")
    from jax_hkv import _cuda

    assert all(set(stages) == {"execute", "initialize"} for stages in _cuda.handlers().values())


def kinds_of(thunks):
    """(depth, kind) of each thunk in a dump."""
    found = [(line, re.search(r"\bk[A-Z]\w+", line)) for line in thunks]
    return [(len(line) - len(line.lstrip()), kind[0]) for line, kind in found if kind]


def command_buffers(thunks):
    """The number of outermost command buffers, and the kinds of thunks beside them."""
    buffers, beside, inside = 0, [], None
    for depth, kind in kinds_of(thunks):
        if inside is not None and depth > inside:
            continue
        inside = depth if kind == "kCommandBuffer" else None
        if inside is None:
            beside.append(kind)
        else:
            buffers += 1
    return buffers, beside


def body_of(thunks):
    """The thunks of the only loop's body."""
    (start,) = [i for i, line in enumerate(thunks) if line.strip() == "body:"]
    depth = len(thunks[start]) - len(thunks[start].lstrip())
    body = []
    for line in thunks[start + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            break
        body.append(line)
    return body


@pytest.mark.parametrize("name", [*STRAIGHT, *LOOPS, *EXCHANGES])
def test_a_compiled_program_copies_no_table_and_never_meets_the_host(compiled, name):
    assert compiled[name]["copies"] == []
    assert compiled[name]["host"] == []


@pytest.mark.parametrize("name", STRAIGHT)
def test_a_step_is_one_command_buffer(compiled, name):
    assert command_buffers(compiled[name]["thunks"]) == (1, []), compiled[name]["thunks"]


@pytest.mark.parametrize("name", LOOPS)
def test_the_body_of_a_loop_is_one_command_buffer(compiled, name):
    assert compiled[name]["uncounted_loops"] == []
    assert command_buffers(body_of(compiled[name]["thunks"])) == (1, []), compiled[name]["thunks"]


def test_rows_are_moved_and_sent_in_memory_of_their_own_size(compiled):
    """An optax update in parts keeps one array for all rows, and pieces of tiers are read apart."""
    rows = 4 * gpu_programs.BATCH * gpu_programs.DIM  # bytes; of Adam's there are three
    whole, parts = (compiled[name]["temporary_bytes"] for name in ("train_step", "step_in_parts"))
    assert parts < whole - 3 * rows
    assert compiled["tiered_admit_in_pieces"]["temporary_bytes"] < 2 * rows


def test_what_runs_side_by_side_has_memory_of_its_own(compiled):
    """So that the concurrent step, of which other tests ask the same, is one."""
    concurrent, one_by_one = (compiled[name] for name in ("concurrent_step", "collection_step"))
    assert concurrent["temporary_bytes"] > one_by_one["temporary_bytes"] > 0


def test_a_step_of_26_features_is_one_lookup_and_one_update(compiled):
    calls = compiled["collection_step"]["calls"]
    for name in ("unique", "upsert", "tally", "pool_rows", "update_adam"):
        assert calls.count(name) == 1, calls
    assert calls.count("divide_weights") == 1 and len(calls) <= 10, calls


def test_features_of_one_id_have_no_bags(compiled):
    calls = compiled["single_ids_step"]["calls"]
    for name in ("gather_or_init_rows", "update_adam"):
        assert calls.count(name) == 1, calls
    assert not {"pool_rows", "divide_weights", "init_rows", "gather_rows"} & {*calls}
    assert len(calls) <= 8, calls


@pytest.mark.parametrize(("name", "most"), KERNELS.items())
def test_xla_adds_few_kernels_to_the_native_calls(compiled, name, most):
    """Each costs a launch, and most of them read or write a word for each position."""
    kinds = [kind for _, kind in kinds_of(compiled[name]["thunks"])]
    kernels = [kind for kind in kinds if kind.endswith("Kernel") or kind == "kCopy"]
    assert 0 < len(kernels) <= most, kinds


def test_only_splits_and_sketches_are_scattered_by_xla(compiled):
    """Its scatters are atomics, and those on one address wait for each other."""
    scattering = {name for name, found in compiled.items() if found.get("scatters")}
    pooled = {f"find_or_insert_pooled_{choices}" for choices in (1, 2)}
    admitting = {
        f"{rule}_insert_{choices}" for rule in ("admitting", "aging") for choices in (1, 2)
    }
    assert scattering == pooled | admitting | {"jagged_step"}


def test_a_step_with_tables_of_half_the_memory_computes_nothing_twice(compiled):
    """XLA's pass against want of memory counts twice what native calls change in place."""
    assert compiled["large_step"]["bytes"] > 70 * 2**30
    assert compiled["large_step"]["twice"] == []


def test_the_copies_of_a_table_that_is_not_donated_are_seen(compiled):
    assert compiled["undonated_step"]["copies"]


def test_every_public_operation_is_compiled(compiled):
    """But `grow`, which looks at the entries on the host and calls `resize`."""
    operations = [
        name
        for name in hkv.__all__
        if name != "grow"
        and inspect.isfunction(function := getattr(hkv, name))
        and "table" in inspect.signature(function).parameters
    ]
    missing = [name for name in operations if not any(known.startswith(name) for known in compiled)]
    assert operations and missing == []
    others = ["undonated_step", "large_step", "split_tower_step"]
    assert sorted(compiled) == sorted([*STRAIGHT, *LOOPS, *EXCHANGES, *others])


def moved(compiled, name, kind="all-to-all"):
    """(axes, bytes on a device) of the collectives of one kind that always run."""
    return sorted(
        (tuple(one["axes"]), one["bytes"])
        for one in compiled[name]["traffic"]
        if one["kind"] == kind and not one["conditional"] and one["times"] is not None
    )


def exchanged(axes, places, peers, words=2):
    """What one hop moves: keys with a header for each peer, rows, gradients, statuses."""
    keys = (places + 1) * peers * 4 * words
    rows = places * peers * 4 * gpu_programs.DIM
    return [(axes, keys), (axes, rows), (axes, rows), (axes, places * peers * 4)]


def room(mean):
    return math.ceil(mean + 6 * math.sqrt(mean))


KEYS = gpu_programs.EXCHANGE_BATCH * gpu_programs.EXCHANGE_DISTINCT


@pytest.mark.parametrize("name", ["exchange_step", "flat_exchange_step"])
def test_an_exchange_over_8_gpus_moves_keys_rows_and_gradients(compiled, name):
    axes = ("node", "device") if name.startswith("flat") else ("device",)
    assert moved(compiled, name) == sorted(exchanged(axes, room(KEYS / 8), 8))


def test_an_exchange_of_two_levels_moves_them_within_a_node_and_then_across(compiled):
    within = exchanged(("device",), room(KEYS / 4), 4)
    across = exchanged(("node",), room(KEYS / 2), 2)
    assert moved(compiled, "levels_exchange_step") == sorted(within + across)


def test_rows_travel_ragged_between_gpus_only_where_that_is_asked_for(compiled):
    """Between hosts XLA's host waits in each such call for the offsets, which it reads."""
    keys, *others = exchanged(("device",), room(KEYS / 8), 8)
    assert moved(compiled, "ragged_exchange_step") == [keys]
    assert moved(compiled, "ragged_exchange_step", "ragged-all-to-all") == sorted(others)
    for name in set(EXCHANGES) - {"ragged_exchange_step"}:
        kinds = {one["kind"] for one in compiled[name]["traffic"]}
        assert kinds and "ragged-all-to-all" not in kinds, name


def test_bags_of_100_ids_come_back_as_one_row_for_each_gpu(compiled):
    bags = gpu_programs.EXCHANGE_BATCH // 100
    rows = bags * 4 * gpu_programs.DIM
    assert moved(compiled, "pooled_exchange_step", "all-gather") == [(("device",), rows)]
    assert (("device",), 8 * rows) in moved(compiled, "pooled_exchange_step")


def test_replicas_on_gpus_exchange_no_rows(compiled):
    assert moved(compiled, "replicas_exchange_step") == []


def test_replicas_on_nodes_send_keys_and_gradients_to_each_other(compiled):
    """And rows within a node alone."""
    name, places = "node_replicas_exchange_step", room(KEYS)
    assert moved(compiled, name) == sorted(exchanged(("device",), room(KEYS / 4), 4))
    gathered = (places + 1) * 8 + places * 4 * gpu_programs.DIM  # at once, as XLA can here
    assert moved(compiled, name, "all-gather") == [(("node",), gathered)]


def test_rows_that_are_written_on_gpus_go_to_their_owners_alone(compiled):
    """And of keys that are removed nothing but the keys; the step uses no statuses."""
    keys, rows, *_ = exchanged(("device",), room(KEYS / 8), 8)
    removed, *_ = exchanged(("device",), room(8 * gpu_programs.EXCHANGE_DISTINCT / 8), 8)
    assert moved(compiled, "writing_exchange_step") == sorted([keys, rows, removed])


def test_deltas_on_gpus_are_sent_for_every_position_and_presence_without_rows(compiled):
    """A question moves statuses, a lookup of the same keys rows, and XLA sends those keys once."""
    keys, rows, _, statuses = exchanged(("device",), room(KEYS / 8), 8)
    every = exchanged(("device",), room(gpu_programs.EXCHANGE_BATCH / 8), 8)
    expected = [keys, statuses, rows, every[0], every[1], every[3]]  # a word for each belief
    assert moved(compiled, "deltas_exchange_step") == sorted(expected)


def test_a_second_round_on_gpus_stands_apart(compiled):
    assert moved(compiled, "two_rounds_exchange_step") == moved(compiled, "exchange_step")
    assert any(one["times"] is None for one in compiled["two_rounds_exchange_step"]["traffic"])


def test_a_layer_that_is_split_along_another_axis_than_tables_stays_split(compiled):
    """XLA gathers neither, and the table is updated in place."""
    found = compiled["split_tower_step"]
    assert found["gathers"] == [] and found["copies"] == []
    assert found["tower"] == f"({gpu_programs.DIM}, 2048)"
    assert found["alias"] >= found["bytes"]
