"""A score from your own service, or from a reward model on a vLLM server.

`api: rloo` posts {"prompts": [...], "completions": [...], and the `columns`} to `url`, and reads
{"scores": [...]}: a number or null (does not apply) for each. The others are routes of vLLM
(>= 0.32) below `url`: `classify` and `pooling` read prompt and completion as one text, or as
messages in the model's own chat template; `score` reads them as a pair. They ask for
`use_activation: false`: vLLM's default puts a reward through a sigmoid.

Requests are sent concurrently, up to `concurrency`. One without an answer fails the call (`scope:
group` makes calls smaller); a missing number never counts as zero.
"""

from collections.abc import Callable, Iterator
from typing import Literal

from rloo_cli.config import template as config_template
from rloo_cli.config.judge import Address, Variable
from rloo_cli.config.schema import NotEmpty, Positive, RewardConfig, Text, key
from rloo_cli.data.batch import Prompt
from rloo_cli.rewards.common import http_client
from rloo_cli.rewards.common.http_client import EndpointError, HttpService, JsonClient
from rloo_cli.rewards.common.text import Columns, Completion, texts
from rloo_cli.utils.errors import Problem
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.http import gather_or_cancel

HTTP_TIMEOUT_SHARE = 0.95  # of timeout_s: our error is clearer than that of a call that is cut off

EXTRA = "a service that answers at `url`"


class Config(RewardConfig):
    type: Literal["http"] = key("http")
    url: Address = key("URL: the endpoint itself (api=rloo), or a vLLM server")
    api: Literal["rloo", "classify", "score", "pooling"] = key(
        "API: rloo = your own service; the others are routes of vLLM"
    )
    model: Text | None = key("The served model's name; null = the only one")
    api_key_env: Variable | None = key("Environment variable that holds the key; null = no key")
    batch_size: Positive = key("Completions per request (messages go one by one to vLLM)")
    concurrency: Positive = key("Most requests in flight")
    request_timeout_s: float = key("Seconds one request may take", gt=0, le=1e6)
    columns: list[NotEmpty] = key("Data columns that api=rloo also sends")
    template: str | None = key(
        "Text for classify and pooling from {prompt}, {completion}, {column}; null = concatenated, "
        " or messages"
    )
    eos: str | None = key("Appended to a text that ended on its own, if the model expects it")


def problems(config: Config, where: str) -> Iterator[Problem]:
    """Faults of the entry at `where`, found without a request."""
    if config.template is not None:
        key = f"{where}.template"
        yield from config_template.template_problems(key, config.template, ("completion",))
    unused = {"rloo": ("template", "eos"), "score": ("columns", "template", "eos")}
    for name in unused.get(config.api, ("columns",)):
        if getattr(config, name):
            key, empty = f"{where}.{name}", "[]" if name == "columns" else "null"
            why = f"{where}.api={config.api} does not use it"
            yield Problem(f"{key} is set", key, why, f"{key}={empty}")


def preflight(config: Config) -> None:
    """Raises ConfigError if the environment variable of the service's key is not set."""
    http_client.check_api_key("reward.<name>.api_key_env", config.api_key_env)


def needs(config: Config) -> list[str]:
    names = config_template.template_names(config.template) if config.template is not None else []
    return [*config.columns, *(n for n in names if n not in ("prompt", "completion"))]


async def score(
    prompts: list[Prompt], completions: list[Completion], finish_reasons: list[str],
    columns: Columns, config: Config,
) -> list[object]:  # fmt: skip
    """(B,) scores as the service returned them. Raises EndpointError."""
    ranges = _batch_ranges(range(len(prompts)), config.batch_size)
    if config.api == "rloo":
        bodies = [_rloo_body(prompts, completions, columns, config, r) for r in ranges]
    elif config.api == "score":
        pairs = [
            {"text_1": config_template.prompt_text(prompt), "text_2": text}
            for prompt, text in zip(prompts, texts(completions), strict=True)
        ]
        bodies = [_pair_body([pairs[i] for i in r]) for r in ranges]
    else:
        ends = [config.eos if r == "stop" and config.eos else "" for r in finish_reasons]
        bodies = _text_bodies(prompts, completions, columns, ends, config)
    url, path, read_scores = config.url, "", _read_rloo_scores
    if config.api != "rloo":
        url, path = url.rstrip("/").removesuffix("/v1"), f"/{config.api}"
        read_scores = _read_vllm_scores
    service = HttpService(url, config.api_key_env, config.concurrency, config.request_timeout_s)
    async with JsonClient(service, config.timeout_s * HTTP_TIMEOUT_SHARE) as client:
        answers = await gather_or_cancel(
            _request_scores(client, path, count, body, read_scores, config)
            for count, body in bodies
        )
    return [value for answer in answers for value in answer]


async def _request_scores(
    client: JsonClient, path: str, num_completions: int, body: JsonObject,
    read_scores: Callable[[JsonObject], list[object]], config: Config,
) -> list[object]:  # fmt: skip
    if config.api != "rloo":
        body |= {"use_activation": False}
    if config.model:
        body |= {"model": config.model}
    answer = await client.post(path, body)
    try:
        values = read_scores(answer)
    except (KeyError, TypeError, AttributeError):
        form = '{"scores": [...]}' if config.api == "rloo" else f"that of vLLM's /{config.api}"
        raise EndpointError(f"expected {form}, got {str(answer)[:200]}", True) from None
    if len(values) != num_completions:
        where = f"{client.service.url}{path}"
        raise EndpointError(f"{where} gave {len(values)} scores, not {num_completions}")
    return values


# The bodies of the requests, each with its number of completions.


def _batch_ranges(indices: range, batch_size: int) -> list[range]:
    return [indices[start : start + batch_size] for start in range(0, len(indices), batch_size)]


def _rloo_body(
    prompts: list[Prompt], completions: list[Completion], columns: Columns, config: Config,
    indices: range,
) -> tuple[int, JsonObject]:  # fmt: skip
    batch = slice(indices.start, indices.stop)
    body: JsonObject = {name: columns[name][batch] for name in config.columns}
    return len(indices), body | {"prompts": prompts[batch], "completions": completions[batch]}


def _pair_body(pairs: list[JsonObject]) -> tuple[int, JsonObject]:
    return len(pairs), {name: [pair[name] for pair in pairs] for name in pairs[0]}


def _text_bodies(
    prompts: list[Prompt], completions: list[Completion], columns: Columns,
    eos_texts: list[str], config: Config,
) -> list[tuple[int, JsonObject]]:  # fmt: skip
    """Prompt and completion as one: texts by the batch, or one conversation a request."""
    ended = [text + end for text, end in zip(texts(completions), eos_texts, strict=True)]
    if config.template is None and not all(isinstance(p, str) for p in prompts):
        return [
            (1, {"messages": [*p, {"role": "assistant", "content": text}]})
            for p, text in zip(prompts, ended, strict=True)
        ]
    template = config.template or "{prompt}{completion}"
    inputs = []
    for i, text in enumerate(ended):
        names = {"prompt": config_template.prompt_text(prompts[i]), "completion": text}
        values = {name: values[i] for name, values in columns.items()} | names
        inputs.append(config_template.fill_template(template, values))
    ranges = _batch_ranges(range(len(inputs)), config.batch_size)
    return [(len(r), {"input": inputs[r.start : r.stop]}) for r in ranges]


# The scores in an answer. Whether a value is a valid score is decided by engine/results.py.


def _read_rloo_scores(answer: JsonObject) -> list[object]:
    if not isinstance(answer["scores"], list):
        raise TypeError("scores is not a list")
    return list(answer["scores"])


def _read_vllm_scores(answer: JsonObject) -> list[object]:
    entries = sorted(answer["data"], key=lambda entry: entry["index"])
    indices = [entry["index"] for entry in entries]
    if indices != list(range(len(entries))):
        raise EndpointError(f"rows {indices} do not match the request")
    return [_vllm_score(entry) for entry in entries]


def _vllm_score(entry: JsonObject) -> object:
    """The score in one of vLLM's three forms: `score`, `probs` of a class, or `data`."""
    if "score" in entry:
        return entry["score"]
    values = entry["probs"] if "probs" in entry else entry["data"]
    if values and isinstance(values[-1], list):  # per token: only the last one covers the text
        values = values[-1]
    if len(values) != 1:
        why = f"the model gives {len(values)} numbers for a row: a reward model has one label"
        raise EndpointError(why, final=True)
    return values[0]
