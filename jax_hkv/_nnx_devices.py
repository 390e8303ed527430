"""Models of flax.nnx on the devices of a placement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from jax_hkv._checks import check_function
from jax_hkv._digest import names_in
from jax_hkv._placed import spec_along
from jax_hkv._placement import Placement, check_placement
from jax_hkv._stages import Stage, Staged, StagedBy
from jax_hkv._warnings import warn

Model = TypeVar("Model", bound=nnx.Module)

_MOST_PROGRAMS = 64

_STRUCTURE = (
    "train_step: state and arguments must be of the structure that the step was compiled for, got "
    "another (an optax transformation that is made anew is one, too): call the step itself, or "
    "lower it with these"
)


class Alone(Staged):
    """A jitted step on one device. Its stages know no intermediates, which a step forgets first."""

    def _of(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, *others = args
        copy = nnx.merge(*nnx.split(state))
        nnx.pop(copy.model, nnx.Intermediate)
        return super()._of(stage, (copy, *others), kwargs)

    def _run(self, run: Any, /, state: Any, *args: Any) -> Any:
        if run is self._fn:
            return run(state, *args)
        nnx.pop(state.model, nnx.Intermediate)
        try:
            return run(state, *args)
        except TypeError as error:
            if "compiled with input pytree" in str(error):
                raise ValueError(_STRUCTURE) from None  # of JAX's, pages of graphs
            raise


class Placed:
    """A step on all devices of a placement: a function of the state's arrays, and back into it.

    Args:
      placement: of the state.
      step: of (state, *args), on one device; changes the state and returns a report.
      donate: whether the state's arrays are used up.
    """

    def __init__(self, placement: Placement, step: Callable[..., Any], donate: bool):
        self._placement = placement

        # No method: it would hold this object, and that it. A new optax optimizer makes new graphs:
        # of those that were used last programs are kept.
        @functools.lru_cache(maxsize=_MOST_PROGRAMS)
        def program_of(graph: Any) -> Any:
            def pure(values: Any, *args: Any) -> tuple[Any, Any]:
                state = nnx.merge(graph, values)
                info = step(state, *args)
                return nnx.split(state)[1], info

            return placement.step(pure, donate=donate)

        self._of = program_of

    def __call__(self, state: nnx.Module, *args: Any) -> Any:
        graph, values = _split(state)
        values, info = self._of(graph)(values, *args)
        nnx.update(state, values)
        return info

    def lower(self, state: nnx.Module, *args: Any) -> Any:
        """As of jitted functions."""
        return self._staged("lower", state, args)

    def trace(self, state: nnx.Module, *args: Any) -> Any:
        """As of jitted functions."""
        return self._staged("trace", state, args)

    def eval_shape(self, state: nnx.Module, *args: Any) -> Any:
        """As of jitted functions."""
        graph, values = nnx.split(state)
        return self._of(graph).eval_shape(values, *args)[1]

    def _staged(self, stage: str, state: nnx.Module, args: tuple[Any, ...]) -> Stage:
        made_for, values = nnx.split(state)

        def run(compiled: Any, state: nnx.Module, *args: Any) -> Any:
            graph, values = _split(state)
            if graph != made_for:
                raise ValueError(_STRUCTURE)
            values, info = compiled(values, *args)
            nnx.update(state, values)
            return info

        return Stage(getattr(self._of(made_for), stage)(values, *args), run)


def _split(node: nnx.Module) -> tuple[Any, Any]:
    """As ``nnx.split``. Takes up the cache of ``nnx.cached_partial``, which demands that."""
    with nnx.update_context("jax_hkv"):
        return nnx.split(node)


def cacheable(step: Any) -> Any:
    """A step whose errors are its own under ``nnx.cached_partial``, whose cache it takes up then.

    Flax demands that somebody does, and would tell of that alone.
    """

    def taking_up(run: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        try:
            return run(*args, **named)
        except BaseException:
            with nnx.update_context("jax_hkv"):
                pass
            raise

    return StagedBy(step, taking_up)


def place(make: Callable[[], Model], placement: Placement) -> Model:
    """A model or a :class:`jax_hkv.nnx.TrainState` whose arrays lie on the devices of a placement.

    Args:
      make: returns it; called once for all devices, so that layers with an axis name know theirs.
      placement: where; tables are split, everything else is copied, and then, along axes of the
        mesh that are none of the placement's, split as it is annotated (``nnx.with_partitioning``).

    Raises:
      TypeError, ValueError: naming the argument, or the parameter that cannot be split so.
    """
    return nnx.merge(*_made("nnx.place", make, placement, Placement.create))


def abstract(make: Callable[[], nnx.Module], placement: Placement) -> tuple[Any, Any]:
    """What ``nnx.split`` returns of what :func:`place` would make: shapes, with nothing made.

    Orbax restores arrays into the shapes, and ``nnx.merge(graph, arrays)`` is the state then.

    Args:
      make: see :func:`place`.
      placement: where, by shard_map.

    Raises:
      TypeError, ValueError: as :func:`place`; with "pmap", as :meth:`Placement.abstract`.
    """
    return _made("nnx.abstract", make, placement, Placement.abstract)


def _made(
    call: str,
    make: Callable[[], Any],
    placement: Placement,
    on_all: Callable[[Placement, Callable[[], Any]], Any],
) -> tuple[Any, Any]:
    """The form and the arrays, or their shapes, of what a function makes on each device."""
    if isinstance(make, nnx.Module) or not callable(make):
        raise TypeError(
            f"{call}: make must be a function without arguments that returns the model, got "
            f"{type(make).__name__}: write lambda: Model(...)"
        )
    check_placement(call, placement)
    graphs = []

    def values() -> Any:
        graph, state = nnx.split(make())
        graphs.append(graph)
        return state

    with nnx.use_eager_sharding(False):  # on one device, of which there are all
        state = on_all(placement, values)
    return graphs[-1], _as_annotated(call, state, placement)


def _as_annotated(call: str, state: Any, placement: Placement) -> Any:
    """A state whose parameters are split along other axes than the tables as they are annotated."""
    if placement.mode == "pmap":
        return state
    mesh = placement.mesh
    own_axes = [name for name in placement.axes if mesh.shape[name] > 1]
    left_whole = []

    def one(path: Any, variable: Any, specs: Any) -> Any:
        spec, leaf = specs.get_value(), variable.get_value()
        names = names_in(spec or ())
        # What an optimizer keeps of a parameter's rows alone has its annotation, too.
        if not names or len(spec) > leaf.ndim:
            return variable
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        unknown = [name for name in names if name not in mesh.shape]
        if unknown:
            raise ValueError(
                f"{call}: {where} must be annotated with axes of the mesh, {list(mesh.shape)}, got "
                f"{list(names)}: make the mesh with {unknown[0]!r}, of one device if parameters "
                "are not to be split, or say by rules which axis a logical name is "
                "(nnx.with_partitioning(..., sharding_rules=))"
            )
        if any(name in own_axes for name in names):
            left_whole.append((where, names))
            return variable
        # Of the placement's own axes those that are left have one device, which splits nothing.
        others = tuple(name for name in names if name not in placement.axes)
        sharding = jax.sharding.NamedSharding(mesh, spec_along(others, spec))
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            if not isinstance(variable, nnx.Param):  # an optimizer's, of another shape
                return variable
            raise ValueError(
                f"{call}: {where} must be of a shape that its annotation splits evenly, got "
                f"{list(leaf.shape)} for {tuple(spec)} on a mesh {dict(mesh.shape)}: "
                "take another width, or annotate another axis"
            ) from error
        if isinstance(leaf, jax.ShapeDtypeStruct):
            own: Any = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        else:
            own = jax.device_put(leaf, sharding)
        return variable.replace(own)

    annotated = jax.tree_util.tree_map_with_path(
        one,
        state,
        nnx.get_partition_spec(state),
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    if left_whole:
        where, names = left_whole[0]
        others = f" (and {len(left_whole) - 1} more)" if left_whole[1:] else ""
        warn(
            f"{call}: {where}{others} is annotated to be split along {list(names)}, and tables and "
            f"batches are along {own_axes}: it is whole on each device; split parameters along "
            "another axis of the mesh"
        )
    return annotated


def run(fn: Callable[..., Any], placement: Placement) -> Callable[..., Any]:
    """A compiled evaluation on the devices of a placement.

    Args:
      fn: of (model, *batch), for one device, to arrays with a leading axis; it changes nothing.
      placement: of the model.

    Returns:
      A function of (model, *batch) to the arrays of all devices, one after the other (with
      "pmap", along a leading axis).
    """
    remedy = "model and batch go to the function that this returns"
    check_function("nnx.run", "fn", fn, "of (model, *batch) to arrays", remedy)
    check_placement("nnx.run", placement)

    @functools.lru_cache(maxsize=_MOST_PROGRAMS)
    def program_of(graph: Any) -> Any:
        return placement.run(lambda values, *own: fn(nnx.merge(graph, values), *own))

    def on_all(model: nnx.Module, *batch: Any) -> Any:
        graph, values = _split(model)
        return program_of(graph)(values, *batch)

    return on_all
