"""A language model that reads a completion and gives it a number.

It is asked behind an OpenAI-compatible address (a vLLM server, or a service), once for each row,
with `template` as the question. The last match of `pattern` in its answer is the number. An answer
without one, or with one outside of `minimum` to `maximum`, is a failure of this row: it is asked
again (`retries`), and never taken for a zero. What it said is in the samples as `judge_said`.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

from rloo_cli.config import template
from rloo_cli.config.judge import ChatKeys, chat_judge_problems
from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.rewards.common import chat_client, http_client
from rloo_cli.rewards.common.http_client import JsonClient
from rloo_cli.rewards.common.text import Completion, texts
from rloo_cli.utils.errors import Problem

JUDGE_TIMEOUT_SHARE = 0.95  # of timeout_s: our own error says more than a call that is cut off


class Config(RewardConfig, ChatKeys):
    type: Literal["judge"] = key("judge")
    minimum: float = key("The smallest number the judge may give")
    maximum: float = key("The largest")
    scale: Literal["unit", "raw"] = key("unit = minimum..maximum becomes 0..1; raw = as it is")


class NoScoreError(ValueError):
    """An answer without a number that is one of the scale."""


def problems(config: Config, where: str) -> Iterator[Problem]:
    """What is wrong with an entry, seen without asking anybody."""
    yield from chat_judge_problems(where, config, ("completion",))
    if config.minimum >= config.maximum:
        why = f"{config.minimum:g} is not below {config.maximum:g}"
        yield Problem("the judge's scale has no length", f"{where}.minimum", why)


def preflight(config: Config) -> None:
    """Raises ConfigError when the key is not in the environment."""
    http_client.check_api_key("reward.<name>.api_key_env", config.api_key_env)


def needs(config: Config) -> list[str]:
    return [
        n for n in template.template_names(config.template) if n not in ("prompt", "completion")
    ]


async def score(
    prompts: list[Any],
    completions: list[Completion],
    columns: dict[str, list[Any]],
    log_extra: Callable[[str, list[str]], None],
    config: Config,
) -> list[float]:
    """(B,) numbers. Raises NoVerdict, EndpointError."""
    asked = [
        {name: values[i] for name, values in columns.items()}
        | {"prompt": template.prompt_text(prompt), "completion": text}
        for i, (prompt, text) in enumerate(zip(prompts, texts(completions), strict=True))
    ]
    async with JsonClient(
        chat_client.chat_service(config), config.timeout_s * JUDGE_TIMEOUT_SHARE
    ) as client:
        said = await asyncio.gather(
            *(
                chat_client.ask_chat_model(
                    client, config, template.fill_template(config.template, row)
                )
                for row in asked
            )
        )
    log_extra("judge_said", list(said))
    return [_parse_score(answer, config) for answer in said]


def _parse_score(answer: str, config: Config) -> float:
    found = [match.group(1) for match in re.finditer(config.pattern, answer)]
    shown = f"{answer.strip()[:120]!r}"
    if not found:
        raise NoScoreError(f"no number in the judge's answer: {shown}")
    try:
        value = float(found[-1])
    except (TypeError, ValueError):
        raise NoScoreError(f"{found[-1]!r} in the judge's answer is no number: {shown}") from None
    if not config.minimum <= value <= config.maximum:
        limits = f"{config.minimum:g} to {config.maximum:g}"
        raise NoScoreError(f"the judge's {value:g} is not within {limits}: {shown}")
    if config.scale == "raw":
        return value
    return (value - config.minimum) / (config.maximum - config.minimum)
