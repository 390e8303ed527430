"""What the compiled modules were built with, checked before XLA sees them.

A module built with newer XLA headers than the installed jaxlib would make the whole CPU backend
unusable; one built with older headers runs on newer ones.
"""

from __future__ import annotations

import re
from importlib import metadata
from types import ModuleType


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 10, 0) of "0.10.0rc1"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")[:3]) if found else ()


def check_jaxlib(module: ModuleType | None) -> None:
    """Raises ImportError if the installed jaxlib is older than a module's headers."""
    if module is None:
        return
    installed = metadata.version("jaxlib")
    if _release(installed) < _release(module.built_with_jaxlib):
        raise ImportError(
            f"{module.__name__} was built with jaxlib {module.built_with_jaxlib}, but jaxlib "
            f"{installed} is installed: pip install -U jax jaxlib, or build jax_hkv again"
        )
