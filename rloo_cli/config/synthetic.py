"""Things made on the spot, so that a recipe needs no download: `model.path=make:NAME`.

CONTEXT: the most tokens a made model takes, for checks that come before torch.
MODELS, DATA: name -> `module:function`, read without importing torch. A model is a function that
returns the folder it lies in; data is a function from the split's name to rows.
"""

from pathlib import Path

from rloo_cli.config import registry

MAKE_PREFIX = "make:"
SYNTHETIC_MODELS = {
    "addition": "rloo_cli.data.synthetic.addition:addition_model_folder",
    "tiny": "rloo_cli.data.synthetic.tiny:tiny_model_folder",
    "tiny_reward": "rloo_cli.data.synthetic.tiny:tiny_reward_model_folder",
    "tldr_base": "rloo_cli.data.synthetic.tldr:tldr_base_folder",
    "tldr_sft": "rloo_cli.train.supervised.tldr:tldr_sft_folder",
    "tldr_reward": "rloo_cli.train.supervised.tldr:tldr_reward_folder",
}
SYNTHETIC_CONTEXT_LENGTHS = {  # positions of the model
    "addition": 64, "tiny": 2048, "tiny_reward": 2048,
    "tldr_base": 128, "tldr_sft": 128, "tldr_reward": 128,
}  # fmt: skip
SYNTHETIC_DATA = {
    "addition": "rloo_cli.data.synthetic.addition:addition_examples",
    "tiny": "rloo_cli.data.synthetic.tiny:tiny_examples",
    "tiny_chat": "rloo_cli.data.synthetic.tiny:tiny_chat_examples",
    "tiny_pairs": "rloo_cli.data.synthetic.tiny:tiny_pair_examples",
    "tldr": "rloo_cli.data.synthetic.tldr:tldr_examples",
    "tldr_pairs": "rloo_cli.train.supervised.tldr:tldr_preference_pairs",
}


def resolve_model_path(path: str) -> str:
    """A path `make:NAME` -> the folder where that model now lies; others as they are."""
    if path.startswith(MAKE_PREFIX):
        return str(registry.load_code(SYNTHETIC_MODELS[path.removeprefix(MAKE_PREFIX)])())
    return str(Path(path).expanduser()) if path.startswith("~") else path


def synthetic_examples(path: str, split: str) -> list[dict[str, object]]:
    """The rows of a split of `make:NAME`. Raises KeyError for a split it has not."""
    found: list[dict[str, object]] = registry.load_code(
        SYNTHETIC_DATA[path.removeprefix(MAKE_PREFIX)]
    )(split)
    return found
