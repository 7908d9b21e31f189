"""Checks what the machine needs before a run can start, without importing torch."""

import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from rloo_cli.config import hf_cache, registry, rules_lora, rules_paths, supervised, synthetic
from rloo_cli.config.agent import EpisodeConfig, agent_config, agent_package_problems
from rloo_cli.config.rules_paths import NamedPath
from rloo_cli.config.schema import GenerationConfig, ModelConfig, RunConfig
from rloo_cli.distributed import device_count
from rloo_cli.generation.vllm import arguments
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, MachineError, Problem


def check_machine(run: RunConfig, downloads: bool = True, local_ranks: int = 1) -> None:
    """Raises MachineError (exit 3) with all that the machine lacks for this run, and ConfigError
    (exit 2) for what no engine on this machine can do.

    `downloads`: also check downloads and installed packages, which a plan does not need.
    `local_ranks`: processes on this machine that need a GPU each, if there are GPUs.
    """
    if downloads:
        _refuse_masks(run.generation)
    problems: list[Problem] = []
    for name, entry in run.rewards.items():
        module = registry.registered_module("rewards", entry.type)
        try:
            if hasattr(module, "preflight"):
                module.preflight(entry)
        except MachineError as error:
            problems += [replace(p, where=f"reward.{name}") for p in error.problems]
    problems += _agent(agent_config(run)) if downloads else ()
    problems += chain(*problems_by_topic(run, downloads, local_ranks).values())
    if problems:
        raise MachineError(*problems)


def _agent(agent: EpisodeConfig | None) -> Iterator[Problem]:
    """What the run's agent lacks: a token, a package."""
    module = None if agent is None else registry.registered_module("agents", agent.kind)
    try:
        if hasattr(module, "preflight"):
            module.preflight(agent)  # type: ignore[union-attr]
    except MachineError as error:
        yield from error.problems


def problems_by_topic(
    run: RunConfig, downloads: bool = True, local_ranks: int = 1
) -> dict[str, list[Problem]]:
    """What the machine lacks for this run apart from rewards, by topic, in refusal order.

    The arguments are those of `check_machine`.
    """
    named, engine = rules_paths.named_paths(run), run.distributed.engine
    packages = [*_packages(run.model), *agent_package_problems(agent_config(run))]
    return {
        "downloads": [*(_downloads(named) if downloads else ())],
        "packages": [*packages, *(_engine(engine) if downloads else ())],
        "devices": [*_devices(local_ranks)],
        "vllm": [*arguments.engine_problems(run, local_ranks=local_ranks)] if downloads else [],
        "root": [*root_problems(run.root)],
        "cache": [*_cache(named)],
    }


def check_supervised_machine(run: RunConfig, section: str, local_ranks: int = 1) -> None:
    """Raises MachineError for what `rloo sft` or `rloo reward-model` lacks."""
    training, engine = supervised.supervised_training(run, section), run.distributed.engine
    problems = [*supervised.training_download_problems(training), *_packages(run.model)]
    problems += agent_package_problems(agent_config(run))
    problems += [*_devices(local_ranks), *(_engine(engine) if local_ranks > 1 else ())]
    if find_spec("trl") is None:
        what, why = "this verb trains with TRL, which is not installed", f"the section is {section}"
        problems.append(Problem(what, "this machine", why, "pip install 'rloo-cli[stages]'"))
    if problems := [*problems, *root_problems(run.root), *_cache(rules_paths.named_paths(run))]:
        raise MachineError(*problems)


def check_server_machine(run: RunConfig) -> None:
    """Raises MachineError for what a rollout server of this run lacks (it needs no rewards), and
    ConfigError for what it cannot do here."""
    _refuse_masks(run.generation, engine_is_local=True)
    needed = ("model.path", "model.tokenizer")
    missing = (p for p in _downloads(rules_paths.named_paths(run)) if p.where in needed)
    if problems := [
        *missing,
        *arguments.engine_problems(run, engine_is_local=True),
        *root_problems(run.root),
    ]:
        raise MachineError(*problems)


def _refuse_masks(generation: GenerationConfig, engine_is_local: bool = False) -> None:
    """Raise ConfigError if an engine started here cannot send sampling masks."""
    if problems := [*arguments.mask_problems(generation, engine_is_local)]:
        raise ConfigError(*problems)


def root_problems(root: str) -> Iterator[Problem]:
    """A root that is not writable, or on a full disk."""
    folder = Path(root).absolute()
    above = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(above, os.W_OK):
        what, fix = f"root = {root} cannot be written", "root=FOLDER that is writable"
        yield Problem(what, "root", f"looked at {above}", fix)
    elif (disk := shutil.disk_usage(above)).free < 100e6:
        what = "has under 100 MB free" if disk.total else "cannot hold files"
        why = f"found {disk.free / 1e6:.0f} MB free of {disk.total / 1e6:.0f} MB"
        yield Problem(f"{above} {what}", "root", why, "root=FOLDER on another disk")


def _cache(named: Iterable[NamedPath]) -> Iterator[Problem]:
    """A required cache that cannot be created; a read-only cache may be complete."""
    cache = paths.cache_folder()
    needed = any(each.path.startswith(synthetic.NO_HUB_PREFIXES) for each in named)
    if needed and not cache.is_dir():
        above = next(p for p in cache.absolute().parents if os.path.exists(p))
        if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)) or above == Path("/proc"):
            yield paths.unusable_cache_problem(f"no folder can be created in {above}")


def _downloads(named: Iterable[NamedPath]) -> Iterator[Problem]:
    """What an offline run would have to download."""
    for each in named if hf_cache.is_hub_offline() else ():
        if synthetic.is_hub_name(each.path) and not each.is_cached:
            cache = hf_cache.hub_cache_folder()
            why = f"HF_HUB_OFFLINE is set, and it is not in the cache: {cache}"
            fix = f"on a machine with network: {hf_cache.fetch_command()}"
            yield Problem(f"{each.key} = {each.path!r} was not found", each.key, why, fix)


def _packages(model: ModelConfig) -> Iterator[Problem]:
    """Packages that a model's keys need and `pip install rloo-cli` does not install."""
    attention = model.attn_implementation or ""
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_3"}
    if attention in package and find_spec(package[attention]) is None:
        install = package[attention].replace("_", "-")
        why = f"it needs the package {install}, which is not installed"
        fix = f"pip install {install}, or model.attn_implementation=sdpa"
        what = f"model.attn_implementation = {attention!r} cannot be used"
        yield Problem(what, "model.attn_implementation", why, fix)
    yield from rules_lora.adapter_package_problems(model)


def _engine(engine: str) -> Iterator[Problem]:
    if engine.startswith("zero") and find_spec("deepspeed") is None:
        why = "it needs the package deepspeed, which is not installed"
        fix = "pip install 'rloo-cli[deepspeed]', or distributed=ddp, or distributed=fsdp2"
        what = f"distributed.engine = {engine} cannot be used"
        yield Problem(what, "distributed.engine", why, fix)


def _devices(local_ranks: int) -> Iterator[Problem]:
    """Two processes on one GPU: the second runs out of memory, or waits for the first."""
    found = device_count.visible_gpus() if local_ranks > 1 else []
    if found and local_ranks > len(found):
        key, gpus = "distributed.num_processes", len(found)
        visible = f"{gpus} GPU{' is' if gpus == 1 else 's are'} visible"
        what = f"{local_ranks} processes should train on this machine, but {visible}"
        why = f"each needs its own GPU; visible: {', '.join(found)}"
        fix = f"{key}={gpus}, or CUDA_VISIBLE_DEVICES with {local_ranks} of them"
        yield Problem(what, key, why, fix)
