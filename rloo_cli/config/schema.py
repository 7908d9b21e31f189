"""The schema of a run's config: name, type, limits and one line of meaning of every key.

Defaults are in conf/, each with its reason beside it. Algorithms, rewards and generation backends
define their own `Config` in their own file; `registry` finds it and `check.run_config_class` builds
the whole schema. All of it is frozen and strict: an unknown key, a string for a number or a NaN is
an error.
"""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, SerializeAsAny

from rloo_cli.config.adapters import LoraConfig as LoraConfig
from rloo_cli.config.adapters import QuantizationConfig as QuantizationConfig
from rloo_cli.config.key_types import MAX_GENERATIONS as MAX_GENERATIONS
from rloo_cli.config.key_types import TASK_PREFIX
from rloo_cli.config.key_types import Frozen as Frozen
from rloo_cli.config.key_types import Name as Name
from rloo_cli.config.key_types import NotEmpty as NotEmpty
from rloo_cli.config.key_types import PathString as PathString
from rloo_cli.config.key_types import PathText as PathText
from rloo_cli.config.key_types import Positive as Positive
from rloo_cli.config.key_types import Text as Text
from rloo_cli.config.key_types import TokenId as TokenId
from rloo_cli.config.key_types import TrackerName as TrackerName
from rloo_cli.config.key_types import key as key
from rloo_cli.config.slurm_keys import SlurmConfig as SlurmConfig
from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.utils.files import JsonObject

# Conditions of several sections (`Frozen.only_with`).
WITH_REFERENCE = "algorithm.beta>0 or algorithm.kl_in=none"
WITHOUT_TEACHER = "algorithm.teacher.base_url=null"  # else no reference is loaded
WITH_HELD_OUT = "data.eval_split or eval.sets"


class TrainingData(Frozen):
    """Source of the examples; other keys (template, system, overlong) default to `data`."""

    path: PathText | None = key("Hub name, file, folder or make:NAME; null = data.path")
    name: Text | None = key("Configuration of a hub data set; null with path=null = data.name")
    revision: Text | None = key("Branch, tag or commit; null with path=null = data.revision")
    split: Text | None = key("Split to train on; null = data.split")
    eval_split: Text | None = key("Split to evaluate on; null = the last eval_rows of the split")
    prompt_column: Text | None = key("Column of the prompts; null = data.prompt_column")
    max_samples: Positive | None = key("Use only the first n examples of each split; null = all")


class TrainingConfig(Frozen):
    """Keys that `sft` and `reward_model` share."""

    path: PathText | None = key(
        "Model to start from: hub name, folder, make:NAME; null = model.path"
    )
    revision: Text | None = key("Branch, tag or commit of `path`; null = its main branch")
    data: TrainingData
    epochs: float = key("Passes over the examples", gt=0, le=1e6)
    batch_size: Positive = key("Examples (for reward_model: pairs) per optimizer step")
    micro_batch_size: Positive | None = key(
        "Most examples per forward pass, in equal parts of a batch; null = batch_size"
    )
    learning_rate: float = key("Peak learning rate; it falls linearly to 0", ge=0, le=10)
    warmup_steps: int = key("Optimizer steps of linear warm-up", ge=0)
    weight_decay: float = key("AdamW's decoupled weight decay", ge=0)
    max_grad_norm: float | None = key("Clip the gradient's norm to this; null = never", gt=0)
    max_length: Positive | None = key(
        "Most tokens of an example, EOS included; longer ones are dropped; null = context length"
    )
    eval_rows: int | None = key(
        "Examples to evaluate on: the first of data.eval_split, or the last of the training split;"
        " null = at most 200, and at most a tenth of the training split",
        ge=0,
    )
    log_every: Positive = key("Optimizer steps per line of metrics")


class SftConfig(TrainingConfig):
    completion_column: Text = key("Column of the completions: strings, or lists of messages")


class RewardModelConfig(TrainingConfig):
    chosen_column: Text = key("Column of the better completions: strings, or lists of messages")
    rejected_column: Text = key("Column of the worse completions")
    center_rewards_coefficient: float = key(
        "Weight of (chosen + rejected)^2, which keeps scores near 0; 0 = off", ge=0
    )


class RefSyncConfig(Frozen):
    """The reference follows the policy (TR-DPO, arXiv 2404.09656)."""

    only_with: ClassVar = {
        WITH_REFERENCE: ("every", "alpha"),
        WITHOUT_TEACHER: ("alpha",),
        "max_steps>=.every": ("every",),
        ".every>0": ("alpha",),
    }
    every: int = key("Optimizer updates between two updates of the reference; 0 = never", ge=0)
    alpha: float = key(
        "Weight of the policy in each update: ref = alpha policy + (1 - alpha) ref", ge=0, le=1
    )


class ValueConfig(Frozen):
    """The value model of algorithm=ppo (`value_start`)."""

    only_with: ClassVar = {"algorithm.name=ppo": ("path", "revision"), ".path": ("revision",)}
    path: PathText | None = key(
        "Hub name or folder of a reward or language model to initialize the value model from;"
        " null = the one reward model with the policy's backbone, else the policy with a new head"
    )
    revision: Text | None = key("Branch, tag or commit of a hub model; null = its main branch")


class ModelConfig(Frozen):
    only_with: ClassVar = {
        WITH_REFERENCE: ("ref_path", "ref_offload"),
        WITHOUT_TEACHER: ("ref_offload",),
        ".path!=make:*|.*|/*": ("revision",),
    }
    path: PathText = key(
        "Hub name, folder or GGUF file of a causal language model, or make:NAME (synthetic)"
    )
    tokenizer: PathText | None = key("Hub name or folder of the tokenizer; null = model.path")
    revision: Text | None = key("Branch, tag or commit of a hub model; null = its main branch")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "Weights' dtype; auto = bfloat16 on a GPU that supports it, else float32"
    )
    attn_implementation: Text | None = key("transformers' attention; null = its default")
    trust_remote_code: bool = key("Run Python code from the model's repository (dangerous)")
    gradient_checkpointing: bool | Literal["auto"] = key(
        "Recompute activations in the backward pass; auto = only if memory is short"
    )
    disable_dropout: bool = key("Set every dropout to 0, so that the ratio is 1 on-policy")
    lm_head_fp32: bool = key("Compute logits in float32, in trainer and sampler alike")
    chat_template: PathText | None = key(
        "Jinja file to use as chat template; make:chatml_tools = ours with tools;"
        " null = the tokenizer's"
    )
    ref_path: PathText | None = key(
        "Reference model; null = a frozen copy of model.path, or the model without its adapter"
    )
    ref_offload: bool = key("Keep the reference in CPU memory between its passes")
    ref_sync: RefSyncConfig
    value: ValueConfig
    freeze: list[Literal["vision", "projector"]] = key(
        "Frozen parts of a vision-language model: the vision tower, the projector"
    )
    lora: LoraConfig | None = key("Train adapters only; null = all weights")
    quantization: QuantizationConfig | None = key(
        "Frozen weights in 8 or 4 bits; null = not quantized"
    )
    init_kwargs: JsonObject = key(
        "Further arguments of transformers' from_pretrained, or values of config.json, for"
        " policy, reference and value model"
    )


class TaskConfig(Frozen):
    """The questions of a reasoning-gym task; `null` if data.path is not such a task."""

    only_with: ClassVar = {f"..path={TASK_PREFIX}*": ("size", "difficulty", "curriculum", "seed")}
    size: int = key("Questions to train on", ge=1, lt=2**30)
    eval_size: int = key("Held-out questions, in split test", ge=1, lt=2**30)
    seed: int = key("Question i has the seed `seed` + i", ge=0, lt=2**30)
    difficulty: JsonObject = key(
        "The task's own keys: {min_digits: 1, max_digits: 2}; {} = its defaults"
    )
    curriculum: list[JsonObject] | None = key(
        "Difficulties of equal parts of the questions, in order, each over `difficulty`; held-"
        "out questions use the last one; null = one difficulty for all"
    )


class DatasetConfig(Frozen):
    """Which part of a data set is read, and how its examples become prompts."""

    only_with: ClassVar = {
        f".path!=make:*|{TASK_PREFIX}*|.*|/*": ("name", "revision"),
        ".allow_remote_images=true": ("allow_private_addresses",),
    }
    name: Text | None = key("Configuration of a hub data set")
    revision: Text | None = key("Branch, tag or commit of a hub data set")
    split: Text = key(
        "Split to use, e.g. train[:200]; if eval.sets omits it: data.eval_split, or test; for its"
        " own file: train"
    )
    prompt_column: Text | None = key(
        "Column that holds the prompt: a string, or a list of messages; null = none; the"
        " environment's reset provides the whole first turn"
    )
    template: str | None = key("Template around a plain prompt; fills in {prompt} and {column}")
    columns: dict[str, str] = key("Rename columns or nested fields: {old: new, a.b: new}")
    types: dict[str, Literal["str", "int", "float", "bool"]] = key(
        "Convert columns, after renaming: {column: int}; {} = as in the file (every"
        " cell of a CSV file is text)"
    )
    system: str | None = key("System message before every conversational prompt")
    chat: bool = key("Turn a string prompt into a user message")
    map: PathText | None = key(
        "file.py:name, example (a dict) -> example, applied before columns are read; null = none"
    )
    filter: JsonObject | PathText | None = key(
        "Examples to use: {column: value or [values]}, or file.py:name, example -> bool; null = all"
    )
    max_samples: Positive | None = key("Use the first n examples after filtering; null = all")
    streaming: bool = key("Stream examples, up to max_samples, without storing the rest")
    task: TaskConfig | None = key(
        "Questions of a task, set by data=reasoning_gym; null = path is not reasoning_gym:NAME"
    )
    max_prompt_length: Positive | None = key(
        "Most tokens of a prompt; null = what max_completion_length leaves of the context and of"
        " the engine's max_model_len, at most 4096"
    )
    overlong: Literal["filter", "error", "truncate_left"] = key("Handling of longer prompts")
    allow_remote_images: bool = key("Fetch images from URLs")
    allow_private_addresses: bool = key(
        "Allow such URLs to point to this machine and its network, e.g. your own image server"
    )
    on_bad_image: Literal["error", "filter"] = key(
        "An unreadable image: error = refuse the run, filter = drop and count its example"
    )
    max_pixels: Positive | None = key(
        "Scale larger images down to this many pixels; null = only by the model's processor"
    )


class SetConfig(DatasetConfig):
    """One split of one data set."""

    path: PathText = key(
        "Hub name, data file, (save_to_disk) folder, make:NAME or reasoning_gym:NAME"
    )


class SourceConfig(SetConfig):
    """One of several data sets of a mixture."""

    weight: float = key("Share of the prompts, relative to the sum of all weights", gt=0, le=1e6)


class Mixture(Frozen):
    """One field per source, each a SourceConfig: `check.run_config_class` adds them."""


class DataConfig(DatasetConfig):
    only_with: ClassVar = {"eval.sets=null": ("eval_split",)}
    path: PathText | None = key(
        "Hub name, jsonl/json/csv/parquet file, (save_to_disk) folder, make:NAME, or"
        " reasoning_gym:NAME; null = mixture"
    )
    mixture: SerializeAsAny[Mixture] | None = key(
        "Several data sets: {name: {path: ..., weight: 2, keys that differ from data}}; null = path"
    )
    split: Text = key("Split to train on")
    eval_split: Text | None = key("Held-out split, scored at the start and at the end; null = none")
    shuffle: bool = key("A new seeded permutation each epoch; false = the file's order")

    @property
    def mixture_weights(self) -> dict[str, float]:
        """Name -> weight of every source of the mixture; {} if there is none."""
        names = type(self.mixture).model_fields if self.mixture is not None else ()
        return {name: getattr(self.mixture, name).weight for name in names}

    @property
    def prompts_in(self) -> str:
        """The column of the prompts in an open split; it is created if missing."""
        return self.prompt_column or "prompt"

    @property
    def mixture_sources(self) -> dict[str, "DataConfig"]:
        """Name -> data config of every source of the mixture, each as if it were the only one."""
        plain = {"eval_split": None, "mixture": None, "shuffle": self.shuffle}
        mixed = {name: getattr(self.mixture, name) for name in self.mixture_weights}
        return {n: DataConfig(**s.model_dump(exclude={"weight"}) | plain) for n, s in mixed.items()}


class AnswerBudget(Frozen):
    """`generation.answer_budget`: max_completion_length includes the text and the answer."""

    at: Positive = key("Tokens of a completion after which it gets the text, if it has not ended")
    text: NotEmpty = key("Text that asks for the answer; it is read, and not trained on")
    tokens: Positive = key("Most tokens of the answer")


class GenerationConfig(Frozen):
    """Keys of every backend; a backend adds its own keys and describes itself."""

    section: ClassVar[str] = ""  # location of its own keys; "" = none
    samples_here: ClassVar[bool] = False  # in the trainer's process, with the trainer's weights
    is_engine: ClassVar[bool] = False  # an inference engine with its own copy of the weights
    is_server: ClassVar[bool] = False  # an engine in another process, possibly on another machine
    shares_device: ClassVar[bool] = False  # an engine on the trainer's device

    @property
    def own_keys(self) -> Any:
        """The backend's own section; None without one."""
        return getattr(self, self.section) if self.section else None

    only_with: ClassVar = {
        ".overlap!=none": ("allow_uncorrected",),
        ".overlap=carry": ("max_lag",),
        ".return_sampling_mask=true": ("max_sampling_mask_ids",),
        ".top_p!=1 or .top_k or .min_p or .kwargs": ("return_sampling_mask",),
    }

    backend: str = key("Sampling backend: transformers, vllm_server, vllm_colocate")
    overlap: Literal["none", "ahead", "carry"] = key(
        "Sampling during training: none = one after the other; ahead = the next step's"
        " completions are sampled with the weights before this step's update; carry ="
        " unfinished completions continue under the next weights. It pays if the sampler has"
        " its own hardware and both parts take long: rloo plan predicts the gain"
    )
    allow_uncorrected: bool = key(
        "Allow overlap=ahead or carry without algorithm.correction, for a comparison"
    )
    allow_moe: bool = key("Allow training a mixture of experts, without router replay")
    max_lag: Positive = key(
        "overlap=carry: most updates between a token's weights and the weights trained on it;"
        " training waits rather than exceed it"
    )
    max_completion_length: Positive = key("Most tokens in a completion")
    answer_budget: AnswerBudget | None = key("Force an answer: {at, text, tokens}; null = off")
    min_tokens: int = key("Minimal tokens before a stop id can be sampled", ge=0)
    temperature: float = key("Sampling temperature, > 0; also used for log-probabilities", gt=0)
    top_p: float = key("Nucleus sampling; 1 = off", gt=0, le=1)
    top_k: int = key("Sample from the k likeliest tokens; 0 = off", ge=0)
    min_p: float | None = key("Drop tokens less likely than min_p times the likeliest", ge=0, le=1)
    return_sampling_mask: bool = key(
        "Record the ids that top_p, top_k and min_p keep for each token, and compute the"
        " trainer's log-probabilities over them: exact, with a correction too"
    )
    max_sampling_mask_ids: Positive = key(
        "Most ids in a token's mask (4 bytes each); more stops the run"
    )
    repetition_penalty: float = key("Divide the logits of repeated tokens; 1 = off", gt=0)
    stop: list[NotEmpty] = key("Strings that end a completion (kept in its ids, not its text)")
    stop_token_ids: list[TokenId] = key("Further ids that end a completion, besides every EOS id")
    ignore_eos: bool = key("Continue sampling after EOS, up to max_completion_length")
    chat_template_kwargs: JsonObject = key("Arguments of the chat template")
    kwargs: JsonObject = key(
        "Further sampling arguments under the backend's own names (docs/generation.md): vLLM's"
        " SamplingParams, such as presence_penalty and structured_outputs; some of transformers'"
    )
    logp_tolerance: float | None = key(
        "Largest RMS difference in nats per token between sampler and trainer; more stops the run;"
        " null = 0.02 for float32, 0.1 for half precision, 0.4 for fp8 or a mixture of experts",
        gt=0,
        le=100,
    )


class RewardConfig(Frozen):
    """Keys of every reward; each type adds its own."""

    type: str = key("Type of reward: a file of rloo_cli/rewards, or function")
    weight: float = key("Factor of this reward in the score; 0 = only log it")
    timeout_s: float = key("Timeout of one call in seconds; a timeout is a failure", gt=0, le=1e6)
    retries: int = key("Retries after a failure", ge=0)
    on_error: Literal["raise", "none"] | float = key(
        "After a failure: raise = stop the run, none = no score for these completions, or a number"
    )
    max_error_rate: float = key("Largest share of a step's completions that may fail", ge=0, le=1)
    nan_is_none: bool = key("NaN means 'does not apply', as in rewards written for TRL")
    scope: Literal["batch", "group", "row"] = key("Completions per call: all, one group, or one")
    only: dict[str, str | int | bool | list[str | int | bool]] = key(
        "Score only examples with these values: {task: math} or {task: [math, logic]}; {} = all"
    )
    workers: int = key("Worker processes for its calls; 0 = a thread of the trainer", ge=0, le=1024)
    cache: bool = key("Score equal completions of equal prompts only once")


class AlgorithmConfig(Frozen):
    """Keys that the training loop reads; an algorithm adds its own."""

    name: str = key("Algorithm: a file of rloo_cli/algorithms")
    num_generations: int = key("Completions per prompt, K", ge=1, le=MAX_GENERATIONS)
    num_iterations: Positive = key("Passes over each step's completions")
    num_minibatches: Positive = key("Optimizer steps per pass")

    @property
    def by_token(self) -> bool:
        """Whether each token has its own advantage, computed from the whole step's completions."""
        return False

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt gets one more, greedy completion for its baseline."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether a KL to a locally loaded reference model is measured."""
        return False

    @property
    def learns_without_rewards(self) -> bool:
        """Whether a run can have no reward."""
        return False

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of equal scores has advantages of 0, except for a KL in the rewards."""
        return True

    @property
    def scales_by_batch(self) -> bool:
        """Whether advantages are divided by the standard deviation of the whole batch."""
        return False

    @property
    def kl_weight(self) -> float:
        """The factor of the KL to the reference; 0 = no KL in the objective."""
        return 0.0

    @property
    def trains_kl_of_unscored(self) -> bool:
        """Whether the loss includes the KL of completions without an advantage."""
        return False

    @property
    def turn_reward_kind(self) -> str:
        """How rewards of an episode's turns are combined: `turn_rewards` of Switches."""
        return "sum"

    @property
    def teacher_jsd_beta(self) -> float | None:
        """The teacher's share in a divergence over the whole vocabulary; None = not measured."""
        return None

    @property
    def teacher_server(self) -> TeacherConfig | None:
        """The server that provides the reference log-probabilities; None = no server."""
        return None


class DistributedConfig(Frozen):
    only_with: ClassVar = {".engine=fsdp2": ("reduce",)}
    engine: Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = key(
        "How processes share the model: single = one process; ddp = a copy in each; zero1,"
        " zero2, zero3 = DeepSpeed's stages; fsdp2 = torch's fully_shard"
    )
    accelerate_config: Text | None = key(
        "A file from `accelerate config`: it sets engine, offload, processes and machines"
    )
    num_processes: Positive | None = key(
        "Processes on each machine, one per device; null = one per GPU, 1 without a GPU"
    )
    num_nodes: Positive = key("Training machines, each with num_processes")
    rdzv: Text | None = key("host:port of the rendezvous at rank 0; null = chosen at the start")
    reduce: Literal["each", "last"] = key(
        "fsdp2: reduce gradients after each micro-batch, or only after an update's last one; last"
        " keeps full gradients in between, 4 bytes for each parameter on each GPU"
    )
    offload: Literal["none", "optimizer", "parameters"] = key(
        "Offload to CPU memory: optimizer state (zero), or weights too (zero3, fsdp2)"
    )
    master_weights: Literal["float32", "none"] = key(
        "Update half-precision weights through float32 master weights, or directly (none)"
    )
    timeout_s: float = key(
        "Timeout in seconds for collectives and heartbeats between processes", gt=0, le=1e6
    )
    threads: int | None = key("CPU threads per process; null = torch's default", ge=1, le=4096)


class TrainConfig(Frozen):
    only_with: ClassVar = {
        ".micro_batch_size=null": ("micro_batch_tokens",),
        ".lr_scheduler!=constant": ("warmup_steps",),
    }
    prompts_per_step: int = key("Prompts per step over all processes, P", ge=1, le=1_000_000)
    epochs: float | None = key("Passes over the prompts", gt=0, le=1e9)
    learning_rate: float = key("Peak learning rate", ge=0, le=10)
    lr_scheduler: PathString = key("Name of a transformers schedule, or file.py:name")
    lr_scheduler_kwargs: JsonObject = key("Arguments of the schedule")
    warmup_steps: int = key("Optimizer updates of linear warm-up", ge=0)
    weight_decay: float = key("AdamW's decoupled weight decay", ge=0)
    max_grad_norm: float | None = key("Clip the gradient's norm to this; null = never", gt=0)
    optimizer: PathString = key("adamw, or file.py:name of a function (parameters, **kwargs)")
    optimizer_kwargs: JsonObject = key("Arguments of the optimizer, e.g. {betas: [0.9, 0.95]}")
    micro_batch_tokens: Positive | None = key(
        "Tokens per forward pass, in whole groups; null = from the free memory"
    )
    micro_batch_size: Positive | None = key(
        "Completions per forward pass instead, in whole groups; null = by micro_batch_tokens"
    )
    no_grad_batch_size: Positive | None = key(
        "Completions per forward pass without gradient; null = twice micro_batch_size"
    )
    layout: Literal["auto", "shared", "packed", "padded"] = key(
        "Layout of a forward pass: shared = each prompt once per group, packed ="
        " each prompt once per completion, padded = one sequence per row"
    )
    old_logp: Literal["auto", "separate"] = key(
        "Old log-probabilities: from the training forward pass if exact, or from a separate pass"
    )
    forward_all: bool = key("Also forward completions that do not affect the loss, for metrics")
    keep_logits_gb: float | None = key(
        "Keep up to this many GB of logits for the backward pass, else recompute them; null ="
        " 2, or a tenth of a GPU's memory",
        ge=0,
    )
    compile: bool = key(
        "Compile each decoder layer (torch.compile): fewer, larger kernels on a GPU, but a"
        " slower start (about a minute)"
    )
    on_nonfinite: Literal["stop", "skip"] = key("A non-finite loss or gradient: stop, or skip it")


class Sets(Frozen):
    """One field per held-out set, each a SetConfig: `check.run_config_class` adds them."""


class EvalConfig(Frozen):
    only_with: ClassVar = {
        WITH_HELD_OUT: ("at_start", "every", "num_generations", "max_samples", "batch_size"),
        ".num_generations>1": ("temperature", "pass_at", "pass_reward", "pass_threshold"),
        "max_steps>=.every": ("every",),
    }
    at_start: bool = key("Evaluate before the first step too")
    every: int = key("Evaluate every n steps; 0 = only at the start and the end", ge=0)
    sets: SerializeAsAny[Sets] = key(
        "Held-out sets: {name: {split: ..., keys that differ from data}}; none = data.eval_split"
    )
    num_generations: int = key(
        "Completions sampled per prompt, K; 1 = only greedy", ge=1, le=MAX_GENERATIONS
    )
    temperature: float | None = key("Temperature of these K; null = generation.temperature", gt=0)
    pass_at: list[Positive] | None = key("The k of pass@k; null = 1, 2, 4, ... and K")
    pass_reward: str | None = key("Reward that decides whether one passes; null = the score")
    pass_threshold: float = key("A completion passes with at least this value")
    max_samples: Positive | None = key("Use only the first n examples of each set")
    batch_size: Positive = key("Completions sampled in parallel")
    judge: SerializeAsAny[Frozen] | None = key("Judge of greedy completions; null = none")

    @property
    def pass_ks(self) -> list[int]:
        """The k of pass@k: those of `pass_at`, else powers of two up to K, and K."""
        if self.pass_at is not None:
            return sorted(set(self.pass_at))
        k = self.num_generations
        return sorted({2**i for i in range(k.bit_length())} | {k})


class TargetConfig(Frozen):
    only_with: ClassVar = {".metric": ("at_least", "confidence")}
    metric: str | None = key("Held-out score that ends the run, such as eval_reward; null = none")
    at_least: float | None = key("The lower end of the score's interval at which the run ends")
    confidence: float = key("Confidence of that interval; all are 95 %", ge=0.95, le=0.95)


class CheckpointConfig(Frozen):
    only_with: ClassVar = {"max_steps>=.every": ("every",)}
    every: int = key("Steps between checkpoints; 0 = only at the end, or when stopped", ge=0)
    keep_last: int = key("Complete checkpoints to keep", ge=2)
    on_low_disk: Literal["stop", "warn"] = key("If checkpoints will need more disk than is free")


# YAML reads a bare `off` as False.
GuardLevel = Annotated[
    Literal["fail", "warn", "off"],
    BeforeValidator(lambda value: "off" if value is False else value),
]


class GuardsConfig(Frozen):
    """What each health rule of a run does when it fires (docs/inspect.md)."""

    only_with: ClassVar = {
        "algorithm.num_iterations>1 or algorithm.num_minibatches>1": ("policy_clipping",),
        WITH_REFERENCE: ("kl_rising",),
        "algorithm.correction.mode!=none": ("low_ess",),
        "algorithm.correction.mode!=auto or generation.backend!=transformers": ("low_ess",),
        WITH_HELD_OUT: ("held_out_falling",),
        "train.max_grad_norm": ("every_update_clipped",),
    }
    reward_falling: GuardLevel = key("reward falls by more than noise within 50 or 100 steps")
    reward_swinging: GuardLevel = key("reward swings over 50 steps without improving")
    reward_flat: GuardLevel = key("reward neither rises, falls nor swings over 50 steps")
    high_variance: GuardLevel = key("reward is flat over 50 steps, and mostly noise")
    held_out_falling: GuardLevel = key(
        "eval_reward below its best by more than noise in two evaluations in a row"
    )
    policy_clipping: GuardLevel = key("clip_ratio/region_mean above 0.2, mean of 5 lines")
    kl_rising: GuardLevel = key("kl above 0.1 and 3 times its value 20 steps before")
    entropy_collapse: GuardLevel = key("entropy below a tenth of its initial value")
    one_completion: GuardLevel = key("completions/most_common_frac above 0.95, mean of 5 lines")
    zero_spread: GuardLevel = key("frac_reward_zero_std above 0.8, mean of 5 lines")
    no_signal: GuardLevel = key("frac_reward_zero_std is 1 for 20 steps")
    many_truncated: GuardLevel = key("completions/clipped_ratio above 0.5, mean of 5 lines")
    low_ess: GuardLevel = key("sampling/ess below 0.5, mean of 5 lines")
    logp_drift: GuardLevel = key("sampling/logp_diff_rms above 0.04 and 3 times its initial value")
    every_update_clipped: GuardLevel = key("grad_clip_fraction is 1 for 20 steps")


class LoggingConfig(Frozen):
    only_with: ClassVar = {
        "max_steps>=.every": ("every",),
        ".console!=panel": ("samples",),
        ".rollouts_every>0": ("rollouts_keep_last",),
        ".trackers": ("trackers_required",),
    }
    every: Positive = key("Steps per line of metrics")
    samples: int = key("Samples printed per logged step on a plain terminal", ge=0)
    samples_every: Positive = key("Steps per file of samples")
    rollouts_every: int = key(
        "Steps per record of rollouts, for `rloo replay`; 0 = none",
        ge=0,
    )
    rollouts_keep_last: Positive | None = key(
        "Records of rollouts to keep, newest first; null = all"
    )
    token_samples: int = key("Samples per file written token by token, for `rloo report`", ge=0)
    trl_aliases: bool = key("Also write TRL's name of a metric if it differs")
    console: Literal["auto", "panel", "plain"] = key("auto = a live panel on a terminal")
    objective: str | None = key(
        "Metric that a job returns to Hydra's sweeper; null = held-out score, else reward"
    )
    trackers: list[TrackerName] = key("Trackers that receive every line of metrics.jsonl")
    trackers_required: bool = key("Exit with 10 if a tracker fails to start")
    tracker_project: str | None = key("Project at the trackers; null = rloo")
    events: list[PathText] = key(
        "Callback classes for steps, evaluations, checkpoints and the end: [file.py:Class]"
    )


class DebugConfig(Frozen):
    reward_model_path: PathString | None = key("Model that replaces every reward model")
    sets_from_data: bool = key("Read every set of eval.sets from data.path, data.eval_split")
    simple_rewards: bool = key(
        "Score every example (no `only`); drop rewards that need a sandbox or service;"
        " replace those that need a task's columns with length_chars"
    )
    own_columns: bool = key("Clear data.columns, whatever a recipe renames")
    judge_stand_in: bool = key("Judge with reward_model_path, against column `reference`")


class RunConfig(Frozen):
    """The whole config of one experiment."""

    name: Name | None = key("Name of the run's folder; null = recipe, model and a hash")
    root: PathText = key("Folder of runs; a run writes to root/name")
    seed: int = key("Seed of data order, sampling and torch", ge=0, lt=2**32)
    max_steps: Positive | None = key("Steps (rollout batches) to train")
    total_episodes: Positive | None = key("Total completions; steps = this / (P*K), rounded up")
    resume: PathString = key("never; auto = from the newest checkpoint; or a checkpoint folder")
    resume_allow_changes: bool = key("Allow a changed model, data, schedule or algorithm on resume")
    model: ModelConfig
    data: DataConfig
    reward: SerializeAsAny[Frozen]  # one field per entry, each a RewardConfig
    generation: SerializeAsAny[GenerationConfig]
    agent: SerializeAsAny[Frozen] | None = key(
        "Tools and environments; null = one answer to each prompt"
    )
    algorithm: SerializeAsAny[AlgorithmConfig]
    distributed: DistributedConfig
    train: TrainConfig
    eval: EvalConfig
    target: TargetConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    guards: GuardsConfig = key("Health rules: fail = stop after that step, warn = print once, off")
    debug: DebugConfig
    sft: SftConfig
    reward_model: RewardModelConfig
    slurm: SlurmConfig

    @property
    def folder(self) -> Path:
        """The folder that the run writes to, root/name."""
        return Path(self.root, str(self.name))

    @property
    def length_keys(self) -> dict[str, float]:
        """The keys that set the run's length; a valid config has exactly one."""
        lengths = {
            "max_steps": self.max_steps,
            "total_episodes": self.total_episodes,
            "train.epochs": self.train.epochs,
        }
        return {key: value for key, value in lengths.items() if value is not None}

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """Name -> config of every reward."""
        return {name: getattr(self.reward, name) for name in type(self.reward).model_fields}

    @property
    def held_out(self) -> dict[str, DataConfig]:
        """Name -> data config of every held-out set; "" is the one of data.eval_split."""
        sets = {name: getattr(self.eval.sets, name) for name in type(self.eval.sets).model_fields}
        if sets:
            plain: JsonObject = {"eval_split": None, "shuffle": False, "mixture": None}
            return {name: DataConfig(**s.model_dump() | plain) for name, s in sets.items()}
        split = self.data.eval_split
        return {} if split is None else {"": self.data.model_copy(update={"split": split})}

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.algorithm.num_iterations * self.algorithm.num_minibatches

    @property
    def episodes_per_step(self) -> int:
        """B = P*K, the completions of one step."""
        return self.train.prompts_per_step * self.algorithm.num_generations

    def num_steps(self, num_prompts: int | None = None) -> int | None:
        """Steps of the run; None if it depends on an unknown number of prompts."""
        if self.max_steps is not None:
            return self.max_steps
        if self.total_episodes is not None:
            return math.ceil(self.total_episodes / self.episodes_per_step)
        if num_prompts is None or self.train.epochs is None:
            return None
        return math.ceil(self.train.epochs * num_prompts / self.train.prompts_per_step)
