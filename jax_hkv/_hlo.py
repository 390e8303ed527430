"""The text of a compiled program (HLO): its computations, instructions, shapes and device groups.

Only what XLA prints for an optimised module is read: computations begin and end at the first
column, and an instruction is one line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[()\[\]{},]|[^"/()\[\]{},]+|/')
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) (?:\(.*\) -> .*)?\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[^\s=]+) = ")
_SHAPE = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]")
_IOTA = re.compile(r"\[(?P<dims>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 8),
    "c128": 16,
}


class Shape(NamedTuple):
    """One array of the program."""

    dtype: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def nbytes(self) -> int:
        """Bytes of the elements; raises ValueError for types of less than a byte."""
        return math.prod(self.dims) * _bytes_of(self.dtype)


def _bytes_of(dtype: str) -> int:
    size = 1 if dtype.startswith("f8") else _BYTES.get(dtype)
    if size is None:
        raise ValueError(
            f"the bytes of {dtype} elements are not known; expected types of whole bytes"
        )
    return size


class Instruction(NamedTuple):
    """A line of a computation; operands and attributes are read when they are asked for."""

    name: str
    shape: str
    opcode: str
    rest: str  # from the parenthesis that opens the operands

    def operands(self) -> list[str]:
        """The names of the operands, without the shapes that some printers put before them."""
        return [part.split()[-1].removeprefix("%") for part in split(split(self.rest)[0][1:-1])]

    def attributes(self) -> dict[str, str]:
        """The text of every attribute by its name."""
        return _pairs(split(self.rest)[1:])


class Module(NamedTuple):
    """A program: every computation's instructions by name, in the order of the text."""

    replicas: int
    partitions: int
    entry: str
    computations: dict[str, dict[str, Instruction]]


def split(text: str) -> list[str]:
    """The parts between the commas that stand in no bracket and no string, without comments."""
    parts, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in ("(", "[", "{")) - (token in (")", "]", "}"))
        if token == "," and depth == 0:
            parts.append("")
        elif not token.startswith("/*"):
            parts[-1] += token
    return [part.strip() for part in parts if part.strip()]


def _pairs(parts: Iterable[str]) -> dict[str, str]:
    cut = (part.partition("=") for part in parts)
    return {name: value for name, _, value in cut}


def parse(text: str) -> Module:
    """Reads a module; raises ValueError where the text holds none."""
    header, entry = {}, None
    computations: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if line.startswith("HloModule "):
            header = _pairs(split(line))
        elif line.startswith("}"):
            current = None
        elif line[:1] not in ("", " ") and (opened := _COMPUTATION.match(line.rstrip())):
            current = computations.setdefault(opened["name"], {})
            entry = opened["name"] if opened["entry"] else entry
        elif current is not None and (instruction := _instruction(line)):
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError("no computation marked ENTRY stands in it")
    replicas, partitions = (
        int(header.get(name, 1)) for name in ("replica_count", "num_partitions")
    )
    return Module(replicas, partitions, entry, computations)


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if head is None:
        return None
    after = line[head.end() :]
    shape = after[: _end_of_shape(after)]
    opcode, opened, rest = after[len(shape) :].partition("(")
    return Instruction(head["name"], shape, opcode.strip(), opened + rest)


def _end_of_shape(text: str) -> int:
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == " " and depth == 0:
            return place
    return len(text)


def shapes(text: str) -> list[Shape]:
    """The arrays of a shape's text, those of tuples one after the other."""
    return [
        Shape(found["dtype"], tuple(int(n.removeprefix("<=")) for n in split(found["dims"])))
        for found in _SHAPE.finditer(text)
    ]


def calls(instruction: Instruction) -> Iterator[tuple[str, str]]:
    """The attributes that name computations, and those computations."""
    names = ("to_apply", "calls", "called_computations", "body", "condition")
    names += ("branch_computations", "true_computation", "false_computation")
    if not any(f"{name}=" in instruction.rest for name in names):
        return
    attributes = instruction.attributes()
    for name in names:
        value = attributes.get(name, "")
        for called in split(value[1:-1] if value.startswith("{") else value):
            yield name, called.removeprefix("%")


def trip_count(loop: Instruction) -> int | None:
    """How often the body of a while runs, where XLA knows it."""
    if "known_trip_count" not in loop.rest:
        return None
    config = json.loads(loop.attributes()["backend_config"])
    config = json.loads(config) if isinstance(config, str) else config
    return int(config["known_trip_count"]["n"])


def op_name(instruction: Instruction) -> str:
    """Where in the traced function the instruction comes from; "" where that is not said."""
    if "metadata" not in instruction.rest:
        return ""
    metadata = instruction.attributes().get("metadata", "")
    found = re.search(r'op_name=("(?:[^"\\]|\\.)*")', metadata)
    return json.loads(found[1]) if found else ""


def device_groups(instruction: Instruction, module: Module, by_replica: bool) -> list[np.ndarray]:
    """The groups of devices that exchange data, or a permute's pairs of source and target.

    Args:
      instruction: with ``replica_groups`` or ``source_target_pairs``.
      module: it stands in.
      by_replica: whether its numbers are those of replicas, all partitions of which take part,
        where it has a channel and no global numbers: so in reductions and all-gathers. Otherwise
        a channel means numbers of partitions.

    Returns:
      Numbers of devices, ``replica * partitions + partition``: places in the flattened mesh.
    """
    attributes = instruction.attributes()
    devices = np.arange(module.replicas * module.partitions)
    grid = devices.reshape(module.replicas, module.partitions)
    has_channel = "channel_id" in attributes
    if attributes.get("use_global_device_ids") == "true":
        rows, merged = devices[None], False
    elif not has_channel:
        rows, merged = grid.T, False
    else:
        rows, merged = (grid.T, True) if by_replica else (grid, False)
    groups = [np.arange(rows.shape[1])] if _is_one_group(attributes) else _numbers(attributes)
    most = max((int(group.max()) for group in groups), default=-1)
    if most >= rows.shape[1]:
        raise ValueError(
            f"device {most} is in a group, but the program runs on {rows.shape[1]} (as the text's "
            "first line, HloModule, says)"
        )
    if merged:
        return [rows[:, group].ravel() for group in groups]
    return [row[group] for row in rows for group in groups]


def _is_one_group(attributes: Mapping[str, str]) -> bool:
    """Whether all devices form one group: no groups are named. No pairs are no exchange."""
    groups = attributes.get("replica_groups", "{}")
    return groups == "{}" and "source_target_pairs" not in attributes


def _numbers(attributes: Mapping[str, str]) -> list[np.ndarray]:
    text = attributes.get("source_target_pairs") or attributes["replica_groups"]
    if text.startswith("mesh["):
        return _mesh_groups(text, attributes.get("device_ids"))
    if text.startswith("["):
        sizes, _, iota = text.partition("<=")
        return list(_iota(iota).reshape(_integers(sizes)))
    return [np.array(_integers(group)) for group in split(text[1:-1])]


def _integers(text: str) -> list[int]:
    return [int(number) for number in split(text.strip("[]{}()"))]


def _iota(text: str) -> np.ndarray:
    """``[2,4]T(1,0)``: the numbers from 0 in that shape, transposed."""
    found = _IOTA.fullmatch(text)
    if found is None:
        raise ValueError(f"replica groups over {text!r} cannot be read")
    dims = _integers(found["dims"])
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(_integers(found["order"])) if found["order"] else numbers


def _mesh_groups(text: str, device_ids: str | None) -> list[np.ndarray]:
    """Groups along axes of a mesh.

    ``mesh['a'=4,'b'=2] {'a'}``, where ``, device_ids=([2,4]T(1,0))`` or ``(0,4,1,...)`` may follow
    the mesh, and ``'a':(2)2`` is the part of size 2 of an axis after the 2 parts before it.
    """
    if device_ids is None:
        mesh, axes = text.split(" ")
        order = None
    else:
        mesh, (order, axes) = text, device_ids.split(" ")
    named = _pairs(split(mesh.removeprefix("mesh")[1:-1]))
    names, sizes = list(named), [int(size) for size in named.values()]
    devices = np.arange(math.prod(sizes)) if order is None else _device_order(order[1:-1])
    places = np.indices(sizes).reshape(len(sizes), -1)
    others = places.copy()
    for axis, stride, part in _mesh_parts(axes, names, sizes):
        others[axis] -= places[axis] // stride % part * stride
    group_of = np.ravel_multi_index(tuple(others), sizes)
    return [devices[group_of == group] for group in np.unique(group_of)]


def _mesh_parts(text: str, names: list[str], sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Axis, stride and size of every part of ``{'a','b':(2)2}``."""
    for reference in split(text[1:-1]):
        name, _, sub = reference.partition(":")
        axis = names.index(name)
        before, part = _integers(sub.replace(")", ",")) if sub else (1, sizes[axis])
        yield axis, sizes[axis] // (before * part), part


def _device_order(text: str) -> np.ndarray:
    return _iota(text).ravel() if text.startswith("[") else np.array(_integers(text))
