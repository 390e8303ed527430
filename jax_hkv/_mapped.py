"""Tables after a function of the caller's, which may use up what it is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from jax_hkv._checks import FROM_TABLE_TO_TABLE, as_bool, check_function
from jax_hkv.table import Table

Aux = TypeVar("Aux")


def mapped(
    call: str,
    fn: Callable[[Table], Any],
    tables: Sequence[tuple[str, Table]],
    has_aux: bool,
    check: Callable[[str, Table], Any] = lambda name, table: None,
) -> tuple[list[Table], list[Any]]:
    """What a function makes of each table; raises before it uses one up, where it is jitted.

    Args:
      call: for errors.
      fn: of a table to a table, or with `has_aux` to (table, anything).
      tables: in the order in which it is given them, by name, for errors.
      has_aux: whether `fn` returns more than the table.
      check: raises unless what the table of a name has become will do. Of a jitted function it sees
        shapes of all tables before the first call.

    Returns:
      The tables, and what else it returned of each.
    """
    check_function(call, "fn", fn, *FROM_TABLE_TO_TABLE)
    has_aux = as_bool(call, "has_aux", has_aux)
    innermost = fn
    while isinstance(innermost, functools.partial):
        innermost = innermost.func

    remedy = (
        "in the first place of the pair"
        if has_aux
        else "of what returns (table, result) take the table, map_tables(lambda table: "
        "jax_hkv.expire(table, 30)[0]), or give has_aux=True"
    )

    def checked(name: str, made: Any) -> tuple[Table, Any]:
        if not has_aux:
            made = made, None
        elif type(made) is not tuple or len(made) != 2:
            got = f"a tuple of {len(made)}" if type(made) is tuple else type(made).__name__
            raise TypeError(
                f"{call}: fn must return (table, anything) with has_aux=True, got {got}: return a "
                "pair, or leave has_aux out for a function that returns a table alone"
            )
        if not isinstance(made[0], Table):
            raise TypeError(
                f"{call}: fn must return a Table, got {type(made[0]).__name__} of {name}: {remedy}"
            )
        check(name, made[0])
        return made

    if hasattr(innermost, "eval_shape"):  # others need not be traceable
        for name, table in tables:
            checked(name, jax.eval_shape(fn, table))
    after = [checked(name, fn(table)) for name, table in tables]
    return [table for table, _ in after], [aux for _, aux in after]
