"""A language model that reads a completion and scores it with a number.

It is called through an OpenAI-compatible endpoint (a vLLM server, or a service), once for each
completion, with `template` as the question. The last match of `pattern` in its answer is the
number. An answer without a number, or with one outside `minimum` to `maximum`, is a failure: the
model is called again (`retries`), and the score never becomes zero. It is not called, and the
reward does not apply (None), if a column of `template` is empty. The samples store its answers as
`judge_said`.
"""

import re
from collections.abc import Callable, Iterator
from typing import Literal

from rloo_cli.config import template
from rloo_cli.config.judge import ChatKeys, chat_judge_problems
from rloo_cli.config.schema import RewardConfig, key
from rloo_cli.data.batch import Prompt
from rloo_cli.rewards.common import chat_client, http_client
from rloo_cli.rewards.common.http_client import JsonClient
from rloo_cli.rewards.common.text import Columns, Completion, gold_texts, texts
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.http import gather_or_cancel

JUDGE_TIMEOUT_SHARE = 0.95  # of timeout_s: our error is clearer than that of a call that is cut off

EXTRA = "an OpenAI-compatible endpoint at `base_url`"


class Config(RewardConfig, ChatKeys):
    type: Literal["judge"] = key("judge")
    minimum: float = key("Smallest number that the judge may give")
    maximum: float = key("Largest number that it may give")
    scale: Literal["unit", "raw"] = key("unit = minimum..maximum becomes 0..1; raw = unchanged")


class NoScoreError(ValueError):
    """An answer of the judge without a number from `minimum` to `maximum`."""


def problems(config: Config, where: str) -> Iterator[Problem]:
    """Faults of the entry at `where`, found without a request."""
    yield from chat_judge_problems(where, config, ("completion",))
    if config.minimum >= config.maximum:
        why = f"{config.minimum:g} is not below {config.maximum:g}"
        low, high = config.maximum, config.minimum
        fix = f"{where}.minimum={low:g} {where}.maximum={high if low < high else low + 1:g}"
        yield Problem("the judge's scale is empty", f"{where}.minimum", why, fix)


def preflight(config: Config) -> None:
    """Raises ConfigError if the environment variable of the service's key is not set."""
    http_client.check_api_key("reward.<name>.api_key_env", config.api_key_env)


def needs(config: Config) -> list[str]:
    names = template.template_names(config.template)
    return [name for name in names if name not in ("prompt", "completion")]


async def score(
    prompts: list[Prompt],
    completions: list[Completion],
    columns: Columns,
    log_extra: Callable[[str, list[str | None]], None],
    config: Config,
) -> list[float | None]:
    """(B,) scores, or None. Raises NoScoreError, EndpointError."""
    questions: dict[int, str] = {}
    named = needs(config)
    for i, (prompt, text) in enumerate(zip(prompts, texts(completions), strict=True)):
        names = {"prompt": template.prompt_text(prompt), "completion": text}
        values = {name: column[i] for name, column in columns.items()} | names
        if all(gold_texts(values[name]) for name in named):
            questions[i] = template.fill_template(config.template, values)
    service = chat_client.chat_service(config)
    async with JsonClient(service, config.timeout_s * JUDGE_TIMEOUT_SHARE) as client:
        requests = (chat_client.ask_chat_model(client, config, q) for q in questions.values())
        answers = dict(zip(questions, await gather_or_cancel(requests), strict=True))
    log_extra("judge_said", [answers.get(i) for i in range(len(prompts))])
    scores: list[float | None] = [None] * len(prompts)
    for i, answer in answers.items():
        scores[i] = _parse_score(answer, config)
    return scores


def _parse_score(answer: str, config: Config) -> float:
    matches = [match.group(1) for match in re.finditer(config.pattern, answer)]
    shown = f"{answer.strip()[:120]!r}"
    if not matches:
        raise NoScoreError(f"no number in the judge's answer: {shown}")
    try:
        value = float(matches[-1])
    except (TypeError, ValueError):
        why = f"{matches[-1]!r} in the judge's answer is not a number: {shown}"
        raise NoScoreError(why) from None
    if not config.minimum <= value <= config.maximum:
        limits = f"{config.minimum:g} to {config.maximum:g}"
        raise NoScoreError(f"the judge's {value:g} is not within {limits}: {shown}")
    if config.scale == "raw":
        return value
    return (value - config.minimum) / (config.maximum - config.minimum)
