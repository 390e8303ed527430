"""Files of exported entries: NumPy arrays, without pickles."""

from __future__ import annotations

import contextlib
import errno
import math
import operator
import os
import shutil
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from jax_hkv import _entries
from jax_hkv._exported import Exported, as_part, namespace_of
from jax_hkv._namespaces import as_array

_OPTIMIZER, _SHARED = "optimizer.", "shared."
# Arrays in a file beside those of types; the last ones are of changes.
_OTHERS = {
    *("types", "keys", "scores", "clock", "epoch", "policy", "namespace", "seed"),
    *("removed", "since", "before", "witnesses", "witnessed"),
}
_Saved = TypeVar("_Saved")


def save_entries(path: Any, exported: Exported) -> None:
    """Writes exported entries as one file of NumPy arrays (``.npz``), without pickles.

    Args:
      path: of the file, a path or its name; each process has one of its own. What is not whole yet
        has a name of its own beside it, so that no half of a file is found, and a file that was
        there stays until then. A process that is killed leaves that one, ``path.*.writing``, which
        nothing reads and nobody removes: remove it when no writer lives.
      exported: of :func:`export_entries`. bfloat16, which NumPy does not know, is written as the
        bits of uint16. The texts "types" in the file say of which, and what is "state1" and so on:
        the optimizer's arrays, by their places among those texts.

    Raises:
      TypeError: if it is no export, or no path.
      OSError: if the path is a directory's, or the file cannot be written; the one that was there
        is as it was.

    Example:
      >>> import tempfile, jax_hkv as hkv
      >>> path = tempfile.mkdtemp() + "/entries"
      >>> save_entries(path, hkv.sharding.export_entries(hkv.create(128, 2)))
      >>> load_entries(path).values.shape
      (0, 2)
    """
    call = "sharding.save_entries"
    _entries.check_exported(call, "exported", exported, "make one by export_entries")
    write_arrays(call, path, arrays_of(exported))


def arrays_of(exported: Exported) -> dict[str, np.ndarray]:
    """Exported entries as arrays that NumPy can write, by their names in a file."""
    rows: dict[str, Any] = {"values": exported.values}
    rows |= {f"{_OPTIMIZER}{name}": leaf for name, leaf in exported.optimizer.items()}
    rows |= {f"{_SHARED}{name}": leaf for name, leaf in exported.shared.items()}
    if exported.counters is not None:
        rows["counters"] = exported.counters
    if (namespace := as_array(namespace_of(exported))) is not None:
        rows["namespace"] = namespace
    if exported.seed is not None:
        rows["seed"] = np.asarray(exported.seed, np.uint64)
    if exported.part is not None:
        rows["part"] = np.asarray(exported.part, np.uint64)
    # Of types that NumPy does not know, such as bfloat16, the bits are written. And whoever reads
    # knows by them what there was.
    types = np.array([f"{name}={leaf.dtype.name}" for name, leaf in rows.items()])
    arrays: dict[str, Any] = {
        _file_of(number, name): leaf.view(f"u{leaf.dtype.itemsize}")
        if leaf.dtype.isbuiltin != 1
        else leaf
        for number, (name, leaf) in enumerate(rows.items())
    }
    arrays |= {"keys": exported.keys, "scores": exported.scores, "types": types}
    arrays |= {"clock": np.uint64(exported.clock), "epoch": np.uint64(exported.epoch)}
    arrays |= {"policy": np.uint64(exported.policy)}
    return arrays


def _name_of(call: str, path: Any) -> str:
    """A path as text, the bytes of one too."""
    try:
        return os.fsdecode(path)
    except TypeError:
        raise TypeError(
            f"{call}: path must be a path or the name of a file, got {type(path).__name__}"
        ) from None


def write_arrays(call: str, path: Any, arrays: dict[str, Any]) -> None:
    """Writes all of a file, or none."""
    path = _name_of(call, path)
    if os.path.isdir(path) or not os.path.basename(path):
        raise IsADirectoryError(
            f"{call}: path must be that of a file, got the directory {path!r}: name a file in it"
        )
    path = os.path.realpath(path)  # a link stays one
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(
            errno.EINVAL, f"{call}: path must be that of a file, which this is not: name one", path
        )
    # Others may write there, too; and names have 255 bytes at most.
    folder, name = os.path.split(path)
    name = os.fsencode(name)[:200].decode(errors="ignore")
    unfinished = os.path.join(folder, f"{name}.{uuid.uuid4().hex[:8]}.writing")
    try:
        with open(unfinished, "xb") as file:  # NumPy would put .npz behind a name
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            shutil.copymode(path, unfinished)
        os.replace(unfinished, path)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the first error tells more
            os.remove(unfinished)
        if isinstance(error, OSError) and error.errno is not None:
            what = f"{call}: {error.strerror}: free or name another place; a file that was there is"
            raise OSError(error.errno, f"{what} as it was", path) from error
        raise


def _file_of(number: int, name: str) -> str:
    """An array's name in a file: not all that an optimizer's state has are names of files."""
    return f"state{number}" if name.startswith((_OPTIMIZER, _SHARED)) else name


def load_entries(path: Any) -> Exported:
    """What :func:`save_entries` wrote, in every bit.

    Args:
      path: of the file, a path or its name; or the file, opened to read bytes.

    Raises:
      TypeError: if it is none of these.
      ValueError: if the file is one of :func:`save_changes`, another one, or not a whole one.
      OSError: if there is none.
    """

    def read(saved: Any) -> Exported:
        exported = entries_of_arrays(saved)
        _entries.check_exported("it", "exported", exported, "")
        return exported

    return load_arrays("entries", path, read)


def load_arrays(kind: str, path: Any, read: Callable[[Any], _Saved]) -> _Saved:
    """What `read` makes of a file's arrays; `kind`, "entries" or "changes", is what was saved."""
    call = f"sharding.load_{kind}"
    path = path if hasattr(path, "read") else _name_of(call, path)  # NumPy reads open files too
    expected = f"{call}: path must be a file of save_{kind}"
    try:
        with np.load(path) as saved:
            _check_whole(saved)
            is_kind = ("removed" in saved) == (kind == "changes")
            if is_kind or "types" not in saved:
                return read(saved)
    # Of files of other formats, with other arrays, and damaged ones nearly everything comes.
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        if isinstance(error, MemoryError):
            raise MemoryError(f"{call}: {path!r} needs more memory than there is") from error
        raise ValueError(
            f"{expected}, got {path!r}, which is another one or not whole "
            f"({type(error).__name__}: {error}): save it again, or copy all of it"
        ) from error
    raise ValueError(
        f"{expected}, got one without removed keys, {path!r}: one of save_entries goes to "
        "load_entries"
        if kind == "changes"
        else f"{expected}, got one of changes, {path!r}: it goes to load_changes"
    )


def _check_whole(saved: Any) -> None:
    """Raises unless all bytes of an open file's arrays are read: zip looks at those alone."""
    for info in saved.zip.infolist():
        with saved.zip.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version != (1, 0):
                raise ValueError(f"its {info.filename} is of version {version}, or damaged")
            shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            size = member.tell() + math.prod(shape) * dtype.itemsize
        if size != info.file_size:
            raise ValueError(
                f"its {info.filename} has {info.file_size} bytes, for {dtype}{list(shape)} it "
                f"would have {size}"
            )


def entries_of_arrays(saved: Any) -> Exported:
    """The inverse of :func:`arrays_of`, of an open file; whoever reads looks at what came."""
    types = [entry.rsplit("=", 1) for entry in saved["types"].tolist()]
    files = {_file_of(number, name): kind for number, (name, kind) in enumerate(types)}
    if unknown := set(saved.files) - files.keys() - _OTHERS:
        raise ValueError(f"it has {sorted(unknown)}, which are of a later version, or damaged")
    typed = [_typed(saved[name], kind) for name, kind in files.items()]
    rows = {name: leaf for (name, _), leaf in zip(types, typed, strict=True)}

    def leaves(kind: str) -> dict[str, np.ndarray]:
        own = [name for name in rows if name.startswith(kind)]
        return {name.removeprefix(kind): rows[name] for name in own}

    return Exported(
        keys=saved["keys"],
        scores=saved["scores"],
        values=rows["values"],
        optimizer=leaves(_OPTIMIZER),
        shared=leaves(_SHARED),
        clock=operator.index(saved["clock"][()]),
        epoch=operator.index(saved["epoch"][()]),
        counters=rows.get("counters"),
        policy=operator.index(saved["policy"][()]),
        namespace=saved.get("namespace"),
        seed=operator.index(saved["seed"][()]) if "seed" in saved else None,
        part=as_part(saved.get("part")),
    )


def _typed(array: np.ndarray, kind: str) -> np.ndarray:
    """An array as what it was: NumPy has written the bits of types that it does not know."""
    dtype = jnp.dtype(kind)
    if array.dtype.name == kind:
        return array
    if dtype.isbuiltin == 1 or array.dtype != np.dtype(f"u{dtype.itemsize}"):
        raise ValueError(f"it has {array.dtype.name} that should be {kind}")
    return array.view(dtype)
