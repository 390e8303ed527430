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
from jax_hkv._stages import StagedBy
from jax_hkv.features import are_splits, is_jagged, known_splits

Given = ParamSpec("Given")
Output = TypeVar("Output")


def checked(fn: Callable[Given, Output]) -> Callable[Given, Output]:
    """A function, jitted most often, that looks at what it is given before JAX does.

    JAX, with x64 off, silently cuts NumPy's 64-bit ids to 32 bits where a jitted function of your
    own takes them, and a jitted function never sees the values of row splits. ``train_step`` and
    operations outside of ``jit`` look by themselves. What is on a device already is taken as it is;
    to find what is not, all leaves of the arguments are gone through, once more than by JAX.

    Args:
      fn: ``jax.jit(predict)``, or ``jax.device_put`` for batches that go to the device ahead.

    Returns:
      A function of the same arguments. If `fn` is jitted, it has `lower`, `trace` and `eval_shape`,
      which look at them, too, as does what is compiled; made by ``jax.jit``, it can be exported.

    Raises:
      TypeError: when it is called, naming the argument: for arrays of NumPy's integers that do not
        fit in 32 bits while x64 is off, of texts, objects and times, and for columns of data frames
        and arrays of other libraries.
      ValueError: for NumPy's row splits of a :class:`jax_hkv.Jagged` (or of one for several devices
        or micro-batches) that do not fit its ids.
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
    call = getattr(getattr(fn, "func", fn), "__name__", type(fn).__name__)  # of a partial

    def look(args: Any, kwargs: Any) -> None:
        check_host(call, args, None)
        check_host(call, kwargs, None)

    def looking(run: Callable[..., Output], /, *args: Any, **kwargs: Any) -> Output:
        look(args, kwargs)
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if "deleted" in str(error):  # found out here, where it costs no walk of a state
                _check_not_used_up(call, args)
                _check_not_used_up(call, kwargs)
            raise

    if hasattr(fn, "lower"):
        return StagedBy(fn, looking, look)

    @functools.wraps(fn, updated=())
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Output:
        return looking(fn, *args, **kwargs)

    return called


def check_host(call: str, args: Any, parts: int | None) -> None:
    """Raises for ids that JAX would cut, splits that do not fit, and what is no array of its.

    Args:
      call: for errors.
      args: a tuple or a dict.
      parts: micro-batches that a Jagged is one of each; None: it may be one of each of several
        micro-batches or devices, and numbers of Python's may be static.
    """
    nodes = jax.tree.leaves(args, is_leaf=is_jagged)
    leaves = jax.tree.leaves([node for node in nodes if not isinstance(node, jax.Array)])
    if any(_what_is_wrong(leaf, parts is None) for leaf in leaves):
        for path, leaf in jax.tree_util.tree_leaves_with_path(args):
            wrong = _what_is_wrong(leaf, parts is None)
            if wrong:
                raise TypeError(f"{call}: arguments{jax.tree_util.keystr(path)} {wrong}")
    for bags in filter(is_jagged, nodes):
        if isinstance(bags.row_splits, np.ndarray):
            _check_splits(call, bags.row_splits, math.prod(np.shape(bags.ids)), parts)


def _check_splits(call: str, splits: np.ndarray, positions: int, parts: int | None) -> None:
    """Raises unless they are those of a Jagged, or of one of each device and micro-batch."""
    devices = math.prod(splits.shape[:-1])  # under pmap
    each = devices * (parts or 1)
    if splits.size % each:
        return  # it is refused where it is cut
    what = "row_splits of a Jagged"
    what += f" of each of {parts} micro-batches" if parts is not None and parts > 1 else ""
    try:
        for own in splits.reshape(each, -1):
            known_splits(call, what, own, positions // each)
    except ValueError:
        if parts is not None or not _are_of_several(splits.reshape(-1), positions):
            raise


def _are_of_several(splits: np.ndarray, positions: int) -> bool:
    """Whether they are those of several equal Jagged, one after the other."""
    for count in range(2, splits.size + 1):
        if splits.size % count or positions % count:
            continue
        if all(are_splits(own, positions // count) for own in splits.reshape(count, -1)):
            return True
    return False


def _what_is_wrong(leaf: Any, may_be_static: bool) -> str | None:
    """What an argument is that JAX would cut or refuse, and what to give; None: nothing of that."""
    if isinstance(leaf, jax.Array):
        return None
    kind = getattr(leaf, "dtype", None)
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMm":
        return (
            f"holds {leaf.dtype}, for which JAX has no type: hash texts to 64 bits and give "
            "jax_hkv.Keys.from_numpy(hashes), times as numbers, and columns with missing "
            'values filled, with a mask (docs/guide.md, "Keys")'
        )
    if not isinstance(leaf, (np.ndarray, np.generic)):
        own = f"{type(leaf).__module__}.{type(leaf).__name__}"
        if hasattr(leaf, "to_numpy"):
            return (
                f"is a column, {own}, of {kind}: give its numbers, as keys of ids "
                "jax_hkv.Keys.from_numpy(column.to_numpy()), of others column.to_numpy()"
            )
        if hasattr(leaf, "__dlpack__"):
            return (
                f"is an array of another library, {own}: make keys of ids with "
                "jax_hkv.Keys.from_numpy(np.asarray(ids)), and give np.asarray(array) of others"
            )
    if not isinstance(leaf, int) and not would_cut(leaf):
        return None
    ints = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    if isinstance(leaf, int) and (may_be_static or ints.min <= leaf <= ints.max):
        return None  # of Python's numbers JAX itself refuses what it would cut
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
