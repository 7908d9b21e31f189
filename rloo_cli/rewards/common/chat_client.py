"""Asks a language model behind an OpenAI-compatible `/chat/completions`.

The reward `judge` and the judge of `rloo eval` use it. The text before the last `</think>` is the
model's reasoning and not part of its answer.
"""

from rloo_cli.config.judge import ChatKeys
from rloo_cli.rewards.common.http_client import EndpointError, HttpService, JsonClient
from rloo_cli.utils.files import JsonObject

# Reasoning models write this after their reasoning and before their answer.
THINK_END_TAG = "</think>"


def chat_service(keys: ChatKeys) -> HttpService:
    """The service that these keys configure."""
    return HttpService(keys.base_url, keys.api_key_env, keys.concurrency, keys.request_timeout_s)


def chat_request(keys: ChatKeys, question: str) -> tuple[str, JsonObject]:
    """The path and the body of a question's request; `keys.extra` wins over the other keys."""
    system = [{"role": "system", "content": keys.system}] if keys.system else []
    messages = [*system, {"role": "user", "content": question}]
    body: JsonObject = {"model": keys.model, "messages": messages}
    optional = {"max_tokens": keys.max_tokens, "temperature": keys.temperature}
    body |= {name: value for name, value in optional.items() if value is not None}
    return "/chat/completions", body | keys.extra


async def ask_chat_model(client: JsonClient, keys: ChatKeys, question: str) -> str:
    """The model's answer, without its reasoning. Raises EndpointError."""
    answer = await client.post(*chat_request(keys, question))
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise EndpointError(f"unexpected response format: {str(answer)[:200]}", True) from None
    if not isinstance(text, str):
        raise EndpointError(f"an answer without text ({choice.get('finish_reason')})")
    return text.rpartition(THINK_END_TAG)[2]
