"""Pairs judged by a language model: A or B, strictly read, in one order or both."""

import asyncio
import re
from collections.abc import Callable, Sequence

from rloo_cli.config import template
from rloo_cli.config.judge import OpenaiJudge
from rloo_cli.evaluation.judges.pairs import JudgePair
from rloo_cli.rewards.common import chat_client
from rloo_cli.rewards.common.http_client import EndpointError, JsonClient
from rloo_cli.utils import signals
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.http import gather_or_cancel, run_in_event_loop
from rloo_cli.utils.rng import sampling_seed

TIE_VALUE = 0.5
PROBE_TIMEOUT_S = 120.0


def judge_pairs_by_llm(
    keys: OpenaiJudge, pairs: Sequence[JudgePair], seed: int, poll: Callable[[], None]
) -> EndpointError | None:
    """Set the value and the answers of every pair.

    Returns the error after which the service cannot be used, or None; pairs that were not judged
    by then have no value. Raises what `poll` raises.
    """

    async def judge_all() -> None:
        async with JsonClient(chat_client.chat_service(keys), keys.timeout_s) as client:
            await gather_or_cancel(_judge_pair(client, keys, pair, seed) for pair in pairs)

    try:
        run_in_event_loop(judge_all(), poll)
    except EndpointError as error:
        return error
    return None


def probe_llm_judge(keys: OpenaiJudge, columns: Sequence[str]) -> None:
    """Ask one easy question, ignoring the answer: a wrong URL, key or model is then noticed
    within seconds, before anything is generated. Raises EndpointError."""
    values = dict.fromkeys(columns, "") | {"prompt": "What is 1 + 1?", "a": "2", "b": "3"}
    question = template.fill_template(keys.template, values)
    timeout_s = min(keys.timeout_s, PROBE_TIMEOUT_S)

    async def ask() -> None:
        async with JsonClient(chat_client.chat_service(keys), timeout_s) as client:
            await client.post(*chat_client.chat_request(keys, question))

    run_in_event_loop(ask(), signals.raise_if_stopped)


async def _judge_pair(client: JsonClient, keys: OpenaiJudge, pair: JudgePair, seed: int) -> None:
    """Judge a pair in both orders at once, or in the one order chosen by the seed."""
    if not pair.theirs.text:
        pair.judge_answers = [{"why": "no text to compare with"}]
        return
    swaps = [False, True]
    if not keys.both_orders:
        # Not of the step: evaluations of one run differ by their texts, not by luck.
        swaps = [bool(sampling_seed(seed, "judge", 0, pair.example_number, 0) & 1)]
    answers = await asyncio.gather(*(_judge_in_order(client, keys, pair, swap) for swap in swaps))
    pair.judge_answers = list(answers)
    values = [answer["value"] for answer in answers]
    if None not in values:
        pair.value = values[0] if len(set(values)) == 1 else TIE_VALUE


async def _judge_in_order(
    client: JsonClient, keys: OpenaiJudge, pair: JudgePair, swap: bool
) -> JsonObject:
    """Ask one question, and again if the answer has no verdict. Raises EndpointError if final."""
    ours, theirs = pair.ours.text, pair.theirs.text
    values = pair.group.example | {"prompt": template.prompt_text(pair.group.prompt)}
    values |= {"a": theirs if swap else ours, "b": ours if swap else theirs}
    question = template.fill_template(keys.template, values)
    answer: JsonObject = {"a": "theirs" if swap else "ours", "said": None, "value": None}
    for _ in range(keys.retries + 1):
        try:
            answer["said"] = await chat_client.ask_chat_model(client, keys, question)
        except EndpointError as error:
            if error.final:
                raise
            answer["why"] = str(error)
            continue
        verdict = parse_preference(answer["said"], keys.pattern)
        if verdict is not None:
            won = {"A": 0.0 if swap else 1.0, "B": 1.0 if swap else 0.0, "TIE": TIE_VALUE}
            answer.pop("why", None)
            return answer | {"value": won[verdict]}
        answer["why"] = "no verdict in the answer"
    return answer


def parse_preference(answer: str, pattern: str) -> str | None:
    """A, B or TIE if the first group of every match is that one; None for anything else."""
    matches = {match.group(1) for match in re.finditer(pattern, answer)}
    verdict = matches.pop() if len(matches) == 1 else None
    return verdict if verdict in ("A", "B", "TIE") else None
