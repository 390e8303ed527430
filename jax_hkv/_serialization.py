"""Tables, keys and results as arguments and results of programs that `jax.export` writes.

Such a program carries the structure of its arguments, of which JAX must be told how to write what
is static of each class. It is written as JSON, and read by whoever imports jax_hkv.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax.export

from jax_hkv import admission, features, index, initializers, metrics, pooled, table
from jax_hkv._keys import Keys
from jax_hkv._namespaces import Namespace
from jax_hkv.table import OptimizerRows

_NODES = (Keys, admission.Admission, features.Jagged, features.Padded, index.Index, table.Table)
_RESULTS = (
    features.Unique,
    index.Groups,
    metrics.Metrics,
    pooled.PooledFindResult,
    table.Bags,
    table.Counts,
    table.Entries,
    table.EraseResult,
    table.FindResult,
    table.InsertResult,
    table.ScoredFindResult,
    table.WriteResult,
)
_OF_FIELDS = {
    kind.__name__: kind
    for kind in (admission.Frequency, admission.Probability, initializers.Initializer, Namespace)
}


def written(settings: tuple[Any, ...]) -> bytes:
    """What is static of a node of a pytree.

    Example:
      >>> settings = index.Policy.LFU, 2, "users", initializers.zeros()
      >>> read(written(settings)) == settings
      True
    """
    return json.dumps([_as_json(setting) for setting in settings]).encode()


def read(text: bytes) -> tuple[Any, ...]:
    """What :func:`written` made text of."""
    return tuple(_from_json(setting) for setting in json.loads(text))


def _as_json(setting: Any) -> Any:
    if isinstance(setting, index.Policy):
        return {"Policy": setting.name}
    if type(setting).__name__ in _OF_FIELDS:
        return {type(setting).__name__: dataclasses.asdict(setting)}
    return setting


def _from_json(setting: Any) -> Any:
    if not isinstance(setting, dict):
        return setting
    ((kind, value),) = setting.items()
    return index.Policy[value] if kind == "Policy" else _OF_FIELDS[kind](**value)


def _refused(_: Any) -> Any:
    raise ValueError(
        "jax.export: a table among the arguments or results has optimizer rows, and optimizer "
        "rows cannot be written: export a program for the table without them, "
        "dataclasses.replace(table, optimizer=None), or give it the leaves of jax.tree.flatten"
    )


def _register(call: Callable[..., Any], kind: type, **functions: Any) -> None:
    with contextlib.suppress(ValueError):  # whoever imports it anew has registered it before
        call(kind, serialized_name=f"jax_hkv.{kind.__name__}", **functions)


for node in _NODES:
    _register(
        jax.export.register_pytree_node_serialization,
        node,
        serialize_auxdata=written,
        deserialize_auxdata=read,
    )
for result in _RESULTS:
    _register(jax.export.register_namedtuple_serialization, result)
_register(
    jax.export.register_pytree_node_serialization,
    OptimizerRows,
    serialize_auxdata=_refused,
    deserialize_auxdata=_refused,
)
