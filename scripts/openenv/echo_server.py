"""An echo environment of OpenEnv, the one that `openenv init` makes: python echo_server.py PORT.

It runs in a separate virtual environment: pip install -r scripts/openenv/requirements.lock. An
action is a message, and its reward grows with the message. echo_environment.py is its client.
"""

import sys
from uuid import uuid4

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
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


if __name__ == "__main__":
    app = create_fastapi_app(
        EchoEnvironment, EchoAction, EchoObservation, max_concurrent_envs=MAX_SESSIONS
    )
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
