"""The collectives of a compiled step: what they move, along which mesh axes, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jax_hkv import _hlo

KINDS = (
    "all-to-all",
    "ragged-all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
)
_BY_REPLICA = ("all-gather", "all-reduce", "reduce-scatter")
_UNKNOWN_AXES = ("",)
_COLUMNS = (
    "kind",
    "axes",
    "group",
    "operands",
    "bytes",
    "sent",
    "peers",
    "times",
    "source",
)
_TEXT_COLUMNS = ("kind", "axes", "operands", "source")


class Collective(NamedTuple):
    """A collective of a compiled program.

    Attributes:
      kind: one of all-to-all, ragged-all-to-all, all-gather, all-reduce, reduce-scatter,
        collective-permute and collective-broadcast.
      name: of the HLO instruction.
      axes: the mesh axes along which devices exchange data, in the mesh's order; ``("",)`` where
        no mesh is known.
      group_size: devices of a group (of the largest); of a permute: those that its pairs connect.
      operands: types and shapes, such as ``f32[2,4] x4``.
      bytes: of the operands on one device; of a ragged all-to-all, of the array that is sent.
      sent: bytes that a device sends to others in one run, by the algorithm that sends least (the
        ring for an all-reduce); rounded up. Of a ragged all-to-all an upper bound, where no row is
        sent twice: how much it sends is known to the running program only.
      messages: other devices of the group; 1 for a permute that leaves its device.
      times: runs in a call of the program; None inside a loop whose length is not known.
      conditional: whether it stands in a branch, and so may not run.
      source: where it comes from, such as ``jit(step)/shard_map/all_to_all``.
    """

    kind: str
    name: str
    axes: tuple[str, ...]
    group_size: int
    operands: str
    bytes: int
    sent: int
    messages: int
    times: int | None
    conditional: bool
    source: str

    @property
    def may_not_run(self) -> bool:
        """Whether it stands in a branch, or in a loop whose length is not known."""
        return self.conditional or self.times is None

    @property
    def sent_is_bound(self) -> bool:
        """Whether less than `sent` may be sent."""
        return self.kind == "ragged-all-to-all"


@dataclass(frozen=True)
class Traffic:
    """The collectives of a compiled program in the order of its schedule; prints as a table.

    Sums are for one device and one call of the program. They leave out what may not run, unless
    `conditional` asks for it: collectives in branches (those of all branches are then added) and in
    loops whose length is not known (then counted once).

    Attributes:
      collectives: one for every place in the program that runs one.
      axes: the mesh's axes, ``("",)`` where no mesh is known.
    """

    collectives: tuple[Collective, ...]
    axes: tuple[str, ...] = _UNKNOWN_AXES

    def bytes(
        self, kind: str | None = None, axis: str | None = None, conditional: bool = False
    ) -> int:
        """Bytes of operands.

        Args:
          kind: of the collectives that count; None: all.
          axis: along which they communicate, perhaps among others; None: all. So one over two axes
            counts for both.
          conditional: whether those that may not run count.

        Raises:
          ValueError: for a kind or an axis that there is not.
        """
        chosen = self._chosen("bytes", kind, axis, conditional)
        return sum(one.bytes * times for one, times in chosen)

    def sent(
        self, kind: str | None = None, axis: str | None = None, conditional: bool = False
    ) -> int:
        """Bytes that a device sends to others; the arguments are those of :meth:`bytes`."""
        chosen = self._chosen("sent", kind, axis, conditional)
        return sum(one.sent * times for one, times in chosen)

    def messages(
        self, kind: str | None = None, axis: str | None = None, conditional: bool = False
    ) -> int:
        """Peers, summed over the collectives; the arguments are those of :meth:`bytes`."""
        chosen = self._chosen("messages", kind, axis, conditional)
        return sum(one.messages * times for one, times in chosen)

    def _chosen(
        self, call: str, kind: str | None, axis: str | None, conditional: bool
    ) -> list[tuple[Collective, int]]:
        """The collectives that count, and how often."""
        for argument, value, known in (("kind", kind, KINDS), ("axis", axis, self.axes)):
            if value is not None and value not in known:
                raise ValueError(
                    f"Traffic.{call}: {argument} must be one of {', '.join(map(repr, known))}, "
                    f"got {value!r}"
                )
        return [
            (one, 1 if one.times is None else one.times)
            for one in self.collectives
            if (kind in (None, one.kind) and (axis is None or axis in one.axes))
            and (conditional or not one.may_not_run)
        ]

    def __str__(self) -> str:
        lines = _aligned([_COLUMNS, *map(_row, self.collectives), *self._totals()])
        left_out = sum(one.may_not_run for one in self.collectives)
        if left_out:
            lines.append(f"without {left_out} in branches (<=) or in loops of unknown length (?)")
        return "\n".join(lines)

    def _totals(self) -> list[tuple[str, ...]]:
        axes = [] if self.axes == _UNKNOWN_AXES else self.axes
        return [self._total(axis, axis) for axis in axes] + [self._total("all", None)]

    def _total(self, label: str, axis: str | None) -> tuple[str, ...]:
        chosen = self._chosen("__str__", None, axis, False)
        bound = "<=" if any(one.sent_is_bound for one, _ in chosen) else ""
        sent, peers = f"{bound}{self.sent(axis=axis):,}", f"{self.messages(axis=axis):,}"
        times = f"{sum(times for _, times in chosen):,}"
        return ("total", label, "", "", f"{self.bytes(axis=axis):,}", sent, peers, times, "")


def _row(one: Collective) -> tuple[str, ...]:
    sent = f"{'<=' if one.sent_is_bound else ''}{one.sent:,}"
    times = "?" if one.times is None else f"{'<=' if one.conditional else ''}{one.times:,}"
    sizes = (f"{one.bytes:,}", sent, f"{one.messages:,}", times)
    return (one.kind, ",".join(one.axes), f"{one.group_size:,}", one.operands, *sizes, one.source)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The rows as lines, words to the left and numbers to the right of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in _TEXT_COLUMNS else cell.rjust(width)
            for name, cell, width in zip(_COLUMNS, row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


class Compiled(Protocol):
    """What is compiled of a jitted function: JAX's own, or of a step."""

    @property
    def input_shardings(self) -> Any:
        """Of its arguments."""

    def as_text(self) -> str | None:
        """Its HLO."""
        ...


def traffic(
    compiled: Compiled | str,
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
) -> Traffic:
    """Lists the collectives of a compiled program.

    What custom calls send by themselves is not seen, nor are ``send`` and ``recv``.

    Args:
      compiled: ``jax.jit(step).lower(...).compile()``, or of ``train_step``; or its HLO text.
      mesh: whose axes name the groups of devices: a mesh, or sizes by axis names in its order.
        None: that of the compiled program's arguments, if their shardings have one.

    Returns:
      The collectives, their bytes on one device and how often they run; ``print`` shows a table.

    Raises:
      TypeError: if `compiled` or `mesh` is neither of these.
      ValueError: if `compiled` is no HLO module, if the mesh has another number of devices than the
        program, or for operands of a type of less than a byte.

    Example:
      On eight devices:

      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((2, 4), ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
      >>> def a2a(rows):
      ...     return jax.lax.all_to_all(rows, "gpu", 0, 0, tiled=True)
      >>> step = jax.shard_map(
      ...     a2a, mesh=mesh, in_specs=P(("node", "gpu")), out_specs=P(("node", "gpu"))
      ... )
      >>> rows = jax.ShapeDtypeStruct((64, 8), np.float32)
      >>> found = traffic(jax.jit(step).lower(rows).compile(), mesh)
      >>> found.bytes(axis="gpu"), found.sent(axis="gpu"), found.sent(axis="node")
      (256, 192, 0)
      >>> print(found)
      kind        axes  group  operands     bytes  sent  peers  times  source
      all-to-all  gpu       4  f32[2,8] x4    256   192      3      1  jit(a2a)/shard_map/all_to_all
      total       node                          0     0      0      0
      total       gpu                         256   192      3      1
      total       all                         256   192      3      1
    """
    try:
        module = _hlo.parse(_text(compiled))
    except ValueError as error:
        raise ValueError(
            f"traffic: compiled must be an HLO module, but {error}: give what .compile() returns, "
            "or its .as_text()"
        ) from None
    devices = module.replicas * module.partitions
    sizes = _mesh_of_arguments(compiled, devices) if mesh is None else _sizes(mesh, devices)
    found = []
    for run in _runs(module, module.entry, 1, False):
        try:
            found.append(_collective(module, run, sizes))
        except ValueError as error:
            name = run.instruction.name
            raise ValueError(f"traffic: {name} of compiled cannot be read: {error}") from None
    return Traffic(tuple(found), tuple(sizes) or _UNKNOWN_AXES)


def _text(compiled: Compiled | str) -> str:
    if isinstance(compiled, str):
        return compiled
    if not callable(compiled) or not hasattr(compiled, "input_shardings"):  # Flax has its own, too
        raise TypeError(
            "traffic: compiled must be what jax.jit(step).lower(...).compile() returns or its HLO "
            f"text, got {type(compiled).__name__}"
        )
    return compiled.as_text() or ""


def _sizes(mesh: Mesh | AbstractMesh | Mapping[str, int], devices: int) -> dict[str, int]:
    """Sizes by axis names."""
    if not isinstance(mesh, (Mesh, AbstractMesh, Mapping)):
        raise TypeError(
            "traffic: mesh must be a jax.sharding.Mesh, an AbstractMesh or a mapping of axis names "
            f"to sizes, got {type(mesh).__name__}"
        )
    sizes = dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    if int(np.prod(list(sizes.values()))) != devices:
        raise ValueError(
            f"traffic: mesh must have the {devices} devices that the program is compiled for, got "
            f"{sizes}: give the mesh of the step's shard_map or shardings"
        )
    return sizes


def _mesh_of_arguments(compiled: Compiled | str, devices: int) -> dict[str, int]:
    """Sizes by axis names of the mesh over which an argument is sharded; empty if none is."""
    if isinstance(compiled, str):
        return {}
    for sharding in jax.tree.leaves(compiled.input_shardings):
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and mesh.size == devices:
            return dict(mesh.shape)
    return {}


class _Run(NamedTuple):
    instruction: _hlo.Instruction
    computation: str
    times: int | None
    conditional: bool


def _runs(
    module: _hlo.Module, computation: str, times: int | None, conditional: bool
) -> Iterator[_Run]:
    """The collectives that a computation runs, by itself or through those that it calls."""
    for instruction in module.computations[computation].values():
        if _kind(instruction) in KINDS:
            yield _Run(instruction, computation, times, conditional)
        elif not instruction.opcode.endswith(("-update", "-done")):  # the start has counted
            for attribute, called in _hlo.calls(instruction):
                inner = _times(instruction, attribute, times)
                branch = conditional or instruction.opcode == "conditional"
                yield from _runs(module, called, inner, branch)


def _kind(instruction: _hlo.Instruction) -> str:
    return instruction.opcode.removesuffix("-start")


def _times(instruction: _hlo.Instruction, attribute: str, times: int | None) -> int | None:
    """How often a computation runs that an instruction calls, which itself runs `times` times."""
    if instruction.opcode != "while":
        return times
    trips = _hlo.trip_count(instruction)
    if times is None or trips is None:
        return None
    return times * (trips + (attribute == "condition"))  # which is false after the last one


def _collective(module: _hlo.Module, run: _Run, sizes: Mapping[str, int]) -> Collective:
    instruction, kind = run.instruction, _kind(run.instruction)
    groups = _hlo.device_groups(instruction, module, kind in _BY_REPLICA)
    is_permute = kind == "collective-permute"
    group = max(map(len, _connected(groups) if is_permute else groups), default=1)
    operands = _operands(module.computations[run.computation], instruction, kind)
    size = sum(shape.nbytes for shape in operands)
    return Collective(
        kind=kind,
        name=instruction.name,
        axes=_axes(groups, sizes),
        group_size=group,
        operands=", ".join(
            f"{shape} x{count}" if count > 1 else shape
            for shape, count in Counter(map(str, operands)).items()
        ),
        bytes=size,
        sent=_sent(kind, size, group),
        messages=min(group - 1, 1) if is_permute else group - 1,
        times=run.times,
        conditional=run.conditional,
        source=_hlo.op_name(instruction),
    )


def _operands(
    computation: Mapping[str, _hlo.Instruction], instruction: _hlo.Instruction, kind: str
) -> list[_hlo.Shape]:
    names = instruction.operands()
    if kind == "ragged-all-to-all":
        names = names[:1]  # then the array that is written to, offsets and sizes
    return [shape for name in names for shape in _hlo.shapes(computation[name].shape)]


def _axes(groups: Iterable[np.ndarray], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes along which the places of the devices of a group differ."""
    if not sizes:
        return _UNKNOWN_AXES
    along = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.stack(np.unravel_index(group, tuple(sizes.values())))
        along |= (places != places[:, :1]).any(axis=1)
    return tuple(name for name, differs in zip(sizes, along, strict=True) if differs)


def _connected(pairs: Iterable[np.ndarray]) -> list[set[int]]:
    """The sets of devices that pairs of source and target connect."""
    sets: list[set[int]] = []
    for pair in pairs:
        ends = set(pair.tolist())
        touched = [own for own in sets if own & ends]
        sets = [own for own in sets if not own & ends] + [ends.union(*touched)]
    return sets


def _sent(kind: str, size: int, group: int) -> int:
    """Bytes that a device sends to others, rounded up; `size` is of its operands."""
    others = group - 1
    if kind == "all-gather":
        return size * others
    if kind == "all-reduce":  # a ring's reduce-scatter and all-gather
        return -(-2 * size * others // group)
    if kind in ("all-to-all", "reduce-scatter"):
        return -(-size * others // group)
    return size if others else 0
