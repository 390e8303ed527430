"""What an installation of the package holds, editable or not."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import sysconfig
import types
from importlib import metadata, resources
from pathlib import Path

import jax
import pytest

import jax_hkv
from jax_hkv import _build

DISTRIBUTION = metadata.distribution("jax_hkv")
MODULES = [module.name for module in pkgutil.iter_modules(jax_hkv.__path__)]
COMPILED = ("_cpu", "_cuda")
STABLE_ABI_SINCE = (3, 12)


def compiled_modules() -> dict[str, Path]:
    specs = {name: importlib.util.find_spec(f"jax_hkv.{name}") for name in COMPILED}
    return {name: Path(spec.origin) for name, spec in specs.items() if spec and spec.origin}


def test_the_version_is_that_of_the_metadata():
    assert jax_hkv.__version__ == DISTRIBUTION.version


@pytest.mark.parametrize("name", [name for name in MODULES if name not in COMPILED])
def test_every_module_is_importable(name):
    importlib.import_module(f"jax_hkv.{name}")


def test_every_public_name_is_there():
    assert sorted(set(jax_hkv.__all__)) == sorted(jax_hkv.__all__)
    assert [name for name in jax_hkv.__all__ if not hasattr(jax_hkv, name)] == []


def test_names_that_come_with_extras_are_listed():
    assert {"find", "linen", "nnx", "plots", "launch"} <= set(dir(jax_hkv))
    assert not hasattr(jax_hkv, "keras")


@pytest.mark.parametrize(
    ("name", "needed", "extra"), [("nnx", "flax", "flax"), ("plots", "matplotlib", "plots")]
)
def test_what_an_extra_needs_is_told_with_the_extra(name, needed, extra, monkeypatch):
    for module in [*sys.modules]:
        if module == f"jax_hkv.{name}" or module.split(".")[0] == needed:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(jax_hkv, name, raising=False)
    monkeypatch.setitem(sys.modules, needed, None)
    message = rf"jax_hkv\.{name} needs {needed}.*pip install 'jax_hkv\[{extra}\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        getattr(jax_hkv, name)
    assert name not in dir(jax_hkv) and inspect.getmembers(jax_hkv)


def test_the_package_says_that_it_is_typed():
    assert resources.files("jax_hkv").joinpath("py.typed").is_file()


def test_the_cpu_module_is_always_there():
    assert "_cpu" in compiled_modules()


def test_the_wheel_is_for_the_stable_abi_from_python_3_12():
    """A tag that promises more than the modules keep would install where nothing imports."""
    wheel = DISTRIBUTION.read_text("WHEEL")
    assert wheel is not None
    tag = re.search(r"^Tag: (\w+-\w+)-", wheel, re.MULTILINE)
    assert tag is not None
    if sys.version_info >= STABLE_ABI_SINCE:
        expected, suffix = "cp312-abi3", ".abi3.so"
    else:
        expected, suffix = "cp311-cp311", sysconfig.get_config_var("EXT_SUFFIX")
    assert tag[1] == expected
    for name, path in compiled_modules().items():
        assert path.name == name + suffix


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_modules_are_built_with_headers_that_jaxlib_accepts(name):
    if name not in compiled_modules():
        pytest.skip("this build has no CUDA module")
    module = importlib.import_module(f"jax_hkv.{name}")
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    installed = tuple(
        int(re.search(rf"^#define XLA_FFI_API_{part} (\d+)", header, re.MULTILINE)[1])
        for part in ("MAJOR", "MINOR")
    )
    assert module.xla_ffi_version[0] == installed[0]
    assert module.xla_ffi_version <= installed


def test_nothing_is_installed_outside_the_package():
    """Tests, examples and native sources stay out of site-packages."""
    ours = re.compile(
        r"jax_hkv|jax_hkv-[\w.]+\.dist-info|_editable_\w*jax_hkv\.\w+|__pycache__|\.\."
    )
    tops = {path.parts[0] for path in DISTRIBUTION.files or ()}
    assert tops
    assert {top for top in tops if not ours.fullmatch(top)} == set()


def test_a_module_built_with_newer_headers_is_refused_in_words():
    """XLA itself would only say that the CPU backend cannot be initialised."""
    newer = types.SimpleNamespace(
        __name__="jax_hkv._cpu", xla_ffi_version=(99, 0), built_with_jaxlib="99.1.0"
    )
    with pytest.raises(ImportError, match=r"built with jaxlib 99\.1\.0.*pip install -U jax jaxlib"):
        _build.check_jaxlib(newer)  # pyright: ignore[reportArgumentType]
