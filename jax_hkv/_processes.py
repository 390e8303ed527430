"""One run of several processes: how they join, how they end, and how they keep step."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

Batch = TypeVar("Batch")

ADDRESS = "JAX_HKV_COORDINATOR_ADDRESS"
PROCESSES = "JAX_HKV_PROCESSES"
PROCESS = "JAX_HKV_PROCESS"
DEVICES = "JAX_HKV_DEVICES"  # of each process
HOST_DEVICES = "--xla_force_host_platform_device_count="
LAUNCHER = "JAX_HKV_LAUNCHER"  # a file descriptor that is open as long as the launcher lives

# A process that vanished is noticed by the latest of these; the others end 3 to 9 seconds later
# (measured with JAX 0.10.2 and 0.12.0), and so within two minutes.
INITIALIZATION_SECONDS = 90
HEARTBEAT_SECONDS = 60
SHUTDOWN_SECONDS = 60


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    initialization_timeout: int = INITIALIZATION_SECONDS,
    heartbeat_timeout_seconds: int = HEARTBEAT_SECONDS,
    shutdown_timeout_seconds: int = SHUTDOWN_SECONDS,
    **others: Any,
) -> None:
    """Joins the processes of a run; does nothing in a run of one process.

    As ``jax.distributed.initialize``, but its arguments may come from the launcher, CPU devices
    talk through gloo, and when a process dies the others end, too, within two minutes: with a
    status that is not zero and the cause in their logs. A process with an uncaught exception ends
    at once, where JAX would wait for the others, and they for it.

    Args:
      coordinator_address: host and port of process 0; None: as the launcher says. Without a
        launcher and any argument there is one process.
      num_processes: of the run.
      process_id: of this process, from 0.
      initialization_timeout: seconds that processes wait for each other at the start.
      heartbeat_timeout_seconds: after which a process that is not heard of counts as dead.
      shutdown_timeout_seconds: that a process waits for the others at its end. Raise it if one of
        them works on alone for longer than that after the last step.
      **others: for ``jax.distributed.initialize``.

    Raises:
      RuntimeError: if JAX has devices already: call this before anything else of JAX. If a script
        with a launcher has made itself another number of devices than that gives it.

    Example:
      >>> initialize()  # neither launched nor given an address: one process
      >>> jax.process_count()
      1
    """
    is_launched = coordinator_address is None and ADDRESS in os.environ
    if is_launched:
        coordinator_address = os.environ[ADDRESS]
        num_processes, process_id = int(os.environ[PROCESSES]), int(os.environ[PROCESS])
        others.setdefault("cluster_detection_method", "deactivate")
    if LAUNCHER in os.environ:  # once: nobody whom this process starts has that descriptor
        watched = int(os.environ.pop(LAUNCHER))
        threading.Thread(target=_leave_after_the_launcher, args=(watched,), daemon=True).start()
    given = (coordinator_address, num_processes, process_id, *others.values())
    if all(argument is None for argument in given):
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        initialization_timeout=initialization_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
        **others,
    )
    _leave_at_once_after_an_error()
    if is_launched and DEVICES in os.environ:
        _check_devices(int(os.environ[DEVICES]))


def _check_devices(asked: int) -> None:
    """Raises if a script has asked for other devices, and has got them, than its launcher gave."""
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if f.startswith(HOST_DEVICES)]
    own = getattr(jax.config, "jax_num_cpu_devices", -1)
    if own in (-1, asked) and flags[-1:] == [HOST_DEVICES + str(asked)]:
        return  # JAX makes its devices later, as a script may say until then
    count = jax.local_device_count()
    if count != asked:
        raise RuntimeError(
            f"launch.initialize: a process must have the devices that its launcher gives it, "
            f"{asked}, got {count} of the platform {jax.default_backend()!r}: take "
            "jax_num_cpu_devices and --xla_force_host_platform_device_count out of the script, "
            f"where they override the launcher, or start it with --devices {count}"
        )


def _leave_after_the_launcher(watched: int) -> None:
    """Nobody would end this process any more, or show what it writes."""
    os.read(watched, 1)  # of a pipe that nobody writes to: until its other end is closed
    with contextlib.suppress(OSError):
        print("jax_hkv.launch: the launcher is gone, and this process ends", file=sys.stderr)
    os._exit(1)


def _leave_at_once_after_an_error() -> None:
    """An uncaught exception ends the process before JAX waits for the others at its exit.

    They may sit in a collective that waits for this process, and would do so until both give up.
    """
    show = sys.excepthook
    failed = threading.Event()

    def show_and_remember(*error: Any) -> None:
        show(*error)
        failed.set()

    def leave() -> None:
        if failed.is_set():
            print(
                f"jax_hkv.launch: process {jax.process_index()} of {jax.process_count()} ends with "
                "the error above. If that is a broken connection, another process ended first: "
                "look for the cause in its log.",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    sys.excepthook = show_and_remember
    atexit.register(leave)  # handlers run last in, first out: this one before JAX's


def environment(
    address: str, processes: int, process: int, devices: int, base: Mapping[str, str]
) -> dict[str, str]:
    """The environment in which :func:`initialize` joins a process to the others.

    Args:
      address: of :func:`free_address`, the same for all.
      processes: of the run.
      process: which of them, from 0.
      devices: of each: so many made of the CPU, or so many of the machine's GPUs, in order.
      base: the environment without that.
    """
    flags = f"{base.get('XLA_FLAGS', '')} {HOST_DEVICES}{devices}"
    own = range(process * devices, (process + 1) * devices)
    return {
        **base,
        ADDRESS: address,
        PROCESSES: str(processes),
        PROCESS: str(process),
        DEVICES: str(devices),
        "XLA_FLAGS": flags.strip(),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, own)),
    }


def synchronized(batches: Iterable[Batch], empty: Batch) -> Iterator[Batch]:
    """This process's batches, and empty ones until every process has run out.

    A step over several processes needs all of them, as often as each other and with batches of the
    same shapes. Before each batch they tell each other whether they have one, and a digest of its
    shapes, which is eight bytes of a process; nothing waits in a run of one process. Prefetch what
    is given, not what is returned: collectives of two threads may meet in another order elsewhere.

    Args:
      batches: of this process, all of the shapes of `empty`: pad a short last one, with a mask
        (``valid=``) that says so.
      empty: a batch whose mask is False everywhere.

    Yields:
      Batches, equally many on every process.

    Raises:
      ValueError: on every process, before any of them takes a step that the others could not
        follow, if their batches differ in shape.

    Example:
      >>> none = np.zeros(2, np.int32), np.zeros(2, bool)
      >>> given = [(np.array([7, 8], np.int32), np.ones(2, bool))]
      >>> [ids.tolist() for ids, valid in synchronized(given, none)]
      [[7, 8]]
    """
    own = iter(batches)
    end = object()
    while True:
        batch: Any = next(own, end)
        has_batch = batch is not end
        batch = batch if has_batch else empty
        if not _any_process(has_batch, batch):
            return
        yield batch


def _shapes(batch: Any) -> str:
    """Numbers may come as Python's here and as NumPy's there."""
    return ", ".join(
        f"{leaf.dtype}{list(leaf.shape)}" if np.ndim(leaf) else "a number"
        for leaf in jax.tree.leaves(batch)
    )


def _any_process(has_batch: bool, batch: Any) -> bool:
    if jax.process_count() == 1:
        return has_batch
    own = _shapes(batch)
    told = np.array([has_batch, zlib.crc32(own.encode())], np.uint32)
    flags, digests = np.asarray(multihost_utils.process_allgather(told)).reshape(-1, 2).T
    others = np.flatnonzero(digests != digests[jax.process_index()])
    if np.any(flags) and len(others):
        raise ValueError(
            "sharding.synchronized: batches must have the same shapes on every process, got "
            f"{own} on process {jax.process_index()} and others on processes {others.tolist()}: "
            "pad them to one shape, with a mask that says so"
        )
    return bool(np.any(flags))
