"""Annotations are true to the letter: whoever asks for them at run time gets them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import typing
from typing import Any

import optax
import pytest
import typed_programs

import jax_hkv as hkv

COMPILED = {"jax_hkv._cpu", "jax_hkv._cuda"}
MODULES = {info.name for info in pkgutil.iter_modules(hkv.__path__, "jax_hkv.")} - COMPILED


def own_objects(module: Any) -> dict[str, Any]:
    """Functions and classes of a module, and the methods of those that somebody has written."""
    found = {}
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__ or not callable(value):
            continue
        found[name] = inspect.unwrap(value)
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            method = member.fget if isinstance(member, property) else member
            method = inspect.unwrap(getattr(method, "__func__", method))
            if inspect.isfunction(method) and method.__code__.co_filename == module.__file__:
                found[f"{name}.{attribute}"] = method
    return {name: value for name, value in found.items() if hasattr(value, "__annotations__")}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_annotation_can_be_evaluated(name):
    """jaxtyping checks nothing, and says nothing, where one cannot."""
    wrong = []
    for own, value in own_objects(importlib.import_module(name)).items():
        try:
            typing.get_type_hints(value, include_extras=True)
        except Exception as error:
            wrong.append(f"{own}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_typed_programs_run():
    """That checkers take them, too, is for pyright to say."""
    typed_programs.main()


def test_protocols_can_be_asked_for_at_run_time():
    """As by checkers that users decorate their functions with. They go by the names of methods."""
    step = hkv.linen.train_step(lambda apply: 0.0)
    optimizers = [hkv.optim.sgd(0.1), hkv.optim.sparse(optax.sgd(0.1)), typed_programs.Frozen()]
    for kind, own, others in (
        (hkv.optim.Optimizer, optimizers, [step, 3]),
        (hkv.optim.Transformation, [optax.sgd(0.1)], [step, 3]),
        (hkv.linen.Step, [step], [*optimizers, 3]),
    ):
        assert all(isinstance(each, kind) for each in own)
        assert not any(isinstance(each, kind) for each in others)
