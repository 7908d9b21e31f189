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
from rloo_cli.algorithms.common.score import combine_scores
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.bin_packing import split_chunks
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed.world import World
from rloo_cli.evaluation import metrics
from rloo_cli.evaluation.judges import judge as judging
from rloo_cli.evaluation.judges.judge import JudgedSets, OtherAnswers
from rloo_cli.generation import Generator, ignore_arrival
from rloo_cli.generation.common import across_ranks
from rloo_cli.reporting import eval_lines
from rloo_cli.reporting.log import sample_record
from rloo_cli.rewards.engine.arguments import RewardContext, TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.rewards.engine.scoring import Scores, ScoringStep
from rloo_cli.run import Run
from rloo_cli.utils import rng, signals
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import sampling_seed
from rloo_cli.utils.timers import StepTimer


class EvaluationSetup(Protocol):
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
    def eval_sets(self) -> dict[str, Prompts]: ...
    @property
    def judge(self) -> Any: ...
    @property
    def world(self) -> World: ...


def ignore_progress(name: str, done: int, total: int) -> None:
    """Nobody is told how far it is."""


def evaluate_run(run: Run) -> JsonObject:
    """Score every held-out set at the weights of now; write samples, then one line of metrics.

    -> that line, {} where nothing is held out. Raises RunError; nothing is written then.
    """
    if not run.eval_sets:
        return {}
    run.log.phase("evaluation")
    before = rng.capture_random_states()
    state, judged = run.state.seen_by_rewards(run), None
    try:
        found = answer_eval_sets(run, state)
        judged = run.world.run_on_rank0(lambda: judge_eval_sets(run, found, state))
    finally:
        rng.restore_random_states(before)
    step = run.state.step
    for name, answered in found.items():
        run.log.save_samples(eval_lines.eval_samples_name(name, step), answered.samples)
    for note in judged.notes if judged is not None else ():
        run.log.note(note)
    if judged is not None:
        run.log.save_samples(f"pairs_{step:06d}", judged.pair_records)
    row = run.log.write_evaluation({"step": step, **evaluation_metrics(run, found, judged)})
    run.clock.lap()  # its seconds are nobody's step
    return row


@dataclass
class AnsweredSet:
    """One held-out set: every sample, greedy ones first, and the share of rows that failed."""

    samples: list[JsonObject]
    failure_rates: dict[str, float]


def judge_eval_sets(
    setup: EvaluationSetup,
    answered_sets: dict[str, AnsweredSet],
    state: TrainerState,
    other_answers: OtherAnswers | None = None,
) -> JudgedSets | None:
    """What the judge, if there is one, says of the greedy answers; `others`: another model's."""
    if setup.judge is None:
        return None
    samples = {name: answered.samples for name, answered in answered_sets.items()}
    return judging.judge_samples(setup.judge, setup.eval_sets, samples, state, other_answers)


def evaluation_metrics(
    setup: EvaluationSetup, answered_sets: dict[str, AnsweredSet], judged: JudgedSets | None = None
) -> JsonObject:
    """The metrics of all sets, in one row."""
    row: JsonObject = {} if judged is None else judging.judge_metrics(judged)
    for name, answered in answered_sets.items():
        row |= metrics.eval_set_metrics(
            name, answered.samples, setup.config.eval, answered.failure_rates
        )
    return row


def answer_eval_sets(
    setup: EvaluationSetup,
    state: TrainerState,
    on_progress: Callable[[str, int, int], None] = ignore_progress,
) -> dict[str, AnsweredSet]:
    """Answer and score every set. `tell` hears name, completions made and to be made.

    Raises RewardError, GenerationError, and Stopped when a signal asked for an end.
    """
    return {name: _answer_eval_set(setup, name, state, on_progress) for name in setup.eval_sets}


def _answer_eval_set(
    setup: EvaluationSetup,
    name: str,
    state: TrainerState,
    on_progress: Callable[[str, int, int], None],
) -> AnsweredSet:
    prompts, settings = setup.eval_sets[name], setup.config.eval
    count = min(len(prompts), settings.max_samples or len(prompts))
    rewards = [replace(reward, score_cache={}) for reward in setup.rewards]
    context = RewardContext(prompts.conversational, state, poll=signals.raise_if_stopped)
    k = settings.num_generations
    rounds = [(True, 1), (False, k)] if k > 1 else [(True, 1)]
    samples: list[JsonObject] = []
    failed: dict[str, float] = defaultdict(float)
    for greedy, each in rounds:
        for index in split_chunks(range(count), max(1, settings.batch_size // each)):
            trigger_fault("eval")
            setup.world.check_stop()
            groups = [prompts.group_of(i) for i in index]

            def sample(
                places: Sequence[int],
                arrived: Callable[[int], None] = ignore_arrival,
                groups: list[Group] = groups,
                greedy: bool = greedy,
                each: int = each,
            ) -> None:
                _generate(setup, [groups[i] for i in places], greedy, each, arrived)

            def stage(own: Sequence[Group], each: int = each) -> ScoringStep:
                return ScoringStep(rewards, own, context, each)

            scores = across_ranks.sample_and_score(
                setup.world, setup.generator, groups, sample, stage, StepTimer()
            )
            samples += _evaluation_samples(setup, name, groups, scores, greedy)
            for reward, rate in scores.error_rate.items():
                failed[reward] += rate * len(groups) * each
            on_progress(name, len(samples), count * sum(n for _, n in rounds))
    return AnsweredSet(samples, {reward: rows / len(samples) for reward, rows in failed.items()})


def answer_with_other_model(
    setup: EvaluationSetup,
    example_numbers: Mapping[str, Set[int]],
    on_progress: Callable[[str, int, int], None] = ignore_progress,
) -> dict[str, dict[int, Rollout]]:
    """Another model's greedy answers, by set and row of the split; `wanted`: which rows.

    A prompt that is too long for it has none.
    """
    found: dict[str, dict[int, Rollout]] = {name: {} for name in setup.eval_sets}
    for name, prompts in setup.eval_sets.items():
        numbers = prompts.example_numbers or list(range(len(prompts)))
        chosen = [i for i, number in enumerate(numbers) if number in example_numbers[name]]
        for index in split_chunks(chosen, setup.config.eval.batch_size):
            signals.raise_if_stopped()
            groups = [prompts.group_of(i) for i in index]
            _generate(setup, groups, True, 1)
            found[name] |= {numbers[g.prompt_offset]: g.rollouts[0] for g in groups}
            on_progress(name, len(found[name]), len(chosen))
    return found


def _generate(
    setup: EvaluationSetup,
    groups: list[Group],
    greedy: bool,
    num_samples: int,
    arrived: Callable[[int], None] = ignore_arrival,
) -> None:
    if greedy:
        setup.generator.generate(groups, [[0] for _ in groups], greedy=True, arrived=arrived)
        return
    seed = setup.config.seed
    seeds = [
        [sampling_seed(seed, "eval", 0, g.prompt_offset, k) for k in range(num_samples)]
        for g in groups
    ]
    setup.generator.generate(
        groups, seeds, temperature=setup.config.eval.temperature, arrived=arrived
    )


def _evaluation_samples(
    setup: EvaluationSetup, name: str, groups: list[Group], scores: Scores, greedy: bool
) -> list[JsonObject]:
    """Every completion, with all that is known of it."""
    # A score is to say the same whoever stood beside it: nothing is normalised over a group.
    settings = setup.algorithm.config.model_copy(update={"multi_reward": "sum"})
    weighted, scorable = combine_scores(scores.raw, scores.weights.tolist(), settings)
    rows = []
    for p, group in enumerate(groups):
        for k in range(len(group.rollouts)):
            row: JsonObject = {"set": name or None, "greedy": greedy} | sample_record(group, k)
            said = zip(scores.names, scores.raw[:, p, k].tolist(), strict=True)
            row |= {
                "row": group.example,
                "score": float(weighted[p, k]) if scorable[p, k] else None,
                "rewards": {n: None if v != v else v for n, v in said},
            }
            place = p * len(group.rollouts) + k
            rows.append(row | {n: values[place] for n, values in scores.extras.items()})
    return rows
