"""A whole training state on other devices: its tables through their entries, the rest as it is."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jax_hkv import _tier_entries, _tier_parts, whole_table
from jax_hkv._entries import check_fits, import_entries, without_entries
from jax_hkv._exported import Exported
from jax_hkv._exports import export_entries
from jax_hkv._keys import form_of
from jax_hkv._placed import all_equal, by_part, check_replicas, cut, is_saved
from jax_hkv._placement import Placement
from jax_hkv._tier_types import Tiers
from jax_hkv._tiers import trained
from jax_hkv.table import Counts, Table

_CALL = "sharding.reshard"


def reshard(
    state: Any,
    fresh: Any,
    *,
    source: Placement | None = None,
    target: Placement | None = None,
) -> tuple[Any, dict[str, Counts]]:
    """A training state on other devices, or in tables of other capacity. For use between steps.

    Entries go through the host, table by table: see :func:`import_entries` for what they keep. A
    table that is split by keys becomes one of replicas, or ceases to be, where that of `fresh` is
    such. So it is with a second tier: `jax_hkv.tiered.Tiers` move as one table, into such or into a
    table alone, and the other way round; what they hold comes into the store. All else (parameters,
    the optimizer's state, statistics, random keys) has the bits that it had.

    Args:
      state: any pytree with tables or tiers, as it lies on the devices of `source`, or what it was
        there as NumPy arrays: a checkpoint of it, read by a machine of other devices, or, of
        several processes, whole by each of them. It stays as it is.
      fresh: a state of the same form, newly made on the devices of `target`; it is used up.
      source: of `state`; None: one device. Of NumPy arrays the mesh may be a
        ``jax.sharding.AbstractMesh``.
      target: of `fresh`; None: one device.

    Returns:
      The state, and what became of the entries of each table, by its path in the state, summed
      over this process's devices (of replicas too): `evicted` and `refused` ones found no room.

    Raises:
      TypeError: naming the argument.
      ValueError: if the states have not the same leaves, of the same shapes and types, but for the
        capacity of tables; if tables have another seed or initializer, or another `choices`; if
        the devices of `source` hold different entries of one of replicas, or the same of one that
        is not; or if there are several processes, and the state is no checkpoint.

    Example:
      >>> import jax_hkv as hkv
      >>> table, _ = hkv.find_or_insert(hkv.create(128, 2), np.array([5, 6], np.int32))
      >>> state = {"users": table, "bias": jnp.ones(2)}
      >>> fresh = {"users": hkv.create(1024, 2), "bias": jnp.zeros(2)}
      >>> state, counts = reshard(state, fresh)
      >>> int(hkv.size(state["users"])), state["bias"].tolist(), int(counts["users"].inserted)
      (2, [1.0, 1.0], 2)
    """
    _check_placement("source", source)
    _check_placement("target", target)
    if target is not None and isinstance(target.mesh, AbstractMesh):
        raise TypeError(
            f"{_CALL}: target must have devices, got a placement of an abstract mesh: make fresh "
            "on the devices that the state goes to"
        )
    if jax.process_count() > 1 and (here := _on_devices(state)):
        raise ValueError(
            f"{_CALL}: state must be NumPy arrays, the same in all of the {jax.process_count()} "
            f"processes, got {form_of(here[0])} on devices of this one: read a checkpoint of it in "
            "every process, or save the entries of each by jax_hkv.sharding.save_entries, and "
            "import those of all"
        )
    (old, _), (new, structure) = _nodes(state), _nodes(fresh)
    if old.keys() != new.keys():
        raise ValueError(
            f"{_CALL}: fresh must have the leaves of state; missing: "
            f"{sorted(old.keys() - new.keys())}, unknown: {sorted(new.keys() - old.keys())}: make "
            "it by the function that made state"
        )
    for path in old:
        _check_leaf(path, old[path], source, new[path], target)
    for path, node in old.items():
        if isinstance(node, Table) and source is not None and source.devices > 1:
            _check_replicas(path, node, source)
    counts: dict[str, Counts] = {}
    for path, node in old.items():
        like = new[path]
        if not _has_entries(node):
            new[path] = _placed(_on_host(node, source), like)
            continue
        exported = _exported(node, source)
        if isinstance(like, Tiers):
            moved = _tier_entries.import_entries(like, exported, placement=target)
        else:
            moved = import_entries(target, like, exported)
        new[path], counts[path] = moved
    return jax.tree.unflatten(structure, list(new.values())), counts


def _on_devices(state: Any) -> list[jax.Array]:
    """JAX's arrays in a state, but for typed random keys, which NumPy does not have."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return [leaf for leaf in arrays if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]


def _check_placement(argument: str, placement: Any) -> None:
    if placement is not None and not isinstance(placement, Placement):
        raise TypeError(
            f"{_CALL}: {argument} must be a jax_hkv.sharding.Placement, or None for one device, "
            f"got {type(placement).__name__}: give the one that the state was made with"
        )


def _nodes(tree: Any) -> tuple[dict[str, Any], Any]:
    """Tables, tiers and other leaves by their paths, and the structure that they stand in."""
    named, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_has_entries)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in named]
    if len(set(paths)) < len(paths):  # a name with a slash in it
        paths = [jax.tree_util.keystr(path) for path, _ in named]
    return dict(zip(paths, (node for _, node in named), strict=True)), structure


def _has_entries(node: Any) -> bool:
    return isinstance(node, (Table, Tiers))


def _exported(node: Any, placement: Placement | None) -> Exported:
    if isinstance(node, Tiers):
        return _tier_entries.export_entries(node, placement=placement)
    return export_entries(_parts(node, placement))


def _parts(node: Any, placement: Placement | None) -> list[Any]:
    """The parts of a table, or of tiers, which are one of each."""
    is_here = placement is None or not isinstance(placement.mesh, AbstractMesh)
    if not is_here and not is_saved(trained(node)):
        raise TypeError(
            f"{_CALL}: state must hold NumPy arrays alone where the mesh of source is abstract, "
            f"got {sorted({type(leaf).__name__ for leaf in jax.tree.leaves(node)})} in a table: "
            "jax.device_get(state), or give the placement whose devices it lies on"
        )
    if isinstance(node, Tiers):
        return _tier_parts.to_read(_CALL, node, placement)
    if placement is None:
        return [node]
    return cut(_CALL, node, placement) if is_saved(node) else placement.shards(node)


def _check_leaf(
    path: str, old: Any, source: Placement | None, new: Any, target: Placement | None
) -> None:
    if _has_entries(old) and _has_entries(new):
        _check_one_device("state", path, trained(old), "source", source)
        _check_one_device("fresh", path, trained(new), "target", target)
        one, other = (trained(_parts(*own)[0]) for own in ((new, target), (old, source)))
        try:
            check_fits(one, without_entries(other))
        except ValueError as error:
            error.add_note(
                f"{_CALL}: of the table {path}, which must fit that of fresh; a state without "
                "optimizer rows is made of one with them by dataclasses.replace(table, "
                "optimizer=None) of its tables"
            )
            raise
        for name in ("seed", "initializer", "choices"):
            was, becomes = (str(getattr(own, name)) for own in (other, one))  # as float32
            if was != becomes:
                raise ValueError(
                    f"{_CALL}: fresh must have the {name} of state in the table {path}, {was}, got "
                    f"{becomes}: make it by the function that made state, or import_entries into a "
                    "table that is to be another"
                )
        return
    was, becomes = _form(old, source), _form(new, target)
    if was != becomes:
        raise ValueError(
            f"{_CALL}: fresh must have what state has at {path}, {was}, got {becomes}: make it by "
            "the function that made state"
        )


def _check_one_device(
    argument: str, path: str, table: Table, name: str, placement: Placement | None
) -> None:
    if placement is None and table.clock.shape != (2,):
        raise TypeError(
            f"{_CALL}: {argument} must lie on one device where {name} is None, got a table {path} "
            f"whose clocks are uint32{list(table.clock.shape)}: give {name}=, the placement of "
            f"{argument}"
        )


def _form(node: Any, placement: Placement | None) -> str:
    """The type and shape of a leaf on each device."""
    if _has_entries(node):
        return "a table"
    shape = np.shape(node)[1 if _is_stacked(placement) else 0 :]
    return f"{jnp.result_type(node)}{list(shape)}"


def _is_stacked(placement: Placement | None) -> bool:
    return placement is not None and placement.mode == "pmap"


def _check_replicas(path: str, table: Table, source: Placement) -> None:
    check_replicas(f"{_CALL}: state", table, source)
    if not table.replicas and not int(whole_table.size(table)):
        return  # it may be either
    is_here = not is_saved(table)
    digests = (
        by_part(source, source.digests(table)) if is_here else _digests(cut(_CALL, table, source))
    )
    if table.replicas and not all_equal(digests, table.parts_on(source.devices)):
        raise ValueError(
            f"{_CALL}: state must have the same entries on all devices in the table {path}, which "
            f"has replicas={table.replicas}, got different ones: a table that is split by keys, or "
            f"the target of its checkpoint, is created without replicas={table.replicas}"
        )
    devices = source.devices
    for parts in () if table.replicas else range(1, devices):
        if devices % parts == 0 and all_equal(digests, parts):
            replicas = True if parts == 1 else devices // parts
            raise ValueError(
                f"{_CALL}: state must have other entries on each device in the table {path}, which "
                f"is split by keys, got the same on {devices // parts} of {devices}: a table of "
                f"replicas, or the target of its checkpoint, is created with replicas={replicas}"
            )


def _digests(parts: list[Table]) -> np.ndarray:
    """Of the bits of parts on the host, made there, where there is room: one row for each."""

    def one(part: Table) -> np.ndarray:
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(part):
            digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
        return np.frombuffer(digest.digest(), np.uint8)

    return np.stack([one(part)[None] for part in parts])


def _on_host(leaf: Any, placement: Placement | None) -> Any:
    """What each device has of a leaf that is no part of a table, in memory of its own."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf[0] if _is_stacked(placement) else leaf)


def _placed(value: np.ndarray, like: Any) -> Any:
    """An array of the host, where and as another one lies; a Python number for one."""
    if not isinstance(like, jax.Array):
        return value if isinstance(like, np.ndarray | np.generic) else value.item()
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        data = _placed(value, jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    return jax.device_put(np.broadcast_to(value, like.shape), like.sharding)
