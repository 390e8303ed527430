"""What users do wrong is named: by which call, which argument, and with a remedy."""

from __future__ import annotations

import dataclasses
import itertools
import os
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_sharding_traffic import mesh_of

import jax_hkv as hkv
import jax_hkv.linen
import jax_hkv.nnx
from jax_hkv import _ffi

IDS = np.arange(8, dtype=np.int32)
DIM = 4
SGD = hkv.optim.sgd(0.1)
USED_UP = "was used up by an earlier step, got arrays that were donated: go on with the "


class Towers(nn.Module):
    """Two layers of one shape."""

    @nn.compact
    def __call__(self, ids, train=False):
        layers = (hkv.linen.Embed(128, DIM, optimizer=SGD, name=name) for name in ("a", "b"))
        return sum(layer(ids, train=train) for layer in layers)


class NnxTowers(nnx.Module):
    """The same in nnx."""

    def __init__(self, rngs):
        self.a, self.b = (hkv.nnx.Embed(128, DIM, optimizer=SGD, rngs=rngs) for _ in range(2))
        self.dense = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, ids, train=False):
        return self.dense(self.a(ids, train=train) + self.b(ids, train=train))


def loss_fn(apply, ids):
    return jnp.mean(apply(ids, train=True) ** 2)


def linen_state():
    return hkv.linen.TrainState.create(Towers(), jax.random.key(0), IDS, tx=optax.sgd(0.1))


@pytest.mark.parametrize("call", [hkv.find, hkv.contains, hkv.find_or_insert, hkv.erase])
def test_a_table_that_was_donated_is_named_by_operations(call):
    table = hkv.create(128, DIM)
    jax.jit(lambda table: hkv.find_or_insert(table, IDS)[0], donate_argnums=0)(table)
    with pytest.raises(RuntimeError, match=rf"{call.__name__}: table {USED_UP}table"):
        call(table, IDS)
    with pytest.raises(RuntimeError, match=f"size: table {USED_UP}table"):
        hkv.size(table)


def test_a_table_that_a_step_has_used_up_is_named_in_evaluation():
    state = linen_state()
    after, _ = hkv.linen.train_step(loss_fn)(state, IDS)
    with pytest.raises(RuntimeError, match=f"find: table {USED_UP}table"):
        state.apply(IDS)
    assert after.apply(IDS).shape == (8, DIM)


def test_one_table_in_two_places_of_a_state_is_named_in_linen():
    state = linen_state()
    tables = dict.fromkeys("ab", state.tables["a"])
    with pytest.raises(ValueError, match=r"train_step: state must hold every array once.*\['b'\]"):
        hkv.linen.train_step(loss_fn)(state.replace(tables=tables), IDS)
    apart = state.replace(tables=tables | {"b": jax.tree.map(jnp.copy, tables["b"])})
    _, info = hkv.linen.train_step(loss_fn)(apart, IDS)
    assert np.isfinite(info.loss)


def test_one_table_in_two_places_of_a_model_is_named_in_nnx():
    model = NnxTowers(nnx.Rngs(0))
    model.b.table.set_value(model.a.table.get_value())
    state = hkv.nnx.TrainState(model, optax.sgd(0.1))
    with pytest.raises(ValueError, match="train_step: state must hold every array once"):
        hkv.nnx.train_step(loss_fn)(state, IDS)


@pytest.mark.parametrize("mode", ["shard_map", "pmap"])
@pytest.mark.parametrize("devices", [1, 2])
def test_one_array_in_two_places_of_a_placed_state_is_named(devices, mode):
    """Before JAX is asked: jaxlib ends the process, on a mesh of CPU devices."""
    mesh = jax.make_mesh((devices,), ("device",), devices=jax.devices("cpu")[:devices])
    placement = hkv.sharding.Placement(mesh, mode=mode)
    table = placement.create(lambda: hkv.create(128, DIM))

    def step(state, ids):
        tables = {
            name: hkv.sharding.find_or_insert(table, ids, axis_name="device")[0]
            for name, table in state.items()
        }
        return tables, jnp.int32(0)

    with pytest.raises(ValueError, match=r"Placement.step: state must hold every array once.*'b'"):
        placement.step(step)({"a": table, "b": table}, placement.put(IDS))
    after, _ = placement.step(step, donate=False)({"a": table, "b": table}, placement.put(IDS))
    assert int(after["a"].occupancy.sum()) == int(after["b"].occupancy.sum()) == len(IDS)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sharding.export_entries", hkv.sharding.export_entries),
        ("metrics.summarize", hkv.metrics.summarize),
    ],
)
def test_what_looks_at_a_table_on_the_host_is_refused_inside_of_jit(name, call):
    message = f"{name}: table must be looked at outside of jit, got a call that is traced: make it"
    table = hkv.create(128, DIM)
    with pytest.raises(TypeError, match=message):
        jax.jit(call)(table)
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda: call(table))()


def test_keys_are_not_made_of_traced_numbers_on_the_host():
    message = r"Keys.from_numpy: ids must be on the host, got int32\[8\] traced inside of jit"
    with pytest.raises(TypeError, match=message):
        jax.jit(hkv.Keys.from_numpy)(IDS)


def test_keys_are_no_list_of_ids():
    message = r"Jagged.from_lists: bag 1 must be a list or an array of integers, got Keys: give"
    with pytest.raises(TypeError, match=message):
        hkv.Jagged.from_lists([[5], hkv.Keys.from_numpy(IDS)])


@pytest.mark.parametrize("call", ["find_or_insert", "insert_or_assign", "assign", "erase"])
def test_arrays_of_another_rank_are_named(call):
    """31: rows and masks of as many elements, too."""
    table, rows = hkv.create(128, DIM), np.ones((8, DIM), np.float32)
    operation = getattr(hkv, call)
    given = {} if call in ("find_or_insert", "erase") else {"values": rows}
    for mask in (np.ones((8, 1), bool), np.ones((2, 4), bool), np.True_):
        with pytest.raises(TypeError, match=rf"{call}: valid must be bool\[8\] like the keys, got"):
            operation(table, IDS, **given, valid=mask)
    if call == "erase":
        return
    for other in (rows[0], rows.reshape(-1), rows[None], rows[:, :, None]):
        expected = rf"{call}: values must have shape \[8, {DIM}\].* got \[{other.shape[0]}"
        with pytest.raises(ValueError, match=expected):
            operation(table, IDS, values=other)


@pytest.mark.parametrize("what", ["keys", "words", "valid", "values"])
def test_a_batch_that_was_donated_is_named(what):
    """As a table is; JAX's own error names neither call nor argument."""
    given: dict[str, Any] = {
        "keys": jnp.arange(8),
        "valid": jnp.ones(8, bool),
        "values": jnp.ones((8, DIM)),
    }
    if what == "words":
        given["keys"] = hkv.Keys(jnp.zeros((8, 2), jnp.uint32))
    jax.tree.leaves(given["keys" if what == "words" else what])[0].delete()
    named = "keys" if what == "words" else what
    with pytest.raises(RuntimeError, match=f"insert_or_assign: {named} was used up.*donated"):
        hkv.insert_or_assign(hkv.create(128, DIM), **given)


def test_a_table_whose_rows_were_donated_is_named():
    table = hkv.create(128, DIM)
    table.values.delete()
    with pytest.raises(RuntimeError, match=f"find: table {USED_UP}table"):
        hkv.find(table, IDS)


def test_rows_of_integers_are_refused():
    """Whoever replaces a table's rows: nobody starts or updates those of other numbers."""
    table = hkv.create(128, DIM)
    table = dataclasses.replace(table, values=table.values.astype(jnp.int32))
    for call in (hkv.find, hkv.find_or_insert, hkv.initial_rows):
        with pytest.raises(TypeError, match=f"{call.__name__}: table must have rows of float32, .* "
                                            "got int32"):  # fmt: skip
            call(table, IDS)


def test_random_keys_and_numbers_of_64_bits_are_no_arguments():
    table = hkv.create(128, DIM)
    with pytest.raises(TypeError, match="find: keys must hold integers .* got key<"):
        hkv.find(table, jax.random.key(0))
    with pytest.raises(TypeError, match=r"find: valid must be bool\[8\] like the keys, got"):
        hkv.find(table, IDS, valid=2**31)


@pytest.mark.parametrize("bags", [[{5: 0.5, 6: 2.0}], [[5], {}]])
def test_bags_are_no_dicts(bags):
    """Of which the weights were lost."""
    with pytest.raises(TypeError, match="must be a list or an array of integers, got dict"):
        hkv.Jagged.from_lists(bags)


@pytest.mark.parametrize("name", ["keys", "scores", "values", "counters"])
def test_masks_of_exports_are_not_lost(name):
    rule = hkv.admission.frequency(2, width=64, depth=2)
    table = hkv.find_or_insert(hkv.create(128, DIM, admission=rule), np.tile(IDS, 2))[0]
    exported = hkv.sharding.export_entries(table)
    masked = np.ma.masked_array(getattr(exported, name), mask=True)
    with pytest.raises(TypeError, match=rf"import_entries: exported\.{name}.*asked"):
        hkv.sharding.import_entries(None, hkv.create(128, DIM), exported._replace(**{name: masked}))


def test_a_time_that_cannot_go_on_is_refused():
    exported = hkv.sharding.export_entries(hkv.create(128, DIM))._replace(clock=2**63)
    with pytest.raises(ValueError, match=r"exported\.clock must be from 0 to 9223372036854775807"):
        hkv.sharding.import_entries(None, hkv.create(128, DIM), exported)


@pytest.mark.parametrize("bits", [np.int64, np.uint64, np.float64, np.complex128])
def test_a_digest_is_of_all_bits(bits):
    one, other = (np.array([number, 3], bits) for number in (1, 1 + 2**40))
    digests = [hkv.sharding.digest({"a": leaf}).tolist() for leaf in (one, other, one.copy())]
    assert digests[0] == digests[2] != digests[1]


def test_gradients_of_integers_are_not_clipped_to_zeros():
    with pytest.raises(TypeError, match=r"gradients must be floating-point .* int32\[2\].*cast"):
        hkv.optim.clip_by_global_norm(1.0, {"w": np.array([3, 4], np.int32)}, [], [])


@pytest.mark.parametrize("wrong", [0, -1, None, "abc"])
def test_a_batch_of_no_parts_is_refused(wrong):
    placement = hkv.sharding.Placement(jax.make_mesh((1,), ("device",)))
    with pytest.raises((TypeError, ValueError), match=r"Placement\.put: micro_batches must be"):
        placement.put(IDS, micro_batches=wrong)


LAYER = {"policy": hkv.Policy.LFU, "choices": 2, "seed": 7, "param_dtype": jnp.bfloat16}
LAYER |= {"admission": hkv.admission.frequency(3), "embedding_init": hkv.initializers.ones()}


@pytest.mark.parametrize("name", LAYER)
@pytest.mark.parametrize("layer", [hkv.linen.Embed, hkv.linen.EmbedBag])
def test_a_layer_that_trains_a_table_of_another_kind_says_so(layer, name):
    """The table would decide, silently. To read it, its size is enough."""
    made, other = layer(256, DIM), layer(256, DIM, **{name: LAYER[name]})
    ids, mutable = IDS[:, None], [*hkv.linen.MUTABLE, hkv.linen.PERTURBATIONS]
    variables = made.init(jax.random.key(0), ids)
    made.apply(variables, ids, train=True, mutable=mutable)
    np.testing.assert_array_equal(other.apply(variables, ids), made.apply(variables, ids))
    for one, own in ((other, variables), (made, other.init(jax.random.key(0), ids))):
        shown = r".*(LFU, got LRU|LRU, got LFU)" if name == "policy" else ""
        with pytest.raises(ValueError, match=rf"{layer.__name__}: {name} must be that of{shown}"):
            one.apply(own, ids, train=True, mutable=mutable)


@pytest.mark.parametrize("name", ["choices", "seed", "init", "admission"])
def test_a_collection_that_trains_a_table_of_another_kind_says_so(name):
    """Those of its policy and of its type of rows it does not read either."""
    settings = {**LAYER, "init": hkv.initializers.ones()}
    configs = [
        hkv.TableConfig("t", 256, DIM, optimizer=SGD, **own) for own in ({}, {name: settings[name]})
    ]
    made, other = (hkv.Collection([own], [hkv.Feature("f", "t")]) for own in configs)
    tables = made.create()
    rows = [own.lookup(tables, {"f": IDS})[1].rows["t"] for own in (made, other)]
    np.testing.assert_array_equal(rows[0], rows[1])
    made.lookup(tables, {"f": IDS}, train=True)
    with pytest.raises(ValueError, match=rf"lookup of 't': {name} must be that of the table"):
        other.lookup(tables, {"f": IDS}, train=True)


def test_names_of_features_are_text():
    wrong: Any
    for wrong in (None, ["f"], 3):
        with pytest.raises(TypeError, match="Feature .*: name must be a str, got"):
            hkv.Feature(wrong, "t")
        with pytest.raises(TypeError, match="Feature 'f': table must be a str, got"):
            hkv.Feature("f", wrong)
    wrong = np.array(["sum", "mean"])
    with pytest.raises(ValueError, match="Feature 'f': combiner must be one of"):
        hkv.Feature("f", "t", wrong)


def test_entries_are_not_written_over_what_is_no_file(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(OSError, match="save_entries: path must be that of a file"):
        hkv.sharding.save_entries(path, hkv.sharding.export_entries(hkv.create(128, DIM)))
    assert path.is_fifo()


def test_weights_of_float64_are_those_of_float32():
    """As numbers are where x64 is on."""
    table, _ = hkv.find_or_insert(hkv.create(128, DIM), IDS)
    weights = np.linspace(0.1, 2, 8).reshape(4, 2)
    with jax.enable_x64(True):
        rows = [
            hkv.find_pooled(table, IDS.reshape(4, 2), weights=own)[1].values
            for own in (weights, weights.astype(np.float32), weights.tolist())
        ]
        by_weights = jax.grad(
            lambda own: hkv.find_pooled(table, IDS.reshape(4, 2), weights=own)[1].values.sum()
        )(jnp.asarray(weights))
    assert rows[0].dtype == jnp.float32 and by_weights.dtype == jnp.float64
    for own in rows[1:]:
        np.testing.assert_array_equal(rows[0], own)


def test_what_a_step_returns_is_told_where_it_was_forgotten():
    state, step = linen_state(), hkv.linen.train_step(loss_fn, donate=False)
    with pytest.raises(
        TypeError, match=r"got builtins\.tuple: .*state, info = step\(state, \*args"
    ):
        step(step(state, IDS), IDS)
    state = hkv.nnx.TrainState(NnxTowers(nnx.Rngs(0)), optax.sgd(0.1))
    step = hkv.nnx.train_step(lambda model, ids: jnp.mean(model(ids, train=True) ** 2))
    info = step(state, IDS)
    with pytest.raises(
        TypeError, match=r"got .*StepInfo: .* changes its state .* info = step\(state, \*"
    ):
        step(info, IDS)
    table = SGD.init(hkv.create(128, DIM))
    both = hkv.find_or_insert(table, IDS)
    with pytest.raises(
        TypeError, match=r"result must be .*got both .*return \(table, result\), unp"
    ):
        SGD.update(table, both, both[1].values)


def test_an_nnx_clone_of_a_state_that_was_used_up_is_named():
    """It has the arrays of the first."""
    state = hkv.nnx.TrainState(NnxTowers(nnx.Rngs(0)), optax.sgd(0.1))
    step = hkv.nnx.train_step(lambda model, ids: jnp.mean(model(ids, train=True) ** 2))
    clone = nnx.clone(state)
    step(state, IDS)
    with pytest.raises(
        RuntimeError, match=r"train_step: state was used up .*copy\.deepcopy\(state"
    ):
        step(clone, IDS)


def test_gradients_of_nnx_are_scaled_alone():
    """The lookups beside them are keys and slots: scaled, or summed, they are others."""
    model = hkv.nnx.Embed(128, DIM, optimizer=SGD)
    before = model(IDS)
    differentiate = hkv.nnx.value_and_grad(lambda model, ids: model(ids, train=True).sum())
    *_, rows = differentiate(model, IDS)
    with pytest.raises(
        TypeError, match=r"row_gradients\['table'\]\.results must be .* as float32: "
    ):
        hkv.nnx.update_tables(model, jax.tree.map(lambda leaf: leaf * 0.5, rows))
    half = {
        where: own._replace(gradients=jax.tree.map(lambda leaf: leaf * 0.5, own.gradients))
        for where, own in rows.items()
    }
    hkv.nnx.update_tables(model, half)
    np.testing.assert_allclose(before - model(IDS), 0.05, rtol=1e-5)
    *_, others = differentiate(model, IDS)
    both = {
        where: hkv.nnx.RowGradients(
            *(mine + more for mine, more in zip(own, others[where], strict=True))
        )
        for where, own in rows.items()
    }
    before = model(IDS)
    hkv.nnx.update_tables(model, both)
    np.testing.assert_allclose(before - model(IDS), 0.2, rtol=1e-5)


def test_a_flag_that_is_traced_is_named_with_a_remedy():
    layer = nn.remat(hkv.linen.Embed)(128, DIM)
    with pytest.raises(
        TypeError, match=r"Embed: train must be True or False.*traced: .*static_argn"
    ):
        layer.init(jax.random.key(0), IDS, train=False)


# --- Shapes in the place of arrays ---------------------------------------------------------------

MADE = hkv.optim.adam(0.1).init(hkv.create(256, 2))
OF_SHAPES = {
    "size": hkv.size,
    "find": lambda table: hkv.find(table, IDS),
    "insert_or_assign": lambda table: hkv.insert_or_assign(table, IDS, np.ones((len(IDS), 2))),
    "grow": lambda table: hkv.grow(table, 512),
    "erase_if": lambda table: hkv.erase_if(table, lambda keys, *_: hkv.less(keys, 3)),
    "optim.init": hkv.optim.adam(0.1).init,
    "metrics.summarize": hkv.metrics.summarize,
    "tiered.create_store": lambda table: hkv.tiered.create_store(table, 1024),
    "sharding.export_entries": hkv.sharding.export_entries,
    "sharding.import_entries": lambda table: hkv.sharding.import_entries(
        None, table, hkv.sharding.export_entries(MADE)
    ),
    "sharding.import_changes": lambda table: hkv.sharding.import_changes(
        None, table, hkv.sharding.export_changes(MADE, None)
    ),
}


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (call, part)
        for call, part in itertools.product(OF_SHAPES, ["all", "digests", "rows"])
        if (call, part) != ("tiered.create_store", "all")  # whose store is of shapes
    ],
)
def test_a_table_of_shapes_is_named(call, part):
    """What a partial restore has not found stays the shape that it was given."""
    shapes = jax.eval_shape(lambda: MADE)
    index = dataclasses.replace(MADE.index, digests=shapes.index.digests)
    rows = dataclasses.replace(MADE.optimizer, rows=shapes.optimizer.rows)
    table = {
        "all": shapes,
        "digests": dataclasses.replace(MADE, index=index),
        "rows": dataclasses.replace(MADE, optimizer=rows),
    }[part]
    message = rf"^{call}: table must hold arrays, got the shape of one, ShapeDtype.*partial restore"
    with pytest.raises(TypeError, match=message):
        OF_SHAPES[call](table)


def test_compiled_modules_that_are_older_than_the_package_are_named():
    with pytest.raises(RuntimeError, match=r"no operation update_by_magic.*install it again"):
        _ffi.call("update_by_magic")


@pytest.mark.parametrize(
    ("mask", "remedy"),
    [
        (np.ones(8, np.int32), r"int32\[8\]: cast with .astype\(bool\)$"),
        (np.ones((2, 4), bool), r"bool\[2, 4\]: reshape to \[8\]$"),
        (np.True_, r"bool\[\]: give one of that shape, by jnp.broadcast_to\(..., \(8,\)\) where"),
        (np.ones(3), r": cast with .astype\(bool\), and give one of that shape"),
    ],
)
def test_the_remedy_for_a_mask_is_of_what_is_wrong(mask, remedy):
    with pytest.raises(
        TypeError, match=rf"find: valid must be bool\[8\] like the keys, got .*{remedy}"
    ):
        hkv.find(hkv.create(128, DIM), IDS, valid=mask)


def test_a_table_of_several_takes_no_ids_that_do_not_say_whose_they_are():
    """Those of its first table would be found, written and erased, and reported as a success."""
    tables = [hkv.TableConfig(name, 256, 2) for name in ("users", "items")]
    (group,) = hkv.Collection(tables, [hkv.Feature(own.name, own.name) for own in tables]).groups
    ids, rows = np.array([5, 6], np.int32), np.ones((2, 2), np.float32)
    table, _ = hkv.find_or_insert(group.create(), group.keys("users", ids))
    calls = {
        "find": lambda keys: hkv.find(table, keys),
        "contains": lambda keys: hkv.contains(table, keys),
        "export_keys": lambda keys: hkv.export_keys(table, keys),
        "find_or_insert": lambda keys: hkv.find_or_insert(table, keys),
        "insert_or_assign": lambda keys: hkv.insert_or_assign(table, keys, rows),
        "assign": lambda keys: hkv.assign(table, keys, rows),
        "erase": lambda keys: hkv.erase(table, keys),
    }
    calls["insert_and_evict"] = lambda keys: hkv.insert_and_evict(table, keys, rows)
    calls["initial_rows"] = lambda keys: hkv.initial_rows(table, keys)
    calls["find_pooled"] = lambda keys: hkv.find_pooled(table, keys.reshape(1, 2))
    calls["find_or_insert_pooled"] = lambda keys: hkv.find_or_insert_pooled(
        table, hkv.Jagged(keys, np.array([0, 2], np.int32))
    )
    for name, call in calls.items():
        argument = {"find_pooled": "ids", "find_or_insert_pooled": r"ids\.ids"}.get(name, "keys")
        message = rf"^{name}: {argument} must be jax_hkv.Keys, of group\.keys"
        for given in (ids, [5, 6]):
            if "pooled" not in name or given is ids:
                with pytest.raises(TypeError, match=message):
                    call(given)
        call(group.keys("items", ids))
    with pytest.raises(TypeError, match="find_pooled: ids must not be a masked array"):
        hkv.find_pooled(table, np.ma.masked_equal(ids, 5))
    alone = hkv.Collection(tables[:1], [hkv.Feature("users", "users")]).groups[0].create()
    hkv.erase(alone, ids)


def test_tiers_of_a_table_of_several_take_no_ids_that_do_not_say_whose_they_are():
    """Users' entries were made for ids of items, and over devices, too."""
    tables = [hkv.TableConfig(name, 256, 2) for name in ("users", "items")]
    (group,) = hkv.Collection(tables, [hkv.Feature(own.name, own.name) for own in tables]).groups
    ids, splits = np.arange(4, dtype=np.int32), np.array([0, 4], np.int32)
    forms = {
        "": lambda keys: keys,
        r"\.ids": lambda keys: hkv.Jagged(keys, splits),
        r"\.ids\.ids": lambda keys: hkv.Padded(hkv.Jagged(keys, splits)),
    }
    placement = hkv.sharding.Placement(mesh_of(1))
    for where, form in forms.items():
        for own in (None, placement):
            cache = group.create() if own is None else own.create(group.create)
            store = hkv.tiered.create_store(cache, 1024, placement=own)
            tiers = hkv.tiered.Tiers(cache, store)
            put = (lambda keys: keys) if own is None else own.put
            of_items = put(form(group.keys("items", ids)))
            wrong = rf"{where} must be jax_hkv\.Keys, of group\.keys"
            if own is not None and "ids.*ids" in where:
                continue
            with pytest.raises(TypeError, match=r"^tiered\.prefetch: keys" + wrong):
                hkv.tiered.prefetch(tiers, put(form(ids)), placement=own)
            for coming, pair in (("keys", (ids, None)), ("coming", (None, ids))):
                given = [of_items if keys is None else put(form(keys)) for keys in pair]
                with pytest.raises(
                    TypeError, match=rf"^tiered\.step_and_prefetch: {coming}" + wrong
                ):
                    hkv.tiered.step_and_prefetch(
                        lambda table: (table, None), tiers, *given, placement=own
                    )
            tiers, counts = hkv.tiered.prefetch(tiers, of_items, placement=own)
            assert int(counts.inserted) == len(ids)


def test_operations_over_devices_of_a_table_of_several_take_keys_alone():
    tables = [hkv.TableConfig(name, 256, 2) for name in ("users", "items")]
    (group,) = hkv.Collection(tables, [hkv.Feature(own.name, own.name) for own in tables]).groups
    placement = hkv.sharding.Placement(mesh_of(2))
    ids, rows = np.arange(4, dtype=np.int32), np.ones((4, 2), np.float32)
    splits = {"axis_name": placement.axes}
    calls = {
        "find": lambda table, keys: hkv.sharding.find(table, keys, **splits),
        "find_or_insert": lambda table, keys: hkv.sharding.find_or_insert(table, keys, **splits),
        "assign": lambda table, keys: hkv.sharding.assign(table, keys, rows[:2], **splits),
        "erase": lambda table, keys: hkv.sharding.erase(table, keys, **splits),
        "find_pooled": lambda table, keys: hkv.sharding.find_pooled(
            table, keys.reshape(-1, 1), **splits
        ),
    }
    for name, call in calls.items():
        table = placement.create(group.create)
        step = placement.step(call, donate=False)
        with pytest.raises(TypeError, match=rf"sharding\.{name}: .* of group\.keys"):
            step(table, placement.put(ids))
        step(table, placement.put(group.keys("items", ids)))


def test_bags_of_a_table_of_several_get_its_keys():
    tables = [hkv.TableConfig(name, 256, 1) for name in ("users", "items")]
    (group,) = hkv.Collection(tables, [hkv.Feature(own.name, own.name) for own in tables]).groups
    table = group.create()
    for name, row in (("users", 2.0), ("items", 9.0)):
        keys = group.keys(name, np.array([5, 6], np.int32))
        table, _ = hkv.insert_or_assign(table, keys, jnp.full((2, 1), row, jnp.float32))
    bags = hkv.Jagged.from_lists([[5, 6], []])
    both = {
        "jagged": (bags, [[18.0], [0.0]]),
        "padded": (hkv.Padded(np.array([[5, 6]], np.int32), np.array([[True, False]])), [[9.0]]),
        "both": (hkv.Padded(bags, np.array([False, True])), [[9.0], [0.0]]),
    }
    for given, expected in both.values():
        keyed = group.keys("items", given)
        assert type(keyed) is type(given)
        assert hkv.find_pooled(table, keyed)[1].values.tolist() == expected


def test_a_table_that_is_used_up_is_shown_as_such():
    table = hkv.create(128, 2)
    assert "used up" not in repr(table)
    jax.jit(hkv.clear, donate_argnums=0)(table)
    assert repr(table).endswith(", used up)")


def test_a_variable_is_named_where_parts_are_wanted():
    embed = hkv.nnx.Embed(128, 2)
    for call in (
        hkv.sharding.export_entries,
        lambda own: next(iter(hkv.sharding.export_chunks(own, 9))),
    ):
        with pytest.raises(TypeError, match=r"tables must be a .*Table, got TableVariable"):
            call(embed.table)


def test_a_table_of_references_is_named():
    table = jax.tree.map(jax.new_ref, hkv.create(128, 4))
    for call in (hkv.find, hkv.find_or_insert):
        with pytest.raises(TypeError, match=r"clock must be an array, got Ref.*ref\[\.\.\.\]"):
            call(table, jnp.array([1]))
    whole = jax.tree.map(lambda ref: ref[...], table)
    assert not hkv.find(whole, jnp.array([1]))[1].found.any()


def test_axes_of_vmap_are_none_of_devices():
    def find(ids):
        return hkv.sharding.find(hkv.create(128, 4), ids, axis_name="batch")[1].values

    with pytest.raises(ValueError, match="shard_map") as caught:
        jax.vmap(find, axis_name="batch")(jnp.arange(8).reshape(2, 4))
    assert "must be axes of devices" in caught.value.__notes__[0]


def test_a_setting_that_is_traced_is_named_with_a_remedy():
    with pytest.raises(TypeError, match="create: capacity must be an integer.*make it static"):
        jax.eval_shape(hkv.create, 256, 4)
