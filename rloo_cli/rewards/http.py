"""A score from a service of yours, or from a reward model that vLLM serves.

`api: rloo` posts {"prompts": [...], "completions": [...], and the `columns`} to `url`, and reads
{"scores": [...]}: a number or null (does not apply) for each. The others are routes of vLLM
(>= 0.32) below `url`: `classify` and `pooling` read prompt and completion as one text, or as
messages in the model's own chat template; `score` reads them as a pair. They ask for
`use_activation: false`: vLLM's default puts a reward through a sigmoid.

Batches are asked for at once, up to `concurrency`. One that stays without an answer fails the call
(`scope: group` makes calls smaller); no missing number is ever a zero.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, Literal

from rloo_cli.config import template as config_template
from rloo_cli.config.judge import Address, Variable
from rloo_cli.config.schema import NotEmpty, Positive, RewardConfig, Text, key
from rloo_cli.rewards.common import http_client
from rloo_cli.rewards.common.http_client import EndpointError, HttpService, JsonClient
from rloo_cli.rewards.common.text import Completion, texts
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject

Body = JsonObject
HTTP_TIMEOUT_SHARE = 0.95  # of timeout_s: our own error says more than a call that is cut off


class Config(RewardConfig):
    type: Literal["http"] = key("http")
    url: Address = key("Where to ask: the address itself (api=rloo), or that of a vLLM server")
    api: Literal["rloo", "classify", "score", "pooling"] = key(
        "What is asked: rloo = your own service; the others are routes of vLLM"
    )
    model: Text | None = key("The served model's name; null = the only one there")
    api_key_env: Variable | None = key("Environment variable that holds the key; null = no key")
    batch_size: Positive = key("Rows per request (messages go one by one to vLLM)")
    concurrency: Positive = key("Most requests under way at once")
    request_timeout_s: float = key("Seconds one request may take", gt=0, le=1e6)
    columns: list[NotEmpty] = key("Data columns that api=rloo sends too")
    template: str | None = key(
        "Text for classify and pooling from {prompt}, {completion}, {column}; null = one after the "
        "other, or messages"
    )
    eos: str | None = key("Put after a text that ended by itself, where the model expects it")


def problems(config: Config, where: str) -> Iterator[Problem]:
    """What is wrong with an entry, seen without asking anybody."""
    if config.template is not None:
        yield from config_template.template_problems(
            f"{where}.template", config.template, ("completion",)
        )
    idle = {"rloo": ("template", "eos"), "score": ("columns", "template", "eos")}
    for name in idle.get(config.api, ("columns",)):
        if getattr(config, name):
            empty = "[]" if name == "columns" else "null"
            why = f"{where}.api={config.api} has no use for it"
            yield Problem(
                f"{where}.{name} is set", f"{where}.{name}", why, f"{where}.{name}={empty}"
            )


def preflight(config: Config) -> None:
    """Raises ConfigError when the key is not in the environment."""
    http_client.check_api_key("reward.<name>.api_key_env", config.api_key_env)


def needs(config: Config) -> list[str]:
    named = config_template.template_names(config.template) if config.template is not None else []
    return [*config.columns, *(n for n in named if n not in ("prompt", "completion"))]


async def score(
    prompts: list[Any],
    completions: list[Completion],
    finish_reasons: list[str],
    columns: dict[str, list[Any]],
    config: Config,
) -> list[Any]:
    """(B,) what the service said. Raises EndpointError."""
    rows = range(len(prompts))
    size = config.batch_size
    if config.api == "rloo":
        bodies = [
            _rloo_body(prompts, completions, columns, config, s) for s in _batch_ranges(rows, size)
        ]
    elif config.api == "score":
        said = texts(completions)
        pairs = [
            {"text_1": config_template.prompt_text(p), "text_2": c}
            for p, c in zip(prompts, said, strict=True)
        ]
        bodies = [_pair_body([pairs[i] for i in s]) for s in _batch_ranges(rows, size)]
    else:
        ends = [config.eos if r == "stop" and config.eos else "" for r in finish_reasons]
        bodies = _text_bodies(prompts, completions, columns, ends, config)
    service = HttpService(
        config.url if config.api == "rloo" else config.url.rstrip("/").removesuffix("/v1"),
        config.api_key_env,
        config.concurrency,
        config.request_timeout_s,
    )
    path = "" if config.api == "rloo" else f"/{config.api}"
    read: Callable[[Any], list[Any]] = (
        _read_rloo_scores if config.api == "rloo" else _read_vllm_scores
    )
    async with JsonClient(service, config.timeout_s * HTTP_TIMEOUT_SHARE) as client:
        asked = [
            asyncio.ensure_future(_request_scores(client, path, n, b, read, config))
            for n, b in bodies
        ]
        try:
            answers = await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
    return [value for answer in answers for value in answer]


async def _request_scores(
    client: JsonClient,
    path: str,
    num_completions: int,
    body: Body,
    read_scores: Callable[[Any], list[Any]],
    config: Config,
) -> list[Any]:
    """The values of one request's `count` rows."""
    ours = {} if config.api == "rloo" else {"use_activation": False}
    answer = await client.post(
        path, body | ours | ({"model": config.model} if config.model else {})
    )
    try:
        values = read_scores(answer)
    except (KeyError, TypeError, AttributeError):
        form = '{"scores": [...]}' if config.api == "rloo" else f"that of vLLM's /{config.api}"
        raise EndpointError(f"expected {form}, got {str(answer)[:200]}", True) from None
    if len(values) != num_completions:
        raise EndpointError(
            f"{client.service.url}{path} gave {len(values)} scores, not {num_completions}"
        )
    return values


# Questions: (rows, body) each.


def _batch_ranges(indices: range, batch_size: int) -> list[range]:
    return [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]


def _rloo_body(
    prompts: list[Any],
    completions: list[Completion],
    columns: dict[str, list[Any]],
    config: Config,
    indices: range,
) -> tuple[int, Body]:
    cut = slice(indices.start, indices.stop)
    body = {name: columns[name][cut] for name in config.columns}
    return len(indices), body | {"prompts": prompts[cut], "completions": completions[cut]}


def _pair_body(pairs: list[Body]) -> tuple[int, Body]:
    return len(pairs), {name: [pair[name] for pair in pairs] for name in pairs[0]}


def _text_bodies(
    prompts: list[Any],
    completions: list[Completion],
    columns: dict[str, list[Any]],
    eos_texts: list[str],
    config: Config,
) -> list[tuple[int, Body]]:
    """Prompt and completion as one: texts by the batch, or one conversation a request."""
    said = [text + end for text, end in zip(texts(completions), eos_texts, strict=True)]
    if config.template is None and not all(isinstance(p, str) for p in prompts):
        return [
            (1, {"messages": [*p, {"role": "assistant", "content": c}]})
            for p, c in zip(prompts, said, strict=True)
        ]
    inputs = [
        config_template.fill_template(
            config.template or "{prompt}{completion}",
            {name: values[i] for name, values in columns.items()}
            | {"prompt": config_template.prompt_text(prompts[i]), "completion": said[i]},
        )
        for i in range(len(said))
    ]
    parts = _batch_ranges(range(len(inputs)), config.batch_size)
    return [(len(p), {"input": inputs[p.start : p.stop]}) for p in parts]


# Answers. What a value is worth is the validator's to say.


def _read_rloo_scores(answer: Any) -> list[Any]:
    if not isinstance(answer["scores"], list):
        raise TypeError("scores is no list")
    return list(answer["scores"])


def _read_vllm_scores(answer: Any) -> list[Any]:
    """vLLM's three forms: `probs` of a class, `score`, `data` of a text or of each token."""
    rows = sorted(answer["data"], key=lambda row: row["index"])
    if [row["index"] for row in rows] != list(range(len(rows))):
        raise EndpointError(f"rows {[row['index'] for row in rows]} are not those asked for")
    return [_vllm_score(row) for row in rows]


def _vllm_score(entry: Body) -> Any:
    if "score" in entry:
        return entry["score"]
    values = entry["probs"] if "probs" in entry else entry["data"]
    if values and isinstance(values[-1], list):  # of each token: the last has read them all
        values = values[-1]
    if len(values) != 1:
        said = f"the model gives {len(values)} numbers for a row: a reward model has one label"
        raise EndpointError(said, final=True)
    return values[0]
