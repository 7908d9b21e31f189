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
    ports,
    process_group,
    server_file,
    versions,
)
from rloo_cli.utils import pids
from rloo_cli.utils.errors import ConfigError, MachineError, Problem, RunError
from rloo_cli.utils.files import write_text

EXTERNAL = "RLOO_SERVER_TOKEN"  # a token that somebody chose; else one is made
DOCS = "RLOO_SERVER_DOCS"  # 1: show the list of routes (with the token), for tests
INSIDE = "RLOO_SERVER"  # 1 in every process of a server
SCRATCH = "RLOO_SERVER_SCRATCH"  # its folder for sockets and other passing things
LOG = "RLOO_SERVER_LOG"
ERROR = "error.json"  # in the scratch folder: why it did not start


def main() -> None:
    """The process's whole life; exits with an error's code, having left its problems behind."""
    folder, by, file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    scratch = os.environ.get(SCRATCH)

    def end(number: int, frame: Any) -> None:
        """Until uvicorn has its own handlers. No exception: pyzmq loses it where vLLM waits."""
        if os.getpgid(0) == os.getpid():
            process_group.kill(os.getpid(), spared=os.getpid())
        _clear(folder, scratch)
        os._exit(0)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    try:
        _serve(folder, by, check.read(file))
    except RunError as error:
        print(error.render(), file=sys.stderr)
        if scratch:
            write_text(Path(scratch, ERROR), error.render(as_json=True))
        scratch = None  # the starter reads it there, and clears up
        sys.exit(error.code)
    finally:
        _clear(folder, scratch)


def _clear(folder: Path, scratch: str | None) -> None:
    mine = server_file.read(folder)
    if mine is not None and mine.pid == os.getpid() and mine.alive():
        server_file.place(folder).unlink(missing_ok=True)
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def _serve(folder: Path, by: str, run: Any) -> None:
    keys = run.generation.server
    token = _token()
    bound = bind(keys.host, keys.port)
    host, port = bound.getsockname()[:2]
    os.environ.update(arguments.environment(run, keys))
    os.environ.update(
        {
            INSIDE: "1",
            auth.TOKEN: token,
            "VLLM_API_KEY": token,  # vLLM's own wall, behind ours
            "VLLM_SERVER_DEV_MODE": "1",  # opens the routes for weights
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
    )
    if os.environ.get(SCRATCH):
        os.environ["VLLM_RPC_BASE_PATH"] = os.environ["TMPDIR"] = os.environ[SCRATCH]
    given = arguments.engine(run, keys, run.seed)
    if lora_slot.on(run):
        os.environ[lora_slot.VARIABLE] = str(Path(os.environ.get(SCRATCH) or folder) / "adapter")
        lora_slot.blank(Path(os.environ[lora_slot.VARIABLE]), run)
    os.environ[handshake.VARIABLE] = json.dumps(_facts(run, keys, given))
    shown = f"[{host}]" if ":" in host else host
    server = server_file.Server(
        url=f"http://{shown}:{port}",
        token=token,
        pid=os.getpid(),
        group=os.getpgid(0),
        pid_started=pids.started(os.getpid()),
        host=platform.node(),
        by=by,
        model=run.model.path,
        dtype=str(given["dtype"]),
        vllm=arguments.installed(),
        transfer=arguments.transfer(run, keys),
        devices=arguments.gpus(),
        log=os.environ.get(LOG, ""),
        job=server_file.job(),
    )
    ready = api_processes.make_ready(arguments.count_api_processes(keys))
    threading.Thread(target=_tell, args=(folder, server, host, port, ready), daemon=True).start()
    args = _namespace(given, keys, host, port)
    api_processes.serve(bound, args, server.url, ready)


def _token() -> str:
    given = os.environ.pop(EXTERNAL, "")
    if given and (len(given) < 16 or not given.isascii() or not given.isprintable()):
        why = "it wants 16 or more printable characters of ASCII"
        raise ConfigError(Problem(f"{EXTERNAL} is no token", "environment", why))
    return given or server_file.token()


def bind(host: str, port: int) -> socket.socket:
    """The server's own socket; a port that is taken names who has it. Raises MachineError."""
    try:
        return ports.bind(host, port)
    except OSError as error:
        key = "generation.server.port"
        what = f"{key} = {port} is taken"
        why, fix = f"by {ports.holder(port)}", f"{key}=0 for a free one"
        if error.errno != errno.EADDRINUSE:
            key = "generation.server.host"
            what, why = f"{key} = {host!r}, port {port}: cannot be listened on", str(error)
            fix = f"{key}=127.0.0.1, or an address of this machine"
        raise MachineError(Problem(what, key, why, fix)) from None


def _facts(run: Any, keys: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What GET /rloo answers."""
    transformers = importlib.import_module("transformers")
    remote = {"trust_remote_code": run.model.trust_remote_code}
    where = {n: given[n] for n in ("revision",) if n in given}
    settings = transformers.AutoConfig.from_pretrained(given["model"], **remote, **where)
    cut = {"revision": given["tokenizer_revision"]} if "tokenizer_revision" in given else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(given["tokenizer"], **remote, **cut)
    return {
        "protocol": handshake.PROTOCOL,
        "model": run.model.path,
        "dtype": given["dtype"],
        "vllm": arguments.installed(),
        "tokenizer": handshake.tokenizer(tokenizer),
        "vocab_size": settings.get_text_config().vocab_size,
        "max_model_len": given.get("max_model_len"),
        "logprobs_mode": given["logprobs_mode"],
        "transfer": arguments.transfer(run, keys),
        "devices": arguments.gpus(),
        "routes": [handshake.GROUP],
    }


def _namespace(given: dict[str, Any], keys: Any, host: str, port: int) -> Namespace:
    """vLLM's own arguments: its parser's defaults, the engine's, and ours."""
    cli_args = versions.module("cli_args")
    argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
    parser = cli_args.make_arg_parser(argparse_utils.FlexibleArgumentParser())
    args: Namespace = parser.parse_args([])
    ours = {
        "host": host,
        "port": port,
        "enable_scale_out": True,  # tokens in, tokens out
        "disable_fastapi_docs": os.environ.get(DOCS) != "1",
        "middleware": ["rloo_cli.generation.vllm.auth.Guard"],
        "disable_uvicorn_access_log": True,
        "uvicorn_log_level": "warning",
        "log_error_stack": False,
        "data_parallel_size": keys.data_parallel_size,
    }
    # The server has the adapter from its start, so that it has a name.
    if lora_slot.VARIABLE in os.environ:
        module = importlib.import_module("vllm.entrypoints.openai.models.protocol").LoRAModulePath
        ours["lora_modules"] = [module(name=lora_slot.NAME, path=os.environ[lora_slot.VARIABLE])]
    for name, value in (given | versions.server_arguments(ours)).items():
        if not hasattr(args, name):
            key = f"generation.server.extra.{name}"
            raise ConfigError(Problem(f"{key}: vLLM has no such argument", key))
        setattr(args, name, value)
    cli_args.validate_parsed_serve_args(args)
    return args


def _tell(
    folder: Path, server: server_file.Server, host: str, port: int, ready: api_processes.Ready
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
    server_file.write(folder, server)
