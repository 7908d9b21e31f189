"""A trainer's attributes for scripts, besides the training: its process, its state and its files.

`ScriptAccelerator` is `trainer.accelerator`. `trainer.state` is transformers' own
TrainerState, filled from the run's metrics.jsonl; the files are those that transformers writes.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, TrainerState

from rloo_cli.api import is_rank
from rloo_cli.distributed.world import join_process_group
from rloo_cli.reporting.metrics_lines import read_metrics_lines
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.files import JsonObject, write_text

STATE_FILE = "trainer_state.json"


class ScriptAccelerator:
    """The parts of accelerate's Accelerator that scripts need. Ranks of a launcher join their
    process group here, as they do in TRL's constructor."""

    def __init__(self, timeout_s: float):
        """Raises MachineError and GenerationError, as `join_process_group` does."""
        self.state = join_process_group(timeout_s) if is_rank() else None

    @property
    def num_processes(self) -> int:
        """The number of ranks."""
        return environment_number("WORLD_SIZE", 1) if self.state is not None else 1

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return environment_number("RANK", 0) if self.state is not None else 0

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return environment_number("LOCAL_RANK", 0) if self.state is not None else 0

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_process_index == 0

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""
        if torch.cuda.is_available():
            return torch.device("cuda", self.local_process_index)
        return torch.device("cpu")

    def print(self, *values: Any, **options: Any) -> None:
        """Print on rank 0."""
        if self.is_main_process:
            print(*values, **options)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has reached this point."""
        if self.state is not None:
            torch.distributed.barrier()

    def unwrap_model(self, model: Any, **_: Any) -> Any:
        """The model itself: `trainer.model` is not wrapped."""
        return model


def fill_trainer_state(state: TrainerState, folder: Path, summary: Mapping[str, Any]) -> None:
    """Fill the state with the run's metrics, one entry a line, and the entry that ends a training.

    The last entry has the last step's metrics, and `train_loss`, the mean loss of the steps.
    """
    lines = _metrics_of_run(folder)
    steps = [line for line in lines if "step_time" in line]
    losses = [line["loss"] for line in steps if line.get("loss") is not None]
    seconds = float(summary.get("seconds") or 0.0)
    state.log_history = [trl_entry(line) for line in lines]
    state.global_step = int(summary.get("updates", 0))
    state.max_steps = max(state.max_steps, state.global_step)
    last = trl_entry(steps[-1]) if steps else {}
    state.epoch = last.get("epoch", state.epoch)
    last |= {"train_loss": sum(losses) / len(losses) if losses else 0.0, "train_runtime": seconds}
    if seconds > 0:
        last["train_steps_per_second"] = round(state.global_step / seconds, 3)
    state.log_history.append(last)


def _metrics_of_run(folder: Path) -> list[JsonObject]:
    path = folder / "metrics.jsonl"
    return [dict(line) for line in read_metrics_lines(path)] if path.is_file() else []


def trl_entry(line: JsonObject, prefix: str = "eval") -> JsonObject:
    """A line of metrics.jsonl as TRL logs it: `step` counts updates, and the names of a held-out
    set begin with `prefix`, which the unnamed one (eval) does not repeat."""
    named = {}
    for name, value in line.items():
        if name.startswith("eval_"):
            name = f"{prefix}_{name.removeprefix('eval_').removeprefix('eval_')}"
        named[name] = value
    return named | ({"step": line["updates"]} if "updates" in line else {})


def load_named_model(name: str, **arguments: Any) -> Any:
    """The model of a folder or of the hub, with the class named in its config.json."""
    known = {k: v for k, v in arguments.items() if k in ("revision", "trust_remote_code")}
    architectures = AutoConfig.from_pretrained(name, **known).architectures or ()
    found = [kind for a in architectures if (kind := getattr(transformers, a, None)) is not None]
    kind = found[0] if found else transformers.AutoModelForCausalLM
    return kind.from_pretrained(name, **arguments)


def print_metrics(split: str, metrics: Mapping[str, Any]) -> None:
    """Print metrics as transformers' trainer does: one a line, in order."""
    print(f"***** {split} metrics *****")
    for name in sorted(metrics):
        print(f"  {name:24} = {metrics[name]}")
    sys.stdout.flush()


def write_metrics(folder: Path, split: str, metrics: Mapping[str, Any], combined: bool) -> None:
    """Write {split}_results.json, and also its content into all_results.json."""
    _write_plain(folder / f"{split}_results.json", metrics)
    whole = folder / "all_results.json"
    if combined:
        before = json.loads(whole.read_text()) if whole.is_file() else {}
        _write_plain(whole, before | dict(metrics))


def _write_plain(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(dict(values), indent=4, sort_keys=True, default=str) + "\n")
