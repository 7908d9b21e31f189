"""A real rollout server, as `rloo vllm-serve` starts it: whom it answers, and what it leaves."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from assert_refused import assert_refused
from cli_cases import Rloo, children, surroundings
from test_vllm_guard import FORBIDDEN

from rloo_cli.generation.vllm import handshake, server_file
from rloo_cli.generation.vllm.server_file import ServerRecord
from rloo_cli.launch import rollout_server
from rloo_cli.utils import child_process, ports
from rloo_cli.utils.child_process import process_start_time

pytestmark = pytest.mark.vllm
WORDS = (
    "+recipe=smoke", "model.path=make:tiny", "model.dtype=float32", "data.max_prompt_length=32",
    "generation.max_completion_length=16",
)  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
# Of developer mode and mounts, some of them not in the list of routes.
UNLISTED = [
    "/", "/metrics", "/metrics/", "/docs", "/redoc", "/openapi.json", "/rloo", "/ping",
    "/invocations", "/collective_rpc", "/server_info", "/sleep", "/adapters", "/favicon.ico",
]  # fmt: skip
MANAGED = {"RLOO_SERVER_DOCS": "1"}


class Served:
    """One `rloo vllm-serve`, with a temporary folder of its own."""

    def __init__(self, folder: Path, base: Path, *words: str, **variables: str):
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        environment = surroundings(base) | {"TMPDIR": str(self.temporary)} | variables
        self.rloo = Rloo(folder, environment)
        self.verb = self.rloo.start("vllm-serve", *WORDS, *words)
        self.run = folder / "runs" / "smoke"

    def up(self, limit: float = 300) -> ServerRecord:
        """Where it is, once it says so."""
        until = time.monotonic() + limit
        while time.monotonic() < until and self.verb.poll() is None:
            if "answers" in self.said():
                server = server_file.running_server(self.run)
                assert server is not None
                return server
            time.sleep(0.2)
        raise AssertionError(self.said())

    def said(self) -> str:
        return (self.rloo.folder / "out").read_text()

    def end(self, number: int = signal.SIGTERM, limit: float = 60) -> int:
        if self.verb.poll() is None:
            self.verb.send_signal(number)
        return self.verb.wait(limit)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The server that all tests of this file share."""
    served = Served(tmp_path_factory.mktemp("served"), tmp_path_factory.getbasetemp(), **MANAGED)
    try:
        served.up()
        yield served
    finally:
        served.end()


@pytest.fixture
def server(served: Served) -> ServerRecord:
    found = server_file.running_server(served.run)
    assert found is not None
    return found


def ask(
    server: ServerRecord, path: str, method: str = "GET", body: Any = None, token: bool = True
) -> tuple[int, str]:
    """Status and text of one request."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=120)
    headers = {"Authorization": f"Bearer {server.token}"} if token else {}
    data = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, data, headers | {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def raw(server: ServerRecord, *lines: str) -> int:
    """The status of a request written by hand."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        text = "\r\n".join([*lines, "Host: x", "", ""])
        connection.sendall(text.encode())
        return int(connection.recv(100).split()[1])


def group(server: ServerRecord) -> list[int]:
    """Everything that belongs to a server; at least its API process, engine and worker."""
    members = child_process.group_processes(server.group)
    assert len(members) >= 3
    return members


def test_server_json_is_its_owner_s_and_with_logs_all_there_is(
    served: Served, server: ServerRecord
) -> None:
    assert stat.S_IMODE((served.run / server_file.SERVER_FILE).stat().st_mode) == 0o600
    assert sorted(p.name for p in served.run.iterdir()) == ["logs", "server.json"]
    assert server.by == "vllm-serve" and server.is_alive() and server.transfer == "gloo"
    assert Path(server.log).is_file() and os.getpgid(server.pid) == server.group == server.pid
    assert len(server.token) == 64 and server.url in served.said()
    assert f"rloo train {' '.join(WORDS)} generation=vllm_server" in served.said()


def test_every_route_wants_the_token_whatever_the_method(server: ServerRecord) -> None:
    status, text = ask(server, "/openapi.json")
    assert status == 200
    paths = [*json.loads(text)["paths"], *UNLISTED]
    assert len(paths) > 40 and "/update_weights" in paths and "/inference/v1/generate" in paths
    for path in set(paths) - {"/health"}:
        for method in METHODS:
            assert ask(server, path, method, token=False)[0] == 401, (method, path)
    assert {ask(server, "/health", m, token=False)[0] for m in METHODS[2:]} == {401}
    assert ask(server, "/health", token=False)[0] == 200


@pytest.mark.parametrize(
    "target",
    [
        "//health", "/health/", "/health/../pause", "/%68ealth", "/health%2f..%2fweight_info",
        "/./weight_info", "//weight_info", "http://x/weight_info", "http://x/health/../weight_info",
        "/weight_info/", "/WEIGHT_INFO", "/health/..;/weight_info", "*",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_no_way_to_write_a_path_passes_without_the_token(
    server: ServerRecord, method: str, target: str
) -> None:
    assert raw(server, f"{method} {target} HTTP/1.1") in (400, 401)


def test_a_second_header_or_a_socket_does_not_pass(server: ServerRecord) -> None:
    right = f"Authorization: Bearer {server.token}"
    assert raw(server, "GET /weight_info HTTP/1.1", right) == 200
    for given in ([right, right], [right, "Authorization: x"], ["authorization: x", right]):
        assert raw(server, "GET /weight_info HTTP/1.1", *given) == 401
    upgrade = ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    upgrade += ["Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg=="]
    for path in ("/v1/realtime", "/health", "/"):
        assert raw(server, f"GET {path} HTTP/1.1", *upgrade) in (401, 403)


def test_arbitrary_calls_and_the_whole_configuration_are_refused_with_the_token(
    server: ServerRecord,
) -> None:
    for path in FORBIDDEN:
        for form in (f"/{path}", f"//{path}/", f"/{path.upper()}", f"/v1/{path}"):
            for method in ("GET", "POST"):
                assert ask(server, form, method, {"method": "reset_weights"})[0] == 403, form
    assert ask(server, "/weight_checker", "POST", {"action": "reset"})[0] == 403
    status, text = ask(server, "/weight_checker", "POST", {"action": "checksum"})
    assert status == 200
    sums = json.loads(text)["checksums"]
    compared = {"action": "compare", "baseline": sums}
    status, text = ask(server, "/weight_checker", "POST", compared)
    assert status == 200 and json.loads(text)["match"] is True


def test_only_this_machine_reaches_it(server: ServerRecord) -> None:
    processes = {*group(server)}
    open_ones = [s for s in ports.listening_sockets() if s.pid in processes]
    assert urlsplit(server.url).port in {s.port for s in open_ones}
    loopback = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert {s.address for s in open_ones} <= loopback, open_ones


def test_the_token_is_in_no_command_line_and_no_log(served: Served, server: ServerRecord) -> None:
    for pid in [*group(server), served.verb.pid]:
        assert server.token not in Path(f"/proc/{pid}/cmdline").read_text()
    assert server.token not in Path(server.log).read_text() + served.said()
    assert server.token not in (served.run / "logs/server/config.yaml").read_text()
    everything = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True)
    assert server.token not in everything.stdout


def test_its_facts_are_those_of_the_trainer(server: ServerRecord) -> None:
    from rloo_cli.data.synthetic import tiny

    got = json.loads(ask(server, "/rloo")[1])
    ours = tiny.tiny_tokenizer()
    assert got["tokenizer"] == handshake.tokenizer_fingerprint(ours) and got["vocab_size"] == len(
        ours
    )
    assert got["max_model_len"] == 48 and got["dtype"] == server.dtype == "float32"
    assert got["protocol"] == 1 and got["logprobs_mode"] == "processed_logprobs"
    assert got["vllm"] == server.vllm and got["transfer"] == "gloo" and got["devices"] == []


def test_tokens_in_tokens_out_is_open_to_the_token(server: ServerRecord) -> None:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "logprobs": 0, "seed": 1}}
    status, text = ask(server, "/inference/v1/generate", "POST", body)
    assert status == 200, text
    assert 1 <= len(json.loads(text)["choices"][0]["token_ids"]) <= 4
    assert json.loads(ask(server, "/weight_info")[1]) == {"weight_version": "default"}


def test_a_client_of_openai_s_protocol_needs_the_token(server: ServerRecord) -> None:
    openai = pytest.importorskip("openai")
    options = {"base_url": f"{server.url}/v1", "max_retries": 0, "timeout": 120}
    client = openai.OpenAI(api_key=server.token, **options)
    model = client.models.list().data[0].id
    said = client.completions.create(model=model, prompt="What is 1 + 1?", max_tokens=4)
    assert said.usage.completion_tokens in range(1, 5)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(api_key="0" * 64, **options).models.list()


def test_a_second_server_for_the_same_run_is_refused(served: Served, server: ServerRecord) -> None:
    ended = served.rloo("vllm-serve", *WORDS)
    assert ended.code == 2, ended.said
    assert f"process {server.pid}" in ended.err and server.url in ended.err
    assert server.token not in ended.said
    assert server_file.running_server(served.run) == server


# Servers that do not come up: they leave nothing.


@pytest.mark.slow_cases("import-9", "import-2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(
    ("phase", "least"),
    [("", 1), pytest.param("Initializing a V1 LLM engine", 3, marks=pytest.mark.slow)],
    ids=["import", "engine"],
)
def test_one_that_is_ended_while_it_starts_leaves_nothing(
    number: int, phase: str, least: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    served = Served(tmp_path_factory.mktemp("s"), tmp_path_factory.getbasetemp())
    log, below = served.run / "logs/server/server_1.log", []
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and (
            phase not in (log.read_text() if log.exists() else "")
            or len(children(served.verb.pid)) < least
        ):
            time.sleep(0.05)
        time.sleep(0.5)
        below = children(served.verb.pid)
        assert len(below) >= least
        memory = shared(below)
        asked = time.monotonic()
        assert served.end(number) == (-number if number == signal.SIGKILL else 0), served.said()
        assert gone(below, 5 if number == signal.SIGKILL else 0)
        assert time.monotonic() - asked < 8
        assert not [m for m in memory if m.exists()], memory
    finally:
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        served.end()
    assert [*served.temporary.iterdir()] == []
    assert not (served.run / server_file.SERVER_FILE).exists()


def test_a_temporary_folder_with_a_long_path_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 60)))
    assert rollout_server.short_temporary_folder() == "/tmp"
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")
    assert rollout_server.short_temporary_folder() == "/var/tmp"


def test_a_port_that_is_taken_names_its_holder(rloo: Rloo) -> None:
    with ports.bind_tcp_socket("127.0.0.1", 0) as held:
        held.listen()
        port = held.getsockname()[1]
        ended = rloo("vllm-serve", *WORDS, f"generation.server.port={port}")
    problem = assert_refused(ended, 3, f"generation.server.port = {port}")
    assert f"process {os.getpid()} (" in problem.why and "Traceback" not in ended.said
    assert rloo.left() == []


def test_one_that_is_late_is_ended_and_its_log_shown(rloo: Rloo, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    late = "generation.server.ready_timeout_s=2"
    ended = rloo("vllm-serve", *WORDS, late, TMPDIR=str(tmp_path / "t"), timeout=60)
    assert_refused(ended, 6, "server_1.log", fix="generation.server.ready_timeout_s=")
    assert [*(tmp_path / "t").iterdir()] == []
    assert not (tmp_path / "runs/smoke/server.json").exists()


def test_a_config_that_is_wrong_is_refused_like_train_refuses_it(rloo: Rloo) -> None:
    assert "num_generation" in rloo("vllm-serve", *WORDS, "algorithm.num_generation=4").err
    both = rloo("vllm-serve", *WORDS, "generation.server.host=0.0.0.0")
    assert both.code == 2 and "allow_remote" in both.err
    pickles = rloo("vllm-serve", *WORDS, VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    assert pickles.code == 3 and "VLLM_ALLOW_INSECURE_SERIALIZATION" in pickles.err
    short = rloo("vllm-serve", *WORDS, RLOO_SERVER_TOKEN="short")
    assert short.code == 2 and "RLOO_SERVER_TOKEN" in short.err
    assert rloo.left() == []


# How it ends. These come last: the first ends the server that all tests share.


def gone(pids: list[int], limit: float = 10) -> bool:
    """Whether none of these processes runs any more, soon."""
    until = time.monotonic() + limit
    while any(map(process_start_time, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(process_start_time, pids))


def shared(pids: list[int]) -> set[Path]:
    """The files of shared memory that these processes have open."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(found) for found in re.findall(r"/dev/shm/\S+", maps) if Path(found).exists()}


@pytest.mark.slow
def test_one_that_does_not_react_is_killed_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    served = Served(tmp_path_factory.mktemp("s"), tmp_path_factory.getbasetemp())
    try:
        server = served.up()
        members = group(server)
        memory = shared(members)
        os.kill(server.pid, signal.SIGSTOP)
        assert served.end() == 0, served.said()
    finally:
        served.end()
    assert gone(members, 0) and [*served.temporary.iterdir()] == []
    assert memory and not [m for m in memory if m.exists()]
    assert not (served.run / server_file.SERVER_FILE).exists()


def test_it_ends_when_asked_and_leaves_nothing(served: Served, server: ServerRecord) -> None:
    members = group(server)
    memory = shared(members)
    assert served.end() == 0, served.said()
    assert gone(members, 0)
    assert not (served.run / server_file.SERVER_FILE).exists()
    assert [*served.temporary.iterdir()] == []
    assert urlsplit(server.url).port not in {s.port for s in ports.listening_sockets()}
    assert memory and not [m for m in memory if m.exists()]
    assert "Traceback" not in served.said() + Path(server.log).read_text()


@pytest.mark.slow
def test_one_with_two_api_processes_ends_when_asked_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, base = tmp_path_factory.mktemp("two"), tmp_path_factory.getbasetemp()
    served = Served(folder, base, "generation.server.api_server_count=2")
    try:
        server = served.up()
        members = group(server)
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in members]
        assert sum("APIServer" in line for line in lines) == 2
        assert not [line for line in lines if server.token in line]
        assert server.token not in Path(server.log).read_text() + served.said()
        memory = shared(members)
        assert served.end() == 0, served.said()
    finally:
        served.end()
    assert gone(members, 0) and [*served.temporary.iterdir()] == []
    assert not (served.run / server_file.SERVER_FILE).exists()
    assert memory and not [m for m in memory if m.exists()]
    assert "Traceback" not in served.said() + Path(server.log).read_text()


@pytest.mark.slow
def test_a_killed_server_takes_its_engine_along(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    token = "a-token-that-somebody-chose"
    folder, base = tmp_path_factory.mktemp("killed"), tmp_path_factory.getbasetemp()
    served = Served(folder, base, "generation.server.dtype=bfloat16", RLOO_SERVER_TOKEN=token)
    try:
        server = served.up()
        assert server.token == token and token not in served.said()
        assert json.loads(ask(server, "/rloo")[1])["dtype"] == "bfloat16"
        assert ask(server, "/openapi.json")[0] == ask(server, "/docs")[0] == 404
        members = group(server)
        memory = shared(members)
        os.kill(server.pid, signal.SIGKILL)
        assert gone([p for p in members if p != server.pid])
        assert served.verb.wait(30) == 6, served.said()
    finally:
        served.end()
    assert gone(members, 0) and not (served.run / server_file.SERVER_FILE).exists()
    assert [*served.temporary.iterdir()] == []
    assert memory and not [m for m in memory if m.exists()]
