"""What users can assert of their own programs."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jax_hkv.table import Table

__all__ = ["assert_no_table_copies", "copies_in", "table_copies"]

_HLO_TYPES = {
    "uint8": "u8",
    "uint32": "u32",
    "int32": "s32",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
}


def table_copies(fn: Callable[..., Any], *args: Any) -> list[str]:
    """Copies of table-sized arrays in a compiled function.

    Args:
      fn: traceable; it is compiled with every Table among its arguments donated.
      *args: its arguments: pytrees of arrays or ``jax.ShapeDtypeStruct``, or nnx modules, which
        `fn` may change. Leaves that are none of these (functions, texts) are taken as they are, as
        by ``eqx.filter_jit``.

    Returns:
      The lines of the optimised HLO that copy an array of a table leaf's type and size; of a table
      over devices, of one device's part. See :func:`copies_in`.

    Raises:
      ValueError: if no argument holds a table.
    """

    def is_one(leaf: Any) -> bool:
        return isinstance(leaf, Table)

    leaves, tree = jax.tree.flatten(args, is_leaf=is_one)
    tables = [leaf for leaf in leaves if is_one(leaf)]
    others = [leaf for leaf in leaves if not is_one(leaf) and _is_array(leaf)]
    if not tables:
        raise ValueError("table_copies: no argument holds a jax_hkv Table, so nothing is checked")

    def donating(tables: list[Table], others: list[Any]) -> Any:
        left, right = iter(tables), iter(others)
        joined = [
            next(left) if is_one(leaf) else next(right) if _is_array(leaf) else leaf
            for leaf in leaves
        ]
        given = jax.tree.unflatten(tree, joined)
        returned = fn(*given)
        # An argument that is changed in place (an nnx module) leaves the program too.
        before = {id(leaf) for leaf in joined}
        after = jax.tree.leaves(given, is_leaf=is_one)
        outputs = [*jax.tree.leaves(returned), *(leaf for leaf in after if id(leaf) not in before)]
        return [leaf for leaf in outputs if is_one(leaf) or _is_array(leaf)]

    program = jax.jit(donating, donate_argnums=0, keep_unused=True)
    # JAX donates nothing where it looks for numbers that are none.
    with warnings.catch_warnings(), jax.debug_nans(False), jax.debug_infs(False):
        # A read that returns no table has no use for those that it is given.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        compiled = program.lower(tables, others).compile()
    # What is compiled for several devices has the shapes of one device's part.
    own = jax.tree.map(_part_of, tables, compiled.input_shardings[0][0])
    return copies_in(compiled.as_text() or "", own)


def _is_array(leaf: Any) -> bool:
    """Whether JAX takes it for one."""
    is_one = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return is_one or isinstance(leaf, (bool, int, float, complex))


def _part_of(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)


def _is_of_slots(leaf: Any, table: Any) -> bool:
    if isinstance(table, Table) and leaf is table.index.oldest:
        return False
    if leaf.ndim > 1 and leaf.shape[0] > 1:
        return True
    return isinstance(table, Table) and math.prod(leaf.shape) >= math.prod(table.values.shape[:-1])


def copies_in(hlo: str, tables: Any) -> list[str]:
    """The lines of an optimised HLO text that copy an array of a table leaf's type and size.

    Args:
      hlo: of a compiled program, ``compiled.as_text()``.
      tables: a pytree of tables, or of their shapes, as one device has them.

    Returns:
      The lines. Not looked for are the entries of each bucket (`occupancy`) and its oldest ones, as
      many as there may well be keys in a batch, and what a table has once.
    """
    sizes = {
        (_HLO_TYPES[np.dtype(leaf.dtype).name], math.prod(leaf.shape))
        for table in jax.tree.leaves(tables, is_leaf=lambda one: isinstance(one, Table))
        for leaf in jax.tree.leaves(table)
        if np.dtype(leaf.dtype).name in _HLO_TYPES and _is_of_slots(leaf, table)
    }
    copy = re.compile(r"= \(?(\w+)\[([\d,]*)\][^=]*? (?:copy|copy-start)\(")
    found = []
    for line in hlo.splitlines():
        match = copy.search(line)
        if match is None:
            continue
        size = int(np.prod([int(n) for n in match[2].split(",") if n], dtype=np.int64))
        if (match[1], size) in sizes:
            found.append(line.strip())
    return found


def assert_no_table_copies(fn: Callable[..., Any], *args: Any) -> None:
    """Asserts that a function, compiled with its tables donated, copies no table-sized array.

    Args:
      fn: traceable.
      *args: its arguments; every Table among them, or in an nnx module among them, is donated.

    Raises:
      AssertionError: naming the copies.
      ValueError: if no argument holds a table.

    Example:
      >>> import numpy as np
      >>> import jax_hkv as hkv
      >>> table = hkv.create(1024, dim=8)
      >>> assert_no_table_copies(hkv.find_or_insert, table, np.arange(10, dtype=np.int32))
    """
    copies = table_copies(fn, *args)
    if copies:
        raise AssertionError(
            f"{len(copies)} copies of table-sized arrays in the compiled program; a table is "
            "copied where a value of it is used after a later operation has changed it. Thread one "
            "table through all operations, reads included:\n" + "\n".join(copies)
        )
