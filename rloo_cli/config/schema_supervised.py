"""Keys of the two small trainings that stand before RLOO: `rloo sft` and `rloo reward-model`.

A key that is null is as in the sections of the run itself: the recipe of an experiment names its
model and data once. A training run reads none of these.
"""

from rloo_cli.config.schema_keys import Frozen, Positive, Text, key


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
