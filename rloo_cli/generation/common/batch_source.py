"""Where a step's batch comes from: `Rollouts` samples it on demand, `AsyncSampler` during earlier
updates. The training loop knows a source by these methods only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from threading import Thread

from torch import Tensor

from rloo_cli.data.batch import Batch
from rloo_cli.policy.model import Policy
from rloo_cli.rewards.engine.arguments import TrainerState
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.rng import RandomStates
from rloo_cli.utils.timers import StepTimer


@dataclass
class SourceState:
    """Sampled work that no step has taken yet, as a checkpoint stores it."""

    batch: Batch | None = None  # complete, of the next step (overlap=ahead)
    group_tensors: dict[str, Tensor] = field(default_factory=dict)  # groups under way
    groups: JsonObject | None = None  # their other fields; None = no groups


def refuse_lost_groups(state: SourceState) -> None:
    """Raise ConfigError if the checkpoint has unfinished groups that this source cannot use."""
    found = [] if state.groups is None else state.groups["groups"]
    if found:
        draws = ", ".join(str(group["draw"]) for group in found[:5])
        what = f"{len(found)} unfinished groups in the checkpoint would be lost"
        why = f"generation.overlap=carry had begun them (draws {draws}, ...)"
        fix = "generation.overlap=carry, as before"
        refuse("generation.overlap", what, fix, why)


class BatchSource(ABC):
    """Makes the batch of each step. The defaults are right for a source that samples nothing
    between two calls of `next_batch`."""

    has_one_lag = False  # whether a batch's tokens all have lag 1, and the gap is logged

    @abstractmethod
    def next_batch(self, step: int, prompt_offset: int, state: TrainerState) -> Batch:
        """The batch of step `step`, with prompts from `prompt_offset` on.

        Raises RewardError, GenerationError, and NumbersError if resampling finds no usable group.
        """

    def begin_next(self, step: int, prompt_offset: int, state: TrainerState) -> None:  # noqa: B027
        """Start sampling for step `step`, during the update before it, if possible."""

    def pause(self, policy: Policy | None = None) -> None:  # noqa: B027
        """Stop sampling: the weights are about to change. Raises what the sampling raised.

        `policy`: the samples are compared with it. Raises GenerationError (exit 6) if they are of
        other weights.
        """

    def give_up(self) -> RandomStates | None:
        """Stop sampling: the run ends before an update. -> the random states to save, if other
        than the current ones"""
        return None

    def state(self) -> SourceState:
        """Its part of a checkpoint."""
        return SourceState()

    def restore(self, state: SourceState, step: int) -> None:
        """Continue from a checkpoint's state, which `step` uses up. Raises ConfigError if its
        unfinished groups would be lost."""
        refuse_lost_groups(state)

    def step_metrics(self, step_time: float, exposed_s: float) -> dict[str, float]:
        """Its metrics of a step that took `step_time` and waited `exposed_s` for it, in seconds."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Stop sampling for good."""


METRICS = {"Prompts and completions": [  # read by utils.metrics
    ("overlap/exposed_s", "s", "mean",
     "seconds that training waited for the sampler (generation.overlap)"),
    ("overlap/paced_s", "s", "mean",
     "seconds of these spent waiting for older groups although enough others had finished "
     "(generation.max_lag)"),
    ("overlap/hidden_s", "s", "mean", "seconds of sampling and scoring overlapped with training"),
    ("overlap/idle_s", "s", "mean", "seconds of the step without sampling"),
]}  # fmt: skip


def overlap_metrics(
    step_time: float, exposed_s: float, hidden_s: float, paced_s: float | None = None
) -> dict[str, float]:
    """`overlap/*` of a step that took `step_time` and waited `exposed_s` for its batch, in seconds.

    `hidden_s`: of sampling during training. `paced_s`: part of the wait that was for older groups;
    None if there is none.
    """
    idle_s = max(0.0, step_time - exposed_s - hidden_s)
    seconds = {"exposed_s": exposed_s, "paced_s": paced_s, "hidden_s": hidden_s, "idle_s": idle_s}
    return {f"overlap/{name}": value for name, value in seconds.items() if value is not None}


class AsyncSampler(BatchSource):
    """A source that samples on its own thread during the updates, up to `max_lag` of them.

    Nothing runs between `pause` and the next batch: evaluation, checkpoints and a stop find all
    samples at rest. `clock`: the training's, which counts its waits.
    """

    def __init__(self, clock: StepTimer, max_lag: int):
        self.clock, self.max_lag = clock, max_lag
        self._thread: Thread | None = None
        self._error: BaseException | None = None  # of the thread

    def pause(self, policy: Policy | None = None) -> None:
        if policy is None:
            self.wait()
            return
        with self.clock.phase("exposed"):
            self.wait()
        with self.clock.phase("old_logp"):
            self.check_weights(policy)

    @abstractmethod
    def wait(self) -> None:
        """Wait until the thread has ended. Raises what it raised."""

    @abstractmethod
    def check_weights(self, policy: Policy) -> None:
        """Check that the samples are of the current weights; one group is forwarded for it.

        Raises GenerationError (exit 6).
        """
