"""Questions to a language model behind an OpenAI-compatible `/chat/completions`.

Requests that the reward `judge` and the judge of `rloo eval` share. What a model thinks
aloud before its last `</think>` is no part of its answer.
"""

from rloo_cli.config.judge import ChatKeys
from rloo_cli.rewards.common.http_client import EndpointError, HttpService, JsonClient
from rloo_cli.utils.files import JsonObject

THINK_END_TAG = "</think>"


def chat_service(keys: ChatKeys) -> HttpService:
    """Where these questions go."""
    return HttpService(keys.base_url, keys.api_key_env, keys.concurrency, keys.request_timeout_s)


def chat_request(keys: ChatKeys, question: str) -> tuple[str, JsonObject]:
    """Path and body of a question."""
    system = [{"role": "system", "content": keys.system}] if keys.system else []
    body: JsonObject = {"model": keys.model}
    body["messages"] = [*system, {"role": "user", "content": question}]
    given = {"max_tokens": keys.max_tokens, "temperature": keys.temperature}
    body |= {name: value for name, value in given.items() if value is not None}
    return "/chat/completions", body | keys.extra


async def ask_chat_model(client: JsonClient, keys: ChatKeys, question: str) -> str:
    """The model's answer, without its thoughts. Raises EndpointError."""
    answer = await client.post(*chat_request(keys, question))
    try:
        choice = answer["choices"][0]
        said = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise EndpointError(f"an answer in another form: {str(answer)[:200]}", True) from None
    if not isinstance(said, str):
        raise EndpointError(f"an answer without text ({choice.get('finish_reason')})")
    return said.rpartition(THINK_END_TAG)[2]
