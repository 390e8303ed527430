"""Counts of many tables: one array, and a mapping from names."""

from __future__ import annotations

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx
from jax_hkv._table_counts import TableCounts, of_one, total

SGD = hkv.optim.sgd(0.1)
NUMBERS = np.arange(18, dtype=np.int32).reshape(3, 6)


def counts_of(names, numbers=NUMBERS):
    return TableCounts(jnp.asarray(numbers[: len(names)]), tuple(names))


def test_counts_are_a_mapping_from_names():
    counts = counts_of("abc")
    assert [*counts] == ["a", "b", "c"] and len(counts) == 3 and "b" in counts and "d" not in counts
    assert counts["b"] == hkv.Counts(*range(6, 12)) and int(counts["c"].not_admitted) == 17
    assert dict(counts.items())["a"].hits == 1
    with pytest.raises(KeyError, match=r"'d': there are counts of the tables \['a', 'b', 'c'\]"):
        counts["d"]
    assert "names=('a', 'b', 'c')" in repr(counts)
    assert [*counts.under("layer/embed")] == ["layer/embed/a", "layer/embed/b", "layer/embed/c"]
    assert counts.under("") is counts


def test_counts_are_read_inside_of_programs_and_of_shapes():
    counts = counts_of("abc")
    assert int(jax.jit(lambda own: own["b"].hits + own["c"].unique)(counts)) == 7 + 12
    shapes = jax.eval_shape(lambda: counts)
    assert shapes["a"].hits == jax.ShapeDtypeStruct((), jnp.int32)
    fetched = jax.device_get(counts)
    assert isinstance(fetched.numbers, np.ndarray) and fetched["b"] == counts["b"]
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), counts)
    assert stacked["b"].hits.tolist() == [7, 7]
    behind = jax.vmap(lambda _: counts, out_axes=1)(jnp.arange(7))
    with pytest.raises(ValueError, match=r"numbers must be \[..., 3, 6\].*got \[3, 7, 6\]"):
        behind["b"]


def test_counts_are_read_while_others_are_waited_for():
    """By a host callback of the program that the others come from, say."""
    others, seen = counts_of("abc"), []

    def look(numbers):
        thread = threading.Thread(target=lambda: seen.append(int(others["a"].hits)), daemon=True)
        thread.start()
        thread.join(timeout=30)
        return numbers

    @jax.jit
    def program(numbers):
        return jax.pure_callback(look, jax.typeof(numbers), numbers)

    waited_for = TableCounts(program(jnp.asarray(NUMBERS)), tuple("abc"))
    assert int(waited_for["b"].hits) == 7 and seen == [1]


def test_counts_are_written_by_flax():
    counts = counts_of("abc")
    again = serialization.from_bytes(counts_of("abc", 0 * NUMBERS), serialization.to_bytes(counts))
    assert dict(again) == dict(counts)


def test_counts_of_one_table_are_its_own():
    own = of_one("a", hkv.Counts(*map(jnp.int32, range(6))))
    assert own["a"] == hkv.Counts(*range(6)) and own.numbers.shape == (1, 6)
    stacked = of_one("a", hkv.Counts(*(jnp.full(3, number) for number in range(6))))
    assert stacked.numbers.shape == (3, 1, 6) and stacked["a"].evicted.tolist() == [3] * 3


def test_totals_are_sums_by_name():
    first, second = counts_of("abc"), counts_of("cd", 100 * NUMBERS)
    same = total([first, first])
    assert same["b"] == hkv.Counts(*(2 * number for number in range(6, 12)))
    apart = total([counts_of("ab"), counts_of("cd")])
    assert [*apart] == ["a", "b", "c", "d"] and apart["d"] == hkv.Counts(*range(6, 12))
    both = total([first, second])
    assert [*both] == ["a", "b", "c", "d"] and both["a"] == first["a"]
    assert both["c"] == hkv.Counts(*(number + 12 + 100 * number for number in range(6)))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf, leaf]), first)
    assert total([stacked])["a"] == hkv.Counts(*(3 * number for number in range(6)))
    assert total([]) == {}
    with jax.enable_x64(True):
        for parts in ([first], [first, second], [stacked]):
            assert total(parts).numbers.dtype == jnp.int32


def test_counts_of_a_group_stay_32_bits_wide():
    with jax.enable_x64(True):
        collection = hkv.Collection(
            [hkv.TableConfig(name, 128, 4, optimizer=SGD) for name in "ab"],
            [hkv.Feature(name, name) for name in "ab"],
        )
        (group,) = collection.groups
        inputs = {name: np.arange(3, dtype=np.int32) for name in "ab"}
        _, found = collection.lookup(collection.create(), inputs, train=True)
        counts = group.counts(found.results[group.name])
    assert counts.numbers.dtype == jnp.int32 and int(counts["b"].inserted) == 3


@pytest.mark.parametrize("api", ["linen", "nnx"])
@pytest.mark.parametrize("fuse", [True, False])
def test_a_step_reports_all_tables_in_one_array(api, fuse):
    """Of two layers, whatever tables are put together."""
    names = [f"t{number}" for number in range(9)]
    collection = hkv.Collection(
        [hkv.TableConfig(name, 256, 4, optimizer=SGD) for name in names],
        [hkv.Feature(name, name) for name in names],
        fuse=fuse,
    )
    inputs = {name: np.arange(number + 1, dtype=np.int32) for number, name in enumerate(names)}

    class Linen(nn.Module):
        @nn.compact
        def __call__(self, inputs, train=False):
            layers = (hkv.linen.EmbedCollection(collection, name=name) for name in "xy")
            return sum(
                jnp.sum(rows) for layer in layers for rows in layer(inputs, train=train).values()
            )

    class Nnx(nnx.Module):
        def __init__(self):
            self.x, self.y = (hkv.nnx.EmbedCollection(collection) for _ in range(2))

        def __call__(self, inputs, train=False):
            layers = (self.x, self.y)
            return sum(
                jnp.sum(rows) for layer in layers for rows in layer(inputs, train=train).values()
            )

    def loss_fn(call, inputs):
        return call(inputs, train=True)

    if api == "linen":
        make = hkv.linen.TrainState.create
        state = make(Linen(), jax.random.key(0), inputs, tx=optax.sgd(0.1))
        state, info = hkv.linen.train_step(loss_fn)(state, inputs)
    else:
        info = hkv.nnx.train_step(loss_fn)(hkv.nnx.TrainState(Nnx(), optax.sgd(0.1)), inputs)
    assert len(jax.tree.leaves(info.counts)) == 1
    assert sorted(info.counts) == sorted(f"{layer}/{name}" for layer in "xy" for name in names)
    for number, name in enumerate(names):
        expected = hkv.Counts(number + 1, 0, number + 1, 0, 0, 0)
        assert info.counts[f"x/{name}"] == info.counts[f"y/{name}"] == expected
