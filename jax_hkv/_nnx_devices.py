"""Models of flax.nnx on the devices of a placement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from jax_hkv._checks import check_function
from jax_hkv._digest import names_in
from jax_hkv._placement import Placement, check_placement

Model = TypeVar("Model", bound=nnx.Module)


class Placed:
    """A step on all devices of a placement: a function of the state's arrays, and back into it.

    Args:
      placement: of the state.
      step: of (state, *args), on one device; changes the state and returns a report.
      donate: whether the state's arrays are used up.
    """

    def __init__(self, placement: Placement, step: Callable[..., Any], donate: bool):
        self._placement = placement
        self._step = step
        self._donate = donate
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: nnx.Module, *args: Any) -> Any:
        graph, values = _split(state)
        values, info = self._of(graph)(values, *args)
        nnx.update(state, values)
        return info

    def lower(self, state: nnx.Module, *args: Any) -> Any:
        """As of jitted functions."""
        graph, values = nnx.split(state)
        return self._of(graph).lower(values, *args)

    def _of(self, graph: Any) -> Any:
        if graph not in self._compiled:

            def pure(values: Any, *args: Any) -> tuple[Any, Any]:
                state = nnx.merge(graph, values)
                info = self._step(state, *args)
                return nnx.split(state)[1], info

            self._compiled[graph] = self._placement.step(pure, donate=self._donate)
        return self._compiled[graph]


def _split(node: nnx.Module) -> tuple[Any, Any]:
    """As ``nnx.split``. Takes up the cache of ``nnx.cached_partial``, which demands that."""
    with nnx.update_context("jax_hkv"):
        return nnx.split(node)


def cacheable(step: Any) -> Any:
    """A step whose errors are its own under ``nnx.cached_partial``, whose cache it takes up then.

    Flax demands that somebody does, and would tell of that alone.
    """

    @functools.wraps(step, updated=())
    def taking_up(state: Any = None, /, *args: Any, **named: Any) -> Any:
        try:
            return step(state, *args, **named)
        except BaseException:
            with nnx.update_context("jax_hkv"):
                pass
            raise

    taking_up.lower = step.lower  # pyright: ignore[reportAttributeAccessIssue]
    return taking_up


def place(make: Callable[[], Model], placement: Placement) -> Model:
    """A model or a :class:`jax_hkv.nnx.TrainState` whose arrays lie on the devices of a placement.

    Args:
      make: returns it; called once for all devices, so that layers with an axis name know theirs.
      placement: where; tables are split, everything else is copied.
    """
    if isinstance(make, nnx.Module) or not callable(make):
        raise TypeError(
            "nnx.place: make must be a function without arguments that returns the model, got "
            f"{type(make).__name__}: write lambda: Model(...)"
        )
    check_placement("nnx.place", placement)
    graphs = []

    def values() -> Any:
        graph, state = nnx.split(make())
        graphs.append(graph)
        return state

    with nnx.use_eager_sharding(False):  # on one device, of which there are all
        state = placement.create(values)
    return nnx.merge(graphs[-1], _as_annotated(state, placement))


def _as_annotated(state: Any, placement: Placement) -> Any:
    """A state whose parameters are split along other axes than the tables as they are annotated."""
    if placement.mode == "pmap":
        return state
    others = set(placement.mesh.axis_names) - set(placement.axes)

    def put(leaf: Any, sharding: Any) -> Any:
        names = names_in(sharding.spec)
        return jax.device_put(leaf, sharding) if names and others.issuperset(names) else leaf

    def one(variable: Any, shardings: Any) -> Any:
        sharding = shardings.get_value()
        is_split = isinstance(sharding, jax.sharding.NamedSharding)
        return variable.replace(put(variable.get_value(), sharding)) if is_split else variable

    shardings = nnx.get_named_sharding(state, placement.mesh)
    return jax.tree.map(one, state, shardings, is_leaf=lambda node: isinstance(node, nnx.Variable))


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
    compiled: dict[Any, Any] = {}

    def on_all(model: nnx.Module, *batch: Any) -> Any:
        graph, values = _split(model)
        if graph not in compiled:
            compiled[graph] = placement.run(lambda values, *own: fn(nnx.merge(graph, values), *own))
        return compiled[graph](values, *batch)

    return on_all
