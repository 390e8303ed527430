"""Programs that tables of any name share, and those of predicates, which go when these do."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax

from jax_hkv._compat import is_traced, trace_state_clean
from jax_hkv.table import Table

# By a predicate, those of calls by their names: they go when it does.
_programs: weakref.WeakKeyDictionary[Any, dict[str, Callable[..., Any]]] = (
    weakref.WeakKeyDictionary()
)


def program_of(call: Any, table: Table, predicate: Any) -> Callable[..., Any]:
    """A jitted function of a table, a predicate and more, or within a trace what it jits.

    It lives as long as the predicate: jit itself would keep those of lambdas that are new in every
    call, and what they close over, with 2 MB of program each.
    """
    if is_traced(table.clock) or not trace_state_clean():  # it may read what is traced elsewhere
        return call.__wrapped__
    try:
        alive = weakref.ref(predicate)
    except TypeError:
        return call
    if type(predicate).__hash__ is not object.__hash__:  # a bound method is a new one each time
        return call
    own = _programs.setdefault(predicate, {})
    if call.__name__ not in own:
        given = call.__wrapped__

        def program(table: Table, *args: Any, **options: Any) -> Any:
            return given(table, alive(), *args, **options)

        program.__name__ = call.__name__
        compiled = jax.jit(program, static_argnames="count")
        own[call.__name__] = lambda table, _, *args, **options: compiled(table, *args, **options)
    return own[call.__name__]


def named(table: Table, name: str) -> Table:
    """The same table by another name."""
    return dataclasses.replace(table, index=dataclasses.replace(table.index, name=name))


def of_any_name(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled function of a table, to it or to it and more, whose program tables share.

    A name is part of a table's type, for which jit makes a program of its own: 26 tables of a kind
    waited for 26. Worth it where a call takes much longer than the microseconds of this.
    """

    @functools.wraps(compiled)
    def call(table: Table, *args: Any) -> Any:
        after = compiled(named(table, "table"), *args)
        if isinstance(after, Table):
            return named(after, table.name)
        return named(after[0], table.name), *after[1:]

    return call
