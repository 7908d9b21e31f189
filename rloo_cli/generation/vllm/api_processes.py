"""Answers a server's requests: in its own process, or in several that share its socket and engines.

In vLLM 0.32 a pause, the label of the weights, the prefix cache, sleep and a loaded adapter are
states of the engine (vllm/v1/engine/core.py); an API process has none of its own, and
`v1/engine/core_client.py` sends each such call to every engine. So a call that reaches one API
process holds for the requests of all of them: a pause aborts everybody's, a request that comes
during one waits in the engine, and each completion has the label of the engine that sampled it. An
older vLLM keeps labels and pause in the API process, and has one of them (`versions`).

Unlike in vLLM's own `run_multi_api_server`, the socket is the one that is bound already, the guard
stands in every process, and no process may end, not even by itself, without ending the server.
"""

import functools
import importlib
import multiprocessing
import os
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Iterable, MutableSequence
from multiprocessing import connection
from typing import Any

from rloo_cli.generation.vllm import auth, versions
from rloo_cli.utils import child_process
from rloo_cli.utils.errors import GenerationError, Problem
from rloo_cli.utils.files import JsonObject

ReadyFlags = MutableSequence[int]  # 1 for each API process that answers


def make_ready_flags(num_processes: int) -> ReadyFlags:
    """Shared zeros, one per API process: none of them answers yet."""
    ready: ReadyFlags = multiprocessing.get_context("spawn").RawArray("b", num_processes)
    return ready


def serve_until_stopped(
    server_socket: socket.socket, args: Namespace, url: str, ready: ReadyFlags
) -> None:
    """Answer requests at the bound socket until this process is asked to end.

    There are as many API processes as `ready` has flags; each sets its own to 1 once it answers.
    Call it from the main thread. Raises GenerationError when one of several processes ends.
    """
    importlib.import_module("vllm.utils.system_utils").set_ulimit()
    if len(ready) == 1:
        entry = _guarded_api_module(ready, 0)
        importlib.import_module("uvloop").run(entry.run_server_worker(url, server_socket, args))
        return
    try:
        _serve_with_several(server_socket, args, url, ready)
    finally:  # also when only one of them is gone: half a server is none
        if os.getpgid(0) == os.getpid():
            child_process.kill_group_except(os.getpid(), spared_pid=os.getpid())


def _serve_with_several(
    server_socket: socket.socket, args: Namespace, url: str, ready: ReadyFlags
) -> None:
    """Start engines and API processes; returns only by raising an error."""
    # Into the folder for temporary files; a page of metrics is else that of one process.
    importlib.import_module("vllm.v1.metrics.prometheus").setup_multiprocess_prometheus()
    engines = importlib.import_module("vllm.v1.engine.utils")
    given = importlib.import_module("vllm").AsyncEngineArgs.from_cli_args(args)
    given._api_process_count, given._api_process_rank = len(ready), -1
    context = importlib.import_module("vllm.usage.usage_lib").UsageContext.OPENAI_API_SERVER
    config = given.create_engine_config(usage_context=context)
    executor = importlib.import_module("vllm.v1.executor").Executor.get_class(config)
    listeners = engines.bind_engine_zmq_listeners(config, len(ready))
    with engines.launch_core_engines(
        config, executor, not given.disable_log_stats, listeners.addresses
    ) as launch:
        coordinator = launch.coordinator
        manager = importlib.import_module("vllm.v1.utils").APIServerProcessManager(
            listen_address=url,
            sock=server_socket,
            args=args,
            num_servers=len(ready),
            input_listeners=listeners.inputs,
            output_listeners=listeners.outputs,
            target_server_fn=functools.partial(run_api_process, ready),
            stats_update_address=coordinator and coordinator.get_stats_publish_address(),
            tensor_queue=launch.tensor_queue,
        )
        launch.watched_frontend_processes = manager.processes
    others = [] if coordinator is None else [coordinator.proc]
    _wait_for_exit([*manager.processes, *launch.engine_manager.processes, *others])


def run_api_process(
    ready: ReadyFlags,
    url: str,
    server_socket: socket.socket,
    args: Namespace,
    client: JsonObject,
) -> None:
    """Run one API process of several. `client`: vLLM's own, for the engines it speaks to."""
    child_process.die_with_parent()
    system, number = importlib.import_module("vllm.utils.system_utils"), client["client_index"]
    system.set_process_title("APIServer", str(number))
    system.decorate_logs()
    entry = _guarded_api_module(ready, number)
    importlib.import_module("uvloop").run(entry.run_server_worker(url, server_socket, args, client))


def _guarded_api_module(ready: ReadyFlags, number: int) -> Any:
    """vLLM's module that serves an application, changed so that ours is built.

    Ours is behind the guard, has our routes, and sets its flag when it answers.
    """
    entry = versions.import_vllm_module("entry")
    build = entry.build_app

    def guarded(*given: Any, **options: Any) -> Any:
        """vLLM's application, if no middleware that was added later stands before the guard."""
        app = build(*given, **options)
        if app.user_middleware[0].cls is not auth.Guard:
            what = f"{app.user_middleware[0].cls} stands before the guard"
            why = "it would see requests before the guard has checked their token"
            fix = "start the server without that middleware"
            more = "a middleware that SageMaker's hooks added"
            raise GenerationError(Problem(what, "generation.server", why, fix, more))
        importlib.import_module("rloo_cli.generation.vllm.group_route").attach_group_route(app)
        versions.attach_old_routes(app)
        threading.Thread(target=_set_ready_flag, args=(app, ready, number), daemon=True).start()
        return app

    entry.build_app = guarded
    return entry


def _set_ready_flag(app: Any, ready: ReadyFlags, number: int) -> None:
    """On a thread: set the flag once uvicorn listens."""
    while not getattr(getattr(app.state, "server", None), "started", False):
        time.sleep(0.05)
    ready[number] = 1


def _wait_for_exit(processes: Iterable[Any]) -> None:
    """Wait until one of these processes ends, whatever its exit code. Raises GenerationError."""
    by_sentinel = {process.sentinel: process for process in processes}
    first = by_sentinel[connection.wait(by_sentinel)[0]]
    first.join()
    what = f"{first.name} (process {first.pid}) of the server ended with {first.exitcode}"
    fix = "read above this in the server's log why it ended, and start the server again"
    raise GenerationError(Problem(what, why="the server's other processes were ended with it",
                                  where="generation.server", fix=fix))  # fmt: skip
