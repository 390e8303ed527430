"""The directions and the sizes of the house (CONTRIBUTING.md), kept."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "ffi"
PACKAGE = ROOT / "jax_hkv"

MOST_LINES = 700  # of any file: whoever looks for something must find it
MOST_EXAMPLE_LINES = 150
SOURCES = {".py", ".h", ".cc", ".cu", ".cuh", ".md", ".toml"}

# A file includes files of its own layer and of the layers before it.
NATIVE_LAYERS = ("core", "ops", "binding", "backends")
WITHOUT_XLA_OR_PYTHON = ("core", "ops")

# A module imports modules of its own layer and of the layers before it. Those that are not named
# here are wings, and everything may be used by the package's own file.
LAYERS = (
    {
        "_build",
        "_compat",
        "_ffi",
        "_id_types",
        "_keys",
        "_namespaces",
        "_options",
        "_stages",
        "_trees",
        "_warnings",
        "initializers",
    },
    {"index", "rows"},
    {
        "_checks",
        "_inserts",
        "_pins",
        "_programs",
        "admission",
        "operations",
        "table",
        "whole_table",
    },
    {"the wings"},
    {"linen", "nnx"},
    {"__init__"},
)
COMPILED = {"_cpu", "_cuda"}
GATEWAY = "_ffi"

THIRD_PARTY = {"jax", "jaxlib", "jaxtyping", "numpy"}
OPTIONAL = {
    "linen": {"flax"},
    "nnx": {"flax"},
    "_nnx_devices": {"flax"},
    "_linen_steps": {"flax"},
    "_nnx_steps": {"flax"},
    "_state_dicts": {"flax"},
    "checkpoint": {"orbax"},
    "plots": {"matplotlib"},
}


def files(folder: Path, suffixes: set[str]) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())


NATIVE_FILES = files(NATIVE, {".h", ".cc", ".cu", ".cuh"})
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")
}


def layer_of(module: str) -> int:
    named = [number for number, layer in enumerate(LAYERS) if module in layer]
    return named[0] if named else LAYERS.index({"the wings"})


@cache
def imports(module: str) -> frozenset[str]:
    """The dotted names that a module of the package imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively: write jax_hkv.{node.module}"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def own_imports(module: str) -> set[str]:
    """The modules of the package that a module imports; the package itself is `__init__`."""
    own = [name.split(".")[1:2] for name in imports(module) if name.split(".")[0] == "jax_hkv"]
    return {name[0] if name and name[0] in MODULES else "__init__" for name in own}


def test_there_are_sources_to_look_at():
    assert {path.parent.name for path in NATIVE_FILES} == set(NATIVE_LAYERS)
    assert {"__init__", GATEWAY, "_keys", "index", "table", "optim", "testing"} <= set(MODULES)


@pytest.mark.parametrize("path", NATIVE_FILES, ids=lambda path: path.relative_to(NATIVE).as_posix())
def test_native_files_include_downwards(path):
    """core <- ops <- binding <- backends, and the inner two know neither XLA nor Python."""
    layer = path.relative_to(NATIVE).parts[0]
    for include in re.findall(r'#include\s+[<"]([^>"]+)[>"]', path.read_text()):
        folder = include.split("/")[0]
        if folder in NATIVE_LAYERS:
            assert (NATIVE / include).is_file(), f"{include} does not exist"
            assert NATIVE_LAYERS.index(folder) <= NATIVE_LAYERS.index(layer), f"includes {include}"
        if layer in WITHOUT_XLA_OR_PYTHON:
            assert folder not in {"xla", "nanobind", "Python.h"}, f"includes {include}"


def test_the_list_of_operations_names_every_file_of_ops():
    text = (NATIVE / "ops" / "all.h").read_text()
    listed = set(re.findall(r'#include "ops/(\w+)\.h"', text))
    files = {path.stem for path in (NATIVE / "ops").iterdir()} - {"all", "operation"}
    assert listed <= files
    assert {re.sub("_(state|steps|eviction)$", "", name) for name in files} == listed


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_import_downwards(module):
    """_ffi, _keys <- index <- table <- the wings <- linen, nnx."""
    for imported in own_imports(module):
        assert layer_of(imported) <= layer_of(module), (
            f"{module} imports {imported}, which comes after it in LAYERS"
        )


def test_no_module_imports_itself_through_others():
    waiting = {module: own_imports(module) for module in MODULES}
    while waiting:
        free = {module for module, needs in waiting.items() if not needs & waiting.keys()}
        assert free, f"these import each other in a circle: {sorted(waiting)}"
        waiting = {module: needs for module, needs in waiting.items() if module not in free}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - {GATEWAY}))
def test_only_the_gateway_names_the_compiled_modules(module):
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = {node.value.removeprefix("jax_hkv.")}
        elif isinstance(node, ast.ImportFrom):
            words = {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            words = {alias.name.rpartition(".")[2] for alias in node.names}
        else:
            continue
        assert not words & COMPILED, f"{module}, line {node.lineno}"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_modules_import_what_the_package_depends_on(module):
    """Flax and Orbax are imported by the modules named after them, and Optax nowhere."""
    outside = {name.split(".")[0] for name in imports(module)} - {"jax_hkv"}
    outside -= sys.stdlib_module_names | {"__future__"}
    assert outside <= THIRD_PARTY | OPTIONAL.get(module, set())


def test_the_package_imports_without_what_is_optional():
    optional = sorted({"optax"}.union(*OPTIONAL.values()))
    block = f"import sys; sys.modules.update(dict.fromkeys({optional}))"
    code = f"{block}; import jax_hkv as hkv; hkv.optim, hkv.testing"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.anchor, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_no_file_is_too_long():
    folders = ("ffi", "jax_hkv", "tests", "examples", "benchmarks", "docs")
    paths = [path for folder in folders for path in files(ROOT / folder, SOURCES)]
    paths += [path for path in ROOT.iterdir() if path.suffix in SOURCES]
    lines = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n") for path in paths}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_no_example_is_too_long():
    lines = {path.name: path.read_text().count("\n") for path in files(ROOT / "examples", {".py"})}
    assert lines
    assert {name: count for name, count in lines.items() if count > MOST_EXAMPLE_LINES} == {}


def test_a_run_that_was_stopped_goes_on_with_the_rest(tmp_path):
    passed = tmp_path / "passed.txt"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--passed={passed}"]
    command += [str(Path(__file__)), "-k", "too_long"]

    def run() -> tuple[int, list[str]]:
        status = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120).returncode
        return status, passed.read_text().splitlines()

    status, names = run()
    assert status == 0 and len(names) > 1 and len(set(names)) == len(names)
    passed.write_text("\n".join(names[1:]) + "\n")
    assert run() == (0, [*names[1:], names[0]])
    assert run() == (5, [*names[1:], names[0]])
