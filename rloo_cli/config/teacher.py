"""The keys of a teacher behind HTTP (`algorithm.teacher`). Imports no torch.

They have the names and meanings of `generation.server`, as the server is also vLLM's; it only
receives token ids. The section belongs to the algorithm, since no other model can be served: a
reference of the KL may follow its policy, be moved or be an adapter's base.
"""

from typing import ClassVar

from rloo_cli.config.key_types import Frozen, Positive, Text, key


class TeacherConfig(Frozen):
    """`algorithm.teacher`: the teacher's server, and timeouts."""

    only_with: ClassVar = {
        ".base_url": (
            "model", "api_key_env", "max_in_flight", "ready_timeout_s", "request_timeout_s",
            "reconnect_timeout_s", "retries",
        )
    }  # fmt: skip

    base_url: Text | None = key(
        "Address of a vLLM server with the teacher, e.g. http://node7:8000, for kl_in=reward;"
        " null = the teacher is model.ref_path, loaded here"
    )
    model: Text | None = key("The model's name on that server; null = the server's only model")
    api_key_env: Text = key(
        "Environment variable that holds the server's token; if unset, no token is sent"
    )
    max_in_flight: Positive | None = key(
        "Most concurrent requests, each with one completion; null = 1024"
    )
    ready_timeout_s: float = key("Seconds to wait for the server at the start", gt=0, le=1e6)
    request_timeout_s: float = key("Seconds for one completion", gt=0, le=1e6)
    reconnect_timeout_s: float = key("Seconds to wait for a lost server", gt=0, le=1e6)
    retries: int = key(
        "Retries of a batch's missing completions after the server was lost",
        ge=0,
    )
