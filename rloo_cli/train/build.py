"""A config -> a `Run`: every part built once, in the order in which mistakes are cheapest.

The phases, each a method of `RunBuilder`: data, rewards, tokenizer, model, engine, generator,
layouts. Data and rewards are looked at before any weights load.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rloo_cli.algorithms.common.base import Algorithm, load_algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.checkpoint.restore import begin, same_data
from rloo_cli.checkpoint.resume import Start
from rloo_cli.config import (
    check,
    hf_cache,
    registry,
    rules_lora,
    rules_model,
    rules_paths,
    synthetic,
    value_model,
)
from rloo_cli.config.prompt_limit import BACKENDS
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.user_code import code_notes
from rloo_cli.data import splits, vocabulary
from rloo_cli.data.bin_packing import Limits, rows_of
from rloo_cli.data.prompts import Prompts
from rloo_cli.data.synthetic.cache import heard
from rloo_cli.distributed import gather
from rloo_cli.distributed.engine import Copies, Engine
from rloo_cli.distributed.fsdp import Sharded
from rloo_cli.distributed.optimizer import Optimizer
from rloo_cli.distributed.world import World, join
from rloo_cli.distributed.zero import Zero
from rloo_cli.evaluation.judges import judge as judging
from rloo_cli.evaluation.judges.judge import Judge
from rloo_cli.generation import Generator
from rloo_cli.generation.common.rank0_proxy import Led
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.common.stop_rule import stop_ids
from rloo_cli.generation.hf.replica import Replica
from rloo_cli.generation.vllm import arguments
from rloo_cli.policy import layouts, load, lora, memory, reference, reward_load, value
from rloo_cli.policy.layouts import Level
from rloo_cli.policy.model import Policy
from rloo_cli.policy.reference import Reference
from rloo_cli.policy.value import Critic
from rloo_cli.reporting.display import Display
from rloo_cli.reporting.log import Log
from rloo_cli.reporting.prompt_ledger import Ledger
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.columns import check_splits
from rloo_cli.rewards.engine.ready import ready, rewards_of
from rloo_cli.run import Run
from rloo_cli.utils import paths
from rloo_cli.utils.device_waits import wait_for_device
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.fault_injection import fault
from rloo_cli.utils.files import read_json
from rloo_cli.utils.timers import Clock

RewardFunctions = Mapping[str, Callable[..., Any]]  # rewards given as Python callables, by name
ENGINES: dict[str, type[Engine]] = {
    "single": Engine, "ddp": Copies, "fsdp2": Sharded, "zero1": Zero, "zero2": Zero, "zero3": Zero,
}  # fmt: skip


def build_run(
    config: RunConfig,
    folder: Path,
    functions: RewardFunctions | None = None,
    start: Start | None = None,
) -> Run:
    """Build every part of a run. `functions`: rewards given as Python callables, by name.

    `start`: where it goes on; its folder is brought back to there once everything fits.
    Raises RunError: DataError (4) and ConfigError (2) before any weights load.
    """
    start = start or Start(folder)
    builder = RunBuilder(check.resolved(config), start)
    builder.load_data(functions or {})
    builder.load_tokenizer()
    builder.prepare_rewards()
    builder.load_model()
    builder.start_engine()
    builder.start_generator()
    builder.choose_layouts()
    run = builder.run()
    begin(run, start)
    return run


class RunBuilder:
    """The parts of a run as far as they are built; each phase needs those before it."""

    # of load_data
    opened: dict[str | None, Any]
    rewards: list[Reward]
    # of load_tokenizer
    tokenizer: Any
    context: int | None  # tokens that the model was made for; None = not known
    prepared: dict[str | None, Prompts]  # by held-out set; None = those to train on
    steps: int
    # of prepare_rewards
    judge: Judge | None
    # of load_model
    policy: Policy
    reference: Reference | None
    value_model: Critic | None
    reward_bytes: float  # of the device, that reward models have
    # of start_engine
    optimizer: Optimizer
    # of start_generator
    generator: Generator
    # of choose_layouts
    level: Level
    limits: Limits

    def __init__(self, config: RunConfig, start: Start):
        self.config, self.start = config, start
        self.algorithm: Algorithm[Switches] = load_algorithm(config.algorithm)
        self.world = join(config)
        logging, world = config.logging, self.world
        self.log = Log(start.folder, logging.every, logging.samples_every, logging.trl_aliases)
        self.log.writes, self.log.same = world.is_main, lambda row: dict(world.say(row))
        if world.is_main:
            shown = panel_head(config, self.algorithm.config.beta, start.folder)
            self.log.display = Display(shown, logging.console, logging.samples)

    @property
    def prompts(self) -> Prompts:
        """Those to train on."""
        return self.prepared[None]

    def load_data(self, functions: RewardFunctions) -> None:
        """Data sets are opened, rewards made, and each has the columns that it asks for."""
        self.log.phase("loading data")
        self.opened = splits.load(self.config)
        self.rewards = rewards_of(self.config, functions)
        for note in [*code_notes(self.config), *rules_model.notes(self.config)]:
            self.log.note(note)
        check_splits(self.config, self.opened, self.rewards)
        for path in rules_paths.made_models(self.config):
            self.log.phase(f"finding or making {path} in {paths.cache()}")
            with heard(self.log.progress):
                self.world.first(lambda path=path: synthetic.folder(path))  # type: ignore[misc]

    def load_tokenizer(self) -> None:
        """Prompts as tokens; how many steps there are. Raises DataError."""
        config, log = self.config, self.log
        log.phase("loading the tokenizer")
        self.tokenizer = load.tokenizer(config.model)
        self.context = load.context_length(config.model)
        self.prepared = splits.tokenised(config, self.opened, self.tokenizer, self.context)
        notes = _check_tokens(config, self.tokenizer, self.prepared)
        notes += splits.all_notes(config, self.prepared, self.context)
        for note in [*notes, *splits.shown_prompt(self.prompts, self.tokenizer)]:
            log.note(note)
        self.steps = count_steps(config, len(self.prompts))

    def prepare_rewards(self) -> None:
        """What rewards load or start, and the judge of held-out completions."""
        held_out = {name: p for name, p in self.prepared.items() if name is not None}
        self.judge = judging.make(self.config, held_out, self.tokenizer, training=True)
        same_data(self.start, self.prompts, self.config)
        self.log.phase("making rewards ready")
        length = self.config.generation.max_completion_length
        judge = self.judge
        own = [judge.reward] if judge is not None and judge.reward is not None else []
        rewards = [*self.rewards, *own]
        ready(
            rewards, self.tokenizer, self.prepared, length, self.world.device, self.log.note,
            reward_load,
        )  # fmt: skip

    def load_model(self) -> None:
        """Policy, reference and value model, each where and as the engine wants it."""
        self.log.phase("loading the model")
        fault("load")
        self.engine = ENGINES[self.config.distributed.engine](self.world, self.config)
        self.reward_bytes = memory.held_now(self.world.device)
        self.policy = self._policy()
        self.reference = self._reference() if self.algorithm.config.needs_reference else None
        self.value_model = self._value_model() if value_model.wanted(self.config) else None

    def _policy(self) -> Policy:
        config, device = self.config, self.world.device
        source = None
        if self.engine.sharded:
            path = str(self.start.checkpoint or config.model.path)
            model, source = _load(config, self.engine, path)
        else:
            model = lora.model(config.model, self.start.checkpoint, device, config.seed)
        model.train()
        policy = Policy(model, config.generation.temperature, self._kl_temperature, device)
        policy.source = source
        return policy

    @property
    def _kl_temperature(self) -> float:
        one = self.algorithm.config.kl_temperature == "one"
        return 1.0 if one else self.config.generation.temperature

    def _reference(self) -> Reference:
        """The frozen model that the policy is measured to."""
        config, device = self.config, self.world.device
        if self.engine.sharded:
            path = config.model.ref_path or config.model.path
            model, source = _load(config, self.engine, path)
            frozen = Reference(model, self._kl_temperature, device=device)
            frozen.source = source
        else:
            frozen = reference.build(
                config.model, self.policy, device, self._kl_temperature, config.seed
            )
        same_vocabulary(self.policy, frozen)
        return frozen

    def _value_model(self) -> Critic:
        """The value model of the algorithm; the engine learns of it before it spreads."""

        def read(path: str, revision: str | None) -> dict[str, Any]:
            return hf_cache.config(synthetic.folder(path), revision)

        readers = [r.code.reader for r in self.rewards if r.config.type == "model"]  # type: ignore[attr-defined]
        alike = all(vocabulary.same_words(self.tokenizer, reader.own) for reader in readers)
        beginning = value_model.beginning(self.config, read, alike)
        device = self.world.device
        critic = value.build(self.config.model, beginning, self.policy.words, device)
        head = "a head of zeros" if critic.new else "its head"
        self.log.note(f"the value model begins as {beginning.path} ({beginning.why}), with {head}")
        self.engine.beside = critic.model
        return critic

    def start_engine(self) -> None:
        """The models are spread over the ranks, with an optimizer for those that learn."""
        self.optimizer = self.engine.spread(self.policy, self.steps * self.config.updates_per_step)
        if self.reference is not None:
            self.engine.freeze(self.reference)

    def start_generator(self) -> None:
        """Who samples, here or for all ranks."""
        config, policy, world, engine = self.config, self.policy, self.world, self.engine
        _check_adapter(config, policy, self.log)
        _check_cache(config, policy.model)
        ends = stop_ids(self.tokenizer, policy.model, config.generation)
        vocabulary.check_endings(ends, policy.words, config.generation)
        name = config.generation.backend
        if name != "transformers":  # an engine of its own takes a minute to start
            self.log.phase(f"waiting for the sampler ({name}) to answer")

        def units() -> Iterator[dict[str, Tensor]]:
            return gather.of_units(engine, policy.model, _sampled_in(config, policy))

        if name == "vllm_server" and (world.size > 1 or engine.sharded):
            self.generator = Led(world, policy, units, self._backend)
        elif not engine.sharded:
            self.generator = _never_alone(self._backend(), world)
        elif name == "transformers":
            path = config.model.path  # its weights are replaced before it samples
            copy = load.model(config.model, path, world.device)
            generator = self._backend(copy.eval().requires_grad_(False))
            self.generator = Replica(generator, copy, units)
        else:
            policy.pieces = units
            self.generator = _never_alone(self._backend(), world)

    def _backend(self, model: Any = None) -> Generator:
        """The generator of the config's backend, over the policy's model or another."""
        name = registry.module("generation", self.config.generation.backend).IMPLEMENTATION
        generator: Generator = registry.load_code(name)(
            self.policy.model if model is None else model, self.tokenizer, self.config,
            self.context, self.start.folder, self.log.note,
        )  # fmt: skip
        return generator

    def choose_layouts(self) -> None:
        """How completions are laid out for each model, and how many a forward pass may have."""
        self.log.phase("checking layouts")
        policy, frozen, critic = self.policy, self.reference, self.value_model
        length, wanted = self.config.generation.max_completion_length, self.config.train.layout
        longest = self.prompts.longest + length
        for model in (policy, frozen) if frozen is not None else (policy,):
            model.scorer.float32 = self.config.model.lm_head_fp32
        level = layouts.settle(policy, wanted, longest)
        # The fused head's entropy has no gradient.
        if self.algorithm.config.entropy_coef > 0:
            policy.scorer.fused, policy.scorer.entropy_grad = False, True
            why = f"{level.why}; entropy bonus".lstrip("; ")
            level = replace(level, head="model", why=why)
        if frozen is not None and self.config.model.ref_path is None:
            layouts.follow(frozen, policy)
        elif frozen is not None:
            with frozen.there():
                layouts.settle(frozen, wanted, longest)
        if critic is not None and (reason := critic.settle(wanted, longest)):
            self.log.note(f"the value model's rows are {critic.layout} ({reason})")
        if self.config.train.compile:
            _compile(policy, frozen, self.log)
        self.level, self.limits = level, self._limits(level, longest)

    def _limits(self, level: Level, longest: int) -> Limits:
        """How much a forward pass may have; the same on all ranks."""
        policy, frozen, critic = self.policy, self.reference, self.value_model
        k, length = self.config.algorithm.num_generations, self.config.generation
        completions = [length.max_completion_length] * k
        group = rows_of(self.prompts.longest, completions, level.layout)
        second = frozen is not None and frozen.own and not frozen.offloaded
        if critic is not None:
            critic.wide = rows_of(self.prompts.longest, completions, critic.layout) / group
        least = longest if frozen is None else group  # a group with a KL should not be cut
        own = memory.limits(
            policy, self.config, group, second, _share(self.engine), critic, least,
            self.reward_bytes,
        )  # fmt: skip
        found = min(self.world.gather(own), key=lambda limits: limits.rows)
        size = f"{found.rows} rows"
        if found.completions is not None:
            size = f"{found.completions} completions"
        again = ", recomputed in backward" if policy.model.is_gradient_checkpointing else ""
        self.log.note(f"rows are {level}; at most {size} a forward{again}")
        return found

    def run(self) -> Run:
        """The parts together."""
        config, prompts, clock = self.config, self.prompts, Clock(self.log.phase, wait_for_device)
        return Run(
            config=config,
            folder=self.start.folder,
            world=self.world,
            engine=self.engine,
            algorithm=self.algorithm,
            plan=self.algorithm.forward_plan(config),
            tokenizer=self.tokenizer,
            prompts=prompts,
            sets={name: p for name, p in self.prepared.items() if name is not None},
            policy=self.policy,
            reference=self.reference,
            critic=self.value_model,
            generator=self.generator,
            rewards=self.rewards,
            rollouts=Rollouts(
                config, self.algorithm, prompts, self.generator, self.rewards, clock, self.world
            ),
            optimizer=self.optimizer,
            clock=clock,
            log=self.log,
            steps=self.steps,
            limits=self.limits,
            level=self.level,
            ledger=Ledger(self.start.folder),
            attempt=self.start.attempt,
            judge=self.judge,
        )


def _check_tokens(
    config: RunConfig, tokenizer: Any, prepared: Mapping[str | None, Prompts]
) -> list[str]:
    """Tokenizer, data, model and reference speak of the same tokens; notes. Raises ConfigError."""
    needed = config.algorithm.needs_reference
    reference = load.reference_tokenizer(config.model) if needed else None
    if reference is not None:
        vocabulary.check_reference(tokenizer, reference)
    return vocabulary.check_prompt_ids(tokenizer, load.vocabulary_size(config.model), prepared)


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


def _load(config: RunConfig, engine: Engine, path: str) -> tuple[Any, Any]:
    """A shell of a model that is to be sharded, and its source: rank 0 has the weights, in the
    CPU's memory."""
    world, real = engine.world, []

    def read() -> tuple[Any, Any]:
        real.append(load.model(config.model, path, gather.CPU, world.device))
        return real[0].config, real[0].generation_config

    shell = load.shell(config.model, world.first(read), world.device)
    return shell, gather.Shells(shell, real[0] if real else None)


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


def panel_head(config: RunConfig, beta: float, folder: Path) -> dict[str, Any]:
    """The lines at the head of the panel."""
    a, prompts = config.algorithm, config.train.prompts_per_step
    return {
        "name": config.name,
        "model": config.model.path,
        "algorithm": f"{a.name} K={a.num_generations} · P={prompts} · beta {beta}",
        "max_steps": config.max_steps,
        "folder": str(paths.shown(folder)),
        "recipe": read_json(folder / "run.json").get("recipe"),
    }


def count_steps(config: RunConfig, prompts: int) -> int:
    """Rollout batches to do. Raises DataError when a step needs more prompts than there are."""
    wanted = config.train.prompts_per_step
    if prompts < wanted:
        raise DataError(
            Problem(
                f"{prompts} prompts are fewer than one step needs",
                "train.prompts_per_step",
                f"it asks for {wanted} different prompts per step",
                f"train.prompts_per_step={prompts}",
            )
        )
    if config.max_steps is not None:
        return config.max_steps
    if config.total_episodes is not None:
        return math.ceil(config.total_episodes / config.episodes_per_step)
    assert config.train.epochs is not None
    return math.ceil(config.train.epochs * prompts / wanted)
