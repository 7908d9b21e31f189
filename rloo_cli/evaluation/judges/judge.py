"""The judge of a config for evaluations: build it, judge samples, report the win rates."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.table import Column, Table
from rich.text import Text

from rloo_cli.config import template
from rloo_cli.config.column_names import is_field_of_rows, refuse_unknown_column
from rloo_cli.config.judge import AGAINST_REFERENCE, OpenaiJudge, RewardJudge
from rloo_cli.config.schema import EvalConfig
from rloo_cli.data.batch import Rollout
from rloo_cli.data.prompts import Prompts
from rloo_cli.evaluation.judges import llm
from rloo_cli.evaluation.judges import reward as judges_reward
from rloo_cli.evaluation.judges.pairs import JudgePair, check_reference_column, pairs_of_set
from rloo_cli.evaluation.judges.win_rate import WinRate, compute_win_rate
from rloo_cli.reporting import eval_lines
from rloo_cli.reporting.panel import clean_line
from rloo_cli.rewards.common import http_client
from rloo_cli.rewards.common.http_client import EndpointError
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.rewards.engine.build import Reward, build_reward
from rloo_cli.rewards.engine.columns import check_reward_columns, field_names
from rloo_cli.utils import signals
from rloo_cli.utils.errors import Problem, RewardError, refuse
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REFERENCE_COLUMN_KEY = "eval.judge.reference_column"
OtherAnswers = Mapping[str, Mapping[int, Rollout]]  # set -> example -> another model's answer


@dataclass
class Judge:
    """The judge of a config, ready for use."""

    judge_config: OpenaiJudge | RewardJudge  # the keys of `eval.judge`
    batch_size: int  # pairs per call of a reward
    seed: int  # of the order in which a pair is shown
    tokenizer: "PreTrainedTokenizerBase"  # the policy's
    reward: Reward | None  # None: a language model judges
    training: bool  # in training, an unreachable judge must not end the run

    @property
    def description(self) -> str:
        """The kind of judge, for people to read."""
        keys = self.judge_config
        if isinstance(keys, OpenaiJudge):
            return f"{keys.model}, a language model at {keys.base_url}"
        path = getattr(keys.reward, "path", "")
        if keys.reward.type == "model":
            return f"reward model {path}"
        return f"the reward {keys.reward.type} {path}".strip()

    @property
    def metadata(self) -> JsonObject:
        """What the verdicts depend on, for the results: the judge and the hash of its question."""
        keys, digest = self.judge_config, None
        if isinstance(keys, OpenaiJudge):
            question = {name: getattr(keys, name) for name in ("system", "template", "pattern")}
            digest = hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()
        values = keys.model_dump(mode="json")
        return {"judge": self.description, "question_sha256": digest, "keys": values}


@dataclass
class JudgedSets:
    """The verdicts of one evaluation."""

    pairs: list[JudgePair]
    win_rates: dict[str, WinRate]  # by set
    num_unpaired: dict[str, int]  # prompts of a set without an answer from the other model
    notes: list[str]

    @property
    def pair_records(self) -> list[JsonObject]:
        """The lines of pairs.jsonl."""
        return [pair.to_record() for pair in self.pairs]


def build_judge(
    evaluation: EvalConfig,
    seed: int,
    sets: Mapping[str, Prompts],
    tokenizer: "PreTrainedTokenizerBase",
    training: bool,
) -> Judge | None:
    """Build the judge that the config names, or None; called before any weights load.

    A language model gets one test question. Raises RunError.
    """
    keys = evaluation.judge
    if keys is None:
        return None
    assert isinstance(keys, OpenaiJudge | RewardJudge)
    if keys.against != AGAINST_REFERENCE and training:
        why = f"eval.judge.against = {keys.against!r}: a second model besides the one in training"
        fix = "eval.judge.against=reference here, then rloo eval RUN eval.judge.against=..."
        what = "a training can only compare with reference texts"
        refuse("eval.judge.against", what, fix, why)
    reward, wanted = None, []
    if isinstance(keys, OpenaiJudge):
        http_client.check_api_key("eval.judge.api_key_env", keys.api_key_env)
        names = template.template_names(keys.template)
        wanted = [name for name in names if name not in ("prompt", "a", "b")]
    else:
        reward = build_reward("judge", keys.reward)
    for name, prompts in sets.items():
        columns = list(prompts.examples[0])
        if keys.against == AGAINST_REFERENCE:
            check_reference_column(name, prompts, keys.reference_column, REFERENCE_COLUMN_KEY)
        if reward is not None:
            check_reward_columns([reward], [*columns, *field_names([reward], prompts.examples)])
        if missing := [n for n in wanted if not is_field_of_rows(prompts.examples, n)]:
            refuse_unknown_column("eval.judge.template", missing[0], columns, in_braces=True)
    if isinstance(keys, OpenaiJudge):
        try:
            llm.probe_llm_judge(keys, wanted)
        except EndpointError as error:
            raise _judge_gone_error(error) from None
    return Judge(keys, evaluation.batch_size, seed, tokenizer, reward, training)


def judge_samples(
    judge: Judge,
    sets: Mapping[str, Prompts],
    samples: Mapping[str, Sequence[JsonObject]],
    state: TrainerState,
    other_answers: OtherAnswers | None = None,
) -> JudgedSets:
    """Judge the greedy samples of every set.

    A service that stops answering raises RewardError; in a training, which does not depend on
    it, it becomes a note, and its pairs are invalid. Raises Stopped too.
    """
    keys, judged = judge.judge_config, JudgedSets([], {}, {}, [])
    for name, prompts in sets.items():
        greedy = [s for s in samples[name] if s["greedy"]][: keys.max_pairs]
        theirs = None if other_answers is None else other_answers[name]
        pairs = pairs_of_set(name, prompts, greedy, theirs, keys.reference_column, judge.tokenizer)
        judged.num_unpaired[name] = num_unpaired = len(greedy) - len(pairs)
        if isinstance(keys, OpenaiJudge):
            _ask_llm_judge(judge, keys, pairs, judged)
        else:
            assert judge.reward is not None
            judges_reward.judge_pairs_by_reward(
                judge.reward, pairs, judge.tokenizer, prompts.conversational, state,
                judge.batch_size,
            )  # fmt: skip
        judged.pairs += pairs
        lengths = [(p.ours.num_tokens, p.theirs.num_tokens) for p in pairs]
        judged.win_rates[name] = compute_win_rate([p.value for p in pairs], lengths)
        if num_unpaired:
            judged.notes.append(f"{num_unpaired} prompts are too long for the other model")
    invalid = [p for p in judged.pairs if p.value is None]
    if invalid:
        reasons = (a["why"] for p in invalid for a in p.judge_answers if a.get("why"))
        judged.notes.append(
            f"warning: {len(invalid)} of {len(judged.pairs)} pairs have no verdict and are left"
            f" out; the first: {next(reasons, 'the reward gave none')}"
        )
    return judged


def _ask_llm_judge(
    judge: Judge, keys: OpenaiJudge, pairs: list[JudgePair], judged: JudgedSets
) -> None:
    error = llm.judge_pairs_by_llm(keys, pairs, judge.seed, signals.raise_if_stopped)
    if error is not None and not judge.training:
        raise _judge_gone_error(error)
    if error is not None:
        judged.notes.append(f"warning: the judge does not answer: {error}")


def _judge_gone_error(error: EndpointError) -> RewardError:
    fix = "correct eval.judge, or start its server; judge=null disables it"
    return RewardError(Problem("the judge does not answer", "eval.judge", str(error), fix))


METRICS = {"Evaluations": [  # read by utils.metrics
    ("win_rate", "share", "", "share of pairs that the judge decides for ours; a tie counts 1/2"),
    ("win_rate/low", "share", "", "lower end of its 95 % interval"),
    ("win_rate/high", "share", "", "upper end of its 95 % interval"),
    ("win_rate/length_controlled", "share", "",
     "win rate at equal lengths, by logistic regression"),
    ("win_rate/wins", "count", "", "pairs won"),
    ("win_rate/ties", "count", "", "pairs tied"),
    ("win_rate/losses", "count", "", "pairs lost"),
    ("win_rate/invalid", "count", "", "pairs without a verdict, left out"),
    ("win_rate/mean_length", "tokens", "", "mean length of our judged completions"),
    ("win_rate/mean_other_length", "tokens", "", "mean length of the other side's"),
], "A judge": [
    ("judge/win_rate", "share", "", "win rate over the pairs of all sets"),
    ("judge/invalid", "count", "", "pairs of all sets without a verdict"),
]}  # fmt: skip


def judge_metrics(judged: JudgedSets) -> JsonObject:
    """The metrics of all sets. The rates of a set without a judged pair are absent."""
    metrics: JsonObject = {}
    for name, win_rate in judged.win_rates.items():
        values = {"": win_rate.rate, "/low": win_rate.low, "/high": win_rate.high}
        values |= {"/length_controlled": win_rate.controlled}
        values |= {f"/{n}": getattr(win_rate, n) for n in ("wins", "ties", "losses", "invalid")}
        values |= {"/mean_length": win_rate.length, "/mean_other_length": win_rate.other_length}
        prefix = f"{eval_lines.eval_prefix(name)}win_rate"
        metrics |= {f"{prefix}{n}": value for n, value in values.items() if value is not None}
    verdicts = [pair.value for pair in judged.pairs if pair.value is not None]
    if verdicts:
        metrics["judge/win_rate"] = sum(verdicts) / len(verdicts)
    return metrics | {"judge/invalid": len(judged.pairs) - len(verdicts)}


def judge_table(judge: Judge, judged: JudgedSets) -> Table:
    """Wins and losses, with a column per set; the title names the judge and both sides."""
    keys = judge.judge_config
    reference = keys.against == AGAINST_REFERENCE
    other = f"the texts of {keys.reference_column}" if reference else keys.against
    title = f"preferred by {judge.description}, over {other}"
    if judge.reward is not None:
        title += " (its own preference, not a person's)"
    sets = [Text(clean_line(name)) for name in judged.win_rates]
    shown = Table("judged", *map(Column, sets), box=box.SIMPLE_HEAD, title=Text(clean_line(title)))
    columns = [_table_lines(win_rate) for win_rate in judged.win_rates.values()]
    for label in columns[0]:
        shown.add_row(label, *[column[label] for column in columns])
    return shown


def _table_lines(win_rate: WinRate) -> dict[str, str]:
    limits = "n/a"
    if win_rate.low is not None and win_rate.high is not None:
        limits = f"{win_rate.low:.1%} to {win_rate.high:.1%}"
    return {
        "win rate, a tie is 1/2": _format(win_rate.rate, ".1%"),
        "95 % interval": limits,
        "wins, ties, losses": f"{win_rate.wins}, {win_rate.ties}, {win_rate.losses}",
        "invalid, left out": f"{win_rate.invalid} of {win_rate.invalid + win_rate.num_judged}",
        "mean tokens, theirs": f"{_format(win_rate.length)}, {_format(win_rate.other_length)}",
        "win rate at equal lengths": _format(win_rate.controlled, ".1%"),
    }


def _format(value: float | None, spec: str = ".1f") -> str:
    return "n/a" if value is None else f"{value:{spec}}"


def judge_summary(judge: Judge, judged: JudgedSets) -> JsonObject:
    """The judge, and the win rate of each set, for judge.json."""
    sets: JsonObject = {}
    for name, win_rate in judged.win_rates.items():
        sets[name or "held out"] = vars(win_rate) | {"unpaired": judged.num_unpaired[name]}
    return judge.metadata | {"sets": sets}
