"""Checks that a server has the model's tokens, dtype and context before weights are sent.

Our own servers report them on `/rloo`; of any other vLLM only its public API is known, and the
parity check on real prompts finds the rest.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rloo_cli.config.rules_sampling import MASK_KEY
from rloo_cli.generation.vllm import lora_slot, required_parts
from rloo_cli.generation.vllm.http import HttpClient, not_a_server_problem
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem, refuse
from rloo_cli.utils.files import JsonObject

PROTOCOL_VERSION = 1  # of rloo's own routes and reports
GROUP_ROUTE = "/rloo/generate"  # the route of `group_route`, if a server has it
SERVER_INFO_VARIABLE = "RLOO_SERVER_FACTS"  # environment variable with the facts, for the guard
FINGERPRINT_TEXTS = (
    "What is 17 + 25?", " leading and  double  spaces\n\nnew lines\t", "naïve café 東京 🙂",
    "def f(x):\n    return x ** 2", "0123456789 0.5e-3", "<|im_start|>user",
)  # fmt: skip


FACT_TYPES: dict[str, type | tuple[type, ...]] = {  # those that are read here
    "model": str, "dtype": str, "tokenizer": str, "transfer": str, "logprobs_mode": str,
    "vllm": str, "max_model_len": (int, type(None)), "routes": list, "sampling_mask": bool,
    "devices": list,
}  # fmt: skip
UUID_STARTS = ("GPU-", "MIG-")  # how the UUIDs of GPUs, and of parts of one, begin
SAME_CONFIG = "rloo vllm-serve with the recipe and overrides of this run"


def no_masks_problem(who: str) -> Problem:
    """The error of an engine that does not report which ids its tokens were chosen from."""
    why = "vLLM sends them only with its model runner V2 (VLLM_USE_V2_MODEL_RUNNER=1) and"
    why += " --return-sampling-mask, from 0.28 on; rloo vllm-serve sets both"
    fix = f"{SAME_CONFIG}, or {MASK_KEY}=false"
    return Problem(f"{who} does not send sampling masks", MASK_KEY, why, fix)


def _check_facts(facts: object, url: str) -> None:
    """Raise GenerationError if a server's report has an unexpected format."""
    wrong = "its facts are not a JSON object"
    if isinstance(facts, dict):
        kinds = FACT_TYPES.items()
        bad = [n for n, kind in kinds if n in facts and not isinstance(facts[n], kind)]
        wrong = f"its {bad[0]} is {str(facts[bad[0]])[:80]!r}" if bad else ""
    if wrong:
        raise GenerationError(not_a_server_problem(url, wrong))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A fingerprint of a tokenizer: its vocabulary, its special ids, and how it splits some texts.

    The pad token (a trainer picks one if there is none) and the chat template do not count.
    """
    special = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "unk")}
    encoded = [list(tokenizer.encode(text, add_special_tokens=False)) for text in FINGERPRINT_TEXTS]
    whole = [sorted(tokenizer.get_vocab().items()), special, encoded]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


HANDSHAKE_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ExpectedServer:
    """What the trainer expects of a server."""

    model: str  # model.path
    dtype: str
    tokenizer: str  # facts.tokenizer of ours
    max_model_len: int  # prompt and completion, at most
    transfer: str  # gloo, nccl: used if a server does not report it
    sampling_mask: bool = False  # whether it must send the ids that each token was chosen from
    trainer_gpus: tuple[str, ...] = ()  # of the training processes on this machine, by UUID

    def check(
        self, http_client: HttpClient, url: str, token: str
    ) -> tuple[str, bool, list[str], str]:
        """How this server takes weights; whether it has a route for whole groups; the GPUs that it
        says it takes; the warning of a vLLM that was not tried, or "".

        Raises GenerationError with everything that differs, and ConfigError (exit 2) for a GPU that
        is the trainer's too, and for missing sampling masks.
        """
        plain = False
        try:
            facts: JsonObject = http_client.get(url, "/rloo", token, HANDSHAKE_TIMEOUT_S)
        except GenerationError as error:
            if not any("404" in p.why for p in error.problems):
                raise
            plain, facts = True, self._plain_vllm_info(http_client, url, token)
        _check_facts(facts, url)
        self._refuse_shared_gpus(facts, url)
        has_group_route, version = (
            GROUP_ROUTE in facts.get("routes", ()),
            str(facts.get("vllm", "")),
        )
        problems = [*self._differences(facts, url)]
        if plain or not required_parts.was_tried(version):
            problems += _route_problems(http_client, url, token, has_group_route, version)
        if problems:
            raise GenerationError(*problems)
        has_masks = facts.get("sampling_mask", self.sampling_mask)  # a plain vLLM reports none
        if self.sampling_mask and not has_masks:
            raise ConfigError(no_masks_problem(f"the server at {url}"))
        if has_masks and not self.sampling_mask:
            what = f"the server at {url} sends sampling masks, but this run does not use them"
            why = "such a server refuses greedy requests and requests without top_k"
            refuse(MASK_KEY, what, SAME_CONFIG, why)
        transfer = str(facts.get("transfer", self.transfer))
        devices = [str(gpu) for gpu in facts.get("devices", ())]
        on_gpu = bool(devices) if "devices" in facts else None
        return transfer, has_group_route, devices, required_parts.untried_warning(version, on_gpu)

    def _refuse_shared_gpus(self, facts: JsonObject, url: str) -> None:
        """Raise ConfigError if the server uses a GPU of this trainer. GPUs are compared by UUID:
        number 0 of another machine is another GPU."""
        theirs = facts.get("devices", [])  # a plain vLLM does not report it
        shared = [gpu for gpu in self.trainer_gpus if gpu in theirs and gpu.startswith(UUID_STARTS)]
        if shared:
            what = f"server and trainer would share GPU {', '.join(shared)}"
            why = f"the server at {url} has {', '.join(map(str, theirs))}; the trainer takes"
            why += f" {', '.join(self.trainer_gpus)}"
            fix = "start one of them with CUDA_VISIBLE_DEVICES=OTHERS, or generation=vllm_colocate"
            refuse("generation.server.base_url", what, fix, why)

    def _plain_vllm_info(self, http_client: HttpClient, url: str, token: str) -> JsonObject:
        """A vLLM that `rloo vllm-serve` did not start."""
        version = http_client.get(url, "/version", token, HANDSHAKE_TIMEOUT_S)
        models = http_client.get(url, "/v1/models", token, HANDSHAKE_TIMEOUT_S)
        try:
            first = models["data"][0]
            return {"vllm": version["version"], "max_model_len": first.get("max_model_len")}
        except (AttributeError, LookupError, TypeError):
            why = f"it reports its model as {str(models)[:80]}"
            raise GenerationError(not_a_server_problem(url, why)) from None

    def _differences(self, server_info: JsonObject, url: str) -> Iterator[Problem]:
        same = SAME_CONFIG
        mine = {"model": self.model, "dtype": self.dtype, "tokenizer": self.tokenizer}
        for name, ours in mine.items():
            if ours != (theirs := server_info.get(name, ours)):
                what = f"the server at {url} has another {name}"
                yield Problem(what, "generation.server", f"expected {ours}, found {theirs}", same)
        ours, theirs = self.transfer, server_info.get("transfer", self.transfer)
        if (ours == lora_slot.ADAPTER_TRANSFER) is not (theirs == lora_slot.ADAPTER_TRANSFER):
            what = f"the server at {url} has another transfer"
            why = f"expected {ours}, found {theirs}: one takes an adapter, the other whole models"
            yield Problem(what, "model.lora", why, same)
        limit = server_info.get("max_model_len")
        if limit is not None and limit < self.max_model_len:
            why = (
                f"prompt and completion may take {self.max_model_len} tokens, its limit is {limit}"
            )
            yield Problem(f"the server at {url} has too little room", "generation", why, same)
        if server_info.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
            why = f"expected processed_logprobs, found {server_info['logprobs_mode']}"
            what = f"the server at {url} reports raw log-probabilities"
            yield Problem(what, "generation", why, f"{same}: it sets that mode")


def _route_problems(
    http_client: HttpClient, url: str, token: str, has_group_route: bool, version: str
) -> Iterator[Problem]:
    """The routes that a server lacks, in one problem. A path that takes POST alone answers a GET
    with 405, and does nothing."""

    def has_route(path: str) -> bool:
        try:
            http_client.get(url, path, token, HANDSHAKE_TIMEOUT_S)
        except GenerationError as error:
            return not any("it answered 404" in problem.why for problem in error.problems)
        return True

    if missing := required_parts.missing_routes(has_route, has_group_route):
        what = f"the server at {url} (vLLM {version}) lacks {', '.join(missing)}"
        fix = f"{SAME_CONFIG}; `vllm serve` has them with VLLM_SERVER_DEV_MODE=1 alone"
        yield Problem(what, "generation.server", required_parts.tried_versions(), fix)
