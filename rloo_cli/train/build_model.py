"""The second half of building a run: the model, spread over the ranks, and what needs it."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rloo_cli.checkpoint.resume import Start
from rloo_cli.config import hf_cache, registry, rules_lora, synthetic, value_model
from rloo_cli.config.prompt_limit import BACKENDS
from rloo_cli.config.schema import RunConfig
from rloo_cli.data import vocabulary
from rloo_cli.data.bin_packing import Limits, rows_of
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed import gather
from rloo_cli.distributed.engine import Copies, Engine
from rloo_cli.distributed.fsdp import Sharded
from rloo_cli.distributed.world import World
from rloo_cli.distributed.zero import Zero
from rloo_cli.generation import Generator
from rloo_cli.generation.common.rank0_proxy import Led
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.common.stop_rule import stop_ids
from rloo_cli.generation.hf.replica import Replica
from rloo_cli.generation.vllm import arguments
from rloo_cli.policy import layouts, load, lora, memory, reference, value
from rloo_cli.policy.layouts import Level
from rloo_cli.policy.model import Policy
from rloo_cli.policy.reference import Reference
from rloo_cli.policy.value import Critic
from rloo_cli.reporting.log import Log
from rloo_cli.reporting.prompt_ledger import Ledger
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.run import Run
from rloo_cli.utils.device_waits import wait_for_device
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.fault_injection import fault
from rloo_cli.utils.timers import Clock

ENGINES: dict[str, type[Engine]] = {
    "single": Engine, "ddp": Copies, "fsdp2": Sharded, "zero1": Zero, "zero2": Zero, "zero3": Zero,
}  # fmt: skip


def with_model(
    config: RunConfig,
    start: Start,
    world: World,
    log: Log,
    tokenizer: Any,
    context: int | None,
    prepared: dict[str | None, Prompts],
    rewards: list[Reward],
    steps: int,
) -> Run:
    """Weights, and what needs them. Raises RunError."""
    log.phase("loading the model")
    algorithm = registry.algorithm(config.algorithm.name)
    settings = algorithm.resolved(config.algorithm, config.generation.backend)
    config = config.model_copy(update={"algorithm": settings})
    engine, others = _engine(world, config), memory.held_now(world.device)
    policy, frozen = _policies(config, engine, start)
    critic = _critic(config, engine, policy, rewards, tokenizer, log)
    optimizer = engine.spread(policy, steps * config.updates_per_step)
    if frozen is not None:
        engine.freeze(frozen)
    generator = _generator(config, engine, policy, tokenizer, context, start, log)
    prompts, clock = prepared[None], Clock(log.phase, wait_for_device)
    level, limits = _layouts(config, engine, policy, frozen, critic, prompts, others, log)
    return Run(
        config=config,
        folder=start.folder,
        world=world,
        engine=engine,
        algorithm=algorithm,
        tokenizer=tokenizer,
        prompts=prompts,
        sets={name: held_out for name, held_out in prepared.items() if name is not None},
        policy=policy,
        reference=frozen,
        critic=critic,
        generator=generator,
        rewards=rewards,
        rollouts=Rollouts(config, algorithm, prompts, generator, rewards, clock, world),
        optimizer=optimizer,
        clock=clock,
        log=log,
        steps=steps,
        separate=algorithm.why_separate(config),
        limits=limits,
        level=level,
        ledger=Ledger(start.folder),
        attempt=start.attempt,
    )


def _engine(world: World, config: RunConfig) -> Engine:
    fault("load")
    return ENGINES[config.distributed.engine](world, config)


def _policies(config: RunConfig, engine: Engine, start: Start) -> tuple[Policy, Reference | None]:
    """The model that learns and, where KL is of use, the frozen one that it is measured to."""
    if engine.sharded:
        model, source = _load(config, engine, str(start.checkpoint or config.model.path))
    else:
        world = engine.world
        model, source = lora.model(config.model, start.checkpoint, world.device, config.seed), None
    model.train()
    temperature, settings, device = (
        config.generation.temperature, config.algorithm, engine.world.device,
    )  # fmt: skip
    kl_temperature = 1.0 if getattr(settings, "kl_temperature", "") == "one" else temperature
    policy = Policy(model, temperature, kl_temperature, device)
    policy.source = source
    if getattr(settings, "beta", 0.0) <= 0 and getattr(settings, "kl_in", "") != "none":
        return policy, None
    if engine.sharded:
        model, source = _load(config, engine, config.model.ref_path or config.model.path)
        frozen = Reference(model, kl_temperature, device=device)
        frozen.source = source
    else:
        frozen = reference.build(config.model, policy, device, kl_temperature, config.seed)
    same_vocabulary(policy, frozen)
    return policy, frozen


def _check_adapter(config: RunConfig, policy: Policy, log: Log) -> None:
    """Say where an adapter reaches the experts of a mixture. Raises ConfigError where the engine
    that samples cannot apply that."""
    parts = lora.adapted_parameters(policy.model) if lora.on(policy.model) else []
    if not parts:
        return
    kinds = ", ".join(sorted({".".join(name.split(".")[-2:]) for name in parts}))
    linear = ",".join(lora.linear_targets(policy.model))
    if config.generation.backend in rules_lora.ENGINES:
        why = f"adapted parameters that are no linear layers: {kinds}; vLLM does not take those"
        fix = f"model.lora.target_modules=[{linear}], or generation=transformers"
        what = f"this adapter cannot be sampled by {config.generation.backend}"
        raise ConfigError(Problem(what, "model.lora.target_modules", why, fix))
    log.note(
        f"the adapter is in {kinds} ({len(parts)} parameters) besides the linear layers;"
        f" without them: model.lora.target_modules=[{linear}]"
    )


def _check_cache(config: RunConfig, model: Any) -> None:
    """Raises ConfigError for a model whose state our own decoding cannot hand on."""
    taken = inspect.signature(model.forward).parameters
    other = [name for name in ("cache_params", "state") if name in taken]
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
    why = ""
    if other and "past_key_values" not in taken:
        why = f"it keeps a state of its own ({other[0]}), and no past_key_values"
    elif not any(k.endswith("attention") and k != "linear_attention" for k in kinds):
        why = f"no layer of it has keys and values to keep: {', '.join(dict.fromkeys(kinds))}"
    if why and config.generation.backend == "transformers":
        what = f"{type(model).__name__} cannot be sampled by generation=transformers"
        raise ConfigError(Problem(what, "generation", why, "generation=vllm_server"))


def _critic(
    config: RunConfig,
    engine: Engine,
    policy: Policy,
    rewards: list[Reward],
    tokenizer: Any,
    log: Log,
) -> Critic | None:
    """The value model, where the algorithm has one; the engine learns of it before it spreads."""
    if not value_model.wanted(config):
        return None

    def read(path: str, revision: str | None) -> dict[str, Any]:
        return hf_cache.config(synthetic.folder(path), revision)

    readers = [r.code.reader for r in rewards if r.config.type == "model"]  # type: ignore[attr-defined]
    alike = all(vocabulary.same_words(tokenizer, reader.own) for reader in readers)
    start = value_model.beginning(config, read, alike)
    critic = value.build(config.model, start, policy.words, engine.world.device)
    head = "a head of zeros" if critic.new else "its head"
    log.note(f"the value model begins as {start.path} ({start.why}), with {head}")
    engine.beside = critic.model
    return critic


def _load(config: RunConfig, engine: Engine, path: str) -> tuple[Any, Any]:
    """A shell of a model that is to be sharded, and its source: rank 0 has the weights, in the
    CPU's memory."""
    world, real = engine.world, []

    def read() -> tuple[Any, Any]:
        real.append(load.model(config.model, path, gather.CPU, world.device))
        return real[0].config, real[0].generation_config

    shell = load.shell(config.model, world.first(read), world.device)
    return shell, gather.Shells(shell, real[0] if real else None)


def _generator(
    config: RunConfig, engine: Engine, policy: Policy, tokenizer: Any, context: int | None,
    start: Start, log: Log,
) -> Generator:  # fmt: skip
    """Who samples, here or for all ranks."""
    _check_adapter(config, policy, log)
    _check_cache(config, policy.model)
    ends = stop_ids(tokenizer, policy.model, config.generation)
    vocabulary.check_endings(ends, policy.words, config.generation)
    name, world = config.generation.backend, engine.world
    if name != "transformers":  # an engine of its own takes a minute to start
        log.phase(f"waiting for the sampler ({name}) to answer")
    backend = registry.load_code(registry.module("generation", name).IMPLEMENTATION)

    def units() -> Iterator[dict[str, Tensor]]:
        return gather.of_units(engine, policy.model, _sampled_in(config, policy))

    def build(model: Any = policy.model) -> Generator:
        found: Generator = backend(model, tokenizer, config, context, start.folder, log.note)
        return found

    if name == "vllm_server" and (world.size > 1 or engine.sharded):
        return Led(world, policy, units, build)
    if not engine.sharded:
        return _never_alone(build(), world)
    if name == "transformers":
        path = config.model.path  # its weights are replaced before it samples
        copy = load.model(config.model, path, world.device)
        return Replica(build(copy.eval().requires_grad_(False)), copy, units)
    policy.pieces = units
    return _never_alone(build(), world)


def _sampled_in(config: RunConfig, policy: Policy) -> torch.dtype:
    """The dtype that the sampler computes in: shards are cast to it before they travel."""
    section = BACKENDS.get(config.generation.backend)
    if section is None:
        return policy.dtype
    found: torch.dtype = getattr(
        torch, arguments.dtype(config, getattr(config.generation, section))
    )
    return found


def _never_alone(generator: Any, world: World) -> Generator:
    """With several ranks an engine that is lost is not started again: no rank can be sent weights
    alone, since all ranks gather them, or exchange the handles of their memory."""
    if world.size > 1 and hasattr(generator, "lost_most"):
        generator.lost_most = 0
    found: Generator = generator
    return found


def _layouts(
    config: RunConfig,
    engine: Engine,
    policy: Policy,
    frozen: Reference | None,
    critic: Critic | None,
    prompts: Prompts,
    others: float,
    log: Log,
) -> tuple[Level, Limits]:
    """How rows are laid out for each model, and how many a forward pass may have. `others`: bytes
    of the device that reward models have."""
    log.phase("checking layouts")
    length, wanted = config.generation.max_completion_length, config.train.layout
    longest = prompts.longest + length
    for model in (policy, frozen) if frozen is not None else (policy,):
        model.scorer.float32 = config.model.lm_head_fp32
    level = layouts.settle(policy, wanted, longest)
    # The fused head's entropy has no gradient.
    if getattr(config.algorithm, "entropy_coef", 0.0) > 0:
        policy.scorer.fused, policy.scorer.entropy_grad = False, True
        level = replace(level, head="model", why=f"{level.why}; entropy bonus".lstrip("; "))
    if frozen is not None and config.model.ref_path is None:
        layouts.follow(frozen, policy)
    elif frozen is not None:
        with frozen.there():
            layouts.settle(frozen, wanted, longest)
    completions = [length] * config.algorithm.num_generations
    group = rows_of(prompts.longest, completions, level.layout)
    second = frozen is not None and frozen.own and not frozen.offloaded
    if critic is not None and (reason := critic.settle(wanted, longest)):
        log.note(f"the value model's rows are {critic.layout} ({reason})")
    if critic is not None:
        critic.wide = rows_of(prompts.longest, completions, critic.layout) / group
    if config.train.compile:
        _compile(policy, frozen, log)
    least = longest if frozen is None else group  # a group with a KL should not be cut
    own = memory.limits(policy, config, group, second, _share(engine), critic, least, others)
    found = min(engine.world.gather(own), key=lambda limits: limits.rows)
    size = f"{found.rows} rows" if found.completions is None else f"{found.completions} completions"
    again = ", recomputed in backward" if policy.model.is_gradient_checkpointing else ""
    log.note(f"rows are {level}; at most {size} a forward{again}")
    return level, found


def _compile(policy: Policy, frozen: Reference | None, log: Log) -> None:
    """Compile each decoder layer by itself, for rows of any number: one compilation serves all
    layers, and weights may be sharded or replaced."""
    models = [policy.model, *([frozen.model] if frozen is not None and frozen.own else [])]
    for layer in (layer for model in models for layer in gather.layers(model)):
        layer.compile(dynamic=True)
    log.note("decoder layers are compiled at their first use, which takes a minute")


def _share(engine: Engine) -> tuple[float, int]:
    """What part of weights and optimizer a rank holds, and how many ranks share its memory."""
    world = engine.world
    return (1 / world.size if engine.sharded else 1.0), world.local


def same_vocabulary(policy: Policy, frozen: Policy) -> None:
    """Raises ConfigError when policy and reference do not speak of the same tokens."""
    if policy.words != frozen.words:
        why = f"the policy knows {policy.words} tokens, the reference {frozen.words}"
        raise ConfigError(
            Problem("policy and reference differ in vocabulary", "model.ref_path", why)
        )
