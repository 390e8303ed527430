"""The one place for names of JAX that are not public, or that move between its versions."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as _config
from jax._src.core import trace_state_clean
from jax.core import Tracer
from jax.interpreters import ad, batching, mlir
from jaxlib.version import __version__ as JAXLIB_VERSION

# What is JAX's own, for others to import from here.
__all__ = ["JAXLIB_VERSION", "ad", "batching", "mlir", "trace_state_clean"]

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


# Its Shardy (ManualComputationUnusedInputsPattern) crashes; 0.11.0, 0.11.1 and 0.12.0 do not.
_CRASHES_WITHOUT_ELEMENTS = JAXLIB_VERSION.startswith("0.11.2")


def check_elements(call: str, batch: Any) -> None:
    """Raises for a batch that would end the process: jaxlib 0.11.2 splits none without elements."""
    if _CRASHES_WITHOUT_ELEMENTS and not all(map(np.size, jax.tree.leaves(batch))):
        raise ValueError(
            f"{call}: the batch must have elements in every array: jaxlib 0.11.2 ends the process "
            "where it compiles shard_map of an array without any. Pad and mask it (valid=), or "
            "install another jaxlib: 0.11.1 and 0.12 do not"
        )


def has_empty_operands(operands: Iterable[Any]) -> bool:
    """Whether arrays without elements among these must not come into a program of their own.

    A shard_map outside of jit makes one of every primitive, where jaxlib 0.11.2 ends the process
    (see :func:`check_elements`).
    """
    return (
        _CRASHES_WITHOUT_ELEMENTS
        and bool(jax.sharding.get_abstract_mesh().manual_axes)
        and any(0 in operand.shape for operand in operands)
    )


def without_rematerialization() -> contextlib.AbstractContextManager[Any]:
    """Where programs are compiled without XLA's pass that computes things twice to save memory.

    The pass counts what a native call changes in place twice, so that a step whose tables take half
    of a GPU's memory computes parts of its model again, and saves next to nothing. What JAX's
    option ``jax_compiler_enable_remat_pass`` does, here for one thread.
    """
    option: Any = getattr(_config, "enable_remat_opt_pass", None)
    return contextlib.nullcontext() if option is None else option(False)


def is_fixed(shape: Iterable[Any]) -> bool:
    """Whether no size is a symbol, as ``jax.export`` has them."""
    return all(isinstance(size, (int, np.integer)) for size in shape)


def came_from(module: str, error: BaseException) -> bool:
    """Whether an error passed through a function of a module."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == module for frame in frames)


def is_used_up(leaf: Any) -> bool:
    """Whether it is an array that was donated, or deleted."""
    return isinstance(leaf, jax.Array) and not is_traced(leaf) and leaf.is_deleted()


def is_traced(array: Any) -> bool:
    """Whether an array stands for a value that is not known yet."""
    return isinstance(array, Tracer)


def on_one_device() -> contextlib.AbstractContextManager[Any]:
    """Where a program for one device can run, whatever mesh the caller has set (`jax.set_mesh`).

    While something is traced it is a part of that program, wherever that runs.
    """
    if jax.sharding.get_abstract_mesh().empty or not trace_state_clean():
        return contextlib.nullcontext()
    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Computes what is known while tracing, on one device, whatever mesh is traced for."""
    alone = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with alone, jax.ensure_compile_time_eval():
        yield


def of_one_device(fn: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """A function of tables of one device each, in any mesh that is set."""

    @functools.wraps(fn)
    def call(*args: _Args.args, **options: _Args.kwargs) -> _Result:
        with on_one_device():
            return fn(*args, **options)

    return call


def replicated(array: Any) -> Any:
    """The same array, on all devices of an Explicit mesh where its type says that it is split.

    Or that the devices hold parts of a sum (unreduced), which are added up.
    """
    if not isinstance(array, jax.Array):
        return array
    sharding = jax.typeof(array).sharding
    spec = sharding.spec
    partial = getattr(spec, "unreduced", None) or getattr(spec, "reduced", None)
    if not partial and all(axis is None for axis in spec):
        return array
    return jax.sharding.reshard(
        array, jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    )


def match_varying(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Gives all operands the same varying manual axes, as one call inside shard_map needs."""
    axes = [_varying(operand) for operand in operands]
    union = frozenset().union(*axes)
    if all(own == union for own in axes):
        return operands
    return tuple(
        jax.lax.pcast(operand, tuple(sorted(union - own)), to="varying") if union - own else operand
        for operand, own in zip(operands, axes, strict=True)
    )


def _varying(operand: Any) -> frozenset:
    # What eval_shape describes where some axes of a mesh are manual has no sharding to be a type's.
    is_described = isinstance(operand, jax.ShapeDtypeStruct)
    described = operand if is_described else jax.typeof(operand)
    kind = getattr(described, "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def result_aval(like: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An abstract array on the mesh of `like`, varying over the same axes."""
    sharding = like.sharding.update(spec=jax.sharding.PartitionSpec(*(None for _ in shape)))
    return like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same arrays, typed as different on every device along these axes of a shard_map.

    Where JAX does not track that (pmap, or shard_map with ``check_vma=False``) nothing changes.
    """

    def one(leaf: Any) -> Any:
        missing = tuple(axis for axis in axes if axis not in _varying(leaf))
        try:
            return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf
        except ValueError as error:
            if "shard_map" in str(error):
                error.add_note(
                    f"jax_hkv.sharding: axis_name {missing} must be axes of devices, those of a "
                    "Placement or of jax.shard_map, not of jax.vmap: under vmap call jax_hkv.find "
                    "and its like, and give the exchange's axis to shard_map outside of it"
                )
            raise

    return jax.tree.map(one, tree)


def zeros_of(like: Any) -> jax.Array:
    """Zeros of an array's shape and type, which differ between devices where it does.

    The gradient of what is equal on all devices of a shard_map would be the sum of theirs.
    """
    return vary(jnp.zeros(like.shape, like.dtype), tuple(sorted(_varying(like))))


def is_inside(axes: tuple[str, ...]) -> bool:
    """Whether code runs for one device of these axes, in a shard_map or pmap."""
    try:
        return bool([jax.lax.axis_size(name) for name in axes])
    except NameError:
        return False


def over(axes: tuple[str, ...], reduce: Callable[[Any, tuple[str, ...]], Any], tree: Any) -> Any:
    """What a reduction, ``jax.lax.psum`` say, makes of arrays along axes of a shard_map or pmap.

    Over one device it stands only where JAX wants it for the arrays' type: XLA compiles none over
    such an axis where others are left to it ("must be in (partial) manual partitioning mode"). Give
    integers: bools it makes integers where it stands, and only there.
    """

    def along(leaf: Any) -> tuple[str, ...]:
        own = _varying(leaf)
        return tuple(axis for axis in axes if jax.lax.axis_size(axis) > 1 or axis in own)

    found = {along(leaf) for leaf in jax.tree.leaves(tree)}
    if len(found) > 1:
        return jax.tree.map(lambda leaf: over(axes, reduce, leaf), tree)
    names = found.pop() if found else ()
    return reduce(tree, names) if names else tree


def gathered(leaf: Any, axis: str) -> jax.Array:
    """Every device's array, along a leading axis; of one device see :func:`over`."""
    is_alone = jax.lax.axis_size(axis) == 1 and axis not in _varying(leaf)
    return jnp.asarray(leaf)[None] if is_alone else jax.lax.all_gather(leaf, axis)


def agreed(tree: Any, axes: tuple[str, ...]) -> Any:
    """The same arrays, equal on all devices, typed as such along these axes of a shard_map.

    Where JAX does not track that nothing is sent.
    """

    def one(leaf: Any) -> Any:
        differing = tuple(axis for axis in axes if axis in _varying(leaf))
        return jax.lax.pmax(leaf, differing) if differing else leaf

    return jax.tree.map(one, tree)
