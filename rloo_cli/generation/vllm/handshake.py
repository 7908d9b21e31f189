"""What a server must turn out to be before it is sent weights: the model's tokens, dtype, room.

Our own servers say it on `/rloo`; any other vLLM is asked what its API tells, and the parity check
on real prompts finds the rest.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rloo_cli.generation.vllm import lora_slot, versions
from rloo_cli.generation.vllm.http import Wire
from rloo_cli.generation.vllm.versions import FLOOR
from rloo_cli.utils.errors import GenerationError, Problem

PROTOCOL = 1  # of rloo's own routes and facts
GROUP = "/rloo/generate"  # the route of `group_route`, where a server says that it has it
VARIABLE = "RLOO_SERVER_FACTS"  # the environment variable by which the guard gets them
TEXTS = (
    "What is 17 + 25?", " leading and  double  spaces\n\nnew lines\t", "naïve café 東京 🙂",
    "def f(x):\n    return x ** 2", "0123456789 0.5e-3", "<|im_start|>user",
)  # fmt: skip


def tokenizer(tok: Any) -> str:
    """A fingerprint of a tokenizer: its vocabulary, its special ids, and how it cuts some texts.

    Neither the pad token (a trainer picks one where there is none) nor the chat template counts.
    """
    special = {name: getattr(tok, f"{name}_token_id", None) for name in ("bos", "eos", "unk")}
    encoded = [list(tok.encode(text, add_special_tokens=False)) for text in TEXTS]
    whole = [sorted(tok.get_vocab().items()), special, encoded]
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:16]


CALL_S = 30.0


@dataclass(frozen=True)
class Expected:
    """The trainer's side of it."""

    model: str  # model.path
    dtype: str
    tokenizer: str  # facts.tokenizer of ours
    places: int  # prompt and completion, at most
    transfer: str  # gloo, nccl: where a server does not say
    allow_untested: bool

    def check(self, wire: Wire, url: str, token: str) -> tuple[str, bool]:
        """How this server takes weights, and whether it has a route for whole groups.

        Raises GenerationError with everything that differs.
        """
        try:
            facts: dict[str, Any] = wire.get(url, "/rloo", token, CALL_S)
        except GenerationError as error:
            if not any("404" in p.why for p in error.problems):
                raise
            facts = self._plain(wire, url, token)
        problems = [*self._differences(facts, url)]
        if problems:
            raise GenerationError(*problems)
        return str(facts.get("transfer", self.transfer)), GROUP in facts.get("routes", ())

    def _plain(self, wire: Wire, url: str, token: str) -> dict[str, Any]:
        """A vLLM that `rloo vllm-serve` did not start."""
        version = wire.get(url, "/version", token, CALL_S)
        models = wire.get(url, "/v1/models", token, CALL_S)
        try:
            wire.get(url, "/weight_info", token, CALL_S)  # 404 where it has no such routes
        except GenerationError:
            if not versions.is_old(number := str(version["version"])):
                raise
            raise GenerationError(versions.not_ours(url, number)) from None
        first = models["data"][0]
        return {"vllm": version["version"], "max_model_len": first.get("max_model_len")}

    def _differences(self, facts: dict[str, Any], url: str) -> Iterator[Problem]:
        same = "rloo vllm-serve with the recipe and overrides of this run"
        for name in ("model", "dtype", "tokenizer"):
            ours, theirs = getattr(self, name), facts.get(name, getattr(self, name))
            if ours != theirs:
                what = f"the server at {url} has another {name}"
                yield Problem(what, "generation.server", f"expected {ours}, found {theirs}", same)
        ours, theirs = self.transfer, facts.get("transfer", self.transfer)
        if (ours == lora_slot.KIND) is not (theirs == lora_slot.KIND):
            what = f"the server at {url} has another transfer"
            why = f"expected {ours}, found {theirs}: one takes an adapter, the other whole models"
            yield Problem(what, "model.lora", why, same)
        places = facts.get("max_model_len")
        if places is not None and places < self.places:
            why = f"prompt and completion may take {self.places} tokens, its limit is {places}"
            yield Problem(f"the server at {url} has too little room", "generation", why, same)
        if facts.get("logprobs_mode", "processed_logprobs") != "processed_logprobs":
            why = f"expected processed_logprobs, found {facts['logprobs_mode']}"
            yield Problem(f"the server at {url} tells raw log-probabilities", "generation", why)
        version = str(facts.get("vllm", "0"))
        if versions.numbers(version) < FLOOR and not self.allow_untested:
            yield Problem(
                f"the server at {url} is vLLM {version}",
                "generation.allow_untested",
                f"nobody tried this with a vLLM below {FLOOR[0]}.{FLOOR[1]}",
                "generation.allow_untested=true",
            )
