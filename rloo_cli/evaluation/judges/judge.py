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
from rloo_cli.config.judge import REFERENCE
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Rollout
from rloo_cli.data.prompts import Prompts
from rloo_cli.evaluation.judges import llm
from rloo_cli.evaluation.judges import reward as judges_reward
from rloo_cli.evaluation.judges.pairs import Pair, Row, check_column, of_set
from rloo_cli.evaluation.judges.win_rate import Tally, tally
from rloo_cli.reporting import eval_rows
from rloo_cli.reporting.panel import clean
from rloo_cli.rewards.common import http_client
from rloo_cli.rewards.common.http_client import EndpointError
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.rewards.engine.build import Reward, build
from rloo_cli.rewards.engine.columns import check_columns
from rloo_cli.utils import signals
from rloo_cli.utils.errors import ConfigError, DataError, Problem, RewardError

COLUMN = "eval.judge.reference_column"
Others = Mapping[str, Mapping[int, Rollout]]  # set -> row of the split -> another model's answer


@dataclass
class Judge:
    """The judge of a config, ready to be asked."""

    config: RunConfig
    tokenizer: Any  # the policy's
    reward: Reward | None  # None: a language model is asked
    training: bool  # beside it: then a judge that is gone ends nothing

    @property
    def keys(self) -> Any:
        """`eval.judge`."""
        return self.config.eval.judge

    @property
    def who(self) -> str:
        """The judge in words: what kind of thing prefers."""
        if self.reward is None:
            return f"{self.keys.model}, a language model at {self.keys.base_url}"
        path = getattr(self.keys.reward, "path", "")
        if self.keys.reward.type == "model":
            return f"reward model {path}"
        return f"the reward {self.keys.reward.type} {path}".strip()

    @property
    def about(self) -> Row:
        """What the verdicts depend on, for the results: the judge and the hash of its question."""
        asked_with = {"system": None, "template": None, "pattern": None}
        if self.reward is None:
            asked_with = {name: getattr(self.keys, name) for name in asked_with}
        text = json.dumps(asked_with, sort_keys=True).encode()
        values = self.keys.model_dump(mode="json")
        return {
            "judge": self.who,
            "question_sha256": hashlib.sha256(text).hexdigest() if self.reward is None else None,
            "keys": values,
        }


@dataclass
class Judged:
    """One evaluation's verdicts."""

    pairs: list[Pair]
    tallies: dict[str, Tally]  # by set
    unpaired: dict[str, int]  # prompts of a set that the other model has no answer to
    notes: list[str]

    @property
    def rows(self) -> list[Row]:
        """The lines of pairs.jsonl."""
        return [pair.row() for pair in self.pairs]


def make(
    config: RunConfig, sets: Mapping[str, Prompts], tokenizer: Any, training: bool
) -> Judge | None:
    """The judge that the config names, None for none; before any weights load.

    A language model is asked one question. Raises RunError.
    """
    keys: Any = config.eval.judge
    if keys is None:
        return None
    if keys.against != REFERENCE and training:
        why = f"eval.judge.against = {keys.against!r}: a second model, beside the one in training"
        fix = "eval.judge.against=reference here, and rloo eval RUN eval.judge.against=... after it"
        what = "a training compares with reference texts only"
        raise ConfigError(Problem(what, "eval.judge.against", why, fix))
    if keys.type == "openai":
        reward = None
        http_client.check_key("eval.judge.api_key_env", keys.api_key_env)
        wanted = [n for n in template.names(keys.template) if n not in ("prompt", "a", "b")]
    else:
        reward, wanted = build("judge", keys.reward), []
    for name, prompts in sets.items():
        columns = list(prompts.rows[0])
        if keys.against == REFERENCE:
            check_column(name, prompts, keys.reference_column, COLUMN)
        if reward is not None:
            check_columns([reward], columns)
        if lost := [n for n in wanted if n not in columns]:
            why = f"columns of {name or 'what is held out'}: {', '.join(columns)}"
            what = f"the judge's template names {{{lost[0]}}}, which is no column"
            raise DataError(Problem(what, "eval.judge.template", why))
    if keys.type == "openai":
        try:
            llm.knock(keys, wanted)
        except EndpointError as error:
            raise _gone(error) from None
    return Judge(config, tokenizer, reward, training)


def judge(
    judge: Judge,
    sets: Mapping[str, Prompts],
    samples: Mapping[str, Sequence[Row]],
    state: TrainerState,
    others: Others | None = None,
) -> Judged:
    """Judge the greedy samples of every set.

    A service that no longer answers is a RewardError; in a training, which does not depend on it,
    a note, and its pairs are invalid. Raises Stopped too.
    """
    keys, found = judge.keys, Judged([], {}, {}, [])
    for name, prompts in sets.items():
        greedy = [s for s in samples[name] if s["greedy"]][: keys.max_pairs]
        theirs = None if others is None else others[name]
        pairs = of_set(name, prompts, greedy, theirs, keys.reference_column, judge.tokenizer)
        found.unpaired[name] = len(greedy) - len(pairs)
        if judge.reward is None:
            _ask(judge, pairs, found)
        else:
            size = judge.config.eval.batch_size
            plain = (judge.reward, pairs, judge.tokenizer, prompts.conversational, state, size)
            judges_reward.judge(*plain)
        found.pairs += pairs
        lengths = [(p.ours.tokens, p.theirs.tokens) for p in pairs]
        found.tallies[name] = tally([p.value for p in pairs], lengths)
        if found.unpaired[name]:
            found.notes.append(f"{found.unpaired[name]} prompts are too long for the other model")
    lost = [p for p in found.pairs if p.value is None]
    if lost:
        why = next((s["why"] for p in lost for s in p.said if s.get("why")), "the reward gave none")
        found.notes.append(
            f"warning: {len(lost)} of {len(found.pairs)} pairs have no verdict and are left out;"
            f" the first: {why}"
        )
    return found


def _ask(judge: Judge, pairs: list[Pair], found: Judged) -> None:
    error = llm.judge(judge.keys, pairs, judge.config.seed, signals.check)
    if error is not None and not judge.training:
        raise _gone(error)
    if error is not None:
        found.notes.append(f"warning: the judge is gone: {error}")


def _gone(error: EndpointError) -> RewardError:
    fix = "correct eval.judge, or start its server; judge=null leaves it out"
    return RewardError(Problem("the judge cannot be asked", "eval.judge", str(error), fix))


# What is said of it.


def metrics(found: Judged) -> Row:
    """The metrics of all sets. Rates that nothing was judged for are absent."""
    row: Row = {}
    for name, told in found.tallies.items():
        start = eval_rows.prefix(name)
        own = {"": told.rate, "/low": told.low, "/high": told.high}
        own |= {"/length_controlled": told.controlled}
        own |= {f"/{n}": getattr(told, n) for n in ("wins", "ties", "losses", "invalid")}
        own |= {"/mean_length": told.length, "/mean_other_length": told.other_length}
        row |= {f"{start}win_rate{n}": value for n, value in own.items() if value is not None}
    values = [pair.value for pair in found.pairs if pair.value is not None]
    if values:
        row["judge/win_rate"] = sum(values) / len(values)
    return row | {"judge/invalid": len(found.pairs) - len(values)}


def table(judge: Judge, found: Judged) -> Table:
    """Wins and losses, with a column for each set, under who preferred what."""
    against = judge.keys.against
    other = f"the texts of {judge.keys.reference_column}" if against == REFERENCE else against
    title = f"preferred by {judge.who}, over {other}"
    if judge.reward is not None:
        title += " (its own preference, not a person's)"
    shown = Table("judged", *found.tallies, box=box.SIMPLE_HEAD, title=Text(clean(title)))
    columns = [_lines(told) for told in found.tallies.values()]
    for label in columns[0]:
        shown.add_row(label, *[column[label] for column in columns])
    return shown


def _lines(told: Tally) -> dict[str, str]:
    limits = "n/a"
    if told.low is not None and told.high is not None:
        limits = f"{told.low:.1%} to {told.high:.1%} ({told.interval})"
    return {
        "win rate, a tie is 1/2": _share(told.rate),
        "95 % interval": limits,
        "wins, ties, losses": f"{told.wins}, {told.ties}, {told.losses}",
        "invalid, left out": f"{told.invalid} of {told.invalid + told.judged}",
        "mean tokens, theirs": f"{_mean(told.length)}, {_mean(told.other_length)}",
        "win rate at equal lengths": _share(told.controlled),
    }


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def _mean(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f}"


def summary(judge: Judge, found: Judged) -> Row:
    """All of it, for judge.json."""
    sets: dict[str, Any] = {}
    for name, told in found.tallies.items():
        sets[name or "held out"] = vars(told) | {"unpaired": found.unpaired[name]}
    return judge.about | {"sets": sets}
