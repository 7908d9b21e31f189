"""How a key is declared: its meaning, its limits, and types that several keys share."""

import os
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rloo_cli.utils.files import JsonObject


class Frozen(BaseModel):
    """A section of the config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def key(
    meaning: str,
    *,
    since: str | None = None,
    before: object = None,
    default_was: tuple[object, object] | None = None,
    **limits: Any,
) -> Any:
    """A key: its one line of meaning, and its limits (`ge`, `gt`, `le`, `lt`, `min_length`).

    A key that was added later names the version that added it (`since="0.2"`) and the value that
    means "as before" (`before=VALUE`). A config.yaml that an earlier version wrote is read with
    that value, and a run's hash omits the key while it has it: an experiment keeps its name.

    `default_was=(NOW, EARLIER)`: the default in conf/ was EARLIER and is NOW. The two count as one
    value in a run's hash and where a resumed run's config is compared; only for a key whose effect
    on the run is checked otherwise (what it does to the data is in the data's fingerprint).
    """
    extra: JsonObject = {}
    if since is not None:
        extra |= {"since": since, "before": before}
    if default_was is not None:
        extra |= {"default_was": list(default_was)}
    return Field(description=meaning, json_schema_extra=extra or None, **limits)


MAX_GENERATIONS = 65_536  # completions of one prompt: more are a mistake, and would take hours
Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=150)]
NotEmpty = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
# Usable as a name or a path: not empty, no control characters (NUL, newline).
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000)]


def expand_home(text: str) -> str:
    """A path that begins with ~ or ~user as an absolute one; any other text as it is.

    Raises ValueError where there is no such home folder.
    """
    path = os.path.expanduser(text) if text.startswith("~") else text
    if path.startswith("~"):
        raise ValueError(f"{path.partition('/')[0]} is not the home folder of a known user")
    return path


# Keys that may name a file or a folder. `PathString` also takes what is no path, without limits.
PathText = Annotated[Text, AfterValidator(expand_home)]
PathString = Annotated[str, AfterValidator(expand_home)]
