"""What the compiled modules were built with, checked before XLA sees them."""

from __future__ import annotations

from importlib import metadata

OLDEST_JAXLIB = (0, 10, 0)


def check_jaxlib() -> None:
    """Raises ImportError if the installed jaxlib is older than the modules need."""
    version = metadata.version("jaxlib")
    installed = tuple(int(part) for part in version.split(".")[:3])
    if installed < OLDEST_JAXLIB:
        raise ImportError(
            f"jax_hkv needs jaxlib {'.'.join(map(str, OLDEST_JAXLIB))} or newer, found "
            f"{version}: pip install -U jax jaxlib"
        )
