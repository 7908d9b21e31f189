"""Questions to a language model behind an OpenAI-compatible `/chat/completions`.

Keys and requests that the reward `judge` and the judge of `rloo eval` share. What a model thinks
aloud before its last `</think>` is no part of its answer.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from rloo_cli import fill
from rloo_cli.endpoint import Client, EndpointError, Service
from rloo_cli.errors import Problem
from rloo_cli.schema import Frozen, Positive, Text, key

Address = Annotated[str, Field(pattern=r"^https?://[^\s/]+\S*$", max_length=1000)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
THOUGHT = "</think>"


class ChatKeys(Frozen):
    """How a judge model is reached and asked."""

    base_url: Address = key("OpenAI-compatible address, without /chat/completions")
    model: Text = key("The model's name there")
    api_key_env: Variable | None = key("Environment variable that holds the key; null = no key")
    system: str | None = key("System message of each question; null = none")
    template: str = key("The question; {prompt}, other names and any {column} are filled in")
    pattern: str = key("Regular expression; its first group is the verdict in the answer")
    max_tokens: Positive | None = key("Most tokens of an answer; null = not said")
    temperature: float | None = key("Of the judge; null = not said", ge=0)
    concurrency: Positive = key("Most requests under way at once")
    request_timeout_s: float = key("Seconds one request may take", gt=0, le=1e6)
    extra: dict[str, Any] = key("More of the request's body, e.g. {seed: 1}; it wins")

    @property
    def service(self) -> Service:
        """Where these questions go."""
        return Service(self.base_url, self.api_key_env, self.concurrency, self.request_timeout_s)


def problems(where: str, keys: ChatKeys, needs: tuple[str, ...]) -> Iterator[Problem]:
    """What is wrong with the keys at `where`; the template has to name `needs`."""
    yield from fill.problems(f"{where}.template", keys.template, needs)
    place = f"{where}.pattern"
    try:
        groups = re.compile(keys.pattern).groups
    except re.error as error:
        yield Problem(f"{place} is no regular expression", place, str(error))
        return
    if not groups:
        why, fix = "the first group is what is read in an answer", r"Score:\s*(\d+), in quotes"
        yield Problem(f"{place} has no group", place, why, fix)


def request(keys: ChatKeys, question: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a question."""
    system = [{"role": "system", "content": keys.system}] if keys.system else []
    body: dict[str, Any] = {"model": keys.model}
    body["messages"] = [*system, {"role": "user", "content": question}]
    given = {"max_tokens": keys.max_tokens, "temperature": keys.temperature}
    body |= {name: value for name, value in given.items() if value is not None}
    return "/chat/completions", body | keys.extra


async def ask(client: Client, keys: ChatKeys, question: str) -> str:
    """The model's answer, without its thoughts. Raises EndpointError."""
    answer = await client.post(*request(keys, question))
    try:
        choice = answer["choices"][0]
        said = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise EndpointError(f"an answer in another form: {str(answer)[:200]}", True) from None
    if not isinstance(said, str):
        raise EndpointError(f"an answer without text ({choice.get('finish_reason')})")
    return said.rpartition(THOUGHT)[2]
