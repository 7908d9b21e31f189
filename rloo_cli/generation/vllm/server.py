"""The first process of a rollout server: vLLM's own API server, behind our guard, on loopback.

Started by launch/rollout_server.py as `main()` with FOLDER BY CONFIG. What it must know
comes by file and environment, never by a command line, which every user of the machine can read.
Once it answers it writes FOLDER/server.json; when it ends it takes that away again.
"""

import errno
import http.client
import importlib
import json
import os
import platform
import shutil
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from rloo_cli.config import check
from rloo_cli.generation.vllm import (
    api_processes,
    arguments,
    auth,
    handshake,
    lora_slot,
    server_file,
    versions,
)
from rloo_cli.utils import child_process, ports
from rloo_cli.utils.errors import ConfigError, MachineError, Problem, RunError
from rloo_cli.utils.files import JsonObject, write_text

EXTERNAL_TOKEN_VARIABLE = "RLOO_SERVER_TOKEN"  # a token that somebody chose; else one is made
DOCS_VARIABLE = "RLOO_SERVER_DOCS"  # 1: show the list of routes (with the token), for tests
INSIDE_SERVER_VARIABLE = "RLOO_SERVER"  # 1 in every process of a server
SCRATCH_VARIABLE = "RLOO_SERVER_SCRATCH"  # its folder for sockets and other passing things
LOG_VARIABLE = "RLOO_SERVER_LOG"
START_ERROR_FILE = "error.json"  # in the scratch folder: why it did not start


def main() -> None:
    """The process's whole life; exits with an error's code, having left its problems behind."""
    folder, by, file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    scratch = os.environ.get(SCRATCH_VARIABLE)

    def end(number: int, frame: Any) -> None:
        """Until uvicorn has its own handlers. No exception: pyzmq loses it where vLLM waits."""
        if os.getpgid(0) == os.getpid():
            child_process.kill_group_except(os.getpid(), spared_pid=os.getpid())
        _remove_server_files(folder, scratch)
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        _run_server(folder, by, check.read_config(file))
    except RunError as error:
        print(error.render(), file=sys.stderr)
        if scratch:
            write_text(Path(scratch, START_ERROR_FILE), error.render(as_json=True))
        scratch = None  # the starter reads it there, and clears up
        sys.exit(error.code)
    finally:
        _remove_server_files(folder, scratch)


def _remove_server_files(folder: Path, scratch: str | None) -> None:
    mine = server_file.read_server_file(folder)
    if mine is not None and mine.pid == os.getpid() and mine.is_alive():
        server_file.server_file_path(folder).unlink(missing_ok=True)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_server(folder: Path, by: str, run: Any) -> None:
    keys = run.generation.server
    token = _server_token()
    bound = bind_server_socket(keys.host, keys.port)
    host, port = bound.getsockname()[:2]
    os.environ.update(arguments.engine_environment(run, keys))
    os.environ.update(
        {
            INSIDE_SERVER_VARIABLE: "1",
            auth.TOKEN_VARIABLE: token,
            "VLLM_API_KEY": token,  # vLLM's own wall, behind ours
            "VLLM_SERVER_DEV_MODE": "1",  # opens the routes for weights
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
    )
    if os.environ.get(SCRATCH_VARIABLE):
        os.environ["VLLM_RPC_BASE_PATH"] = os.environ["TMPDIR"] = os.environ[SCRATCH_VARIABLE]
    given = arguments.build_engine_arguments(run, keys, run.seed)
    if lora_slot.has_lora_slot(run):
        os.environ[lora_slot.ADAPTER_FOLDER_VARIABLE] = str(
            Path(os.environ.get(SCRATCH_VARIABLE) or folder) / "adapter"
        )
        lora_slot.write_zero_adapter(Path(os.environ[lora_slot.ADAPTER_FOLDER_VARIABLE]), run)
    os.environ[handshake.SERVER_INFO_VARIABLE] = json.dumps(_server_info(run, keys, given))
    shown = f"[{host}]" if ":" in host else host
    server = server_file.ServerRecord(
        url=f"http://{shown}:{port}",
        token=token,
        pid=os.getpid(),
        group=os.getpgid(0),
        pid_started=child_process.process_start_time(os.getpid()),
        host=platform.node(),
        by=by,
        model=run.model.path,
        dtype=str(given["dtype"]),
        vllm=arguments.installed_vllm_version(),
        transfer=arguments.weight_transfer_backend(run, keys),
        devices=arguments.visible_gpus(),
        log=os.environ.get(LOG_VARIABLE, ""),
        job=server_file.slurm_job_attempt(),
    )
    ready = api_processes.make_ready_flags(arguments.count_api_processes(keys))
    threading.Thread(
        target=_write_when_ready, args=(folder, server, host, port, ready), daemon=True
    ).start()
    args = _vllm_namespace(given, keys, host, port)
    api_processes.serve_until_stopped(bound, args, server.url, ready)


def _server_token() -> str:
    given = os.environ.pop(EXTERNAL_TOKEN_VARIABLE, "")
    if given and (len(given) < 16 or not given.isascii() or not given.isprintable()):
        why = "it wants 16 or more printable characters of ASCII"
        raise ConfigError(Problem(f"{EXTERNAL_TOKEN_VARIABLE} is no token", "environment", why))
    return given or server_file.new_server_token()


def bind_server_socket(host: str, port: int) -> socket.socket:
    """The server's own socket; a port that is taken names who has it. Raises MachineError."""
    try:
        return ports.bind_tcp_socket(host, port)
    except OSError as error:
        key = "generation.server.port"
        what = f"{key} = {port} is taken"
        why, fix = f"by {ports.port_holder(port)}", f"{key}=0 for a free one"
        if error.errno != errno.EADDRINUSE:
            key = "generation.server.host"
            what, why = f"{key} = {host!r}, port {port}: cannot be listened on", str(error)
            fix = f"{key}=127.0.0.1, or an address of this machine"
        raise MachineError(Problem(what, key, why, fix)) from None


def _server_info(run: Any, keys: Any, engine_arguments: JsonObject) -> JsonObject:
    """What GET /rloo answers."""
    transformers = importlib.import_module("transformers")
    remote = {"trust_remote_code": run.model.trust_remote_code}
    where = {n: engine_arguments[n] for n in ("revision",) if n in engine_arguments}
    settings = transformers.AutoConfig.from_pretrained(engine_arguments["model"], **remote, **where)
    cut = (
        {"revision": engine_arguments["tokenizer_revision"]}
        if "tokenizer_revision" in engine_arguments
        else {}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        engine_arguments["tokenizer"], **remote, **cut
    )
    return {
        "protocol": handshake.PROTOCOL_VERSION,
        "model": run.model.path,
        "dtype": engine_arguments["dtype"],
        "vllm": arguments.installed_vllm_version(),
        "tokenizer": handshake.tokenizer_fingerprint(tokenizer),
        "vocab_size": settings.get_text_config().vocab_size,
        "max_model_len": engine_arguments.get("max_model_len"),
        "logprobs_mode": engine_arguments["logprobs_mode"],
        "transfer": arguments.weight_transfer_backend(run, keys),
        "devices": arguments.visible_gpus(),
        "routes": [handshake.GROUP_ROUTE],
    }


def _vllm_namespace(engine_arguments: JsonObject, keys: Any, host: str, port: int) -> Namespace:
    """vLLM's own arguments: its parser's defaults, the engine's, and ours."""
    cli_args = versions.import_vllm_module("cli_args")
    argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
    parser = cli_args.make_arg_parser(argparse_utils.FlexibleArgumentParser())
    args: Namespace = parser.parse_args([])
    ours = {
        "host": host,
        "port": port,
        "enable_scale_out": True,  # tokens in, tokens out
        "disable_fastapi_docs": os.environ.get(DOCS_VARIABLE) != "1",
        "middleware": ["rloo_cli.generation.vllm.auth.Guard"],
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
        "log_error_stack": False,
        "data_parallel_size": keys.data_parallel_size,
    }
    # The server has the adapter from its start, so that it has a name.
    if lora_slot.ADAPTER_FOLDER_VARIABLE in os.environ:
        module = importlib.import_module("vllm.entrypoints.openai.models.protocol").LoRAModulePath
        ours["lora_modules"] = [
            module(name=lora_slot.ADAPTER_NAME, path=os.environ[lora_slot.ADAPTER_FOLDER_VARIABLE])
        ]
    for name, value in (engine_arguments | versions.supported_server_arguments(ours)).items():
        if not hasattr(args, name):
            key = f"generation.server.extra.{name}"
            raise ConfigError(Problem(f"{key}: vLLM has no such argument", key))
        setattr(args, name, value)
    cli_args.validate_parsed_serve_args(args)
    return args


def _write_when_ready(
    folder: Path,
    server: server_file.ServerRecord,
    host: str,
    port: int,
    ready: api_processes.ReadyFlags,
) -> None:
    """On a thread: once every API process is `ready` and /health answers, write server.json."""
    while True:
        time.sleep(0.2)
        if not all(ready):
            continue
        connection = http.client.HTTPConnection(host, port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                break
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
    server_file.write_server_file(folder, server)
