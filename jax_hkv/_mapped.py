"""Tables after a function of the caller's, which may use up what it is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_hkv._checks import FROM_TABLE_TO_TABLE, check_function
from jax_hkv.table import Table


def mapped(
    call: str, fn: Callable[[Table], Any], tables: Sequence[Table], check: Callable[[int, Any], Any]
) -> list[Table]:
    """What a function makes of each table; raises before it uses one up, where it is jitted.

    Args:
      call: for errors.
      fn: of a table to a table.
      tables: in the order in which it is given them.
      check: raises unless the table of a number has become a table again. Of a jitted function it
        sees shapes of all tables before the first call.
    """
    check_function(call, "fn", fn, *FROM_TABLE_TO_TABLE)
    innermost = fn
    while isinstance(innermost, functools.partial):
        innermost = innermost.func
    if hasattr(innermost, "eval_shape"):  # others need not be traceable
        for number, table in enumerate(tables):
            check(number, jax.eval_shape(fn, table))
    after = []
    for number, table in enumerate(tables):
        after.append(fn(table))
        check(number, after[-1])
    return after
