"""Jitted functions that do more at a call than what is compiled, at each of JAX's stages."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

Output = TypeVar("Output", covariant=True)
Within = Callable[[], contextlib.AbstractContextManager[Any]]


@runtime_checkable
class Step(Protocol[Output]):
    """A compiled function of a state and batches: a training step, or an evaluation."""

    def __call__(self, state: Any, /, *args: Any) -> Output:
        """The step."""
        ...

    def lower(self, state: Any, /, *args: Any) -> Any:
        """As of jitted functions."""
        ...

    def trace(self, state: Any, /, *args: Any) -> Any:
        """As of jitted functions."""
        ...

    def eval_shape(self, state: Any, /, *args: Any) -> Any:
        """As of jitted functions."""
        ...


class Staged:
    """A jitted function that is called by way of `_run`, as is what is compiled of it.

    Args:
      fn: has what jitted functions have.
    """

    # In which it is traced, lowered, compiled and called.
    _within: Within = staticmethod(contextlib.nullcontext)

    def __init__(self, fn: Any):
        self._fn = fn
        functools.update_wrapper(self, fn, updated=())

    def _run(self, run: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls `run`, which is the function or compiled of it."""
        return run(*args, **kwargs)

    def _of(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._within():
            return getattr(self._fn, stage)(*args, **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with self._within():
            return self._run(self._fn, *args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """As of jitted functions."""
        return Stage(self._of("lower", args, kwargs), self._run, self._within)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """As of jitted functions."""
        return Stage(self._of("trace", args, kwargs), self._run, self._within)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """As of jitted functions."""
        return self._of("eval_shape", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for before there is any attribute, by what copies
            raise AttributeError(name)
        return getattr(self._fn, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __copy__(self) -> Staged:
        return self  # as functions

    def __deepcopy__(self, memo: Any) -> Staged:
        return self


class StagedBy(Staged):
    """A jitted function that is called by way of another.

    Args:
      fn: has what jitted functions have.
      run: see :class:`Staged`.
      look: raises for arguments, or shapes of them, that are not to be traced.
      within: see :class:`Staged`.
    """

    def __init__(
        self,
        fn: Any,
        run: Callable[..., Any],
        look: Callable[[Any, Any], None] = lambda args, kwargs: None,
        within: Within = contextlib.nullcontext,
    ):
        super().__init__(fn)
        self._run, self._look, self._within = run, look, within

    def _of(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._look(args, kwargs)
        return super()._of(stage, args, kwargs)


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

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with self._within():
            return self._run(self._stage, *args, **kwargs)
