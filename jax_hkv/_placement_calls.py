"""Compiled functions of a placement, which look first at what only the host sees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jax_hkv._checks import check_held_once, check_mesh, check_not_cut, check_not_used_up
from jax_hkv._compat import (
    check_elements,
    on_one_device,
    trace_state_clean,
    without_rematerialization,
)
from jax_hkv._placed import (
    check_bags,
    explicit_of,
    has_twins,
    is_batch_checked,
    is_from_host,
    is_one_key,
    is_shared,
    lies_nowhere,
    splits_along,
    warn_of_split,
)
from jax_hkv._stages import Stage, Staged

OTHER_MESH = "use the placement that it was made with, or move it by sharding.reshard"


class BySplits:
    """A jitted function of how its state is split along axes that are left to XLA, state, *batch.

    Args:
      jitted: that function; the first argument is static.
      axes: which are left.
    """

    def __init__(self, jitted: Any, axes: tuple[str, ...]):
        self._jitted = jitted
        self._axes = axes

    def _of(self, state: Any) -> Any:
        return splits_along(self._axes, state) if self._axes else None

    def __call__(self, state: Any, *batch: Any) -> Any:
        return self._jitted(self._of(state), state, *batch)

    def lower(self, state: Any, *batch: Any) -> Any:
        """As of jitted functions."""
        return self._jitted.lower(self._of(state), state, *batch)

    def trace(self, state: Any, *batch: Any) -> Any:
        """As of jitted functions."""
        return self._jitted.trace(self._of(state), state, *batch)

    def eval_shape(self, state: Any, *batch: Any) -> Any:
        """As of jitted functions."""
        return self._jitted.eval_shape(self._of(state), state, *batch)


class Checked(Staged):
    """A compiled function of (state, *batch) that looks first at what only the host sees."""

    _within = staticmethod(without_rematerialization)

    def __init__(self, placement: Any, call: str, compiled: Any, donates: bool = False):
        super().__init__(compiled)
        self._placement = placement
        self._call = call
        self._donates = donates
        self._is_first = True
        self._known_bags: set[Any] = set()  # shapes of what was looked at

    def _of(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state, *batch = self._by_position(args, kwargs)
        for leaf in jax.tree.leaves(batch):
            check_not_cut(self._call, leaf)
        placement = self._placement
        if placement.mode != "pmap":
            batch = placement.with_shardings(batch)
            leaves = jax.tree.leaves(state)
            if is_from_host(leaves) or any(map(lies_nowhere, leaves)):
                state = placement._from_host(self._call, state)
        with self._telling(state, batch):
            return super()._of(stage, (state, *batch), {})

    def _by_position(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if not args or kwargs:
            raise TypeError(
                f"{self._call}: the state and the batch must be given by position, got "
                f"{sorted(kwargs) or 'nothing'}{' by name' * bool(kwargs)}: call it with "
                "(state, *batch)"
            )
        return args

    def _run(self, run: Any, /, *args: Any, **kwargs: Any) -> Any:
        state, *batch = self._by_position(args, kwargs)
        leaves = jax.tree.leaves(state)
        # Not left to JAX: jaxlib ends the process there, on a mesh of CPU devices.
        check_not_used_up(self._call, leaves)
        if self._donates and has_twins(leaves):
            check_held_once(self._call, state, "state")
        for leaf in jax.tree.leaves(batch):
            check_not_cut(self._call, leaf)
        check_elements(self._call, batch)
        placement, bags = self._placement, set()
        if placement._must_put and not is_batch_checked():
            placement.check_put(self._call, batch)
        if placement.mode != "pmap":
            bags = check_bags(self._call, batch, placement.devices, self._known_bags)
            if is_from_host(leaves):
                state = placement._from_host(self._call, state)
            elif self._is_first:
                warn_of_split(self._call, state, placement)
        with self._telling(state, batch):
            outputs = run(state, *batch)
        self._is_first = False
        if trace_state_clean():  # a program that is only made tells nothing of its bags
            self._known_bags |= bags
        return outputs

    @contextlib.contextmanager
    def _telling(self, state: Any, batch: Sequence[Any]) -> Iterator[None]:
        """Where errors of JAX are told in terms of the placement."""
        placement = self._placement
        try:
            yield
        except (ValueError, KeyError) as error:
            if placement.mode != "pmap":
                mesh, put = placement.mesh, "give placement.put(batch)"
                check_mesh(self._call, "state", state, mesh, OTHER_MESH, cause=error)
                check_mesh(self._call, "arguments", batch, mesh, put, cause=error)
            # Of Explicit axes JAX's own error speaks of in_specs, or of another mesh's axes.
            if explicit_of(placement.mesh, placement.axes):
                placement.check_put(self._call, batch, error)
            if "evenly divi" in str(error):  # evenly divisible, or divide
                error.add_note(
                    f"{self._call}: the leading axis of every array of a batch must be a multiple "
                    f"of the {placement.devices} devices: pad it, with a mask (valid=) that says "
                    f"so; of bags Jagged.for_parts({placement.devices}, capacity=, batch=) makes it"
                )
            raise


class Pmapped:
    """A pmapped function of (state, *batch), and what is done with its outputs."""

    def __init__(
        self,
        placement: Any,
        call: str,
        fn: Any,
        finish: Any = None,
        *,
        donate: bool = False,
    ):
        self._placement = placement
        self._call = call
        self._fn = fn
        self._finish = finish
        self._donate = donate
        self._compiled: dict[Any, Any] = {}

    def __call__(self, state: Any, *batch: Any) -> Any:
        with on_one_device():
            return self._finished(self._of(state, batch), state, *batch)

    def lower(self, state: Any, *batch: Any) -> Any:
        """As of jitted functions."""
        with on_one_device():
            lowered = self._of(state, batch).lower(state, *batch)
        return Stage(lowered, self._finished, on_one_device)

    def trace(self, state: Any, *batch: Any) -> Any:
        """There is none."""
        raise TypeError(f'{self._call}: "pmap" has no trace nor eval_shape: take lower')

    eval_shape = trace

    def _finished(self, run: Any, state: Any, *batch: Any) -> Any:
        outputs = run(state, *batch)
        return outputs if self._finish is None else self._finish(outputs)

    def _of(self, state: Any, batch: tuple[Any, ...]) -> Any:
        local = (len(self._placement.local_devices),)
        self._placement.check_tables(self._call, state, local)
        tree = jax.tree.structure(batch)
        axes = tuple(
            None if is_shared(node) else 0
            for node in jax.tree.leaves(batch, is_leaf=is_one_key)
            for _ in jax.tree.leaves(node)
        )
        if (tree, axes) not in self._compiled:
            self._placement._check_counts(self._call, batch)
            self._compiled[tree, axes] = jax.pmap(
                self._fn,
                axis_name=self._placement.axes[0],
                in_axes=(0, *jax.tree.unflatten(tree, axes)),
                devices=self._placement._pmapped,
                donate_argnums=(0,) if self._donate else (),
            )
        return self._compiled[tree, axes]
