"""Loads a reward model that is an adapter: peft's folder, which names its base.

TRL's RewardTrainer saves one with `--use_peft`. The base becomes a sequence classifier, the
adapter (of any kind that peft can merge) is merged into it, and its own score head replaces
the base's: the result is a plain model like any other.
"""

from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from rloo_cli.config import synthetic
from rloo_cli.policy import lora
from rloo_cli.utils.errors import MachineError, refuse
from rloo_cli.utils.files import JsonObject


def find_adapter_folder(path: str) -> Path | None:
    """The folder of an adapter; None if `path` is a model or a hub name."""
    folder = Path(path).expanduser()
    is_adapter = (folder / lora.PEFT_CONFIG_FILE).is_file()
    return folder if is_adapter and not (folder / "config.json").is_file() else None


def load_merged_classifier(folder: Path, key: str, options: JsonObject) -> PreTrainedModel:
    """Load the base of an adapter as a classifier with one label, and merge the adapter into it.

    `options`: arguments of the base's `from_pretrained`. Raises MachineError for an adapter
    without a score head, or that cannot be merged; other errors are the libraries'.
    """
    peft = lora.import_peft()
    about = lora.read_adapter_config(folder)
    if peft.PeftConfig.from_pretrained(str(folder)).is_prompt_learning:
        why = f"its peft_type is {about.get('peft_type')}, which has no weights to merge"
        fix = f"{key}.path=FOLDER of a LoRA, or of the whole model"
        refuse(f"{key}.path", f"{folder} cannot be merged", fix, why, error=MachineError)
    base_path = str(about.get("base_model_name_or_path") or "")
    options = options | {"num_labels": 1, "output_loading_info": True, "revision": None}
    call = AutoModelForSequenceClassification.from_pretrained
    base, info = call(synthetic.resolve_model_path(base_path), **_given(options))
    _check_score_head(folder, key, sorted(info["missing_keys"]))
    model: Any = peft.PeftModel.from_pretrained(base, str(folder))
    merged: PreTrainedModel = model.merge_and_unload()
    return merged


def _given(options: JsonObject) -> JsonObject:
    return {name: value for name, value in options.items() if value is not None}


def _check_score_head(folder: Path, key: str, missing: list[str]) -> None:
    """Raise MachineError if base and adapter together lack weights of the classifier."""
    with safe_open(folder / lora.PEFT_WEIGHTS_FILE, "pt") as file:
        own = {name.removeprefix(lora.PEFT_NAME_PREFIX) for name in file.keys()}  # noqa: SIM118
    if absent := [name for name in missing if name not in own]:
        what = f"the adapter {folder} is not a reward model"
        why = f"neither it nor its base has {', '.join(absent[:5])}; they would be random numbers"
        fix = f"{key}.path=FOLDER of an adapter with modules_to_save: [score]"
        refuse(f"{key}.path", what, fix, why, error=MachineError)
