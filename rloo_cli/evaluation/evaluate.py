"""The held-out sets, answered and scored by the run's own rewards. What it says: `held_out`.

Evaluating changes nothing in the run, bit for bit: no counter, no place in the data, no global
random state moves, whatever a reward draws; what `cache: true` remembers of an evaluation is
forgotten with it; training's rewards never see its lines in `trainer_state.log_history`. (A reward
that keeps a state of its own, in a global or an object, is beyond us.)

Samples are a pure function of weights and config: the seed of completion k of a set's i-th prompt
is `sampling_seed(seed, "eval", 0, i, k)`. The step does not enter, so that equal weights give
equal samples whenever and wherever they are asked (`rloo eval` gives a run's own numbers again),
and two evaluations of one run differ by their weights, not by their luck.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rloo_cli.algorithms.common.base import Algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.score import combine
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.bin_packing import slices
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed.world import World
from rloo_cli.evaluation import metrics
from rloo_cli.evaluation.judges import judge as judging
from rloo_cli.evaluation.judges.judge import Judged, Others
from rloo_cli.generation import Generator, unheard
from rloo_cli.generation.common import across_ranks
from rloo_cli.reporting import eval_rows
from rloo_cli.reporting.log import sample
from rloo_cli.rewards.engine.arguments import Context, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.scoring import Scores, Stage
from rloo_cli.run import Run
from rloo_cli.utils import rng, signals
from rloo_cli.utils.fault_injection import fault
from rloo_cli.utils.rng import sampling_seed
from rloo_cli.utils.timers import Clock

Row = dict[str, Any]


class Parts(Protocol):
    """What it takes to evaluate: a `Run` has it, and `rloo eval` makes no more than this."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def algorithm(self) -> Algorithm[Switches]: ...
    @property
    def generator(self) -> Generator: ...
    @property
    def rewards(self) -> Sequence[Reward]: ...
    @property
    def sets(self) -> dict[str, Prompts]: ...
    @property
    def judge(self) -> Any: ...
    @property
    def world(self) -> World: ...


def silent(name: str, done: int, of: int) -> None:
    """Nobody is told how far it is."""


def evaluate(run: Run) -> Row:
    """Score every held-out set at the weights of now; write samples, then one line of metrics.

    -> that line, {} where nothing is held out. Raises RunError; nothing is written then.
    """
    if not run.sets:
        return {}
    run.log.phase("evaluation")
    before = rng.take()
    state, judged = run.state.seen_by_rewards(run), None
    try:
        found = answers(run, state)
        judged = run.world.first(lambda: judge_all(run, found, state))
    finally:
        rng.put(before)
    step = run.state.step
    for name, answered in found.items():
        run.log.save_samples(eval_rows.file_name(name, step), answered.samples)
    for note in judged.notes if judged is not None else ():
        run.log.note(note)
    if judged is not None:
        run.log.save_samples(f"pairs_{step:06d}", judged.rows)
    row = run.log.held_out({"step": step, **of_all(run, found, judged)})
    run.clock.lap()  # its seconds are nobody's step
    return row


@dataclass
class Answered:
    """One held-out set: every sample, greedy ones first, and the share of rows that failed."""

    samples: list[Row]
    failed: dict[str, float]


def judge_all(
    parts: Parts,
    found: dict[str, Answered],
    state: TrainerState,
    others: Others | None = None,
) -> Judged | None:
    """What the judge, if there is one, says of the greedy answers; `others`: another model's."""
    if parts.judge is None:
        return None
    samples = {name: answered.samples for name, answered in found.items()}
    return judging.judge(parts.judge, parts.sets, samples, state, others)


def of_all(parts: Parts, found: dict[str, Answered], judged: Judged | None = None) -> Row:
    """The metrics of all sets, in one row."""
    row: Row = {} if judged is None else judging.metrics(judged)
    for name, answered in found.items():
        row |= metrics.metrics(name, answered.samples, parts.config.eval, answered.failed)
    return row


def answers(
    parts: Parts,
    state: TrainerState,
    tell: Callable[[str, int, int], None] = silent,
) -> dict[str, Answered]:
    """Answer and score every set. `tell` hears name, completions made and to be made.

    Raises RewardError, GenerationError, and Stopped when a signal asked for an end.
    """
    return {name: _answer(parts, name, state, tell) for name in parts.sets}


def _answer(
    parts: Parts, name: str, state: TrainerState, tell: Callable[[str, int, int], None]
) -> Answered:
    prompts, settings = parts.sets[name], parts.config.eval
    count = min(len(prompts), settings.max_samples or len(prompts))
    rewards = [replace(reward, memory={}) for reward in parts.rewards]
    context = Context(prompts.conversational, state, poll=signals.check)
    k = settings.num_generations
    rounds = [(True, 1), (False, k)] if k > 1 else [(True, 1)]
    samples: list[Row] = []
    failed: dict[str, float] = defaultdict(float)
    for greedy, each in rounds:
        for index in slices(range(count), max(1, settings.batch_size // each)):
            fault("eval")
            parts.world.check_stop()
            groups = [prompts.at(i) for i in index]

            def sample(
                places: Sequence[int],
                arrived: Callable[[int], None] = unheard,
                groups: list[Group] = groups,
                greedy: bool = greedy,
                each: int = each,
            ) -> None:
                _generate(parts, [groups[i] for i in places], greedy, each, arrived)

            def stage(own: Sequence[Group], each: int = each) -> Stage:
                return Stage(rewards, own, context, each)

            scores = across_ranks.answer(
                parts.world, parts.generator, groups, sample, stage, Clock()
            )
            samples += _rows(parts, name, groups, scores, greedy)
            for reward, rate in scores.error_rate.items():
                failed[reward] += rate * len(groups) * each
            tell(name, len(samples), count * sum(n for _, n in rounds))
    return Answered(samples, {reward: rows / len(samples) for reward, rows in failed.items()})


def others_of(
    parts: Parts, wanted: Mapping[str, Set[int]], tell: Callable[[str, int, int], None] = silent
) -> dict[str, dict[int, Rollout]]:
    """Another model's greedy answers, by set and row of the split; `wanted`: which rows.

    A prompt that is too long for it has none.
    """
    found: dict[str, dict[int, Rollout]] = {name: {} for name in parts.sets}
    for name, prompts in parts.sets.items():
        numbers = prompts.numbers or list(range(len(prompts)))
        chosen = [i for i, number in enumerate(numbers) if number in wanted[name]]
        for index in slices(chosen, parts.config.eval.batch_size):
            signals.check()
            groups = [prompts.at(i) for i in index]
            _generate(parts, groups, True, 1)
            found[name] |= {numbers[g.draw]: g.rollouts[0] for g in groups}
            tell(name, len(found[name]), len(chosen))
    return found


def _generate(
    parts: Parts,
    groups: list[Group],
    greedy: bool,
    each: int,
    arrived: Callable[[int], None] = unheard,
) -> None:
    if greedy:
        parts.generator.generate(groups, [[0] for _ in groups], greedy=True, arrived=arrived)
        return
    seed = parts.config.seed
    seeds = [[sampling_seed(seed, "eval", 0, g.draw, k) for k in range(each)] for g in groups]
    parts.generator.generate(
        groups, seeds, temperature=parts.config.eval.temperature, arrived=arrived
    )


def _rows(parts: Parts, name: str, groups: list[Group], scores: Scores, greedy: bool) -> list[Row]:
    """Every completion, with all that is known of it."""
    # A score is to say the same whoever stood beside it: nothing is normalised over a group.
    settings = parts.algorithm.config.model_copy(update={"multi_reward": "sum"})
    weighted, scorable = combine(scores.raw, scores.weights.tolist(), settings)
    rows = []
    for p, group in enumerate(groups):
        for k in range(len(group.rollouts)):
            row: Row = {"set": name or None, "greedy": greedy} | sample(group, k)
            said = zip(scores.names, scores.raw[:, p, k].tolist(), strict=True)
            row |= {
                "row": group.row,
                "score": float(weighted[p, k]) if scorable[p, k] else None,
                "rewards": {n: None if v != v else v for n, v in said},
            }
            place = p * len(group.rollouts) + k
            rows.append(row | {n: values[place] for n, values in scores.extras.items()})
    return rows
