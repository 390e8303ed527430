"""What the documents show runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import jax_hkv

ROOT = Path(__file__).parent.parent
NATIVE = {"_cpu", "_cuda"}
MODULES = [m.name for m in pkgutil.iter_modules(jax_hkv.__path__) if m.name not in NATIVE]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name):
    """Every docstring example is a doctest."""
    module = importlib.import_module(f"jax_hkv.{name}")
    assert doctest.testmod(module, verbose=False).failed == 0


def test_the_code_in_the_readme_runs(capsys):
    """As it stands there."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {"__name__": "readme"})
    assert "Table('table', capacity=100,096, dim=16" in capsys.readouterr().out
