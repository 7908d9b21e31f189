"""Models and data that are generated, so that a recipe needs no download: `make:NAME`.

SYNTHETIC_MODELS, SYNTHETIC_DATA: name -> `module:function`, read without importing torch. A model's
function returns the model's folder; a data set's takes the split's name and returns examples.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_cli.config import registry
from rloo_cli.config.key_types import TASK_PREFIX as TASK_PREFIX
from rloo_cli.utils.paths import PACKAGE

if TYPE_CHECKING:
    from rloo_cli.config.schema import DataConfig

MAKE_PREFIX = "make:"


@dataclass(frozen=True)
class RowSource:
    """Rows that are made here: what data.path begins with, and who makes them."""

    prefix: str
    rows: str  # `module:function`, (data config, split's name) -> rows; KeyError: no such split
    splits: tuple[str, ...] = ("train", "test")


ROW_SOURCES = (
    RowSource(MAKE_PREFIX, "rloo_cli.config.synthetic:synthetic_rows"),
    RowSource(TASK_PREFIX, "rloo_cli.data.tasks:task_rows"),
)
NO_HUB_PREFIXES = tuple(source.prefix for source in ROW_SOURCES)
SYNTHETIC_MODELS = {
    "addition": "rloo_cli.data.synthetic.addition:addition_model_folder",
    "addition_shallow": "rloo_cli.data.synthetic.shallow:shallow_addition_folder",
    "game": "rloo_cli.data.synthetic.tool_model:game_model_folder",
    "products": "rloo_cli.data.synthetic.tool_model:product_model_folder",
    "smollm2": "rloo_cli.data.synthetic.smollm2:smollm2_model_folder",
    "smollm2_shallow": "rloo_cli.data.synthetic.shallow:shallow_smollm2_folder",
    "tiny": "rloo_cli.data.synthetic.tiny:tiny_model_folder",
    "tiny_reward": "rloo_cli.data.synthetic.tiny:tiny_reward_model_folder",
    "tldr_base": "rloo_cli.data.synthetic.tldr:tldr_base_folder",
    "tldr_sft": "rloo_cli.data.synthetic.tldr_models:tldr_sft_folder",
    "tldr_reward": "rloo_cli.data.synthetic.tldr_models:tldr_reward_folder",
    "vision": "rloo_cli.data.synthetic.vision_model:vision_model_folder",
}
SYNTHETIC_CONTEXT_LENGTHS = {  # of the models, in tokens, for checks that come before torch
    "addition": 64, "addition_shallow": 64, "smollm2": 8192, "smollm2_shallow": 8192,
    "tiny": 2048, "tiny_reward": 2048,
    "game": 256, "products": 256, "tldr_base": 128, "tldr_sft": 128, "tldr_reward": 128,
    "vision": 256,
}  # fmt: skip
SYNTHETIC_VISION_TYPES = {"vision": "qwen2_5_vl"}  # model_type of those that take images
SYNTHETIC_DATA = {
    "addition": "rloo_cli.data.synthetic.addition:addition_examples",
    "game": "rloo_cli.data.synthetic.tool_tasks:game_examples",
    "products": "rloo_cli.data.synthetic.tool_tasks:product_examples",
    "textworld": "rloo_cli.data.synthetic.text_games:text_game_examples",
    "echo": "rloo_cli.data.synthetic.chat_tasks:echo_examples",
    "arithmetic": "rloo_cli.data.synthetic.chat_tasks:arithmetic_examples",
    "instructions": "rloo_cli.data.synthetic.chat_tasks:instruction_examples",
    "tiny": "rloo_cli.data.synthetic.tiny:tiny_examples",
    "tiny_chat": "rloo_cli.data.synthetic.tiny:tiny_chat_examples",
    "tiny_pairs": "rloo_cli.data.synthetic.tiny:tiny_pair_examples",
    "tldr": "rloo_cli.data.synthetic.tldr:tldr_examples",
    "tldr_pairs": "rloo_cli.data.synthetic.tldr_models:tldr_preference_pairs",
    "vision": "rloo_cli.data.synthetic.pictures:picture_examples",
    "vision_noise": "rloo_cli.data.synthetic.pictures:noise_examples",
}
# Chat templates: name -> file beside the data's.
SYNTHETIC_TEMPLATES = {"chatml_tools": "chatml_tools.jinja"}


GGUF_SUFFIX = ".gguf"
GGUF_CONVERTER = "rloo_cli.data.synthetic.gguf:converted_gguf_folder"


def is_made_here(path: str) -> bool:
    """Whether `resolve_model_path` has to make or convert this model first."""
    return path.startswith(MAKE_PREFIX) or path.endswith(GGUF_SUFFIX)


def resolve_model_path(path: str) -> str:
    """The folder of a model: `make:NAME` is made and a GGUF file converted; others unchanged."""
    if path.startswith(MAKE_PREFIX):
        return str(registry.load_code(SYNTHETIC_MODELS[path.removeprefix(MAKE_PREFIX)])())
    if path.endswith(GGUF_SUFFIX):
        return str(registry.load_code(GGUF_CONVERTER)(path))
    return str(Path(path).expanduser()) if path.startswith("~") else path


def template_path(value: str) -> Path:
    """The file of `model.chat_template`; `make:NAME` is one of ours, if it exists."""
    name = value.removeprefix(MAKE_PREFIX)
    if value.startswith(MAKE_PREFIX) and name in SYNTHETIC_TEMPLATES:
        return PACKAGE / "data" / "synthetic" / SYNTHETIC_TEMPLATES[name]
    return Path(value).expanduser()


def row_source(path: str) -> RowSource | None:
    """The generator of this data.path; None for a file, a folder or a hub data set."""
    return next((source for source in ROW_SOURCES if path.startswith(source.prefix)), None)


def is_hub_name(path: str) -> bool:
    """Whether this model or data set must come from a hub: neither synthetic nor local."""
    return not path.startswith(NO_HUB_PREFIXES) and not Path(path).expanduser().exists()


def synthetic_rows(config: "DataConfig", split: str) -> list[dict[str, object]]:
    """The rows of a split of `make:NAME`. Raises KeyError for an unknown split."""
    make = registry.load_code(SYNTHETIC_DATA[str(config.path).removeprefix(MAKE_PREFIX)])
    rows: list[dict[str, object]] = make(split)
    return rows
