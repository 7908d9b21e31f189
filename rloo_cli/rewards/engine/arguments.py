"""The arguments of a reward's call: the table of docs/rewards.md.

Completions are numbered prompt by prompt: index = prompt * K + k. Every call gets its own lists,
so a reward that changes its arguments changes neither the rollouts nor the arguments of other
rewards.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace

from rloo_cli.config.column_names import field_or_none
from rloo_cli.data.batch import Group, Rollout, Turn, copy_value
from rloo_cli.rewards.common.text import Completion
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.metrics import is_reserved

# Columns that are never passed: rewards get the first as `prompts`, and could mistake the others
# for sampled completions.
HIDDEN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
REWARD_KWARGS = frozenset((
    "prompts", "completions", "completion_ids", "completions_ids", "prompt_ids", "finish_reasons",
    "sampled_ids", "environments", "environment_rewards", "group_index", "num_generations",
    "behaviour_logps", "trainer_state", "columns", "log_extra", "log_metric",
))  # fmt: skip
# Fields of every sample; rewards must not log values under these names.
RESERVED_SAMPLE_FIELDS = frozenset((
    "draw", "k", "prompt", "completion", "finish_reason", "terminated", "prompt_length",
    "completion_length", "seed", "weight_version", "score", "shaped", "kl", "reward",
    "advantage", "rewards", "token_strip", "turns", "episode", "failed", "images",
))  # fmt: skip


def _name_taken_message(function: str, name: str, owner: str) -> str:
    return f"{function}({name!r}): {owner} of this name already; call it {'my_' + name!r}"


@dataclass(frozen=True)
class TrainerState:
    """The run's progress, for rewards that change during training (a curriculum)."""

    global_step: int  # optimizer updates
    step: int  # rollout batches
    max_steps: int
    epoch: float
    episode: int
    num_input_tokens_seen: int
    num_train_epochs: float
    log_history: list[JsonObject] = field(default_factory=list)
    # Further fields of transformers' TrainerState, which rewards written for TRL may read.
    logging_steps: int = 1
    eval_steps: int = 0
    save_steps: int = 0
    train_batch_size: int = 0  # completions of a step, over all ranks
    is_world_process_zero: bool = True
    is_local_process_zero: bool = True
    total_flos: float = 0.0  # not counted
    best_metric: float | None = None  # checkpoints are not selected by a metric
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: JsonObject | None = None
    stateful_callbacks: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class RewardContext:
    """Values shared by all reward calls of a step."""

    conversational: bool  # decided once per data set
    trainer_state: object  # a TrainerState, or any object with its fields
    poll: Callable[[], None] | None = None  # called while waiting; may raise to stop that


@dataclass
class RewardCallLog:
    """The logged values of one call. They are dropped if the call fails."""

    num_completions: int
    extras: dict[str, list[object]] = field(default_factory=dict)
    metrics: list[tuple[str, float]] = field(default_factory=list)

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        if column in RESERVED_SAMPLE_FIELDS:
            raise ValueError(_name_taken_message("log_extra", column, "every sample has a field"))
        values = list(values)
        count, wanted = len(values), self.num_completions
        if count != wanted:
            raise ValueError(f"log_extra({column!r}) got {count} values, not {wanted}")
        self.extras[column] = values

    def log_metric(self, name: str, value: float) -> None:
        if is_reserved(name):
            raise ValueError(_name_taken_message("log_metric", name, "the run has a metric"))
        if not math.isfinite(value):
            raise ValueError(f"log_metric({name!r}) got {value}")
        self.metrics.append((name, float(value)))


@dataclass
class CompletionTable:
    """The completions of a step: K of each of P = len(groups) prompts."""

    groups: Sequence[Group]
    context: RewardContext
    k: int  # rollouts per group, once it is scored
    fields: Sequence[str] = ()  # nested fields that rewards need, among their columns

    def __post_init__(self) -> None:
        names = {c: None for g in self.groups for c in g.example if c not in HIDDEN_COLUMNS}
        self.columns = list(names)  # in the data set's order
        self.image_columns = sorted({c for g in self.groups for c in _image_columns(g)})

    def __len__(self) -> int:
        return len(self.groups) * self.k

    def group_and_rollout(self, index: int) -> tuple[Group, Rollout]:
        group = self.groups[index // self.k]
        return group, group.rollouts[index % self.k]

    def call_arguments(
        self,
        indices: Sequence[int],
        parameter_names: frozenset[str] | None,
        fixed_arguments: Mapping[str, object],
    ) -> tuple[dict[str, object], RewardCallLog]:
        """Keyword arguments of one call on the completions `indices`, and the log they write to.

        `parameter_names`: those in the reward's signature; None for all. `columns`, all columns
        in one dict, is for rewards whose column is a key of their config; only a reward that
        names it gets it.
        """
        log = RewardCallLog(len(indices))
        pairs = [self.group_and_rollout(i) for i in indices]
        makers: dict[str, Callable[[], object]] = {
            "prompts": lambda: [copy_value(g.prompt) for g, _ in pairs],
            "completions": lambda: [self._completion_value(r) for _, r in pairs],
            "completion_ids": lambda: [list(r.completion_ids) for _, r in pairs],
            "sampled_ids": lambda: [list(r.sampled_ids) for _, r in pairs],
            "environment_rewards": lambda: [r.environment_reward for _, r in pairs],
            "environments": lambda: [_copy_environment(r.environment) for _, r in pairs],
            "prompt_ids": lambda: [list(g.prompt_ids) for g, _ in pairs],
            "finish_reasons": lambda: [r.finish_reason for _, r in pairs],
            "behaviour_logps": lambda: [copy_value(r.behaviour_logp) for _, r in pairs],
            "group_index": lambda: [i // self.k for i in indices],
            "num_generations": lambda: self.k,
            "trainer_state": lambda: _copy_trainer_state(self.context.trainer_state),
            "log_extra": lambda: log.log_extra,
            "log_metric": lambda: log.log_metric,
        }
        makers |= self._column_makers(pairs, parameter_names)
        if parameter_names is not None:
            alias = {"completion_ids"} if "completions_ids" in parameter_names else set()
            needed = parameter_names | alias
            makers = {name: make for name, make in makers.items() if name in needed}
        arguments = {name: make() for name, make in makers.items() if name not in fixed_arguments}
        if "completion_ids" in arguments:  # the same list under both of TRL's names
            arguments["completions_ids"] = arguments["completion_ids"]
        arguments |= copy_fixed_arguments(fixed_arguments)
        if parameter_names is not None:
            arguments = {n: v for n, v in arguments.items() if n in parameter_names}
        return arguments, log

    def _column_makers(
        self, pairs: Sequence[tuple[Group, Rollout]], parameter_names: frozenset[str] | None
    ) -> dict[str, Callable[[], object]]:
        rows = [group.example for group, _ in pairs]
        returned_rows = [rollout.columns or {} for _, rollout in pairs]  # of each rollout
        makers: dict[str, Callable[[], object]] = {}
        makers |= {c: partial(_column_values, rows, c) for c in self.columns}
        shown = {c: partial(_shown_images, pairs, c) for c in self.image_columns}
        returned = dict.fromkeys(c for row in returned_rows for c in row)
        makers |= shown | {c: partial(_column_values, returned_rows, c) for c in returned}
        if parameter_names is not None and "columns" in parameter_names:
            inside = {c: makers[c] for c in (*self.columns, *returned)}
            for name in self.fields:
                inside.setdefault(name, partial(_column_values, rows, name))
            makers["columns"] = lambda: {c: make() for c, make in inside.items()}
        return makers

    def _completion_value(self, rollout: Rollout) -> Completion:
        if rollout.turns is not None:
            messages: Completion = copy_value(episode_messages(rollout.turns))
            return messages
        if self.context.conversational:
            return [{"role": "assistant", "content": rollout.text}]
        return rollout.text


def episode_messages(turns: Sequence[Turn]) -> list[JsonObject]:
    """An episode as a conversation: the policy's messages and calls, and the answers."""
    messages: list[JsonObject] = []
    for turn in turns:
        messages += [dict(message) for message in turn.observation]
        said: JsonObject = {"role": "assistant", "content": turn.text}
        if turn.calls:
            said["tool_calls"] = [{"type": "function", "function": dict(c)} for c in turn.calls]
        messages.append(said)
    return messages


def _column_values(rows: Sequence[JsonObject], column: str) -> list[object]:
    """Copies of a column's or nested field's values, None if a row lacks it."""
    return [copy_value(field_or_none(row, column)) for row in rows]


def _image_columns(group: Group) -> list[str]:
    """The name under which rewards get a prompt's images: its column's, or `images`."""
    return [] if group.media is None else [group.media.column or "images"]


def _shown_images(pairs: Sequence[tuple[Group, Rollout]], column: str) -> list[object]:
    """The images of each prompt, a list unless the column is `image`; None without any."""
    shown: list[object] = []
    for group, _ in pairs:
        images = None if group.media is None else [one.copy() for one in group.media.images]
        shown.append(images[0] if images and column == "image" and len(images) == 1 else images)
    return shown


def copy_fixed_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments with copies of lists and dicts, which belong to the config."""
    return {n: copy_value(v) if isinstance(v, list | dict) else v for n, v in arguments.items()}


def _copy_environment(values: JsonObject | None) -> SimpleNamespace:
    return SimpleNamespace(**{name: copy_value(value) for name, value in (values or {}).items()})


def _copy_trainer_state(state: object) -> object:
    """The state with its own copy of the history, whose lines belong to the run's log."""
    if not isinstance(state, TrainerState):
        return state
    return replace(state, log_history=[dict(line) for line in state.log_history])
