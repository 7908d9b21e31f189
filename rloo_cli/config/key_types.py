"""How a key is declared: its meaning, its limits, and types that several keys share."""

import os
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """A section of the config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    # Condition -> keys of the section that have an effect only with it; see `idle_keys`.
    only_with: ClassVar[dict[str, tuple[str, ...]]] = {}


def key(meaning: str, **limits: Any) -> Any:
    """A key: its one line of meaning, and its limits (`ge`, `gt`, `le`, `lt`, `min_length`)."""
    return Field(description=meaning, **limits)


TASK_PREFIX = "reasoning_gym:"  # data of a package that generates questions from a seed
MAX_GENERATIONS = 65_536  # completions of one prompt: more would be a mistake and take hours
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=150)]
# The trackers of accelerate.tracking.
TrackerName = Literal[
    "tensorboard", "wandb", "trackio", "mlflow", "swanlab", "comet_ml", "aim", "clearml", "dvclive",
]  # fmt: skip
NotEmpty = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
# Usable as a name or a path: not empty, no control characters (NUL, newline).
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000)]


def expand_home(text: str) -> str:
    """A path that begins with ~ or ~user as an absolute one; any other text unchanged.

    Raises ValueError if that home folder does not exist.
    """
    path = os.path.expanduser(text) if text.startswith("~") else text
    if path.startswith("~"):
        raise ValueError(f"{path.partition('/')[0]} is not the home folder of a known user")
    return path


# Keys that may name a file or a folder. `PathString` also accepts other text, without limits.
PathText = Annotated[Text, AfterValidator(expand_home)]
PathString = Annotated[str, AfterValidator(expand_home)]
