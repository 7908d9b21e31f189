"""Things made on the spot, so that a recipe needs no download: `model.path=make:NAME`.

CONTEXT: the most tokens a made model takes, for checks that come before torch.
MODELS, DATA: name -> `module:function`, read without importing torch. A model is a function that
returns the folder it lies in; data is a function from the split's name to rows.
"""

from pathlib import Path

from rloo_cli.config import registry

MADE = "make:"
MODELS = {
    "addition": "rloo_cli.data.synthetic.addition:model",
    "tiny": "rloo_cli.data.synthetic.tiny:model",
    "tiny_reward": "rloo_cli.data.synthetic.tiny:reward_model",
    "tldr_base": "rloo_cli.data.synthetic.tldr:base",
    "tldr_sft": "rloo_cli.train.supervised.tldr:model",
    "tldr_reward": "rloo_cli.train.supervised.tldr:reward_model",
}
CONTEXT = {  # positions of the model
    "addition": 64, "tiny": 2048, "tiny_reward": 2048,
    "tldr_base": 128, "tldr_sft": 128, "tldr_reward": 128,
}  # fmt: skip
DATA = {
    "addition": "rloo_cli.data.synthetic.addition:rows",
    "tiny": "rloo_cli.data.synthetic.tiny:rows",
    "tiny_chat": "rloo_cli.data.synthetic.tiny:chat_rows",
    "tiny_pairs": "rloo_cli.data.synthetic.tiny:pair_rows",
    "tldr": "rloo_cli.data.synthetic.tldr:rows",
    "tldr_pairs": "rloo_cli.train.supervised.tldr:pair_rows",
}


def folder(path: str) -> str:
    """A path `make:NAME` -> the folder where that model now lies; others as they are."""
    if path.startswith(MADE):
        return str(registry.load_code(MODELS[path.removeprefix(MADE)])())
    return str(Path(path).expanduser()) if path.startswith("~") else path


def rows(path: str, split: str) -> list[dict[str, object]]:
    """The rows of a split of `make:NAME`. Raises KeyError for a split it has not."""
    found: list[dict[str, object]] = registry.load_code(DATA[path.removeprefix(MADE)])(split)
    return found
