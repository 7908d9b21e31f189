"""The `Generator` of both vLLM backends: seeds in, rollouts out, and the truth about weights.

Nothing is drawn before the engine has said that it has the trainer's weights, has forgotten what
it cached with others, and agrees with the trainer about real prompts. When it is lost on the way,
it is connected to anew, gets the weights first, and draws only what is missing, with the same
seeds: a completion depends on its prompt, its seed and the weights, so nothing else changes.
"""

import logging
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rloo_cli.errors import GenerationError, Problem
from rloo_cli.generation import check_lengths, tolerance
from rloo_cli.generation.stopping import StopRule
from rloo_cli.rollout import Group, Rollout
from rloo_cli.schema import GenerationConfig, RunConfig
from rloo_cli.vllm import arguments, facts, parity
from rloo_cli.vllm.colocated import InAChild
from rloo_cli.vllm.engine import Answer, Ask, Engine, Lost, Refused
from rloo_cli.vllm.expected import Expected
from rloo_cli.vllm.remote import OverHttp
from rloo_cli.vllm.source import Whole

log = logging.getLogger(__name__)
SEEDS = 1_000_003  # parity's seeds begin here; any would do


class VllmGenerator:
    """Samples with `engine`, which computes in `dtype`. `note` prints a line for the user.

    `run_id` begins the label of each version of the weights, so that no other run's are taken for
    ours. `lost_most`: times that one call may lose its engine.
    """

    def __init__(
        self,
        engine: Engine,
        rule: StopRule,
        config: GenerationConfig,
        context_length: int | None,
        dtype: torch.dtype,
        run_id: str,
        lost_most: int,
        note: Callable[[str], None] = log.warning,
    ):
        self.engine, self.rule, self.config = engine, rule, config
        self.context_length, self.dtype, self.run_id = context_length, dtype, run_id
        self.lost_most, self.note = lost_most, note
        self.policy: Any = None
        self.version = -1  # of the weights that the sampler should have
        self.connected = self.checked = False
        self.synced: str | None = None  # the label that the engine said it has
        self.facts: dict[str, float] = {"vllm/restarts": 0.0}
        self.tolerance = tolerance(str(dtype))

    @property
    def label(self) -> str:
        """The name of the weights that the sampler should have."""
        return f"{self.run_id}:{self.version}"

    def load(self, policy: Any, version: int) -> None:
        """Send the weights of optimizer update `version` now, and read back that they are there.

        An engine that is lost meanwhile gets them before its next completion. Raises
        GenerationError when it says that it has others.
        """
        self.policy, self.version = policy, version
        own = next(policy.model.parameters()).dtype
        self.tolerance = tolerance(str(self.dtype), str(own))
        self.facts["vllm/weight_version"] = float(version)
        try:
            self._current()
        except Lost as lost:
            self._gone(lost)

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
    ) -> None:
        """Fill `groups[i].rollouts`, one per seed and in order (`Generator.generate`).

        Raises GenerationError where weights, versions or log-probabilities are not what they must
        be, where the engine was lost too often, or a prompt leaves no room.
        """
        if len(groups) != len(seeds):
            raise GenerationError(f"{len(groups)} groups, but seeds for {len(seeds)}")
        check_lengths(groups, self.config.max_completion_length, self.context_length)
        places = [(g, k) for g, own in enumerate(seeds) for k in range(len(own))]
        asks = [
            Ask(groups[g].prompt_ids, self._params(seeds[g][k], greedy, temperature))
            for g, k in places
        ]
        answers = self._draw(asks, groups)
        for g, group in enumerate(groups):
            mine = [i for i, place in enumerate(places) if place[0] == g]
            group.rollouts = [self._rollout(answers[i], seeds[g][places[i][1]]) for i in mine]
        self.engine.rest()

    def close(self) -> None:
        """Let go of the engine."""
        self.engine.close()

    def _draw(self, asks: list[Ask], groups: list[Group]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        lost = 0
        while len(answers) < len(asks):
            missing = [i for i in range(len(asks)) if i not in answers]
            try:
                self._ready(groups)
                self._complete(asks, missing, answers)
            except Lost as gone:
                lost += 1
                self._gone(gone)
                if lost > self.lost_most:
                    why = f"{len(missing)} of {len(asks)} completions were missing; {gone}"
                    raise GenerationError(
                        Problem(f"the sampler was lost {lost} times in one batch", why=why)
                    ) from gone
        return answers

    def _complete(self, asks: list[Ask], chosen: list[int], answers: dict[int, Answer]) -> None:
        """Draw asks[i] for the i in `chosen`, into answers[i]."""

        def done(place: int, answer: Answer) -> None:
            answers[chosen[place]] = self._true(answer)

        self.engine.complete([asks[i] for i in chosen], done)

    def _ready(self, groups: list[Group]) -> None:
        """The engine is there, has the weights, and agrees about these prompts."""
        self._current()
        if self.checked:
            return
        probes = groups[: parity.PROMPTS]
        most = min(parity.TOKENS, self.config.max_completion_length)
        asks = [Ask(g.prompt_ids, self._probe(SEEDS + i, most)) for i, g in enumerate(probes)]
        answers: dict[int, Answer] = {}
        self._complete(asks, list(range(len(asks))), answers)
        told = [answers[i] for i in range(len(asks))]
        found = parity.check(probes, told, self.policy, self.tolerance)
        self.checked = True
        self.note(f"parity of trainer and vLLM on {len(probes)} prompts: rms {found:.2g} nats")

    def _current(self) -> None:
        """Connect where there is no connection, send where other weights are there."""
        if self.policy is None:
            raise GenerationError("the sampler was given no weights: load comes before generate")
        if not self.connected:
            self.engine.connect()
            self.connected, self.synced, self.checked = True, None, False
            self.facts["vllm/restarts"] = float(self.engine.restarts)
        if self.synced == self.label:
            return
        found = self.engine.sync(Whole(self.policy.model, self.dtype), self.label)
        if found != self.label:
            raise GenerationError(_other_weights(found, self.label))
        self.synced = self.label

    def _gone(self, lost: Lost) -> None:
        """Let go of a lost engine. Raises GenerationError where it is well and only refuses: a
        second try would be refused too."""
        if isinstance(lost, Refused) and self.engine.well():
            raise GenerationError(Problem("the sampler refuses", "generation", str(lost))) from lost
        self.note(f"warning: the sampler was lost: {lost}")
        self.connected = self.checked = False
        self.synced = None
        self.engine.give_up(str(lost))

    def _true(self, answer: Answer) -> Answer:
        """Raises GenerationError unless the current weights drew it, every token with its logp."""
        for version in answer.versions or ["(not told)"]:
            if version != self.label:
                raise GenerationError(_other_weights(version, self.label))
        finite = sum(map(math.isfinite, answer.logp))
        if not answer.ids or not len(answer.ids) == len(answer.logp) == finite:
            what = f"{len(answer.ids)} tokens came with {finite} log-probabilities"
            raise GenerationError(Problem(what, "generation"))
        return answer

    def _params(self, seed: int, greedy: bool, temperature: float | None) -> dict[str, Any]:
        """vLLM's sampling parameters: every one is said, none is left to a server's defaults."""
        config = self.config
        given = self._probe(seed, config.max_completion_length)
        given |= {
            "min_tokens": config.min_tokens,
            "stop": config.stop,
            "detokenize": bool(config.stop),
            "repetition_penalty": config.repetition_penalty,
        }
        if greedy:
            return given | {"temperature": 0.0}
        filters = {"top_p": config.top_p, "top_k": config.top_k, "min_p": config.min_p or 0.0}
        return given | filters | ({} if temperature is None else {"temperature": temperature})

    def _probe(self, seed: int, most: int) -> dict[str, Any]:
        """Nothing but the temperature bends the distribution."""
        return {
            "seed": seed,
            "temperature": self.config.temperature,
            "max_tokens": most,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "ignore_eos": True,  # the stop ids below are all of them
            "stop_token_ids": sorted(self.rule.ids),
            "logprobs": 0,  # the sampled token's own
            "detokenize": False,
            "skip_special_tokens": True,
        }

    def _rollout(self, answer: Answer, seed: int) -> Rollout:
        return Rollout(
            completion_ids=answer.ids,
            text=self.rule.text(answer.ids),
            finish_reason=answer.finish_reason,
            terminated=self.rule.terminated(answer.ids, answer.finish_reason),
            seed=seed,
            weight_version=self.version,
            behaviour_logp=answer.logp,
        )


def _other_weights(found: str, expected: str) -> Problem:
    return Problem(
        "the sampler has other weights than the trainer",
        "generation",
        f"it says {found}, the trainer is at {expected}",
        "nobody else may send weights to this server; two runs need two servers",
    )


def over_http(
    model: Any, tokenizer: Any, run: RunConfig, context: int | None, folder: Path, note: Any
) -> VllmGenerator:
    """Backend vllm_server."""
    config: Any = run.generation
    keys = config.server
    given = arguments.engine(run, keys, run.seed)
    expected = Expected(
        model=run.model.path,
        dtype=given["dtype"],
        tokenizer=facts.tokenizer(tokenizer),
        places=given.get("max_model_len", 0),
        transfer=_transfer(given),
        allow_untested=config.allow_untested,
    )
    engine = OverHttp(keys, folder, expected, note)
    most = keys.retries if keys.base_url else max(keys.retries, keys.max_restarts)
    return _generator(engine, model, tokenizer, run, context, given["dtype"], most, note)


def in_a_child(
    model: Any, tokenizer: Any, run: RunConfig, context: int | None, folder: Path, note: Any
) -> VllmGenerator:
    """Backend vllm_colocate."""
    config: Any = run.generation
    keys = config.colocate
    given = arguments.engine(run, keys, run.seed)
    environment = arguments.environment(run, keys) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    transfer = _transfer(given)
    if transfer == "ipc":  # handles over our own pipe, to a child that listens nowhere
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if keys.sleep != "none":
        given = given | {"enable_sleep_mode": True}
    latest = folder / "logs" / "latest"
    log_file = (latest if latest.exists() else folder) / "engine.log"
    engine = InAChild(keys, given, environment, log_file, transfer)
    most = keys.max_restarts
    return _generator(engine, model, tokenizer, run, context, given["dtype"], most, note)


def _generator(
    engine: Engine, model: Any, tokenizer: Any, run: RunConfig, context: int | None,
    dtype: str, lost_most: int, note: Any,
) -> VllmGenerator:  # fmt: skip
    return VllmGenerator(
        engine,
        StopRule(tokenizer, model, run.generation),
        run.generation,
        context,
        getattr(torch, dtype),
        f"{run.name}.{secrets.token_hex(4)}",
        lost_most,
        note,
    )


def _transfer(given: dict[str, Any]) -> str:
    name: str = given["weight_transfer_config"]["backend"]
    return name.removeprefix("rloo_")
