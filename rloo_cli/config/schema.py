"""The schema of a run's config: name, type, limits and one line of meaning of every key.

Defaults do not stand here: conf/ holds the values, with the reason for each beside it. Algorithms,
rewards and generation backends bring their own `Config` in their own file; `registry` finds it,
and `check.run_config_class` puts the whole schema together. Everything is frozen and strict: an
unknown key, a string for a number or a NaN is an error.
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
WITHOUT_TEACHER = "algorithm.teacher.base_url=null"  # else no reference is loaded here
WITH_HELD_OUT = "data.eval_split or eval.sets"


class TrainingData(Frozen):
    """Where the examples are; all else (template, system, overlong) is as in `data`."""

    path: PathText | None = key("Hub name, file, folder or make:NAME; null = data.path")
    name: Text | None = key("Configuration of a hub data set; null with path=null = data.name")
    revision: Text | None = key("Branch, tag or commit; null with path=null = data.revision")
    split: Text | None = key("Split to train on; null = data.split")
    eval_split: Text | None = key("Split to measure on; null = eval_rows of the split's end")
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
        "Most examples per forward pass, which take equal parts of a batch; null = batch_size"
    )
    learning_rate: float = key("Peak learning rate; it falls linearly to 0", ge=0, le=10)
    warmup_steps: int = key("Optimizer steps of linear warm-up", ge=0)
    weight_decay: float = key("AdamW's decoupled weight decay", ge=0)
    max_grad_norm: float | None = key("Clip the gradient's norm to this; null = never", gt=0)
    max_length: Positive | None = key(
        "Most tokens of an example, EOS included; longer ones are dropped; null = the whole context"
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
    every: int = key("Optimizer updates between two moves of the reference; 0 = never", ge=0)
    alpha: float = key(
        "Share of the policy in each move: ref = alpha policy + (1 - alpha) ref", ge=0, le=1
    )


class ValueConfig(Frozen):
    """The value model of algorithm=ppo (`value_start`)."""

    only_with: ClassVar = {"algorithm.name=ppo": ("path", "revision"), ".path": ("revision",)}
    path: PathText | None = key(
        "Hub name or folder of a reward or language model to initialise the value model from;"
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
        "Hub name, folder or GGUF file of a causal language model, or make:NAME (made here)"
    )
    tokenizer: PathText | None = key("Hub name or folder of the tokenizer; null = model.path")
    revision: Text | None = key("Branch, tag or commit of a hub model; null = its main branch")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "Weights' dtype; auto = bfloat16 on a GPU that has it, else float32"
    )
    attn_implementation: Text | None = key("transformers' attention; null = its own choice")
    trust_remote_code: bool = key("Run Python code that comes with the model (dangerous)")
    gradient_checkpointing: bool | Literal["auto"] = key(
        "Recompute activations in the backward pass; auto = only where memory is short"
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
    ref_offload: bool = key("Keep the reference in the CPU's memory between its passes")
    ref_sync: RefSyncConfig
    value: ValueConfig
    freeze: list[Literal["vision", "projector"]] = key(
        "Parts of a vision-language model that keep their weights: its tower, what joins it on"
    )
    lora: LoraConfig | None = key("Train adapters only; null = all weights")
    quantization: QuantizationConfig | None = key(
        "Frozen weights in 8 or 4 bits; null = as they are"
    )
    init_kwargs: JsonObject = key(
        "Further arguments of transformers' from_pretrained, or values of its config.json, for"
        " policy, reference and value model"
    )


class TaskConfig(Frozen):
    """Which questions a task of reasoning-gym asks. `null` where data.path is no such task."""

    only_with: ClassVar = {f"..path={TASK_PREFIX}*": ("size", "difficulty", "curriculum", "seed")}
    size: int = key("Questions to train on", ge=1, lt=2**30)
    eval_size: int = key("Held-out questions, of split test", ge=1, lt=2**30)
    seed: int = key("Question i has the seed `seed` + i", ge=0, lt=2**30)
    difficulty: JsonObject = key(
        "The task's own keys: {min_digits: 1, max_digits: 2}; {} = its own"
    )
    curriculum: list[JsonObject] | None = key(
        "Difficulties of equal parts of the questions, in this order, each over `difficulty`; held"
        " out are questions of the last; null = one for all"
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
        "Split to use, e.g. train[:200]; where eval.sets omits it: data.eval_split, or test; for a"
        " file of its own: train"
    )
    prompt_column: Text | None = key(
        "Column that holds the prompt: a string, or a list of messages; null = none, what an"
        " environment's reset returns is all of the first turn"
    )
    template: str | None = key("Text around a plain prompt; {prompt} and {column} are filled in")
    columns: dict[str, str] = key("Renames columns, or nested fields: {old: new, a.b: new}")
    types: dict[str, Literal["str", "int", "float", "bool"]] = key(
        "Converts columns, after their renaming: {column: int}; {} = as in the file, where every"
        " cell of a CSV file is text"
    )
    system: str | None = key("System message put before every conversational prompt")
    chat: bool = key("A prompt that is a string becomes a user's message")
    map: PathText | None = key(
        "file.py:name, example (a dict) -> example, run before columns are read; null = none"
    )
    filter: JsonObject | PathText | None = key(
        "Examples to use: {column: value or [values]}, or file.py:name, example -> bool; null = all"
    )
    max_samples: Positive | None = key("Use only the first n examples that pass; null = all")
    streaming: bool = key("Read example by example, no further than max_samples, storing no more")
    task: TaskConfig | None = key(
        "Questions of a task: data=reasoning_gym sets it; null = path is not reasoning_gym:NAME"
    )
    max_prompt_length: Positive | None = key(
        "Most tokens of a prompt; null = what max_completion_length leaves of the context and of"
        " the engine's max_model_len, at most 4096"
    )
    overlong: Literal["filter", "error", "truncate_left"] = key("What happens to longer prompts")
    allow_remote_images: bool = key("Fetch images from URLs")
    allow_private_addresses: bool = key(
        "Such URLs may lead to this machine and its network, as an image server of yours does"
    )
    on_bad_image: Literal["error", "filter"] = key(
        "An image that cannot be read: error = no run, filter = its example is left out, counted"
    )
    max_pixels: Positive | None = key(
        "Scale larger images down to so many pixels; null = only as the model's processor does"
    )


class SetConfig(DatasetConfig):
    """One split of one data set."""

    path: PathText = key(
        "Hub name, data file, (save_to_disk) folder, make:NAME or reasoning_gym:NAME"
    )


class SourceConfig(SetConfig):
    """One of several data sets that are trained on together."""

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
        """Name -> weight of every source of the mixture; {} where there is none."""
        names = type(self.mixture).model_fields if self.mixture is not None else ()
        return {name: getattr(self.mixture, name).weight for name in names}

    @property
    def prompts_in(self) -> str:
        """The column of the prompts in a split that is open; without any it is made there."""
        return self.prompt_column or "prompt"

    @property
    def mixture_sources(self) -> dict[str, "DataConfig"]:
        """Name -> data config of every source of the mixture, each as if it were the only one."""
        plain = {"eval_split": None, "mixture": None, "shuffle": self.shuffle}
        mixed = {name: getattr(self.mixture, name) for name in self.mixture_weights}
        return {n: DataConfig(**s.model_dump(exclude={"weight"}) | plain) for n, s in mixed.items()}


class GenerationConfig(Frozen):
    """Keys every backend understands; a backend adds its own, and says what it is."""

    section: ClassVar[str] = ""  # where its own keys are; "" = it has none
    samples_here: ClassVar[bool] = False  # in the trainer's process, with the trainer's weights
    is_engine: ClassVar[bool] = False  # an inference engine with weights of its own, which are sent
    is_server: ClassVar[bool] = False  # an engine elsewhere: other machines may have it
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

    backend: str = key("Who samples: transformers, vllm_server, vllm_colocate")
    overlap: Literal["none", "ahead", "carry"] = key(
        "Sampling while training goes on: none = one after the other; ahead = the next step's"
        " completions are sampled with the weights that this step's update starts from; carry ="
        " unfinished completions go on under the next weights. It pays where the sampler has"
        " hardware of its own and neither half is short: rloo plan predicts by how much"
    )
    allow_uncorrected: bool = key(
        "Let overlap=ahead or carry train without algorithm.correction, for a comparison"
    )
    allow_moe: bool = key("Let a mixture of experts be trained, without replay of its router")
    max_lag: Positive = key(
        "overlap=carry: most updates that a token may be older than the weights that train on it;"
        " the training waits rather than pass it"
    )
    max_completion_length: Positive = key("Most tokens in a completion")
    min_tokens: int = key("Tokens before which no stop id is sampled", ge=0)
    temperature: float = key("Sampling temperature, > 0; log-probabilities use it too", gt=0)
    top_p: float = key("Nucleus sampling; 1 = off", gt=0, le=1)
    top_k: int = key("Sample from the k likeliest tokens; 0 = off", ge=0)
    min_p: float | None = key("Drop tokens less likely than min_p times the likeliest", ge=0, le=1)
    return_sampling_mask: bool = key(
        "Keep the ids that top_p, top_k and min_p let through, token by token, and compute the"
        " trainer's log-probabilities over them: exact, with a correction too"
    )
    max_sampling_mask_ids: Positive = key(
        "Most ids that a token's mask may have (4 bytes each); more stops the run"
    )
    repetition_penalty: float = key("Divides the logits of tokens that occurred; 1 = off", gt=0)
    stop: list[NotEmpty] = key("Strings that end a completion (they stay in its ids, not its text)")
    stop_token_ids: list[TokenId] = key("More ids that end a completion, beside every EOS id")
    ignore_eos: bool = key("Sample on after EOS, to max_completion_length")
    chat_template_kwargs: JsonObject = key("Passed to the chat template")
    kwargs: JsonObject = key(
        "Further sampling arguments by the backend's own names (docs/generation.md): vLLM's"
        " SamplingParams, such as presence_penalty and structured_outputs; some of transformers'"
    )
    logp_tolerance: float | None = key(
        "RMS of the nats per token by which sampler and trainer may differ; more stops the run;"
        " null = 0.02 for float32, 0.1 for half precision, 0.4 for fp8 or a mixture of experts",
        gt=0,
        le=100,
    )


class RewardConfig(Frozen):
    """Keys every reward has; each kind of reward adds its own."""

    type: str = key("Which reward: a file of rloo_cli/rewards, or function")
    weight: float = key("Factor of this reward in the score; 0 = only log it")
    timeout_s: float = key("Seconds one call may take; longer is a failure", gt=0, le=1e6)
    retries: int = key("Further tries after a failure", ge=0)
    on_error: Literal["raise", "none"] | float = key(
        "After a failure: raise = stop the run, none = no score for these completions, or a number"
    )
    max_error_rate: float = key("Largest share of a step's completions that may fail", ge=0, le=1)
    nan_is_none: bool = key("NaN means 'does not apply', as in rewards written for TRL")
    scope: Literal["batch", "group", "row"] = key("One call gets all completions, a group, one")
    only: dict[str, str | int | bool | list[str | int | bool]] = key(
        "Only score examples with these columns: {task: math} or {task: [math, logic]}; {} = all"
    )
    workers: int = key("Processes that make its calls; 0 = a thread of this one", ge=0, le=1024)
    cache: bool = key("Score an equal completion of an equal prompt only once")


class AlgorithmConfig(Frozen):
    """Keys the loop itself reads; an algorithm adds its own."""

    name: str = key("Which algorithm: a file of rloo_cli/algorithms")
    num_generations: int = key("Completions per prompt, K", ge=1, le=MAX_GENERATIONS)
    num_iterations: Positive = key("Passes over each step's completions")
    num_minibatches: Positive = key("Optimizer steps per pass")

    @property
    def by_token(self) -> bool:
        """Whether each token has its own advantage, which needs the whole step's completions."""
        return False

    @property
    def needs_greedy(self) -> bool:
        """Whether each prompt is completed once more, greedily, for its baseline."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether a KL is measured to a reference model that is loaded here."""
        return False

    @property
    def learns_without_rewards(self) -> bool:
        """Whether a run may have no reward at all."""
        return False

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of equal scores has advantages of 0, but for a KL in the rewards."""
        return True

    @property
    def scales_by_batch(self) -> bool:
        """Whether advantages are divided by the standard deviation of the whole batch."""
        return False

    @property
    def kl_weight(self) -> float:
        """The factor of the KL to the reference; 0 = no KL is in the objective."""
        return 0.0

    @property
    def trains_kl_of_unscored(self) -> bool:
        """Whether the loss has the KL of completions without an advantage, too."""
        return False

    @property
    def turn_reward_kind(self) -> str:
        """What the rewards of an episode's turns become: `turn_rewards` of Switches."""
        return "sum"

    @property
    def teacher_jsd_beta(self) -> float | None:
        """The teacher's share in a divergence over the whole vocabulary; None = not measured."""
        return None

    @property
    def teacher_server(self) -> TeacherConfig | None:
        """The server whose log-probabilities stand for a reference's; None = none is asked."""
        return None


class DistributedConfig(Frozen):
    only_with: ClassVar = {".engine=fsdp2": ("reduce",)}
    engine: Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = key(
        "How the model is spread over processes: single = one process; ddp = a copy in each; zero1,"
        " zero2, zero3 = DeepSpeed's stages; fsdp2 = torch's fully_shard"
    )
    accelerate_config: Text | None = key(
        "A file that `accelerate config` wrote: engine, offload, processes and machines are as it"
        " says"
    )
    num_processes: Positive | None = key(
        "Processes on each machine, one per device; null = one per GPU, 1 without"
    )
    num_nodes: Positive = key("Machines that train, each with num_processes")
    rdzv: Text | None = key(
        "host:port where rank 0 waits for the others; null = chosen at the start"
    )
    reduce: Literal["each", "last"] = key(
        "fsdp2: reduce gradients after each micro-batch, or once, after an update's last one; last"
        " keeps whole gradients in between, 4 bytes for each parameter on each GPU"
    )
    offload: Literal["none", "optimizer", "parameters"] = key(
        "What is kept in CPU memory: optimizer state (zero), or weights too (zero3, fsdp2)"
    )
    master_weights: Literal["float32", "none"] = key(
        "Update half-precision weights through float32 master weights, or directly (none)"
    )
    timeout_s: float = key(
        "Seconds that processes wait for each other, and for a sign of life", gt=0, le=1e6
    )
    threads: int | None = key("CPU threads per process; null = torch's choice", ge=1, le=4096)


class TrainConfig(Frozen):
    only_with: ClassVar = {
        ".micro_batch_size=null": ("micro_batch_tokens",),
        ".lr_scheduler!=constant": ("warmup_steps",),
    }
    prompts_per_step: int = key("Prompts per step over all processes, P", ge=1, le=1_000_000)
    epochs: float | None = key("Passes over the prompts", gt=0, le=1e9)
    learning_rate: float = key("Peak learning rate", ge=0, le=10)
    lr_scheduler: PathString = key("transformers' schedule name, or file.py:name")
    lr_scheduler_kwargs: JsonObject = key("Passed to the schedule")
    warmup_steps: int = key("Optimizer updates of linear warm-up", ge=0)
    weight_decay: float = key("AdamW's decoupled weight decay", ge=0)
    max_grad_norm: float | None = key("Clip the gradient's norm to this; null = never", gt=0)
    optimizer: PathString = key("adamw, or file.py:name of a function (parameters, **kwargs)")
    optimizer_kwargs: JsonObject = key("Passed to the optimizer, e.g. {betas: [0.9, 0.95]}")
    micro_batch_tokens: Positive | None = key(
        "Tokens per forward pass, of whole groups; null = chosen from the free memory"
    )
    micro_batch_size: Positive | None = key(
        "Completions per forward pass instead, of whole groups; null = by micro_batch_tokens"
    )
    no_grad_batch_size: Positive | None = key(
        "Completions per forward pass without gradient; null = twice micro_batch_size"
    )
    layout: Literal["auto", "shared", "packed", "padded"] = key(
        "How completions lie in a forward pass: shared = each prompt once for its group, packed ="
        " once per completion, padded = one sequence in each row"
    )
    old_logp: Literal["auto", "separate"] = key(
        "Old log-probabilities: from the training forward where that is exact, or a separate pass"
    )
    forward_all: bool = key("Also forward completions that do not affect the loss, for metrics")
    keep_logits_gb: float | None = key(
        "Keep logits up to this size for the backward pass, which otherwise recomputes them; null ="
        " 2, on a GPU a tenth of its memory",
        ge=0,
    )
    compile: bool = key(
        "Compile each decoder layer (torch.compile): fewer, larger kernels on a GPU, for a longer"
        " start (about a minute)"
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
    at_start: bool = key("Evaluate before the first step, too")
    every: int = key("Evaluate every n steps; 0 = only at the start and the end", ge=0)
    sets: SerializeAsAny[Sets] = key(
        "Held-out sets: {name: {split: ..., keys that differ from data}}; none = data.eval_split"
    )
    num_generations: int = key(
        "Completions sampled per prompt, K; 1 = only the greedy one", ge=1, le=MAX_GENERATIONS
    )
    temperature: float | None = key("Temperature of these K; null = generation.temperature", gt=0)
    pass_at: list[Positive] | None = key("The k of pass@k; null = 1, 2, 4, ... and K")
    pass_reward: str | None = key("Reward that decides whether one passes; null = the whole score")
    pass_threshold: float = key("A completion passes with at least this value")
    max_samples: Positive | None = key("Use only the first n examples of each set")
    batch_size: Positive = key("Completions sampled at once")
    judge: SerializeAsAny[Frozen] | None = key("Judge of greedy completions; null = none")


class CheckpointConfig(Frozen):
    only_with: ClassVar = {"max_steps>=.every": ("every",)}
    every: int = key("Steps between two checkpoints; 0 = only at the end, or when stopped", ge=0)
    keep_last: int = key("Complete checkpoints that are kept", ge=2)
    on_low_disk: Literal["stop", "warn"] = key("Where less disk is free than checkpoints will need")


# YAML reads a bare `off` as False.
GuardLevel = Annotated[
    Literal["fail", "warn", "off"],
    BeforeValidator(lambda value: "off" if value is False else value),
]


class GuardsConfig(Frozen):
    """What each health rule of a run does where it speaks (docs/inspect.md)."""

    only_with: ClassVar = {
        "algorithm.num_iterations>1 or algorithm.num_minibatches>1": ("policy_clipping",),
        WITH_REFERENCE: ("kl_rising",),
        "algorithm.correction.mode!=none": ("low_ess",),
        "algorithm.correction.mode!=auto or generation.backend!=transformers": ("low_ess",),
        WITH_HELD_OUT: ("held_out_falling",),
        "train.max_grad_norm": ("every_update_clipped",),
    }
    reward_falling: GuardLevel = key("reward falls within 50 or 100 steps by more than noise")
    reward_swinging: GuardLevel = key("reward swings over 50 steps and gets no better")
    reward_flat: GuardLevel = key("reward neither rises, falls nor swings over 50 steps")
    high_variance: GuardLevel = key("reward is level over 50 steps, and mostly noise")
    held_out_falling: GuardLevel = key(
        "eval_reward under its best by more than noise at two evaluations in a row"
    )
    policy_clipping: GuardLevel = key("clip_ratio/region_mean over 0.2, mean of 5 lines")
    kl_rising: GuardLevel = key("kl over 0.1 and 3 times what it was 20 steps before")
    entropy_collapse: GuardLevel = key("entropy under a tenth of what it began with")
    one_completion: GuardLevel = key("completions/most_common_frac over 0.95, mean of 5 lines")
    zero_spread: GuardLevel = key("frac_reward_zero_std over 0.8, mean of 5 lines")
    no_signal: GuardLevel = key("frac_reward_zero_std is 1 for 20 steps")
    many_truncated: GuardLevel = key("completions/clipped_ratio over 0.5, mean of 5 lines")
    low_ess: GuardLevel = key("sampling/ess under 0.5, mean of 5 lines")
    logp_drift: GuardLevel = key("sampling/logp_diff_rms over 0.04 and 3 times its start")
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
        "Steps per record of rollouts, from which `rloo replay` computes a step again; 0 = none",
        ge=0,
    )
    rollouts_keep_last: Positive | None = key(
        "Records of rollouts that are kept, the newest; null = all"
    )
    token_samples: int = key(
        "Samples of each file that are written token by token, for `rloo report`", ge=0
    )
    trl_aliases: bool = key("Also write TRL's spelling of a metric, where it differs")
    console: Literal["auto", "panel", "plain"] = key("auto = a live panel on a terminal")
    objective: str | None = key(
        "Metric that a job returns to Hydra's sweeper; null = the held-out score, else the reward"
    )
    trackers: list[TrackerName] = key("Trackers that are sent every line of metrics.jsonl")
    trackers_required: bool = key("End the run (10) where a tracker does not take it at the start")
    tracker_project: str | None = key("Project at the trackers; null = rloo")
    events: list[PathText] = key(
        "Classes that are told of steps, evaluations, checkpoints and the end: [file.py:Class]"
    )


class DebugConfig(Frozen):
    reward_model_path: PathString | None = key(
        "Model that is loaded in place of every reward model"
    )
    sets_from_data: bool = key("Every set of eval.sets is read from data.path, data.eval_split")
    simple_rewards: bool = key(
        "Rewards score every example (no `only`); any that needs a sandbox or service is dropped,"
        " and length_chars stands in for one that needs a task's columns"
    )
    own_columns: bool = key("data.columns is empty, whatever a recipe renames")
    judge_stand_in: bool = key("Judge with reward_model_path, against the column `reference`")


class RunConfig(Frozen):
    """The whole config of one experiment."""

    name: Name | None = key("Names the run's folder; null = recipe, model and a hash")
    root: PathText = key("Every run writes under root/name")
    seed: int = key("Seeds data order, sampling and torch", ge=0, lt=2**32)
    max_steps: Positive | None = key("Steps (rollout batches) to train")
    total_episodes: Positive | None = key("Completions in total; steps = this / (P*K), rounded up")
    resume: PathString = key("never; auto = from the newest checkpoint; or a checkpoint's folder")
    resume_allow_changes: bool = key("Allow another model, data, schedule or algorithm on resume")
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
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    guards: GuardsConfig = key("Health rules: fail = stop after that step, warn = say it once, off")
    debug: DebugConfig
    sft: SftConfig
    reward_model: RewardModelConfig
    slurm: SlurmConfig

    @property
    def folder(self) -> Path:
        """The folder that the run writes into, root/name."""
        return Path(self.root, str(self.name))

    @property
    def length_keys(self) -> dict[str, float]:
        """Those keys of the run's length that are set; a valid config has exactly one."""
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
        """Name -> data config of every held-out set; "" names the one of data.eval_split."""
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
        """Steps of the run; None where only the number of prompts says it, and is not given."""
        if self.max_steps is not None:
            return self.max_steps
        if self.total_episodes is not None:
            return math.ceil(self.total_episodes / self.episodes_per_step)
        if num_prompts is None or self.train.epochs is None:
            return None
        return math.ceil(self.train.epochs * num_prompts / self.train.prompts_per_step)
