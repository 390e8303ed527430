"""Counts of many tables in one array: by themselves each is a kernel's and an output of a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jax_hkv._compat import is_traced
from jax_hkv.table import Counts

_KINDS = len(Counts._fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TableCounts(Mapping[str, Counts]):
    """What became of the ids of each table, by its name.

    Attributes:
      numbers: ``int32[..., tables, 6]``, of each table those of :class:`jax_hkv.Counts`, in order.
      names: static, of the tables.
    """

    numbers: Int32[Array, "*stack tables kinds"]
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    def __getitem__(self, name: str) -> Counts:
        """The counts of a table: of an array that is known, all come to the host together."""
        if name not in self.names:
            raise KeyError(f"{name!r}: there are counts of the tables {list(self.names)}")
        if self.numbers.shape[-2:] != (len(self.names), _KINDS):
            raise ValueError(
                f"info.counts: numbers must be [..., {len(self.names)}, {_KINDS}], of each table "
                f"its counts, got {list(self.numbers.shape)}: stack them along leading axes"
            )
        number = self.names.index(name)
        if isinstance(self.numbers, jax.ShapeDtypeStruct):
            shape: Any = jax.ShapeDtypeStruct(self.numbers.shape[:-2], self.numbers.dtype)
            return Counts(*[shape] * _KINDS)
        own = self._on_host()[..., number, :]
        return Counts(*(own[..., kind] for kind in range(_KINDS)))

    def _on_host(self) -> Any:
        if is_traced(self.numbers) or not isinstance(self.numbers, jax.Array):
            return self.numbers
        # No cached_property: that of Python 3.11 waits for the device with a lock of the class.
        known = self.__dict__.get("_known")
        if known is None:
            known = np.asarray(self.numbers)
            object.__setattr__(self, "_known", known)
        return known

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"TableCounts({self.numbers!r}, names={self.names!r})"

    def under(self, scope: str) -> TableCounts:
        """Those of tables whose names begin with that of a layer."""
        if not scope:
            return self
        return TableCounts(self.numbers, tuple(f"{scope}/{name}" for name in self.names))


def of_one(name: str, counts: Counts) -> TableCounts:
    """The counts of a table alone, stacked ones as well."""
    return TableCounts(jnp.stack(counts, axis=-1)[..., None, :], (name,))


def total(parts: Iterable[TableCounts]) -> Mapping[str, Counts]:
    """The sums of those of several lookups; a scan may have stacked them."""
    flat = [
        (part.names, jnp.sum(part.numbers.reshape(-1, len(part.names), _KINDS), 0, jnp.int32))
        for part in parts
    ]
    if not flat:
        return {}
    names = tuple(dict.fromkeys(name for own, _ in flat for name in own))
    if all(own == names for own, _ in flat):
        return TableCounts(functools.reduce(jnp.add, (numbers for _, numbers in flat)), names)
    joined = jnp.concatenate([numbers for _, numbers in flat])
    places = [names.index(name) for own, _ in flat for name in own]
    if len(places) > len(names):  # a table that several layers look up
        joined = jnp.zeros((len(names), _KINDS), jnp.int32).at[np.array(places)].add(joined)
    return TableCounts(joined, names)
