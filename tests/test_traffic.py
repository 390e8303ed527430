"""The collectives of compiled programs, counted: bytes by arithmetic, axes, runs, text."""

from __future__ import annotations

import math
from functools import partial
from textwrap import dedent

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_hkv._traffic import KINDS, traffic

ROWS = jax.ShapeDtypeStruct((64, 4), np.float32)
BYTES = 8 * 4 * 4  # of the rows on one of eight devices


def make_mesh(**sizes):
    axis_types = (AxisType.Auto,) * len(sizes)
    devices = jax.devices("cpu")[: math.prod(sizes.values())]
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=axis_types, devices=devices
    )


def compile_on(mesh, function, *arguments):
    """Compiled with every array split over all devices."""
    split = PartitionSpec(mesh.axis_names)
    step = jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return jax.jit(step).lower(*arguments or (ROWS,)).compile()


def ring(rows, axis):
    size = lax.axis_size(axis)
    return lax.ppermute(rows, axis, [(place, (place + 1) % size) for place in range(size)])


FUNCTIONS = {
    "all-to-all": partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
    "all-gather": partial(lax.all_gather, tiled=True),
    "all-reduce": lax.psum,
    "reduce-scatter": partial(lax.psum_scatter, tiled=True),
    "collective-permute": ring,
}
# Of the 128 bytes a device, by the size of the group.
SENT = {
    "all-to-all": {2: 64, 4: 96, 8: 112},
    "all-gather": {2: 128, 4: 384, 8: 896},
    "all-reduce": {2: 128, 4: 192, 8: 224},
    "reduce-scatter": {2: 64, 4: 96, 8: 112},
    "collective-permute": {2: 128, 4: 128, 8: 128},
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(
    ("sizes", "axes", "group"),
    [
        ({"device": 8}, ("device",), 8),
        ({"node": 2, "gpu": 4}, ("node",), 2),
        ({"node": 2, "gpu": 4}, ("gpu",), 4),
        ({"node": 2, "gpu": 4}, ("node", "gpu"), 8),
        ({"a": 2, "b": 2, "c": 2}, ("a", "c"), 4),
    ],
)
def test_a_collective_is_counted_along_its_axes(kind, sizes, axes, group):
    mesh = make_mesh(**sizes)
    compiled = compile_on(mesh, lambda rows: FUNCTIONS[kind](rows, axes))
    found = traffic(compiled, mesh)
    (one,) = found.collectives
    assert (one.kind, one.axes, one.group_size) == (kind, axes, group)
    assert (one.bytes, one.sent, one.times, one.conditional) == (BYTES, SENT[kind][group], 1, False)
    assert one.messages == (1 if kind == "collective-permute" else group - 1)
    assert one.source.startswith("jit(") and "/shard_map/" in one.source
    assert f"%{one.name} = " in compiled.as_text()
    assert found.axes == mesh.axis_names
    for axis in mesh.axis_names:
        along = axis in axes
        assert found.bytes(axis=axis) == along * BYTES
        assert found.sent(axis=axis) == along * SENT[kind][group]
        assert found.messages(axis=axis) == along * one.messages
    assert [found.sent(kind=other) > 0 for other in KINDS] == [other == kind for other in KINDS]


def test_axes_are_places_in_the_mesh_whatever_the_order_of_its_devices():
    devices = np.array(jax.devices("cpu")[:8]).reshape(4, 2).T
    mesh = jax.sharding.Mesh(devices, ("node", "gpu"), axis_types=(AxisType.Auto,) * 2)
    compiled = compile_on(mesh, lambda rows: lax.psum(rows, "node"))
    assert traffic(compiled, mesh).collectives[0].axes == ("node",)


def test_groups_within_an_axis_have_their_own_size():
    def halves(rows):
        return lax.psum(rows, "gpu", axis_index_groups=[[0, 2], [1, 3]])

    mesh = make_mesh(node=2, gpu=4)
    (one,) = traffic(compile_on(mesh, halves), mesh).collectives
    assert (one.axes, one.group_size, one.sent) == (("gpu",), 2, BYTES)


@pytest.mark.parametrize(
    ("spec", "axis"), [(("node", None), "node"), (("gpu", None), "gpu"), ((None, "gpu"), "gpu")]
)
def test_the_mesh_of_the_arguments_names_what_the_partitioner_made(spec, axis):
    sharding = NamedSharding(make_mesh(node=2, gpu=4), PartitionSpec(*spec))
    rows = jax.ShapeDtypeStruct((64, 4), np.float32, sharding=sharding)
    found = traffic(jax.jit(jnp.sum).lower(rows).compile())
    group = {"node": 2, "gpu": 4}[axis]
    assert [(one.kind, one.axes) for one in found.collectives] == [("all-reduce", (axis,))]
    assert (found.bytes(), found.sent()) == (4, 2 * 4 * (group - 1) // group)
    assert found.axes == ("node", "gpu")


def test_without_a_mesh_axes_have_no_names():
    mesh = make_mesh(node=2, gpu=4)
    compiled = compile_on(mesh, lambda rows: lax.psum(rows, "gpu"))
    for given in (compiled.as_text(), compiled):
        found = traffic(given)
        (one,) = found.collectives
        assert (one.axes, one.group_size, one.sent) == (("",), 4, SENT["all-reduce"][4])
        assert found.axes == ("",) and found.sent(axis="") == one.sent
        assert "total       all" in str(found) and str(found).count("total") == 1


@pytest.mark.parametrize(
    "mesh", [AbstractMesh((2, 4), ("node", "gpu")), {"node": 2, "gpu": 4}], ids=["abstract", "dict"]
)
def test_a_mesh_without_devices_names_axes_too(mesh):
    compiled = compile_on(make_mesh(x=2, y=4), lambda rows: lax.psum(rows, "y"))
    assert traffic(compiled, mesh).collectives[0].axes == ("gpu",)


def test_a_scan_multiplies():
    def inner(carry, _):
        return lax.psum(carry, "device") * 0.5, None

    def outer(carry, _):
        return ring(lax.scan(inner, carry, None, length=5)[0], "device") + 1, None

    mesh = make_mesh(device=8)
    compiled = compile_on(mesh, lambda rows: lax.scan(outer, rows, None, length=3)[0])
    found = traffic(compiled, mesh)
    times = {one.kind: one.times for one in found.collectives}
    assert times == {"all-reduce": 15, "collective-permute": 3}
    assert found.bytes(kind="all-reduce") == 15 * BYTES
    assert found.sent(kind="all-reduce") == 15 * 224
    assert found.messages() == 15 * 7 + 3


def test_a_branch_counts_when_it_is_asked_for():
    def step(rows):
        rows = lax.cond(rows[0, 0] > 0, lambda v: lax.psum(v, "device"), lambda v: v + 1, rows)
        return ring(rows, "device")

    mesh = make_mesh(device=8)
    found = traffic(compile_on(mesh, step), mesh)
    conditional = {one.kind: (one.conditional, one.times) for one in found.collectives}
    assert conditional == {"all-reduce": (True, 1), "collective-permute": (False, 1)}
    assert (found.bytes(), found.bytes(conditional=True)) == (BYTES, 2 * BYTES)
    assert (found.sent(), found.sent(conditional=True)) == (128, 128 + 224)
    assert (found.messages(), found.messages(conditional=True)) == (1, 8)
    assert str(found).endswith("without 1 in branches (<=) or in loops of unknown length (?)")


def test_a_loop_of_unknown_length_counts_once_when_it_is_asked_for():
    def step(rows):
        def unfinished(carry):
            return lax.psum(carry[0, 0], "gpu") > 0

        return lax.while_loop(unfinished, lambda carry: lax.psum(carry, "node") - 1, rows)

    mesh = make_mesh(node=2, gpu=4)
    found = traffic(compile_on(mesh, step), mesh)
    assert {(one.axes, one.times) for one in found.collectives} == {
        (("gpu",), None),
        (("node",), None),
    }
    assert found.bytes() == found.sent() == found.messages() == 0
    assert found.bytes(conditional=True) == BYTES + 4
    assert str(found).endswith("without 2 in branches (<=) or in loops of unknown length (?)")


def test_a_program_without_collectives_has_no_traffic():
    found = traffic(jax.jit(jnp.sin).lower(ROWS).compile())
    assert found.collectives == () and found.bytes() == found.sent() == found.messages() == 0


def hlo(instructions, computations="", header="num_partitions=8"):
    """A module whose entry takes %rows (f32[8,4], 128 bytes) and %ids (bf16[6], 12 bytes)."""
    body = "\n".join(f"  {line}" for line in dedent(instructions).strip().splitlines())
    return (
        f"HloModule step, is_scheduled=true, {header}\n\n{dedent(computations)}\n"
        "ENTRY %main (rows: f32[8,4], ids: bf16[6]) -> f32[8,4] {\n"
        "  %rows = f32[8,4]{1,0} parameter(0)\n  %ids = bf16[6]{0} parameter(1)\n"
        f"{body}\n}}\n"
    )


MESH = {"node": 2, "gpu": 4}


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("node",), 2),
        ("{{0,1,2,3},{4,5,6,7}}", ("gpu",), 4),
        ("{{3,1,0,2},{7,4,6,5}}", ("gpu",), 4),
        ("{}", ("node", "gpu"), 8),
        ("[1,8]<=[8]", ("node", "gpu"), 8),
        ("[2,4]<=[8]", ("gpu",), 4),
        ("[4,2]<=[8]", ("gpu",), 2),
        ("[4,2]<=[2,4]T(1,0)", ("node",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("node", "gpu"), 4),
        ("mesh['node'=2,'gpu'=4] {'node'}", ("node",), 2),
        ("mesh['node'=2,'gpu'=4] {'node','gpu'}", ("node", "gpu"), 8),
        ("mesh['a'=2,'b'=1,'c'=4] {'c'}", ("gpu",), 4),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", ("node",), 2),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", ("gpu",), 4),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", ("gpu",), 2),
        ("mesh['a'=8] {'a':(1)2}", ("node",), 2),
        ("mesh['a'=8] {'a':(2)4}", ("gpu",), 4),
        ("mesh['a'=8] {'a':(2)2}", ("gpu",), 2),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), 1),
    ],
)
def test_groups_of_devices_are_read_in_every_form(groups, axes, size):
    text = hlo(f"%r = f32[8,4]{{1,0}} all-gather(%rows), channel_id=1, replica_groups={groups}, "
               "dimensions={0}, use_global_device_ids=true")  # fmt: skip
    (one,) = traffic(text, MESH).collectives
    assert (one.axes, one.group_size, one.sent) == (axes, size, 128 * (size - 1))


@pytest.mark.parametrize(
    ("opcode", "attributes", "header", "axes"),
    [
        # Without a channel the numbers are replicas'.
        ("all-reduce", "replica_groups={{0,1}}", "replica_count=2, num_partitions=4", ("node",)),
        ("all-to-all", "replica_groups={}", "replica_count=2, num_partitions=4", ("node",)),
        ("all-reduce", "replica_groups={{0}}", "num_partitions=8", ()),
        ("all-reduce", "replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_count=8", ("gpu",)),
        # With one, those of partitions, or for reductions still replicas' with all partitions.
        ("all-to-all", "channel_id=1, replica_groups={{0,1,2,3}}",
         "replica_count=2, num_partitions=4", ("gpu",)),
        ("all-to-all", "channel_id=1, replica_groups={}",
         "replica_count=2, num_partitions=4", ("gpu",)),
        ("all-reduce", "channel_id=1, replica_groups={{0},{1}}",
         "replica_count=2, num_partitions=4", ("gpu",)),
        ("all-reduce", "channel_id=1, replica_groups={}",
         "replica_count=2, num_partitions=4", ("node", "gpu")),
        ("collective-permute", "channel_id=2, source_target_pairs={{0,1},{1,0}}",
         "replica_count=2, num_partitions=4", ("gpu",)),
        ("collective-permute", "source_target_pairs={{0,1},{1,0}}",
         "replica_count=2, num_partitions=4", ("node",)),
    ],
)  # fmt: skip
def test_replicas_and_partitions_are_told_apart(opcode, attributes, header, axes):
    text = hlo(f"ROOT %r = f32[8,4]{{1,0}} {opcode}(%rows), {attributes}", header=header)
    (one,) = traffic(text, MESH).collectives
    assert one.axes == axes


@pytest.mark.parametrize(
    ("pairs", "axes", "group", "sent"),
    [
        ("{{0,1},{1,0},{6,7},{7,6}}", ("gpu",), 2, 128),
        ("{{0,1},{1,2},{2,3}}", ("gpu",), 4, 128),
        ("{{0,4},{5,1}}", ("node",), 2, 128),
        ("{{0,5}}", ("node", "gpu"), 2, 128),
        ("{{0,0},{1,1}}", (), 1, 0),
        ("{}", (), 1, 0),
    ],
)
def test_a_permute_sends_along_the_axes_of_its_pairs(pairs, axes, group, sent):
    text = hlo(
        f"%r = f32[8,4] collective-permute(%rows), channel_id=1, source_target_pairs={pairs}"
    )
    (one,) = traffic(text, MESH).collectives
    assert (one.axes, one.group_size, one.sent, one.messages) == (axes, group, sent, sent // 128)


# What XLA prints for an H200, compiled by jax 0.10.2, with shorter configurations.
GPU = hlo(
    """
    %a = ((f32[8,4]{1,0}), f32[8,4]{1,0}) all-to-all-start(%rows), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}, metadata={op_name="jit(step)/shard_map/all_to_all" scheduling_name="a" stack_frame_id=3}, backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":true,"backend":"DEFAULT"},"reification_cost":[]}
    %a.done = f32[8,4]{1,0} all-to-all-done(%a), metadata={op_name="jit(step)/shard_map/all_to_all" scheduling_name="a.done" stack_frame_id=3}
    %offsets = s64[4]{0} fusion(%a.done), kind=kLoop, calls=%fused
    %b = ((f32[8,4]{1,0}, f32[8,4]{1,0}, s64[4]{0}, s64[4]{0}, s64[4]{0}, /*index=5*/s64[4]{0}), f32[8,4]{1,0}) ragged-all-to-all-start(%rows, %a.done, %offsets, %offsets, %offsets, /*index=5*/%offsets), channel_id=2, replica_groups={{0,1,2,3},{4,5,6,7}}
    %b.done = f32[8,4]{1,0} ragged-all-to-all-done(%b)
    %c = ((f32[8,4]{1,0}, bf16[6]{0}), (f32[16,4]{1,0}, bf16[12]{0})) all-gather-start(%rows, %ids), channel_id=3, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, use_global_device_ids=true
    %c.done = (f32[16,4]{1,0}, bf16[12]{0}) all-gather-done(%c)
    %d = ((f32[8,4]{1,0}), f32[2,4]{1,0}) reduce-scatter-start(%rows), channel_id=4, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
    %d.done = f32[2,4]{1,0} reduce-scatter-done(%d)
    %e = ((f32[8,4]{1,0}), f32[8,4]{1,0}) collective-broadcast-start(%rows), channel_id=5, replica_groups={{0,1,2,3},{4,5,6,7}}
    %e.done = f32[8,4]{1,0} collective-broadcast-done(%e)
    %loop = (s32[], f32[8,4]{1,0}) while(%tuple), condition=%unfinished, body=%turn, backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"},"dynamic_variables":[]}
    %choice = f32[8,4]{1,0} conditional(%rest, %rows, %rows), true_computation=%yes, false_computation=%no
    ROOT %last = f32[8,4]{1,0} copy(%choice)
    """,  # noqa: E501
    """
    %add (x: f32[], y: f32[]) -> f32[] {
      %y = f32[] parameter(1)
      %x = f32[] parameter(0)
      ROOT %sum = f32[] add(%x, %y)
    }

    %unfinished (state: (s32[], f32[8,4])) -> pred[] {
      %state = (s32[], f32[8,4]{1,0}) parameter(0)
      %part = f32[] get-tuple-element(%state), index=1
      %all = f32[] all-reduce-start(%part), channel_id=6, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%add
      %all.done = f32[] all-reduce-done(%all)
      ROOT %less = pred[] compare(%all.done, %part), direction=LT
    }

    %turn (state.1: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
      %state.1 = (s32[], f32[8,4]{1,0}) parameter(0)
      %part.1 = f32[8,4]{1,0} get-tuple-element(%state.1), index=1
      %next = (f32[8,4]{1,0}, f32[8,4]{1,0}) collective-permute-start(%part.1), channel_id=7, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
      %next.done = f32[8,4]{1,0} collective-permute-done(%next)
      ROOT %tuple.1 = (s32[], f32[8,4]{1,0}) tuple(%state.1, %next.done)
    }

    %yes (own: f32[8,4]) -> f32[8,4] {
      %own = f32[8,4]{1,0:T(8,128)S(1)} parameter(0)
      %sum.1 = f32[8,4]{1,0} all-reduce-start(%own), channel_id=8, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add
      ROOT %sum.done = f32[8,4]{1,0} all-reduce-done(%sum.1)
    }

    %no (own.1: f32[8,4]) -> f32[8,4] {
      ROOT %own.1 = f32[8,4]{1,0} parameter(0)
    }

    %fused (own.2: f32[8,4]) -> s64[4] {
      %own.2 = f32[8,4]{1,0} parameter(0)
      ROOT %zeros = s64[4]{0} constant({0, 0, 0, 0})
    }
    """,  # noqa: E501
)


def test_the_program_of_a_gpu_is_read():
    found = traffic(GPU, MESH)
    assert [
        (one.kind, one.name, one.axes, one.bytes, one.sent, one.messages, one.times)
        for one in found.collectives
    ] == [
        ("all-to-all", "a", ("gpu",), 128, 96, 3, 1),
        ("ragged-all-to-all", "b", ("gpu",), 128, 128, 3, 1),
        ("all-gather", "c", ("node",), 128 + 12, 128 + 12, 1, 1),
        ("reduce-scatter", "d", ("gpu",), 128, 96, 3, 1),
        ("collective-broadcast", "e", ("gpu",), 128, 128, 3, 1),
        ("collective-permute", "next", ("gpu",), 128, 128, 1, 5),
        ("all-reduce", "all", ("node", "gpu"), 4, 7, 7, 6),
        ("all-reduce", "sum.1", ("gpu",), 128, 192, 3, 1),
    ]
    assert [one.name for one in found.collectives if one.conditional] == ["sum.1"]
    assert [one.name for one in found.collectives if one.sent_is_bound] == ["b"]
    assert found.sent() == 96 + 128 + 140 + 96 + 128 + 5 * 128 + 6 * 7
    assert found.collectives[0].source == "jit(step)/shard_map/all_to_all"
    assert found.collectives[2].operands == "f32[8,4], bf16[6]"


def test_the_table_shows_each_collective_and_a_total_for_each_axis():
    shown = str(traffic(GPU, MESH))
    assert shown == dedent(
        """\
        kind                  axes      group  operands           bytes     sent  peers  times  source
        all-to-all            gpu           4  f32[8,4]             128       96      3      1  jit(step)/shard_map/all_to_all
        ragged-all-to-all     gpu           4  f32[8,4]             128    <=128      3      1
        all-gather            node          2  f32[8,4], bf16[6]    140      140      1      1
        reduce-scatter        gpu           4  f32[8,4]             128       96      3      1
        collective-broadcast  gpu           4  f32[8,4]             128      128      3      1
        collective-permute    gpu           4  f32[8,4]             128      128      1      5
        all-reduce            node,gpu      8  f32[]                  4        7      7      6
        all-reduce            gpu           4  f32[8,4]             128      192      3    <=1
        total                 node                                  164      182     43      7
        total                 gpu                                 1,176  <=1,130     59     15
        total                 all                                 1,316  <=1,270     60     16
        without 1 in branches (<=) or in loops of unknown length (?)"""  # noqa: E501
    )


def test_an_asynchronous_computation_counts_where_it_starts():
    text = hlo(
        """
        %start = ((f32[8,4]), f32[8,4], s32[]) async-start(f32[8,4]{1,0} %rows), calls=%wrapped
        %more = ((f32[8,4]), f32[8,4], s32[]) async-update(%start), calls=%wrapped
        ROOT %done = f32[8,4] async-done(%more), calls=%wrapped
        """,
        """
        wrapped (own: f32[8,4]) -> f32[8,4] {
          own = f32[8,4]{1,0} parameter(0)
          ROOT moved = f32[8,4]{1,0} all-to-all(f32[8,4]{1,0} own), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
        }
        """,  # noqa: E501
    )
    (one,) = traffic(text, MESH).collectives
    assert (one.kind, one.name, one.axes, one.bytes) == ("all-to-all", "moved", ("gpu",), 128)


def test_a_computation_counts_as_often_as_it_is_called():
    text = hlo(
        """
        %first = f32[8,4] call(%rows), to_apply=%sum_all
        %second = f32[8,4] call(%first), to_apply=%sum_all
        ROOT %third = f32[8,4] conditional(%ids, %second, %second), branch_computations={%sum_all, %sum_all}
        """,  # noqa: E501
        """
        %sum_all (own: f32[8,4]) -> f32[8,4] {
          %own = f32[8,4]{1,0} parameter(0)
          ROOT %sum = f32[8,4]{1,0} all-reduce(%own), replica_groups={}, channel_id=1, to_apply=%add
        }
        """,
    )
    found = traffic(text, MESH)
    assert [one.conditional for one in found.collectives] == [False, False, True, True]
    assert (found.bytes(), found.bytes(conditional=True)) == (256, 512)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("pred", 1), ("u8", 1), ("f8e4m3fn", 1), ("bf16", 2), ("f16", 2), ("s16", 2), ("f32", 4),
     ("s32", 4), ("u32", 4), ("f64", 8), ("s64", 8), ("u64", 8), ("c64", 8), ("c128", 16)],
)  # fmt: skip
def test_elements_have_the_bytes_of_their_type(dtype, size):
    text = hlo(
        f"""
        %operand = {dtype}[<=3,5]{{1,0}} copy(%rows)
        %r = {dtype}[24,5] all-gather(%operand), channel_id=1, replica_groups={{}}
        """
    )
    assert traffic(text).bytes() == 15 * size


@pytest.mark.parametrize("dtype", ["s4", "u2", "f4e2m1fn", "token"])
def test_a_type_of_less_than_a_byte_is_refused(dtype):
    text = hlo(
        f"""
        %operand = {dtype}[8]{{0}} copy(%rows)
        %r = {dtype}[64] all-gather(%operand), channel_id=1, replica_groups={{}}
        """
    )
    with pytest.raises(ValueError, match=f"traffic: r of compiled .*bytes of {dtype} elements"):
        traffic(text)


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="traffic: compiled must be an HLO module"):
        traffic("module @jit_step { }")
    lowered = jax.jit(jnp.sin).lower(ROWS)
    with pytest.raises(TypeError, match="traffic: compiled must be .* got Lowered"):
        traffic(lowered)


def test_another_mesh_than_the_program_s_is_refused():
    with pytest.raises(ValueError, match="traffic: mesh must have the 8 devices"):
        traffic(GPU, {"node": 2, "gpu": 2})
    with pytest.raises(TypeError, match="traffic: mesh must be a jax.sharding.Mesh.* got tuple"):
        traffic(GPU, (2, 4))


@pytest.mark.parametrize("groups", ["{{0,8}}", "[2,8]<=[16]"])
def test_more_devices_than_the_program_has_are_refused(groups):
    text = hlo(f"%r = f32[8,4] all-to-all(%rows), channel_id=1, replica_groups={groups}")
    with pytest.raises(ValueError, match="traffic: r of compiled .* but the program runs on 8"):
        traffic(text)


@pytest.mark.parametrize("call", ["bytes", "sent", "messages"])
def test_a_sum_over_what_there_is_not_is_refused(call):
    found = traffic(GPU, MESH)
    with pytest.raises(ValueError, match=f"Traffic.{call}: axis must be one of 'node', 'gpu', got"):
        getattr(found, call)(axis="device")
    with pytest.raises(ValueError, match=f"Traffic.{call}: kind must be one of 'all-to-all', "):
        getattr(found, call)(kind="all_to_all")
