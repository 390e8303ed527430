"""What the documents show runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import itertools
import pkgutil
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import jax_hkv

ROOT = Path(__file__).parent.parent
FENCED = r"```python\n(.*?)```"
INDENTED = r"(?<=\n\n)((?: {4}[^\n]*\n|\n(?= {4}))+)"
NATIVE = {"_cpu", "_cuda"}
MODULES = [m.name for m in pkgutil.iter_modules(jax_hkv.__path__) if m.name not in NATIVE]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_hold(name):
    """Every docstring example is a doctest."""
    module = importlib.import_module(f"jax_hkv.{name}")
    assert doctest.testmod(module, verbose=False).failed == 0


def blocks_of(name: str, pattern: str) -> list[str]:
    """The pieces of a document, with empty lines before them, so that errors name its lines."""
    text = (ROOT / name).read_text()
    spans = (match.span(match.lastindex) for match in re.finditer(pattern, text, re.DOTALL))
    return ["\n" * text.count("\n", 0, first) + dedent(text[first:end]) for first, end in spans]


def run(name: str, blocks: list[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """The namespace after all blocks, each continuing from those before it."""
    for block in blocks:
        exec(compile(block, ROOT / name, "exec", dont_inherit=True), namespace)
    return namespace


def test_the_code_in_the_readme_runs(capsys, tmp_path):
    """As it stands there, given a path for its checkpoint; what is restored is what was saved."""
    blocks = blocks_of("README.md", FENCED)
    assert len(blocks) == 3
    after = run("README.md", blocks[:2], {"__name__": "readme", "path": tmp_path / "table"})
    assert after["logits"].shape == (256,) and float(after["info"].loss) < 0.69  # of a coin: 0.693
    saved = after["table"]
    restored = run("README.md", blocks[2:], after)["table"]
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    assert [path.name for path in tmp_path.iterdir()] == ["table"]
    assert "Table('table', capacity=100,096, dim=16" in capsys.readouterr().out


def test_the_tutorial_runs_from_its_first_block_to_its_last(capsys):
    """Its blocks check what they claim."""
    blocks = blocks_of("docs/tutorial.md", FENCED)
    assert len(blocks) == 6
    assert all("print(" in block and "assert" in block for block in blocks)
    run("docs/tutorial.md", blocks, {"__name__": "tutorial"})
    printed = capsys.readouterr().out
    assert "policy           LFU, 2 candidate bucket(s)" in printed


def test_the_code_for_those_who_come_from_another_library_runs():
    """Its blocks check what they claim."""
    blocks = blocks_of("docs/migration.md", FENCED)
    assert len(blocks) == 5 and all("assert" in block for block in blocks)
    run("docs/migration.md", blocks, {"__name__": "migration"})


def test_the_language_model_learns_its_text():
    """Its block checks what it claims."""
    (block,) = blocks_of("docs/language-models.md", FENCED)
    after = run("docs/language-models.md", [block], {"__name__": "language_models"})
    table = after["state"].model.trigrams.rows.table.get_value()
    assert table.dtype == "bfloat16" and 5_000 < int(jax_hkv.size(table)) < 50_000


def test_the_models_of_graphs_learn():
    """Their blocks check what they claim."""
    blocks = blocks_of("docs/graphs.md", FENCED)
    assert len(blocks) == 3 and all("assert" in block for block in blocks)
    after = run("docs/graphs.md", blocks, {"__name__": "graphs"})
    entities = after["state"].model.entities.table.get_value()
    assert int(jax_hkv.size(entities)) == after["ENTITIES"]
    nodes = after["graph"].model.nodes.table.get_value()
    keys = jax_hkv.Keys.from_numpy(after["ids"][after["late"]])
    assert not jax_hkv.contains(nodes, keys)[1].any()


@pytest.mark.parametrize(
    ("name", "count"),
    [("recipes", 14), ("changing", 6), ("retrieval", 6), ("streaming", 6), ("input", 6)],
)
def test_the_recipes_do_what_they_say(name, count):
    """Their blocks check what they claim; the first is what the others need."""
    blocks = blocks_of(f"docs/{name}.md", FENCED)
    assert len(blocks) == count and all("assert" in block for block in blocks[1:])
    run(f"docs/{name}.md", blocks, {"__name__": name})


@pytest.mark.parametrize(("first", "needed"), [(0, "equinox"), (2, "keras"), (3, "jax")])
def test_the_code_for_other_frameworks_runs(first, needed, tmp_path, monkeypatch, capsys):
    """Its blocks check what they claim; those of packages that no extra has, where they are."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip(needed)
    blocks = blocks_of("docs/frameworks.md", FENCED)
    assert len(blocks) == 4 and all("assert" in block for block in blocks)
    given = {"hkv": jax_hkv, "jax": jax, "np": np, "rng": np.random.default_rng(0)}
    given["path"] = tmp_path / "model"
    run("docs/frameworks.md", blocks[first : {0: 2}.get(first, first + 1)], given)
    assert needed != "equinox" or "made otherwise" in capsys.readouterr().out


def test_the_code_in_the_guide_runs(tmp_path):
    """Its pieces, given what they speak of: a table with its optimizer, keys, a model, ..."""
    opt = jax_hkv.optim.adagrad(0.1)
    daily = jax_hkv.Collection(
        [
            jax_hkv.TableConfig(name, 256, 4, policy=jax_hkv.Policy.EPOCH_LRU)
            for name in ("queries", "items")
        ],
        [jax_hkv.Feature("query", "queries"), jax_hkv.Feature("item", "items")],
    )

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids, train=False):
            embed = jax_hkv.linen.Embed(
                256, 4, optimizer=opt, policy=jax_hkv.Policy.EPOCH_LRU, name="embed"
            )
            return nn.Dense(1)(embed(ids, train=train))[:, 0]

    given = {
        "hkv": jax_hkv,
        "itertools": itertools,
        "jax": jax,
        "np": np,
        "optax": optax,
        "model": Model(),
        "ids": np.array([1, 2], np.int32),
        "labels": np.array([0, 1], np.float32),
        "opt": opt,
        "table": opt.init(jax_hkv.create(256, 4)),
        "keys": np.array([1, 2, 3], np.int32),
        "more": np.array([3, 4], np.int32),
        "rows": np.ones((2, 4), np.float32),
        "item_ids": np.array([5, 2**60]),
        "item_rows": np.ones((2, 64), np.float32),
        "gradients": np.ones((3, 4), np.float32),
        "folder": tmp_path,
        "daily": daily,
        "of_days": daily.group_of("items").create(),
    }
    blocks = blocks_of("docs/guide.md", f"{FENCED}|{INDENTED}")
    text = (ROOT / "docs" / "guide.md").read_text()
    place = text.count("\n", 0, text.index("## Serving"))  # where serving.md goes on
    first = [block for block in blocks if len(block) - len(block.lstrip("\n")) < place]
    assert 5 <= len(first) < len(blocks)
    after = run("docs/guide.md", first, given)
    serving = blocks_of("docs/serving.md", f"{FENCED}|{INDENTED}")
    assert len(serving) >= 5
    server = run("docs/serving.md", serving, dict(after))
    after = run("docs/guide.md", blocks[len(first) :], after)
    assert int(after["erased"]) == 2  # the keys of `more`
    assert int(jax_hkv.size(after["table"])) == 6  # the ids of `bags`, and `keys`
    assert server["changes"].removed.size == 1  # the first of `keys`
    left = (jax_hkv.sharding.export_entries(server[name]).keys for name in ("serving", "table"))
    assert set(next(left)) == set(next(left))
    np.testing.assert_array_equal(after["rows"], after["result"].values)  # each key once
    assert int(after["info"].tables["embed/table"].hits) == 2  # the second time, of a prefetch
    assert int(after["state"].tables["embed"]["table"].epoch[0]) == 1  # a day later
    assert {path: int(count) for path, count in after["expired"].items()} == {"embed/table": 0}
    assert [group.name for group in after["collection"].groups] == ["users+items"]
    assert int(after["written"]["items"].counts.inserted) == 2
    assert int(after["forgotten"]["users"].counts.hits) == 0
    trained = after["collection"].sizes(after["trained"])
    assert {name: int(count) for name, count in trained.items()} == {"users": 2, "items": 2}
    (bias,) = server["variables"]["params"]["Dense_0"]["bias"]
    assert bias != 0 and int(jax_hkv.size(server["variables"]["tables"]["embed"]["table"])) == 2
    sizes = after["collection"].sizes(after["tables"])
    assert {name: int(count) for name, count in sizes.items()} == {"users": 0, "items": 2}
    assert int(after["removed"]["users"].counts.hits) == 2  # that a prefetch had brought
    cache = after["state"].tables["embed"]["table"]
    both = jax_hkv.tiered.Tiers(cache, after["tiers"].store)
    assert jax_hkv.tiered.size(both) == 4  # `ids`, and two that came after them
    _, found = jax_hkv.find(server["serving"], server["ids"], fill="initial")
    np.testing.assert_array_equal(server["served"], found.values)
    assert server["logits"].shape == (2,)
    entries, keys = server["entries"], jax_hkv.Keys.from_numpy(server["entries"].keys)
    _, rows = server["dequantised"](server["int8"], keys)
    steps = np.abs(entries.values).max(axis=1, keepdims=True) / 127
    assert (
        np.isnan(server["packed"]).any() and (np.abs(rows - entries.values) <= 0.501 * steps).all()
    )


def test_the_code_about_many_devices_runs(capsys, tmp_path):
    """Its pieces continue each other, on four devices and on two."""
    if len(jax.devices()) < 4:
        pytest.skip(f"it wants four devices, there is {len(jax.devices())} {jax.devices()[0]}")
    blocks = blocks_of("docs/sharding.md", FENCED)
    assert len(blocks) >= 5
    given = {"__name__": "sharding", "path": tmp_path / "entries"}
    after = run("docs/sharding.md", blocks, given)
    assert after["logits"].shape == (64,)
    assert int(after["erased"]) == 4 * 8  # `look_up` inserts them again
    assert after["lost"].count.shape == (4,) and not int(after["given_back"].inserted)
    assert int(after["counts"].inserted) == len(after["exported"].keys) == 5632
    assert int(after["moved"]["users"].inserted) == int(jax_hkv.size(after["state"]["users"])) > 0
    assert int(jax_hkv.size(after["one"])) == 5632
    assert after["misplaced"].tolist() == [0] * 4
    assert len(after["both"].keys) == after["changes"].keys.size > 0
    assert "all-to-all" in capsys.readouterr().out


def test_modules_export_what_documents_name():
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = set(re.findall(r"\bhkv\.(\w+)\.(\w+)", "".join(map(Path.read_text, documents))))
    named = {(module, name) for module, name in named if module in MODULES}  # not of a class
    modules = {name: importlib.import_module(f"jax_hkv.{name}") for name, _ in named}
    missing = [f"{own}.{name}" for own, name in named if name not in modules[own].__all__]
    unknown = [
        f"{own}.{name}"
        for own, module in modules.items()
        for name in module.__all__
        if not hasattr(module, name)
    ]
    assert len(named) > 60 and len(modules) > 8 and missing == unknown == []


@pytest.mark.parametrize("name", ["README.md", "docs/guide.md", "docs/semantics.md"])
def test_the_documents_name_every_native_optimizer(name):
    """They take `options`, unlike what else is exported."""
    exported = {own: getattr(jax_hkv.optim, own) for own in jax_hkv.optim.__all__}
    natives = {
        own
        for own, make in exported.items()
        if inspect.isfunction(make) and "options" in inspect.signature(make).parameters
    }
    assert {"sgd", "adamw", "rowwise_adam", "ftrl"} <= natives
    text, place = (ROOT / name).read_text(), r"(?<!optax\.)\b{}\b"
    if name == "docs/semantics.md":
        natives.remove("adamw")  # which is adam with a weight decay
        text, place = text.split("\n## 10. ")[1].split("\n## 11. ")[0], r"\n    {} +[a-z] [+-]?= "
    assert {own for own in natives if not re.search(place.format(own), text)} == set()
