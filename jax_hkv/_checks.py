"""Checks of arguments: each error names the call, the argument, what was expected and what came."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jax_hkv._compat import is_traced, is_used_up, replicated, trace_state_clean
from jax_hkv._ffi import FLOATS
from jax_hkv._keys import Keys, as_keys, check_not_donated, check_unmasked, keys_of, would_cut
from jax_hkv._keys import as_bool as as_bool
from jax_hkv.index import Policy
from jax_hkv.initializers import Initializer, variance_scaling

# What functions of whole tables must be, and one that is.
FROM_TABLE_TO_TABLE = "from a table to a table", "give jax_hkv.advance_epoch, say"


def is_number(value: Any) -> bool:
    """Whether it is one of Python's or NumPy's, and no flag."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_real(dtype: Any) -> bool:
    """Whether it is a type of real numbers, and not of flags."""
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def as_whole(call: str, argument: str, given: Any, dtype: Any) -> Any:
    """One number of an integer type, of an array of one or what makes one; errors name it."""
    if is_traced(given):
        if not jnp.issubdtype(given.dtype, jnp.integer):
            raise TypeError(
                f"{call}: {argument} must be an integer, since the table holds {dtype}, got "
                f"{given.dtype}, traced: cast it"
            )
        return given.reshape(()).astype(dtype)
    number, most = np.asarray(given).item(), jnp.iinfo(dtype)
    if not (most.min <= number <= most.max and number == int(number)):
        raise ValueError(
            f"{call}: {argument} must be a whole number from {most.min} to {most.max}, since the "
            f"table holds {dtype}, got {given!r}"
        )
    return np.array(int(number), dtype)


def as_number(call: str, argument: str, value: Any, expected: str = "a number") -> float:
    """A number as a float, infinity where none is as large; one that is traced is none.

    One of NumPy or JAX is an array without axes.
    """
    is_other = issubclass(type(value), (bool, str, bytes, bytearray))
    is_array = getattr(value, "shape", ()) != ()
    try:
        # float() takes these
        if is_other or is_array or not is_real(getattr(value, "dtype", np.float32)):
            raise TypeError
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        raise TypeError(
            f"{call}: {argument} must be {expected}, got {type(value).__name__} {value!r}"
        ) from None


def as_integer(call: str, argument: str, value: Any, low: int, high: int) -> int:
    """`value` as an int; raises unless it is an integer from `low` to `high`."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        static = ": make it static (static_argnames), or close over it" * is_traced(value)
        raise TypeError(
            f"{call}: {argument} must be an integer, got {type(value).__name__} {value!r}{static}"
        ) from None
    if not low <= number <= high:
        raise ValueError(f"{call}: {argument} must be from {low} to {high}, got {number}")
    return number


def as_replicas(call: str, value: Any) -> bool | int:
    """A flag, or how many whole tables devices hold together, as an int from 2 on; one is split."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1:
        return int(value) != 1 and int(value)
    expected = "True or False, or the number of whole tables that devices hold together"
    return as_bool(call, "replicas", value, expected)


def copied_axes(
    call: str, replicas: bool | int, axes: tuple[str, ...], sizes: Sequence[int]
) -> tuple[str, ...]:
    """The first of some axes, along which so many devices hold the same; raises for none."""
    if isinstance(replicas, bool):
        return axes if replicas else ()
    for count in range(len(axes) + 1):
        if math.prod(sizes[:count]) == replicas:
            return axes[:count]
    raise ValueError(
        f"{call}: replicas must be the number of devices along the first axes of "
        f"{dict(zip(axes, sizes, strict=True))}, got {replicas}: name those first whose devices "
        "hold the same, or say replicas=True for a whole table on every device"
    )


def as_list(call: str, argument: str, value: Any, of: str) -> list[Any]:
    """What a caller gave as a sequence; `of`: of what, and the remedy."""
    try:
        return list(value)
    except TypeError:
        raise TypeError(
            f"{call}: {argument} must be a list of {of}, got {type(value).__name__}"
        ) from None


def check_function(call: str, argument: str, fn: Any, expected: str, remedy: str) -> None:
    """Raises unless it can be called; `expected`: from what to what."""
    if not callable(fn):
        raise TypeError(
            f"{call}: {argument} must be a function {expected}, got {type(fn).__name__}: {remedy}"
        )


def as_initializer(call: str, argument: str, init: Any) -> Initializer:
    """First values of rows; None are those of ``nn.Embed``."""
    if init is None:
        return variance_scaling(1.0, "normal")
    if not isinstance(init, Initializer):
        raise TypeError(
            f"{call}: {argument} must come from jax_hkv.initializers (a row is a function of seed "
            f"and key alone, on every backend), got {type(init).__name__}: take "
            "jax_hkv.initializers.normal(0.1), say"
        )
    return init


def as_float_dtype(call: str, argument: str, dtype: Any) -> np.dtype:
    """The type of rows that a caller named, as a type or by its name."""
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or found not in FLOATS:
        given = found.name if found is not None and dtype is not None else dtype
        raise TypeError(
            f"{call}: {argument} must be float32, bfloat16 or float16, got {given}: take one of "
            "them, as jnp.bfloat16 or by its name"
        )
    return found


def as_array(call: str, argument: str, value: Any, expected: str) -> jax.Array:
    """What JAX makes an array of."""
    check_not_donated(call, argument, value)
    try:
        return replicated(jnp.asarray(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"{call}: {argument} must be {expected}, got {type(value).__name__} ({error}): give an "
            "array of such; of a column column.to_numpy(), with its missing values filled"
        ) from None


def as_row_dtype(call: str, dtype: Any) -> np.dtype[Any] | None:
    """The type in which rows are to come; None: the usual one."""
    if dtype is None:
        return None
    with contextlib.suppress(TypeError, ValueError, SyntaxError):
        kind = jnp.dtype(dtype)
        if kind in FLOATS:
            return kind
    raise TypeError(
        f"{call}: dtype must be float32, bfloat16 or float16, or None for the usual type of rows, "
        f"got {dtype!r}: cast what comes back, values.astype(dtype)"
    )


def as_mask(
    call: str, argument: str, mask: Any, shape: tuple[int, ...]
) -> Bool[Array, "*shape"] | None:
    """A mask of the given shape, or None."""
    if mask is None:
        return None
    array = as_array(call, argument, mask, f"bool{list(shape)} like the keys")
    if array.dtype != jnp.bool_ or array.shape != shape:
        raise TypeError(
            f"{call}: {argument} must be bool{list(shape)} like the keys, got "
            f"{array.dtype}{list(array.shape)}: {remedy_of(array, jnp.bool_, shape)}"
        )
    return array


def remedy_of(array: jax.Array, dtype: Any, shape: tuple[int, ...]) -> str:
    """What makes an array one of a type and shape, of which it has one at most."""
    kind = "bool" if dtype == jnp.bool_ else f"jnp.{jnp.dtype(dtype).name}"
    remedies = [f"cast with .astype({kind})"] * (array.dtype != dtype)
    if array.shape != shape:
        remedies.append(
            f"reshape to {list(shape)}"
            if math.prod(array.shape) == math.prod(shape)
            else f"give one of that shape, by jnp.broadcast_to(..., {shape}) where it fits"
        )
    return ", and ".join(remedies)


def as_flags(call: str, argument: str, flags: Any, shape: tuple[int, ...]) -> Bool[Array, "*shape"]:
    """A mask of the given shape that must be given."""
    if flags is None:
        raise TypeError(
            f"{call}: {argument} must be bool{list(shape)} like the keys, got None: give what "
            "jax_hkv.contains says, say"
        )
    array = as_mask(call, argument, flags, shape)
    assert array is not None
    return array


def as_counts(call: str, argument: str, counts: Any) -> Any:
    """Counts as an array, traced if need be."""
    array = counts if hasattr(counts, "dtype") else np.asarray(counts)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(
            f"{call}: {argument} must be a count, as results have it, got "
            f"{type(counts).__name__} {array.dtype}{list(array.shape)}"
        )
    return array


def flat_batch(given: Any, mask: jax.Array | None) -> tuple[Keys, Bool[Array, " n"] | None]:
    """Keys as :func:`jax_hkv._keys.check_keys` let them pass, and their mask, both flat."""
    return keys_of(given).reshape(-1), None if mask is None else mask.reshape(-1)


def flat_mask(mask: jax.Array | None, shape: tuple[int, ...]) -> Bool[Array, " n"]:
    """A mask of the given shape as a flat one; None is all True."""
    return jnp.ones(math.prod(shape), jnp.bool_) if mask is None else mask.reshape(-1)


def as_flat_mask(call: str, argument: str, mask: Any, shape: tuple[int, ...]) -> Bool[Array, " n"]:
    """A checked mask of the given shape as a flat one; None is all True."""
    return flat_mask(as_mask(call, argument, mask, shape), shape)


def as_flag(call: str, argument: str, flag: Any) -> Bool[Array, ""] | None:
    """One bool, traced if need be; None stays None."""
    return None if flag is None else as_one_flag(call, argument, flag)


def as_one_flag(call: str, argument: str, flag: Any) -> Bool[Array, ""]:
    """One bool that must be given."""
    array = flag if hasattr(flag, "dtype") else np.asarray(flag)
    if array.dtype != np.bool_ or array.shape != ():
        raise TypeError(
            f"{call}: {argument} must be one bool, True, False or an array bool[], got "
            f"{array.dtype}{list(array.shape)}: compare, or take jnp.all of several"
        )
    return jnp.asarray(array)


def as_rows(
    call: str, argument: str, rows: Any, shape: tuple[int, ...], dtype: Any
) -> Float[Array, "*batch dim"]:
    """Rows of the given shape and type."""
    array = as_array(call, argument, rows, f"an array of {np.dtype(dtype).name}")
    if array.shape != shape:
        raise ValueError(
            f"{call}: {argument} must have shape {list(shape)} (the keys' shape, then dim), got "
            f"{list(array.shape)}"
        )
    if array.dtype != dtype:
        raise TypeError(
            f"{call}: {argument} must be {np.dtype(dtype).name} like the table, got "
            f"{array.dtype}: cast with .astype(table.dtype)"
        )
    return array


def check_scores(call: str, policy: Policy, scores: Any) -> None:
    """Raises if scores are given where the policy makes its own, or missing where it needs them."""
    if scores is None and policy is Policy.CUSTOM:
        raise ValueError(
            f"{call}: scores are needed under Policy.CUSTOM, which makes none of its own: pass "
            "scores=, uint32 or pairs as Keys, or one number for all keys"
            + (", to assign" if "touch" in call else "")
        )
    if scores is not None and not (policy.counts or policy is Policy.CUSTOM):
        raise ValueError(
            f"{call}: scores are not accepted under Policy.{policy.name}, which takes the logical "
            "time: leave them out, or create the table with Policy.CUSTOM"
        )


def as_scores(call: str, policy: Policy, scores: Any, shape: tuple[int, ...]) -> Keys | None:
    """Scores as flat pairs; one number is the score of every key."""
    check_scores(call, policy, scores)
    return None if scores is None else _for_each(call, _pairs_of(call, scores), shape)


def as_flat_scores(call: str, policy: Policy, scores: Any, shape: tuple[int, ...]) -> Keys | None:
    """Scores of any shape as flat pairs, of keys that are flat already."""
    check_scores(call, policy, scores)
    if scores is None:
        return None
    pairs = _pairs_of(call, scores)
    return _for_each(call, pairs.reshape(-1) if pairs.shape else pairs, shape)


def _for_each(call: str, pairs: Keys, shape: tuple[int, ...]) -> Keys:
    """Flat pairs, one for each key, of as many or of one."""
    if pairs.shape not in ((), shape):
        raise ValueError(
            f"{call}: scores must have the keys' shape {list(shape)}, got {list(pairs.shape)}: "
            "give one for each key, or one number for all of them"
        )
    if pairs.shape != shape:  # made where it is needed, not on the host
        pairs = Keys(jnp.broadcast_to(pairs.words, (*shape, 2)))
    return pairs.reshape(-1)


def _pairs_of(call: str, scores: Any) -> Keys:
    """Scores as pairs, of the shape in which they came."""
    check_unmasked(f"{call}: scores", scores)
    if isinstance(scores, Keys):
        return as_keys(call, "scores", scores)
    if isinstance(scores, np.ndarray) and not scores.ndim:
        scores = scores[()]
    if isinstance(scores, (int, np.integer)) and not isinstance(scores, bool):
        number = as_integer(call, "scores", scores, 0, 2**64 - 1)  # JAX would cut it to 32 bits
        return Keys.from_numpy(np.uint64(number))
    return as_keys(call, "scores", _unsigned(call, scores))


def _unsigned(call: str, scores: Any) -> Any:
    """Signed scores as unsigned ones: checked where values are known, else at least 0."""
    dtype: Any = getattr(scores, "dtype", None)
    if getattr(dtype, "kind", "none") not in "iu":
        got = type(scores).__name__ if dtype is None else dtype
        remedy = "round or scale them, and cast with .astype(jnp.uint32)"
        if isinstance(scores, (list, tuple)):
            remedy = "give jax_hkv.Keys.from_numpy(scores)"
        raise TypeError(
            f"{call}: scores must be integers of 8 to 32 bits or pairs as Keys, one for each key, "
            f"or one integer for all of them, got {got}: {remedy}"
        )
    is_signed = dtype.kind == "i"
    if is_signed and not is_traced(scores) and (np.asarray(scores) < 0).any():
        raise ValueError(f"{call}: scores are unsigned, got {int(np.asarray(scores).min())}")
    if would_cut(scores):
        raise TypeError(
            f"{call}: scores are a NumPy {dtype} array, of which JAX, with x64 off, would cut "
            f"{int(np.asarray(scores).max())} to 32 bits: give jax_hkv.Keys.from_numpy(scores)"
        )
    if not is_signed:
        return scores
    if is_traced(scores):
        scores = jnp.maximum(scores, 0)  # as bits they would be the highest scores there are
    return scores.astype(np.dtype(f"uint{8 * dtype.itemsize}"))


def check_arrays(call: str, leaves: Iterable[Any], argument: str) -> None:
    """Raises if one of the leaves is a shape."""
    for leaf in leaves:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{call}: {argument} must hold arrays, got the shape of one, {leaf}: where "
                "jax.eval_shape made it restore all of a checkpoint into it (a partial restore "
                "leaves what it does not find), or put tables there that create made"
            )


def check_not_used_up(
    call: str, leaves: Sequence[Any], argument: str = "state", remedy: str = ""
) -> None:
    """Raises if one of a state's leaves was donated to an earlier step."""
    for leaf in leaves:
        if is_used_up(leaf):
            again = ""
            if any(getattr(jax.config, f"jax_debug_{kind}") for kind in ("nans", "infs")):
                again = " (or by this one, in which JAX has found a NaN or an infinity)"
            raise RuntimeError(
                f"{call}: {argument} was used up by an earlier step{again}, got arrays that were "
                f"donated: go on with the {argument} that came out of it, or "
                f"{remedy or 'make the step with donate=False'} (calls that use up what they are "
                "given, sharding.import_entries for one, are given a copy, copy.deepcopy)"
            )


def check_mesh(
    call: str,
    argument: str,
    tree: Any,
    mesh: Any,
    remedy: str,
    *,
    cause: Exception | None = None,
    is_read: bool = False,
) -> None:
    """Raises for an array over devices of another order, or over Explicit axes of another mesh.

    Where it is read part by part, axes have no say.
    """
    is_explicit = jax.sharding.AxisType.Explicit in mesh.axis_types and not is_read
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(leaf, jax.Array) or is_traced(leaf):
            continue
        own = getattr(leaf.sharding, "mesh", None)
        if own is None or own == mesh or own.size == 1:
            continue
        if is_read and leaf.sharding.is_fully_replicated:
            continue
        is_in_order = own.devices.flatten().tolist() == mesh.devices.flatten().tolist()
        if not is_in_order or (is_explicit and [*own.shape.items()] != [*mesh.shape.items()]):
            got, wanted = (
                f"{dict(each.shape)} of the devices {[device.id for device in each.devices.flat]}"
                for each in (own, mesh)
            )
            raise ValueError(
                f"{call}: {argument}{jax.tree_util.keystr(path)} must lie on the placement's mesh, "
                f"{wanted} in this order, got an array on the mesh {got}: {remedy}"
            ) from cause


def check_known(call: str, leaf: Any) -> None:
    """Raises inside of jit, where nothing can be looked at on the host."""
    if is_traced(leaf) or not trace_state_clean():
        raise TypeError(
            f"{call}: table must be looked at outside of jit, got a call that is traced: make it "
            "between steps"
        )


def check_held_once(call: str, state: Any, argument: str) -> None:
    """Raises where a state that a step uses up has an array twice, which JAX names by a number."""
    known: dict[Any, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, jax.Array) or is_traced(leaf) or not leaf.size:
            continue
        shards = leaf.addressable_shards
        own = tuple(shard.data.unsafe_buffer_pointer() for shard in shards) or id(leaf)
        place = argument + jax.tree_util.keystr(path)
        first = known.setdefault(own, place)
        if first != place:
            raise ValueError(
                f"{call}: {argument} must hold every array once, since a step uses it up, got one "
                f"at {first} and at {place}: copy one of them, jax.tree.map(jnp.copy, ...), or let "
                "layers share what is to be the same"
            )


def check_not_cut(call: str, leaf: Any) -> None:
    """Raises for numbers of a batch that JAX would cut."""
    if would_cut(leaf):
        raise TypeError(
            f"{call}: the batch has a NumPy {leaf.dtype} array, and with x64 off JAX would "
            "cut its numbers to 32 bits. Use jax_hkv.Keys.from_numpy(ids) for keys"
        )
