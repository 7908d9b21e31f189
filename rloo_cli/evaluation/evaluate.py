"""Answers the held-out sets and scores them with the run's rewards; `metrics` has the means.

Evaluating changes nothing in the run, bit for bit: neither counters nor the position in the data
nor any global random state; scores that `cache: true` keeps are dropped after the evaluation; and
training's rewards never see its lines in `trainer_state.log_history`. (A reward that keeps its own
state, in a global or an object, is not covered.)

Samples are a pure function of weights and config: the seed of completion k of a set's i-th prompt
is `sampling_seed(seed, "eval", 0, i, k)`. The step is not part of it, so that equal weights give
equal samples anywhere and at any time (`rloo eval` repeats a run's numbers), and two evaluations
of one run differ by their weights, not by sampling luck.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Protocol

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
from rloo_cli.evaluation.judges.judge import Judge, JudgedSets, OtherAnswers
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
    """Everything that an evaluation needs: a `Run` has it, and `rloo eval` builds only this."""

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
    def judge(self) -> Judge | None: ...
    @property
    def world(self) -> World: ...


def ignore_progress(name: str, done: int, total: int) -> None:
    """The default of `on_progress`, which does nothing."""


def evaluate_run(run: Run) -> JsonObject:
    """Score every held-out set with the current weights; write samples, then one line of metrics.

    Returns that line, {} without held-out sets. Raises RunError, and then nothing is written.
    """
    if not run.eval_sets:
        return {}
    run.log.phase("evaluation")
    before = rng.capture_random_states()
    state, judged = run.state.seen_by_rewards(run), None
    try:
        answered_sets = answer_eval_sets(run, state)
        judged = run.world.run_on_rank0(lambda: judge_eval_sets(run, answered_sets, state))
    finally:
        rng.restore_random_states(before)
    step = run.state.step
    for name, answered in answered_sets.items():
        run.log.save_samples(eval_lines.eval_samples_name(name, step), answered.samples)
    for note in judged.notes if judged is not None else ():
        run.log.note(note)
    if judged is not None:
        run.log.save_samples(f"pairs_{step:06d}", judged.pair_records)
    line = {"step": step, **evaluation_metrics(run, answered_sets, judged)}
    line = run.log.write_evaluation(line)
    run.clock.lap()  # an evaluation's seconds do not count for a step
    return line


@dataclass
class AnsweredSet:
    """Every sample of one held-out set, greedy ones first, and the rewards' failure rates."""

    samples: list[JsonObject]
    failure_rates: dict[str, float]  # reward -> share of the samples


def judge_eval_sets(
    setup: EvaluationSetup,
    answered_sets: dict[str, AnsweredSet],
    state: TrainerState,
    other_answers: OtherAnswers | None = None,
) -> JudgedSets | None:
    """Compare greedy answers with `other_answers`, or reference texts; None without a judge."""
    if setup.judge is None:
        return None
    samples = {name: answered.samples for name, answered in answered_sets.items()}
    return judging.judge_samples(setup.judge, setup.eval_sets, samples, state, other_answers)


def evaluation_metrics(
    setup: EvaluationSetup, answered_sets: dict[str, AnsweredSet], judged: JudgedSets | None = None
) -> JsonObject:
    """The metrics of all sets, in one dictionary."""
    merged: JsonObject = {} if judged is None else judging.judge_metrics(judged)
    settings = setup.config.eval
    for name, answered in answered_sets.items():
        rates = answered.failure_rates
        merged |= metrics.eval_set_metrics(name, answered.samples, settings, rates)
    return merged


def answer_eval_sets(
    setup: EvaluationSetup,
    state: TrainerState,
    on_progress: Callable[[str, int, int], None] = ignore_progress,
) -> dict[str, AnsweredSet]:
    """Answer and score every set; calls `on_progress(name, completions done, completions in all)`.

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
    for greedy, num_samples in rounds:
        for indices in split_chunks(range(count), max(1, settings.batch_size // num_samples)):
            trigger_fault("eval")
            setup.world.check_stop()
            groups = [prompts.group_of(i) for i in indices]
            scores = _answer_groups(setup, groups, rewards, context, greedy, num_samples)
            samples += _evaluation_samples(setup, name, groups, scores, greedy)
            for reward, rate in scores.error_rate.items():
                failed[reward] += rate * len(groups) * num_samples
            on_progress(name, len(samples), count * sum(n for _, n in rounds))
    return AnsweredSet(samples, {reward: n / len(samples) for reward, n in failed.items()})


def _answer_groups(
    setup: EvaluationSetup,
    groups: list[Group],
    rewards: list[Reward],
    context: RewardContext,
    greedy: bool,
    num_samples: int,
) -> Scores:
    def sample(indices: range, arrived: Callable[[int], None] = ignore_arrival) -> None:
        _generate(setup, [groups[i] for i in indices], greedy, num_samples, arrived)

    return across_ranks.sample_and_score(
        setup.world, setup.generator, groups, sample,
        lambda share: ScoringStep(rewards, share, context, num_samples), StepTimer(),
    )  # fmt: skip


def answer_with_other_model(
    setup: EvaluationSetup,
    example_numbers: Mapping[str, Set[int]],
    on_progress: Callable[[str, int, int], None] = ignore_progress,
) -> dict[str, dict[int, Rollout]]:
    """Another model's greedy answers to the examples `example_numbers`, by set and number.

    A prompt that is too long for the other model has no answer.
    """
    answers: dict[str, dict[int, Rollout]] = {name: {} for name in setup.eval_sets}
    for name, prompts in setup.eval_sets.items():
        numbers = prompts.example_numbers
        chosen = [i for i, number in enumerate(numbers) if number in example_numbers[name]]
        for indices in split_chunks(chosen, setup.config.eval.batch_size):
            setup.world.check_stop()
            groups = [prompts.group_of(i) for i in indices]

            def sample(share: Sequence[int], groups: list[Group] = groups) -> None:
                _generate(setup, [groups[i] for i in share], True, 1)

            across_ranks.sample_only(setup.world, setup.generator, groups, sample)
            answers[name] |= {numbers[g.prompt_offset]: g.rollouts[0] for g in groups}
            on_progress(name, len(answers[name]), len(chosen))
    return answers


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
    seed, temperature = setup.config.seed, setup.config.eval.temperature
    seeds = [
        [sampling_seed(seed, "eval", 0, g.prompt_offset, k) for k in range(num_samples)]
        for g in groups
    ]
    setup.generator.generate(groups, seeds, temperature=temperature, arrived=arrived)


def _evaluation_samples(
    setup: EvaluationSetup, name: str, groups: list[Group], scores: Scores, greedy: bool
) -> list[JsonObject]:
    """Every completion as a line of the samples file, with its scores."""
    scored = iter(scored_fields(setup.algorithm.config, scores))
    samples = []
    for p, group in enumerate(groups):
        for k in range(len(group.rollouts)):
            sample: JsonObject = {"set": name or None, "greedy": greedy} | sample_record(group, k)
            sample |= {"row": group.example} | next(scored)
            index = p * len(group.rollouts) + k
            samples.append(sample | {n: values[index] for n, values in scores.extras.items()})
    return samples


def scored_fields(config: Switches, scores: Scores) -> list[JsonObject]:
    """The fields `score` and `rewards` of each of the P*K completions; None = no score."""
    # Nothing is normalized over a group: a score must not depend on the other completions.
    settings = config.model_copy(update={"multi_reward": "sum"})
    weighted, scorable = combine_scores(scores.raw, scores.weights.tolist(), settings)
    found = zip(weighted.flatten().tolist(), scorable.flatten().tolist(), strict=True)
    by_reward = scores.raw.flatten(1).T.tolist()
    return [
        {
            "score": score if is_scorable else None,
            "rewards": {n: None if v != v else v for n, v in zip(scores.names, row, strict=True)},
        }
        for (score, is_scorable), row in zip(found, by_reward, strict=True)
    ]
