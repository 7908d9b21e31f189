"""What `rloo reward test` tries: the rewards, and rows of the data with completions.

The config is the run's own: a recipe and keys. The reward is one of the recipe's, a choice of
conf/reward, or a function `file.py:name`; columns are checked as in a run. Imports torch only for a
reward that reads tokens or loads a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn, TypeVar

from rloo_cli.cli.reward import completions
from rloo_cli.cli.reward.completions import SHORTEST_FILLER, ProbeCompletion
from rloo_cli.config import check, compose, registry
from rloo_cli.config.compose import ComposedConfig
from rloo_cli.config.old_names import nearest_names
from rloo_cli.config.schema import DataConfig, RunConfig
from rloo_cli.data import dataset, mixture, prompts, render, splits
from rloo_cli.data.batch import Group, Prompt, Rollout
from rloo_cli.data.dataset import OpenedSplit
from rloo_cli.data.exact_values import rows_of_dataset
from rloo_cli.reporting.panel import last_message
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward, build_reward
from rloo_cli.rewards.engine.columns import check_reward_splits
from rloo_cli.rewards.engine.ready import run_ready_hooks
from rloo_cli.utils import paths
from rloo_cli.utils.errors import DataError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
TOKEN_ARGUMENTS = {"completion_ids", "completions_ids", "prompt_ids"}
NOT_AN_ANSWER = ("code_tests", "ifeval")  # types whose column tells how to judge an answer
NOT_ANSWER_COLUMNS = ("question", "problem", "query", "instruction", "context", "task", "source")
CHARACTERS_PER_TOKEN = 4  # of English text, approximately


@dataclass
class ProbeRow:
    """A row of the data, and the completions to test with it."""

    prompt: Prompt
    example: JsonObject  # the columns passed to rewards
    column: str | None  # of the right answer; None if there is none
    completions: list[ProbeCompletion]
    prompt_ids: list[int] | None = None  # if a reward model needs them


@dataclass
class ProbeSubject:
    """The rewards of a probe, and how to build the groups that they score."""

    config: RunConfig
    rewards: list[Reward]
    context: RewardContext
    rows: list[ProbeRow]
    tokenizer: "PreTrainedTokenizerBase | None" = None  # if a reward reads tokens
    loads_models: bool = False
    notes: list[str] = field(default_factory=list)

    def make_group(self, row: ProbeRow, number: int, chosen: Sequence[ProbeCompletion]) -> Group:
        """A group of these completions of a row, as the sampler would return it."""
        rollouts = [self._make_rollout(completion.text) for completion in chosen]
        prompt_ids = row.prompt_ids or self._encode_text(last_message(row.prompt))
        return Group(number, row.example, row.prompt, prompt_ids, rollouts)

    def _make_rollout(self, text: str) -> Rollout:
        ids, reason = self._encode_text(text), "stop"
        most = self.config.generation.max_completion_length
        if self.loads_models and len(ids) > most:  # cut to the length that a run can sample
            ids, reason = ids[:most], "length"
            assert self.tokenizer is not None
            text = str(self.tokenizer.decode(ids))
        elif self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids = [*ids, int(self.tokenizer.eos_token_id)]
        return Rollout(ids, text, reason, reason == "stop", 0, 0)

    def _encode_text(self, text: str) -> list[int]:
        """Token ids; if no reward reads them, the text's bytes, so that lengths still differ."""
        if self.tokenizer is None:
            return [*text.encode("utf-8", "surrogatepass")] or [0]
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def compose_subject(
    name: str | None, overrides: Sequence[str], other: str | None = None
) -> tuple[ComposedConfig, RunConfig, list[str]]:
    """The config with the reward `name`. -> composed, checked, names of its rewards

    `name`: `file.py:function`, a reward of the recipe, a choice of conf/reward; None = all rewards
    of the recipe. `other`: a second reward to test, whose keys are among the overrides too.
    Raises ConfigError.
    """
    if other is not None and _entry_name(other) != _entry_name(name):
        overrides = [w for w in overrides if not w.startswith(f"reward.{_entry_name(other)}.")]
    extra: list[str] = []
    chosen: list[str] | None = None
    if name is not None and ":" in name:
        extra = ["reward=function", f"reward.function.path={_quoted(name)}"]
    elif name is not None:
        entries = compose.compose_config(overrides).values.get("reward") or {}
        own = [entry for entry, values in entries.items() if "type" in (values or {})]
        choices = paths.group_choices(compose.split_config_dirs(overrides)[1])["reward"]
        if name in own:
            chosen = [name]
        elif name in choices:
            extra = [f"reward={name}"]
        else:
            _refuse_unknown_reward(name, [*own, *choices])
    if extra and any(word.startswith("reward=") for word in overrides):
        what = f"{name} and reward=... are both given"
        why = f"both choose the reward: {extra[0]} and the command line"
        refuse("command line", what, "omit one of them", why)
    composed = compose.compose_config([*extra, *overrides])
    config = check.check_config(composed)
    return composed, config, chosen or list(config.rewards)


def _entry_name(name: str | None) -> str | None:
    """The name under `reward` for a command-line name."""
    return "function" if name is not None and ":" in name else name


def _quoted(path: str) -> str:
    escaped = path.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _refuse_unknown_reward(name: str, known: Sequence[str]) -> NoReturn:
    close = nearest_names(name, known)
    fix = f"did you mean {' or '.join(close)}?" if close else "rloo reward list"
    if name.endswith(".py"):
        fix = f"{name}:FUNCTION"
    why = "neither a reward of the recipe nor a choice of conf/reward; for your own, file.py:name"
    refuse("command line", f"reward {name!r} does not exist", fix, why)


def open_subject(config: RunConfig, names: Sequence[str], num_rows: int) -> ProbeSubject:
    """Build the rewards `names` and read `num_rows` rows of the training data. Raises RunError."""
    if not names:
        why = "reward is empty, and the command line names no reward"
        refuse("reward", "the config has no reward", "reward=accuracy", why)
    chosen = [build_reward(name, config.rewards[name]) for name in names]
    sources = splits.split_configs(config, training=True)
    opened = _open_rows(sources, num_rows)
    check_reward_splits(config, opened, chosen)
    rows, conversational = _read_rows(sources, opened, num_rows)
    state = TrainerState(0, 0, config.num_steps() or 1, 0.0, 0, 0, 1.0)
    subject = ProbeSubject(config, chosen, RewardContext(conversational, state), [])
    prompt_ids = _load_for_rewards(subject, opened)
    filler = max(SHORTEST_FILLER, config.generation.max_completion_length * CHARACTERS_PER_TOKEN)
    subject.rows = _with_completions(rows, chosen, filler)
    for row, ids in zip(subject.rows, prompt_ids, strict=False):
        row.prompt_ids = ids
    return subject


def _open_rows(
    sources: Mapping[str | None, DataConfig], num_rows: int
) -> dict[str | None, OpenedSplit]:
    """The first rows of the training split, or of each source of a mixture."""
    training = {n: s for n, s in sources.items() if n is None or splits.is_mixture_key(n)}
    opened: dict[str | None, OpenedSplit] = {}
    for name, source in training.items():
        most = min(num_rows, source.max_samples or num_rows)
        with splits.errors_naming_split(name, source):
            few = source.model_copy(update={"max_samples": most})
            opened[name] = dataset.open_split(few, few.split)
    return opened


def _read_rows(
    sources: Mapping[str | None, DataConfig], opened: dict[str | None, OpenedSplit], num_rows: int
) -> tuple[list[tuple[Prompt, JsonObject, JsonObject]], bool]:
    """Prompt, columns for rewards, and all columns of each row; whether they are conversations."""
    names: Sequence[str] = []
    if None not in opened:
        mixed = splits.mixture_entries(opened)
        names = mixture.mixture_columns(mixed, splits.mixture_entries(sources))
    parts = []
    for name, part in opened.items():
        source = sources[name]
        with splits.errors_naming_split(name, source):
            rendered, examples, conversational = render.render_prompts(part.dataset, source)
        if name is not None:
            label = {mixture.SOURCE_COLUMN: name.removeprefix(splits.MIXTURE_PREFIX)}
            empty: JsonObject = {c: None for c in names if c not in render.NOT_FOR_REWARDS}
            examples = [empty | example | label for example in examples]
        parts.append([*zip(rendered, examples, rows_of_dataset(part.dataset), strict=True)])
    if not any(parts):
        why = f"read 0 rows of {', '.join(str(sources[name].path) for name in opened)}"
        fix = "use data with at least one row"
        refuse("data.path", "the data has no rows", fix, why, error=DataError)
    return _take_in_turns(parts)[:num_rows], conversational


def _take_in_turns(parts: Sequence[Sequence[T]]) -> list[T]:
    """The first item of every part, then the second, and so on."""
    longest = max(map(len, parts), default=0)
    return [part[i] for i in range(longest) for part in parts if i < len(part)]


def _with_completions(
    rows: Sequence[tuple[Prompt, JsonObject, JsonObject]], rewards: Sequence[Reward], filler: int
) -> list[ProbeRow]:
    columns = [column for reward in rewards for column in _answer_columns(reward)]
    answers = [completions.right_answer(every, columns) for _, _, every in rows]
    shorts = [answer.short for answer in answers if answer is not None]
    probe_rows = []
    for (prompt, example, _), answer in zip(rows, answers, strict=True):
        text = last_message(prompt)
        if answer is None:
            right = [*completions.plain_completions(text)]
            tricks = [*completions.blank_tricks(text, filler)]
        else:
            right = [*completions.right_completions(answer)]
            others = [short for short in shorts if short != answer.short]
            wrong = completions.wrong_answers(answer, others)
            tricks = [*completions.trick_completions(answer, text, wrong, filler)]
        padded = [completions.padded_completion(one, filler) for one in right[:1]]
        column = None if answer is None else answer.column
        probe_rows.append(ProbeRow(prompt, example, column, [*right, *tricks, *padded]))
    return probe_rows


def _answer_columns(reward: Reward) -> list[str]:
    """Columns with the right answer, according to a reward's config or signature."""
    if reward.config.type in NOT_AN_ANSWER:
        return []
    column = getattr(reward.config, "column", None)
    left_out = {*NOT_ANSWER_COLUMNS, *reward.config.only}
    needed = [name for name in reward.required_columns if name not in left_out]
    known = [name for name in needed if name in completions.ANSWER_COLUMNS]
    return [*([column] if column else []), *known, *needed]


def _load_for_rewards(
    subject: ProbeSubject, opened: dict[str | None, OpenedSplit]
) -> list[list[int]]:
    """Load the tokenizer if a reward reads tokens, and everything that rewards load.

    Returns the ids of the rows' prompts if a reward loads a model, else nothing.
    """
    modules = [registry.registered_module("rewards", r.config.type) for r in subject.rewards]
    subject.loads_models = any(hasattr(module, "ready") for module in modules)
    if not subject.loads_models and not any(r.reads_any(TOKEN_ARGUMENTS) for r in subject.rewards):
        return []
    from rloo_cli.policy import load  # lazy: torch, not needed by other rewards
    from rloo_cli.utils import process_exit  # lazy: torch

    process_exit.silence_libraries()
    subject.tokenizer = load.load_policy_tokenizer(subject.config.model)
    return _run_hooks(subject, opened, subject.tokenizer) if subject.loads_models else []


def _run_hooks(
    subject: ProbeSubject, opened: dict[str | None, OpenedSplit],
    tokenizer: "PreTrainedTokenizerBase",
) -> list[list[int]]:  # fmt: skip
    import torch

    from rloo_cli.policy import reward_load  # lazy: torch

    config, sources = subject.config, splits.split_configs(subject.config, training=True)
    tokenized = {
        name: prompts.tokenize_prompts(
            part.dataset, sources[name], tokenizer, config.generation.chat_template_kwargs, None,
            config.seed,
        )
        for name, part in opened.items()
    }  # fmt: skip
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    run_ready_hooks(
        subject.rewards, tokenizer, tokenized, config.generation.max_completion_length, device,
        subject.notes.append, reward_load,
    )  # fmt: skip
    return _take_in_turns([part.prompt_ids for part in tokenized.values()])


def lenient_reward(reward: Reward, **changes: object) -> Reward:
    """The same reward, with failures reported instead of raised."""
    update = {"on_error": "none", "max_error_rate": 1.0, "cache": False} | changes
    return replace(reward, config=reward.config.model_copy(update=update))
