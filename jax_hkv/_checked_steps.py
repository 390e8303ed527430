"""Training steps that look at their arguments, and at their report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_hkv import sharding
from jax_hkv._checks import as_bool, check_held_once, check_not_used_up
from jax_hkv._compat import is_traced, without_rematerialization
from jax_hkv._host_checks import check_host
from jax_hkv._layers import StepInfo
from jax_hkv._placed import are_sound, check_parts, of_checked_batch
from jax_hkv._placement import Placement
from jax_hkv._stages import StagedBy

_LATE = (
    "copy it before (copy.deepcopy(state); nnx.clone makes no copy), or make the step with "
    "donate=False; of a step that was interrupted (Ctrl-C) nothing came: go back to a checkpoint"
)


def host_checked(
    jitted: Any,
    kind: type,
    info_of: Callable[[Any], StepInfo],
    placement: Placement | None,
    micro_batches: int,
    check_overflow: bool,
    values_of: Callable[[Any], Any] = lambda state: state,
) -> Any:
    """A jitted training step that looks at its arguments, and at its report.

    Args:
      jitted: of (state, *args).
      kind: of the state.
      info_of: the report in what `jitted` returns.
      placement: of the state.
      micro_batches: parts of a batch.
      check_overflow: whether it looks at its report.
      values_of: a state's arrays.
    """
    check_overflow = as_bool("train_step", "check_overflow", check_overflow)
    is_new = placement is None  # until a state with entries has been seen
    devices = 1 if placement is None else placement.devices
    is_stacked = placement is not None and placement.mode == "pmap"
    known_bags: set[Any] = set()  # shapes of what was looked at

    def look(args: Any, named: Any) -> None:
        _check_state(args[0] if args else None, kind, named)
        check_host("train_step", args[1:], micro_batches)

    def checked(run: Callable[..., Any], state: Any = None, /, *args: Any, **named: Any) -> Any:
        nonlocal is_new
        _check_state(state, kind, named)
        is_known = is_new and are_sound("train_step", values_of(state))
        if placement is not None:
            placement.check_put("train_step", args)
        check_host("train_step", args, micro_batches)
        bags = check_parts("train_step", args, devices, micro_batches, is_stacked, known_bags)
        try:
            with of_checked_batch():
                outputs = run(state, *args)
        except Exception as error:
            kind_of_error, text = type(error).__name__, str(error)
            if "deleted" in text:  # found out here, where it costs no walk of the state
                check_not_used_up("train_step", jax.tree.leaves(values_of(state)), "state", _LATE)
            # The one in linen, the other, which is of Flax, in nnx.
            if kind_of_error in ("UnexpectedTracerError", "TraceContextError"):
                error.add_note(
                    "train_step: if loss_fn called a layer inside a transformation of JAX "
                    "(jit, checkpoint, lax.scan, cond or map), its table could not come back: "
                    "call it outside, once with the whole batch, and transform what comes after "
                    "the rows, or take Flax's own (nn.remat, nn.jit; nnx.remat, nnx.jit). "
                    "And in nnx loss_fn is to call its argument, not the model outside of it"
                )
            elif "donate the same buffer" in text:
                check_held_once("train_step", values_of(state), "state")
            elif "donated" in text:
                error.add_note(
                    "train_step: an argument must not hold arrays of the state, which a step uses "
                    "up: give copies (copy.deepcopy; nnx.clone makes none), or make the step with "
                    "donate=False"
                )
            elif kind_of_error.startswith("Tracer") or (
                "Error interpreting argument to" in text and "train_step.<locals>" in text
            ):
                error.add_note(
                    "train_step: arguments of a step are arrays, traced in loss_fn. If Python "
                    "decides by one (a flag, a number of turns, a name), it belongs to loss_fn: "
                    "make a step for each, train_step(functools.partial(loss_fn, flag=True))"
                )
            raise
        known_bags.update(bags)
        is_new = is_new and not is_known
        for where, overflow in info_of(outputs).strict_overflow.items():
            if check_overflow and not is_traced(overflow):  # in a scan its report tells
                sharding.check_overflow(overflow, where, outputs)
        return outputs

    return StagedBy(jitted, checked, look, without_rematerialization)


def _check_state(state: Any, kind: type, named: dict[str, Any]) -> None:
    if named:
        raise TypeError(
            "train_step: the state and the arguments must be given by position, got "
            f"{sorted(named)} by name: call step(state, *args)"
        )
    if not isinstance(state, kind):
        expected, got = (f"{each.__module__}.{each.__name__}" for each in (kind, type(state)))
        remedy = f"with a state of {kind.__module__}"
        if isinstance(state, tuple):  # what a step returned, most likely
            remedy = "which returns a new state and a report: state, info = step(state, *args)"
            if kind.__module__.endswith("nnx"):
                remedy = "which changes its state and returns a report: info = step(state, *args)"
        raise TypeError(
            f"train_step: state must be a {expected}, got {got}: call step(state, *args) of "
            f"{kind.__module__}.train_step, {remedy}"
        )
