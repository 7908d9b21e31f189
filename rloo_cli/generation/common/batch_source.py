"""Where a step's batch comes from: `Rollouts` samples it when it is asked for it, `AsyncSampler`
beside the updates before it. The training loop knows a source by these methods alone.
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
    """What has been sampled, and no step has taken, as a checkpoint keeps it."""

    batch: Batch | None = None  # whole, of the next step (overlap=ahead)
    group_tensors: dict[str, Tensor] = field(default_factory=dict)  # groups under way
    groups: JsonObject | None = None  # and what else is known of them; None = there are none


def refuse_lost_groups(state: SourceState) -> None:
    """Raise ConfigError if groups are under way that this source cannot go on with."""
    found = [] if state.groups is None else state.groups["groups"]
    if found:
        draws = ", ".join(str(group["draw"]) for group in found[:5])
        what = f"{len(found)} groups are under way in the checkpoint, and would be lost"
        why = f"generation.overlap=carry had begun them (draws {draws}, ...)"
        fix = "generation.overlap=carry, as it was"
        refuse("generation.overlap", what, fix, why)


class BatchSource(ABC):
    """Makes the batch of each step. What is not overridden is right for one that samples nothing
    between two calls of `next_batch`."""

    has_one_lag = False  # whether the lag of a batch's tokens is one, and is logged with its gap

    @abstractmethod
    def next_batch(self, step: int, prompt_offset: int, state: TrainerState) -> Batch:
        """The batch of step `step`, with prompts from `prompt_offset` on.

        Raises RewardError, GenerationError, and NumbersError when resampling finds nothing to learn
        from.
        """

    def begin_next(self, step: int, prompt_offset: int, state: TrainerState) -> None:  # noqa: B027
        """Sample for step `step` from now on, beside the update before it, if it can."""

    def pause(self, policy: Policy | None = None) -> None:  # noqa: B027
        """Sample nothing from now on: the weights change. Raises what the sampling raised.

        `policy`: what was sampled is compared with it. Raises GenerationError (exit 6) where it is
        of other weights.
        """

    def give_up(self) -> RandomStates | None:
        """Sample nothing from now on: the run ends before an update. -> the random states to save,
        where they are not those of now"""
        return None

    def state(self) -> SourceState:
        """What a checkpoint must keep of it."""
        return SourceState()

    def restore(self, state: SourceState, step: int) -> None:
        """Go on with a checkpoint's state; `step` takes what it has. Raises ConfigError where
        groups under way would be lost."""
        refuse_lost_groups(state)

    def step_metrics(self, step_time: float, exposed_s: float) -> dict[str, float]:
        """Its metrics of a step that took `step_time` and waited `exposed_s` for it, in seconds."""
        return {}

    def close(self) -> None:  # noqa: B027
        """Sample nothing any more."""


METRICS = {"Prompts and completions": [  # read by utils.metrics
    ("overlap/exposed_s", "s", "mean",
     "seconds that the training waited for the sampler (generation.overlap)"),
    ("overlap/paced_s", "s", "mean",
     "seconds of these in which enough groups had finished, and older ones were waited for "
     "(generation.max_lag)"),
    ("overlap/hidden_s", "s", "mean", "seconds of sampling and scoring beside the training"),
    ("overlap/idle_s", "s", "mean", "seconds of the step in which nothing was sampled"),
]}  # fmt: skip


def overlap_metrics(
    step_time: float, exposed_s: float, hidden_s: float, paced_s: float | None = None
) -> dict[str, float]:
    """`overlap/*` of a step that took `step_time` and waited `exposed_s` for its batch, in seconds.

    `hidden_s`: of sampling beside the training. `paced_s`: of the wait, for older groups; None
    without any.
    """
    idle_s = max(0.0, step_time - exposed_s - hidden_s)
    seconds = {"exposed_s": exposed_s, "paced_s": paced_s, "hidden_s": hidden_s, "idle_s": idle_s}
    return {f"overlap/{name}": value for name, value in seconds.items() if value is not None}


class AsyncSampler(BatchSource):
    """A source that samples on a thread of its own beside the updates, up to `max_lag` of them.

    Nothing runs between `pause` and the next batch: evaluation, checkpoints and a stop find all
    that was sampled at rest. `clock`: the training's, which counts what it waits.
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
        """Check that what was sampled is of the policy as it is; one group is forwarded for it.

        Raises GenerationError (exit 6).
        """
