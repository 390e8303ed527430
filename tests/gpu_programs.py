"""Compiles programs for a described H200, without a GPU, and prints as JSON what it finds in them.

Run by test_gpu_program.py in a process of its own: what XLA dumps is said before jax is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
from pathlib import Path

# What XLA asks an NVIDIA H200 with driver 580 about itself. Without a driver version it assumes one
# that cannot put custom calls into command buffers.
H200 = """
gpu_device_info {
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""

CAPACITY, DIM, BATCH, STEPS = 40_000, 16, 1024, 4


def configure(dump: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_gpu_graph_min_graph_size=1"


def shapes(tree):
    import jax

    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def programs():
    """Names, functions and the shapes of arguments.

    The first argument is donated where the function returns a table and the name does not deny it.
    Of what a concurrent one calls, XLA runs side by side what does not wait for each other.
    """
    import jax
    import jax.numpy as jnp
    import optax

    import jax_hkv as hkv

    optimizer = hkv.optim.sparse(optax.adam(1e-3))
    dense = optax.adam(1e-3)

    def make(**options):
        return shapes(jax.eval_shape(lambda: hkv.create(CAPACITY, DIM, **options)))

    def with_optimizer():
        table = jax.eval_shape(lambda: optimizer.init(hkv.create(CAPACITY, DIM, choices=2)))
        return shapes(table)

    def train_step(state, keys, labels):
        table, weights, moments = state
        table, result = hkv.find_or_insert(table, keys)

        def loss(rows, weights):
            return jnp.mean(optax.sigmoid_binary_cross_entropy(rows @ weights, labels))

        value, (rows, gradients) = jax.value_and_grad(loss, (0, 1))(result.values, weights)
        updates, moments = dense.update(gradients, moments)
        table = optimizer.update(table, result, rows)
        return (table, optax.apply_updates(weights, updates), moments), value

    def step_in_parts(*arguments):
        """As of a batch that is moved a tenth at a time."""
        at_once, hkv._updates._AT_ONCE = hkv._updates._AT_ONCE, BATCH * DIM // 10
        try:
            return train_step(*arguments)
        finally:
            hkv._updates._AT_ONCE = at_once

    def scan_of_steps(state, keys, labels):
        return jax.lax.scan(lambda state, batch: train_step(state, *batch), state, (keys, labels))

    def batch(*leading):
        return hkv.Keys(jax.ShapeDtypeStruct((*leading, BATCH, 2), jnp.uint32))

    def floats(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = floats(DIM)
    state = (with_optimizer(), weights, shapes(jax.eval_shape(dense.init, weights)))
    mask = jax.ShapeDtypeStruct((BATCH,), jnp.bool_)
    values = floats(BATCH, DIM)
    offset = jax.ShapeDtypeStruct((), jnp.int32)

    def is_old(keys, scores, values):
        return hkv.less(scores, hkv.Keys(jnp.array([10, 0], jnp.uint32)))

    def sample_and_insert(table, key):
        drawn = hkv.sample(table, key, BATCH)
        return hkv.find_or_insert(table, drawn.keys, valid=drawn.valid)

    def find_bags(table, ids, weights):
        return hkv.find_pooled(table, ids, weights=weights, combiner="mean")

    def insert_bags(table, bags):
        def loss(weights):
            given = dataclasses.replace(bags, weights=weights)
            after, result = hkv.find_or_insert_pooled(table, given, combiner="sqrtn")
            return jnp.sum(result.values**2), (after, result)

        gradient, (after, result) = jax.grad(loss, has_aux=True)(bags.weights)
        return after, result, gradient

    bags = BATCH // 4
    dense_bags = (hkv.Keys(jax.ShapeDtypeStruct((bags, 4, 2), jnp.uint32)), floats(bags, 4))
    splits = jax.ShapeDtypeStruct((bags + 1,), jnp.int32)
    jagged_bags = hkv.Jagged(batch(), splits, floats(BATCH))

    yield "train_step", train_step, (state, batch(), floats(BATCH))
    yield "collection_step", *collection_step()
    yield "concurrent_step", *collection_step()
    yield "single_ids_step", *collection_step(most_ids=1)
    yield "jagged_step", *collection_step(jagged=True)
    yield "evicting_step", *collection_step(return_evicted=True)
    yield "micro_batches_step", *collection_step(micro_batches=4)
    yield "scan_of_steps", scan_of_steps, (state, batch(STEPS), floats(STEPS, BATCH))
    yield "step_in_parts", step_in_parts, (state, batch(), floats(BATCH))
    yield "undonated_step", train_step, (state, batch(), floats(BATCH))
    yield "advance_epoch", hkv.advance_epoch, (make(),)
    yield "clear", hkv.clear, (make(),)
    yield "size", hkv.size, (make(),)
    yield "load_factor", hkv.load_factor, (make(),)
    yield "misplaced", hkv.misplaced, (make(),)
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    yield "sample", sample_and_insert, (make(), key)
    yield "size_if", lambda table: hkv.size_if(table, is_old), (make(),)
    yield "erase_if", lambda table: hkv.erase_if(table, is_old), (make(),)
    expiring = make(policy=hkv.Policy.EPOCH_LRU)
    yield "expire", hkv.expire, (expiring, jax.ShapeDtypeStruct((), jnp.uint32))
    yield "resize", lambda table: hkv.resize(table, 2 * table.capacity), (with_optimizer(),)
    yield "zero_empty_rows", hkv.zero_empty_rows, (with_optimizer(),)
    yield "halve_sightings", hkv.halve_sightings, (make(admission=hkv.admission.frequency(3)),)
    yield "export_batch", lambda table, at: hkv.export_batch(table, at, 500), (make(), offset)
    yield (
        "export_batch_if",
        lambda table, at: hkv.export_batch_if(table, is_old, at, 500),
        (make(), offset),
    )
    trained = with_optimizer()
    entries = shapes(jax.eval_shape(lambda table: hkv.export_batch(table, 0, BATCH), trained))
    yield "export_keys", hkv.export_keys, (trained, batch())
    yield (
        "import_batch",
        lambda table, entries: hkv.import_batch(table, entries, return_evicted=True),
        (trained, entries),
    )
    store = jax.eval_shape(lambda table: hkv.resize(table, 4 * CAPACITY)[0], trained)
    tiers = hkv.tiered.Tiers(trained, shapes(store))
    _, admitted = shapes(jax.eval_shape(hkv.tiered.admit, trained, batch()))
    _, fetched = shapes(jax.eval_shape(hkv.tiered.exchange, tiers.store, admitted))
    yield "tiered_admit", hkv.tiered.admit, (trained, batch())
    pieces = {"is_lookup": True, "is_ticked": False, "pieces": 5}  # as outside of jit, from a GPU
    admit = functools.partial(hkv._tiers._admit, mask=None, kept=None, **pieces)
    yield "tiered_admit_in_pieces", lambda table, keys: admit(table, keys), (trained, batch())
    yield "tiered_restore", lambda *args: (hkv.tiered.restore(*args),), (trained, fetched)
    yield "tiered_prefetch", hkv.tiered.prefetch, (tiers, batch())
    for choices in (1, 2):
        table = make(choices=choices)
        for name, function, rest in (
            ("find", hkv.find, ()),
            ("find_touch", lambda *args: hkv.find(*args, touch=True), ()),
            ("find_initial", lambda *args: hkv.find(*args, fill="initial"), ()),
            ("contains", hkv.contains, ()),
            ("initial_rows", hkv.initial_rows, ()),
            ("find_or_insert", hkv.find_or_insert, ()),
            ("insert_or_assign", hkv.insert_or_assign, (values,)),
            ("insert_and_evict", hkv.insert_and_evict, (values,)),
            ("accum_or_assign", hkv.accum_or_assign, (values, mask)),
            ("assign", hkv.assign, (values,)),
            ("erase", hkv.erase, ()),
        ):
            yield f"{name}_{choices}", function, (table, batch(), *rest)
        yield f"find_pooled_{choices}", find_bags, (table, *dense_bags)
        yield f"find_or_insert_pooled_{choices}", insert_bags, (table, jagged_bags)
        scored = make(choices=choices, policy=hkv.Policy.CUSTOM)
        yield (
            f"scored_insert_{choices}",
            lambda table, keys, scores: hkv.find_or_insert(table, keys, scores=scores),
            (scored, batch(), batch()),
        )
        admitting = make(choices=choices, admission=hkv.admission.frequency(3))
        yield f"admitting_insert_{choices}", hkv.find_or_insert, (admitting, batch())
        aging = make(choices=choices, admission=hkv.admission.frequency(3, aging=True))
        yield f"aging_insert_{choices}", hkv.find_or_insert, (aging, batch())


def collection_step(
    capacity=CAPACITY,
    hidden=(),
    *,
    most_ids=4,
    jagged=False,
    donate=False,
    return_evicted=False,
    **options,
):
    """A step of a Flax model of 26 features over 26 tables of one dim, with fused Adam."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    import jax_hkv as hkv

    names = [f"feature_{number}" for number in range(26)]
    combiners = ("sum", "mean", "sqrtn" if jagged else None)
    optimizer = hkv.optim.adam(1e-3)
    collection = hkv.Collection(
        [hkv.TableConfig(name, capacity // 26, DIM, optimizer=optimizer) for name in names],
        [hkv.Feature(name, name, combiners[n % 3]) for n, name in enumerate(names)],
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, inputs, train=False):
            embed = hkv.linen.EmbedCollection(collection, return_evicted=return_evicted)
            rows = embed(inputs, train=train)
            flat = [own.reshape(len(own), -1) for own in rows.values()]
            outputs = jnp.concatenate(flat, axis=-1)
            for width in hidden:
                outputs = nn.relu(nn.Dense(width)(outputs))
            return nn.Dense(1)(outputs)[:, 0]

    def loss_fn(apply, inputs, labels):
        return jnp.mean(optax.sigmoid_binary_cross_entropy(apply(inputs, train=True), labels))

    def input_of(n):
        if not jagged:
            return hkv.Keys(jax.ShapeDtypeStruct((BATCH, 1 + n % most_ids, 2), jnp.uint32))
        ids = hkv.Keys(jax.ShapeDtypeStruct((2 * BATCH + n % 2, 2), jnp.uint32))
        return hkv.Jagged(ids, jax.ShapeDtypeStruct((BATCH + 1,), jnp.int32))

    inputs = {name: input_of(n) for n, name in enumerate(names)}
    create = functools.partial(hkv.linen.TrainState.create, Model(), tx=optax.adam(1e-3))
    state = shapes(jax.eval_shape(create, jax.random.key(0), inputs))
    step = hkv.linen.train_step(loss_fn, donate=donate, **options)  # the report donates by itself
    return step, (state, inputs, jax.ShapeDtypeStruct((BATCH,), jnp.float32))


def sharded_programs(mesh):
    """The train step on two devices: inside shard_map, and with pmap's leading axis of one."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    split, whole = PartitionSpec("device"), PartitionSpec()
    _, step, arguments = next(programs())

    def sharded(leaf, shape, spec):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def on_each(function, specs, out_specs):
        return jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )

    def leading_axis(*stacked):
        results = step(*jax.tree.map(lambda leaf: leaf[0], stacked))
        return jax.tree.map(lambda leaf: leaf[None], results)

    specs = jax.tree.map(lambda leaf: split if leaf.shape else whole, arguments)
    blocks = jax.tree.map(
        lambda leaf, spec: (
            sharded(leaf, (2 * leaf.shape[0], *leaf.shape[1:]), spec)
            if leaf.shape
            else sharded(leaf, (), spec)
        ),
        arguments,
        specs,
    )
    stacked = jax.tree.map(lambda leaf: sharded(leaf, (2, *leaf.shape), split), arguments)
    yield "shard_map_step", on_each(step, specs, (specs[0], whole)), blocks, arguments
    yield "leading_axis_step", on_each(leading_axis, split, split), stacked, arguments


EXCHANGE_BATCH, EXCHANGE_DISTINCT = 4096, 0.5
WRITES = 0  # in place of a hotness: rows are written, and keys removed
TIERS = -1  # likewise: a small table stands before a large one
DELTAS = -2  # likewise: deltas are added, hits are scored, and keys are asked for


def exchange_programs(described):
    """Names, meshes, exchanges and hotness of steps whose table lies on many devices."""
    from jax.experimental import topologies

    from jax_hkv.sharding import Exchange

    flat = topologies.make_mesh(described("1x1x8"), (8,), ("device",))
    nodes = topologies.make_mesh(described("1x2x4"), (2, 4), ("node", "device"))
    options = {"distinct": EXCHANGE_DISTINCT, "strict": True}
    levels = ("node", "device")
    yield "exchange_step", flat, Exchange("device", **options), None
    yield "ragged_exchange_step", flat, Exchange("device", ragged=True, **options), None
    yield "pooled_exchange_step", flat, Exchange("device", **options), 100
    yield "levels_exchange_step", nodes, Exchange(levels, **options), None
    yield "flat_exchange_step", nodes, Exchange(levels, False, levels=False, **options), None
    yield "replicas_exchange_step", flat, Exchange("device", True, **options), None
    yield "node_replicas_exchange_step", nodes, Exchange(levels, 2, **options), None
    yield "two_rounds_exchange_step", flat, Exchange("device", distinct=EXCHANGE_DISTINCT), None
    yield "writing_exchange_step", flat, Exchange("device", **options), WRITES
    yield "tiers_exchange_step", flat, Exchange("device", **options), TIERS
    yield "deltas_exchange_step", flat, Exchange("device", **options), DELTAS


def exchange_report(mesh, exchange, hotness) -> dict:
    """What stands in a step whose table lies on the devices of a mesh."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import jax_hkv as hkv
    from jax_hkv import testing

    placement = hkv.sharding.Placement(mesh)
    optimizer = hkv.optim.adam(1e-3)
    lookup = hkv.sharding.find_or_insert
    if hotness:
        lookup = hkv.sharding.find_or_insert_pooled

    def tiers_step(tables, words, _):
        """What a small table displaces goes to a large one, and what that has comes back."""
        (cache, store), keys = tables, hkv.Keys(words)
        cache, found = hkv.sharding.find_or_insert(
            cache, keys, axis_name=exchange, return_evicted=True
        )
        is_new = hkv.is_new(found.status)
        store, back = hkv.sharding.export_keys(store, keys, valid=is_new, axis_name=exchange)
        store, kept = hkv.import_batch(store, found.evicted)
        cache, _ = hkv.import_batch(cache, back.entries)
        return (cache, store), jax.lax.psum(kept.counts, exchange.axes)

    def writing_step(table, words, rows):
        keys = hkv.Keys(words)
        table, result = hkv.sharding.insert_or_assign(
            table, keys, rows, axis_name=exchange, return_evicted=True
        )
        table, erased = hkv.sharding.erase(table, keys[:8], axis_name=exchange)
        checksum = jax.lax.psum(jnp.sum(result.evicted.values), exchange.axes)
        return table, (checksum, result.counts, erased.counts)

    def deltas_step(table, words, rows):
        keys = hkv.Keys(words)
        table, known = hkv.sharding.contains(table, keys, axis_name=exchange)
        table, read = hkv.sharding.find(table, keys, touch=True, axis_name=exchange)
        table, written = hkv.sharding.accum_or_assign(
            table, keys, rows, known.found, axis_name=exchange
        )
        checksum = jax.lax.psum(jnp.sum(read.values), exchange.axes)
        return hkv.zero_empty_rows(table), (checksum, written.counts)

    def step(table, words, gradients):
        table, result = lookup(table, hkv.Keys(words), axis_name=exchange)
        table = hkv.sharding.update(optimizer, table, result, gradients)
        checksum = jax.lax.psum((jnp.sum(result.values), jnp.sum(result.status)), exchange.axes)
        return table, (checksum, result.counts, result.overflow)

    def on_all(leaf):
        shape = (placement.devices * leaf.shape[0], *leaf.shape[1:])
        sharding = NamedSharding(mesh, PartitionSpec(placement.axes))
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    make = functools.partial(hkv.create, CAPACITY, DIM, replicas=exchange.replicas)
    own = shapes(jax.eval_shape(lambda: optimizer.init(make())))
    function = {WRITES: writing_step, TIERS: tiers_step, DELTAS: deltas_step}.get(hotness, step)
    if hotness == TIERS:
        own = (own, shapes(jax.eval_shape(lambda: optimizer.init(hkv.create(4 * CAPACITY, DIM)))))
    if hotness in (TIERS, DELTAS):
        hotness = None
    positions = (EXCHANGE_BATCH // hotness, hotness) if hotness else (EXCHANGE_BATCH,)
    words = jax.ShapeDtypeStruct((*positions, 2), jnp.uint32)
    rows = jax.ShapeDtypeStruct((positions[0], DIM), jnp.float32)
    arguments = jax.tree.map(on_all, (own, words, rows))
    compiled = placement.step(function)
    compiled = compiled.lower(*arguments).compile()
    hlo = compiled.as_text() or ""
    return {
        "copies": testing.copies_in(hlo, own),
        "host": lines_with(HOST, hlo),
        "calls": re.findall(r'custom_call_target="jax_hkv\.(\w+)"', hlo),
        "traffic": [one._asdict() for one in hkv.sharding.traffic(compiled, mesh).collectives],
    }


def split_tower_report(described) -> dict:
    """What stands in a step whose table is split along one axis, a dense layer along another."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    import jax_hkv as hkv
    from jax_hkv import testing

    mesh = topologies.make_mesh(described("1x1x4"), (2, 2), ("device", "model"))
    placement = hkv.sharding.Placement(mesh, axis_name="device")
    optimizer = hkv.optim.adam(1e-3)

    def step(state, words):
        table, tower = state
        keys = hkv.Keys(words)
        table, found = hkv.sharding.find_or_insert(table, keys, axis_name="device")

        def loss_of(tower, rows):
            return jnp.mean(jnp.tanh(rows @ tower) ** 2)

        gradients = jax.grad(loss_of, (0, 1))(tower, found.values)
        table = hkv.sharding.update(optimizer, table, found, gradients[1])
        return (table, tower - jax.lax.pmean(gradients[0], "device")), found.counts

    def on_mesh(leaf, spec, parts=1):
        shape = (parts * leaf.shape[0], *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    split = PartitionSpec("device")
    own = shapes(jax.eval_shape(lambda: optimizer.init(hkv.create(CAPACITY, DIM))))
    table = jax.tree.map(lambda leaf: on_mesh(leaf, split, placement.devices), own)
    tower = jax.ShapeDtypeStruct((DIM, 4096), jnp.float32)
    words = jax.ShapeDtypeStruct((EXCHANGE_BATCH, 2), jnp.uint32)
    arguments = (table, on_mesh(tower, PartitionSpec(None, "model"))), on_mesh(words, split, 2)
    compiled = placement.step(step).lower(*arguments).compile()
    hlo = compiled.as_text() or ""
    (_, after), _ = compiled.output_shardings
    return {
        "copies": testing.copies_in(hlo, own),
        "gathers": lines_with("all-gather", hlo),
        "tower": str(after.shard_shape(tower.shape)),
        "alias": compiled.memory_analysis().alias_size_in_bytes,
        "bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(own)),
    }


LARGE = 400_000_000  # slots: 78 GiB, more than half of the memory


def large_report(sharding) -> dict:
    """What XLA computes twice in a step whose tables take half of the memory, as steps compile."""
    import jax

    from jax_hkv._compat import without_rematerialization

    step, arguments = collection_step(LARGE, hidden=(512, 512))
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )

    def large_step(*operands):
        return step(*operands)

    lowered = jax.jit(large_step, donate_argnums=0).lower(*placed)
    with without_rematerialization():
        compiled = lowered.compile()
    return {
        "bytes": compiled.memory_analysis().argument_size_in_bytes,
        "twice": lines_with("remat", compiled.as_text() or ""),
    }


def first_table(tree):
    import jax

    import jax_hkv as hkv

    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, hkv.Table))
    return next((leaf for leaf in leaves if isinstance(leaf, hkv.Table)), None)


def report(dump: str, name: str, function, arguments, on_one_device) -> dict:
    """What stands in a compiled program, whose arguments on one device have the last shapes."""
    import jax

    from jax_hkv import testing

    def program(*operands):
        return function(*operands)

    program.__name__ = name
    changes = first_table(jax.eval_shape(program, *arguments)) is not None
    donated = (0,) if changes and not name.startswith("undonated_") else ()
    lowered = jax.jit(program, donate_argnums=donated).lower(*arguments)
    mode = "CONCURRENT" if name.startswith("concurrent_") else "LHS"
    compiled = lowered.compile({"xla_gpu_command_buffer_scheduling_mode": mode})
    hlo = compiled.as_text() or ""
    (thunks,) = Path(dump).glob(f"*.jit_{name}.thunk_sequence_after_thunk_passes.txt")
    return {
        "copies": testing.copies_in(hlo, first_table(on_one_device)),
        "host": lines_with(HOST, hlo),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "calls": re.findall(r'custom_call_target="jax_hkv\.(\w+)"', hlo),
        "scatters": lines_with(r" scatter\(", hlo),
        "uncounted_loops": [
            line for line in lines_with(LOOP, hlo) if "known_trip_count" not in line
        ],
        "thunks": thunks.read_text().splitlines(),
    }


# Calls of Python, transfers to and from the host, and arrays in the host's memory.
HOST = r"callback|is_host_transfer=true| (?:infeed|outfeed|send|recv)\(|S\(5\)"
# A loop of unknown length: the host waits for its condition in every turn.
LOOP = r" while\("


def lines_with(pattern: str, hlo: str) -> list[str]:
    return [line.strip() for line in hlo.splitlines() if re.search(pattern, line)]


def main(dump: str) -> None:
    configure(dump)
    import jax
    from jax.experimental import topologies
    from jax.sharding import NamedSharding, PartitionSpec

    def described(topology):
        return topologies.get_topology_desc(
            platform="cuda", topology_name="any", target_config=H200, topology=topology
        )

    def mesh(devices):
        return topologies.make_mesh(described(f"1x1x{devices}"), (devices,), ("device",))

    sharding = NamedSharding(mesh(1), PartitionSpec())
    found = {}
    for name, function, arguments in programs():
        placed = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
        )
        found[name] = report(dump, name, function, placed, arguments)
    for name, function, arguments, on_one_device in sharded_programs(mesh(2)):
        found[name] = report(dump, name, function, arguments, on_one_device)
    for name, *program in exchange_programs(described):
        found[name] = exchange_report(*program)
    found["split_tower_step"] = split_tower_report(described)
    found["large_step"] = large_report(sharding)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
