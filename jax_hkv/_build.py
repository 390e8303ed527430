"""What the compiled modules were built with, checked before XLA sees them.

XLA refuses handlers of a newer FFI version than its own, and then the whole CPU backend is
unusable; those of an older one run.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from types import ModuleType

import jax


def _installed_version() -> tuple[int, int]:
    """The FFI version of the installed jaxlib, from its headers."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(re.findall(rf"#define XLA_FFI_API_{part} (\d+)", header)[0])
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def check_jaxlib(module: ModuleType | None) -> None:
    """Raises ImportError if the installed jaxlib is too old for a module's headers."""
    if module is None or module.xla_ffi_version <= _installed_version():
        return
    raise ImportError(
        f"{module.__name__} was built with jaxlib {module.built_with_jaxlib} (XLA FFI "
        f"{module.xla_ffi_version}), but jaxlib {metadata.version('jaxlib')} is installed, whose "
        f"XLA FFI is {_installed_version()}: pip install -U jax jaxlib, or build jax_hkv again"
    )
