"""Worker processes: their deadlines, their ends, what they print, and what they leave."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rloo_cli.utils.child_process import process_start_time
from rloo_cli.utils.worker_pool import WorkerGone, WorkerPool

pytestmark = pytest.mark.process

IMPORT = "__import__('{}')"
OS, TIME = IMPORT.format("os"), IMPORT.format("time")
PID = f"str({OS}.getpid()).encode()"
# In the worker, as hostile code would do it: write to every socket that it has.
WRITE = f"""[
    {OS}.write(int(fd), {{}}) for fd in {OS}.listdir('/proc/self/fd')
    if {OS}.path.lexists('/proc/self/fd/' + fd) and 'socket' in {OS}.readlink('/proc/self/fd/' + fd)
]"""


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    """Workers that evaluate Python: an answer is the bytes that come of it."""
    nothing = os.getpid  # any function without arguments that can be pickled
    code = SimpleNamespace(prepare=nothing, start=nothing, answer=eval)
    made = WorkerPool(code, "a test", keep=2)
    yield made
    made.close()


def wait_until_gone(pid: int) -> None:
    limit = time.monotonic() + 10
    while process_start_time(pid) and time.monotonic() < limit:
        time.sleep(0.02)
    assert not process_start_time(pid)


def test_a_worker_that_answered_is_used_again(pool: WorkerPool) -> None:
    pids = []
    for _ in range(3):
        with pool.idle_worker() as worker:
            pids.append(worker.request(PID, 20.0))
    assert len({*pids}) == 1 and int(pids[0]) != os.getpid()


def test_a_worker_that_exited_between_two_calls_is_replaced(pool: WorkerPool) -> None:
    pool.start_idle()
    for worker in pool.idle:
        os.kill(worker.pid, 9)
        wait_until_gone(worker.pid)
    with pool.idle_worker() as worker:
        assert worker.request("b'fine'", 20.0) == b"fine"


@pytest.mark.parametrize(
    ("call", "code"), [(f"{OS}._exit(3)", 3), (f"{OS}.kill({OS}.getpid(), 9)", -9), ("1 / 0", 1)]
)
def test_the_exit_of_a_worker_costs_one_call_and_says_its_code(
    pool: WorkerPool, call: str, code: int
) -> None:
    with pytest.raises(WorkerGone) as caught, pool.idle_worker() as worker:
        worker.request(call, 20.0)
    assert caught.value.exit_code == code
    with pool.idle_worker() as worker:
        assert worker.request("b'fine'", 20.0) == b"fine"


def test_a_worker_that_is_late_is_killed(pool: WorkerPool) -> None:
    with pytest.raises(TimeoutError), pool.idle_worker() as worker:
        worker.request(f"{TIME}.sleep(60)", 0.5)
    wait_until_gone(worker.pid)
    assert not pool.idle


def test_a_worker_in_a_call_ends_with_the_process_that_forked_it(pool: WorkerPool) -> None:
    worker = pool.take_new()
    with pytest.raises(TimeoutError):
        worker.request(f"{TIME}.sleep(60)", 0.5)
    assert pool.starter is not None
    pool.starter.process.kill()
    wait_until_gone(worker.pid)


def test_the_process_that_forks_ends_with_the_run_though_it_still_imports() -> None:
    program = """
import functools, os, signal, threading, time
from types import SimpleNamespace
from rloo_cli.utils.worker_pool import WorkerPool
code = SimpleNamespace(prepare=functools.partial(time.sleep, 60), start=os.getpid, answer=eval)
pool = WorkerPool(code, "a test", keep=1)
threading.Thread(target=pool.start_idle, daemon=True).start()
while pool.starter is None:
    time.sleep(0.01)
time.sleep(2.0)  # until it sleeps
print(pool.starter.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run(  # the worker has its standard error: we would wait for both
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert run.returncode == -9
    wait_until_gone(int(run.stdout))


def test_a_worker_that_sends_its_answer_byte_by_byte_does_not_outlast_the_deadline(
    pool: WorkerPool,
) -> None:
    header, byte = "(100).to_bytes(8, 'big')", "b'x'"
    drip = f"[({WRITE.format(byte)}, {TIME}.sleep(0.1)) for _ in range(50)]"
    began = time.monotonic()
    with pytest.raises(TimeoutError), pool.idle_worker() as worker:
        worker.request(f"({WRITE.format(header)}, {drip})", 1.0)
    assert time.monotonic() - began < 4.0  # it drips for five seconds


def test_an_answer_that_is_too_large_is_not_read(pool: WorkerPool) -> None:
    with pytest.raises(WorkerGone), pool.idle_worker() as worker:
        worker.request("b'x' * 1001", 20.0, max_bytes=1000)
    with pool.idle_worker() as worker:
        assert len(worker.request("b'x' * 1000", 20.0, max_bytes=1000)) == 1000


def test_what_a_worker_started_ends_with_the_pool(pool: WorkerPool) -> None:
    start = f"{IMPORT.format('subprocess')}.Popen(['sleep', '60']).pid"
    with pool.idle_worker() as worker:
        pid = int(worker.request(f"str({start}).encode()", 20.0))
    assert process_start_time(pid)
    pool.close()
    wait_until_gone(pid)


def test_control_characters_that_a_worker_prints_are_shown_and_not_sent_to_the_terminal(
    pool: WorkerPool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with pool.idle_worker() as worker:
        worker.request(r"print('\x1b]0;a title\x07 and words', flush=True) or b''", 20.0)
    pool.close()
    printed = capsys.readouterr().err
    assert printed.startswith("printed by a test: ") and "and words" in printed
    assert "\x1b" not in printed and "\x07" not in printed
    assert any("and words" in record.getMessage() for record in caplog.records)
