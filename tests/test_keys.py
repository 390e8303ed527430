"""Keys: 64-bit numbers on the host and on devices, taken apart and put together."""

from __future__ import annotations

import functools
import operator
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_updates import threefry

import jax_hkv as hkv

IDS = np.arange(60, dtype=np.uint64).reshape(3, 4, 5) * np.uint64(0x9E3779B97F4A7C15)
ON_HOST = hkv.Keys.from_numpy(IDS)
WHERE = {"host": ON_HOST, "device": jax.tree.map(jnp.asarray, ON_HOST)}
INDICES = {
    "a number": 1,
    "a negative number": -1,
    "a slice": slice(0, 2),
    "nothing": (),
    "an ellipsis": ...,
    "the last axis": (..., 0),
    "between": (0, ..., slice(1, 3)),
    "a new axis": None,
    "a new axis inside": (slice(None), None, 2),
    "numbers": np.array([2, 0, 2]),
    "numbers of two axes": (np.array([2, 0]), slice(None), np.array([4, 1])),
    "numbers of the last axis": (..., np.array([[0, 1], [2, 3]])),
    "a mask of one axis": np.array([True, False, True]),
    "a mask of all axes": np.asarray(IDS % np.uint64(3) == 0),
    "numbers of jax": (slice(None), jnp.array([3, 1])),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", INDICES)
def test_an_index_takes_what_it_takes_of_the_numbers(name, where):
    """As of an array of their shape, which the axis of the words is no part of."""
    index = INDICES[name]
    expected = IDS[index]
    got = WHERE[where][index]
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got.to_numpy(), expected)


def test_a_traced_index_takes_from_keys_on_the_host():
    """Rows of keys that a scan's body closes over."""
    rows = jax.lax.scan(lambda _, row: (None, ON_HOST[row]), None, jnp.arange(3))[1]
    np.testing.assert_array_equal(rows.to_numpy(), IDS)


@pytest.mark.parametrize("where", WHERE)
def test_a_slice_reads_no_more_than_itself(where):
    """Of many keys on a device a slice is one of their words; on the host it is a view."""
    keys = WHERE[where]
    if where == "host":
        assert np.shares_memory(keys[1:].words, keys.words)
    else:
        many = jax.ShapeDtypeStruct((10_000, 2), jnp.uint32)
        text = str(jax.make_jaxpr(lambda words: hkv.Keys(words)[:7].words)(many))
        assert "u32[10000]" not in text and "u32[7,2]" in text


@pytest.mark.parametrize("call", [hkv.find, hkv.contains, hkv.find_or_insert, hkv.find_pooled])
def test_a_batch_of_more_positions_than_int32_counts_is_refused(call):
    shape = (2**31, 1, 2) if call is hkv.find_pooled else (2**31, 2)
    keys = hkv.Keys(jax.ShapeDtypeStruct(shape, jnp.uint32))
    with pytest.raises(ValueError, match=r"must have fewer than 2\*\*31 positions, got uint32\["):
        jax.eval_shape(functools.partial(call, hkv.create(128, 4)), keys)


def test_an_index_of_too_many_axes_is_refused():
    """The axis of the words cannot be reached."""
    with pytest.raises(IndexError):
        ON_HOST[0, 0, 0, 0]


@pytest.mark.parametrize("where", WHERE)
def test_keys_have_the_shape_of_their_numbers(where):
    keys = WHERE[where]
    assert (keys.shape, keys.ndim, keys.size, len(keys)) == ((3, 4, 5), 3, 60, 3)
    for other in (keys.reshape(12, 5), keys.reshape((12, 5)), keys.reshape([-1, 5])):
        np.testing.assert_array_equal(other.to_numpy(), IDS.reshape(12, 5))
    assert keys.reshape(-1)[0].reshape(()).shape == keys.reshape(-1)[0].shape == ()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        *(("concatenate", axis) for axis in (0, 1, 2, -1, -3)),
        *(("stack", axis) for axis in (0, 1, 3, -1, -4)),
    ],
)
def test_joined_keys_are_their_numbers_joined(where, name, axis):
    keys = WHERE[where]
    joined = getattr(hkv.Keys, name)([keys, keys[::-1], keys[:, ::-1]], axis)
    wanted = getattr(np, name)([IDS, IDS[::-1], IDS[:, ::-1]], axis)
    np.testing.assert_array_equal(joined.to_numpy(), wanted)
    assert isinstance(joined.words, np.ndarray) == (where == "host")


@pytest.mark.parametrize("where", WHERE)
def test_keys_are_chosen_as_numbers_are(rng, where):
    """Of equal shapes, one for all, and of broadcast shapes; inside jit."""
    keys, mask = WHERE[where], rng.random(IDS.shape) < 0.5
    others = {"one": np.array(-7), "a row": IDS[0, 0], "all": IDS[::-1]}
    for number in others.values():
        other = hkv.Keys.from_numpy(number)
        wanted = np.where(mask, IDS, number.astype(np.uint64))
        for chosen in (
            hkv.Keys.where(mask, keys, other),
            jax.jit(hkv.Keys.where)(mask, keys, other),
        ):
            np.testing.assert_array_equal(chosen.to_numpy(), wanted)
        swapped = hkv.Keys.where(~mask, other, keys)
        np.testing.assert_array_equal(swapped.to_numpy(), wanted)
        assert isinstance(swapped.words, np.ndarray) == (where == "host")
    small = hkv.Keys.where(
        jnp.array([True, False]), np.array([1, 2], np.int32), jnp.array([-3, -4])
    )
    assert small.to_numpy(signed=True).tolist() == [1, -4]
    with pytest.raises(
        TypeError, match=r"Keys\.where: condition must be an array of bool, got .*int.*compare"
    ):
        hkv.Keys.where(np.array([1, 0]), keys, keys)
    masked = np.ma.masked_array(mask, ~mask)
    with pytest.raises(TypeError, match=r"Keys\.where: condition must not be a masked array"):
        hkv.Keys.where(masked, keys, keys)
    with pytest.raises(TypeError, match=r"Keys\.where: others must be .*got list"):
        hkv.Keys.where(mask, keys, [1])
    with pytest.raises(ValueError, match=r"Keys\.where: .* fit each other, got \[2\], \[3\], \[\]"):
        hkv.Keys.where(
            np.array([True, False]), np.arange(3, dtype=np.int32), hkv.Keys.from_numpy(1)
        )


@pytest.mark.parametrize("where", WHERE)
def test_single_keys_are_stacked(where):
    stacked = hkv.Keys.stack([WHERE[where][0, 0, 1], WHERE[where][2, 1, 0]])
    assert stacked.to_numpy().tolist() == [IDS[0, 0, 1], IDS[2, 1, 0]]


def test_parts_that_cannot_be_stacked_are_named():
    flat, deep = hkv.Keys.from_numpy([1, 2]), hkv.Keys.from_numpy([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"Keys\.stack: parts must have one shape.*\[2\], \[1, 3"):
        hkv.Keys.stack([flat, deep])
    with pytest.raises(ValueError, match=r"Keys\.stack: axis must be from -2 to 1, got 2"):
        hkv.Keys.stack([flat, flat], 2)
    with pytest.raises(ValueError, match=r"Keys\.stack: parts must be Keys, at least one"):
        hkv.Keys.stack([])
    with pytest.raises(TypeError, match=r"Keys\.stack: parts must be a list of Keys, got Keys"):
        hkv.Keys.stack(flat)  # pyright: ignore[reportArgumentType]


def test_wrong_parts_of_a_concatenation_are_named():
    with pytest.raises(ValueError, match=r"Keys\.concatenate: parts must be .*at least one"):
        hkv.Keys.concatenate([])
    with pytest.raises(ValueError, match=r"axis must be from -3 to 2, got 3"):
        hkv.Keys.concatenate([ON_HOST], 3)
    with pytest.raises(TypeError, match=r"parts\[1\] must be jax_hkv\.Keys.*got list"):
        hkv.Keys.concatenate([ON_HOST, [1, 2]])


MISTAKES = {
    "np.asarray": lambda keys: np.asarray(keys),
    "jnp.asarray": lambda keys: jnp.asarray(keys),
    "np.concatenate": lambda keys: np.concatenate([keys, keys]),
    "np.stack": lambda keys: np.stack([keys, keys]),
    "np.array_equal": lambda keys: np.array_equal(keys, keys),
    "a sum": lambda keys: np.arange(3) + keys,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_keys_are_taken_for_an_array_by_nobody(name):
    """NumPy would make an array of objects of them."""
    with pytest.raises(TypeError, match=r"to_numpy\(\).*Keys\.concatenate"):
        MISTAKES[name](ON_HOST)


def test_numpy_tells_the_shape_of_keys():
    keys = hkv.Keys.from_numpy(np.arange(6).reshape(2, 3))
    assert (np.shape(keys), np.ndim(keys), np.size(keys)) == ((2, 3), 2, 6)
    assert (np.shape(a=keys), np.size(keys, 0), np.size(axis=1, a=keys)) == ((2, 3), 2, 3)
    np.testing.assert_array_equal(keys.ravel().to_numpy(), np.arange(6))
    assert not keys.ravel().words.flags.writeable


def test_negative_ids_come_back_as_what_they_were():
    ids = np.array([[-1, 7], [2**62, -(2**63)]], np.int64)
    back = hkv.Keys.from_numpy(ids).to_numpy(signed=True)
    assert back.dtype == np.int64
    np.testing.assert_array_equal(back, ids)


@pytest.mark.parametrize("compare", [operator.lt, operator.le, operator.gt, operator.ge])
def test_keys_have_no_order_by_the_sign(compare):
    keys = hkv.Keys.from_numpy(np.array([1, 2]))
    for pair in ((keys, 5), (keys, keys)):
        with pytest.raises(TypeError, match=r"no operators.*jax_hkv\.less"):
            compare(*pair)


def test_comparing_keys_by_the_sign_says_what_compares_them():
    """A dataclass would ask an array whether it is true."""
    a, b = ON_HOST, ON_HOST[:]
    for compare in (lambda: a == b, lambda: a != b):
        with pytest.raises(TypeError, match=r"jax_hkv\.equal\(a, b\)"):
            compare()
    assert bool(hkv.equal(a, b).all())


def test_a_tree_of_keys_is_one_for_jax():
    """What keys refuse of arrays, they do not refuse of pytrees."""
    assert jax.tree.structure(ON_HOST) == jax.tree.structure(WHERE["device"])
    shape, other = (jax.tree.map(jnp.shape, keys) for keys in (ON_HOST, ON_HOST[:2]))
    assert shape == jax.tree.map(jnp.shape, WHERE["device"]) and shape != other
    assert hash(shape) == hash(jax.tree.map(jnp.shape, WHERE["device"]))
    doubled = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), ON_HOST, ON_HOST)
    assert doubled.shape == (6, 4, 5)
    shapes = jax.eval_shape(lambda keys: keys, ON_HOST)
    assert shapes.shape == ON_HOST.shape and shapes.words.dtype == np.uint32


EMPTY = {"a list": [], "a tuple": (), "a list of lists": [[], []]}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_list_is_no_key(name):
    """NumPy makes float64 of it."""
    assert hkv.Keys.from_numpy(EMPTY[name]).shape == np.shape(EMPTY[name])


@pytest.mark.parametrize(
    "ids",
    [
        [2**63, 1],
        [[2**63], [-1]],
        [-(2**63), 2**64 - 1],
        [np.int64(5), np.uint64(2**63 + 12345)],
        np.array([-2, 1], object),
        np.array([[2**63], [1]], object),
        np.zeros(0, object),
    ],
    ids=str,
)
def test_integers_that_numpy_has_no_type_for_are_keys(ids):
    """As Jagged.from_lists takes them: a list of hashes has some on both sides of 2^63."""
    objects = np.asarray(ids, object)
    expected = [int(number) % 2**64 for number in objects.flat]
    keys = hkv.Keys.from_numpy(ids)
    assert keys.to_numpy().tolist() == np.array(expected, object).reshape(objects.shape).tolist()
    flat, count = objects.ravel(), objects.size
    for bags in (
        hkv.Jagged.from_lists([flat.tolist()]),
        hkv.Jagged.from_lists([flat]),
        hkv.Jagged.from_lengths(flat, [count]),
        hkv.Jagged.from_lengths(flat.tolist(), [count]),
    ):
        np.testing.assert_array_equal(bags.ids.to_numpy(), keys.to_numpy().ravel())
    of_numpy = np.array([np.int64(5), 6], object)
    for objects in (ids, of_numpy) if count and isinstance(ids, np.ndarray) else ():
        with pytest.raises(TypeError, match=r"find: .* object: give jax_hkv.Keys.from_numpy\(ids"):
            hkv.find(hkv.create(128, 1), objects)


WRONG = {
    "a list beyond 64 bits": ([[2**65], [1]], "dtype object: hash or cast"),
    "a list below them": ([-(2**63) - 1, 1], "hash or cast them to 64 bits first"),
    "an array of a list on both sides of 2^63": (np.array([2**63, -5]), "give the list itself"),
    "numbers that are text": (np.array(["9223372036854775813", "-5"]), "were read as text .* int"),
    "numbers and a missing one": (np.array(["5", None], object), "were read as text .* int"),
    "numbers and a gap in a list": ([float("nan"), "5"], "were read as text .* int"),
    "a text among numbers": (np.array(["5", "a"], object), "not Python's hash, which is salted"),
    "a column with a missing value": (np.array([2**60 + 1, np.nan]), "missing values .* valid="),
    "a list with a missing value": ([2**60 + 1, None], "round ids .* missing values .* valid="),
    "a list of bools": ([True, False], "dtype bool: hash or cast"),
    "a list of fractions": ([1.5], "float64: hash or cast"),
    "an empty array of fractions": (np.zeros(0), "float64: hash or cast"),
    "texts": (np.array(["a"]), "not Python's hash, which is salted"),
    "a list of texts": (["a", "b"], "not Python's hash, which is salted"),
    "bytes": (np.array([b"a"]), "not Python's hash, which is salted"),
    "objects that are texts": (np.array(["a", "b"], object), "not Python's hash, which is salted"),
    "texts beside a missing one": (np.array(["a", None], object), "not Python's hash, which is"),
    "objects": (np.array([{}], object), "hash or cast them to int64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_integer_is_refused_with_a_remedy(name):
    ids, message = WRONG[name]
    with pytest.raises(TypeError, match=r"Keys\.from_numpy: ids must hold integers.*" + message):
        hkv.Keys.from_numpy(ids)


@pytest.mark.parametrize(
    ("ids", "remedy"),
    [
        (np.array(["a"]), "not Python's hash, which is salted"),
        (np.array([b"a", None], object), "not Python's hash, which is salted"),
        (np.array([2**60 + 1, np.nan]), "before they become floats"),
        (np.array([None, 5], object), "before they become floats"),
        (np.array([True]), "hash or cast them to int64 or uint64"),
        (np.array([1, 2], jnp.bfloat16), "before they become floats"),
    ],
    ids=str,
)
def test_the_remedy_is_the_same_whoever_is_given_what_is_no_integer(ids, remedy):
    table = hkv.create(128, 1)
    config = hkv.TableConfig("a", 128, 1)
    (group,) = hkv.Collection([config], [hkv.Feature("a", "a")]).groups
    calls = {
        "find": lambda: hkv.find(table, ids),
        "find_pooled": lambda: hkv.find_pooled(table, ids[None]),
        "unique": lambda: hkv.unique(ids),
        "Group.keys": lambda: group.keys("a", ids),
        "Keys.from_numpy": lambda: hkv.Keys.from_numpy(ids),
        "Jagged.from_lists": lambda: hkv.Jagged.from_lists([ids]),
        "Jagged.from_lengths": lambda: hkv.Jagged.from_lengths(ids, [len(ids)]),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"^{name}: .*{remedy}"):
            call()


def test_keys_are_made_of_a_copy():
    """Whoever fills one buffer again and again has the keys of each time."""
    buffer = np.arange(4, dtype=np.uint64)
    keys = hkv.Keys.from_numpy(buffer)
    buffer[:] = 9
    assert keys.to_numpy().tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        keys.words[0] = 1


def test_keys_are_made_without_a_device():
    """The workers of a data loader must not start JAX's backends: there, none can start."""
    code = """
import numpy as np, jax_hkv as hkv
keys = hkv.Keys.from_numpy(np.arange(6, dtype=np.int64))
keys = hkv.Keys.concatenate([keys, keys[2:4]]).reshape((2, 4))
bags = hkv.Jagged.from_lists([[1, 2], []], capacity=4, weights=[[1.0, 2.0], []])
print(keys.to_numpy().tolist(), bags.row_splits.tolist())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).anchor,
        env=os.environ | {"JAX_PLATFORMS": "none"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[\[0, 1, 2, 3\], \[4, 5, 2, 3\]\] \[0, 2, 2\]\n", done.stdout)


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_keys_on_the_host_do_what_keys_on_a_device_do():
    """Eager, jitted and donated, and with the same trace."""
    traces = []

    def step(table, keys):
        traces.append(1)
        table, result = hkv.find_or_insert(table, keys)
        return table, hkv.find(table, keys)[1].values, result.counts

    compiled = jax.jit(step, donate_argnums=(0, 1))
    got = [
        compiled(hkv.create(128, 4), hkv.Keys.from_numpy(IDS)),
        step(hkv.create(128, 4), ON_HOST),
    ]
    got.append(compiled(hkv.create(128, 4), jax.tree.map(jnp.asarray, hkv.Keys.from_numpy(IDS))))
    assert len(traces) == 2  # the eager one, and one for both forms
    for other in got[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, got[0])
    np.testing.assert_array_equal(ON_HOST.to_numpy(), IDS)


def test_keys_are_compared_with_numbers_and_arrays():
    """Arrays are taken as keys are, signed ones extended."""
    keys = hkv.Keys.from_numpy(np.array([1, 2**40, -1], np.int64))
    for two in (2, np.uint64(2), jnp.uint32(2), np.full(3, 2, np.uint64), hkv.Keys.from_numpy(2)):
        assert hkv.less(keys, two).tolist() == [True, False, False]
        assert hkv.less_equal(two, keys).tolist() == [False, True, True]
    assert hkv.equal(keys, np.array([1, 2, -1], np.int32)).tolist() == [True, False, True]
    assert hkv.equal(keys, 2**64 - 1).tolist() == [False, False, True]
    with pytest.raises(ValueError, match=r"less: b must be an unsigned 64-bit.*got -1: Keys"):
        hkv.less(keys, -1)
    with pytest.raises(TypeError, match=r"equal: a must be jax_hkv\.Keys or an integer.*float"):
        hkv.equal(0.5, keys)


def test_lists_of_unequal_lengths_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"Keys\.from_numpy: ids must have one shape.*from_lists"):
        hkv.Keys.from_numpy([[1, 2], [3]])


def test_words_that_are_none_are_named():
    table = hkv.create(128, 4)
    for words, got in (([5, 6], "list"), (None, "NoneType"), (np.arange(4), r"int64\[4\]")):
        keys = hkv.Keys(words)  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            TypeError, match=rf"find: keys\.words must be uint32\[\.\.\., 2\], got {got}"
        ):
            hkv.find(table, keys)


def test_ids_of_a_foreign_byte_order_are_made_keys_of_on_the_host():
    ids = np.array([5, 6], ">i8")
    with pytest.raises(TypeError, match=r"got >i8: its bytes .*Keys\.from_numpy\(ids\)"):
        hkv.contains(hkv.create(128, 4), ids)
    assert hkv.Keys.from_numpy(ids).to_numpy().tolist() == [5, 6]


def test_bags_are_named_all_that_takes_them():
    bags = hkv.Jagged.from_lists([[5]])
    with pytest.raises(
        TypeError, match=r"got Jagged.* Embed, .* bags\.ids, with valid=bags\.valid"
    ):
        hkv.find(hkv.create(128, 4), bags)


@pytest.mark.parametrize("compare", [hkv.less, hkv.less_equal, hkv.equal])
def test_numbers_whose_shapes_do_not_fit_are_not_compared(compare):
    a, b = np.arange(2, dtype=np.int32), hkv.Keys.from_numpy(np.arange(3))
    with pytest.raises(
        ValueError, match=rf"{compare.__name__}: a and b must have shapes .* got \[2\], \[3\]"
    ):
        compare(a, b)
    assert compare(a[:, None], b).shape == (2, 3)


def test_parts_that_cannot_be_joined_are_named():
    flat, deep = hkv.Keys.from_numpy([1, 2]), hkv.Keys.from_numpy([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"equally many axes.*\[\[2\], \[1, 3\]\]"):
        hkv.Keys.concatenate([flat, deep])
    with pytest.raises(ValueError, match=r"parts must agree in all axes but 0.*\[2, 2\]"):
        hkv.Keys.concatenate([deep, hkv.Keys.from_numpy([[1, 2], [3, 4]])])
    assert hkv.Keys.concatenate([deep, deep], np.int64(1)).shape == (1, 6)
    for axis in (True, 1.0, None):
        with pytest.raises(ValueError, match=f"axis must be from -2 to 1, got {axis}: give an int"):
            hkv.Keys.concatenate([deep, deep], axis)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="parts must be a list of Keys, got Keys"):
        hkv.Keys.concatenate(flat)  # pyright: ignore[reportArgumentType]
    assert not hkv.Keys.concatenate([flat, flat]).words.flags.writeable
    assert not flat[np.array([1, 0])].words.flags.writeable


def test_integers_are_refused_from_the_first_that_32_bits_do_not_hold():
    if jax.config.jax_enable_x64:
        pytest.skip("nothing is cut with x64 on")
    mesh = jax.make_mesh((1,), ("d",), devices=jax.devices("cpu")[:1])
    placement = hkv.sharding.Placement(mesh)
    for number in (2**31 - 1, -(2**31)):
        array = np.array([number])
        assert placement.put(array).tolist() == [number]
        outside = array + np.sign(number)
        with pytest.raises(TypeError, match="int64"):
            placement.put(outside)


SMALL = ("int8", "int16", "uint8", "uint16")


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("where", ["host", "device", "jit"])
def test_small_integers_are_the_keys_of_their_numbers(where, kind):
    """The lowest, the highest and what is between; with their sign, as `Keys.from_numpy`."""
    bounds = np.iinfo(kind)
    ids = np.array([bounds.min, 0, 1, bounds.max], kind)
    table, _ = hkv.find_or_insert(hkv.create(128, 4), hkv.Keys.from_numpy(ids.astype(np.int64)))
    given = ids if where == "host" else jnp.asarray(ids)
    contains = jax.jit(hkv.contains) if where == "jit" else hkv.contains
    assert contains(table, given)[1].all() and int(hkv.size(table)) == len(np.unique(ids))
    assert hkv.equal(given, hkv.Keys.from_numpy(ids)).all()


@pytest.mark.parametrize("dtype", [bool, np.float16, jnp.int4])
def test_what_is_no_integer_of_whole_bytes_is_no_key(dtype):
    with pytest.raises(TypeError, match="contains: keys must hold integers of 8 to 64 bits, got"):
        hkv.contains(hkv.create(128, 4), jnp.zeros(3, dtype))


LENGTHS = np.array([2, 0, 1])
SPLITS = np.concatenate([[0], np.cumsum(LENGTHS)])


@pytest.mark.parametrize("form", ["int64", "padding", "x64", "x64 in jit"])
def test_row_splits_may_have_the_64_bits_that_numpy_gives_a_sum(form):
    """Whoever makes them has `np.cumsum`, and a cast would lose nothing."""
    assert SPLITS.dtype == np.int64
    table, weights = hkv.create(128, 4), np.ones(5 if form == "padding" else 3, np.float32)
    ids = np.arange(len(weights), dtype=np.int32)

    def pooled(splits):
        bags = hkv.Jagged(ids, splits, weights)
        _, found = hkv.find_pooled(table, bags, fill="initial")
        return found.values, hkv.pool(jnp.ones((len(ids), 4), jnp.float32), row_splits=splits)

    expected = pooled(SPLITS.astype(np.int32))
    with jax.enable_x64(form.startswith("x64")):
        splits = jnp.asarray(SPLITS) if form == "x64" else SPLITS
        got = jax.jit(pooled)(splits) if form == "x64 in jit" else pooled(splits)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


FAR = 2**63 - 1
WRONG_SPLITS = {"beyond": [0, 2**32], "far": [0, FAR, -FAR - 1], "falling": [0, 2, 1]}


@pytest.mark.parametrize("name", WRONG_SPLITS)
def test_row_splits_whose_numbers_do_not_fit_are_refused(name):
    """A cast would make of some of them what fits."""
    bags = hkv.Jagged(np.arange(3, dtype=np.int32), np.array(WRONG_SPLITS[name]))
    with pytest.raises(ValueError, match=r"row_splits must start at 0, not decrease, and end at 3"):
        hkv.find_pooled(hkv.create(128, 4), bags)
    if name == "far":
        with jax.enable_x64(True):  # cut to the batch, as those of 32 bits are
            rows = jax.jit(lambda bags: hkv.find_pooled(hkv.create(128, 4), bags)[1].values)(bags)
        assert rows.shape == (2, 4) and np.isfinite(rows).all()


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
def test_row_splits_of_64_bits_are_put_on_devices(mode):
    mesh = jax.make_mesh((2,), ("d",), devices=jax.devices("cpu")[:2])
    placement = hkv.sharding.Placement(mesh, mode=mode)
    bags = [
        hkv.Jagged(np.array(ids, np.int32), np.array([0, 1, 3])) for ids in ([1, 2, 3], [4, 5, 6])
    ]

    def step(table, bags):
        table, result = hkv.sharding.find_or_insert_pooled(table, bags, axis_name="d")
        return table, result.counts

    table = placement.create(lambda: hkv.create(128, 4))
    table, counts = placement.step(step)(table, placement.put(hkv.sharding.concatenate(bags)))
    assert int(counts.inserted) == 6


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.int32])
def test_a_traced_number_below_0_is_no_high_one(kind):
    """As scores are: what JAX has cut to 32 bits may have any sign. Arrays are ids, extended."""
    keys, number = hkv.Keys.from_numpy(np.array([0, 5, 2**40])), kind(-3)
    for compare in (hkv.less, hkv.less_equal):
        name, on_both = (
            compare.__name__,
            jax.jit(lambda c, a, b: (c(a, b), c(b, a)), static_argnums=0),
        )
        below, above = on_both(compare, keys, number)
        for got, pair in ((below, (keys, 0)), (above, (0, keys))):
            assert got.tolist() == compare(*pair).tolist()
        with pytest.raises(
            ValueError, match=f"{name}: b must be an unsigned 64-bit .*got -3: Keys"
        ):
            compare(keys, jnp.asarray(number))
    for less in (hkv.less, jax.vmap(hkv.less)):
        assert jax.jit(less)(keys, np.full(3, number)).tolist() == [True] * 3
    assert jax.jit(hkv.equal)(hkv.Keys.from_numpy(np.int64(number)), number)
    with pytest.raises(TypeError, match=r"less: b must hold integers .* got key"):
        hkv.less(keys, jax.random.key(0))


# --- Crossed keys --------------------------------------------------------------------------------

PARTS = {
    "int32": np.array([[5, -1, 7], [5, 5, 2**31 - 1]], np.int32),
    "uint8": np.array([0, 1, 255], np.uint8),
    "keys": hkv.Keys.from_numpy(IDS[0, :2, :3]),
    "a number": 3,
}


def crossed(ids, seed):
    """The key of a combination of integers."""
    state = np.array([seed, len(ids)], np.uint64)
    for number in ids:
        words = np.array([int(number) % 2**32, int(number) % 2**64 >> 32], np.uint64)
        state = threefry(state, words) ^ words
    return int(state[0]) | int(state[1]) << 32


@pytest.mark.parametrize(
    ("key", "counter", "output"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_cipher_of_crossed_keys_is_threefry(key, counter, output):
    """Of Random123's known answers."""
    assert tuple(threefry(*np.array([key, counter], np.uint64))) == output


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
@pytest.mark.parametrize("where", ["host", "device", "jit"])
@pytest.mark.parametrize("names", [["int32"], ["int32", "keys"], ["uint8", "a number", "int32"]])
def test_crossed_keys_are_the_same_everywhere(names, where, seed):
    given = [PARTS[name] for name in names if name != "a number"]
    if where != "host":
        given = jax.tree.map(jnp.asarray, given)

    def cross(*arrays):
        left = iter(arrays)
        ids = (PARTS[name] if name == "a number" else next(left) for name in names)
        return hkv.Keys.cross(*ids, seed=seed)

    keys = (jax.jit(cross) if where == "jit" else cross)(*given)
    assert isinstance(keys.words, np.ndarray if where == "host" else jax.Array)
    wide = [PARTS[name].to_numpy() if name == "keys" else np.asarray(PARTS[name]) for name in names]
    every = np.broadcast_arrays(*wide)
    expected = [crossed(ids, seed) for ids in zip(*(own.ravel() for own in every), strict=True)]
    np.testing.assert_array_equal(
        keys.to_numpy().ravel(), np.array(expected, np.uint64).reshape(-1)
    )
    assert keys.shape == every[0].shape


def test_the_contract_has_examples_of_crossed_keys():
    """docs/semantics.md, section 14: for servers in other languages."""
    text = Path(__file__).parent.parent.joinpath("docs/semantics.md").read_text()
    examples = re.findall("0x[0-9a-f]{16}", text.split("\n## 14. ")[1])
    keys = [hkv.Keys.cross(7, 9), hkv.Keys.cross(7, 9, -1), hkv.Keys.cross(7, 2**40 + 9, seed=5)]
    assert [int(key.to_numpy()) for key in keys] == [int(each, 16) for each in examples]


def test_combinations_have_keys_of_their_own():
    """Small numbers in any order, a million pairs; heads; other numbers of ids; another seed."""
    numbers = np.arange(1024, dtype=np.int32)
    pairs = hkv.Keys.cross(numbers[:, None], numbers)
    heads = hkv.Keys.cross(numbers[:, None], numbers[:64], np.arange(1))
    other = hkv.Keys.cross(numbers[:, None], numbers[:64], seed=1)
    alone = hkv.Keys.cross(numbers)
    every = np.concatenate([keys.to_numpy().ravel() for keys in (pairs, heads, other, alone)])
    assert len(np.unique(every)) == len(every)
    assert len(np.unique(pairs.low)) > len(numbers) ** 2 * 0.9998  # of 32 bits 128 are expected


def test_every_bit_of_an_id_changes_half_of_its_crossed_key():
    ids = np.random.default_rng(0).integers(0, 2**63, (512, 2)).astype(np.uint64)
    keys = hkv.Keys.cross(ids[:, 0], ids[:, 1]).to_numpy()
    for part in range(2):
        for bit in range(64):
            others = ids.copy()
            others[:, part] ^= np.uint64(1 << bit)
            changed = hkv.Keys.cross(others[:, 0], others[:, 1]).to_numpy() ^ keys
            share = np.unpackbits(changed.view(np.uint8)).mean()
            assert 0.48 < share < 0.52  # 7 standard deviations


def test_an_id_is_the_same_in_a_cross_whichever_way_it_came():
    ids = np.array([5, -3], np.int64)
    given = [ids, ids.astype(np.int32), hkv.Keys.from_numpy(ids), jnp.array([5, -3], jnp.int8)]
    keys = [hkv.Keys.cross(own, 1).to_numpy() for own in given]
    for own in keys[1:]:
        np.testing.assert_array_equal(own, keys[0])
    assert hkv.Keys.cross(5, 1).to_numpy() == keys[0][0]


@pytest.mark.parametrize(
    ("ids", "options", "error", "message"),
    [
        ([], {}, ValueError, "ids must be one array at least"),
        ([np.ones(2)], {}, TypeError, r"Keys.cross: ids\[0\] must hold integers"),
        ([3, np.ma.array([1])], {}, TypeError, r"Keys.cross: ids\[1\] must not be a masked array"),
        ([jnp.ones(2)], {}, TypeError, r"Keys.cross: ids\[0\] must hold integers"),
        ([np.arange(2), np.arange(3)], {}, ValueError, "Keys.cross: ids must have shapes"),
        ([np.arange(2)], {"seed": -1}, ValueError, r"seed must be from 0 to 2\*\*32 - 1, got -1"),
        ([np.arange(2)], {"seed": 0.5}, ValueError, "seed must be"),
    ],
)
def test_what_cannot_be_crossed_is_named(ids, options, error, message):
    with pytest.raises(error, match=message):
        hkv.Keys.cross(*ids, **options)


def test_traced_row_splits_of_64_bits_are_cut_to_the_positions_before_to_32_bits():
    rows = jnp.ones((4, 1), jnp.float32)
    with jax.enable_x64(True):
        splits = jnp.array([0, 2, 2**32 + 1], jnp.int64)
        sums = jax.jit(lambda splits: hkv.pool(rows, row_splits=splits))(splits)
    assert sums.ravel().tolist() == [2, 2]
