"""`rloo vllm-serve`: a rollout server for a run, which `rloo train` with the same arguments finds.

For a sampler on separate GPUs, another node or a separate job. It only writes `server.json` and
logs into the run's folder, so the run can start there later. Without a recipe it serves model.path
for any run that sets its address. Imports neither torch nor vLLM.
"""

import contextlib
import http.client
import json
import re
import shlex
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloo_cli.checkpoint.run_folder import SERVER_LOGS, check_folder_free
from rloo_cli.cli.verb_parser import parse_verb
from rloo_cli.config import check, hf_cache
from rloo_cli.config.compose import ComposedConfig, compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.generation.vllm import server_file
from rloo_cli.generation.vllm_server import LOOPBACK_HOSTS
from rloo_cli.launch import preflight, rollout_server
from rloo_cli.utils.errors import ConfigError, GenerationError, MachineError, RunError, refuse
from rloo_cli.utils.files import JsonObject

BACKEND_OVERRIDE = "generation=vllm_server"
# Keys that a config needs and a server ignores, for use without a recipe.
UNREAD_OVERRIDES = {
    "data.path": "data.path=make:tiny", "reward": "reward=length_chars", "max_steps": "max_steps=1",
}  # fmt: skip


def run(args: list[str]) -> int:
    """The verb: serve until asked to stop. -> exit code. Raises RunError."""
    options = parse_verb("vllm-serve", args)
    args, as_json = options.overrides, options.json
    out = sys.stderr if as_json else sys.stdout
    is_alone = not any(word.startswith("+recipe=") for word in args)
    if is_alone:
        args = server_words(args)
    composed = compose_config(args)
    if composed.values.get("generation", {}).get("backend") != "vllm_server":
        print(f"{BACKEND_OVERRIDE}: added, because this verb starts a server", file=out)
        args = [*[w for w in args if not w.startswith("generation=")], BACKEND_OVERRIDE]
        composed = compose_config(args)
    settings = check.check_config(composed)
    if not settings.generation.is_server:
        why = f"the backend is {settings.generation.backend!r}"
        refuse(
            "generation", f"{BACKEND_OVERRIDE} has no effect", "a recipe that does not set it", why
        )
    with hf_cache.recorded_command(composed.user_overrides):
        folder = settings.folder
        check_folder_free(folder)
        _check_no_other_server(folder)
        try:
            preflight.check_server_machine(settings)
            return _serve(settings, composed, as_json, is_alone)
        except RunError as error:
            keys: Any = settings.generation
            if keys.server.num_nodes:  # a trainer on another node waits for it
                server_file.write_server_failure(folder, "vllm-serve", error, folder / SERVER_LOGS)
            raise


def server_words(args: list[str]) -> list[str]:
    """The arguments of a server for any run. Raises ConfigError if the model is missing."""
    keys = {word.partition("=")[0].lstrip("+"): word for word in args}
    model = keys.get("model.path", "").partition("=")[2]
    if not model and "model" not in keys:
        fix = "rloo vllm-serve model.path=ORG/NAME, or +recipe=NAME"
        why = f"found {' '.join(args) or 'nothing'}; expected model.path or a recipe"
        refuse("model.path", "no model to serve", fix, why)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", model or keys["model"].partition("=")[2]).strip("-.")
    more = [word for key, word in UNREAD_OVERRIDES.items() if key not in keys]
    more += [] if "name" in keys else [f"name=serve-{slug}"]
    return [*args, *more]


def _serve(
    settings: RunConfig, composed: ComposedConfig, as_json: bool, is_alone: bool = False
) -> int:
    """Serve until a signal. With `as_json`, stdout gets one JSON value when the server answers.

    `is_alone`: without a recipe, so runs must set the server's address.
    """
    out = sys.stderr if as_json else sys.stdout
    folder = settings.folder
    made = [p for p in (folder / SERVER_LOGS, *(folder / SERVER_LOGS).parents) if not p.exists()]
    keys: Any = settings.generation
    limit = keys.server.ready_timeout_s
    if keys.server.host not in LOOPBACK_HOSTS:
        what = "anyone with the token can send requests and replace its weights"
        print(f"{keys.server.host} is reachable from other machines: {what}", file=out)
    with _stop_signals() as heard:
        process = rollout_server.start_server(folder, check.dump_config(settings), "vllm-serve")
        try:
            print(f"starting a server for {folder} (log: {process.log})", file=out, flush=True)
            server = rollout_server.wait_for_server(process, limit, lambda: bool(heard))
            if server is not None:
                text = _server_text(server, folder, composed, is_alone)
                shown = json.dumps(_server_values(server, folder)) if as_json else text
                print(shown, flush=True)
            while not heard and process.exit_code is None:
                time.sleep(0.2)
        except BaseException as error:
            rollout_server.stop_server(process)
            if isinstance(error, ConfigError | MachineError):
                _remove_new_files(process, made)
            raise
        died, last = process.exit_code, rollout_server.server_log_tail(process)
        left = rollout_server.stop_server(process)
    if left or not heard:
        what, why = f"the server exited with code {died}", last
        fix, more = "fix the error in its log, then start it again", f"log: {process.log}"
        if left:
            what = f"processes {', '.join(map(str, left))} of the server did not exit"
            fix = f"kill -9 {' '.join(map(str, left))}"
            why = "they are still running 10 seconds after SIGKILL"
        refuse("generation.server", what, fix, why, more=more, error=GenerationError)
    print(f"{folder}: the server has stopped", file=out)
    return 0


def _check_no_other_server(folder: Path) -> None:
    """Raises ConfigError if this run has a server."""
    there = server_file.running_server(folder)
    if there is not None and (there.is_alive() or _is_healthy(there.url)):
        why = f"process {there.pid} on {there.host}, at {there.url}, started by {there.by}"
        refuse("name", f"{folder} already has a server", f"kill {there.pid}, or name=OTHER", why)


def _is_healthy(url: str) -> bool:
    """Whether a server on another machine answers: a crashed node leaves its file."""
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    return False


def _server_values(server: server_file.ServerRecord, folder: Path) -> JsonObject:
    """The server's data for programs; its token stays in the file."""
    server_path = server_file.server_file_path(folder)
    return {"url": server.url, "model": server.model, "dtype": server.dtype, "vllm": server.vllm,
            "pid": server.pid, "run": str(folder), "server_file": str(server_path)}  # fmt: skip


def _server_text(
    server: server_file.ServerRecord, folder: Path, composed: ComposedConfig, is_alone: bool
) -> str:
    said = [w for w in composed.user_overrides if not w.startswith("hydra.")]
    said = [w for w in said if w != BACKEND_OVERRIDE]
    token = ""
    if is_alone:
        said = ["+recipe=my.yaml", f"model.path={composed.values['model']['path']}"]
        said.append(f"generation.server.base_url={server.url}")
        token = f"with RLOO_SERVER_TOKEN, the token in {server_file.server_file_path(folder)}: "
    train = token + shlex.join(["rloo", "train", *said, BACKEND_OVERRIDE])
    lines = [
        f"{server.url}: answers",
        f"  model    {server.model} ({server.dtype}, vLLM {server.vllm})",
        f"  GPUs     {', '.join(server.devices) or 'none (CPU)'}",
        f"  token    in {server_file.server_file_path(folder)}, readable only by you",
        f"  train    {train}",
        "  stop     Ctrl-C",
    ]
    return "\n".join(lines)


def _remove_new_files(process: rollout_server.ServerProcess, new_folders: list[Path]) -> None:
    """After a refusal: remove its log and the folders created for it."""
    logs = process.log.parent
    process.log.unlink(missing_ok=True)
    if logs in new_folders and not [*logs.glob("*server_*.log")]:
        for given in logs.glob("*config.yaml"):
            given.unlink(missing_ok=True)
    for folder in new_folders:
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """While inside, INT and TERM are only recorded; USR1 and USR2 are ignored."""
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        if not heard:
            print("stopping the server", file=sys.stderr, flush=True)
        heard.append(number)

    before = {n: signal.signal(n, hear) for n in (signal.SIGINT, signal.SIGTERM)}
    # Slurm's early warning reaches every job step: the trainer acts on it and still needs us.
    early = (signal.SIGUSR1, signal.SIGUSR2)
    before |= {n: signal.signal(n, signal.SIG_IGN) for n in early}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
