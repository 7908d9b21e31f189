"""Callbacks of transformers, notified of a run like `plugin.Events`; they can end it.

They get numbers and paths, but never the model or optimizer. `control.should_training_stop`
ends the training after the current step, as if it were the last one. Other actions on
a trainer are refused when the callback is passed, or reported when it requests them.
"""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from rloo_cli.compat.trl_results import trl_entry
from rloo_cli.compat.trl_settings import TRLValueError
from rloo_cli.reporting.events import Events
from rloo_cli.utils.files import JsonObject

TOLD = (
    "on_init_end", "on_train_begin", "on_train_end", "on_step_end", "on_log", "on_evaluate",
    "on_save",
)  # fmt: skip
LIVE_PARTS = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
IDLE_CONTROLS = ("should_epoch_stop", "should_save", "should_evaluate", "should_log")
FIX = "use a subclass of rloo_cli.plugin.Events, called at steps, evaluations, saves and the end"


def sort_callbacks(
    callbacks: Sequence[Any] | None,
) -> tuple[list[Events], list[TrainerCallback]]:
    """-> our callbacks and transformers', constructed if a class was given.

    Raises ConfigError for another object, and for one that needs more than a run provides.
    """
    made = [item() if isinstance(item, type) else item for item in callbacks or ()]
    for item in made:
        if not isinstance(item, Events | TrainerCallback):
            what = f"callbacks: {item!r:.60} is neither a callback of transformers nor one of rloo"
            raise TRLValueError(f"{what}; {FIX}")
        if isinstance(item, TrainerCallback):
            _check_callback(item)
    theirs = [item for item in made if isinstance(item, TrainerCallback)]
    return [item for item in made if isinstance(item, Events)], theirs


def _check_callback(callback: TrainerCallback) -> None:
    name = type(callback).__name__
    for hook in [n for n in dir(TrainerCallback) if n.startswith("on_")]:
        own = getattr(type(callback), hook)
        if own is getattr(TrainerCallback, hook):
            continue
        if hook not in TOLD:
            what = f"callbacks: {name}.{hook} would never be called; a run calls {', '.join(TOLD)}"
            raise TRLValueError(f"{what}; {FIX}")
        parameters = inspect.signature(own).parameters.values()
        needed = [p.name for p in parameters if p.name in LIVE_PARTS and p.default is p.empty]
        if needed:
            what = f"callbacks: {name}.{hook} needs {needed[0]}"
            why = "a run passes numbers and paths, but never its model or optimizer"
            raise TRLValueError(f"{what}; {why}; {FIX}")


class CallbackEvents(Events):
    """Notifies transformers' callbacks, and stores their requests and the first error."""

    def __init__(self, callbacks: Sequence[TrainerCallback], args: Any, state: TrainerState):
        self.callbacks, self.args, self.state = list(callbacks), args, state
        self.control = TrainerControl()
        self.error: Exception | None = None
        self.noted: set[str] = set()

    def tell(self, hook: str, **values: Any) -> None:
        """Call a method of each callback. An error of one ends the training, and is stored."""
        for callback in self.callbacks:
            try:
                answer = getattr(callback, hook)(self.args, self.state, self.control, **values)
            except Exception as error:  # user code
                self.error, self.control.should_training_stop = error, True
                return
            self.control = answer if answer is not None else self.control
        for name in IDLE_CONTROLS:
            if getattr(self.control, name) and name not in self.noted:
                self.noted.add(name)
                print(f"note: a callback set control.{name}: only should_training_stop is followed")
            setattr(self.control, name, False)

    def on_start(self, folder: Path, config: JsonObject) -> None:
        """Tell on_train_begin."""
        self.tell("on_train_begin")

    def on_step(self, step: int, metrics: JsonObject) -> None:
        """Call on_step_end, and on_log every logging_steps updates."""
        self.state.global_step = int(metrics.get("updates", step))
        self.state.epoch = metrics.get("epoch")
        self.tell("on_step_end")
        every = max(1, int(getattr(self.args, "logging_steps", None) or 10))
        if self.state.global_step % every == 0:
            logs = trl_entry(metrics)
            self.state.log_history.append(logs)
            self.tell("on_log", logs=logs)

    def on_evaluation(self, step: int, metrics: JsonObject) -> None:
        """Tell on_evaluate."""
        self.tell("on_evaluate", metrics=trl_entry(metrics))

    def on_save(self, step: int, folder: Path) -> None:
        """Tell on_save."""
        self.tell("on_save")

    def on_end(self, summary: JsonObject) -> None:
        """Tell on_train_end."""
        self.tell("on_train_end")

    def wants_end(self) -> bool:
        """Whether a callback has set control.should_training_stop."""
        return bool(self.control.should_training_stop)
