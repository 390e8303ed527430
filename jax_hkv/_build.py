"""What the compiled modules were built with, checked before XLA sees them."""

from __future__ import annotations

import jaxlib

OLDEST_JAXLIB = (0, 10, 0)


def check_jaxlib() -> None:
    """Raises ImportError if the installed jaxlib is older than the headers the modules were built with."""
    installed = tuple(int(part) for part in jaxlib.__version__.split(".")[:3])
    if installed < OLDEST_JAXLIB:
        raise ImportError(
            f"jax_hkv needs jaxlib {'.'.join(map(str, OLDEST_JAXLIB))} or newer, found "
            f"{jaxlib.__version__}: pip install -U jax jaxlib"
        )
