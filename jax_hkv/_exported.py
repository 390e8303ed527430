"""What an export of a table's entries is, on the host."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_hkv._keys import Keys, as_integers, check_unmasked, check_whose
from jax_hkv._namespaces import Namespace, from_array


class Exported(NamedTuple):
    """The entries of a table, on the host, and what they have in common.

    Attributes:
      keys: ``uint64[n]``.
      scores: ``uint64[n]``.
      values: ``[n, dim]``, of the table's type.
      optimizer: optimizer rows by name, ``[n, ...]`` each: of :func:`jax_hkv.optim.adam` "mu" and
        "nu"; of one of optax the ways to the leaves of its state, "0.mu" and "0.nu".
      shared: what rows share of the optimizer's state, by name.
      clock: the latest.
      epoch: the latest.
      counters: the sketch of :func:`jax_hkv.admission.frequency`, of all parts the highest ones.
      policy: the :class:`jax_hkv.Policy` that the scores are of, as an integer.
      namespace: of the keys of a collection's fused tables: their names, and the bits of a key that
        say whose it is, as text in ``uint8`` (or what a group has as `namespace`). None: keys are
        ids.
      seed: of the table's first rows, and of the places that keys have in `counters`, if that is
        known.
      part: of a job of several processes, which of them has exported its own, and how many there
        are; None: all entries, or nobody knows.
    """

    keys: np.ndarray
    scores: np.ndarray
    values: np.ndarray
    optimizer: dict[str, np.ndarray]
    shared: dict[str, np.ndarray]
    clock: int
    epoch: int
    counters: np.ndarray | None
    policy: int
    namespace: np.ndarray | Namespace | None = None
    seed: int | None = None
    part: tuple[int, int] | None = None

    def __repr__(self) -> str:
        """Without the entries."""
        if not isinstance(self.values, np.ndarray):  # a tree of something else
            return shown(self)
        return (
            f"Exported({len(self.keys):,} entries, {self.values.dtype}{list(self.values.shape)}, "
            f"optimizer={list(self.optimizer)}, policy={self.policy!r}, clock={self.clock!r})"
        )

    def columns(self) -> tuple[Any, ...]:
        """What there is of each entry: the first fields."""
        return self.keys, self.scores, self.values, self.optimizer

    def select(self, which: Any) -> Exported:
        """Some of the entries, with all that they have.

        Args:
          which: a mask, ``bool[n]``; or places, integers from 0 to n - 1, whose order is theirs.
            By ids there are :meth:`only` and :meth:`without`: NumPy compares ``uint64`` with other
            integers as floats, which round ids above 2^53.

        Raises:
          TypeError, ValueError: if it is neither.

        Example:
          >>> import jax_hkv as hkv
          >>> table, _ = hkv.insert_or_assign(
          ...     hkv.create(128, 1), np.array([7, 5, 6], np.int32), np.float32([[7], [5], [6]]))
          >>> exported = hkv.sharding.export_entries(table)
          >>> exported.select(np.argsort(exported.keys)).values.tolist()
          [[5.0], [6.0], [7.0]]
          >>> exported.select(exported.scores > 0).keys.size
          3
        """
        check_unmasked("Exported.select: which", which, "give which.filled(False), or its places")
        count, places = len(self.keys), np.asarray(which)
        got = f"{places.dtype}{list(places.shape)}"
        is_mask = places.dtype == np.bool_ and places.shape == (count,)
        are_places = places.dtype.kind in "iu" or (not places.size and places.dtype != np.bool_)
        if are_places and places.size and not 0 <= places.min() <= places.max() < count:
            are_places, got = False, f"{got} from {places.min()} to {places.max()}"
        if not (is_mask or (are_places and places.ndim == 1)):
            raise ValueError(
                f"Exported.select: which must be a mask, bool[{count}], or places below {count}, "
                f"got {got}: compare scores, or values; by ids there are only(keys) and "
                "without(keys)"
            )
        own = places if is_mask else places.astype(np.int64)
        columns = jax.tree.map(lambda leaf: leaf[own], self.columns())
        return Exported(*columns, *self[len(columns) :])

    def only(self, keys: Any) -> Exported:
        """The entries of some keys, as far as there are any, in the order that they have here.

        Args:
          keys: :class:`jax_hkv.Keys` of any shape, or ids, integers on the host. Of a collection's
            fused tables `group.keys(name, ids)`: ids alone do not say whose they are.

        Raises:
          TypeError: if they are something else.

        Example:
          >>> import jax_hkv as hkv
          >>> table, _ = hkv.insert_or_assign(
          ...     hkv.create(128, 1), np.array([7, -5], np.int32), np.float32([[7], [5]]))
          >>> hkv.sharding.export_entries(table).only([-5, 6]).values.tolist()
          [[5.0]]
        """
        return self.select(are_among(self.keys, given_keys("Exported.only", self, keys)))

    def without(self, keys: Any) -> Exported:
        """All entries but those of some keys: of ids that must go.

        Args:
          keys: see :meth:`only`.

        Raises:
          TypeError: if they are something else.

        Example:
          >>> import jax_hkv as hkv
          >>> table, _ = hkv.insert_or_assign(
          ...     hkv.create(128, 1), np.array([7, -5], np.int32), np.float32([[7], [5]]))
          >>> exported = hkv.sharding.export_entries(table)
          >>> exported.without([-5, 6]).keys.tolist()
          [7]
        """
        return self.select(~are_among(self.keys, given_keys("Exported.without", self, keys)))


def namespace_of(exported: Exported) -> Namespace | None:
    given = exported.namespace
    return given if given is None or isinstance(given, Namespace) else from_array(given)


def as_part(given: Any) -> tuple[int, int] | None:
    """A `part` as it was exported: a file or a checkpoint has made arrays of its numbers."""
    if given is None:
        return None
    number, count = map(operator.index, given)
    return number, count


def check_part(call: str, argument: str, part: Any) -> None:
    """Raises unless it is a process and how many there are, or None."""
    try:
        pair = as_part(part)
    except (TypeError, ValueError):
        pair = 0, 0
    if pair is not None and not 0 <= pair[0] < pair[1]:
        raise TypeError(
            f"{call}: {argument}.part must be the number of a process and that of all of them, "
            f"or None, got {part!r}: leave it as it was exported"
        )


def are_among(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which keys are among others, as words of 64 bits: those of an export may be signed."""
    own, asked = (part.astype(np.uint64, copy=False) for part in (keys, others))
    return np.isin(own, asked, kind="sort")  # NumPy 2.0's own choice fails from 2^63 on


def shown(fields: Any) -> str:
    """What a named tuple is shown as that shows itself otherwise."""
    own = ", ".join(f"{name}={value!r}" for name, value in fields._asdict().items())
    return f"{type(fields).__name__}({own})"


def given_keys(call: str, exported: Exported, keys: Any) -> np.ndarray:
    """Keys of a caller as exports have them, in order."""
    if not isinstance(keys, Keys):
        check_whose(call, "keys", keys, namespace_of(exported))
        keys = Keys.from_numpy(as_integers(keys, f"{call}: keys"))
    return np.unique(keys.to_numpy())
