"""Where the arrays of a training state lie on a mesh, and how functions run on all its devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, cast, get_args, overload

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_hkv._agreement import agreed, check_has_parts, spans_processes, warn_if_alone
from jax_hkv._bag_parts import as_count
from jax_hkv._checks import (
    as_bool,
    as_list,
    check_function,
    check_mesh,
    check_not_cut,
    check_not_used_up,
)
from jax_hkv._compat import is_traced, on_one_device, trace_state_clean
from jax_hkv._digest import digest_over
from jax_hkv._keys import Keys
from jax_hkv._placed import (
    alike,
    all_equal,
    by_part,
    check_replicas,
    check_type,
    check_whole,
    devices_of,
    explicit_of,
    is_entries,
    is_of_each,
    is_one_key,
    is_shared,
    is_table,
    lies_nowhere,
    made_on,
    names_of_first,
    settled,
    spec_of,
)
from jax_hkv._placement_calls import OTHER_MESH, BySplits, Checked, Pmapped
from jax_hkv._reports import (
    first,
    together,
    with_entries_apart,
    with_leading_axes,
    with_one_report,
    with_pair,
)
from jax_hkv._stages import Step
from jax_hkv._warnings import on_parts
from jax_hkv.features import Jagged, Padded, is_jagged
from jax_hkv.table import Entries, Table, check_table

Mode = Literal["shard_map", "pmap"]
State = TypeVar("State")
Report = TypeVar("Report")
Batch = TypeVar("Batch", Keys, Jagged, Padded)

_MAKER = "without arguments that returns the state", "write lambda: jax_hkv.create(...)"


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a training state lies on the devices of a mesh: tables split, everything else copied.

    A batch is split along its leading axis.

    Args:
      mesh: of the devices, with axes of type Auto or Explicit.
      axis_name: the axes that tables and batches are split along, outermost first; None: all.
      mode: "shard_map": arrays are global, a table's leaves being those of all its parts, one after
        the other; "pmap": every array has a leading axis for the devices (one axis only; it costs
        copies of the table where the backend is the CPU).

    Raises:
      TypeError, ValueError: naming the argument.

    Example:
      >>> import jax_hkv as hkv
      >>> mesh = jax.make_mesh((1,), ("device",))
      >>> placement = Placement(mesh)
      >>> table = placement.create(lambda: hkv.create(1024, dim=4))
      >>> step = placement.step(
      ...     lambda table, keys: hkv.sharding.find_or_insert(table, keys, axis_name="device"))
    """

    mesh: Mesh | AbstractMesh
    axis_name: str | tuple[str, ...] | None = None
    mode: Mode = "shard_map"

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, (Mesh, AbstractMesh)):
            raise TypeError(
                "sharding.Placement: mesh must be a jax.sharding.Mesh, got "
                f"{type(self.mesh).__name__}: make one with jax.make_mesh((4,), ('device',)), say"
            )
        name = self.mesh.axis_names if self.axis_name is None else self.axis_name
        is_one = isinstance(name, str) or not isinstance(name, Iterable)
        axes = (name,) if is_one else tuple(name)
        unknown = [axis for axis in axes if axis not in self.mesh.axis_names]
        if unknown or not axes:
            raise ValueError(
                f"sharding.Placement: axis_name must name axes of the mesh, "
                f"{self.mesh.axis_names}, got {self.axis_name!r}"
            )
        if len(set(axes)) < len(axes):
            raise ValueError(f"sharding.Placement: axis_name names an axis twice: {axes}")
        if self.mode not in get_args(Mode):
            raise ValueError(
                f"sharding.Placement: mode must be one of {get_args(Mode)}, got {self.mode!r}"
            )
        if self.mode == "pmap" and len(self.mesh.axis_names) > 1:
            raise ValueError(
                "sharding.Placement: pmap has one axis, got a mesh of "
                f"{self.mesh.axis_names}: use mode='shard_map'"
            )
        object.__setattr__(self, "axis_name", axes)
        if isinstance(self.mesh, Mesh):
            warn_if_alone()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that tables and batches are split along."""
        assert isinstance(self.axis_name, tuple)
        return self.axis_name

    @property
    def devices(self) -> int:
        """Parts of a table, and of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def _left(self) -> tuple[str, ...]:
        """The axes that are left to XLA, of several devices and of type Auto."""
        others = [name for name in self.mesh.axis_names if name not in self.axes]
        left = [name for name in others if self.mesh.shape[name] > 1]
        return tuple(name for name in left if name not in explicit_of(self.mesh, tuple(left)))

    def _all(self) -> np.ndarray:
        """The mesh's devices, which an abstract one has not."""
        return cast(Mesh, self.mesh).devices

    @property
    def local_devices(self) -> list[Any]:
        """The devices of this process, in the order of the mesh."""
        own = jax.process_index()
        return [device for device in self._all().flat if device.process_index == own]

    @property
    def _pmapped(self) -> list[Any] | None:
        """What pmap takes: devices in order; over several processes all there are."""
        every = list(self._all().flat)
        if jax.process_count() == 1:
            return every
        if every != jax.devices():
            raise ValueError(
                "sharding.Placement: pmap over several processes runs on all devices in the order "
                "of jax.devices(), which this mesh does not have: use mode='shard_map', or make "
                "the mesh of all devices"
            )
        return None

    @property
    def local_parts(self) -> list[int]:
        """Which parts of a table the devices of this process hold, in order."""
        return list(self._holders())

    def _holders(self) -> dict[int, list[Any]]:
        """The devices of this process that hold each part: several along axes without a split."""
        rows, own = by_part(self, self._all().flatten()), jax.process_index()
        local = [[device for device in row if device.process_index == own] for row in rows]
        return {part: holders for part, holders in enumerate(local) if holders}

    def create(self, make: Callable[[], State]) -> State:
        """A state, made on every device by a function without arguments.

        Args:
          make: returns any pytree; what is no table must not depend on the device. Tables have the
            capacity of one device, and, unless it holds the whole, no entries, which every device
            would have; layers with an axis name divide theirs by themselves.

        Raises:
          TypeError: if `make` is no function.
          ValueError: if a table that is split has entries, which come in by
            :func:`import_entries`, if the number of replicas is not that of the devices along
            some first axes, or, in every process, if the processes' states differ in form.
        """
        check_function("Placement.create", "make", make, *_MAKER)
        if self.mode == "pmap":
            on_each = jax.pmap(lambda _: make(), axis_name=self.axes[0], devices=self._pmapped)
            with on_one_device():  # pmap makes a mesh of its own
                return made_on(self, "create", on_each(np.arange(len(self.local_devices))))
        leaves, trees, specs = self._leaves_of(make)
        mapped = self._mapped(leaves, (), specs)
        if spans_processes(self.mesh) and self.local_parts and trace_state_clean():
            shapes = jax.tree.unflatten(trees[-1], jax.eval_shape(mapped))
            number, got = _form_of(shapes)
            remedy = "capacities, names and other settings must not depend on the process"
            call, what = "Placement.create", "what make returns"
            agreed(call, self, what, number, got=got, remedy=remedy)
        made = jax.jit(mapped)()
        return made_on(self, "create", jax.tree.unflatten(trees[-1], made))

    def abstract(self, make: Callable[[], State]) -> State:
        """The shapes, types and shardings of what :meth:`create` would make, with nothing made.

        This is what Orbax restores a state into, without a second one in memory.

        Args:
          make: see :meth:`create`.

        Raises:
          ValueError: with "pmap", whose arrays have no such sharding.
        """
        check_function("Placement.abstract", "make", make, *_MAKER)
        if self.mode == "pmap":
            raise ValueError(
                "Placement.abstract: mode must be 'shard_map', got 'pmap', whose arrays are laid "
                "out by position: restore into a state made by create"
            )
        leaves, trees, specs = self._leaves_of(make)
        shapes = jax.eval_shape(self._mapped(leaves, (), specs))
        shapes = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))
            for leaf, spec in zip(shapes, specs, strict=True)
        ]
        return made_on(self, "abstract", jax.tree.unflatten(trees[-1], shapes))

    def _leaves_of(
        self, make: Callable[[], Any]
    ) -> tuple[Callable[[], tuple[Any, ...]], list[Any], tuple[P, ...]]:
        """A function to a state's leaves, the forms of those it has made, and the leaves' specs."""
        trees: list[Any] = []
        specs: tuple[P, ...] = ()

        def leaves() -> tuple[Any, ...]:
            nonlocal specs
            state = make()
            # What is static of a state (functions, say) may differ from call to call.
            trees.append(jax.tree.structure(state))
            specs = tuple(self._leaf_specs(state))
            return tuple(jax.tree.leaves(state))

        jax.eval_shape(self._mapped(leaves, (), P()))
        return leaves, trees, specs

    def step(
        self, fn: Callable[..., tuple[State, Report]], *, donate: bool = True
    ) -> Step[tuple[State, Report]]:
        """A compiled training step.

        Args:
          fn: of (state, *batch), for one device, to the next state and a report. The state's tables
            are this device's parts; the rest of it, and the report, must come out equal on all
            devices (psum or pmean what is not). But :class:`jax_hkv.Entries` in the report (what
            parts have lost) come from all: those of one device after those of the other, with a
            `count` for each, as batches of a step are (with "pmap" along a leading axis).
          donate: whether the state that is given is used up, so that nothing is copied.

        Returns:
          A function of (state, *batch) whose batches come from :meth:`put`; single numbers and
          random keys among them are the same for all devices. NumPy arrays of the state are put
          where :meth:`specs` says. It has ``lower`` (and, but with "pmap", ``trace`` and
          ``eval_shape``) as jitted functions; what is compiled ahead looks at the same things.

        Raises:
          TypeError: when it is called: if `fn` returns no such pair, if a table is not spread over
            these devices, or if JAX would cut 64-bit integers of a batch.
          ValueError: likewise, of a batch that :meth:`put` has not seen.
          RuntimeError: likewise, of a state that an earlier call has used up.
        """
        donate = as_bool("Placement.step", "donate", donate)
        fn = on_parts(with_pair(fn), self.devices, self.axes)
        if self.mode == "pmap":
            pmapped = Pmapped(self, "Placement.step", fn, with_one_report, donate=donate)
            return Checked(self, "Placement.step", pmapped, donate)

        def on_all(splits: tuple[P | None, ...], state: Any, *batch: Any) -> tuple[Any, Any]:
            self.check_tables("Placement.step", state, ())
            specs = self.specs(state)
            split = self._split("Placement.step", batch)
            forms: list[Any] = []  # of the report: tracing finds it out
            outputs = self._mapped(
                with_entries_apart(fn, forms), (specs, *split), (specs, P(), P(self.axes)), splits
            )
            state, report, entries = outputs(state, *batch)
            return state, together(report, entries, forms[-1])

        donated = (1,) if donate else ()
        jitted = jax.jit(on_all, static_argnums=0, donate_argnums=donated)
        return Checked(self, "Placement.step", BySplits(jitted, self._left), donate)

    def run(self, fn: Callable[..., Report]) -> Step[Report]:
        """A compiled function that changes nothing: an evaluation.

        Args:
          fn: of (state, *batch), for one device, to arrays with a leading axis.

        Raises:
          TypeError, ValueError: if `fn` is no function; when it is called: as :meth:`step`, and if
            an array has no leading axis.
          RuntimeError: when it is called, of a state that a step has used up.

        Returns:
          A function of (state, *batch) to the arrays of all devices, one after the other (with
          "pmap", along a leading axis).
        """
        fn = on_parts(with_leading_axes(fn), self.devices, self.axes)
        if self.mode == "pmap":
            return Checked(self, "Placement.run", Pmapped(self, "Placement.run", fn))

        def on_all(state: Any, *batch: Any) -> Any:
            self.check_tables("Placement.run", state, ())
            split = self._split("Placement.run", batch)
            return self._mapped(fn, (self.specs(state), *split), P(self.axes))(state, *batch)

        return Checked(self, "Placement.run", jax.jit(on_all))

    @overload
    def put(self, batch: Batch, *, micro_batches: int = ...) -> Batch: ...
    @overload
    def put(self, batch: Any, *, micro_batches: int = ...) -> Any: ...

    def put(self, batch: Any, *, micro_batches: int = 1) -> Any:
        """The batch of this process's devices, as steps take it, a copy of what lies on the host.

        Args:
          batch: pytree of arrays on the host; leading axes are those of the devices' batches, one
            after the other (of one process: of its own devices). Single numbers and random keys are
            for all devices (of ``jax.random.key``: those of ``PRNGKey`` are arrays as any other);
            the `count` of :class:`jax_hkv.Entries` is that of all together.
          micro_batches: those of the step that takes the batch; a :class:`jax_hkv.Jagged` is one of
            each of them.

        Raises:
          TypeError: if JAX would cut 64-bit integers to 32 bits and change them.
          ValueError: if a leading axis cannot be split evenly, or a :class:`jax_hkv.Jagged` is not
            one for each device (of :meth:`jax_hkv.Jagged.for_parts`), as far as its row_splits
            show that: of one whose bags at the seams are empty they do not.
        """
        micro_batches = as_count("Placement.put", micro_batches)
        check_has_parts("Placement.put", self)
        for node in jax.tree.leaves(batch, is_leaf=is_jagged):
            if is_jagged(node):
                self._check_jagged(node, micro_batches)
        counted = jax.tree.map(
            lambda node: self._counted(node) if is_entries(node) else node,
            batch,
            is_leaf=is_entries,
        )
        leaves, tree = jax.tree.flatten(counted, is_leaf=is_one_key)
        parts = len(self.local_parts)
        owned = [n for n, leaf in enumerate(leaves) if not is_shared(leaf)]
        for number, leaf in zip(owned, self._put([leaves[n] for n in owned], parts), strict=True):
            leaves[number] = leaf
        return tree.unflatten(leaves)

    def _counted(self, entries: Entries) -> Entries:
        """Entries with a count for each of this process's devices."""
        if np.ndim(entries.count):
            return entries
        parts, each = len(self.local_parts), entries.keys.shape[0] // len(self.local_parts)
        counts = np.clip(np.asarray(entries.count) - each * np.arange(parts), 0, each)
        return entries._replace(count=counts.astype(np.int32))

    def _check_jagged(self, bags: Jagged, micro_batches: int) -> None:
        """Raises unless it is one of each device, one after the other, with splits of its own."""
        count, splits = len(self.local_parts), np.asarray(bags.row_splits)
        positions = np.shape(jax.tree.leaves(bags.ids)[0])[0]
        each = "" if micro_batches == 1 else f" times {micro_batches} micro-batches"
        if is_of_each(splits, positions, count * micro_batches):
            return
        raise ValueError(
            f"Placement.put: a Jagged must be one for each of {count} devices{each}, one after the "
            "other, each with row_splits that begin at 0, do not decrease and end within its "
            f"{positions} / {count * micro_batches} positions: of one of all bags make it by "
            f"bags.for_parts({count * micro_batches}, capacity=); or make them with the same "
            "capacity and number of bags, and give jax_hkv.sharding.concatenate([...]) of them (of "
            "a step in micro-batches say put(batch, micro_batches=))"
        )

    @property
    def _must_put(self) -> bool:
        """Whether nothing but :meth:`put` makes a batch of what this process has."""
        return self.mode == "pmap" or spans_processes(self.mesh)

    def check_named(self, call: str, batch: dict[str, Any]) -> None:
        """As :meth:`check_put`, of arguments by their names, where they must be put."""
        if self._must_put or explicit_of(self.mesh, self.axes):
            self.check_put(call, batch, is_named=True)

    def check_put(
        self, call: str, batch: Any, cause: Exception | None = None, *, is_named: bool = False
    ) -> None:
        """Raises for arrays of a batch that :meth:`put` has not made, where they must be its."""
        if self.mode == "pmap":
            count = len(self.local_devices)
            expected = f"have the shape [{count}, ...] for"
        else:
            count, expected = self.devices, "lie on"
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_one_key):
            if not hasattr(leaf, "dtype") or is_shared(leaf):
                continue
            if is_traced(leaf):
                if cause is not None:
                    check_type(call, path, leaf, explicit_of(self.mesh, self.axes), cause)
                continue
            if self.mode == "pmap":
                is_put = leaf.shape[0] == count
            else:
                is_put = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and self._has_put(leaf)
            if not is_put:
                name = jax.tree_util.keystr(path, simple=is_named, separator="." * is_named)
                raise ValueError(
                    f"{call}: {name if is_named else f'arguments{name}'} must {expected} the "
                    f"{count} devices of the step's placement, got {type(leaf).__name__} "
                    f"{leaf.dtype}{list(leaf.shape)}: give placement.put(batch)"
                ) from cause

    def _check_counts(self, call: str, batch: Any) -> None:
        """Raises for Entries with one count: each device would take all of it for its own."""
        for node in jax.tree.leaves(batch, is_leaf=is_entries):
            if is_entries(node) and not np.ndim(node.count) and self.devices > 1:
                raise ValueError(
                    f"{call}: Entries of a batch must have a count for each device, got one for "
                    "all: give placement.put(entries), or those of a report as they are"
                )

    def _has_put(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
        if leaf.sharding is None or leaf.sharding.device_set != devices_of(self.mesh):
            return False
        explicit = explicit_of(self.mesh, self.axes)
        return not explicit or names_of_first(leaf) == explicit

    def with_shardings(self, batch: Any) -> Any:
        """A batch whose shapes that do not say where they lie do so as if :meth:`put` made them."""

        def one(leaf: Any) -> Any:
            is_to_lie = not is_shared(leaf) and lies_nowhere(leaf)
            where = NamedSharding(self.mesh, P(self.axes))
            return leaf.update(sharding=where) if is_to_lie else leaf

        return jax.tree.map(one, batch, is_leaf=is_one_key)

    def _put(self, leaves: list[Any], parts: int) -> list[Any]:
        """Arrays of this process's parts on their devices: one by one they take twice the time."""
        for leaf in leaves:
            check_not_cut("Placement.put", leaf)
            if leaf.shape[0] % parts:
                raise ValueError(
                    "Placement.put: the leading axis must be a multiple of the devices, "
                    f"{parts}, got shape {list(leaf.shape)}: pad the batch, with a mask (valid=) "
                    "that says so; random keys are those of jax.random.key, which all devices share"
                )
        leaves = list(map(_own, leaves))
        if self.mode == "pmap":
            return [leaf.reshape(parts, leaf.shape[0] // parts, *leaf.shape[1:]) for leaf in leaves]
        sharding = NamedSharding(self.mesh, P(self.axes))
        if jax.process_count() == 1:
            return jax.device_put(leaves, sharding)
        return [
            jax.make_array_from_process_local_data(
                *(sharding, np.asarray(leaf)),
                (leaf.shape[0] // parts * self.devices, *leaf.shape[1:]),
            )
            for leaf in leaves
        ]

    def shards(self, tree: Any) -> list[Any]:
        """What the devices of this process hold of a state, each part once, in order.

        Raises:
          RuntimeError: if the state was used up.
          ValueError: if the state lies on other devices than the mesh's, or in another order.
        """
        check_not_used_up("Placement.shards", jax.tree.leaves(tree))
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):
                devices = leaf.sharding.addressable_devices
                got = f"an array on {len(devices)}"
            else:
                devices, got = set(), f"a leaf of type {type(leaf).__name__}"
            if devices != set(self.local_devices):
                raise ValueError(
                    f"Placement.shards: the state must lie on the {len(self.local_devices)} "
                    f"devices of the mesh in this process, got {got}: use the "
                    "placement that it was made with (None stands for a table of one device)"
                )
        if self.mode != "pmap":
            check_mesh("Placement.shards", "state", tree, self.mesh, OTHER_MESH, is_read=True)
            check_whole("Placement.shards", tree, self)

        leaves, form = jax.tree.flatten(tree)
        with on_one_device():
            held = [{own.device: own.data for own in leaf.addressable_shards} for leaf in leaves]
            shards = [[own[first] for own in held] for first, *_ in self._holders().values()]
            if self.mode == "pmap":
                shards = [_unstacked(shard) for shard in shards]
            return [form.unflatten(shard) for shard in shards]

    def join(self, shards: Sequence[Table]) -> Table:
        """A table of the parts that this process's devices hold: the inverse of :meth:`shards`.

        Raises:
          TypeError, ValueError: if they are no tables, of different forms, or too many or few.
        """
        call = "Placement.join"
        check_has_parts(call, self)
        shards = as_list(call, "shards", shards, "tables, as shards returned them")
        if len(shards) != len(self.local_parts):
            raise ValueError(
                f"{call}: shards must be one for each of this process's "
                f"{len(self.local_parts)} parts, got {len(shards)}"
            )
        for number, shard in enumerate(shards):
            check_table(call, shard, f"shards[{number}]")
        forms = [[(*leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(own)] for own in shards]
        if any(form != forms[0] for form in forms) or len(set(map(jax.tree.structure, shards))) > 1:
            raise ValueError(
                f"{call}: shards must be tables of one form, with leaves of equal shapes and "
                f"types, got {', '.join(map(repr, shards))}: give the parts of one table"
            )
        is_stacked = self.mode == "pmap"  # each process has arrays of its own devices
        mesh = Mesh(np.array(self.local_devices), self.axes) if is_stacked else self.mesh
        sharding = NamedSharding(mesh, P(self.axes))

        def one(*parts: jax.Array) -> jax.Array:
            if is_stacked:
                parts = tuple(part[None] for part in parts)
            size = (len(shards) if is_stacked else self.devices) * parts[0].shape[0]
            placed = [
                jax.device_put(part, device)
                for part, holders in zip(parts, self._holders().values(), strict=True)
                for device in holders
            ]
            shape = (size, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, placed)

        with on_one_device():
            return jax.tree.map(one, *shards)

    def digests(self, tree: Any) -> np.ndarray:
        """A digest of what every device of the mesh holds: ``uint32[devices, 2]``.

        Replicas are equal if their digests are: bits that differ go unnoticed once in 2**64 times.
        Each device reads its tables once, and 8 bytes of each travel. For use between steps. Of
        an array that is no table's and is split, by whatever axes, all parts count as one.

        Raises:
          RuntimeError, ValueError: of a state that was used up, or lies on another mesh.
        """
        self._check_here("Placement.digests", tree)
        if self.mode == "pmap":
            return np.asarray(_digesting(self, None)(tree))
        leaves = jax.tree.leaves(tree)
        own_spec = functools.partial(spec_of, self.mesh)
        specs = map(own_spec, leaves, self._leaf_specs(tree))
        return np.asarray(_digesting(self, tuple(specs))(leaves))

    def _check_here(self, call: str, state: Any) -> None:
        """Raises if a state was used up, or lies on another mesh."""
        check_not_used_up(call, jax.tree.leaves(state))
        if self.mode != "pmap":
            check_mesh(call, "state", state, self.mesh, OTHER_MESH)

    def replicas_agree(self, tree: Any) -> bool:
        """Whether devices hold the same bits of what they hold alike: all but tables split by keys.

        See :meth:`digests`, also for errors, and of copies of parts along other axes.
        """
        self._check_here("Placement.replicas_agree", tree)
        kinds = alike("Placement.replicas_agree", tree, self).items()
        return all(all_equal(by_part(self, self.digests(own)), parts) for parts, own in kinds)

    def specs(self, tree: Any) -> Any:
        """The partition specs of a state: tables are split along their leading axes."""
        split, copied = P(self.axes), P()
        return jax.tree.map(
            lambda node: split if is_table(node) else copied, tree, is_leaf=is_table
        )

    def _leaf_specs(self, tree: Any) -> list[P]:
        """As :meth:`specs`, of every leaf."""
        return jax.tree.leaves(jax.tree.broadcast(self.specs(tree), tree))

    def _from_host(self, call: str, state: Any) -> Any:
        """A state whose NumPy arrays and shapes lie on the devices, where :meth:`specs` says."""
        self.check_tables(call, state, ())
        leaves, structure = jax.tree.flatten(state)

        def placed(leaf: Any, spec: P) -> Any:
            where = NamedSharding(self.mesh, spec)
            if isinstance(leaf, np.ndarray):
                return jax.make_array_from_callback(leaf.shape, where, leaf.__getitem__)
            return leaf.update(sharding=where) if lies_nowhere(leaf) else leaf

        return structure.unflatten(map(placed, leaves, self._leaf_specs(state)))

    def _split(self, call: str, batch: tuple[Any, ...]) -> tuple[Any, ...]:
        """How a batch is split, checked."""
        self._check_counts(call, batch)
        one = P(self.axes)
        return jax.tree.map(lambda leaf: P() if is_shared(leaf) else one, batch, is_leaf=is_one_key)

    def check_tables(self, call: str, state: Any, leading: tuple[int, ...]) -> None:
        """Raises if a table is that of one device, or is spread over others."""
        expected = (*leading, 2) if leading else (2 * self.devices,)
        for node in jax.tree.leaves(state, is_leaf=is_table):
            shape = node.clock.shape if is_table(node) else expected
            check_replicas(call, node, self)
            # Stacked tables have an axis more, wherever their user has put it.
            if len(shape) == 1 and shape != expected or shape[: len(leading)] != leading:
                raise TypeError(
                    f"{call}: a table must be spread over the {self.devices} devices of the "
                    f"placement by {self.mode}, got a clock uint32{list(shape)}, which is 2 words "
                    "of each device: make it by placement.create(lambda: ...)"
                )

    def check_outside(self, call: str, state: Any) -> None:
        """As :meth:`check_tables`, of what lies outside of steps."""
        stacked = self.mode == "pmap"
        self.check_tables(call, state, (len(self.local_devices),) if stacked else ())

    def _mapped(
        self,
        fn: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        splits: tuple[P | None, ...] | None = None,
        axes: Sequence[str] = (),
    ) -> Any:
        # Along other axes XLA splits what is split: parameters, and products with them.
        over = {"mesh": self.mesh, "axis_names": set(axes or self.axes), "check_vma": False}
        fn = settled(fn, splits) if self._left and not axes else fn
        return jax.shard_map(fn, in_specs=in_specs, out_specs=out_specs, **over)


@functools.lru_cache(maxsize=16)
def _digesting(
    placement: Placement, specs: tuple[tuple[P, tuple[str, ...]], ...] | None
) -> Callable[[Any], Any]:
    """A compiled function from a state, or its leaves, to the digests of all devices."""

    def one(state: Any) -> jax.Array:
        leaves = jax.tree.leaves(state)
        split = [()] * len(leaves) if specs is None else [names for _, names in specs]
        return digest_over(leaves, split, placement.mesh.axis_names)

    if placement.mode == "pmap":
        return Pmapped(placement, "Placement.digests", one, first)
    in_specs, every = ([spec for spec, _ in specs or ()],), placement.mesh.axis_names
    return jax.jit(placement._mapped(one, in_specs, P(), axes=every))


@jax.jit
def _unstacked(leaves: list[Any]) -> list[Any]:
    """What a device holds of a state under pmap, without the axis of devices: one program."""
    return [leaf[0] for leaf in leaves]


def _own(leaf: Any) -> Any:
    """An array that the caller does not fill anew: JAX reads it later, or takes it as it is."""
    is_lent = isinstance(leaf, np.ndarray) and (leaf.flags.writeable or not leaf.flags.owndata)
    return leaf.copy() if is_lent else leaf


def check_placement(call: str, placement: Any, otherwise: str = "", remedy: str = "") -> None:
    """Raises unless it is one; `otherwise`: what it may be besides."""
    if not isinstance(placement, Placement):
        raise TypeError(
            f"{call}: placement must be a jax_hkv.sharding.Placement{otherwise}, got "
            f"{type(placement).__name__}: "
            f"{remedy or 'make one of a mesh, jax_hkv.sharding.Placement(mesh)'}"
        )


def _form_of(shapes: Any) -> tuple[int, str]:
    """Of what is created: a number that tells forms apart, and what to say of it."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    forms = [f"{jax.tree_util.keystr(path)} {jax.typeof(leaf)}" for path, leaf in leaves]
    number = zlib.crc32("\n".join(forms).encode())
    return number, f"{len(leaves)} arrays of the form {number:08x}"
