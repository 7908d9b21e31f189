"""Several API servers of one rollout server: vLLM's own, at our socket, with our signal handlers.
What one of them does to the requests of another is in test_api_servers_on_server.py.
"""

import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rloo_cli.generation.vllm import server
from rloo_cli.utils.errors import GenerationError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What stands for the module of `vllm serve`: it sets its own signal handlers, as vLLM does."""
    made = SimpleNamespace(given=None, error=None)

    def run_multi_api_server(args: Any) -> None:
        for number in SIGNALS:
            signal.signal(number, lambda *_: None)
        address, bound = made.setup_server(args, reuse_port=True)
        made.given = (args.api_server_count, address, bound, *map(signal.getsignal, SIGNALS))
        if made.error is not None:
            raise made.error

    made.run_multi_api_server = run_multi_api_server
    stubs = {
        "vllm.utils.system_utils": SimpleNamespace(set_ulimit=lambda: None),
        "vllm.entrypoints.cli.serve": made,
    }
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    before = [*map(signal.getsignal, SIGNALS)]
    yield made
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def end(*_: object) -> None:
    """Our handler of both signals."""


def test_several_have_the_socket_that_is_bound_and_our_signal_handlers(serve: Any) -> None:
    for number in SIGNALS:
        signal.signal(number, end)
    with socket.socket() as bound:
        server.serve_until_stopped(bound, SimpleNamespace(), "http://here", 2)  # type: ignore[arg-type]
        assert serve.given == (2, "http://here", bound, end, end)


def test_one_of_several_that_dies_ends_the_server_with_6(serve: Any) -> None:
    serve.error = RuntimeError("Process ApiServer_1 (PID: 3) died with exit code -9")
    with socket.socket() as bound, pytest.raises(GenerationError) as caught:
        server.serve_until_stopped(bound, SimpleNamespace(), "", 2)  # type: ignore[arg-type]
    assert caught.value.code == 6 and "process of the server exited" in str(caught.value)
