"""One step's batch, and how far its updates have come: what a run that stops inside a step keeps.

A save may come in the middle of an update. What that update has done so far is then left out:
`mark` remembers what it began from.
"""

from dataclasses import dataclass, field

from rloo_cli.utils.rng import States, take
from rloo_cli.data.batch import Batch
from rloo_cli.reporting.update_metrics import Updates


@dataclass
class Cycle:
    """The batch of the step that is being done."""

    batch: Batch
    updates: Updates = field(default_factory=Updates)
    prepared: bool = False  # log-probabilities and advantages are known for the whole batch
    iteration: int = 0
    done: int = 0  # updates of this iteration
    safe: Updates = field(default_factory=Updates)  # at the last mark
    rng: States = field(default_factory=take)  # likewise

    def mark(self) -> None:
        """What comes next can be done again from here."""
        self.safe, self.rng = self.updates.copy(), take()

    def next_iteration(self) -> None:
        """All updates of an iteration are made."""
        self.iteration, self.done = self.iteration + 1, 0
