"""TRL's RLOOTrainer and GRPOTrainer, for scripts that change one import.

    from rloo_cli.compat.trl import RLOOConfig, RLOOTrainer

    trainer = RLOOTrainer(model="Qwen/Qwen2-0.5B", reward_funcs=f, args=RLOOConfig("out"),
                          train_dataset=dataset)
    trainer.train()

The trainer writes a recipe, as `rloo migrate` does, and `train` is `api.train` of it. What a script
passes as an object is written beside it, into ROOT/.inputs/NAME: ROOT/NAME is `output_dir`. What
could not be carried over is printed; what would change the result is refused.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from rloo_cli.api import train
from rloo_cli.compat import trl_objects
from rloo_cli.compat.trl_settings import GRPOConfig, RLOOConfig, written_settings
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "TrainOutput"]


class TrainOutput(NamedTuple):
    """What `train` returns, as transformers' trainer does."""

    global_step: int  # optimizer updates
    training_loss: float | None  # of the last step
    metrics: JsonObject  # summary.json


class RLOOTrainer:
    """TRL's arguments; each one that it does not know is an error."""

    kind: ClassVar[str] = "rloo"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ):
        """Write the recipe. Raises ConfigError for what this trainer would have to ignore."""
        trl_objects.refuse_arguments(optimizers=optimizers)
        self.events = trl_objects.event_listeners(callbacks)
        self.args = args if args is not None else trl_objects.default_config(model, self.kind)
        settings = written_settings(self.args)
        inputs = trl_objects.InputFolder(settings)
        settings |= inputs.model_settings(model, processing_class)
        settings |= trl_objects.adapter_settings(peft_config, quantization_config)
        settings |= inputs.agent_settings(tools, environment_factory, rollout_func)
        settings |= inputs.data_settings(train_dataset, eval_dataset, settings)
        named, specs = inputs.rewards(reward_funcs, reward_processing_classes)
        self.rewards: Mapping[str, Callable[..., Any]] = named
        self.folder = inputs.run_folder
        self.recipe = inputs.write_recipe(settings | {"reward_funcs": specs}, self.kind)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train; a run that is finished already is not repeated. Raises RunError."""
        trl_objects.refuse_arguments(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        overrides = []
        if resume_from_checkpoint:
            newest = resume_from_checkpoint is True
            overrides.append(f"resume={'auto' if newest else resume_from_checkpoint}")
        summary = train(
            self.recipe, self.rewards, overrides, replace_rewards=False, events=self.events
        )
        loss = trl_objects.last_metric(self.folder, "loss")
        return TrainOutput(int(summary["updates"]), loss, summary)

    def save_model(self, output_dir: str | os.PathLike[str] | None = None) -> None:
        """Copy the trained model, which is in `output_dir`/final, to another folder."""
        if output_dir is not None:
            shutil.copytree(self._final(), output_dir, dirs_exist_ok=True)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
    ) -> str:
        """`rloo push` of the run to args.hub_model_id. -> the repository's address"""
        self._final()
        repo = str(getattr(self.args, "hub_model_id", None) or self.folder.name)
        words = ["push", str(self.folder), "--repo", repo, "--message", commit_message]
        words += ["--revision", revision] if revision else []
        words += [] if getattr(self.args, "hub_private_repo", None) else ["--public"]
        env = os.environ | ({"HF_TOKEN": token} if token else {})
        told = subprocess.run(
            [sys.executable, "-m", "rloo_cli", *words], env=env, stdout=subprocess.PIPE, text=True
        )
        if told.returncode:
            fix = "correct what rloo push says above, then call push_to_hub() again"
            raise ConfigError(Problem(f"{repo} was not pushed", "push_to_hub", "see above", fix))
        return told.stdout.strip()

    def _final(self) -> Path:
        final = self.folder / "final"
        if not final.is_dir():
            why = "training writes it at its end"
            raise ConfigError(Problem(f"{final} is not there", "the trainer", why, "call train()"))
        return final


class GRPOTrainer(RLOOTrainer):
    """TRL's GRPO: algorithm=grpo with TRL's defaults."""

    kind: ClassVar[str] = "grpo"
