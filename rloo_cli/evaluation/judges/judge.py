"""What evaluations call: build the judge of a config, let it judge, say what came of it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from rloo_cli.config import template
from rloo_cli.config.judge import AGAINST_REFERENCE
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Rollout
from rloo_cli.data.prompts import Prompts
from rloo_cli.evaluation.judges import llm
from rloo_cli.evaluation.judges import reward as judges_reward
from rloo_cli.evaluation.judges.pairs import (
    JsonObject,
    JudgePair,
    check_reference_column,
    pairs_of_set,
)
from rloo_cli.evaluation.judges.win_rate import WinRate, compute_win_rate
from rloo_cli.reporting import eval_lines
from rloo_cli.reporting.panel import clean_line
from rloo_cli.rewards.common import http_client
from rloo_cli.rewards.common.http_client import EndpointError
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.rewards.engine.build import Reward, build_reward
from rloo_cli.rewards.engine.columns import check_reward_columns
from rloo_cli.utils import signals
from rloo_cli.utils.errors import ConfigError, DataError, Problem, RewardError

REFERENCE_COLUMN_KEY = "eval.judge.reference_column"
OtherAnswers = Mapping[
    str, Mapping[int, Rollout]
]  # set -> row of the split -> another model's answer


@dataclass
class Judge:
    """The judge of a config, ready to be asked."""

    config: RunConfig
    tokenizer: Any  # the policy's
    reward: Reward | None  # None: a language model is asked
    training: bool  # beside it: then a judge that is gone ends nothing

    @property
    def judge_config(self) -> Any:
        """`eval.judge`."""
        return self.config.eval.judge

    @property
    def description(self) -> str:
        """The judge in words: what kind of thing prefers."""
        if self.reward is None:
            return f"{self.judge_config.model}, a language model at {self.judge_config.base_url}"
        path = getattr(self.judge_config.reward, "path", "")
        if self.judge_config.reward.type == "model":
            return f"reward model {path}"
        return f"the reward {self.judge_config.reward.type} {path}".strip()

    @property
    def metadata(self) -> JsonObject:
        """What the verdicts depend on, for the results: the judge and the hash of its question."""
        asked_with = {"system": None, "template": None, "pattern": None}
        if self.reward is None:
            asked_with = {name: getattr(self.judge_config, name) for name in asked_with}
        text = json.dumps(asked_with, sort_keys=True).encode()
        values = self.judge_config.model_dump(mode="json")
        return {
            "judge": self.description,
            "question_sha256": hashlib.sha256(text).hexdigest() if self.reward is None else None,
            "keys": values,
        }


@dataclass
class JudgedSets:
    """One evaluation's verdicts."""

    pairs: list[JudgePair]
    win_rates: dict[str, WinRate]  # by set
    num_unpaired: dict[str, int]  # prompts of a set that the other model has no answer to
    notes: list[str]

    @property
    def pair_records(self) -> list[JsonObject]:
        """The lines of pairs.jsonl."""
        return [pair.to_record() for pair in self.pairs]


def build_judge(
    config: RunConfig, sets: Mapping[str, Prompts], tokenizer: Any, training: bool
) -> Judge | None:
    """The judge that the config names, None for none; before any weights load.

    A language model is asked one question. Raises RunError.
    """
    keys: Any = config.eval.judge
    if keys is None:
        return None
    if keys.against != AGAINST_REFERENCE and training:
        why = f"eval.judge.against = {keys.against!r}: a second model, beside the one in training"
        fix = "eval.judge.against=reference here, and rloo eval RUN eval.judge.against=... after it"
        what = "a training compares with reference texts only"
        raise ConfigError(Problem(what, "eval.judge.against", why, fix))
    if keys.type == "openai":
        reward = None
        http_client.check_api_key("eval.judge.api_key_env", keys.api_key_env)
        wanted = [
            n for n in template.template_names(keys.template) if n not in ("prompt", "a", "b")
        ]
    else:
        reward, wanted = build_reward("judge", keys.reward), []
    for name, prompts in sets.items():
        columns = list(prompts.examples[0])
        if keys.against == AGAINST_REFERENCE:
            check_reference_column(name, prompts, keys.reference_column, REFERENCE_COLUMN_KEY)
        if reward is not None:
            check_reward_columns([reward], columns)
        if lost := [n for n in wanted if n not in columns]:
            why = f"columns of {name or 'what is held out'}: {', '.join(columns)}"
            what = f"the judge's template names {{{lost[0]}}}, which is no column"
            raise DataError(Problem(what, "eval.judge.template", why))
    if keys.type == "openai":
        try:
            llm.probe_llm_judge(keys, wanted)
        except EndpointError as error:
            raise _judge_gone_error(error) from None
    return Judge(config, tokenizer, reward, training)


def judge_samples(
    judge: Judge,
    sets: Mapping[str, Prompts],
    samples: Mapping[str, Sequence[JsonObject]],
    state: TrainerState,
    other_answers: OtherAnswers | None = None,
) -> JudgedSets:
    """Judge the greedy samples of every set.

    A service that no longer answers is a RewardError; in a training, which does not depend on it,
    a note, and its pairs are invalid. Raises Stopped too.
    """
    keys, found = judge.judge_config, JudgedSets([], {}, {}, [])
    for name, prompts in sets.items():
        greedy = [s for s in samples[name] if s["greedy"]][: keys.max_pairs]
        theirs = None if other_answers is None else other_answers[name]
        pairs = pairs_of_set(name, prompts, greedy, theirs, keys.reference_column, judge.tokenizer)
        found.num_unpaired[name] = len(greedy) - len(pairs)
        if judge.reward is None:
            _ask_llm_judge(judge, pairs, found)
        else:
            size = judge.config.eval.batch_size
            plain = (judge.reward, pairs, judge.tokenizer, prompts.conversational, state, size)
            judges_reward.judge_pairs_by_reward(*plain)
        found.pairs += pairs
        lengths = [(p.ours.num_tokens, p.theirs.num_tokens) for p in pairs]
        found.win_rates[name] = compute_win_rate([p.value for p in pairs], lengths)
        if found.num_unpaired[name]:
            found.notes.append(
                f"{found.num_unpaired[name]} prompts are too long for the other model"
            )
    lost = [p for p in found.pairs if p.value is None]
    if lost:
        why = next(
            (s["why"] for p in lost for s in p.judge_answers if s.get("why")),
            "the reward gave none",
        )
        found.notes.append(
            f"warning: {len(lost)} of {len(found.pairs)} pairs have no verdict and are left out;"
            f" the first: {why}"
        )
    return found


def _ask_llm_judge(judge: Judge, pairs: list[JudgePair], judged: JudgedSets) -> None:
    error = llm.judge_pairs_by_llm(
        judge.judge_config, pairs, judge.config.seed, signals.raise_if_stopped
    )
    if error is not None and not judge.training:
        raise _judge_gone_error(error)
    if error is not None:
        judged.notes.append(f"warning: the judge is gone: {error}")


def _judge_gone_error(error: EndpointError) -> RewardError:
    fix = "correct eval.judge, or start its server; judge=null leaves it out"
    return RewardError(Problem("the judge cannot be asked", "eval.judge", str(error), fix))


# What is said of it.


def judge_metrics(judged: JudgedSets) -> JsonObject:
    """The metrics of all sets. Rates that nothing was judged for are absent."""
    row: JsonObject = {}
    for name, told in judged.win_rates.items():
        start = eval_lines.eval_prefix(name)
        own = {"": told.rate, "/low": told.low, "/high": told.high}
        own |= {"/length_controlled": told.controlled}
        own |= {f"/{n}": getattr(told, n) for n in ("wins", "ties", "losses", "invalid")}
        own |= {"/mean_length": told.length, "/mean_other_length": told.other_length}
        row |= {f"{start}win_rate{n}": value for n, value in own.items() if value is not None}
    values = [pair.value for pair in judged.pairs if pair.value is not None]
    if values:
        row["judge/win_rate"] = sum(values) / len(values)
    return row | {"judge/invalid": len(judged.pairs) - len(values)}


def judge_table(judge: Judge, judged: JudgedSets) -> Table:
    """Wins and losses, with a column for each set, under who preferred what."""
    against = judge.judge_config.against
    other = (
        f"the texts of {judge.judge_config.reference_column}"
        if against == AGAINST_REFERENCE
        else against
    )
    title = f"preferred by {judge.description}, over {other}"
    if judge.reward is not None:
        title += " (its own preference, not a person's)"
    shown = Table("judged", *judged.win_rates, box=box.SIMPLE_HEAD, title=Text(clean_line(title)))
    columns = [_table_lines(told) for told in judged.win_rates.values()]
    for label in columns[0]:
        shown.add_row(label, *[column[label] for column in columns])
    return shown


def _table_lines(win_rate: WinRate) -> dict[str, str]:
    limits = "n/a"
    if win_rate.low is not None and win_rate.high is not None:
        limits = f"{win_rate.low:.1%} to {win_rate.high:.1%} ({win_rate.interval})"
    return {
        "win rate, a tie is 1/2": _format_share(win_rate.rate),
        "95 % interval": limits,
        "wins, ties, losses": f"{win_rate.wins}, {win_rate.ties}, {win_rate.losses}",
        "invalid, left out": f"{win_rate.invalid} of {win_rate.invalid + win_rate.num_judged}",
        "mean tokens, theirs": f"{_format_mean(win_rate.length)}, "
        f"{_format_mean(win_rate.other_length)}",
        "win rate at equal lengths": _format_share(win_rate.controlled),
    }


def _format_share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _format_mean(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f}"


def judge_summary(judge: Judge, judged: JudgedSets) -> JsonObject:
    """All of it, for judge.json."""
    sets: JsonObject = {}
    for name, told in judged.win_rates.items():
        sets[name or "held out"] = vars(told) | {"unpaired": judged.num_unpaired[name]}
    return judge.metadata | {"sets": sets}
