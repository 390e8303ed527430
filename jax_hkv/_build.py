"""What the compiled modules were built with, checked before XLA sees them.

XLA refuses handlers of a newer FFI version than its own, and then the whole CPU backend is
unusable; those of an older one run.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import jax

from jax_hkv._compat import JAXLIB_VERSION


def _installed_version() -> tuple[int, int] | None:
    """The FFI version of the installed jaxlib, from its headers, if they were not left out."""
    path = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not path.exists():
        return None
    header = path.read_text()
    major, minor = (
        int(re.findall(rf"#define XLA_FFI_API_{part} (\d+)", header)[0])
        for part in ("MAJOR", "MINOR")
    )
    return major, minor


def check_jaxlib(module: ModuleType | None) -> None:
    """Raises ImportError if the installed jaxlib is too old for a module's headers."""
    installed = _installed_version()
    if module is None or installed is None or module.xla_ffi_version <= installed:
        return
    raise ImportError(
        f"{module.__name__} was built with jaxlib {module.built_with_jaxlib} (XLA FFI "
        f"{module.xla_ffi_version}), but jaxlib {JAXLIB_VERSION} is installed, whose "
        f"XLA FFI is {installed}: pip install -U jax jaxlib, or build jax_hkv again"
    )
