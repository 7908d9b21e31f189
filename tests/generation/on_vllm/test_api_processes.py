"""Several API processes of one rollout server: they are told of together and end together. What one
of them does to the requests of another is in test_api_processes_on_server.py.
"""

import multiprocessing
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_cli.generation.vllm import api_processes, server, server_file, versions
from rloo_cli.generation.vllm.auth import Guard
from rloo_cli.utils.errors import GenerationError


def leave(code: int) -> None:
    raise SystemExit(code)


@pytest.mark.parametrize("code", [0, 3])
def test_a_server_ends_when_one_of_its_processes_does_also_with_0(code: int) -> None:
    context = multiprocessing.get_context("fork")
    short = context.Process(target=leave, args=(code,), name="ApiServer_1")
    long = context.Process(target=time.sleep, args=(60,), name="ApiServer_0")
    for process in (long, short):
        process.start()
    try:
        said = f"ApiServer_1 .process {short.pid}. of the server ended with {code}"
        with pytest.raises(GenerationError, match=said):
            api_processes._wait_for_exit([long, short])
    finally:
        long.kill()
        long.join()


def test_what_is_left_of_a_server_is_killed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []

    def fails(*given: Any) -> None:
        raise RuntimeError("an engine died")

    monkeypatch.setattr(api_processes, "_serve_with_several", fails)
    monkeypatch.setattr(api_processes.importlib, "import_module", lambda name: SimpleNamespace(
        set_ulimit=lambda: None
    ))  # fmt: skip
    monkeypatch.setattr(api_processes.os, "getpgid", lambda pid: api_processes.os.getpid())
    monkeypatch.setattr(
        api_processes.child_process,
        "kill_group_except",
        lambda group, spared_pid: killed.append((group, spared_pid)),
    )
    with pytest.raises(RuntimeError, match="an engine died"):
        api_processes.serve_until_stopped(
            socket.socket(), SimpleNamespace(), "", api_processes.make_ready_flags(2)
        )
    own = api_processes.os.getpid()
    assert killed == [(own, own)]


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module that builds an application: the guard, and what stands before it."""
    made = SimpleNamespace(before=[])

    def build_app(*given: Any) -> Any:
        stack = [SimpleNamespace(cls=cls) for cls in (*made.before, Guard)]
        return SimpleNamespace(user_middleware=stack, state=SimpleNamespace())

    made.build_app = build_app
    monkeypatch.setattr(versions, "import_vllm_module", lambda name: made)
    monkeypatch.setattr(versions, "attach_old_routes", lambda app: None)
    monkeypatch.setattr(api_processes.importlib, "import_module", lambda name: SimpleNamespace(
        attach_group_route=lambda app: None
    ))  # fmt: skip
    return made


def test_no_process_serves_an_application_that_something_stands_before(entry: Any) -> None:
    built = api_processes._guarded_api_module(api_processes.make_ready_flags(2), 1)
    entry.before = [SimpleNamespace]
    with pytest.raises(GenerationError, match="before the guard"):
        built.build_app()


def test_a_process_says_that_it_answers_once_it_listens(entry: Any) -> None:
    ready = api_processes.make_ready_flags(2)
    app = api_processes._guarded_api_module(ready, 1).build_app()
    app.state.server = SimpleNamespace(started=False)
    time.sleep(0.2)
    assert list(ready) == [0, 0]
    app.state.server.started = True
    end = time.monotonic() + 10
    while not ready[1] and time.monotonic() < end:
        time.sleep(0.02)
    assert list(ready) == [0, 1]


def test_a_server_is_told_of_once_every_process_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(server_file, "write_server_file", lambda folder, what: written.append(what))
    answer = SimpleNamespace(status=200)
    monkeypatch.setattr(server.http.client, "HTTPConnection", lambda *a, **o: SimpleNamespace(
        request=lambda *a: None, getresponse=lambda: answer, close=lambda: None
    ))  # fmt: skip
    ready, about = api_processes.make_ready_flags(2), SimpleNamespace()
    given = (tmp_path, about, "127.0.0.1", 1, ready)
    telling = threading.Thread(target=server._write_when_ready, args=given, daemon=True)
    telling.start()
    ready[0] = 1
    time.sleep(0.5)
    assert written == []
    ready[1] = 1
    telling.join(5)
    assert written == [about]
