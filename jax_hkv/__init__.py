"""Dynamic embedding tables with cache semantics for JAX."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from jax_hkv import _serialization as _serialization
from jax_hkv import admission, initializers, metrics, optim, sharding, testing, tiered
from jax_hkv._ffi import CUSTOM_CALLS
from jax_hkv._groups import Group
from jax_hkv._growth import grow
from jax_hkv._host_checks import checked
from jax_hkv._keys import Keys, equal, less, less_equal
from jax_hkv._options import Combiner, Fill
from jax_hkv._sampling import Sampled, sample
from jax_hkv.collection import Collection, Feature, TableConfig
from jax_hkv.features import Jagged, Padded, Unique, unique
from jax_hkv.index import Groups, Index, Policy, Status, is_new
from jax_hkv.operations import (
    ROWS_NAME,
    accum_or_assign,
    assign,
    clear,
    contains,
    erase,
    export_keys,
    find,
    find_or_insert,
    import_batch,
    initial_rows,
    insert_and_evict,
    insert_or_assign,
)
from jax_hkv.pooled import PooledFindResult, find_or_insert_pooled, find_pooled, pool
from jax_hkv.table import (
    Bags,
    Counts,
    Entries,
    EraseResult,
    FindResult,
    InsertResult,
    ScoredFindResult,
    Table,
    WriteResult,
    create,
)
from jax_hkv.whole_table import (
    advance_epoch,
    erase_if,
    expire,
    export_batch,
    export_batch_if,
    halve_sightings,
    load_factor,
    misplaced,
    resize,
    size,
    size_if,
    zero_empty_rows,
)

if TYPE_CHECKING:
    from jax_hkv import launch as launch
    from jax_hkv import linen as linen
    from jax_hkv import nnx as nnx
    from jax_hkv import plots as plots

__version__ = "0.1.0"

__all__ = [
    "CUSTOM_CALLS",
    "ROWS_NAME",
    "Bags",
    "Collection",
    "Combiner",
    "Counts",
    "Entries",
    "EraseResult",
    "Feature",
    "Fill",
    "FindResult",
    "Group",
    "Groups",
    "Index",
    "InsertResult",
    "Jagged",
    "Keys",
    "Padded",
    "Policy",
    "PooledFindResult",
    "Sampled",
    "ScoredFindResult",
    "Status",
    "Table",
    "TableConfig",
    "Unique",
    "WriteResult",
    "accum_or_assign",
    "admission",
    "advance_epoch",
    "assign",
    "checked",
    "clear",
    "contains",
    "create",
    "equal",
    "erase",
    "erase_if",
    "expire",
    "export_batch",
    "export_batch_if",
    "export_keys",
    "find",
    "find_or_insert",
    "find_or_insert_pooled",
    "find_pooled",
    "grow",
    "halve_sightings",
    "import_batch",
    "initial_rows",
    "initializers",
    "insert_and_evict",
    "insert_or_assign",
    "is_new",
    "less",
    "less_equal",
    "load_factor",
    "metrics",
    "misplaced",
    "optim",
    "pool",
    "resize",
    "sample",
    "sharding",
    "size",
    "size_if",
    "testing",
    "tiered",
    "unique",
    "zero_empty_rows",
]

# What they need that jax_hkv itself does not, and the extra that installs it; `launch`, which is a
# program too, needs nothing.
_FLAX, _PLOTS = ("flax", "flax"), ("matplotlib", "plots")
_EXTRAS = {"launch": None, "linen": _FLAX, "nnx": _FLAX, "plots": _PLOTS}


if not TYPE_CHECKING:  # checkers know the imports above, and tell of names that there are not

    def __getattr__(name: str) -> Any:
        if name not in _EXTRAS:
            raise AttributeError(f"module 'jax_hkv' has no attribute {name!r}")
        try:
            return importlib.import_module(f"jax_hkv.{name}")
        except ModuleNotFoundError as error:
            need = _EXTRAS[name]
            if need is None or (error.name or "").startswith("jax_hkv"):
                raise
            raise ModuleNotFoundError(
                f"jax_hkv.{name} needs {error.name}, which is not installed: "
                f"pip install 'jax_hkv[{need[1]}]'",
                name=error.name,
            ) from error


def __dir__() -> list[str]:
    """With the extras that are installed: whoever asks for all that is listed gets it."""
    has = [n for n, need in _EXTRAS.items() if need is None or importlib.util.find_spec(need[0])]
    return sorted({*globals(), *has})
