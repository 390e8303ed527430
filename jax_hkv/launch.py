"""Runs a script as several processes of this machine, and joins them into one run.

    python -m jax_hkv.launch --processes 2 --devices 4 train.py --steps 100

starts two copies of ``train.py --steps 100`` with four devices each. The script calls
:func:`initialize` before anything else of JAX, and sees eight devices from then on. Every process
has a log; what process 0 writes is shown, too. When one fails it is named, the others are ended,
and so does the launcher, with a status that is not zero.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import math
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jax_hkv._processes import LAUNCHER, environment, initialize

__all__ = ["environment", "free_address", "initialize", "main"]

_GRACE_SECONDS = 5.0  # between SIGTERM, which JAX takes for a notice of preemption, and SIGKILL
_OUTPUT_SECONDS = 5.0  # for the last lines of a process that has ended
_LAST_LINES = 20
_PIECE = 65536  # bytes of output read at a time
_SHELL_SIGNAL = 128  # shells report signal n as the status 128 + n


def free_address() -> str:
    """An address of the loopback interface whose port nobody uses."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


class _Ended(NamedTuple):
    """A process that ended."""

    process: int
    status: int

    def __str__(self) -> str:
        if self.status >= 0:
            return f"process {self.process} ended with status {self.status}"
        number = -self.status
        names = {own.value: own.name for own in signal.Signals}  # those of real time have none
        return f"process {self.process} was ended by {names.get(number, f'signal {number}')}"


class _Copies:
    """The running processes and their logs."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self._options = options
        self._running: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        self._watched: tuple[int, ...] = ()
        self._ended: queue.Queue[_Ended] = queue.Queue()  # in the order of their ends
        self.logs = [folder / f"process-{number}.log" for number in range(options.processes)]

    def start(self) -> None:
        given = self._options
        address = free_address()
        # Its other end closes when this process ends, however it does.
        watched, _ = self._watched = os.pipe()
        base = {**os.environ, LAUNCHER: str(watched)}
        for number in range(given.processes):
            process = subprocess.Popen(
                [sys.executable, "-u", str(given.script), *given.args],
                env=environment(address, given.processes, number, given.devices, base),
                pass_fds=(watched,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            self._running.append(process)
            self._threads.append(_thread(self._follow, number, process))

    def first_failure(self) -> _Ended | None:
        """Waits for all processes, or for one that fails."""
        for _ in self.logs:
            ended = self._ended.get()
            if ended.status:
                return ended
        return None

    def end(self) -> None:
        """Ends those that still run, and waits for the logs of all."""
        for process in self._running:
            process.terminate()
        deadline = time.monotonic() + self._options.grace
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._running:
            process.kill()
        for thread in self._threads:
            thread.join()
        for end in self._watched:
            os.close(end)

    def _follow(self, number: int, process: subprocess.Popen[bytes]) -> None:
        copying = _thread(self._copy, number, process.stdout)
        self._ended.put(_Ended(number, process.wait()))
        # Whoever the process started may hold its output open for longer.
        copying.join(_OUTPUT_SECONDS)

    def _copy(self, number: int, output: BinaryIO) -> None:
        """Reads all output, whatever becomes of it: what is not read would stop the process."""
        path = self.logs[number]
        with _log_at(path) as log:
            sinks: dict[str, Any] = {f"the log {path}": functools.partial(_write, log)}
            if number == 0:
                sinks["standard output"] = _show
            while piece := output.read1(_PIECE):  # pyright: ignore[reportAttributeAccessIssue]
                for name, write in list(sinks.items()):
                    try:
                        write(piece)
                    except (OSError, ValueError) as error:
                        del sinks[name]
                        if not isinstance(error, BrokenPipeError):  # nobody looks any more
                            _say(f"{name} of process {number} ends here: {error}")


def _log_at(path: Path) -> FileIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        _say(f"there is no log {path}: {error}")
        return Path(os.devnull).open("wb", buffering=0)


def _write(file: FileIO, piece: bytes) -> None:
    left = memoryview(piece)
    while left:
        left = left[file.write(left) :]


def _show(piece: bytes) -> None:
    if sys.stdout is not None:  # it may be closed
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()


def _say(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"jax_hkv.launch: {message}", file=sys.stderr)


def _thread(work: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def _report(failure: _Ended, logs: Sequence[Path]) -> None:
    """Says what happened, in the logs of the other processes, too."""
    own = logs[failure.process]
    for log in logs:
        if log != own:
            with contextlib.suppress(OSError), log.open("a") as lines:
                lines.write(f"jax_hkv.launch: {failure}, and the run with it; its log is {own}\n")
    try:
        with own.open(errors="replace") as lines:
            last = "".join(collections.deque(lines, _LAST_LINES))
    except OSError as error:
        last = f"(not to be read: {error})"
    _say(f"{failure}, and the run with it. The last lines of its log, {own}:\n{last}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m jax_hkv.launch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--processes", type=int, required=True, help="copies of the script")
    parser.add_argument("--devices", type=int, default=1, help="of each process (default: 1)")
    parser.add_argument("--log-dir", type=Path, help="of the logs (default: a temporary folder)")
    parser.add_argument(
        "--grace",
        type=float,
        default=_GRACE_SECONDS,
        help="seconds from SIGTERM to SIGKILL, to write a checkpoint (default: %(default)g)",
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("args", nargs=argparse.REMAINDER, help="for the script")
    options = parser.parse_args(arguments)
    if options.processes < 1 or options.devices < 1:
        parser.error("--processes and --devices must be 1 or more")
    if not 0 <= options.grace < math.inf:
        parser.error(f"--grace must be seconds from 0 on, got {options.grace}")
    if not options.script.is_file():
        parser.error(f"script must be a Python file, got {options.script}, which is not there")
    return options


def _interrupt(number: int, _: Any) -> None:
    raise KeyboardInterrupt(number)


def _run(options: argparse.Namespace, folder: Path) -> int:
    copies = _Copies(options, folder)
    try:
        copies.start()
        failure = copies.first_failure()
    except KeyboardInterrupt as interrupt:
        _say("interrupted; all processes are ended")
        return _SHELL_SIGNAL + (interrupt.args or (signal.SIGINT,))[0]
    finally:
        for second in (signal.SIGINT, signal.SIGTERM):  # which would leave some running
            signal.signal(second, signal.SIG_IGN)
        copies.end()
    if failure is None:
        return 0
    _report(failure, copies.logs)
    return failure.status if failure.status > 0 else _SHELL_SIGNAL - failure.status


def main(arguments: Sequence[str] | None = None) -> int:
    """The program.

    Returns:
      0 if all processes did; else the status of the first that failed, or 128 + the signal that
      ended it or interrupted the program.
    """
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    if options.log_dir is not None:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        return _run(options, options.log_dir)
    folder = Path(tempfile.mkdtemp(prefix="jax_hkv-"))
    status = _run(options, folder)
    if status == 0:  # else somebody will want to read them
        shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
