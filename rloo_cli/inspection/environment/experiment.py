"""What an experiment needs from the machine: memory, disk, ports, network, its folder, its servers.

The checks are those of a start (`launch.preflight`, `planning`, `checkpoint.resume`), and also
report what was found if nothing is wrong.
"""

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rloo_cli.checkpoint import resume, rollback, run_folder
from rloo_cli.config import hf_cache, rules, synthetic
from rloo_cli.config.rules_paths import NamedPath
from rloo_cli.config.schema import CheckpointConfig, GenerationConfig, ModelConfig, RunConfig
from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.generation.vllm import server_file
from rloo_cli.generation.vllm.engine import EngineLost, EngineRefused
from rloo_cli.generation.vllm.http import (
    ROLLOUT_SERVER,
    TEACHER_SERVER,
    HttpClient,
    ServerKind,
    no_answer_problem,
)
from rloo_cli.generation.vllm_server import LOOPBACK_HOSTS, WILDCARD_HOSTS, ServerSection
from rloo_cli.inspection.environment import machine_state
from rloo_cli.inspection.environment.check_lines import CheckLines
from rloo_cli.inspection.environment.gpu_holders import GpuState
from rloo_cli.launch import leftovers, preflight, topology
from rloo_cli.planning import device as planning_device
from rloo_cli.planning import machine_plan, model_spec
from rloo_cli.planning.plan import RunPlan, make_run_plan
from rloo_cli.planning.text import format_count, format_gib
from rloo_cli.utils import ports
from rloo_cli.utils.errors import ConfigError, GenerationError, MachineError, Problem, RunError

SERVER_TIMEOUT_S = 1.5


def check_machine_lacks(lines: CheckLines, run: RunConfig) -> None:
    """What a start would refuse on this machine, and the processes that would train on it."""
    local_ranks = 1
    try:
        processes, _, _ = topology.find_topology(os.environ, run)
        local_ranks = processes.local_world_size
        started = f" (started by {processes.launched_by})" if processes.launched_by else ""
        found = f"{local_ranks} here of {processes.world_size}, {run.distributed.engine}{started}"
        lines.add_ok("processes", found)
    except ConfigError as error:
        for problem in error.problems:
            if run.distributed.num_nodes > 1 and shutil.which("sbatch"):
                fix = f"rloo slurm submit, which starts it on {run.distributed.num_nodes} nodes"
                lines.add_problem("processes", replace(problem, fix=fix), "warn")
            else:
                lines.add_problem("processes", problem)
    for topic, problems in preflight.problems_by_topic(run, local_ranks=local_ranks).items():
        if topic != "root":  # check_run_folder checks it
            for problem in problems:
                lines.add_problem(topic, problem)


def check_model_files(lines: CheckLines, model: ModelConfig) -> None:
    """The model's config.json: size and context."""
    try:
        spec = model_spec.load_model_spec(model.path, model.revision)
    except MachineError:  # the network lines report what is missing
        lines.add_warning("model", f"{model.path}: its config.json is not available locally", "")
        return
    except ConfigError as error:
        for problem in error.problems:
            lines.add_problem("model", problem)
        return
    context = f", context of {spec.context_length} tokens" if spec.context_length else ""
    size = f"{format_count(spec.total_params)} parameters"
    guessed = ", unknown family" if spec.guessed else ""
    lines.add_ok("model", f"{model.path}: {size}{context}{guessed} ({spec.source})")


def check_run_network(lines: CheckLines, paths: Sequence[NamedPath]) -> None:
    """Which of the run's models and data are local, and whether the hub is needed."""
    named = [each for each in paths if synthetic.is_hub_name(each.path)]
    offline = hf_cache.is_hub_offline()
    state = "offline by HF_HUB_OFFLINE; " if offline else ""
    if not named:
        lines.add_ok("network", f"{state}this run needs nothing from a hub")
        return
    missing = [each.path for each in named if not each.is_cached]
    cached = len(named) - len(missing)
    if not missing:
        lines.add_ok("network", f"{state}all {cached} hub artifacts are in the cache")
        return
    if offline:
        return  # `downloads` adds a line for each
    absent = ", ".join(dict.fromkeys(missing))
    failure, _ = machine_state.try_hub()
    if failure:
        fix = f"on a machine with network: {hf_cache.fetch_command()}"
        what = f"{absent} must be downloaded, but the hub is not reachable: {failure}"
        lines.add_failure("network", what, fix)
    else:
        lines.add_ok("network", f"the hub is reachable; {absent} will be downloaded")


def check_run_memory(lines: CheckLines, run: RunConfig, gpus: list[GpuState]) -> RunPlan | None:
    """The plan's memory against this machine's. -> the plan, if the model is known"""
    try:
        here = planning_device.find_device(None, small=True, measured=False)
        plan = make_run_plan(run, here)
    except RunError as error:
        lines.add_warning("memory", f"not planned: {error.problems[0].what}", "")
        return None
    device = plan.inputs.device
    need = f"{format_gib(plan.needed_bytes)} of {format_gib(device.usable_bytes)} usable"
    if not plan.fits:
        problem = machine_plan.does_not_fit_error(plan).problems[0]
        lines.add_problem("memory", replace(problem, where=""))
        return plan
    free = min((g.free_bytes for g in gpus), default=machine_state.free_memory_bytes())
    whose = "the fullest GPU" if gpus else "the machine"
    if plan.needed_bytes > free:
        what = f"it needs {need} on {device.name}, but {whose} only has {format_gib(free)} free"
        fix = "free it, or CUDA_VISIBLE_DEVICES=OTHERS" if gpus else "end other processes"
        (lines.add_failure if gpus else lines.add_warning)("memory", what, fix)
    else:
        lines.add_ok("memory", f"{need} on {device.name}; {format_gib(free)} free")
    return plan


def check_run_disk(
    lines: CheckLines, root: str, checkpoint: CheckpointConfig, plan: RunPlan | None
) -> None:
    """Disk space at the run's root, for the planned checkpoints."""
    above = Path(machine_state.nearest_folder(root))
    usage = shutil.disk_usage(above)
    if not usage.total:  # it cannot hold files, as the root's line reports
        return
    free = f"{usage.free / 1e9:.3g} GB free at {above}"
    if plan is None:
        lines.add_ok("disk", free)
        return
    try:
        warned: list[str] = []
        rollback.check_disk_space(above, int(plan.disk_bytes), checkpoint, warned.append)
    except MachineError as error:
        lines.add_problem("disk", error.problems[0])
        return
    count = checkpoint.keep_last + 1
    if warned:
        lines.add_warning(
            "disk", warned[0].removeprefix("warning: "), "root=FOLDER on another disk"
        )
    else:
        size = format_gib(plan.checkpoint_bytes)
        lines.add_ok("disk", f"{free}; its checkpoints need {count} x {size}")


def check_run_folder(lines: CheckLines, run: RunConfig) -> None:
    """Whether root is writable, and what the run's folder already holds."""
    problems = [*preflight.root_problems(run.root)]
    above = machine_state.nearest_folder(run.root)
    if not problems:
        try:  # for the user root, permissions allow what the file system may refuse
            tempfile.TemporaryFile(dir=above).close()
        except OSError as error:
            what = f"root = {run.root} is not writable"
            problems = [Problem(what, "root", f"{above}: {error.strerror}", "root=FOLDER")]
    for problem in problems:
        fix = problem.fix or "root=FOLDER that is writable"
        lines.add_problem("root", replace(problem, fix=fix))
    if not problems:
        lines.add_ok("root", f"{run.root} is writable (tried in {above})")
    folder = run.folder
    with lines.noting_refusal("folder"):
        facts = run_folder.read_run_metadata(folder)
        if facts.get("host") == platform.node() and leftovers.is_run_alive(facts):
            leftovers.refuse_busy_folder(folder, facts["pid"])
        plan = resume.plan_resume(folder, run)
        begins = f"resumes from {plan.checkpoint.name}" if plan.checkpoint else "starts over"
        if plan.done:
            lines.add_warning("folder", plan.done, "name=OTHER")
        else:
            lines.add_ok("folder", f"{folder}: attempt {plan.attempt} {begins}")
    left = leftovers.find_leftovers(folder)
    if left:
        named = ", ".join(f"{p.pid} ({p.role})" for p in left)
        fix = f"rloo doctor --kill-orphans {folder}"
        lines.add_warning("orphans", f"an earlier attempt left processes: {named}", fix)


def check_asked_ports(
    lines: CheckLines, folder: Path, generation: GenerationConfig, rdzv: str | None
) -> None:
    """The ports in the config (`rdzv`: distributed.rdzv): free, or the process that uses them."""
    asked: list[tuple[str, str, int]] = []
    keys: Any = generation
    server = server_file.running_server(folder)
    if keys.is_server and keys.server.base_url is None and server is None:
        asked.append(("generation.server.port", keys.server.host, keys.server.port))
    where = rules.parse_address(rdzv or "")
    if where is not None and where[0] in (*LOOPBACK_HOSTS, platform.node()):
        asked.append(("distributed.rdzv", *where))
    wanted = [(key, host, port) for key, host, port in asked if port]
    if not wanted:
        lines.add_ok("ports", "no fixed ports: rloo chooses free ones")
    for key, host, port in wanted:
        try:
            ports.bind_tcp_socket(host, port).close()
        except OSError as error:
            what = f"{key}: port {port} of {host} is not available: {ports.bind_failure(error)}"
            held = f"; used by {ports.port_holder(port)}"
            fix = f"{key}=0" if key.endswith("port") else f"{key}=HOST:OTHER"
            lines.add_failure("ports", f"{what}{held}", f"{fix}, or stop the process that uses it")
        else:
            lines.add_ok("ports", f"{key} = {port} is free on {host}")


def check_rollout_servers(lines: CheckLines, folder: Path, generation: GenerationConfig) -> None:
    """The servers that sample for a run: those of base_url, or that of its folder's server.json."""
    keys = cast(ServerSection, getattr(generation, "server", None))
    if not generation.is_server:
        return
    if keys.base_url is not None:
        urls = [keys.base_url] if isinstance(keys.base_url, str) else keys.base_url
        token = os.environ.get(keys.api_key_env, "")
        _ask_servers(lines, [(url, token) for url in urls], keys.api_key_env)
        return
    for number in range(1, max(1, keys.num_nodes) + 1):
        _check_server_file(lines, folder, number, own=not keys.num_nodes)


def check_teacher_server(lines: CheckLines, keys: TeacherConfig | None) -> None:
    """The teacher server of a distillation, if any."""
    if keys is not None:
        token = os.environ.get(keys.api_key_env, "")
        _ask_servers(lines, [(str(keys.base_url), token)], keys.api_key_env, TEACHER_SERVER)


def _check_server_file(lines: CheckLines, folder: Path, number: int, own: bool) -> None:
    """A server found by its file. `own`: `rloo train` starts one if none is running."""
    path, record = server_file.server_file_path(folder, number), None
    record = server_file.read_server_file(folder, number)
    add = lines.add_warning if own else lines.add_failure
    start = "optional: rloo train starts its own" if own else "rloo vllm-serve starts one"
    if record is None and path.exists():
        add("server", f"{path} is not a valid server file", f"rm {path}; {start}")
    elif record is None and own:
        lines.add_ok("server", "rloo train starts its own")
    elif record is None:
        add("server", f"{path} not found: no server of this run is running", start)
    elif record.failed:
        add("server", f"{path}: the server failed: {record.failed}", f"see {record.log}; {start}")
    elif record.is_alive() is False:
        what = f"{path} names process {record.pid}, which is not running"
        add("server", what, f"rm {path}; {start}")
    else:
        _ask_servers(lines, [(record.url, record.token)], "RLOO_SERVER_TOKEN")


def _ask_servers(
    lines: CheckLines, servers: list[tuple[str, str]], token_variable: str,
    kind: ServerKind = ROLLOUT_SERVER,
) -> None:  # fmt: skip
    """Query every server's health, and with the token its kind's endpoints, concurrently."""
    client = HttpClient(token_variable, kind)
    try:
        with ThreadPoolExecutor(len(servers)) as pool:
            answers = list(pool.map(lambda server: _ask_server(client, *server), servers))
    finally:
        client.close()
    for (url, _), (problem, seconds) in zip(servers, answers, strict=True):
        if problem is None:
            took = f"{1000 * seconds:.0f} ms"
            lines.add_ok(kind.noun, f"{url} answers ({took}) and accepts the token")
        else:
            lines.add_problem(kind.noun, problem)


def _ask_server(client: HttpClient, url: str, token: str) -> tuple[Problem | None, float]:
    began = time.monotonic()
    for wildcard in WILDCARD_HOSTS:
        if wildcard and f"//{wildcard}:" in url:
            url = url.replace(f"//{wildcard}:", "//127.0.0.1:")
    try:
        paths = ("/health", "/is_paused") if client.kind is ROLLOUT_SERVER else ("/v1/models",)
        for path in paths:
            client.get(url, path, token, SERVER_TIMEOUT_S)
    except GenerationError as error:
        return error.problems[0], 0.0
    except (EngineLost, EngineRefused) as error:
        return no_answer_problem(url, str(error), client.kind), 0.0
    return None, time.monotonic() - began
