"""What only the host sees of the arguments of a jitted function, before JAX takes them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from jax_hkv._checks import check_function, is_used_up
from jax_hkv._keys import would_cut
from jax_hkv.features import as_splits, is_jagged

Given = ParamSpec("Given")
Output = TypeVar("Output")


def checked(fn: Callable[Given, Output]) -> Callable[Given, Output]:
    """A function, jitted most often, that looks at what it is given before JAX does.

    JAX, with x64 off, silently cuts NumPy's 64-bit ids to 32 bits where a jitted function of your
    own takes them, and none of it sees the values of row splits. ``train_step`` and operations
    outside of ``jit`` look by themselves. A look costs some microseconds for each argument on the
    host; what is on a device already is taken as it is.

    Args:
      fn: ``jax.jit(predict)``, or ``jax.device_put`` for batches that go to the device ahead.

    Returns:
      A function of the same arguments (with the `lower` of `fn`, if it has one).

    Raises:
      TypeError: when it is called, naming the argument: for NumPy integers that do not fit in 32
        bits while x64 is off, and for texts, columns of data frames and arrays of other libraries.
      ValueError: for NumPy's row splits of a :class:`jax_hkv.Jagged` that do not fit its ids.
      RuntimeError: for arrays that an earlier step has used up, once JAX has met them.

    Example:
      >>> import jax, numpy as np, jax_hkv as hkv
      >>> table, ids = hkv.create(128, 2), np.array([2**40 + 5])
      >>> predict = checked(jax.jit(lambda table, ids: hkv.find(table, ids)[1].values))
      >>> try:
      ...     predict(table, ids)
      ... except TypeError as error:
      ...     print(str(error).partition(":")[2].partition(":")[0])
       arguments[1] holds int64 numbers, which JAX would cut to 32 bits
    """
    remedy = "give jax.jit(fn), or jax.device_put"
    check_function("checked", "fn", fn, "from arrays to anything", remedy)
    call = getattr(fn, "__name__", None) or type(fn).__name__

    @functools.wraps(fn, updated=())
    def looking(*args: Given.args, **kwargs: Given.kwargs) -> Output:
        check_host(call, args)
        check_host(call, kwargs)
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            if "deleted" in str(error):  # found out here, where it costs no walk of a state
                _check_not_used_up(call, args)
                _check_not_used_up(call, kwargs)
            raise

    if hasattr(fn, "lower"):
        looking.lower = fn.lower  # pyright: ignore[reportAttributeAccessIssue,reportFunctionMemberAccess]
    return looking


def check_host(call: str, args: Any, parts: int = 1) -> None:
    """Raises for ids that JAX would cut, splits that do not fit, and what is no array of its.

    Args:
      call: for errors.
      args: a tuple or a dict.
      parts: micro-batches that a Jagged is one of each.
    """
    ints = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        wrong = _what_is_wrong(leaf, ints)
        if wrong:
            raise TypeError(f"{call}: arguments{jax.tree_util.keystr(path)} {wrong}")
    for bags in jax.tree.leaves(args, is_leaf=is_jagged):
        if is_jagged(bags) and isinstance(bags.row_splits, np.ndarray):
            devices = np.shape(bags.row_splits)[:-1]  # under pmap
            each = math.prod(devices) * parts
            count = math.prod(np.shape(bags.ids)) // each
            if bags.row_splits.size % each == 0:  # else it is refused where it is cut
                what = "row_splits of a Jagged"
                what += f" of each of {parts} micro-batches" if parts > 1 else ""
                for splits in bags.row_splits.reshape(each, -1):
                    as_splits(call, what, splits, count)


def _what_is_wrong(leaf: Any, ints: np.iinfo[Any]) -> str | None:
    """What an argument is that JAX would cut or refuse, and what to give; `ints`: what it takes."""
    if isinstance(leaf, jax.Array):
        return None
    kind = getattr(leaf, "dtype", None)
    own = f"{type(leaf).__module__}.{type(leaf).__name__}"
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.kind in "OSUMm":
            return (
                f"holds {leaf.dtype}, for which JAX has no type: hash texts to 64 bits and give "
                "jax_hkv.Keys.from_numpy(hashes), times as numbers, and columns with missing "
                'values filled, with a mask (docs/guide.md, "Keys")'
            )
    elif hasattr(leaf, "to_numpy"):
        return (
            f"is a column, {own}, of {kind}: give its numbers, as keys of ids "
            "jax_hkv.Keys.from_numpy(column.to_numpy()), of others column.to_numpy()"
        )
    elif hasattr(leaf, "__dlpack__"):
        return (
            f"is an array of another library, {own}: make keys of ids with "
            "jax_hkv.Keys.from_numpy(np.asarray(ids)), and give np.asarray(array) of others"
        )
    is_wide = isinstance(leaf, int) and not ints.min <= leaf <= ints.max
    if not is_wide and not would_cut(leaf):
        return None
    what = f"is the number {leaf}" if kind is None else f"holds {kind} numbers"
    return (
        f"{what}, which JAX would cut to {ints.bits} bits: make keys of ids and scores with "
        "jax_hkv.Keys.from_numpy(ids); scale others, or cast them to int32 or float32"
    )


def _check_not_used_up(call: str, args: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if is_used_up(leaf):
            raise RuntimeError(
                f"{call}: arguments{jax.tree_util.keystr(path)} was used up by an earlier step, "
                "got an array that was donated: give what came out of the step, a copy that was "
                "made before it (copy.deepcopy; nnx.clone makes none), or make the step with "
                "donate=False"
            )
