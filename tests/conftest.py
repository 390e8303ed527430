"""Options, platforms and seeds of the suite; runs before anything imports jax."""

from __future__ import annotations

import gc
import inspect
import os
import random
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

# JAX's traces are many objects that stay: Python looks for cycles among them less often.
gc.set_threshold(50_000, 20, 50)
HOST_DEVICES = "--xla_force_host_platform_device_count=8"
FLAGS = os.environ.get("XLA_FLAGS", "").replace(HOST_DEVICES, "").strip()
os.environ["XLA_FLAGS"] = f"{FLAGS} {HOST_DEVICES}".strip()
# For programs that are run as a user runs them: many host devices move the last digits.
WITHOUT_HOST_DEVICES = {"XLA_FLAGS": FLAGS}
CHECKOUT = Path(__file__).resolve().parents[1]
# `python -m pytest` puts the checkout there, whose jax_hkv has no compiled modules.
sys.path[:] = [path for path in sys.path if Path(path).resolve() != CHECKOUT]
sys.path.insert(0, str(Path(__file__).parent))  # for `oracle`, whatever the import mode

import jax
import numpy as np
import oracle
import pytest

import jax_hkv as hkv


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests of full size")
    parser.addoption("--needs-gpu", action="store_true", help="without a GPU its tests fail")
    parser.addoption("--x64", action="store_true", help="with 64-bit numbers enabled in jax")
    parser.addoption("--seed", type=int, default=None, help="seed of every `rng`, else random")
    parser.addoption("--passed", type=Path, help="file of tests to leave out; those that pass join")
    parser.addoption("--programs", type=Path, help="folder where XLA finds what it compiled before")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: a test of full size, run only with --slow")
    jax.config.update("jax_enable_x64", config.getoption("--x64"))
    if config.getoption("--programs"):
        keep_programs(config.getoption("--programs"))
    if config.getoption("--passed"):
        config.pluginmanager.register(Passed(config))


def keep_programs(folder: Path):
    """Tests make many programs that earlier ones of their process made: XLA loads them.

    Each process has a folder of its own, since JAX writes them where another would read a half.
    """
    own = folder / os.environ.get("PYTEST_XDIST_WORKER", "alone")
    jax.config.update("jax_compilation_cache_dir", str(own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Passed:
    """A run that can be stopped and gone on with, by the file of --passed."""

    def __init__(self, config):
        self.path = config.getoption("--passed")
        self.is_worker = hasattr(config, "workerinput")  # of xdist, whose controller writes
        if self.is_worker:
            self.before = set(config.workerinput["passed"])
        else:
            self.before = set(self.path.read_text().splitlines()) if self.path.exists() else set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """A worker that takes the place of one that died must collect what the others have."""
        node.workerinput["passed"] = sorted(self.before)

    def pytest_collection_modifyitems(self, config, items):
        leave_out(config, items, lambda item: item.nodeid in self.before)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed and not self.is_worker:
            with self.path.open("a") as file:
                file.write(report.nodeid + "\n")


def leave_out(config, items, is_left_out):
    config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
    items[:] = [item for item in items if not is_left_out(item)]


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        leave_out(config, items, lambda item: item.get_closest_marker("slow"))


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """What a file compiled is of little use to the next one, and slows down all that follows."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def keep_options():
    """What a test sets in jax's options, a document's code for one, is not left to the next."""
    before = dict(jax.config.values)
    yield
    for name, value in jax.config.values.items():
        if value is not before.get(name, value):
            jax.config.update(name, before[name])


@pytest.fixture
def rng(request):
    """A NumPy generator; pytest prints its seed when the test fails."""
    seed = request.config.getoption("--seed")
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"rng: rerun with --seed={seed}")
    return np.random.default_rng(seed)


@pytest.fixture(params=["cpu", "gpu"])
def platform(request):
    """The platform that jax puts arrays on by default while the test runs."""
    try:
        device = jax.devices(request.param)[0]
    except RuntimeError as error:
        give_up = pytest.fail if request.config.getoption("--needs-gpu") else pytest.skip
        give_up(f"jax has no {request.param}: {str(error).splitlines()[0]}")
    with jax.default_device(device):
        yield request.param


@cache
def compiled(name, static):
    """One jitted function, donating its table, for an operation and its static arguments."""
    return jax.jit(partial(getattr(hkv, name), **dict(static)), donate_argnums=0)


def to_device(argument):
    """An argument of an operation; 64-bit words become pairs."""
    if argument is None or np.asarray(argument).dtype.itemsize < 8:
        return argument
    return hkv.Keys.from_numpy(argument)


def assert_same(actual: Any, expected: Any, name: str) -> None:
    """Every field of a result has the bits that the oracle says, or is not there in both."""
    if hasattr(expected, "__annotations__"):
        for field in expected.__annotations__:
            assert_same(getattr(actual, field, None), getattr(expected, field), f"{name}.{field}")
        return
    if expected is None:
        assert actual is None, f"{name} is not None"
        return
    actual = actual.to_numpy() if isinstance(actual, hkv.Keys) else np.asarray(actual)
    expected = np.asarray(expected)
    assert actual.shape == expected.shape, f"{name}: {actual.shape}, not {expected.shape}"
    if expected.dtype.kind not in "biu":
        assert actual.dtype == expected.dtype, f"{name}: {actual.dtype}, not {expected.dtype}"
        actual, expected = oracle.as_bits(actual), oracle.as_bits(expected)
    if not np.array_equal(actual, expected):
        where = tuple(np.argwhere(actual != expected)[0])
        raise AssertionError(
            f"{name} at {[int(i) for i in where]}: {actual[where]}, the oracle has "
            f"{expected[where]}; {np.count_nonzero(actual != expected)} elements differ"
        )


class Twin:
    """A table and its oracle: every call goes to both, and results and states are compared.

    Arguments are NumPy arrays, with 64-bit words for keys and pairs, and so are the results,
    which are the oracle's. With `check=False` states are compared by `assert_equal` alone.
    """

    STATIC = ("touch", "fill", "return_evicted")
    OPERATIONS = (
        "find",
        "contains",
        "export_keys",
        "find_or_insert",
        "insert_or_assign",
        "insert_and_evict",
        "accum_or_assign",
        "assign",
        "erase",
    )

    def __init__(self, *args, policy="LRU", check=True, **kwargs):
        self.table = hkv.create(*args, policy=hkv.Policy[policy], **kwargs)
        self.oracle = oracle.Oracle.from_table(self.table)
        self.check = check

    def __getattr__(self, name):
        if name in self.OPERATIONS:
            return partial(self.call, name)
        raise AttributeError(name)

    def call(self, name, *args, **kwargs):
        """Call an operation that takes a batch."""
        reference = getattr(self.oracle, name)
        batch = inspect.signature(reference).bind(*args, **kwargs).arguments
        static = tuple((key, batch.pop(key)) for key in self.STATIC if key in batch)
        on_device = {key: to_device(argument) for key, argument in batch.items()}
        self.table, actual = compiled(name, static)(self.table, **on_device)
        expected = reference(**batch, **dict(static))
        self.compare(name, actual, expected)
        return expected

    def compare(self, name, actual, expected):
        assert_same(actual, expected, name)
        if self.check:
            self.assert_equal()

    def assert_equal(self):
        self.oracle.assert_equal(self.table)
        assert int(hkv.size(self.table)) == self.oracle.size

    def erase_if(self, traceable, predicate):
        """Erase by a predicate, given for the table and for NumPy words."""
        operation = compiled("erase_if", (("predicate", traceable),))
        self.table, actual = operation(self.table)
        expected = self.oracle.erase_if(predicate)
        self.compare("erase_if", actual, expected)
        return expected

    def clear(self):
        self.table = compiled("clear", ())(self.table)
        self.oracle.clear()
        self.assert_equal()

    def advance_epoch(self, epoch=None):
        self.table = hkv.advance_epoch(self.table, epoch)
        self.oracle.advance_epoch(epoch)
        self.assert_equal()

    def resize(self, capacity):
        self.table, counts = hkv.resize(self.table, capacity)
        self.oracle, expected = self.oracle.resize(capacity)
        self.compare("resize", counts, expected)
        return expected

    def export_batch(self, offset, count):
        expected = self.oracle.export_batch(offset, count)
        self.compare("export_batch", hkv.export_batch(self.table, offset, count), expected)
        return expected

    def import_batch(self, keys, scores, values, count, valid, return_evicted=False):
        """Import entries, of which `count` are meant, and of those the valid ones."""
        numbers = map(hkv.Keys.from_numpy, (keys, scores))
        entries = hkv.Entries(*numbers, values, {}, np.int32(count))
        operation = compiled("import_batch", (("return_evicted", return_evicted),))
        self.table, actual = operation(self.table, entries, valid=valid)
        meant = (np.arange(len(keys)) < count) & valid
        expected = self.oracle.import_batch(keys, scores, values, meant, return_evicted)
        self.compare("import_batch", actual, expected)
        return expected


@pytest.fixture
def twin(platform):
    """The maker of twins on a platform: twin(capacity, dim, policy="LRU", choices=1, ...)."""
    return Twin
