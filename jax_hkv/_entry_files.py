"""Files of exported entries: NumPy arrays, without pickles."""

from __future__ import annotations

import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_hkv import _entries
from jax_hkv._entries import Exported
from jax_hkv._namespaces import as_array

_OPTIMIZER, _SHARED = "optimizer.", "shared."


def save_entries(path: Any, exported: Exported) -> None:
    """Writes exported entries as one file of NumPy arrays (``.npz``), without pickles.

    Args:
      path: of the file, a path or its name; each process has one of its own. Until everything is
        written it is the path with ".writing" behind it, so that no half of a file is found.
      exported: of :func:`export_entries`. bfloat16, which NumPy does not know, is written as the
        bits of uint16. The texts "types" in the file say of which, and what is "state1" and so on:
        the optimizer's arrays, by their places among those texts.

    Raises:
      TypeError: if it is no export.

    Example:
      >>> import tempfile, jax_hkv as hkv
      >>> path = tempfile.mkdtemp() + "/entries"
      >>> save_entries(path, hkv.sharding.export_entries(hkv.create(128, 2)))
      >>> load_entries(path).values.shape
      (0, 2)
    """
    _entries.check_exported(
        "sharding.save_entries", "exported", exported, "make one by export_entries"
    )
    write_arrays(path, arrays_of(exported))


def arrays_of(exported: Exported) -> dict[str, np.ndarray]:
    """Exported entries as arrays that NumPy can write, by their names in a file."""
    rows: dict[str, Any] = {"values": exported.values}
    rows |= {f"{_OPTIMIZER}{name}": leaf for name, leaf in exported.optimizer.items()}
    rows |= {f"{_SHARED}{name}": leaf for name, leaf in exported.shared.items()}
    if exported.counters is not None:
        rows["counters"] = exported.counters
    # NumPy forgets the name of bfloat16, whose bits are written.
    types = np.array([f"{name}={leaf.dtype.name}" for name, leaf in rows.items()])
    arrays: dict[str, Any] = {
        _file_of(number, name): leaf.view(f"u{leaf.dtype.itemsize}")
        if leaf.dtype.kind == "V"
        else leaf
        for number, (name, leaf) in enumerate(rows.items())
    }
    arrays |= {"keys": exported.keys, "scores": exported.scores, "types": types}
    arrays |= {"clock": np.uint64(exported.clock), "epoch": np.uint64(exported.epoch)}
    arrays |= {"policy": np.uint64(exported.policy)}
    if (namespace := as_array(_entries.namespace_of(exported))) is not None:
        arrays["namespace"] = namespace
    if exported.seed is not None:
        arrays["seed"] = np.uint64(exported.seed)
    return arrays


def write_arrays(path: Any, arrays: dict[str, Any]) -> None:
    """Writes all of a file, or none."""
    unfinished = f"{os.fspath(path)}.writing"
    with open(unfinished, "wb") as file:  # NumPy would put .npz behind a name
        np.savez(file, **arrays)
    os.replace(unfinished, path)


def _file_of(number: int, name: str) -> str:
    """An array's name in a file: not all that an optimizer's state has are names of files."""
    return f"state{number}" if name.startswith((_OPTIMIZER, _SHARED)) else name


def load_entries(path: Any) -> Exported:
    """What :func:`save_entries` wrote, in every bit.

    Raises:
      ValueError: if the file is one of :func:`save_changes`.
    """
    with np.load(path) as saved:
        if "removed" in saved:
            raise ValueError(
                "sharding.load_entries: path must be a file of save_entries, got one of changes, "
                f"{os.fspath(path)!r}: it goes to load_changes"
            )
        return entries_of_arrays(saved)


def entries_of_arrays(saved: Any) -> Exported:
    """The inverse of :func:`arrays_of`, of an open file."""
    types = [entry.rsplit("=", 1) for entry in saved["types"].tolist()]
    rows = {
        name: saved[_file_of(number, name)].view(jnp.dtype(kind))
        for number, (name, kind) in enumerate(types)
    }

    def leaves(kind: str) -> dict[str, np.ndarray]:
        own = [name for name in rows if name.startswith(kind)]
        return {name.removeprefix(kind): rows[name] for name in own}

    return Exported(
        keys=saved["keys"],
        scores=saved["scores"],
        values=rows["values"],
        optimizer=leaves(_OPTIMIZER),
        shared=leaves(_SHARED),
        clock=int(saved["clock"]),
        epoch=int(saved["epoch"]),
        counters=rows.get("counters"),
        policy=int(saved["policy"]),
        namespace=saved.get("namespace"),
        seed=int(saved["seed"]) if "seed" in saved else None,
    )
