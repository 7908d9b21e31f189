"""Python functions that the model may call. They need types and a Google docstring.

Each call runs in a tool process (`common/tool_processes.py`): a function that hangs, crashes or is
killed costs the run no more than an error.
"""

from typing import TYPE_CHECKING, Literal

from rloo_cli.config.agent import ProcessAgentConfig
from rloo_cli.config.schema import PathText, key

if TYPE_CHECKING:
    from rloo_cli.agents.common.tool_set import ToolSet


class Config(ProcessAgentConfig):
    kind: Literal["tools"] = key("tools: functions")
    tools: list[PathText] = key("The functions: [file.py:name, package.module:name]", min_length=1)

    def code_specs(self) -> dict[str, str]:
        """Key -> `file.py:name`."""
        return {f"agent.tools[{i}]": spec for i, spec in enumerate(self.tools)}


def load_tools(config: Config) -> "ToolSet":
    """The functions' descriptions. Raises ConfigError, which names a function without types."""
    from rloo_cli.agents.common import tool_set  # lazy: the registry reads schemas without torch

    return tool_set.load_functions(config.code_specs())
