"""The first process of a rollout server: vLLM's own API server, behind our guard, on loopback.

launch/rollout_server.py starts it as `main()` with FOLDER BY CONFIG. Secrets are passed by file and
environment, never on the command line, which every user of the machine can read. Once the server
answers it writes FOLDER/server.json; it removes that file on exit.
"""

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
from types import FrameType
from typing import Any

from rloo_cli.config import check
from rloo_cli.config.schema import GenerationConfig, ModelConfig, RunConfig
from rloo_cli.distributed.device_count import (
    VISIBLE_DEVICES_VARIABLE,
    gpu_uuids,
    gpus_per_server,
)
from rloo_cli.generation.vllm import (
    arguments,
    auth,
    handshake,
    lora_slot,
    server_file,
    versions,
)
from rloo_cli.generation.vllm.config import unknown_argument_problem
from rloo_cli.generation.vllm_server import ServerSection
from rloo_cli.utils import child_process, ports
from rloo_cli.utils.errors import ConfigError, GenerationError, RunError, refuse
from rloo_cli.utils.files import JsonObject, write_text

EXTERNAL_TOKEN_VARIABLE = "RLOO_SERVER_TOKEN"  # the user's token; random by default
DOCS_VARIABLE = "RLOO_SERVER_DOCS"  # 1: list the routes (with the token), for tests
INSIDE_SERVER_VARIABLE = "RLOO_SERVER"  # 1 in every process of a server
SCRATCH_VARIABLE = "RLOO_SERVER_SCRATCH"  # the server's folder for sockets and temporary files
LOG_VARIABLE = "RLOO_SERVER_LOG"
START_ERROR_FILE = "error.json"  # in the scratch folder: why the server did not start


def main() -> None:
    """Run the server until it ends. Exits with an error's code; its problems are then written to
    START_ERROR_FILE."""
    folder, by, file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    scratch = os.environ.get(SCRATCH_VARIABLE)

    def end(number: int, frame: FrameType | None) -> None:
        """Ends the server until uvicorn sets its own handlers. It raises no exception, for pyzmq
        would swallow it while vLLM waits."""
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
        scratch = None  # our parent reads it there, then removes the folder
        sys.exit(error.code)
    finally:
        _remove_server_files(folder, scratch)


def _remove_server_files(folder: Path, scratch: str | None) -> None:
    record = server_file.read_server_file(folder)
    if record is not None and record.pid == os.getpid() and record.is_alive():
        server_file.server_file_path(folder).unlink(missing_ok=True)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_server(folder: Path, by: str, run: RunConfig) -> None:
    keys: ServerSection = run.generation.own_keys
    token = _server_token()
    server_socket = ports.bind_or_refuse("generation.server", keys.host, keys.port)
    host, port = server_socket.getsockname()[:2]
    os.environ |= arguments.engine_environment(run.model, run.generation) | {
        INSIDE_SERVER_VARIABLE: "1",
        auth.TOKEN_VARIABLE: token,
        "VLLM_API_KEY": token,  # vLLM checks the token too, behind our guard
        "VLLM_SERVER_DEV_MODE": "1",  # opens the routes for weights
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if os.environ.get(SCRATCH_VARIABLE):
        os.environ["VLLM_RPC_BASE_PATH"] = os.environ["TMPDIR"] = os.environ[SCRATCH_VARIABLE]
    engine_arguments = arguments.build_engine_arguments(run, keys, run.seed)
    if run.model.lora is not None:
        adapter = Path(os.environ.get(SCRATCH_VARIABLE) or folder) / "adapter"
        os.environ[lora_slot.ADAPTER_FOLDER_VARIABLE] = str(adapter)
        lora_slot.write_zero_adapter(adapter, run.model.lora)
    info = _server_info(run.model, run.generation, engine_arguments)
    os.environ[handshake.SERVER_INFO_VARIABLE] = json.dumps(info)
    record = server_file.ServerRecord(
        url=f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}",
        token=token, by=by, host=platform.node(), pid=os.getpid(), group=os.getpgid(0),
        pid_started=child_process.process_start_time(os.getpid()),
        model=run.model.path, dtype=str(engine_arguments["dtype"]),
        vllm=info["vllm"], transfer=info["transfer"], devices=info["devices"],
        log=os.environ.get(LOG_VARIABLE, ""), job=server_file.slurm_job_attempt(),
    )  # fmt: skip
    if VISIBLE_DEVICES_VARIABLE in os.environ:  # vLLM is not imported yet
        os.environ |= arguments.visible_gpu_environment(arguments.visible_gpus())
    about_server = (folder, record, host, port)
    threading.Thread(target=_write_when_ready, args=about_server, daemon=True).start()
    args = _vllm_namespace(engine_arguments, keys, host, port)
    serve_until_stopped(server_socket, args, record.url, arguments.count_api_servers(keys))


def serve_until_stopped(
    server_socket: socket.socket, args: Namespace, url: str, num_api_servers: int
) -> None:
    """Answer requests on the bound socket until this process is asked to end.

    Several API servers are vLLM's own (`--api-server-count`): processes that share the socket
    the engines. In vLLM 0.32 a pause, the label of the weights, the prefix cache, sleep and a
    loaded adapter are state of the engine (vllm/v1/engine/core.py), so a call to any API process
    holds for the requests of all; an older vLLM keeps labels and pause in the API process, and
    has only one (`versions`). Call it from the main thread. Raises GenerationError if one of them
    exits with an error.
    """
    importlib.import_module("vllm.utils.system_utils").set_ulimit()
    if num_api_servers == 1:
        entry = versions.import_vllm_module("entry")
        importlib.import_module("uvloop").run(entry.run_server_worker(url, server_socket, args))
        return
    args.api_server_count = num_api_servers
    serve: Any = importlib.import_module("vllm.entrypoints.cli.serve")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def bound_socket(*_: object, **options: object) -> tuple[str, socket.socket]:
        """The socket that is bound already, and our signal handlers again: vLLM's raise an
        exception, which pyzmq would swallow while vLLM waits for its engines."""
        for number, handler in handlers.items():
            signal.signal(number, handler)
        return url, server_socket

    serve.setup_server = bound_socket
    try:
        serve.run_multi_api_server(args)
    except RuntimeError as error:
        what = f"a process of the server exited, and the others with it: {error}"
        raise GenerationError(f"{what}; see the server's log above") from None


def _server_token() -> str:
    token = os.environ.pop(EXTERNAL_TOKEN_VARIABLE, "")
    if token and (len(token) < 16 or not token.isascii() or not token.isprintable()):
        what = f"{EXTERNAL_TOKEN_VARIABLE} is not a valid token"
        why = "it needs 16 or more printable ASCII characters"
        make = "python3 -c 'import secrets; print(secrets.token_hex(32))'"
        fix = f"export {EXTERNAL_TOKEN_VARIABLE}=$({make})"
        refuse("environment", what, fix, why)
    return token or server_file.new_server_token()


def _server_info(
    model: ModelConfig, generation: GenerationConfig, engine_arguments: JsonObject
) -> JsonObject:
    """The answer of GET /rloo."""
    transformers = importlib.import_module("transformers")

    def options(key: str) -> JsonObject:
        revision = {"revision": engine_arguments[key]} if key in engine_arguments else {}
        return revision | {"trust_remote_code": model.trust_remote_code}

    model_config = transformers.AutoConfig.from_pretrained(
        engine_arguments["model"], **options("revision")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        engine_arguments["tokenizer"], **options("tokenizer_revision")
    )
    return {
        "protocol": handshake.PROTOCOL_VERSION,
        "model": model.path,
        "dtype": engine_arguments["dtype"],
        "vllm": arguments.installed_vllm_version(),
        "tokenizer": handshake.tokenizer_fingerprint(tokenizer),
        "vocab_size": model_config.get_text_config().vocab_size,
        "max_model_len": engine_arguments.get("max_model_len"),
        "logprobs_mode": engine_arguments["logprobs_mode"],
        "transfer": arguments.weight_transfer_backend(generation, model.lora),
        "devices": gpu_uuids(arguments.visible_gpus()[: gpus_per_server(generation)]),
        "sampling_mask": bool(engine_arguments.get("return_sampling_mask")),
        "routes": [handshake.GROUP_ROUTE],
    }


def _vllm_namespace(
    engine_arguments: JsonObject, keys: ServerSection, host: str, port: int
) -> Namespace:
    """The arguments of vLLM's server: its parser's defaults, the engine's arguments, and ours."""
    cli_args = versions.import_vllm_module("cli_args")
    argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
    parser = cli_args.make_arg_parser(argparse_utils.FlexibleArgumentParser())
    args: Namespace = parser.parse_args([])
    ours = {
        "host": host,
        "port": port,
        "enable_scale_out": True,  # requests and answers are token ids
        "disable_fastapi_docs": os.environ.get(DOCS_VARIABLE) != "1",
        "middleware": ["rloo_cli.generation.vllm.group_route.ServerGuard"],
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
        "log_error_stack": False,
        "data_parallel_size": keys.data_parallel_size,
    }
    # The server loads the adapter at its start, so that requests can name it.
    adapter = os.environ.get(lora_slot.ADAPTER_FOLDER_VARIABLE)
    if adapter is not None:
        protocol = importlib.import_module("vllm.entrypoints.openai.models.protocol")
        module = protocol.LoRAModulePath(name=lora_slot.ADAPTER_NAME, path=adapter)
        ours["lora_modules"] = [module]
    for name, value in (engine_arguments | versions.supported_server_arguments(ours)).items():
        if not hasattr(args, name):
            why = "`vllm serve --help` lists the arguments"
            raise ConfigError(unknown_argument_problem("generation.server", name, vars(args), why))
        setattr(args, name, value)
    cli_args.validate_parsed_serve_args(args)
    return args


def _write_when_ready(folder: Path, server: server_file.ServerRecord, host: str, port: int) -> None:
    """On a thread: once /health answers, write server.json."""
    while True:
        time.sleep(0.2)
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
