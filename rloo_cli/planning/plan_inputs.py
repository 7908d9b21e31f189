"""The inputs of a plan: config, models, device, ranks, lengths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from rloo_cli.config import prompt_limit, value_model
from rloo_cli.config.agent import (
    EpisodeConfig,
    agent_config,
    completion_token_limit,
    sampled_token_limit,
)
from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.config.schema import (
    AlgorithmConfig,
    DatasetConfig,
    GenerationConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
)
from rloo_cli.distributed import device_count
from rloo_cli.planning import model_spec
from rloo_cli.planning.device import Device
from rloo_cli.planning.model_counts import ModelSpec

if TYPE_CHECKING:
    from rloo_cli.rewards.model import Config as RewardModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_LOGITS_TILE = {"cpu": 2**20, "cuda": 2**25}  # logits at once, as in `policy.fused_head`


@dataclass(frozen=True)
class PlanInputs:
    """One run on one kind of device."""

    run: RunConfig
    model: ModelSpec
    device: Device
    ranks: int  # training processes, over all machines
    max_prompt_tokens: int
    reference_model: ModelSpec | None = None  # a second model in memory; None = none
    value_model: ModelSpec | None = None  # trained with the policy
    reward_models: dict[str, ModelSpec] = field(default_factory=dict)
    token_budget: int | None = None  # tokens of a forward, as chosen by a run
    recompute: bool | None = None  # gradient checkpointing, as chosen by a run
    layout: str = ""  # as chosen by a run

    @property
    def bytes_per_weight(self) -> int:
        """Bytes of a working weight."""
        return self.dtype_bytes(self.run.model.dtype)

    @property
    def parallel_strategy(self) -> str:
        return self.run.distributed.engine

    @property
    def weight_shards(self) -> int:
        """The number of shards of the weights."""
        return self.ranks if self.parallel_strategy in SHARDED_ENGINES else 1

    @property
    def agent(self) -> EpisodeConfig | None:
        """The agent's keys; None for one answer to each prompt."""
        return agent_config(self.run)

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens of a completion; for an episode, including tool output."""
        context = self.model.context_length
        room = None if context is None else context - self.max_prompt_tokens
        length = self.run.generation.max_completion_length
        return completion_token_limit(self.agent, length, room)

    @property
    def max_sampled_tokens(self) -> int:
        """Most tokens of a completion sampled by the policy, over all its turns."""
        most = sampled_token_limit(self.agent, self.run.generation.max_completion_length)
        return min(most, self.max_completion_tokens)

    @property
    def max_turns(self) -> int:
        """Most sampled turns of a completion."""
        return 1 if self.agent is None else self.agent.max_turns

    @property
    def groups_per_update(self) -> int:
        """Most groups of one rank in one optimizer update."""
        each = -(-self.run.train.prompts_per_step // self.run.algorithm.num_minibatches)
        return -(-each // self.ranks)

    @property
    def prompts_per_rank(self) -> int:
        """Prompts of one rank in one step."""
        return -(-self.run.train.prompts_per_step // self.ranks)

    @property
    def group_tokens(self) -> int:
        """Tokens of a forward over one group with the longest prompt and completions."""
        k, p = self.run.algorithm.num_generations, self.max_prompt_tokens
        c = self.max_completion_tokens
        return p + k * c if self.resolved_layout == "shared" else k * (p + c)

    @property
    def resolved_layout(self) -> str:
        """The layout of forward passes."""
        wanted = self.layout or self.run.train.layout
        longest = self.max_prompt_tokens + self.max_completion_tokens
        return self.model.layout_for(longest) if wanted == "auto" else wanted

    def dtype_bytes(self, dtype: str) -> int:
        """Bytes per number of a dtype name; auto is bfloat16 on a GPU."""
        if dtype == "auto":
            return 2 if self.device.kind == "cuda" else 4
        return DTYPE_BYTES[dtype]

    def with_ranks(self, ranks: int) -> "PlanInputs":
        """The same run on another number of ranks."""
        return replace(self, ranks=ranks)


def collect_plan_inputs(run: RunConfig, device: Device, count: int | None = None) -> PlanInputs:
    """The inputs of a config's plan. `count`: ranks; None = the config's, or this machine's GPUs.

    Raises MachineError if a model's config.json was not found.
    """
    model = model_spec.load_model_spec(run.model.path, run.model.revision)
    training = [*run.data.mixture_sources.values()] or [run.data]
    has_reference, nodes = run.algorithm.needs_reference, run.distributed.num_nodes
    return PlanInputs(
        run=run,
        model=model,
        device=device,
        ranks=count or nodes * device_count.local_process_count(run.distributed, run.generation),
        max_prompt_tokens=_longest_prompt(
            run.generation, agent_config(run), training, model.context_length
        ),
        reference_model=reference_spec(run.model, model) if has_reference else None,
        value_model=value_model_spec(run.algorithm, run.model, run.rewards),
        reward_models=reward_model_specs(run.rewards),
    )


def _longest_prompt(
    generation: GenerationConfig,
    agent: EpisodeConfig | None,
    sources: Sequence[DatasetConfig],
    context: int | None,
) -> int:
    """Tokens of the longest prompt; with an agent, one that leaves room for later turns.

    If the context cannot hold both at full length, episodes get half of it.
    """
    longest = prompt_limit.max_prompt_tokens(generation, sources, context)
    if agent is None or context is None:
        return longest
    room = context - completion_token_limit(agent, generation.max_completion_length, None)
    return min(longest, max(room, context // 2))


def reference_spec(config: ModelConfig, model: ModelSpec) -> ModelSpec | None:
    """The frozen reference of a run; `model`: the policy.

    None for an adapter, which is disabled for the reference's numbers.
    """
    if config.ref_path is not None:
        return model_spec.load_model_spec(config.ref_path, None, "model.ref_path")
    return None if config.lora is not None and not config.ref_sync.every else model


def value_model_spec(
    algorithm: AlgorithmConfig, model: ModelConfig, rewards: Mapping[str, RewardConfig]
) -> ModelSpec | None:
    """The value model trained with the policy; None for algorithms without one."""
    if not value_model.needs_value_model(algorithm):
        return None
    start = value_model.choose_value_init(model, rewards, model_spec.model_config_values)
    return model_spec.load_model_spec(start.path, start.revision, start.key)


def reward_model_specs(rewards: Mapping[str, RewardConfig]) -> dict[str, ModelSpec]:
    """The reward models, by the names of their rewards."""
    entries = {n: cast("RewardModelConfig", e) for n, e in rewards.items() if e.type == "model"}
    load = model_spec.load_model_spec
    return {n: load(e.path, e.revision, f"reward.{n}.path") for n, e in entries.items()}
