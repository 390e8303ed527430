"""Who owns the keys of a table over devices, and how a batch of all of them meets it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jax_hkv import _checks, _ffi
from jax_hkv._compat import agreed, over
from jax_hkv._keys import as_keys, check_fixed

_DIGIT = 16  # values of a digit, when the number of an owner is found digit by digit


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Exchange:
    """How a batch that is spread over devices meets a table that is spread over them.

    Wherever an axis name is asked for, an exchange can be given, to say more than the name.

    Attributes:
      axis_name: of the mesh axis, or several from the outermost to the innermost. With several, the
        keys go along the innermost axis first (within a node), are merged there, and then along the
        others, so that a device sends one message to each other node.
      replicas: whether every device holds the whole table, and all do the same to it, instead of a
        part of it; or how many whole tables the devices hold together, each split along the last
        axes by keys: as many as there are devices along the first ones, which hold the same. It
        says so of the table that a layer makes. What a table was made as
        (``jax_hkv.create(replicas=True)``) it is in every call, which need not repeat it.
      distinct: expected distinct keys of a device's batch, by its positions: above 0, up to 1. Room
        for keys, and so the bytes exchanged, are proportional to it; see
        :func:`jax_hkv.sharding.distinct_in`.
      slack: room for keys of one peer, by their expected number (beside six standard deviations):
        above 0.
      strict: whether more keys than there is room for are an error. Otherwise they cost a second
        round, slower and with room for all.
      deduplicate: whether equal keys are merged before they are sent. Those with counts of their
        own (`scores` under LFU and EPOCH_LFU) and those of `accum_or_assign` never are.
      partial: whether owners of pooled features return a sum for each bag, not a row for each key;
        None: where that moves fewer bytes. Of replicas they return rows where they train.
      ragged: whether rows travel by ``jax.lax.ragged_all_to_all``, which XLA has for GPUs only, and
        which moves no room that is not used; see docs/sharding.md for what it costs.
      levels: with several axes, whether keys go axis by axis; otherwise along all of them at once.
    """

    axis_name: str | tuple[str, ...]
    replicas: bool | int = False
    distinct: float = 1.0
    slack: float = 1.0
    strict: bool = False
    deduplicate: bool = True
    partial: bool | None = None
    ragged: bool = False
    levels: bool = True

    def __post_init__(self) -> None:
        names = (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        if not isinstance(names, (tuple, list)) or not names or not all(map(_is_name, names)):
            raise TypeError(
                "sharding.Exchange: axis_name must be the name of a mesh axis, or a tuple of such, "
                f"got {self.axis_name!r}"
            )
        if len(set(names)) < len(names):
            raise ValueError(f"sharding.Exchange: axis_name names an axis twice: {names}")
        object.__setattr__(self, "axis_name", tuple(names))
        replicas = _checks.as_replicas("sharding.Exchange", self.replicas)
        object.__setattr__(self, "replicas", replicas)
        for flag in ("strict", "deduplicate", "levels", "partial", "ragged"):
            value, optional = getattr(self, flag), flag == "partial"
            if optional and value is None:
                continue
            expected = f"True or False{' or None' * optional}"
            value = _checks.as_bool("sharding.Exchange", flag, value, expected)
            object.__setattr__(self, flag, value)
        _check_number("distinct", self.distinct, 1.0)
        _check_number("slack", self.slack, math.inf)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        assert isinstance(self.axis_name, tuple)
        return self.axis_name

    @property
    def devices(self) -> int:
        """How many devices take part; inside shard_map or pmap."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis; inside shard_map or pmap."""
        try:
            return tuple(int(jax.lax.axis_size(name)) for name in self.axes)
        except NameError as error:
            raise NameError(
                f"jax_hkv: no mesh axis {self.axes} is bound here: a table over several devices is "
                "used inside jax.shard_map or jax.pmap over that axis; "
                "jax_hkv.sharding.Placement(mesh).step(fn) and .run(fn) run a function so, and "
                "train_step(..., placement=placement) a step of a model, along the placement's own "
                "axes alone"
            ) from error

    @property
    def copied(self) -> tuple[str, ...]:
        """The first axes, along which devices hold the same; inside shard_map or pmap."""
        return _checks.copied_axes("sharding.Exchange", self.replicas, self.axes, self.sizes)

    @property
    def split(self) -> tuple[str, ...]:
        """The other axes, along which a table is split by keys; inside shard_map or pmap."""
        return self.axes[len(self.copied) :]

    @property
    def parts(self) -> int:
        """How many parts a table, or each of its replicas, has; inside shard_map or pmap."""
        return math.prod(self.sizes[len(self.copied) :])

    def of_all(self, counts: Any) -> Any:
        """The counts of all devices, of what each has counted as an owner; replicas count once."""
        return agreed(over(self.split, jax.lax.psum, counts), self.copied)

    def of_reads(self) -> Exchange:
        """As it is for lookups of which nobody is told that keys overflowed: all get their rows."""
        return dataclasses.replace(self, strict=False)

    def local_capacity(self, capacity: int) -> int:
        """Entries that one device holds of a table of so many; inside shard_map or pmap.

        Of a table that every device has wholly it need not be known how many there are.
        """
        return capacity if self.replicas is True else -(-capacity // self.parts)


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and name != ""


def _check_number(argument: str, value: Any, most: float) -> None:
    if not _checks.is_number(value) or not 0 < float(value) <= most:
        raise ValueError(
            f"sharding.Exchange: {argument} must be a number above 0"
            f"{'' if most == math.inf else f' and up to {most:g}'}, got {value!r}"
        )


def as_exchange(axis_name: Any) -> Exchange | None:
    """What a caller gave as an axis name: an exchange, or None for a table of one device."""
    if axis_name is None or isinstance(axis_name, Exchange):
        return axis_name
    return Exchange(axis_name)


def owners(keys: Any, devices: int) -> Int32[Array, "*batch"]:
    """Which device's part of a table each key lives in (docs/semantics.md, "Who owns a key").

    Args:
      keys: of any shape: Keys, or an integer array.
      devices: that the table is spread over.

    Returns:
      ``int32`` of the keys' shape, 0 to ``devices - 1``: positions along the mesh axis (along
      several axes: with the last one fastest).

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> owners(jnp.array([1, 2, 3, 4]), 2).shape
      (4,)
    """
    return _owners("sharding.owners", keys, devices)


def _owners(call: str, keys: Any, devices: int) -> Int32[Array, "*batch"]:
    given = as_keys(call, "keys", keys)
    check_fixed(call, "keys", given.shape)
    devices = _checks.as_integer(call, "devices", devices, 1, 2**20)
    flat = given.reshape(-1)
    count = max(1, flat.shape[0])
    valid = jnp.ones(flat.shape, jnp.bool_)
    owner, inner = jnp.zeros(flat.shape, jnp.int32), 1
    while inner < devices:  # digit by digit: a place for each key and value of a digit is made
        _, places, _ = _ffi.call(
            "route_keys", flat.words, valid, devices=devices, inner=inner, p=_DIGIT, c=count
        )
        owner = owner + places // jnp.int32(count) * jnp.int32(inner)
        inner *= _DIGIT
    return owner.reshape(given.shape)


def distinct_in(keys: Any, valid: Any = None) -> float:
    """The distinct keys of a batch by its positions: what `distinct` of an :class:`Exchange` wants.

    Measure it on some batches of one device, and take the highest.

    Args:
      keys: of one device's batch, of any shape, with known values.
      valid: ``bool`` of their shape, False for padding; None: all are valid.

    Raises:
      TypeError: naming the argument.

    Example:
      >>> distinct_in(np.array([7, 7, 7, 8], np.int32))
      0.5
    """
    words = np.asarray(as_keys("sharding.distinct_in", "keys", keys).reshape(-1).words)
    mask = np.asarray(_checks.as_flat_mask("sharding.distinct_in", "valid", valid, keys.shape))
    return max(1, len(np.unique(words[mask], axis=0))) / max(1, len(words))


def skew_in(keys: Any, devices: int, valid: Any = None) -> float:
    """The positions of a batch that go to the busiest owner, by their mean over owners.

    Where equal keys are not merged (pooled features whose owners return sums,
    `accum_or_assign`), the `slack` of an :class:`Exchange` wants it; measure it on some batches of
    one device, and take the highest.

    Args:
      keys: of one device's batch, of any shape, with known values.
      devices: that the table is spread over.
      valid: ``bool`` of their shape, False for padding; None: all are valid.

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> skew_in(np.array([7, 7, 7, 7], np.int32), 4)
      4.0
    """
    call = "sharding.skew_in"
    owner = np.asarray(_owners(call, keys, devices)).reshape(-1)
    mask = np.asarray(_checks.as_flat_mask(call, "valid", valid, keys.shape))
    counts = np.bincount(owner[mask], minlength=devices)
    return float(max(1, counts.max()) / max(1.0, counts.mean()))
