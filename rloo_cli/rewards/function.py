"""Your own Python function: `path: file.py:name` or `package.module:name`.

It is called with the arguments it declares (prompts, completions, completion_ids, ..., any data
column) and the `kwargs` given here, and returns one int, float, bool or None per completion. It may
be `async def`. Functions written for TRL work unchanged.
"""

from typing import Literal

from rloo_cli.config.schema import PathString, RewardConfig, key
from rloo_cli.config.user_code import load_user_code
from rloo_cli.rewards.engine.build import RewardFunction
from rloo_cli.utils.files import JsonObject


class Config(RewardConfig):
    type: Literal["function"] = key("function")
    path: PathString = key("path/to/file.py:name or package.module:name", min_length=1)
    kwargs: JsonObject = key("Passed to the function unchanged")


def load(name: str, config: Config) -> tuple[RewardFunction, JsonObject]:
    """The function and its fixed arguments. Raises ConfigError at `reward.<name>.path`."""
    function = load_user_code(config.path, f"reward.{name}.path", config.timeout_s)
    return function, dict(config.kwargs)
