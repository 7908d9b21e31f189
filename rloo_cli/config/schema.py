"""What a run is: the name, type, limits and one line of meaning of every key.

No defaults stand here: conf/ gives the values, with the reason for each beside it. Algorithms,
rewards and generation backends bring their own `Config` in their own file; `registry` finds it,
and `config` puts the whole run together. Everything is frozen and strict: an unknown key, a
string for a number or a NaN is an error.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny


class Frozen(BaseModel):
    """A section of the config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def key(
    meaning: str,
    *,
    since: str | None = None,
    before: Any = None,
    default_was: tuple[Any, Any] | None = None,
    **limits: Any,
) -> Any:
    """A key: its one line of meaning, and its limits (`ge`, `gt`, `le`, `lt`, `min_length`).

    A key that came later names the version that brought it (`since="0.2"`) and the value that means
    "as before" (`before=VALUE`). A config.yaml that an earlier version wrote is read with that
    value, and a run's hash leaves the key out while it has it: an experiment keeps its name.

    `default_was=(NOW, EARLIER)`: the default in conf/ was EARLIER and is NOW. The two count as one
    value in a run's hash and where a resumed run's config is compared; only for a key whose effect
    on the run is checked otherwise (what it does to the data is in the data's fingerprint).
    """
    extra: dict[str, Any] = {}
    if since is not None:
        extra |= {"since": since, "before": before}
    if default_was is not None:
        extra |= {"default_was": list(default_was)}
    return Field(description=meaning, json_schema_extra=extra or None, **limits)


Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=150)]
NotEmpty = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
# Of some use as a name or a path: not empty, no control characters (a NUL, a line's end).
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000)]


class TrainingData(Frozen):
    """Where the rows are; all else (template, system, overlong) is as in `data`."""

    path: Text | None = key("Hub name, file, folder or make:NAME; null = data.path")
    name: Text | None = key("Configuration of a hub data set; null with path=null = data.name")
    revision: Text | None = key("Branch, tag or commit; null with path=null = data.revision")
    split: Text | None = key("Split to train on; null = data.split")
    eval_split: Text | None = key("Split to measure on; null = eval_rows of the split's end")
    prompt_column: Text | None = key("Column of the prompts; null = data.prompt_column")
    max_samples: Positive | None = key("Use only the first n rows of each split; null = all")


class TrainingConfig(Frozen):
    """Keys of both trainings."""

    path: Text | None = key("Model to start from: hub name, folder, make:NAME; null = model.path")
    revision: Text | None = key("Branch, tag or commit of `path`; null = its main branch")
    data: TrainingData
    epochs: float = key("Passes over the rows", gt=0, le=1e6)
    batch_size: Positive = key("Rows per optimizer step (of reward_model: pairs)")
    micro_batch_size: Positive | None = key("Rows per forward pass; null = batch_size")
    learning_rate: float = key("Peak learning rate; it falls linearly to 0", ge=0, le=10)
    warmup_steps: int = key("Optimizer steps of linear warm-up", ge=0)
    weight_decay: float = key("AdamW's decoupled weight decay", ge=0)
    max_grad_norm: float | None = key("Clip the gradient's norm to this; null = never", gt=0)
    max_length: Positive | None = key(
        "Most tokens of a row, end included; longer ones are left out; null = the model's context"
    )
    eval_rows: int | None = key(
        "Rows to measure on: the first of data.eval_split, or the split's last; null = at most 200,"
        " of the split itself a tenth",
        default_was=(None, 200),  # a training that is done stays done
        ge=0,
    )
    log_every: Positive = key("Optimizer steps per line of metrics")


class SftConfig(TrainingConfig):
    completion_column: Text = key("Column of the completions: strings, or lists of messages")


class RewardModelConfig(TrainingConfig):
    chosen_column: Text = key("Column of the better completions: strings, or lists of messages")
    rejected_column: Text = key("Column of the worse completions")
    center_rewards_coefficient: float = key(
        "Weight of (chosen + rejected)^2, which keeps scores about 0; 0 = off", ge=0
    )


# Not sbatch's plain minutes: YAML reads 4:00:00 without quotes as the number 14400.
TIME = r"^(\d+-\d+(:\d+){0,2}|\d+(:\d+){1,2})$"


class SlurmConfig(Frozen):
    """What a batch script asks Slurm for."""

    partition: Text | None = key("Partition; null = the cluster's default")
    account: Text | None = key("Account that is charged")
    qos: Text | None = key("Quality of service")
    time: Annotated[str, Field(pattern=TIME)] | None = key(
        "Time limit: 'HH:MM:SS', 'D-HH:MM:SS', in a file with its quotes; null = the partition's"
    )
    exclusive: bool = key("Whole nodes, with all their processors, memory and GPUs")
    gpus_per_node: int | None = key(
        "GPUs on each node; null = distributed.num_processes, or whatever a whole node has", ge=0
    )
    cpus_per_task: Positive | None = key("Processors for each node's launcher and its processes")
    mem: Text | None = key("Memory on each node, e.g. 200G; 0 = all")
    lead_s: Positive | None = key(
        "Seconds before the time limit at which a run is told to save; null = as measured: a step,"
        " a save and 60, or 300 where nothing was measured yet"
    )
    output: Text | None = key("The job's log; null = root/slurm/NAME-JOB.log")
    options: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], Text | int | None] = key(
        "More of sbatch's options: {constraint: a100, mail-type: END}; null = without a value"
    )


class RefSyncConfig(Frozen):
    """The reference follows the policy (TR-DPO, arXiv 2404.09656)."""

    every: int = key("Optimizer updates between two moves of the reference; 0 = it stands", ge=0)
    alpha: float = key(
        "Share of the policy in each: ref = alpha policy + (1 - alpha) ref", ge=0, le=1
    )


class LoraConfig(Frozen):
    """peft's LoRA (arXiv 2106.09685) and DoRA (2402.09353)."""

    r: Positive = key("Rank of the adapters")
    alpha: float = key("Scale: adapters are multiplied by alpha / r", gt=0)
    dropout: float = key(
        "Dropout before the adapters; more than 0 makes the ratio noise", ge=0, lt=1
    )
    target_modules: list[NotEmpty] | Literal["all-linear"] = key("Layers that get an adapter")
    exclude_modules: list[NotEmpty] = key("Layers that get none")
    modules_to_save: list[NotEmpty] = key("Layers that are trained whole")
    bias: Literal["none", "all", "lora_only"] = key("Biases that are trained")
    use_rslora: bool = key("Scale by alpha / sqrt(r) instead (arXiv 2312.03732)")
    use_dora: bool = key("Train magnitudes too: DoRA")
    path: Text | None = key("Adapter to go on from; null = a new one")


class QuantizationConfig(Frozen):
    """bitsandbytes' weights of 8 or 4 bits under an adapter (QLoRA, arXiv 2305.14314)."""

    bits: Literal[4, 8] = key("Bits of a frozen weight")
    quant_type: Literal["nf4", "fp4"] = key("Kind of 4-bit numbers")
    double_quant: bool = key("Quantise the scales of 4-bit numbers too")


class ValueConfig(Frozen):
    """The value model of algorithm=ppo (`value_start`)."""

    path: Text | None = key(
        "Hub name or folder of a reward or language model that the value model begins as; null ="
        " the one reward model whose backbone is the policy's, else the policy with a new head"
    )
    revision: Text | None = key("Branch, tag or commit of a hub model; null = its main branch")


class ModelConfig(Frozen):
    path: Text = key("Hub name or folder of a causal language model, or make:NAME (made here)")
    tokenizer: Text | None = key("Hub name or folder of the tokenizer; null = model.path")
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
    chat_template: Text | None = key("Jinja file to use as chat template; null = the tokenizer's")
    ref_path: Text | None = key(
        "Reference model; null = a frozen copy of model.path, or the model without its adapter"
    )
    ref_offload: bool = key("Keep the reference in the CPU's memory between its passes")
    ref_sync: RefSyncConfig
    value: ValueConfig
    lora: LoraConfig | None = key("Train adapters only; null = all weights")
    quantization: QuantizationConfig | None = key(
        "Frozen weights in 8 or 4 bits; null = as they are"
    )


class DatasetConfig(Frozen):
    """What is read of a data set, and how its rows become prompts."""

    name: Text | None = key("Configuration of a hub data set")
    revision: Text | None = key("Branch, tag or commit of a hub data set")
    split: Text = key(
        "Split to use, e.g. train[:200]; left out in eval.sets: data.eval_split, or test; of a file"
        " of its own: train"
    )
    prompt_column: Text = key("Column that holds the prompt: a string, or a list of messages")
    template: str | None = key("Text around a plain prompt; {prompt} and {column} are filled in")
    columns: dict[str, str] = key("Renames columns: {old: new}")
    system: str | None = key("System message put before every conversational prompt")
    chat: bool = key(
        "A prompt that is a string becomes a user's message", since="0.2", before=False
    )
    map: Text | None = key(
        "file.py:name, row (a dict) -> row, before prompts and columns are looked at; null = none",
        since="0.2",
        before=None,
    )
    filter: dict[str, Any] | Text | None = key(
        "Rows to use: {column: value or [values]}, or file.py:name, row -> bool; null = all"
    )
    max_samples: Positive | None = key("Use only the first n rows (that pass); null = all")
    streaming: bool = key("Read row by row and no further than max_samples, keeping nothing else")
    max_prompt_length: Positive | None = key(
        "Tokens; null = what max_completion_length leaves of the model's context and of the"
        " engine's max_model_len, at most 4096",
        default_was=(None, 512),  # which prompts there are is in the data's fingerprint
    )
    overlong: Literal["filter", "error", "truncate_left"] = key("What happens to longer prompts")


class SetConfig(DatasetConfig):
    """One split of one data set."""

    path: Text = key("Hub name, jsonl/json/csv/parquet file, (save_to_disk) folder, make:NAME")


class SourceConfig(SetConfig):
    """One of several data sets that are trained on together."""

    weight: float = key("Share of the draws, as a part of all weights' sum", gt=0, le=1e6)


class Mixture(Frozen):
    """One field per source, each a SourceConfig: `config.model_class` adds them."""


class DataConfig(DatasetConfig):
    path: Text | None = key(
        "Hub name, jsonl/json/csv/parquet file, (save_to_disk) folder, make:NAME; null = mixture"
    )
    mixture: SerializeAsAny[Mixture] | None = key(
        "Several data sets: {name: {path: ..., weight: 2, what differs from data}}; null = path"
    )
    split: Text = key("Split to train on")
    eval_split: Text | None = key("Held-out split, scored at the start and the end; null = none")
    shuffle: bool = key("A new seeded permutation each epoch; false = the file's order")

    @property
    def mixture_weights(self) -> dict[str, float]:
        """Name -> weight of every source of the mixture; {} where there is none."""
        names = type(self.mixture).model_fields if self.mixture is not None else ()
        return {name: getattr(self.mixture, name).weight for name in names}

    @property
    def mixture_sources(self) -> dict[str, "DataConfig"]:
        """Name -> data of every source of the mixture, each as if it were alone."""
        plain = {"eval_split": None, "mixture": None, "shuffle": self.shuffle}
        found = {name: getattr(self.mixture, name) for name in self.mixture_weights}
        return {n: DataConfig(**s.model_dump(exclude={"weight"}) | plain) for n, s in found.items()}


class GenerationConfig(Frozen):
    """Keys every backend understands; a backend adds its own."""

    backend: str = key("Who samples: transformers, vllm_server, vllm_colocate")
    max_completion_length: Positive = key("Most tokens in a completion")
    min_tokens: int = key("Tokens before which no stop id is sampled", ge=0)
    temperature: float = key("Sampling temperature, > 0; log-probabilities use it too", gt=0)
    top_p: float = key("Nucleus sampling; 1 = off", gt=0, le=1)
    top_k: int = key("Sample from the k likeliest tokens; 0 = off", ge=0)
    min_p: float | None = key("Drop tokens less likely than min_p times the likeliest", ge=0, le=1)
    repetition_penalty: float = key("Divides the logits of tokens already there; 1 = off", gt=0)
    stop: list[NotEmpty] = key("Strings that end a completion (they stay in its ids, not its text)")
    stop_token_ids: list[TokenId] = key("More ids that end a completion, beside every EOS id")
    ignore_eos: bool = key("Sample on after EOS, to max_completion_length")
    chat_template_kwargs: dict[str, Any] = key("Passed to the chat template")
    logp_tolerance: float | None = key(
        "Rms nats per token by which sampler and trainer may differ before the run stops; null = by"
        " dtype: 0.02 for float32, 0.1 for half precision, 0.4 for fp8 or a mixture of experts",
        since="0.2",
        before=None,
        gt=0,
        le=100,
    )


class RewardConfig(Frozen):
    """Keys every reward has; each kind of reward adds its own."""

    type: str = key("Which reward: a file of rloo_cli/rewards, or function")
    weight: float = key("Factor of this reward in the score; 0 = only its metric")
    timeout_s: float = key("Seconds one call may take; longer is a failure", gt=0, le=1e6)
    retries: int = key("Further tries after a failure", ge=0)
    on_error: Literal["raise", "none"] | float = key(
        "After a failure: raise = stop the run, none = no score for these rows, or a number"
    )
    max_error_rate: float = key("Share of a step's rows that may fail before we stop", ge=0, le=1)
    nan_is_none: bool = key("NaN means 'does not apply', as in rewards written for TRL")
    scope: Literal["batch", "group", "row"] = key("What one call gets: all rows, a group, a row")
    only: dict[str, str | int | bool | list[str | int | bool]] = key(
        "Rows it is asked about, by their columns: {task: math} or {task: [math, logic]}; {} = all"
    )
    workers: int = key("Processes that make its calls; 0 = a thread of this one", ge=0, le=1024)
    cache: bool = key("Score an equal completion of an equal prompt only once")


class AlgorithmConfig(Frozen):
    """Keys the loop itself reads; an algorithm adds its own."""

    name: str = key("Which algorithm: a file of rloo_cli/algorithms")
    num_generations: int = key("Completions per prompt, K", ge=1)
    num_iterations: Positive = key("Passes over each step's completions")
    num_minibatches: Positive = key("Optimizer steps per pass")

    @property
    def by_token(self) -> bool:
        """Every token has an advantage of its own, which needs the whole step."""
        return False

    @property
    def needs_greedy(self) -> bool:
        """Each prompt is answered once more, greedily, for its baseline."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether a KL is measured, and so a reference model is needed."""
        return False


class DistributedConfig(Frozen):
    engine: Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"] = key(
        "How the model is spread over processes: single = one process; ddp = a copy in each; zero1,"
        " zero2, zero3 = DeepSpeed's stages; fsdp2 = torch's fully_shard"
    )
    num_processes: Positive | None = key(
        "Processes on each machine, one per device; null = one per GPU, 1 without"
    )
    num_nodes: Positive = key("Machines that train, each with num_processes")
    rdzv: Text | None = key(
        "host:port where rank 0 waits for the others; null = found at the start"
    )
    reduce: Literal["each", "last"] = key(
        "fsdp2: gradients travel with each micro-batch, or once, with the update's last; last holds"
        " whole gradients in between, 4 bytes for each parameter on each GPU",
        since="0.2",
        before="each",
    )
    offload: Literal["none", "optimizer", "parameters"] = key(
        "What is kept in the CPU's memory: optimizer state (zero), or weights too (zero3, fsdp2)"
    )
    master_weights: Literal["float32", "none"] = key(
        "Weights of half precision are updated through float32 masters, or as they are"
    )
    timeout_s: float = key("Seconds that processes wait for each other", gt=0, le=1e6)
    threads: int | None = key("CPU threads per process; null = torch's choice", ge=1, le=4096)


class TrainConfig(Frozen):
    prompts_per_step: Positive = key("Prompts per step over all processes, P")
    epochs: float | None = key("Passes over the prompts", gt=0, le=1e9)
    learning_rate: float = key("Peak learning rate", ge=0, le=10)
    lr_scheduler: str = key("transformers' schedule name, or file.py:name")
    lr_scheduler_kwargs: dict[str, Any] = key("Passed to the schedule")
    warmup_steps: int = key("Optimizer updates of linear warm-up", ge=0)
    weight_decay: float = key("AdamW's decoupled weight decay", ge=0)
    max_grad_norm: float | None = key("Clip the gradient's norm to this; null = never", gt=0)
    optimizer: str = key("adamw, or file.py:name of a function (parameters, **kwargs)")
    optimizer_kwargs: dict[str, Any] = key("Passed to the optimizer, e.g. {betas: [0.9, 0.95]}")
    micro_batch_tokens: Positive | None = key(
        "Rows (token places) per forward pass, whole groups; null = from the memory there is"
    )
    micro_batch_size: Positive | None = key(
        "Completions per forward pass instead, whole groups only; null = by micro_batch_tokens"
    )
    no_grad_batch_size: Positive | None = key(
        "Completions per forward without gradient; null = twice micro_batch_size"
    )
    layout: Literal["auto", "shared", "packed", "padded"] = key(
        "Rows of a forward: each prompt once for its group, once per completion, or padded"
    )
    old_logp: Literal["auto", "separate"] = key(
        "The sampler's log-probabilities: from the training forward where exact, or a pass apart"
    )
    forward_all: bool = key("Forward completions too on which nothing depends, for their metrics")
    keep_logits_gb: float | None = key(
        "Keep logits up to this size for the backward pass, which else makes them again; null = 2,"
        " on a GPU a tenth of its memory",
        default_was=(None, 2.0),
        ge=0,
    )
    compile: bool = key(
        "Compile each decoder layer (torch.compile): fewer, larger kernels on a GPU, a minute more"
        " at the start",
        since="0.2",
        before=False,
    )
    on_nonfinite: Literal["stop", "skip"] = key("A non-finite loss or gradient: stop, or skip it")


class Sets(Frozen):
    """One field per held-out set, each a SetConfig: `config.model_class` adds them."""


class EvalConfig(Frozen):
    at_start: bool = key("Score what is held out before the first step")
    every: int = key("Also every n steps; 0 = only at the start and the end", ge=0)
    sets: SerializeAsAny[Sets] = key(
        "Held-out sets: {name: {split: ..., what differs from data}}; none = data.eval_split"
    )
    num_generations: Positive = key("Completions sampled per prompt, K; 1 = greedy alone")
    temperature: float | None = key("Of these K; null = generation.temperature", gt=0)
    pass_at: list[Positive] | None = key("The k of pass@k; null = 1, 2, 4, ... and K")
    pass_reward: str | None = key("Reward that says whether one passes; null = the whole score")
    pass_threshold: float = key("A completion passes from this value on")
    max_samples: Positive | None = key("Use only the first n rows of each set")
    batch_size: Positive = key("Completions made at once")
    judge: SerializeAsAny[Frozen] | None = key("Who compares greedy completions; null = nobody")


class CheckpointConfig(Frozen):
    every: int = key("Steps between two checkpoints; 0 = only at the end, or when stopped", ge=0)
    keep_last: int = key("Complete checkpoints that are kept", ge=2)
    on_low_disk: Literal["stop", "warn"] = key("Less free disk than the checkpoints will need")


class LoggingConfig(Frozen):
    every: Positive = key("Steps per line of metrics")
    samples: int = key("Samples printed per logged step on a plain terminal", ge=0)
    samples_every: Positive = key("Steps per file of samples")
    trl_aliases: bool = key("Also write TRL's spelling of a metric, where it differs")
    console: Literal["auto", "panel", "plain"] = key("auto = a live panel on a terminal")
    objective: str | None = key(
        "Metric a job returns to Hydra's sweeper; null = the held-out score, else the reward",
        since="0.2",
    )


class DebugConfig(Frozen):
    reward_model_path: str | None = key("Loaded instead of every reward model's own path")
    sets_from_data: bool = key("Every set of eval.sets is read from data.path, data.eval_split")
    simple_rewards: bool = key(
        "Every reward scores every row (no `only`); those that need a sandbox or a service are out"
    )
    own_columns: bool = key("data.columns is empty, whatever a recipe renames")
    judge_stand_in: bool = key("A judge is reward_model_path, against the column `reference`")


class RunConfig(Frozen):
    """One experiment, wholly in config."""

    name: Name | None = key("Names the run's folder; null = recipe, model and a hash")
    root: Text = key("Every run writes under root/name")
    seed: int = key("Seeds data order, sampling and torch", ge=0, lt=2**32)
    max_steps: Positive | None = key("Steps (rollout batches) to do")
    total_episodes: Positive | None = key("Completions to do; steps = this / (P*K), rounded up")
    resume: str = key("never; auto = go on from the newest checkpoint; or a checkpoint's folder")
    resume_allow_changes: bool = key("Go on with another model, data, schedule or algorithm")
    model: ModelConfig
    data: DataConfig
    reward: SerializeAsAny[Frozen]  # one field per entry, each a RewardConfig
    generation: SerializeAsAny[GenerationConfig]
    algorithm: SerializeAsAny[AlgorithmConfig]
    distributed: DistributedConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    debug: DebugConfig
    sft: SftConfig
    reward_model: RewardModelConfig
    slurm: SlurmConfig

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        """Name -> entry of every reward."""
        return {name: getattr(self.reward, name) for name in type(self.reward).model_fields}

    @property
    def held_out(self) -> dict[str, DataConfig]:
        """Name -> data of every held-out set; "" names the one of data.eval_split."""
        sets = {name: getattr(self.eval.sets, name) for name in type(self.eval.sets).model_fields}
        if sets:
            plain: dict[str, Any] = {"eval_split": None, "shuffle": False, "mixture": None}
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
