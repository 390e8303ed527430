"""Jitted functions that do more at a call than what is compiled, at each of JAX's stages."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

Within = Callable[[], contextlib.AbstractContextManager[Any]]


class Staged:
    """A jitted function that is called by way of another, as is what is compiled of it.

    Args:
      fn: has what jitted functions have.
      run: of (fn, *args), calls `fn` or what is compiled of it.
      look: of a tuple and a dict of arguments, which may be shapes; raises for what is not to be
        traced.
      within: makes a context in which it is traced, lowered, compiled and called.
    """

    def __init__(
        self,
        fn: Any,
        run: Callable[..., Any],
        look: Callable[[Any, Any], None] = lambda args, kwargs: None,
        within: Within = contextlib.nullcontext,
    ):
        self._fn = fn
        self._run = run
        self._look = look
        self._within = within
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._within():
            return self._run(self._fn, *args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of jitted functions."""
        return self._staged(self._of("lower", args, kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As of jitted functions."""
        return self._staged(self._of("trace", args, kwargs))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As of jitted functions."""
        return self._of("eval_shape", args, kwargs)

    def _of(self, stage: str, args: Any, kwargs: Any) -> Any:
        self._look(args, kwargs)
        with self._within():
            return getattr(self._fn, stage)(*args, **kwargs)

    def _staged(self, stage: Any) -> Stage:
        return Stage(stage, self._run, self._within)


class Stage:
    """What is traced or lowered of a jitted function."""

    def __init__(
        self, stage: Any, run: Callable[..., Any], within: Within = contextlib.nullcontext
    ):
        self._stage = stage
        self._run = run
        self._within = within

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stage":  # copies ask before they have any attribute
            raise AttributeError(name)
        found = getattr(self._stage, name)
        if name not in ("lower", "compile"):
            return found

        @functools.wraps(found)
        def next_stage(*args: Any, **kwargs: Any) -> Stage:
            kind = Compiled if name == "compile" else Stage
            with self._within():
                return kind(found(*args, **kwargs), self._run, self._within)

        return next_stage


class Compiled(Stage):
    """What is compiled of a jitted function, and called by way of the same other."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._within():
            return self._run(self._stage, *args, **kwargs)
