"""Several processes of this machine: they train one table together, and they end together."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import process_worker as worker
import pytest
from combinations import seldom

import jax_hkv as hkv

WORKER = Path(worker.__file__)
PROCESSES, DEVICES = 2, 2
MOST_SECONDS = 120  # between the death of a process and the end of the others
HEARTBEAT = "10"  # seconds: the library's minute is waited for with --slow
LAUNCH = [sys.executable, "-m", "jax_hkv.launch"]


def environment():
    """Of a program that has CPU devices only."""
    return {**os.environ, "JAX_PLATFORMS": "cpu"}


def launch(*arguments, timeout=MOST_SECONDS):
    """The launcher's end, and its output."""
    return subprocess.run(
        [*LAUNCH, *map(str, arguments)],
        env=environment(),
        cwd=WORKER.anchor,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train(folder, *arguments):
    """What each process exported."""
    done = launch(
        *("--processes", PROCESSES, "--devices", DEVICES, "--log-dir", folder / "logs"),
        *(WORKER, folder, *arguments),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained 20 steps on 4 devices" in done.stdout  # process 0's output is shown
    return [dict(np.load(folder / f"{process}.npz")) for process in range(PROCESSES)]


@pytest.fixture(scope="module")
def expected():
    """One table of one device, which gets the batches of all processes as one batch."""
    with jax.default_device(jax.devices("cpu")[0]):
        table = worker.OPTIMIZER.init(hkv.create(worker.CAPACITY, worker.DIM))
        step = jax.jit(train_one_table)
        parts = [worker.batches(part) for part in range(PROCESSES)]
        for given in itertools.zip_longest(*parts, fillvalue=worker.NONE):
            table = step(table, worker.Batch(*map(np.concatenate, zip(*given, strict=True))))
        return hkv.sharding.export_entries(table)


def train_one_table(table, batch):
    table, result = hkv.find_or_insert(table, batch.ids, valid=batch.valid)
    return worker.OPTIMIZER.update(table, result, worker.gradients_of(result.values, batch))


def by_key(keys, *rows):
    order = np.argsort(keys)
    return [keys[order], *(array[order] for array in rows)]


def assert_trained(exports, expected):
    """Together the processes hold what the one table holds."""
    assert list(expected.optimizer) == ["mu", "nu"]
    fields = ["keys", "scores", "values", *expected.optimizer]
    got = by_key(*(np.concatenate([export[field] for export in exports]) for field in fields))
    wanted = by_key(expected.keys, expected.scores, expected.values, *expected.optimizer.values())
    for field, actual, reference in zip(fields, got, wanted, strict=True):
        if field in ("keys", "scores"):
            np.testing.assert_array_equal(actual, reference, err_msg=field)
        else:
            np.testing.assert_allclose(actual, reference, rtol=1e-6, atol=1e-6, err_msg=field)


def test_the_input_is_uneven():
    """Else the tests below would not show what they are there to show."""
    steps = [list(worker.batches(part)) for part in range(PROCESSES)]
    assert len(steps[0]) == 20 and len(steps[1]) == 17
    assert not steps[0][worker.EMPTY_STEP].valid.any()
    assert [int(part[-1].valid.sum()) for part in steps] == [worker.SHORT] * 2
    assert steps[1][worker.EMPTY_STEP].valid.all()


@pytest.mark.parametrize("mode", seldom(["shard_map", "pmap"], {"pmap"}))
def test_two_processes_train_the_table_that_one_would(mode, tmp_path, expected):
    """One has fewer batches, both a short last one, and one of them an empty one."""
    exports = train(tmp_path, "--mode", mode, "--restore")
    assert_trained(exports, expected)
    assert all(len(export["keys"]) > 0 for export in exports)
    assert [int(export["steps"]) for export in exports] == [20, 20]
    np.testing.assert_array_equal(exports[0]["digests"], exports[1]["digests"])
    assert len(np.unique(exports[0]["digests"], axis=0)) == 4  # each device has another part
    assert exports[0]["hits"] == exports[1]["hits"] > 0  # of the last step, over all devices
    for export in exports:
        saved = by_key(export["keys"], export["values"])
        again = by_key(export["restored"], export["restored_values"])
        assert all(map(np.array_equal, saved, again))


def test_parts_of_two_processes_have_stores(tmp_path, expected):
    """From which everything comes back, and goes there by exports."""
    exports = train(tmp_path, "--store", "--restore")
    assert_trained(exports, expected)
    for export in exports:
        assert set(export["restored"]) == set(export["keys"])


@pytest.mark.slow  # what other tests show of smaller programs
def test_another_order_of_processes_and_of_ids_trains_the_same_table(tmp_path, expected):
    """Process 0 comes last, parts of the input and the ids of each batch are the other way."""
    assert_trained(train(tmp_path, "--other-order"), expected)


def test_the_launcher_names_a_process_that_was_killed(tmp_path):
    """And ends the others, and says so in their logs."""
    begin = time.monotonic()
    done = launch(
        *("--processes", PROCESSES, "--devices", DEVICES, "--log-dir", tmp_path),
        *(WORKER, tmp_path, "--death", "1", "kill"),
    )
    assert time.monotonic() - begin < MOST_SECONDS / 2
    assert done.returncode == 128 + signal.SIGKILL
    assert "process 1 was ended by SIGKILL" in done.stderr
    assert "ends by kill" in done.stderr  # the last lines of its log
    assert "process 1 was ended by SIGKILL" in (tmp_path / "process-0.log").read_text()


def test_the_launcher_shows_why_a_process_failed(tmp_path):
    """The end of its log; the others, which would go on, are ended."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['JAX_HKV_PROCESS'] == '1':\n"
        "    raise ValueError('the cause')\n"
        "time.sleep(600)\n"
    )
    done = launch("--processes", 3, "--log-dir", tmp_path, script)
    assert done.returncode == 1
    assert "process 1 ended with status 1" in done.stderr
    assert "ValueError: the cause" in done.stderr
    for survivor in (0, 2):
        log = (tmp_path / f"process-{survivor}.log").read_text()
        assert "process 1 ended with status 1" in log


def test_output_that_can_be_written_nowhere_stops_no_process(tmp_path):
    """More of it than a pipe holds; a log that cannot be made, and a full disk at the other end."""
    script = tmp_path / "script.py"
    script.write_text("print('x' * 100_000, flush=True)\nprint('the end', flush=True)\n")
    logs = tmp_path / "logs"
    (logs / "process-1.log").mkdir(parents=True)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*LAUNCH, "--processes", "2", "--log-dir", str(logs), str(script)],
            env=environment(),
            cwd=WORKER.anchor,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=MOST_SECONDS,
        )
    assert done.returncode == 0, done.stderr
    assert "standard output of process 0 ends here: [Errno 28]" in done.stderr
    assert f"there is no log {logs / 'process-1.log'}: " in done.stderr
    assert (logs / "process-0.log").read_text().endswith("x\nthe end\n")


def test_the_launcher_leaves_no_file_open(tmp_path):
    """It may be called from a program that goes on."""
    script = tmp_path / "script.py"
    script.write_text("print('done')\n")
    calls = (
        "import os, sys\n"
        "from jax_hkv import launch\n"
        "counts = []\n"
        "for _ in range(3):\n"
        "    assert launch.main(['--processes', '1', sys.argv[1]]) == 0\n"
        "    counts.append(len(os.listdir('/proc/self/fd')))\n"
        "assert counts[0] == counts[2], counts\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", calls, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert done.returncode == 0 and done.stdout.count("done") == 3, done.stderr


def test_a_signal_without_a_name_and_a_log_that_is_gone_are_reported(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, shutil, signal, sys\n"
        "shutil.rmtree(sys.argv[1])\n"
        "os.kill(os.getpid(), signal.SIGRTMIN + 6)\n"
    )
    done = launch("--processes", 1, "--log-dir", tmp_path / "logs", script, tmp_path / "logs")
    number = signal.SIGRTMIN + 6
    assert done.returncode == 128 + number, done.stderr
    assert f"process 0 was ended by signal {number}" in done.stderr
    assert "(not to be read: [Errno 2]" in done.stderr


def ends_of_unsupervised(folder, death, *arguments, survivors):
    """How processes end that nobody watches, by their numbers: (status, log)."""
    address = hkv.launch.free_address()
    logs = [folder / f"{number}.log" for number in range(PROCESSES)]
    processes = []
    for number, log in enumerate(logs):
        with log.open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-u", WORKER, folder, "--death", *death, *arguments],
                    env=hkv.launch.environment(address, PROCESSES, number, DEVICES, environment()),
                    cwd=WORKER.anchor,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        statuses = {number: processes[number].wait(MOST_SECONDS) for number in survivors}
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {number: (status, logs[number].read_text()) for number, status in statuses.items()}


CAUSES = ("Connection reset by peer", "Connection closed by peer", "Socket closed", "unhealthy")


@pytest.mark.parametrize("dead", seldom([1, 0], {1}))
def test_who_survives_a_death_ends_by_itself_and_says_why(dead, tmp_path):
    """Whoever died, the coordinator too; without a launcher that ends the others."""
    ends = ends_of_unsupervised(
        *(tmp_path, (str(dead), "kill"), "--heartbeat", HEARTBEAT), survivors=[1 - dead]
    )
    status, log = ends[1 - dead]
    assert status != 0
    assert any(cause in log for cause in CAUSES), log
    assert not (tmp_path / f"{1 - dead}.npz").exists()


def test_a_process_with_an_error_does_not_wait_for_those_that_wait_for_it(tmp_path):
    """JAX would, at its exit, until both give up."""
    ends = ends_of_unsupervised(
        *(tmp_path, ("1", "raise"), "--heartbeat", HEARTBEAT), survivors=[0, 1]
    )
    assert ends[0][0] != 0 and any(cause in ends[0][1] for cause in CAUSES), ends[0][1]
    status, log = ends[1]
    assert status == 1 and "ValueError: the cause" in log
    assert "process 1 of 2 ends with the error above" in log and "Barrier" not in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "death, survivors", [("kill", [0]), ("stop", [0]), ("exit", [0, 1])], ids=str
)
def test_nobody_hangs_with_the_timeouts_of_the_library(death, survivors, tmp_path):
    """Not when a process stops for good, nor when it leaves while the others need it."""
    ends = ends_of_unsupervised(tmp_path, ("1", death), survivors=survivors)
    assert all(status != 0 for status, _ in ends.values())
    assert all(any(cause in log for cause in (*CAUSES, "Barrier")) for _, log in ends.values())


def test_the_launcher_gives_each_process_its_place(tmp_path):
    """And the script its arguments; the shell gets the status that the script gave."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print(os.environ['JAX_HKV_PROCESSES'], os.environ['JAX_HKV_PROCESS'], sys.argv[1:])\n"
        "sys.exit(7 * ('--fail' in sys.argv))\n"
    )
    done = launch("--processes", 3, "--log-dir", tmp_path, script, "--step", "4")
    assert done.returncode == 0, done.stderr
    logs = [(tmp_path / f"process-{number}.log").read_text() for number in range(3)]
    assert logs == [f"3 {number} ['--step', '4']\n" for number in range(3)]
    assert done.stdout == logs[0]
    failed = launch("--processes", 1, script, "--fail")
    assert failed.returncode == 7 and "process 0 ended with status 7" in failed.stderr


def ready_files(launcher, folder):
    """What the two processes of a launcher wrote as soon as they were ready."""
    files = [folder / str(number) for number in range(2)]
    deadline = time.monotonic() + MOST_SECONDS
    while not all(path.exists() and path.read_text() for path in files):
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.05)
    return files


@pytest.mark.parametrize("interrupt", seldom([signal.SIGINT, signal.SIGTERM], {signal.SIGTERM}))
def test_an_interrupted_launcher_leaves_nothing_running(interrupt, tmp_path):
    """Not even those that take no notice of SIGTERM."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "pathlib.Path(sys.argv[1], os.environ['JAX_HKV_PROCESS']).write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    command = [*LAUNCH, "--processes", "2", "--log-dir", tmp_path, "--grace", "6"]
    command += [script, tmp_path]
    # In the background of a shell SIGINT is ignored, and would be by whoever is started here.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    launcher = subprocess.Popen(
        command, env=environment(), cwd=WORKER.anchor, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    files = ready_files(launcher, tmp_path)
    launcher.send_signal(interrupt)
    begin = time.monotonic()
    _, errors = launcher.communicate(timeout=MOST_SECONDS)
    assert time.monotonic() - begin > 6  # by default it would wait for 5
    assert launcher.returncode == 128 + interrupt and "interrupted" in errors
    for path in files:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_processes_end_when_their_launcher_is_killed(tmp_path):
    """Each holds a lock as long as it lives; nobody may be left to ask for its status."""
    script = tmp_path / "script.py"
    script.write_text(
        "import fcntl, os, pathlib, sys, time\n"
        "import jax_hkv.launch\n"
        "lock = pathlib.Path(sys.argv[1], os.environ['JAX_HKV_PROCESS']).open('w')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "jax_hkv.launch.initialize()\n"
        "lock.write('ready')\n"
        "lock.flush()\n"
        "time.sleep(600)\n"
    )
    command = [*LAUNCH, "--processes", "2", "--log-dir", tmp_path, script, tmp_path]
    launcher = subprocess.Popen(command, env=environment(), cwd=WORKER.anchor)
    files = ready_files(launcher, tmp_path)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + MOST_SECONDS
    for path in files:
        with path.open() as lock:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_the_launcher_refuses_what_it_cannot_run(tmp_path):
    """Before it starts anything."""
    missing = launch("--processes", 2, tmp_path / "nowhere.py")
    assert missing.returncode == 2 and "nowhere.py, which is not there" in missing.stderr
    none = launch("--processes", 0, WORKER)
    assert none.returncode == 2 and "must be 1 or more" in none.stderr
    never = launch("--processes", 1, "--grace", "nan", WORKER)
    assert never.returncode == 2 and "--grace must be seconds from 0 on" in never.stderr


def test_a_script_that_makes_itself_other_devices_is_told_so(tmp_path):
    """What it says would hold, silently, and not what the launcher was told."""
    script = tmp_path / "script.py"
    script.write_text(
        "import jax\n"
        "import jax_hkv.launch\n"
        "jax.config.update('jax_num_cpu_devices', 3)\n"
        "jax_hkv.launch.initialize()\n"
    )
    done = launch("--processes", 1, "--devices", 2, "--log-dir", tmp_path, script)
    assert done.returncode == 1
    assert "devices that its launcher gives it, 2, got 3 of the platform 'cpu'" in done.stderr
    assert "start it with --devices 3" in done.stderr
    assert launch("--processes", 1, "--devices", 3, script).returncode == 0


def test_one_process_is_in_step_with_itself():
    """`synchronized` gives what it is given, and asks nobody."""
    assert list(hkv.sharding.synchronized(iter([1, 2, 3]), 0)) == [1, 2, 3]
    assert list(hkv.sharding.synchronized([], 0)) == []


def test_processes_with_batches_of_different_shapes_say_so(tmp_path):
    """Their collectives would wait for each other for ever."""
    ends = ends_of_unsupervised(tmp_path, ("-1", ""), "--half", "1", survivors=[0, 1])
    for own, (status, log) in ends.items():
        shape = rf"int32\[{worker.LOCAL_BATCH // (1 + own)}\]"
        assert status != 0
        assert re.search(rf"same shapes.*got {shape}.* process {own} .*\[{1 - own}\]", log), log


def test_processes_agree_or_are_told_on_what_they_do_not(tmp_path):
    """Before anything hangs, or becomes another table in each of them."""
    worker_of = WORKER.with_name("agreement_worker.py")
    done = launch(
        *("--processes", PROCESSES, "--devices", DEVICES, "--log-dir", tmp_path / "logs"),
        *(worker_of, tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process 0 agrees" in done.stdout


def test_a_launched_script_that_joins_nobody_is_warned(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(
        "import jax, jax_hkv as hkv\n"
        'hkv.sharding.Placement(jax.make_mesh((1,), ("device",), devices=jax.devices()[:1]))\n'
    )
    done = launch("--processes", PROCESSES, "--devices", 1, "--log-dir", tmp_path / "logs", script)
    assert done.returncode == 0
    assert "one of 2 processes" in done.stdout + done.stderr
