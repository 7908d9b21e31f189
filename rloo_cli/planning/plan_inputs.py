"""The numbers of a run that the plan computes with: config, models, device, ranks, lengths."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from rloo_cli.config import prompt_limit, value_model
from rloo_cli.config.agent import agent_config, completion_token_limit, sampled_token_limit
from rloo_cli.config.rules import SHARDED_ENGINES
from rloo_cli.config.schema import DatasetConfig, RunConfig
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
    ranks: int  # processes that train, over all machines
    max_prompt_tokens: int
    reference_model: ModelSpec | None = None  # a second model in memory; None = there is none
    value_model: ModelSpec | None = None  # it learns with the policy
    reward_models: dict[str, ModelSpec] = field(default_factory=dict)
    token_budget: int | None = None  # tokens of a forward, as a run chose them
    recompute: bool | None = None  # gradient checkpointing, as a run chose it
    layout: str = ""  # as a run chose it

    @property
    def bytes_per_weight(self) -> int:
        """Bytes of a working weight."""
        return self.dtype_bytes(self.run.model.dtype)

    @property
    def parallel_strategy(self) -> str:
        return self.run.distributed.engine

    @property
    def weight_shards(self) -> int:
        """How many shards the weights are in."""
        return self.ranks if self.parallel_strategy in SHARDED_ENGINES else 1

    @property
    def max_completion_tokens(self) -> int:
        """Most tokens of a completion; of an episode, with what its tools say."""
        context = self.model.context_length
        room = None if context is None else context - self.max_prompt_tokens
        return completion_token_limit(self.run, room)

    @property
    def max_sampled_tokens(self) -> int:
        """Most tokens of a completion that the policy samples, over all its turns."""
        return min(sampled_token_limit(self.run), self.max_completion_tokens)

    @property
    def max_turns(self) -> int:
        """Most sampled turns of a completion."""
        agent = agent_config(self.run)
        return 1 if agent is None else agent.max_turns

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
        """Bytes of a number of a dtype's name; auto is bfloat16 on a GPU."""
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
    return PlanInputs(
        run=run,
        model=model,
        device=device,
        ranks=count or device_count.total_process_count(run),
        max_prompt_tokens=_longest_prompt(run, training, model.context_length),
        reference_model=reference_spec(run, model),
        value_model=value_model_spec(run),
        reward_models=reward_model_specs(run),
    )


def _longest_prompt(run: RunConfig, sources: Sequence[DatasetConfig], context: int | None) -> int:
    """Tokens of the longest prompt; with an agent, one that leaves room for the turns after it.

    Where the context does not hold both at their longest, the episodes get half of it.
    """
    longest = prompt_limit.max_prompt_tokens(run, sources, context)
    if agent_config(run) is None or context is None:
        return longest
    room = context - completion_token_limit(run, None)
    return min(longest, max(room, context // 2))


def reference_spec(run: RunConfig, model: ModelSpec) -> ModelSpec | None:
    """The frozen reference; None without KL.

    None, too, for an adapter that is switched off to get the reference's numbers.
    """
    config = run.model
    if not run.algorithm.needs_reference:
        return None
    if config.ref_path is not None:
        return model_spec.load_model_spec(config.ref_path, None, "model.ref_path")
    return None if config.lora is not None and not config.ref_sync.every else model


def value_model_spec(run: RunConfig) -> ModelSpec | None:
    """The value model that learns beside the policy; None for algorithms that have none."""
    if not value_model.needs_value_model(run):
        return None
    start = value_model.choose_value_init(run, model_spec.model_config_values)
    return model_spec.load_model_spec(start.path, start.revision, start.key)


def reward_model_specs(run: RunConfig) -> dict[str, ModelSpec]:
    """The reward models, by the names of their rewards."""
    entries = {n: cast("RewardModelConfig", e) for n, e in run.rewards.items() if e.type == "model"}
    load = model_spec.load_model_spec
    return {n: load(e.path, e.revision, f"reward.{n}.path") for n, e in entries.items()}
