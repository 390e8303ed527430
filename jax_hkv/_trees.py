"""Pytrees whose leaves have in their names what they cannot be read without.

Checkpoints hold arrays under the names of leaves; what is static comes from the target that they
are restored into. So the name of an array of scores says which policy's they are: a target of
another policy has no leaf of that name, and whoever restores (Orbax, flax.serialization) refuses.
What is restored in part leaves out what has other names. So all arrays of an index, and all parts
of a table, have a code of what is static there in their names: none is put together of two that
were made otherwise (an index that is left out is that of a table without entries).
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import zlib
from typing import Any, TypeVar

import jax

Node = TypeVar("Node")


def static(*, told_by: str | None = None) -> Any:
    """A static field of a dataclass; `told_by`: the field whose leaf has it in its name."""
    return dataclasses.field(metadata={"static": True, "told_by": told_by})


def register(kind: type[Node]) -> type[Node]:
    """Registers a dataclass as a pytree, like `jax.tree_util.register_dataclass`.

    What its `_identity` returns, if it has one, stands in the names of all leaves, as a code.

    Example:
      >>> @register
      ... @dataclasses.dataclass(frozen=True)
      ... class Scores:
      ...     words: Any
      ...     policy: str = static(told_by="words")
      >>> leaves = jax.tree_util.tree_leaves_with_path(Scores(1, policy="LRU"))
      >>> jax.tree_util.keystr(leaves[0][0])
      '.words(policy=LRU)'
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    others = [field for field in fields if field.metadata.get("static")]
    data = [field.name for field in fields if field not in others]
    assert [*data, *others] == [*data, *fields[len(data) :]], "static fields come last"
    all_of = operator.attrgetter(*(field.name for field in fields))
    count, has_identity = len(data), hasattr(kind, "_identity")

    def flatten(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values = all_of(node)
        return values[:count], values[count:]

    def name_of(node: Any, field: str, codes: list[str]) -> str:
        told = codes + [
            f"{other.name}={_shown(getattr(node, other.name))}"
            for other in others
            if other.metadata["told_by"] == field and _says(getattr(node, other.name))
        ]
        return f"{field}({', '.join(told)})" if told else field

    def flatten_with_keys(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, settings = flatten(node)
        codes = [f"{kind.__name__}={_code_of(node._identity())}"] if has_identity else []
        keys = [jax.tree_util.GetAttrKey(name_of(node, field, codes)) for field in data]
        return tuple(zip(keys, children, strict=True)), settings

    def unflatten(settings: tuple[Any, ...], children: Any) -> Any:
        return kind(*children, *settings)

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, unflatten, flatten)
    return kind


def _code_of(identity: tuple[Any, ...]) -> str:
    """Eight digits, so that names stay short enough for names of files."""
    return f"{zlib.crc32(repr([_shown(setting) for setting in identity]).encode()):08x}"


def _says(setting: Any) -> bool:
    """Whether a setting is one that names tell: None and False are what most have."""
    return setting is not None and setting is not False


def _shown(setting: Any) -> str:
    return setting.name if isinstance(setting, enum.Enum) else str(setting)
