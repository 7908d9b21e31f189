"""The parts of a run: `train/build.py` builds them, and the loop uses them."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloo_cli.agents.common.tool_set import ToolSet
from rloo_cli.algorithms.common.base import Algorithm
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.forward_plan import ForwardPlan
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Batch
from rloo_cli.data.bin_packing import ForwardLimits
from rloo_cli.data.prompts import Prompts
from rloo_cli.distributed.engine import ParallelEngine
from rloo_cli.distributed.optimizer import TrainingOptimizer
from rloo_cli.distributed.world import World
from rloo_cli.generation import Generator
from rloo_cli.generation.common.batch_source import BatchSource
from rloo_cli.generation.common.rollouts import Rollouts
from rloo_cli.generation.vllm.teacher import TeacherServer
from rloo_cli.policy.layouts import LayoutChoice
from rloo_cli.policy.model import Policy
from rloo_cli.policy.reference import Reference
from rloo_cli.policy.value import ValueModel
from rloo_cli.reporting.log import RunLog
from rloo_cli.reporting.prompt_ledger import PromptLedger
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.rewards.engine.build import Reward
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import RandomStates, capture_random_states
from rloo_cli.utils.timers import StepTimer


@dataclass
class StepProgress:
    """The batch of the current step, and the progress of its updates."""

    batch: Batch
    updates: UpdateMetrics = field(default_factory=UpdateMetrics)
    prepared: bool = False  # log-probabilities and advantages are computed for the whole batch
    iteration: int = 0
    done: int = 0  # updates made in this iteration
    marked_updates: UpdateMetrics = field(default_factory=UpdateMetrics)  # at the last mark
    rng: RandomStates = field(default_factory=capture_random_states)  # at the last mark

    def mark_position(self) -> None:
        """Mark a position from which the rest of the step can be repeated."""
        self.marked_updates, self.rng = self.updates.copy(), capture_random_states()

    def next_iteration(self) -> None:
        """Continue with the next iteration over the batch."""
        self.iteration, self.done = self.iteration + 1, 0


StepPosition = tuple[int, int]  # steps done; updates done in the next one, -1 = not begun


@dataclass
class RunState:
    """The state of a run: what a checkpoint must hold besides weights and optimizer."""

    step: int = 0  # rollout batches done
    updates: int = 0  # optimizer updates done
    place: int = 0  # prompts taken by steps, over all epochs; if a step draws its own, the
    # offset of the next one
    episodes: int = 0  # completions of the steps' batches
    sampled: int = 0  # these, those discarded by resampling, and greedy ones
    tokens: int = 0  # of prompts (K copies) and completions, including environments'
    empty: int = 0  # updates in a row with nothing to learn from
    nonfinite: int = 0  # updates in a row that were skipped
    evaluated: int = -1  # the step at which the held-out prompts were last answered
    memory: dict[str, float] = field(default_factory=dict)  # the algorithm's state
    entropy_control: dict[str, float] = field(default_factory=dict)  # of adaptive_entropy

    def advance(self, batch: Batch) -> None:
        """Count a finished step."""
        self.step += 1
        self.place += batch.draws
        self.episodes += batch.score.numel()
        self.sampled += batch.num_sampled
        self.tokens += batch.num_tokens

    def seen_by_rewards(self, run: "Run") -> TrainerState:
        """Training progress for rewards (docs/rewards.md), for curricula."""
        history = run.log.training_lines
        state = self.trainer_state(run.num_steps, len(run.prompts), run.config, history)
        local_zero = run.world.rank % run.world.local_world_size == 0
        return replace(
            state, is_world_process_zero=run.world.is_main, is_local_process_zero=local_zero
        )

    def trainer_state(
        self, num_steps: int, num_prompts: int, config: RunConfig, history: list[JsonObject]
    ) -> TrainerState:
        """Training progress for rewards. `num_prompts`: in the data, 0 = unknown.

        `history`: the lines logged so far, without evaluations, which must not affect the training.
        """
        per_step, size = config.train.prompts_per_step, num_prompts or math.inf
        return TrainerState(
            global_step=self.updates,
            step=self.step,
            max_steps=num_steps,
            epoch=self.place / size,
            episode=self.episodes,
            num_input_tokens_seen=self.tokens,
            num_train_epochs=num_steps * per_step / size,
            log_history=history,
            logging_steps=config.logging.every,
            eval_steps=config.eval.every,
            save_steps=config.checkpoint.every,
            train_batch_size=per_step * config.algorithm.num_generations,
        )

    def dump(self) -> JsonObject:
        """Plain values, for run.json."""
        return asdict(self)


@dataclass
class Run:
    """Every part of one run."""

    config: RunConfig
    folder: Path
    world: World
    engine: ParallelEngine
    algorithm: Algorithm[Switches]
    forward_plan: ForwardPlan  # which passes an update needs
    tokenizer: PreTrainedTokenizerBase
    prompts: Prompts
    eval_sets: dict[str, Prompts]  # held out, by name; "" = the one of data.eval_split
    policy: Policy
    reference: Reference | None
    teacher: TeacherServer | None  # instead of a reference, over HTTP
    value_model: ValueModel | None
    generator: Generator
    rewards: Sequence[Reward]
    rollouts: Rollouts
    source: BatchSource  # of each step's batch: the rollouts, or a concurrent sampler
    optimizer: TrainingOptimizer
    clock: StepTimer
    log: RunLog
    num_steps: int  # rollout batches to do
    forward_limits: ForwardLimits  # of one forward pass
    layout_choice: LayoutChoice  # layout and head of the policy
    ledger: PromptLedger
    state: RunState = field(default_factory=RunState)
    step_progress: StepProgress | None = None  # of the current step, once its batch is sampled
    rng: RandomStates = field(default_factory=capture_random_states)  # when the last step ended
    attempt: int = 1
    episodes_before: int = 0  # `state.episodes` when this attempt began
    has_atomic_rename: bool = True  # the file system renames folders atomically
    saved_position: StepPosition | None = (0, -1)  # of the last checkpoint
    tools: ToolSet | None = None  # of the agent; None = one answer to each prompt
    judge: Any = None  # evaluation.judges.judge.Judge, a room above; None = no judge

    @property
    def position(self) -> StepPosition:
        """Steps done, and updates done in the next one (-1: not begun)."""
        progress = self.step_progress
        if progress is None:
            return self.state.step, -1
        minibatches = self.config.algorithm.num_minibatches
        return self.state.step, progress.iteration * minibatches + progress.done
