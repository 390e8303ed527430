"""The only gateway to the compiled modules: it makes one jax primitive of each native operation.

The native list of operations (ffi/ops/all.h) is the source: names, operands, shapes, and what is
updated in place come from there.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

from jax_hkv import _build
from jax_hkv._compat import (
    ad,
    batching,
    has_empty_operands,
    is_fixed,
    match_varying,
    mlir,
    result_aval,
)

_TARGET_PREFIX = "jax_hkv."
FLOATS = (np.dtype(np.float32), np.dtype(jax.numpy.bfloat16), np.dtype(np.float16))


def _load(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"jax_hkv.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"jax_hkv.{name}":
            raise
        return None


def _require(name: str) -> ModuleType:
    module = _load(name)
    if module is None:
        raise ImportError(
            f"jax_hkv has no compiled module jax_hkv.{name}: this is the source folder, or the "
            "build did not finish. Install the package (pip install .) and import that."
        )
    return module


_cpu = _require("_cpu")
_cuda = _load("_cuda")
for _module in (_cpu, _cuda):
    _build.check_jaxlib(_module)
_MODULES: Mapping[str, ModuleType | None] = {"cpu": _cpu, "cuda": _cuda}


@dataclasses.dataclass(frozen=True)
class Argument:
    """An operand or a result: its name, element type, shape, and whether it is updated in place."""

    name: str
    dtype: str
    shape: str
    in_place: bool


@dataclasses.dataclass(frozen=True)
class Signature:
    """What one native operation takes and returns."""

    name: str
    per_position: bool
    has_workspace: bool
    attributes: Mapping[str, np.dtype[Any]]
    operands: tuple[Argument, ...]
    results: tuple[Argument, ...]

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Signature:
        """From the dictionary that the compiled module gives."""
        return cls(
            name=entries["name"],
            per_position=entries["per_position"],
            has_workspace=entries["has_workspace"],
            attributes={name: np.dtype(dtype) for name, dtype in entries["attributes"]},
            operands=tuple(Argument(*operand) for operand in entries["operands"]),
            results=tuple(Argument(*result) for result in entries["results"]),
        )

    @property
    def casts(self) -> bool:
        """Whether calls say, by `dtype`, of which type a result is."""
        return any(result.dtype == "cast" for result in self.results)

    @property
    def aliases(self) -> dict[int, int]:
        """Operand number to result number, for what is updated in place."""
        results = [i for i, result in enumerate(self.results) if result.in_place]
        operands = [i for i, operand in enumerate(self.operands) if operand.in_place]
        return dict(zip(operands, results, strict=True))


class _Axes:
    """Sizes of the named axes of one call ("n 2", "S ...", "n? 2", "n+1", "n+1?")."""

    def __init__(self, signature: Signature, operands: Sequence[Any], params: Mapping[str, Any]):
        self.sizes: dict[str, int] = {
            name: params[name] for name, dtype in signature.attributes.items() if dtype.kind == "i"
        }
        self.row: tuple[int, ...] | None = None
        self.row_dtype: Any = None
        self.cast_dtype: Any = params.get("dtype")
        for argument, operand in zip(signature.operands, operands, strict=True):
            self._read(argument, operand)

    def _read(self, argument: Argument, operand: Any) -> None:
        tokens = argument.shape.split()
        if "..." in tokens and self.row is None:
            self.row = tuple(operand.shape[tokens.index("...") :])
        if argument.dtype == "row" and self.row_dtype is None:
            self.row_dtype = operand.dtype
        for token, size in zip(tokens, operand.shape, strict=False):
            name, _, added = token.partition("+")
            if name.isidentifier() and not token.endswith("?"):
                self.sizes.setdefault(name, size - int(added or 0))

    def check(self, signature: Signature, operands: Sequence[Any]) -> None:
        """Raises where an operand does not fit the signature."""
        for argument, operand in zip(signature.operands, operands, strict=True):
            if hasattr(operand, "inner_aval"):
                raise TypeError(
                    f"jax_hkv {signature.name}: {argument.name} must be an array, got {operand}: "
                    "read a table of references (jax.new_ref) before, "
                    "jax.tree.map(lambda ref: ref[...], refs), and write back what comes of it"
                )
            shape, dtype = self.shape(argument), self.dtype(argument, operand)
            absent = "?" in argument.shape and operand.shape[0] == 0
            if operand.dtype != dtype or (tuple(operand.shape) != shape and not absent):
                raise TypeError(
                    f"jax_hkv {signature.name}: {argument.name} must be {dtype}{list(shape)} "
                    f"({argument.shape}), got {operand.dtype}{list(operand.shape)}"
                )
            if is_fixed(operand.shape) and operand.shape[0] >= 2**31:
                raise ValueError(
                    f"jax_hkv {signature.name}: {argument.name} must have fewer than 2**31 "
                    f"positions, got {operand.dtype}{list(operand.shape)}: give the batch in parts"
                )

    def shape(self, argument: Argument) -> tuple[int, ...]:
        sizes: list[int] = []
        for token in argument.shape.split():
            if token == "...":
                sizes.extend(self.row or ())
            elif token.isdigit():
                sizes.append(int(token))
            else:
                name, _, added = token.removesuffix("?").partition("+")
                sizes.append(self.sizes[name] + int(added or 0))
        return tuple(sizes)

    def dtype(self, argument: Argument, given: Any = None) -> Any:
        """What an argument must be; one of any floating-point type keeps what is given."""
        if argument.dtype == "row":
            return self.row_dtype
        if argument.dtype == "cast":
            return self.cast_dtype
        if argument.dtype == "float":
            return given.dtype if given.dtype in FLOATS else "float32, bfloat16 or float16"
        return np.dtype(argument.dtype)


def _abstract(signature: Signature, *operands: Any, **params: Any) -> list[Any]:
    axes = _Axes(signature, operands, params)
    axes.check(signature, operands)
    if signature.has_workspace:
        _check_fixed(signature, operands, params["table"])
    operand_of = {result: operand for operand, result in signature.aliases.items()}
    return [
        operands[operand_of[i]]
        if i in operand_of
        else result_aval(operands[0], axes.shape(result), axes.dtype(result))
        for i, result in enumerate(signature.results)
    ]


def _check_fixed(signature: Signature, operands: Sequence[Any], table: str) -> None:
    """Raises where a size is a symbol of ``jax.export``, and the workspace depends on it."""
    for argument, operand in zip(signature.operands, operands, strict=True):
        if not is_fixed(operand.shape):
            raise TypeError(
                f"jax_hkv {signature.name} on {table!r}: {argument.name} must have a fixed shape, "
                f"got {list(operand.shape)}: its workspace is of a size known while tracing"
            )


def _lowering(signature: Signature, platform: str, *operands: Any, **params: Any) -> Sequence[Any]:
    """The XLA custom call on one platform; the workspace is one more result."""
    module = _MODULES[platform]
    if module is None:
        raise RuntimeError(
            f"jax_hkv was built without its CUDA module, so {signature.name} cannot run on a GPU. "
            "Build it where nvcc is found: pip install --config-settings=cmake.define.HKV_CUDA=ON ."
        )
    axes = _Axes(signature, operands, params)
    operand_of = {result: operand for operand, result in signature.aliases.items()}
    results = [
        jax.ShapeDtypeStruct(operands[operand_of[i]].shape, operands[operand_of[i]].dtype)
        if i in operand_of
        else jax.ShapeDtypeStruct(axes.shape(result), axes.dtype(result))
        for i, result in enumerate(signature.results)
    ]
    attributes = {name: np.int64(params[name]) for name in signature.attributes}
    workspace = 0
    if signature.has_workspace:
        shapes = [list(operand.shape) for operand in operands]
        workspace = module.workspace_bytes(signature.name, shapes, attributes)
    call = jax.ffi.ffi_call(
        _TARGET_PREFIX + signature.name,
        [*results, jax.ShapeDtypeStruct((workspace,), np.uint8)],
        input_output_aliases=signature.aliases,
    )
    return call(*operands, table=params["table"], **attributes)[: len(results)]


# What comes out of a loop of JAX inside of loss_fn are its results, and not the table of a layer.
_IN_LOSS = (
    "In a train_step's loss_fn, call the layers once with the whole batch, and map what comes "
    "after the rows."
)


def _batch(
    primitive: Primitive, signature: Signature, operands: Any, dims: Any, **params: Any
) -> Any:
    """Flattens a batch of reads into one read. The table itself is not mapped."""
    has_bags = any(argument.shape == "b+1" for argument in signature.operands)
    if has_bags or signature.per_position:
        _check_not_mapped(signature, dims, rows_may_be=has_bags)
        flatten = _batch_bags if has_bags else _batch_positions
        return flatten(primitive, signature, operands, dims, **params)
    if signature.name == "combine_rows" and not any(dim is not None for dim in dims[:-1]):
        # Of the rows alone: more columns of each, which are summed by themselves.
        *groups, rows = operands
        return primitive.bind(*groups, jax.numpy.moveaxis(rows, dims[-1], 1), **params), [1]
    if signature.name == "square_norm":  # a number of each, for which nothing is changed
        mapped = [n for n, dim in enumerate(dims) if dim is not None]

        def one(own: Sequence[Any]) -> Any:
            parts = dict(zip(mapped, own, strict=True))
            return primitive.bind(*(parts.get(n, x) for n, x in enumerate(operands)), **params)

        return jax.lax.map(one, [jax.numpy.moveaxis(operands[n], dims[n], 0) for n in mapped]), [0]
    _check_one_table(signature, dims)
    if any(each.in_place and each.name != "clock" for each in signature.operands):
        raise NotImplementedError(
            f"jax.vmap of {signature.name}: a batch of changes to one table has no order. Call the "
            "operation once with all keys (keys of any leading shape are accepted), or loop with "
            f"jax.lax.scan. {_IN_LOSS}"
        )
    begins = ", with which all that changes a table begins" if signature.name == "unique" else ""
    raise NotImplementedError(
        f"jax.vmap of {signature.name}{begins}: it looks at a batch as a whole, and several "
        "batches are not one. Call the operation once with all keys, or loop over the batches: "
        "with jax.lax.map; where they change one table, which needs an order, with jax.lax.scan; "
        f"where each has a table of its own, in Python over a list of tables. {_IN_LOSS}"
    )


_TABLES = (
    "Keep several tables in a list, and go through it by a loop of Python inside of one jit, or "
    "make one table of them, whose ids say which they are of (jax_hkv.Keys.cross(number, ids)): "
    "jax.lax.map over stacked ones copies each of them whole."
)


def _check_one_table(signature: Signature, dims: Any) -> None:
    """Raises where the table that is changed is mapped: several of them."""
    names = [argument.name for argument in signature.operands]
    if dict(zip(names, dims, strict=True)).get("clock") is not None:
        raise NotImplementedError(
            f"jax.vmap of {signature.name} over its table: several tables are not changed at once. "
            f"{_TABLES}"
        )


def _check_not_mapped(signature: Signature, dims: Any, rows_may_be: bool) -> None:
    """Raises where the table is mapped. Rows that are given without a table may be."""
    for argument, dim in zip(signature.operands, dims, strict=True):
        is_given = argument.shape.startswith(("n", "b")) or (
            rows_may_be and argument.name == "values"
        )
        if dim is not None and not is_given:
            raise NotImplementedError(
                f"jax.vmap of {signature.name} over {argument.name}: only keys can be mapped, the "
                f"table cannot. Use in_axes=None and out_axes=None for the table. {_TABLES} A "
                "lax.cond or while_loop whose condition is mapped maps all that it works on: "
                "choose from results by jnp.where."
            )


def _batch_size(operands: Any, dims: Any) -> int:
    return next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)


def _stacked(x: Any, dim: Any, size: int) -> jax.Array:
    """The batch axis first, made where there was none."""
    if dim is None:
        return jax.numpy.broadcast_to(x, (size, *x.shape))
    return jax.numpy.moveaxis(x, dim, 0)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _check_count(signature: Signature, size: int, count: int, rows: int = 0) -> None:
    if is_fixed((size, count, rows)) and size * max(count, rows) >= 2**31:
        raise ValueError(
            f"jax.vmap of {signature.name}: a batch must have fewer than 2**31 positions and rows, "
            f"got {size} of {count} positions and {rows} rows: loop with jax.lax.map over parts"
        )


def _batch_positions(
    primitive: Primitive, signature: Signature, operands: Any, dims: Any, **params: Any
) -> Any:
    """One call for the positions of all."""
    by_position = [argument.shape.startswith("n") for argument in signature.operands]
    size = _batch_size(operands, dims)
    arguments = [
        _stacked(x, dim, size) if positions else x
        for x, dim, positions in zip(operands, dims, by_position, strict=True)
    ]
    count = arguments[by_position.index(True)].shape[1]
    _check_count(signature, size, count)
    arguments = [
        _flat(x) if positions else x for x, positions in zip(arguments, by_position, strict=True)
    ]
    results = primitive.bind(*arguments, **params)
    outputs = [
        x if result.in_place else x.reshape(size, count, *x.shape[1:])
        for x, result in zip(results, signature.results, strict=True)
    ]
    return outputs, [None if result.in_place else 0 for result in signature.results]


def _batch_bags(
    primitive: Primitive, signature: Signature, operands: Any, dims: Any, **params: Any
) -> Any:
    """One call for the bags of all, whose positions and rows stand one after the other.

    A sum depends on its own bag alone, so that the bits are those of a loop.
    """
    size = _batch_size(operands, dims)
    names = [argument.name for argument in signature.operands]
    clock, values, *others = operands
    assert names[:5] == ["clock", "values", "slots", "splits", "ends"]
    slots, splits, ends, *per_position = [
        _stacked(x, dim, size) for x, dim in zip(others, dims[2:], strict=True)
    ]
    count, rows = slots.shape[1], 0
    number = jax.lax.iota(np.int32, size)[:, None]
    if dims[1] is not None:
        values = _stacked(values, dims[1], size)
        rows, values = values.shape[1], _flat(values)
    _check_count(signature, size, count, rows)
    slots = jax.numpy.where(slots >= 0, slots + number * rows, slots)
    bags = splits.shape[1] - 1
    ends = ends if ends.shape[1] else splits[:, 1:]
    begins, ends = [
        _flat(jax.numpy.clip(x, 0, count) + number * count) for x in (splits[:, :-1], ends)
    ]
    splits = jax.numpy.pad(begins, (0, 1), constant_values=size * count)
    arguments = [clock, values, _flat(slots), splits, ends, *(_flat(x) for x in per_position)]
    clock, pooled = primitive.bind(*arguments, **params)
    return [clock, pooled.reshape(size, bags, *pooled.shape[1:])], [None, 0]


def refuse_derivative(name: str, *_: Any, **__: Any) -> Any:
    """Raises, and says what to differentiate instead."""
    raise NotImplementedError(
        f"{name} of jax_hkv has no derivative: a table is never differentiated. "
        "Differentiate with respect to the rows that a lookup returned: look up outside the "
        "differentiated function, pass result.values in, and give its gradient to "
        "jax_hkv.optim.sparse(...).update. A table, or a gradient for an update, that comes out of "
        "something differentiated goes through jax.lax.stop_gradient first (rows that are looked "
        "up in a stopped table have no gradient: they are not trained); of pooled lookups there "
        "is no second derivative. jax_hkv.pool and Unique.expand have one, reverse over reverse "
        "(jax.jacrev of jax.grad); forward mode (jax.jvp, jax.hessian) nothing of this has."
    )


@functools.lru_cache(maxsize=1024)
def _eager(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(primitive.bind, **dict(params)))


def _run(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    # Under jax.disable_jit() it would come back here for ever; so it would where JAX finds a NaN.
    with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
        outputs = _eager(primitive, tuple(sorted(params.items())))(*operands)
    for name, is_special in (("nan", np.isnan), ("inf", np.isinf)):
        is_searched = getattr(jax.config, f"jax_debug_{name}s")
        if is_searched and any(is_special(x).any() for x in outputs if x.dtype in FLOATS):
            raise FloatingPointError(f"invalid value ({name}) encountered in {primitive.name}")
    return outputs


@functools.lru_cache(maxsize=1024)
def _with_empty(primitive: Primitive, empty: tuple[Any, ...], params: tuple[Any, ...]) -> Any:
    """A program that makes the operands without elements by itself; None: one that is given."""

    def bind(*given: jax.Array) -> Any:
        rest = iter(given)
        operands = tuple(next(rest) if kind is None else jax.numpy.zeros(*kind) for kind in empty)
        return primitive.bind(*match_varying(operands), **dict(params))

    return jax.jit(bind, inline=True)


def _bind_given(primitive: Primitive, operands: Sequence[Any], params: Mapping[str, Any]) -> Any:
    """Binds a primitive to operands of which those without elements are made with it."""
    empty = tuple((x.shape, x.dtype) if 0 in x.shape else None for x in operands)
    given = [x for x, kind in zip(operands, empty, strict=True) if kind is None]
    with jax.disable_jit(False):
        return _with_empty(primitive, empty, tuple(sorted(params.items())))(*given)


def _make_primitive(signature: Signature) -> Primitive:
    primitive = Primitive(signature.name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(functools.partial(_abstract, signature))
    primitive.def_impl(functools.partial(_run, primitive))
    for platform in _MODULES:
        rule = mlir.lower_fun(
            functools.partial(_lowering, signature, platform), multiple_results=True
        )
        mlir.register_lowering(primitive, rule, platform=platform)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive, signature)
    ad.primitive_jvps[primitive] = functools.partial(refuse_derivative, signature.name)
    return primitive


def _register() -> dict[str, tuple[Signature, Primitive]]:
    for platform, module in (("cpu", _cpu), ("CUDA", _cuda)):
        for name, stages in (module.handlers() if module else {}).items():
            jax.ffi.register_ffi_target(_TARGET_PREFIX + name, stages, platform=platform)
    signatures = [Signature.of(entries) for entries in _cpu.signatures()]
    return {signature.name: (signature, _make_primitive(signature)) for signature in signatures}


_OPERATIONS = _register()


def _word(dtype: np.dtype[Any], value: Any) -> int:
    """An attribute as JAX sees it, which makes one of two calls where they compare equal.

    So floats are their bits: 0.0 must not stand for -0.0.
    """
    return int(value if dtype.kind == "i" else dtype.type(value).view(f"i{dtype.itemsize}"))


def signatures() -> tuple[Signature, ...]:
    """The native operations, in the order of the list."""
    return tuple(signature for signature, _ in _OPERATIONS.values())


CUSTOM_CALLS = tuple(_TARGET_PREFIX + signature.name for signature in signatures())


def call(
    name: str, *operands: jax.Array, table: str = "batch", dtype: Any = None, **attributes: Any
) -> list[Any]:
    """Binds the primitive of a native operation.

    Args:
      name: of the operation.
      *operands: in the order of its signature.
      table: the name of the table, for error messages.
      dtype: of the result that is of whatever type the call asks for.
      **attributes: static integers and floats.
    """
    if name not in _OPERATIONS:
        raise RuntimeError(
            f"the compiled modules of jax_hkv have no operation {name}: they are older than its "
            "Python files; install it again (pip install -e .)"
        )
    signature, primitive = _OPERATIONS[name]
    expected = signature.attributes
    if set(attributes) != set(expected):
        raise TypeError(f"{name} takes the attributes {sorted(expected)}, got {sorted(attributes)}")
    if signature.casts != (dtype is not None):
        raise TypeError(f"{name} takes {'a' if signature.casts else 'no'} dtype, got {dtype}")
    words: dict[str, Any] = {key: _word(expected[key], x) for key, x in attributes.items()}
    if signature.casts:
        words["dtype"] = np.dtype(dtype)
    words["table"] = table
    if has_empty_operands(operands):
        return _bind_given(primitive, operands, words)
    return primitive.bind(*match_varying(operands), **words)
