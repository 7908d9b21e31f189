"""What the sections of the config are made of: a frozen model, keys with a meaning, limits."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field


class Frozen(BaseModel):
    """A section of the config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def key(meaning: str, **limits: Any) -> Any:
    """A key: its one line of meaning, and its limits (`ge`, `gt`, `le`, `lt`, `min_length`)."""
    return Field(description=meaning, **limits)


Positive = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=150)]
NotEmpty = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
# Of some use as a name or a path: not empty, no control characters (a NUL, a line's end).
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$", max_length=1000)]
