"""The keys of a teacher that is asked over HTTP (`algorithm.teacher`). Imports no torch.

They have the names and the meanings of `generation.server`, as the server is one of vLLM's, too;
nothing is sent to it but token ids. It is a section of the algorithm, since no other one learns
from a served model: a reference of the KL may follow its policy, be moved or be an adapter's base.
"""

from typing import ClassVar

from rloo_cli.config.key_types import Frozen, Positive, Text, key


class TeacherConfig(Frozen):
    """`algorithm.teacher`: which server has the teacher, and how long it is waited for."""

    only_with: ClassVar = {
        ".base_url": (
            "model", "api_key_env", "max_in_flight", "ready_timeout_s", "request_timeout_s",
            "reconnect_timeout_s", "retries",
        )
    }  # fmt: skip

    base_url: Text | None = key(
        "Address of a vLLM server that has the teacher, e.g. http://node7:8000, for kl_in=reward;"
        " null = the teacher is model.ref_path, loaded here"
    )
    model: Text | None = key("The model's name on that server; null = the only one that it has")
    api_key_env: Text = key(
        "Environment variable that holds the server's token; without it none is sent"
    )
    max_in_flight: Positive | None = key(
        "Most requests under way at once, each with one completion; null = 1024"
    )
    ready_timeout_s: float = key("Seconds until the server answers at the start", gt=0, le=1e6)
    request_timeout_s: float = key("Seconds for one completion", gt=0, le=1e6)
    reconnect_timeout_s: float = key("Seconds until a lost server answers again", gt=0, le=1e6)
    retries: int = key(
        "Times that a batch's missing completions are asked for again after the server was lost",
        ge=0,
    )
