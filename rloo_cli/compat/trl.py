"""TRL's RLOOTrainer and GRPOTrainer, for scripts that change one import.

    from rloo_cli.compat.trl import RLOOConfig, RLOOTrainer

    trainer = RLOOTrainer(model="Qwen/Qwen2-0.5B", reward_funcs=f, args=RLOOConfig("out"),
                          train_dataset=dataset)
    trainer.train()

The trainer writes a recipe, as `rloo migrate` does, and `train` is `api.train` of it. Objects
that a script passes are saved into ROOT/.inputs/NAME: ROOT/NAME is `output_dir`. A setting without
effect here is printed; one that would change the result is refused when the
trainer is constructed. Under `accelerate launch` each process is a rank. Other names that a script
imports here (TrlParser, ModelConfig, get_peft_config, ...) are those of an installed TRL.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from transformers import TrainerState

from rloo_cli.api import compose_run, evaluate, is_rank, train
from rloo_cli.compat import trl_objects, trl_results
from rloo_cli.compat.trl_callbacks import CallbackEvents, sort_callbacks
from rloo_cli.compat.trl_settings import (
    GRPOConfig,
    RLOOConfig,
    TRLValueError,
    check_fields,
    written_settings,
)
from rloo_cli.config.schema import RunConfig
from rloo_cli.launch.topology import accelerate_engine
from rloo_cli.utils.errors import ConfigError
from rloo_cli.utils.files import JsonObject

__all__ = ["GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer", "TrainOutput"]


class TrainOutput(NamedTuple):
    """The result of `train`, as in transformers' trainer."""

    global_step: int  # optimizer updates
    training_loss: float  # mean over the steps
    metrics: JsonObject  # summary.json


class RLOOTrainer:
    """TRL's arguments; an unknown one is an error."""

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
        """Write the recipe. Raises ConfigError for settings that it would have to ignore."""
        trl_objects.refuse_arguments(optimizers=optimizers)
        self.args = args if args is not None else trl_objects.default_config(model, self.kind)
        settings, printed = check_fields(written_settings(self.args), self.kind)
        quantization_config = trl_objects.take_quantization(settings, quantization_config, printed)
        self.listeners, self.callbacks = sort_callbacks(callbacks)
        self.accelerator = trl_results.ScriptAccelerator(float(settings.get("ddp_timeout", 1800)))
        inputs = trl_objects.InputFolder(settings, self.accelerator.is_main_process)
        adapter = trl_objects.adapter_settings(peft_config, quantization_config)
        weights = settings.get("reward_weights")
        named, rewards = inputs.rewards(reward_funcs, reward_processing_classes, weights)
        self.reward_funcs = trl_objects.listed(reward_funcs)
        self.reward_processing_classes = trl_objects.listed(reward_processing_classes)
        self.settings = settings | inputs.model_settings(model, processing_class) | adapter
        self.settings |= inputs.agent_settings(tools, environment_factory, rollout_func)
        self.settings |= inputs.data_settings(train_dataset, eval_dataset, settings) | rewards
        self.rewards: Mapping[str, Callable[..., Any]] = named
        self.inputs, self.folder = inputs, inputs.run_folder
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.peft_config = processing_class, peft_config
        self.recipe = inputs.write_recipe(self.settings, self.kind, printed)
        self.accelerator.wait_for_everyone()  # all files exist before any rank reads them
        try:
            compose_run(self.recipe, named, self._overrides(), replace_rewards=False)
        except ConfigError as error:
            raise TRLValueError(*trl_objects.in_words_of_trl(error.problems)) from None
        self.state, self.trained = TrainerState(), False
        self.models: dict[bool, Any] = {}  # loaded on access: before and after the training
        self._tell("on_init_end")

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train; a finished run is not repeated. Raises RunError."""
        trl_objects.refuse_arguments(trial=trial, ignore_keys_for_eval=ignore_keys_for_eval)
        overrides = self._overrides()
        if resume_from_checkpoint:
            newest = resume_from_checkpoint is True
            overrides.append(f"resume={'auto' if newest else resume_from_checkpoint}")
        callback_events = CallbackEvents(self.callbacks, self.args, self.state)
        events = [*self.listeners, *([callback_events] if self.callbacks else [])]
        summary = train(self.recipe, self.rewards, overrides, replace_rewards=False, events=events)
        if callback_events.error is not None:
            raise callback_events.error
        self.trained = True
        trl_results.fill_trainer_state(self.state, self.folder, summary)
        loss = self.state.log_history[-1]["train_loss"]
        return TrainOutput(self.state.global_step, loss, summary)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> JsonObject:
        """Score the current model on held-out prompts, with the rewards. Raises RunError."""
        trl_objects.refuse_arguments(ignore_keys=ignore_keys)
        data = eval_dataset if eval_dataset is not None else self.eval_dataset
        if data is None:
            what = "evaluate() has no data: the trainer was created without eval_dataset"
            raise TRLValueError(f"{what}; give evaluate(eval_dataset=D)")
        sets = self.inputs.eval_sets(data, self.settings)
        self.accelerator.wait_for_everyone()
        settings = self._evaluation_settings(sets)
        found = evaluate(settings, self.inputs.folder / "evaluation", self.rewards)
        metrics = trl_results.trl_entry(found, metric_key_prefix)
        self.state.log_history.append(metrics | {"step": self.state.global_step})
        return metrics

    @property
    def model(self) -> Any:
        """The trained model, from `output_dir`/final, or the initial model before training.

        It is loaded on access: changing it changes nothing in a run.
        """
        if self.trained not in self.models:
            self.models[self.trained] = self._load_model()
        return self.models[self.trained]

    @property
    def hub_model_id(self) -> str:
        """The repository that `push_to_hub` uploads to."""
        return str(getattr(self.args, "hub_model_id", None) or self.folder.name)

    def save_model(
        self, output_dir: str | os.PathLike[str] | None = None, _internal_call: bool = False
    ) -> None:
        """Copy the trained model, which is in `output_dir`/final, to a folder; by default to
        `output_dir` itself, next to the run's own files."""
        if self.accelerator.is_main_process:
            shutil.copytree(self._final(), output_dir or self.folder, dirs_exist_ok=True)
        self.accelerator.wait_for_everyone()

    def save_state(self) -> None:
        """Write trainer_state.json into `output_dir`."""
        if self.accelerator.is_main_process:
            self.state.save_to_json(str(self.folder / trl_results.STATE_FILE))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Print metrics under the name of a split, on rank 0."""
        if self.accelerator.is_main_process:
            trl_results.print_metrics(split, metrics)

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write {split}_results.json and all_results.json into `output_dir`."""
        if self.accelerator.is_main_process:
            trl_results.write_metrics(self.folder, split, metrics, combined)

    def is_world_process_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.accelerator.is_main_process

    def add_callback(self, callback: Any) -> None:
        """Add a callback, before `train`. Raises ConfigError as the constructor does."""
        ours, theirs = sort_callbacks([callback])
        self.listeners += ours
        self.callbacks += theirs

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        dataset_name: str | None = None,
        **card: Any,
    ) -> str:
        """`rloo push` of the run to args.hub_model_id. -> the repository's address

        `dataset_name` is written into the card. Other arguments of a card (`card`) are printed: it
        is made from the run's own record.
        """
        if not self.accelerator.is_main_process:
            return ""
        self._final()
        for name, value in card.items():
            print(f"note: {name}={value!r:.60}: the card is made from the run's own record")
        repo = self.hub_model_id
        branch = revision or getattr(self.args, "hub_revision", None)
        words = ["push", str(self.folder), "--repo", repo, "--message", commit_message]
        words += ["--revision", branch] if branch else []
        words += ["--dataset", dataset_name] if dataset_name else []
        words += [] if getattr(self.args, "hub_private_repo", None) else ["--public"]
        token = token or getattr(self.args, "hub_token", None)
        env = os.environ | ({"HF_TOKEN": token} if token else {})
        done = subprocess.run(
            [sys.executable, "-m", "rloo_cli", *words], env=env, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            what = f"{repo} was not pushed: correct what rloo push says above"
            raise ConfigError(f"{what}, then call push_to_hub() again")
        return done.stdout.strip()

    def end(self) -> None:
        """Nothing: trackers end with the run, and ranks with their process."""

    def _overrides(self) -> list[str]:
        """The recipe settings of this process: the engine of its ranks, and its log lines."""
        overrides = ["logging.every=1"] if self.callbacks else []  # callbacks get every step
        if is_rank():
            engine, offload = accelerate_engine(os.environ)
            overrides += [f"distributed.engine={engine}"] if engine else []
            overrides += [f"distributed.offload={offload}"] if offload else []
        return overrides

    def _evaluation_settings(self, sets: JsonObject) -> RunConfig:
        """The run's config with these held-out sets, and the current model."""
        entries = ", ".join(
            f"{name}: {{path: {json.dumps(entry['path'])}, split: {entry['split']}}}"
            for name, entry in sets.items()
        )
        words = [*self._overrides(), f"eval.sets={{{entries}}}"]
        _, settings = compose_run(self.recipe, self.rewards, words, replace_rewards=False)
        model: JsonObject = {}
        if self.trained:  # an adapter is merged there
            none = dict.fromkeys(("revision", "tokenizer", "lora", "quantization"))
            model = {"path": str(self._final()), **none}
        return settings.model_copy(update={"model": settings.model.model_copy(update=model)})

    def _load_model(self) -> Any:
        given = self.settings.get("model_init_kwargs") or {}
        adapter = self._final() / "adapter" if self.trained else None
        if adapter is not None and not adapter.is_dir():
            return trl_results.load_named_model(str(adapter.parent))
        base = trl_results.load_named_model(self.settings["model_name_or_path"], **given)
        if adapter is not None:
            return import_module("peft").PeftModel.from_pretrained(base, str(adapter))
        if self.peft_config is not None:
            return import_module("peft").get_peft_model(base, self.peft_config)
        return base

    def _tell(self, hook: str) -> None:
        """Notify callbacks; an error of theirs is raised."""
        callback_events = CallbackEvents(self.callbacks, self.args, self.state)
        callback_events.tell(hook)
        if callback_events.error is not None:
            raise callback_events.error

    def _final(self) -> Path:
        final = self.folder / "final"
        if not final.is_dir():
            raise ConfigError(f"{final} does not exist: call train(), which writes it at its end")
        return final


class GRPOTrainer(RLOOTrainer):
    """TRL's GRPO: algorithm=grpo with TRL's defaults."""

    kind: ClassVar[str] = "grpo"


def __getattr__(name: str) -> Any:
    """Other names that a script imports from TRL, if it is installed."""
    if not name.startswith("_") and find_spec("trl") is not None:
        return getattr(import_module("trl"), name)
    raise AttributeError(f"{__name__} has no {name}: pip install trl, which provides it")
