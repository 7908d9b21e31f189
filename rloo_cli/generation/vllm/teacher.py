"""A teacher on a vLLM server: its log-probabilities of tokens that were sampled here.

A row of ids is sent as a prompt, with `prompt_logprobs` 0 and one token to sample, which is
discarded; vLLM answers with the log-probability of each id given those before it, at temperature 1.
So any `vllm serve MODEL` will do, and only ids are sent. Requests run concurrently. A lost
request is repeated, as with a rollout server: the answer depends only on the ids.

At startup the server reports its model and context, and ids from all over the student's
vocabulary are compared, which must be the same tokens there.
"""

import asyncio
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rloo_cli.config.pasted import guess_name
from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import sampled_positions, store_column
from rloo_cli.generation.vllm.discovery import SERVER_CALL_TIMEOUT_S, address_to_call
from rloo_cli.generation.vllm.engine import EngineLost
from rloo_cli.generation.vllm.http import TEACHER_SERVER, HttpClient
from rloo_cli.generation.vllm.http_engine import DEFAULT_MAX_IN_FLIGHT
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem, refuse
from rloo_cli.utils.fault_injection import trigger_fault
from rloo_cli.utils.files import JsonObject
from rloo_cli.utils.http import gather_or_cancel

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
URL_KEY, MODEL_KEY = "algorithm.teacher.base_url", "algorithm.teacher.model"
PROBE_IDS = 64  # most ids of the vocabulary compared at startup
ZERO_LOGP = -9999.0  # what vLLM writes for a probability of 0, as JSON has no infinity
NO_TEXT = "\ufffd"  # the decoding of bytes that are not a whole character

TeacherRow = tuple[list[int], list[int]]  # ids, and the indices of the requested ones


class TeacherServer:
    """The client of one server. It opens no connection before `connect`. `note` prints a line."""

    def __init__(self, keys: TeacherConfig, note: Callable[[str], None]):
        self.keys = keys
        self.url = address_to_call(keys.base_url or "", note)
        self.model = ""  # its name on the server, once that is known
        self.max_model_len: int | None = None  # tokens of a request; None = not reported
        self.http_client: HttpClient | None = None

    @property
    def client(self) -> HttpClient:
        """The HTTP client, opened at first use."""
        if self.http_client is None:
            self.http_client = HttpClient(self.keys.api_key_env, TEACHER_SERVER)
        return self.http_client

    @property
    def token(self) -> str:
        """The server's token; "" if its variable is not set."""
        return os.environ.get(self.keys.api_key_env, "")

    def connect(self, tokenizer: Any, longest: int) -> str:
        """Wait for the server, and check its model, context and tokens. -> the model's name there

        `longest`: most tokens of a prompt with its completion. Raises ConfigError if it is not a
        teacher for this student, and GenerationError if it does not answer.
        """
        self._wait_for_model(self.keys.ready_timeout_s)
        room = self.max_model_len
        if room is not None and room < longest + 1:
            why = f"prompt and completion may have {longest} tokens, plus one that is sampled and"
            why += f" discarded; its limit is {room}"
            fix = f"vllm serve {self.model} --max-model-len {longest + 1}, or fewer tokens:"
            fix += " data.max_prompt_length, generation.max_completion_length"
            what = f"the context of the teacher at {self.url} is too short"
            refuse(URL_KEY, what, fix, why)
        self._check_tokens(tokenizer)
        return self.model

    def logprobs(self, rows: Sequence[TeacherRow]) -> list[list[float]]:
        """The teacher's log-probabilities of the ids at each row's indices, in nats.

        Raises GenerationError if the server is lost too often or stays unreachable, and Stopped.
        """
        found: dict[int, list[float]] = {i: [] for i, (_, wanted) in enumerate(rows) if not wanted}
        lost = 0
        while len(found) < len(rows):
            try:
                self._ask_missing(rows, found)
            except EngineLost as gone:
                lost += 1
                if lost > self.keys.retries:
                    missing = f"{len(rows) - len(found)} of {len(rows)} rows were missing; {gone}"
                    what = f"the teacher at {self.url} was lost {lost} times in one batch"
                    fix = "find the reason in its log, then resume=auto"
                    raise GenerationError(Problem(what, URL_KEY, missing, fix)) from gone
                self._wait_for_model(self.keys.reconnect_timeout_s)
        return [found[i] for i in range(len(rows))]

    def fill_reference(
        self, batch: Batch, forwarded: Tensor, run_on_rank0: Callable[..., list[list[float]]]
    ) -> None:
        """Request ref_logp for all forwarded completions, (P, K), that lack it.

        It does not depend on the trained weights: each completion is requested once,
        before the step's first update. Rank 0 requests for all ranks. Raises GenerationError.
        """
        groups = batch.groups
        missing = [i for i in batch.active if groups[i].ref_logp is None]
        chosen = [(i, tuple(forwarded[i].nonzero().flatten().tolist())) for i in missing]
        slices = [(i, ks) for i, ks in chosen if ks]
        pairs = [(groups[i], groups[i].rollouts[k]) for i, ks in slices for k in ks]
        rows = [row for g, r in pairs for row in sampled_positions(g.prompt_ids, r)]
        if rows:
            found = run_on_rank0(lambda: self.logprobs(rows))
            column = torch.tensor([logp for row in found for logp in row], dtype=torch.float32)
            store_column(column, slices, groups, "ref_logp")

    def close(self) -> None:
        """Close every connection."""
        if self.http_client is not None:
            self.http_client.close()
            self.http_client = None

    def _ask_missing(self, rows: Sequence[TeacherRow], found: dict[int, list[float]]) -> None:
        """Request every row that is not in `found`, concurrently. Raises EngineLost."""
        missing = [i for i in range(len(rows)) if i not in found]
        capacity = self.keys.max_in_flight or DEFAULT_MAX_IN_FLIGHT

        async def everything() -> None:
            gate = asyncio.Semaphore(capacity)

            async def one(index: int) -> None:
                async with gate:
                    found[index] = await self._ask_row(*rows[index])

            await gather_or_cancel(one(i) for i in missing)

        rounds = -(-len(missing) // capacity)
        limit = rounds * self.keys.request_timeout_s + SERVER_CALL_TIMEOUT_S
        self.client.run(everything(), limit, interruptible=True)

    async def _ask_row(self, ids: list[int], wanted: list[int]) -> list[float]:
        trigger_fault("teacher.request")
        entries = await self._ask_ids(ids[: wanted[-1] + 1])
        return [self._read_logprob(entries[n]) for n in wanted]

    async def _ask_ids(self, ids: list[int]) -> list[JsonObject]:
        """The server's entry for each id; {} for the first, which follows nothing.

        Raises EngineLost, and GenerationError if the answer does not belong to these ids.
        """
        body = {
            "model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": 0, "add_special_tokens": False,
        }  # fmt: skip
        limit = self.keys.request_timeout_s
        answer = await self.client.request(
            "POST", self.url, COMPLETIONS, self.token, body, limit, keep_alive=True
        )
        try:
            (choice,) = answer["choices"]
            first, *others = choice["prompt_logprobs"]
            if first is not None or len(others) != len(ids) - 1:
                raise ValueError(f"{1 + len(others)} log-probabilities for {len(ids)} ids")
            return [{}] + [entry[str(i)] for i, entry in zip(ids[1:], others, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}, in {str(answer)[:200]}"
            what = f"the teacher at {self.url} does not return log-probabilities of prompt ids"
            fix = "use a vLLM server, whose /v1/completions supports prompt_logprobs"
            refuse(URL_KEY, what, fix, why, error=GenerationError)

    def _read_logprob(self, entry: JsonObject) -> float:
        """The number in an entry. Raises GenerationError if it is not a number, or means -inf."""
        value = entry.get("logprob")
        if not isinstance(value, float | int) or not math.isfinite(value) or value <= ZERO_LOGP:
            what = f"the teacher at {self.url} gives a sampled token probability 0"
            why = f"it answered {str(entry)[:200]}"
            fix = f"vllm serve {self.model} --dtype float32, or another teacher"
            refuse(URL_KEY, what, fix, why, error=GenerationError)
        return float(value)

    def _wait_for_model(self, limit_s: float) -> None:
        """Wait until the server lists its models, and choose the teacher among them.

        Raises GenerationError if it does not answer in time, and ConfigError.
        """
        answer = self.client.get_when_ready(self.url, MODELS, self.token, limit_s)
        try:
            served = {str(card["id"]): card for card in answer["data"]}
        except (KeyError, TypeError):
            why = f"it answered {str(answer)[:200]}"
            what = f"{self.url} lists no models"
            fix = f"{URL_KEY}=http://HOST:PORT of a vLLM server; {TEACHER_SERVER.start}"
            refuse(URL_KEY, what, fix, why, error=GenerationError)
        name = self.keys.model
        names = ", ".join(served)
        if name is None and len(served) != 1:
            what = f"the server at {self.url} has {len(served)} models"
            fix = f"{MODEL_KEY}=NAME, one of these"
            refuse(MODEL_KEY, what, fix, f"found {names or 'none'}")
        chosen = next(iter(served)) if name is None else name
        if chosen not in served:
            what = f"the server at {self.url} has no model {chosen}"
            fix = f"{MODEL_KEY}={guess_name(chosen, served)}"
            refuse(MODEL_KEY, what, fix, f"it has {names or 'none'}")
        if self.model and chosen != self.model:
            what = f"the server at {self.url} now has another model"
            why = f"it had {self.model}, and now has {chosen}"
            fix = f"vllm serve {self.model} there again, then resume=auto"
            refuse(MODEL_KEY, what, fix, why, error=GenerationError)
        self.model, self.max_model_len = chosen, served[chosen].get("max_model_len")

    def _check_tokens(self, tokenizer: Any) -> None:
        """Compare ids from all over the vocabulary. Raises ConfigError if any is another token.

        A teacher may have ids beyond the student's: embeddings of one family have several sizes.
        """
        room = PROBE_IDS if self.max_model_len is None else self.max_model_len - 2
        ids = probe_ids(tokenizer, min(PROBE_IDS, room))
        limit = self.keys.request_timeout_s
        try:
            entries = self.client.run(self._ask_ids([ids[0], *ids]), limit, interruptible=True)
        except GenerationError as error:
            if not any("vocabulary" in p.why for p in error.problems):
                raise
            raise ConfigError(_other_tokens_problem(self.url, error.problems[0].why)) from None
        except EngineLost as lost:
            what = f"the teacher at {self.url} does not answer"
            fix = f"check that it runs, or algorithm.teacher.request_timeout_s={2 * limit:g}"
            refuse(URL_KEY, what, fix, str(lost), error=GenerationError)
        differing = []
        for i, entry in zip(ids, entries[1:], strict=True):
            self._read_logprob(entry)
            ours, theirs = tokenizer.decode([i]), entry.get("decoded_token")
            # A server without a tokenizer returns no texts, and part of a character has none.
            if theirs is not None and NO_TEXT not in ours and ours.strip() != str(theirs).strip():
                differing.append(f"{i} is {ours!r} here and {theirs!r} there")
        if differing:
            why = f"{len(differing)} of {len(ids)} compared ids differ: {'; '.join(differing[:3])}"
            raise ConfigError(_other_tokens_problem(self.url, why))


def probe_ids(tokenizer: Any, count: int) -> list[int]:
    """At most `count` ids of a tokenizer, evenly spread, the lowest and the highest among them."""
    known = sorted(set(tokenizer.get_vocab().values()))
    if len(known) <= count:
        return known
    return [known[round(n * (len(known) - 1) / (count - 1))] for n in range(count)]


def _other_tokens_problem(url: str, why: str) -> Problem:
    what = f"the student and the teacher at {url} have different vocabularies"
    return Problem(what, URL_KEY, why, f"{URL_KEY}=the address of a model of the student's family")
