"""Training from Python: a recipe, and your own rewards.

    from rloo_cli.api import train

    def brevity(completions, **kwargs):
        return [-len(text) / 100 for text in completions]

    summary = train("smoke", rewards={"brevity": brevity}, overrides=["max_steps=5"])

The configuration is the command line's: a recipe and `key=value` overrides. The same worker runs,
in this process. Under torchrun and `accelerate launch` each process that calls `train` is a rank.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.config import check
from rloo_cli.config.compose import ComposedConfig, compose_config
from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.distributed.world import join_ranks, join_world
from rloo_cli.evaluation.worker import run_evaluation
from rloo_cli.launch import launcher, preflight, rollout_server
from rloo_cli.launch.topology import LAUNCHER_VARIABLE
from rloo_cli.reporting.events import Events
from rloo_cli.train.worker import run_training
from rloo_cli.utils import fault_injection, paths
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject, read_json, update_json, write_json, write_text

Reward = Callable[..., object]


def train(
    recipe: str | os.PathLike[str] | None = None,
    rewards: Mapping[str, Reward] | None = None,
    overrides: Iterable[str] = (),
    config_dirs: Iterable[str | Path] = (),
    replace_rewards: bool = True,
    events: Sequence[Events] = (),
) -> JsonObject:
    """Do a whole run in this process. -> the content of its summary.json, and its `folder`

    `recipe`: a shipped recipe's name or a YAML file. `rewards`: callables of the interface of
    docs/rewards.md, by name; they replace the recipe's rewards (with replace_rewards=False they are
    added), and their keys are set by overrides such as `reward.NAME.weight=0.5`. `events`: callback
    objects (`plugin.Events`). A finished run is not repeated.

    Raises RunError (its `code` is the exit code that the command would have had).
    """
    fault_injection.arm_faults()  # also disarms those of an earlier run in this process
    composed, settings = compose_run(recipe, rewards, overrides, config_dirs, replace_rewards)
    if is_rank():
        return _train_as_rank(composed, settings, rewards, events)
    _in_one_process(settings.distributed.engine)
    preflight.check_machine(settings)
    relative_folder = settings.folder
    folder = paths.absolute_path(relative_folder)  # a reward may change the current folder
    start = launcher.plan_attempt(settings)
    if not start.done:
        launcher.write_attempt_files(start, settings, composed)
        with _record_end(folder), rollout_server.background_server(folder, settings):
            run_training(settings, folder, rewards, start, events)
    return read_json(folder / "summary.json") | {"folder": str(relative_folder)}


def compose_run(
    recipe: str | os.PathLike[str] | None = None,
    rewards: Mapping[str, Reward] | None = None,
    overrides: Iterable[str] = (),
    config_dirs: Iterable[str | Path] = (),
    replace_rewards: bool = True,
) -> tuple[ComposedConfig, RunConfig]:
    """The run that `train` would start with the same arguments, checked. Raises ConfigError."""
    arguments = [f"+recipe={recipe}"] if recipe is not None else []
    arguments += ["reward=[]"] if rewards and replace_rewards else []
    composed = _with(compose_config([*arguments, *overrides], [*config_dirs]), rewards or {})
    return composed, check.check_config(composed)


def evaluate(
    settings: RunConfig, folder: Path, rewards: Mapping[str, Reward] | None = None
) -> JsonObject:
    """Score the model of a composed run on its held-out data, in this process. -> the metrics

    The results are written into `folder`, as `rloo eval` writes them. Every rank calls it. Raises
    RunError.
    """

    def write_settings() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "config.yaml", check.config_text(settings))
        about: JsonObject = {"source": settings.model.path, "run": None, "state": {}, "prompts": 0}
        write_json(folder / "about.json", about | {"steps": settings.num_steps() or 0})

    join_ranks(settings).run_on_rank0(write_settings)
    return run_evaluation(folder, rewards)


def is_rank() -> bool:
    """Whether torchrun or `accelerate launch` has started this process as one of several."""
    launched = environment_number("WORLD_SIZE", 1) > 1 and os.environ.get("RANK")
    return bool(launched) and LAUNCHER_VARIABLE not in os.environ


def _train_as_rank(
    composed: ComposedConfig,
    settings: RunConfig,
    rewards: Mapping[str, Reward] | None,
    events: Sequence[Events],
) -> JsonObject:
    """`train` in a process that a launcher has started with others: rank 0 makes the folder."""
    topology, settings = launcher.find_run_topology(settings, composed)
    _no_server_of_its_own(settings.generation)
    preflight.check_machine(settings, local_ranks=topology.local_world_size)
    world = join_world(settings)
    relative_folder = settings.folder
    folder = paths.absolute_path(relative_folder)

    def begin() -> str:
        start = launcher.plan_attempt(settings)
        if not start.done:
            launcher.write_attempt_files(start, settings, composed)
        return start.to_json()

    start = ResumePlan.from_json(world.run_on_rank0(begin))
    if not start.done:
        with _record_end(folder) if world.is_main else contextlib.nullcontext():
            run_training(settings, folder, rewards, start, events)
    summary: JsonObject = world.run_on_rank0(lambda: read_json(folder / "summary.json"))
    return summary | {"folder": str(relative_folder)}


@contextlib.contextmanager
def _record_end(folder: Path) -> Iterator[None]:
    """Write into run.json how the training inside ended."""
    state = "failed"
    try:
        yield
        state = "finished"
    finally:
        if (folder / "run.json").exists():  # else the folder was removed
            update_json(folder / "run.json", state=state)


def _no_server_of_its_own(generation: GenerationConfig) -> None:
    """Raise ConfigError for ranks from another launcher with a server that none of them can
    start: each has taken its GPU already."""
    server = getattr(generation, "server", None)
    if server is not None and server.base_url is None:
        why = "ranks from another launcher occupy their GPUs before a server can start"
        fix = "rloo vllm-serve model.path=MODEL, and generation.server.base_url=http://HOST:PORT"
        what = "generation=vllm_server without base_url does not work with several processes here"
        refuse("generation.server.base_url", what, fix, why)


def _with(composed: ComposedConfig, rewards: Mapping[str, Reward]) -> ComposedConfig:
    """The config with an entry for each callable; overrides of its keys are kept."""
    entries = dict(composed.values.get("reward") or {})
    for name, code in rewards.items():
        if not name.isidentifier() or not callable(code):
            what = f"reward {name!r} is not a callable with a valid name"
            why = "a name has letters, digits and _, and does not begin with a digit"
            if not callable(code):
                why = f"found a value of type {type(code).__name__}, expected a function"
            refuse("rewards", what, 'rewards={"NAME": FUNCTION}', why)
        keys = entries.get(name) or {}
        entries[name] = {"type": "function", "path": f"python:{name}", "kwargs": {}} | keys
    return replace(composed, values=composed.values | {"reward": entries})


def _in_one_process(engine: str) -> None:
    """Raise ConfigError for a run of several processes."""
    if engine == "single":
        return
    why = "a call from Python is one process and cannot start others"
    what = f"distributed.engine = {engine}"
    refuse("distributed.engine", what, "use the command rloo train ..., or distributed=single", why)
