"""An echo environment of OpenEnv, in two forms: python echo_server.py PORT [plain | tools].

It runs in an environment of its own: pip install -r scripts/openenv/requirements.lock. `plain` is
the environment that `openenv init` makes: an action is a message, and its reward grows with the
message. `tools` offers the same as a tool, by MCP.
"""

import sys
from typing import Any
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

MAX_SESSIONS = 256  # episodes at once


class EchoAction(Action):
    """Sends a message, which comes back."""

    message: str = Field(..., description="Message to echo back")


class EchoObservation(Observation):
    """The message that came back."""

    echoed_message: str = Field(default="", description="The echoed message")
    message_length: int = Field(default=0, description="Length of the echoed message")


class EchoEnvironment(Environment):
    """Echoes messages; each is worth a tenth of its characters."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> EchoObservation:
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return EchoObservation(echoed_message=" Ready.", reward=0.0)

    def step(self, action: EchoAction) -> EchoObservation:  # type: ignore[override]
        if not action.message:
            raise ValueError("an empty message has no echo")
        self._state.step_count += 1
        length = len(action.message)
        return EchoObservation(
            echoed_message=action.message, message_length=length, reward=0.1 * length
        )

    @property
    def state(self) -> State:
        return self._state


class EchoTools(MCPEnvironment):
    """The same as a tool of MCP."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server: Any = FastMCP("echo")

        @server.tool
        def echo_message(message: str) -> str:
            """Echoes a message."""
            if not message:
                raise ValueError("an empty message has no echo")
            return message

        super().__init__(server)
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Observation:
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Observation(reward=0.0)

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise ValueError("its tools are all that it has")

    @property
    def state(self) -> State:
        return self._state


FORMS: dict[str, tuple[type, type, type]] = {
    "plain": (EchoEnvironment, EchoAction, EchoObservation),
    "tools": (EchoTools, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    form = FORMS[sys.argv[2] if len(sys.argv) > 2 else "plain"]
    app = create_fastapi_app(*form, max_concurrent_envs=MAX_SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
