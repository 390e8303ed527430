"""What an export of a table's entries is, on the host."""

from __future__ import annotations

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
            Of ids ``np.isin(exported.keys, jax_hkv.Keys.from_numpy(ids).to_numpy())``: NumPy
            compares ``uint64`` with other integers as floats, which round ids above 2^53; all but
            those of some ids: :meth:`without`.

        Raises:
          TypeError, ValueError: if it is neither.

        Example:
          >>> import jax_hkv as hkv
          >>> table, _ = hkv.insert_or_assign(
          ...     hkv.create(128, 1), np.array([7, 5, 6], np.int32), np.float32([[7], [5], [6]]))
          >>> exported = hkv.sharding.export_entries(table)
          >>> exported.select(np.argsort(exported.keys)).values.tolist()
          [[5.0], [6.0], [7.0]]
          >>> exported.select(np.isin(exported.keys, np.uint64([5, 6]), invert=True)).keys.tolist()
          [7]
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
                f"got {got}: compare keys or scores; of ids np.isin(exported.keys, "
                "jax_hkv.Keys.from_numpy(ids).to_numpy())"
            )
        own = places if is_mask else places.astype(np.int64)
        columns = jax.tree.map(lambda leaf: leaf[own], self.columns())
        return Exported(*columns, *self[len(columns) :])

    def without(self, keys: Any) -> Exported:
        """All entries but those of some keys: of ids that must go.

        Args:
          keys: :class:`jax_hkv.Keys` of any shape, or ids, integers on the host. Of a collection's
            fused tables `group.keys(name, ids)`: ids alone do not say whose they are.

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
        gone = keys_to_go("Exported.without", self, keys)
        return self.select(~are_among(self.keys, gone))


def namespace_of(exported: Exported) -> Namespace | None:
    given = exported.namespace
    return given if given is None or isinstance(given, Namespace) else from_array(given)


def are_among(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which keys are among others; NumPy 2.0 needs to be told how for those of 2^63 and above."""
    return np.isin(keys, others, kind="sort")


def shown(fields: Any) -> str:
    """What a named tuple is shown as that shows itself otherwise."""
    own = ", ".join(f"{name}={value!r}" for name, value in fields._asdict().items())
    return f"{type(fields).__name__}({own})"


def keys_to_go(call: str, exported: Exported, keys: Any) -> np.ndarray:
    """Keys of a caller as exports have them, in order."""
    check_whose(call, "keys", keys, namespace_of(exported))
    if not isinstance(keys, Keys):
        keys = Keys.from_numpy(as_integers(keys, f"{call}: keys"))
    return np.unique(keys.to_numpy())
