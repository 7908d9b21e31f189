"""Builds a `Run` from a config: every part once, in the order in which mistakes are cheapest.

The phases, each a method of `RunBuilder`: data, rewards, tokenizer, a teacher's server, model,
engine, generator, layouts. Data and rewards are checked before any weights load. `rloo replay`
builds a run without a sampler (inspection/replay_builder.py).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo_cli.agents.common import build as agent_build
from rloo_cli.agents.common.tool_set import ToolSet
from rloo_cli.algorithms.common.base import Algorithm, load_algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.checkpoint.restore import (
    check_same_code,
    check_same_data,
    check_same_teacher,
    start_attempt,
    template_clock_of,
)
from rloo_cli.checkpoint.resume import ResumePlan
from rloo_cli.checkpoint.save import VALUE_FILE
from rloo_cli.config import (
    hf_cache,
    rules_model,
    rules_paths,
    synthetic,
)
from rloo_cli.config.agent import agent_config, completion_token_limit
from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.config.user_code import code_files, user_code_notes
from rloo_cli.config.value_model import choose_value_init, needs_value_model
from rloo_cli.data import chat_templates, splits, vocabulary
from rloo_cli.data.bin_packing import ForwardLimits, forward_tokens
from rloo_cli.data.cache import listen_to_progress
from rloo_cli.data.dataset import OpenedSplit
from rloo_cli.data.image_rules import check_image_run
from rloo_cli.data.media import vision_of
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed import device_count, gather, meta_load
from rloo_cli.distributed.engine import ParallelEngine
from rloo_cli.distributed.optimizer import TrainingOptimizer
from rloo_cli.distributed.world import join_world
from rloo_cli.distributed.zero import build_engine
from rloo_cli.evaluation.judges import judge as judging
from rloo_cli.evaluation.judges.judge import Judge
from rloo_cli.generation import Generator
from rloo_cli.generation.common.ahead import AheadSampler
from rloo_cli.generation.common.batch_source import BatchSource
from rloo_cli.generation.common.carry import CARRY_NOTE, CarrySampler
from rloo_cli.generation.common.rank0_proxy import Rank0Proxy
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.common.stop_rule import stop_ids
from rloo_cli.generation.hf.generator import ReplicaGenerator
from rloo_cli.generation.vllm import arguments
from rloo_cli.generation.vllm.teacher import TeacherServer
from rloo_cli.policy import layouts, load, lora, memory, reference, reward_load, value
from rloo_cli.policy.layouts import LayoutChoice
from rloo_cli.policy.model import Policy
from rloo_cli.policy.reference import Reference
from rloo_cli.policy.value import ValueModel
from rloo_cli.reporting.display import Display
from rloo_cli.reporting.log import RunLog
from rloo_cli.reporting.panel import panel_header
from rloo_cli.reporting.prompt_ledger import PromptLedger
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.columns import check_reward_splits
from rloo_cli.rewards.engine.ready import build_rewards, run_ready_hooks
from rloo_cli.run import Run
from rloo_cli.utils import paths
from rloo_cli.utils.errors import ConfigError, DataError, refuse
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.timers import StepTimer, choose_phase_clock

RewardFunctions = Mapping[str, Callable[..., object]]  # rewards given as callables, by name


def build_run(
    config: RunConfig,
    folder: Path,
    functions: RewardFunctions | None = None,
    resume_plan: ResumePlan | None = None,
) -> Run:
    """Build every part of a run. `functions`: rewards given as Python callables, by name.

    `config`: with the keys that others stand for written out (`check.resolve_config`).
    `resume_plan`: where the run resumes; its folder is rolled back once everything fits. Raises
    RunError: DataError (4) and ConfigError (2) before any weights load.
    """
    return RunBuilder(config, resume_plan or ResumePlan(folder)).build_all(functions or {})


class RunBuilder:
    """The parts of a run as far as they are built; each phase needs those before it."""

    # set by load_data
    opened_splits: dict[str | None, OpenedSplit]
    rewards: list[Reward]
    tools: ToolSet | None  # those of the agent
    # set by load_tokenizer
    tokenizer: PreTrainedTokenizerBase
    context_length: int | None  # the model's context length; None = unknown
    prompts_by_set: dict[str | None, Prompts]  # by held-out set; None = those to train on
    num_steps: int
    # set by prepare_rewards
    judge: Judge | None
    # set by connect_teacher
    teacher: TeacherServer | None  # over HTTP
    # set by load_model
    policy: Policy
    reference: Reference | None
    value_model: ValueModel | None
    reward_bytes: float  # device memory of reward models, in bytes
    # set by start_engine
    optimizer: TrainingOptimizer
    # set by start_generator
    generator: Generator
    # set by choose_layouts
    layout_choice: LayoutChoice
    forward_limits: ForwardLimits

    def __init__(self, config: RunConfig, resume_plan: ResumePlan):
        self.config, self.resume_plan = config, resume_plan
        self.algorithm: Algorithm[Switches] = load_algorithm(config.algorithm)
        self.world = join_world(config)
        logging, world, folder = config.logging, self.world, resume_plan.folder
        self.log = RunLog(
            folder, logging.every, logging.samples_every, logging.trl_aliases,
            config.guards.model_dump(),
        )  # fmt: skip
        self.log.writes_files = world.is_main
        self.log.share_from_rank0 = lambda metrics: dict(world.broadcast_from_rank0(metrics))
        if world.is_main:
            header = panel_header(config, self.algorithm.config.beta, folder)
            self.log.display = Display(header, logging.console, logging.samples)

    def build_all(self, functions: RewardFunctions) -> Run:
        """Build the run, phase after phase, and take over its folder (`build_run`)."""
        try:
            self.load_data(functions)
            self.load_tokenizer()
            self.prepare_rewards()
            self.connect_teacher()
            self.load_model()
            self.start_engine()
            self.start_generator()
            self.choose_layouts()
            run = self.assemble_run()
        except torch.OutOfMemoryError as error:
            error.add_note(self.log.current_phase)  # the error names it
            raise
        start_attempt(run, self.resume_plan)
        return run

    @property
    def prompts(self) -> Prompts:
        """The prompts to train on."""
        return self.prompts_by_set[None]

    def load_data(self, functions: RewardFunctions) -> None:
        """Open data sets, build rewards, and check that they have the columns they need."""
        self.log.phase("loading data")
        notes = self.check_user_code()
        with listen_to_progress(self.log.progress):
            self.opened_splits = splits.open_splits(self.config, ranks=self.world)
        self.rewards = build_rewards(self.config.rewards, functions)
        self.tools = self.load_tools()
        model, allow_moe = self.config.model, self.config.generation.allow_moe
        for note in [*notes, *rules_model.model_file_notes(model, allow_moe)]:
            self.log.note(note)
        check_reward_splits(self.config, self.opened_splits, self.rewards)
        for path in rules_paths.synthetic_model_paths(rules_paths.named_paths(self.config)):
            self.log.phase(f"finding or making {path} in {paths.cache_folder()}")
            with listen_to_progress(self.log.progress):
                self.world.run_on_rank0(lambda path=path: synthetic.resolve_model_path(path))  # type: ignore[misc]

    def check_user_code(self) -> list[str]:
        """Notes on user code. Raises ConfigError if it has changed since the checkpoint."""
        return check_same_code(self.resume_plan, self.config) + user_code_notes(self.config)

    def load_tools(self) -> ToolSet | None:
        """The descriptions of the agent's tools. Raises ConfigError."""
        return agent_build.load_tool_set(agent_config(self.config))

    def load_tokenizer(self) -> None:
        """Tokenize the prompts, and count the steps. Raises DataError."""
        config, log = self.config, self.log
        log.phase("loading the tokenizer")
        clock = self.world.run_on_rank0(lambda: template_clock_of(self.resume_plan))
        chat_templates.set_template_clock(clock)
        self.tokenizer = load.load_policy_tokenizer(config.model)
        self.context_length = load.read_max_positions(config.model)
        allow_moe = config.generation.allow_moe  # a hub model's files are downloaded now
        if problems := [*rules_model.expert_problems(config.model, allow_moe)]:
            raise ConfigError(*problems)
        tools_of = None if self.tools is None else self.tools.schemas_of
        with listen_to_progress(log.progress):
            self.prompts_by_set = splits.tokenize_splits(
                config, self.opened_splits, self.tokenizer, self.context_length, tools_of,
                load.read_vocab_size(config.model), self.world,
            )  # fmt: skip
        if any(prompts.media for prompts in self.prompts_by_set.values()):
            self.check_images()
        notes = self._check_vocabularies()
        notes += splits.data_notes(config, self.prompts_by_set, self.context_length)
        for note in [*notes, *splits.describe_first_prompt(self.prompts, self.tokenizer)]:
            log.note(note)
        self.num_steps = self._count_steps()
        log.token_samples = config.logging.token_samples
        log.decode_token = lambda token: str(self.tokenizer.decode([token]))

    def _check_vocabularies(self) -> list[str]:
        """Check that tokenizer, data, model and reference have the same tokens. -> notes

        Raises ConfigError.
        """
        keys, needed = self.config.model, self.algorithm.config.needs_reference
        other = load.load_reference_tokenizer(keys) if needed else None
        if other is not None:
            vocabulary.check_reference_tokenizer(self.tokenizer, other)
        vocab_size = load.read_vocab_size(keys)
        return vocabulary.check_prompt_ids(self.tokenizer, vocab_size, self.prompts_by_set)

    def _count_steps(self) -> int:
        """The number of rollout batches. Raises DataError if one step needs more prompts."""
        wanted, num_prompts = self.config.train.prompts_per_step, len(self.prompts)
        if num_prompts < wanted:
            refuse(
                "train.prompts_per_step",
                f"one step needs more than the {num_prompts} prompts of the data",
                f"train.prompts_per_step={num_prompts}",
                f"it needs {wanted} different prompts per step",
                error=DataError,
            )
        steps = self.config.num_steps(num_prompts)
        assert steps is not None, "config.rules requires one of the three keys"
        return steps

    def check_images(self) -> None:
        """Raise ConfigError or DataError if prompts have images that this run does not support."""
        check_image_run(self.config, bool(device_count.visible_gpus()))

    def prepare_rewards(self) -> None:
        """Let rewards load what they need, and build the judge of held-out completions."""
        held_out = {name: p for name, p in self.prompts_by_set.items() if name is not None}
        self.judge = judging.build_judge(
            self.config.eval, self.config.seed, held_out, self.tokenizer, training=True
        )
        specs, allowed = code_files(self.config), self.config.resume_allow_changes
        check_same_data(self.resume_plan, self.prompts, specs, allowed, self.world.is_main)
        self.log.phase("loading the rewards")
        judge_reward = None if self.judge is None else self.judge.reward
        run_ready_hooks(
            [*self.rewards, *([] if judge_reward is None else [judge_reward])],
            self.tokenizer, self.prompts_by_set, self.config.generation.max_completion_length,
            self.world.device, self.log.note, reward_load,
        )  # fmt: skip

    def connect_teacher(self) -> None:
        """Wait for a teacher on a server, and check that it fits the student."""
        keys, self.teacher = self.algorithm.config.teacher_server, None
        if keys is None:
            return
        teacher = self.teacher = TeacherServer(keys, self.log.note)
        self.log.phase(f"waiting for the teacher at {teacher.url} to answer")
        longest = self.prompts.max_length + self._completion_limit
        teacher.model = self.world.run_on_rank0(lambda: teacher.connect(self.tokenizer, longest))
        if not self.config.resume_allow_changes:
            check_same_teacher(self.resume_plan, teacher.model)
        self.log.note(f"the teacher is {teacher.model} at {teacher.url}")

    def load_model(self) -> None:
        """Load policy, reference and value model, as the parallel engine needs them."""
        self.log.phase("loading the model")
        trigger_fault("load")
        self.engine = build_engine(
            self.world, self.config.train, self.config.distributed, self.config.model.lora
        )
        self.reward_bytes = memory.allocated_bytes(self.world.device)
        self.policy = self._load_policy()
        self.reference = self._load_reference() if self.algorithm.config.needs_reference else None
        self.value_model = (
            self._load_value_model() if needs_value_model(self.config.algorithm) else None
        )

    def _load_policy(self) -> Policy:
        config, device = self.config, self.world.device
        checkpoint, meta_weights = self.resume_plan.checkpoint, None
        if self.engine.sharded:
            model, meta_weights = meta_load.load_policy_shell(
                config.model,
                config.seed,
                self.world,
                checkpoint,
                self.algorithm.config.needs_reference,
            )
        else:
            model = lora.load_trained_model(config.model, checkpoint, device, config.seed)
        model.train()
        policy = Policy(model, config.generation.temperature, self._kl_temperature, device)
        policy.meta_weights = meta_weights
        return policy

    @property
    def _kl_temperature(self) -> float:
        one = self.algorithm.config.kl_temperature == "one"
        return 1.0 if one else self.config.generation.temperature

    def _load_reference(self) -> Reference:
        """Load the frozen model that the KL refers to."""
        config, device = self.config, self.world.device
        on_policy_base = config.model.lora is not None and config.model.ref_path is None
        if self.engine.sharded and not on_policy_base:
            path = config.model.ref_path or config.model.path
            model, meta_weights = meta_load.load_frozen_shell(config.model, self.world, path)
            frozen = Reference(model, self._kl_temperature, device=device)
            frozen.meta_weights = meta_weights
        else:
            frozen = reference.build_reference(
                config.model, self.policy, device, self._kl_temperature, config.seed
            )
        vocabulary.check_vocabulary_sizes(self.policy.vocab_size, frozen.vocab_size)
        return frozen

    def _load_value_model(self) -> ValueModel:
        """Load the algorithm's value model, before the engine distributes the policy."""

        def read(path: str, revision: str | None) -> JsonObject:
            return hf_cache.read_model_config(synthetic.resolve_model_path(path), revision)

        readers = [r.code.reader for r in self.rewards if r.config.type == "model"]  # type: ignore[attr-defined]
        alike = all(vocabulary.same_token_ids(self.tokenizer, r.tokenizer) for r in readers)
        init = choose_value_init(self.config.model, self.config.rewards, read, alike)
        vocab_size, device = self.policy.vocab_size, self.world.device
        keys, checkpoint, meta_weights = self.config.model, self.resume_plan.checkpoint, None
        saved = None if checkpoint is None else checkpoint / "trainer" / f"{VALUE_FILE}.safetensors"
        if self.engine.sharded:
            model, new_head, meta_weights = meta_load.load_value_shell(
                keys, self.world, init, saved
            )
        else:
            model, new_head = value.load_value_weights(keys, init, device, saved=saved)
        value_model = value.build_value_model(model, new_head, init, vocab_size, device)
        value_model.meta_weights = meta_weights
        head = "a zero head" if value_model.new_head else "its head"
        self.log.note(f"the value model starts from {init.path} ({init.why}), with {head}")
        self.engine.value_model = value_model
        return value_model

    def start_engine(self) -> None:
        """Distribute the models over the ranks, and build the optimizer."""
        num_updates = self.num_steps * self.config.updates_per_step
        self.optimizer = self.engine.distribute_policy(self.policy, num_updates)
        if self.reference is not None and self.reference.is_second_model:
            self.engine.distribute_frozen(self.reference)

    def start_generator(self) -> None:
        """Build the generator, of this rank or of all ranks."""
        config, policy, world, engine = self.config, self.policy, self.world, self.engine
        _check_adapter(config.generation, policy, self.log)
        if config.generation.samples_here:
            _check_kv_cache(policy.model)
        policy.vision = agent_build.load_episode_vision(config, self.tokenizer)
        end_ids = stop_ids(self.tokenizer, policy.model, config.generation)
        vocabulary.check_stop_tokens(end_ids, policy.vocab_size, config.generation)
        generation = config.generation
        if generation.is_engine:  # it takes a minute to start
            self.log.phase(f"waiting for the sampler ({generation.backend}) to answer")

        def weights() -> Iterator[dict[str, Tensor]]:
            if lora.has_adapter(policy.model):
                return gather.iter_gathered_adapter(engine, policy.model)
            dtype = self._sampler_dtype()
            return gather.iter_gathered_weights(engine, policy.model, dtype)

        if generation.is_server and (world.size > 1 or engine.sharded):
            self.generator = Rank0Proxy(world, policy, weights, self._build_backend)
        elif generation.samples_here and (engine.sharded or generation.overlap != "none"):
            # Its weights, or its adapter's, are replaced before it samples.
            copy = lora.load_trained_model(config.model, None, world.device, config.seed)
            inner = self._build_backend(copy.eval().requires_grad_(False))
            self.generator = ReplicaGenerator(inner, copy, weights)
        else:
            if engine.sharded:
                policy.gather_weights = weights
            self.generator = self._build_backend()
            if world.size > 1:  # all ranks gather weights together, or send handles
                self.generator.forbid_recovery()

    def _build_backend(self, model: PreTrainedModel | None = None) -> Generator:
        """Build the generator of the config's backend, with the policy's model or another."""
        return agent_build.build_generator(
            self.policy.model if model is None else model, self.tokenizer, self.config,
            self.context_length, self.resume_plan.folder, self.log.note, self.tools,
            self.policy.vision,
        )  # fmt: skip

    def _sampler_dtype(self) -> torch.dtype:
        """The dtype that the sampler computes in: shards are cast to it before they are sent."""
        generation = self.config.generation
        if not generation.is_engine:
            return self.policy.dtype
        name = arguments.engine_dtype(self.config.model, generation.own_keys)
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def choose_layouts(self) -> None:
        """Choose each model's layout, and how much a forward pass may hold."""
        self.log.phase("checking layouts")
        policy, frozen, value_model = self.policy, self.reference, self.value_model
        wanted = self.config.train.layout
        max_length = self.prompts.max_length + self._completion_limit
        for model in (policy, frozen) if frozen is not None else (policy,):
            model.logprob_module.float32_head = self.config.model.lm_head_fp32
            model.image_examples = self.prompts.image_examples()
            if self.engine.lockstep:
                model.blank_vision = policy.vision or vision_of(self.prompts.media)
        choice = layouts.choose_policy_layout(policy, wanted, max_length)
        # The fused head's entropy has no gradient.
        if self.algorithm.config.has_entropy_bonus:
            policy.logprob_module.use_fused_head, policy.logprob_module.entropy_grad = False, True
            choice = choice.with_model_head("entropy bonus")
        if frozen is not None and self.config.model.ref_path is None:
            layouts.copy_layout(frozen, policy)
        elif frozen is not None:
            with frozen.on_device():
                layouts.choose_policy_layout(frozen, wanted, max_length)
        beta = self.algorithm.config.teacher_jsd_beta
        if beta is not None and frozen is not None:
            choice = layouts.share_layout(policy, frozen, choice, max_length)
            policy.teacher = (frozen, beta)
        if value_model is not None and (reason := value_model.choose_layout(wanted, max_length)):
            self.log.note(f"the value model's rows are {value_model.layout} ({reason})")
        if self.config.train.compile:
            _compile_layers(policy, frozen, self.log)
        self.layout_choice, self.forward_limits = choice, self._choose_limits(choice, max_length)

    @property
    def _completion_limit(self) -> int:
        """The most tokens of a completion; of an episode, including its tools' answers."""
        context, prompt = self.context_length, self.prompts.max_length
        room = None if context is None else context - prompt
        most = self.config.generation.max_completion_length
        return completion_token_limit(agent_config(self.config), most, room)

    def _choose_limits(self, layout_choice: LayoutChoice, max_length: int) -> ForwardLimits:
        """How much a forward pass may hold; the same on all ranks."""
        policy, frozen, value_model = self.policy, self.reference, self.value_model
        config, prompt_length = self.config, self.prompts.max_length
        completions = [self._completion_limit] * config.algorithm.num_generations
        group = forward_tokens(prompt_length, completions, layout_choice.layout)
        second = frozen is not None and frozen.is_second_model and not frozen.offloaded
        if value_model is not None:
            tokens = forward_tokens(prompt_length, completions, value_model.layout)
            value_model.tokens_per_policy_token = tokens / group
        alone = frozen is None and self.teacher is None
        least = max_length if alone else group  # a group with a KL should not be split
        rank_limits = memory.measure_forward_limits(
            policy, config.model, config.train, config.generation, group, second,
            _weights_share(self.engine), value_model, least, self.reward_bytes,
        )  # fmt: skip
        limits = min(self.world.gather(rank_limits), key=lambda limits: limits.tokens)
        size = f"{limits.tokens} tokens"
        if limits.completions is not None:
            size = f"{limits.completions} completions"
        again = ", recomputed in backward" if load.has_gradient_checkpointing(policy.model) else ""
        self.log.note(f"rows are {layout_choice}; at most {size} a forward{again}")
        return limits

    def assemble_run(self) -> Run:
        """Put the parts into a `Run`."""
        config, prompts = self.config, self.prompts
        clock = StepTimer(self.log.phase, choose_phase_clock(self.world.device))
        rollouts = Rollouts(
            config, self.algorithm, prompts, self.generator, self.rewards, clock, self.world
        )
        return Run(
            config=config,
            folder=self.resume_plan.folder,
            world=self.world,
            engine=self.engine,
            algorithm=self.algorithm,
            forward_plan=self.algorithm.forward_plan(config),
            tokenizer=self.tokenizer,
            prompts=prompts,
            eval_sets={name: p for name, p in self.prompts_by_set.items() if name is not None},
            policy=self.policy,
            reference=self.reference,
            teacher=self.teacher,
            value_model=self.value_model,
            generator=self.generator,
            rewards=self.rewards,
            rollouts=rollouts,
            source=self.choose_source(rollouts),
            optimizer=self.optimizer,
            clock=clock,
            log=self.log,
            num_steps=self.num_steps,
            forward_limits=self.forward_limits,
            layout_choice=self.layout_choice,
            ledger=PromptLedger(self.resume_plan.folder),
            attempt=self.resume_plan.attempt,
            tools=self.tools,
            judge=self.judge,
        )

    def choose_source(self, rollouts: Rollouts) -> BatchSource:
        """The source of the batches: the rollouts, or a sampler that runs during the updates."""
        overlap = self.config.generation.overlap
        if overlap == "ahead":
            return AheadSampler(rollouts)
        if overlap == "carry":
            self.log.note(CARRY_NOTE)
            return CarrySampler(rollouts, self.generator.carrying(), self.num_steps)
        return rollouts


def _check_adapter(generation: GenerationConfig, policy: Policy, log: RunLog) -> None:
    """Log if an adapter reaches the experts of a mixture.

    Raises ConfigError if the inference engine cannot apply that, or an adapter in a vision tower.
    """
    has_adapter = lora.has_adapter(policy.model)
    if has_adapter and generation.is_engine:
        _check_adapted_tower(generation.backend, policy.model)
    parts = lora.adapted_parameters(policy.model) if has_adapter else []
    if not parts:
        return
    kinds = ", ".join(sorted({".".join(name.split(".")[-2:]) for name in parts}))
    linear = ",".join(lora.linear_targets(policy.model))
    if generation.is_engine:
        why = f"adapted parameters that are not linear layers: {kinds}; vLLM does not support those"
        fix = f"model.lora.target_modules=[{linear}], or generation=transformers"
        what = f"{generation.backend} cannot sample with this adapter"
        refuse("model.lora.target_modules", what, fix, why)
    log.note(
        f"the adapter is in {kinds} ({len(parts)} parameters) besides the linear layers;"
        f" without them: model.lora.target_modules=[{linear}]"
    )


def _check_adapted_tower(backend: str, model: PreTrainedModel) -> None:
    """Raise ConfigError for an adapter in a vision tower, which vLLM would ignore."""
    beside = lora.adapted_beside_language(model)
    if not beside:
        return
    shared = {name.split(".")[-3] for name in beside}
    own = [name for name in lora.linear_targets(model) if name not in shared]
    what = f"{backend} cannot sample with this adapter"
    why = f"it is also in the vision tower ({beside[0]}); vLLM adapts only the language model"
    fix = f"model.lora.target_modules=[{','.join(own)}], or " if own else ""
    fix += "generation=transformers"
    refuse("model.lora.target_modules", what, fix, why)


def _check_kv_cache(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model whose state our own decoding cannot pass on."""
    arguments_taken = inspect.signature(model.forward).parameters
    other = [name for name in ("cache_params", "state") if name in arguments_taken]
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"]
    why = ""
    if other and "past_key_values" not in arguments_taken:
        why = f"it keeps its own state ({other[0]}) instead of past_key_values"
    elif not any(k.endswith("attention") and k != "linear_attention" for k in kinds):
        why = f"none of its layers has keys and values to cache: {', '.join(dict.fromkeys(kinds))}"
    if why:
        what = f"{type(model).__name__} is not supported by generation=transformers"
        refuse("generation", what, "generation=vllm_server", why)


def _compile_layers(policy: Policy, reference_model: Reference | None, log: RunLog) -> None:
    """Compile each decoder layer by itself, for any number of tokens.

    One compilation serves all layers, and weights may be sharded or replaced.
    """
    models = [policy.model]
    if reference_model is not None and reference_model.is_second_model:
        models.append(reference_model.model)
    for layer in (layer for model in models for layer in gather.decoder_layers(model)):
        layer.compile(dynamic=True)
    log.note("decoder layers are compiled at first use, which takes a minute")


def _weights_share(engine: ParallelEngine) -> tuple[float, int]:
    """The share of weights and optimizer that a rank holds, and how many ranks share its memory."""
    share = 1 / engine.world.size if engine.sharded else 1.0
    return share, engine.world.local_world_size
