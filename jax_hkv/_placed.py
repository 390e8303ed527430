"""How arrays, meshes and bags lie over devices."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_hkv import index as _index
from jax_hkv._checks import copied_axes
from jax_hkv._compat import is_traced, is_used_up, on_one_device, trace_state_clean
from jax_hkv._digest import names_in
from jax_hkv._keys import Keys
from jax_hkv._programs import named
from jax_hkv._warnings import warn
from jax_hkv.features import is_jagged
from jax_hkv.table import Entries, Table


def is_saved(table: Table) -> bool:
    """Whether a table is on the host as NumPy arrays, as a checkpoint is read."""
    return all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(table))


def is_shape(table: Any) -> bool:
    """Whether it is a table of shapes alone, of one that is not made."""
    return is_table(table) and all(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(table)
    )


def cut(call: str, table: Table, placement: Any) -> list[Table]:
    """The parts of a saved table over devices that need not be there, or those of its shapes."""
    parts, is_stacked = placement.devices, placement.mode == "pmap"
    placement.check_tables(call, table, (parts,) if is_stacked else ())

    def part_of(number: int, leaf: Any) -> Any:
        rows = leaf.shape[0] // parts
        shape = leaf.shape[1:] if is_stacked else (rows, *leaf.shape[1:])
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        return leaf[number * rows : (number + 1) * rows].reshape(shape)

    return [jax.tree.map(functools.partial(part_of, part), table) for part in range(parts)]


def has_twins(leaves: Sequence[Any]) -> bool:
    """Whether an array is among the leaves twice: without a look at its buffers, in every step."""
    arrays = [id(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
    return len(set(arrays)) < len(arrays)


def lies_nowhere(leaf: Any) -> bool:
    """Whether it is a shape that does not say where it lies."""
    return isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None


def is_from_host(leaves: Sequence[Any]) -> bool:
    """Whether a state that is not traced has NumPy arrays."""
    return any(isinstance(leaf, np.ndarray) for leaf in leaves) and not any(map(is_traced, leaves))


def is_of_each(splits: np.ndarray, positions: int, parts: int) -> bool:
    """Whether splits may be those of as many Jagged, one after the other."""
    if len(splits) % parts or positions % parts:
        return False
    each = splits.reshape(parts, -1)
    is_rising = (np.diff(each, axis=1) >= 0).all()
    return bool(is_rising and not each[:, 0].any() and (each[:, -1] <= positions // parts).all())


_BATCH_IS_CHECKED = contextvars.ContextVar("batch_is_checked", default=False)


@contextlib.contextmanager
def of_checked_batch() -> Iterator[None]:
    """Around a call whose batch was looked at, by `check_put` and for parts, which it cuts."""
    token = _BATCH_IS_CHECKED.set(True)
    try:
        yield
    finally:
        _BATCH_IS_CHECKED.reset(token)


def is_batch_checked() -> bool:
    """Whether it is called within :func:`of_checked_batch`."""
    return _BATCH_IS_CHECKED.get()


def check_bags(call: str, batch: Any, parts: int, known: set[Any]) -> set[Any]:
    """Raises for a Jagged that is not one of each device: it would be cut somewhere.

    To look at splits on devices waits for them, so those of shapes that are known are not looked
    at. Those that were are returned, and are known where the call succeeds.
    """
    seen = set()
    for node in jax.tree.leaves(batch, is_leaf=is_jagged) if parts > 1 else ():
        if not is_jagged(node):
            continue
        splits = node.row_splits
        shape, positions = np.shape(splits), getattr(node.ids, "shape", ())[:1]
        if len(shape) != 1 or not positions or 0 in shape or is_traced(splits):
            continue  # the call says so
        if shape[0] % parts or positions[0] % parts:
            continue
        if isinstance(splits, jax.Array):
            if (shape, positions) in known:
                continue
            seen.add((shape, positions))
        most = positions[0] // parts
        # Of a device each; in micro-batches its bags are those of one after the other.
        for own in _pieces(splits, shape[0] // parts):
            if own[0] != 0 or own.max() > most:
                raise ValueError(
                    f"{call}: a Jagged must be one for each of the {parts} devices, one after the "
                    f"other, each with row_splits that begin at 0 and end within its {most} "
                    "positions, got one whose bags would be cut: make it by "
                    f"bags.for_parts({parts}, capacity=), and give placement.put(bags)"
                )
            if (np.diff(own) < 0).any() and not is_batch_checked():
                warn(
                    f"{call}: a Jagged has several parts on each device, as placement.put(batch, "
                    "micro_batches=) puts it for train_step(micro_batches=): a lookup of it takes "
                    "the ids of the first alone. Put it without micro_batches, of bags.for_parts("
                    f"{parts}, capacity=); where the function cuts it itself, silence this with "
                    "warnings.filterwarnings"
                )
                break
    return seen


def check_parts(
    call: str, args: Any, devices: int, micro_batches: int, is_stacked: bool, known: set[Any]
) -> set[Any]:
    """As :func:`check_bags`, of a step's arguments on devices, where the number of parts is known.

    Args:
      call: for errors.
      args: of the step.
      devices: among which bags are split.
      micro_batches: of each of them.
      is_stacked: whether arrays have an axis of the devices, as with pmap.
      known: see :func:`check_bags`.
    """
    seen = set()
    for node in jax.tree.leaves(args, is_leaf=is_jagged):
        if not is_jagged(node) or not isinstance(node.row_splits, jax.Array):
            continue
        splits = node.row_splits
        form = splits.shape, getattr(node.ids, "shape", None)
        if form in known or is_traced(splits):
            continue
        if splits.ndim != 1 + is_stacked or not form[1] or len(form[1]) != splits.ndim:
            continue  # it is told elsewhere, or cut by the loss itself
        sizes = form[0][-1], form[1][-1]
        each, positions = sizes if is_stacked else (size // devices for size in sizes)
        if not each or splits.size % each:
            continue
        if each % micro_batches or positions % micro_batches:
            continue  # it is refused where it is cut
        seen.add(form)
        if not all(_are_of_parts(own, positions, micro_batches) for own in _pieces(splits, each)):
            room = positions // micro_batches
            raise ValueError(f"{call}: {_of_other_parts(devices, micro_batches, room)}")
    return seen


def _are_of_parts(splits: np.ndarray, positions: int, micro_batches: int) -> bool:
    """Whether the splits of one device may be those of a Jagged of each micro-batch."""
    if micro_batches > 1:
        return is_of_each(splits, positions, micro_batches)
    # Positions before the first split are padding, too.
    return bool((np.diff(splits) >= 0).all() and splits[-1] <= positions)


def _of_other_parts(devices: int, micro_batches: int, room: int) -> str:
    kinds = ((micro_batches, "micro-batches"), (devices, "devices"))
    of_each = " of ".join(f"each of {count} {kind}" for count, kind in kinds if count > 1)
    remedy = (
        f"make it of all bags by bags.for_parts({devices * micro_batches}, capacity=), with a "
        "placement put(bags, micro_batches=)"
    )
    return (
        f"a Jagged must be one for {of_each or 'all examples'}, with row_splits that begin at 0, "
        f"do not decrease and end within the {room} positions of each, got one of other parts, "
        "most of whose ids would be lost: "
        f"{remedy if of_each else 'give the Jagged of which for_parts made it'}"
    )


def _pieces(splits: Any, each: int) -> list[np.ndarray]:
    """What this process knows of splits, by device."""
    if isinstance(splits, jax.Array) and not splits.is_fully_addressable:
        pieces = [jax.device_get(shard.data).reshape(-1) for shard in splits.addressable_shards]
        return [piece for piece in pieces if len(piece) == each]
    return list(np.asarray(jax.device_get(splits)).reshape(-1, each))


def is_one_key(node: Any) -> bool:
    """Whether a node of a batch is a single number of 64 bits, whose words are no axis to split."""
    return isinstance(node, Keys) and np.shape(node.words) == (2,)


def is_shared(leaf: Any) -> bool:
    """Whether a leaf of a batch, or one of :func:`is_one_key`, is the same for all devices."""
    if isinstance(leaf, Keys):
        return True
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape"):
        return True
    return leaf.ndim == 0 or jnp.issubdtype(dtype, jax.dtypes.prng_key)


def splits_along(axes: tuple[str, ...], state: Any) -> tuple[P | None, ...]:
    """How the leaves of a state are split along some axes, tables never; None: nobody knows."""
    splits: list[P | None] = []
    for node in jax.tree.leaves(state, is_leaf=is_table):
        if is_table(node):
            splits += [P()] * len(jax.tree.leaves(node))
            continue
        splits.append(None if is_traced(node) else spec_along(axes, _spec_of(node)))
    return tuple(splits)


def spec_along(axes: tuple[str, ...], spec: Any) -> P:
    """What a partition spec says of these axes of a mesh."""
    each = [names if isinstance(names, tuple) else (names,) for names in spec]
    own = [tuple(name for name in names if name in axes) or None for names in each]
    while own and own[-1] is None:  # P() and P(None) are the same, and one program
        own.pop()
    return P(*own)


def _spec_of(leaf: Any) -> P:
    """How a leaf is split by a mesh; one of the host is not."""
    return getattr(getattr(leaf, "sharding", None), "spec", P())


def settled(fn: Callable[..., Any], splits: Sequence[P | None] | None = None) -> Callable[..., Any]:
    """A function on each device whose outputs are whole along axes that are left to XLA.

    With `splits` its first argument's leaves are split so along these, and so are those of its
    first output, which has the same form; what nobody knows of stays as XLA has it.
    """

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, P()), tree)

    @functools.wraps(fn)
    def settling(*args: Any) -> Any:
        outputs = fn(*args)
        if splits is None:
            return whole(outputs)
        state, *others = outputs
        leaves, form = jax.tree.flatten(state)
        own = splits
        if form != jax.tree.structure(args[0]):  # of new leaves nobody knows, but of tables
            own = splits_along((), state)
        leaves = [
            leaf
            if spec is None or leaf.ndim < len(spec)  # a step may sum an axis away
            else jax.lax.with_sharding_constraint(leaf, spec)
            for leaf, spec in zip(leaves, own, strict=True)
        ]
        return (form.unflatten(leaves), *whole(others))

    return settling


def check_whole(call: str, state: Any, placement: Any) -> None:
    """Raises if an array is split along another axis: a device has a part of it alone."""
    axes, sizes = placement.axes, placement.mesh.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        names = [name for name in names_in(_spec_of(leaf)) if name not in axes]
        if any(sizes.get(name, 1) > 1 for name in names):
            raise ValueError(
                f"{call}: state{jax.tree_util.keystr(path)} is split along {names}, which are none "
                f"of the placement's axes {axes}, so that no device has it whole: give the tables "
                "alone"
            )


def warn_of_split(call: str, state: Any, placement: Any) -> None:
    """Warns of arrays beside the tables that are split along the same axes as these."""
    axes = [name for name in placement.axes if placement.mesh.shape[name] > 1]
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_table):
        names = () if is_traced(node) else names_in(_spec_of(node))
        split = [name for name in names if name in axes]
        if split:
            warn(
                f"{call}: state{jax.tree_util.keystr(path)} is split along {split}, as tables and "
                "batches are (it may not be the only one): each device gathers it in every step, "
                "and it comes back whole. Split such parameters along another axis of the mesh, "
                "which is left to XLA (docs/sharding.md), or take a jax.shard_map of your own for "
                "the tables alone"
            )
            return


def _warn_of_torn(call: str, state: Any) -> None:
    """Warns of tables of one device whose arrays lie in pieces on several."""
    for node in jax.tree.leaves(state, is_leaf=is_table):
        values = node.values if is_table(node) else None
        if not isinstance(values, jax.Array) or node.clock.shape != (2,):
            continue
        if not values.sharding.is_fully_replicated:
            warn(
                f"{call}: a table of one device has its rows in pieces on "
                f"{len(values.sharding.device_set)} devices: all of it is gathered in every step, "
                "and comes back whole. Split tables by a jax_hkv.sharding.Placement and the "
                "axis_name= of their layers, or put them whole on every device"
            )
            return


_SOME_BUCKETS = 16


def are_sound(call: str, state: Any) -> bool:
    """Looks for tables that are no whole ones; whether that is known of the next state, too."""
    if not trace_state_clean():  # also of a state that a program has closed over
        return False
    _warn_of_torn(call, state)
    return _check_places(call, state)


def _check_places(call: str, state: Any) -> bool:
    """Raises if entries of a table of one device, some of them, stand where no lookup looks.

    Whether there was any, or there is no such table.
    """
    tables = [node for node in jax.tree.leaves(state, is_leaf=is_table) if is_table(node)]
    own = [node for node in tables if node.clock.shape == (2,) and _is_whole(node.index)]
    seen = 0
    for node in own:
        if is_used_up(node.keys) or is_used_up(node.digests):
            continue  # the step says so
        index = jax.tree.map(_of_one, named(node, "table").index)  # as in `of_any_name`
        with on_one_device():
            lost, all_of_them = map(int, jax.device_get(_misplaced_of_some(index)))
        if lost:
            raise ValueError(
                f"{call}: table {node.name!r} must have its entries where lookups find them, got "
                f"{lost} of {all_of_them} that were looked at elsewhere: its arrays were made for "
                "another capacity (a checkpoint that was restored with strict=False, which cuts "
                "them or fills them up) or for other choices. Restore it into a table of the "
                "capacity that was saved (docs/guide.md, Growth); jax_hkv.resize makes it another"
            )
        seen += all_of_them
    return seen > 0 or not own


def _is_whole(index: _index.Index) -> bool:
    """Whether every device that has any of it has all of it."""
    leaves = jax.tree.leaves(index)
    return all(not isinstance(leaf, jax.Array) or leaf.is_fully_replicated for leaf in leaves)


def _of_one(leaf: Any) -> Any:
    return leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf


@jax.jit
def _misplaced_of_some(index: _index.Index) -> tuple[jax.Array, jax.Array]:
    """How many entries of some buckets no lookup finds, and of how many."""
    # Of those that have any, spread over all of them, so that few entries are found, too.
    before = jnp.cumsum((index.occupancy.reshape(-1) > 0).astype(jnp.int32))
    last = jnp.maximum(before[-1] - 1, 0)
    asked = 1 + last * jnp.arange(_SOME_BUCKETS, dtype=jnp.int32) // (_SOME_BUCKETS - 1)
    some = jnp.minimum(jnp.searchsorted(before, asked), len(before) - 1).astype(jnp.int32)
    is_one = index.digests[some].reshape(-1) != 0
    _, slots = _index.find(index, Keys(index.keys[some].reshape(-1, 2)), is_one)
    return jnp.sum(is_one & (slots < 0)), jnp.sum(is_one)


def is_entries(node: Any) -> bool:
    """Whether it is what tables have lost."""
    return isinstance(node, Entries)


@functools.lru_cache
def devices_of(mesh: Any) -> frozenset[Any]:
    """The devices of a mesh."""
    return frozenset(mesh.devices.flat)


@functools.lru_cache
def explicit_of(mesh: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of some axes whose arrays carry their axes in their types."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return tuple(axis for axis in axes if kinds[axis] is jax.sharding.AxisType.Explicit)


def names_of_first(leaf: Any) -> tuple[str | None, ...]:
    """The axes that an array's type says its first axis is split along."""
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    (names, *_) = (*(leaf if is_shape else jax.typeof(leaf)).sharding.spec, None)
    return names if isinstance(names, tuple) else (names,)


def check_type(
    call: str, path: Any, leaf: Any, axes: tuple[str, ...], cause: Exception | None
) -> None:
    """Raises for a traced array whose type says that it is not split along some Explicit axes."""
    if axes and names_of_first(leaf) != axes:
        raise ValueError(
            f"{call}: arguments{jax.tree_util.keystr(path)} must be split along the axes {axes}, "
            f"got what is traced, {jax.typeof(leaf)}: give the program what placement.put made; "
            "batches of jax.lax.scan over steps are put by jax.device_put(batches, "
            f"jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, {axes})))"
        ) from cause


def spec_of(mesh: Any, leaf: Any, spec: P) -> tuple[P, tuple[str, ...]]:
    """How a leaf lies, and the axes whose parts count as one, which a table has none of."""
    own: Any = getattr(leaf, "sharding", None)
    is_here = isinstance(own, NamedSharding) and own.mesh == mesh
    return (own.spec, names_in(own.spec)) if is_here and spec == P() else (spec, ())


def is_table(node: Any) -> bool:
    return isinstance(node, Table)


def alike(call: str, tree: Any, placement: Any) -> dict[int, list[Any]]:
    """What several devices hold alike of a state, all but tables that are split by keys.

    By the number of parts that it is in: of one each device has the same, of two every second one.
    """
    kinds: dict[int, list[Any]] = {}
    for node in jax.tree.leaves(tree, is_leaf=is_table):
        check_replicas(call, node, placement)
        parts = node.parts_on(placement.devices) if is_table(node) else 1
        if not is_table(node) or node.replicas:
            kinds.setdefault(parts, []).append(node)
    return kinds


def by_part(placement: Any, things: np.ndarray) -> np.ndarray:
    """What there is one of for each device of a mesh: a row for each part of a table."""
    mesh, axes = placement.mesh, placement.axes
    split = [mesh.axis_names.index(axis) for axis in axes]
    others = [axis for axis in range(len(mesh.axis_names)) if axis not in split]
    grid = np.arange(mesh.size).reshape(tuple(mesh.shape.values())).transpose(*split, *others)
    return things[grid.reshape(placement.devices, -1)]


def all_equal(digests: np.ndarray, parts: int = 1) -> bool:
    """Whether the digests of all devices that hold the same part are one; they lie by part."""
    each = digests.reshape(-1, parts, *digests.shape[1:])
    return bool((each == each[:1, :, :1]).all())


def check_replicas(call: str, table: Any, placement: Any) -> None:
    """Raises for a table of several replicas that are not as many as some first axes have."""
    if is_table(table) and not isinstance(table.replicas, bool):
        axes, sizes = placement.axes, [placement.mesh.shape[axis] for axis in placement.axes]
        copied_axes(f"{call}: of the table {table.name!r}", table.replicas, axes, sizes)


def made_on(placement: Any, by: str, state: Any) -> Any:
    """A state made on the devices of a placement; raises unless its tables lie right.

    Those that are split by keys have no entries, and those of which there are several replicas are
    as many as the first axes have devices.
    """
    for node in filter(is_table, jax.tree.leaves(state, is_leaf=is_table)):
        check_replicas(f"Placement.{by}", node, placement)
        is_shape = not isinstance(node.occupancy, jax.Array) or is_traced(node.occupancy)
        if node.parts_on(placement.devices) == 1 or is_shape:
            continue
        if any(np.asarray(part.data).any() for part in node.occupancy.addressable_shards):
            raise ValueError(
                f"Placement.create: make must return tables without entries, got {node.name!r} "
                "with some, which each of the devices would hold, whoever owns their keys: create "
                "it empty, and bring entries in by sharding.import_entries(placement, table, "
                "sharding.export_entries(filled)), or a whole state by sharding.reshard"
            )
    return state
