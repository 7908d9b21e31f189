"""The `Generator` of both vLLM backends: seeds in, rollouts out, and the truth about weights.

Nothing is drawn before the engine has said that it has the trainer's weights, has forgotten what
it cached with others, and agrees with the trainer about real prompts. When it is lost on the way,
it is connected to anew, gets the weights first, and draws only what is missing, with the same
seeds: a completion depends on its prompt, its seed and the weights, so nothing else changes.
"""

import secrets
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from rloo_cli.config.prompt_limit import BACKENDS
from rloo_cli.config.schema import GenerationConfig, RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.distributed.device_count import gpus
from rloo_cli.generation import check_lengths, tolerance, unheard
from rloo_cli.generation.common.stop_rule import StopRule
from rloo_cli.generation.vllm import arguments, handshake, lora_slot, parity, sampling_params
from rloo_cli.generation.vllm.child_engine import InAChild
from rloo_cli.generation.vllm.engine import Answer, Ask, Engine, Lost
from rloo_cli.generation.vllm.handshake import Expected
from rloo_cli.generation.vllm.http_engine import OverHttp
from rloo_cli.generation.vllm.weight_sync import Supply
from rloo_cli.utils.errors import GenerationError, Problem

SEEDS = 1_000_003  # parity's seeds begin here; any would do


class VllmGenerator:
    """Samples with an engine that `supply` keeps at the trainer's weights.

    `lost_most`: times that one call may lose its engine.
    """

    def __init__(
        self,
        supply: Supply,
        rule: StopRule,
        config: GenerationConfig,
        context_length: int | None,
        lost_most: int,
    ):
        self.supply, self.engine = supply, supply.engine
        self.rule, self.config, self.context_length = rule, config, context_length
        self.lost_most = lost_most
        self.facts = supply.facts

    @property
    def tolerance(self) -> float:
        """Rms nats per token by which trainer and engine may differ."""
        return self.supply.tolerance

    def load(self, policy: Any, version: int) -> None:
        """Send the weights of optimizer update `version` now, and read back that they are there.

        An engine that is lost meanwhile gets them before its next completion. Raises
        GenerationError when it says that it has others.
        """
        self.supply.take(policy, version)
        try:
            self.supply.current()
        except Lost as lost:
            self.supply.lost(lost)

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = unheard,
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
            Ask(
                groups[g].prompt_ids,
                sampling_params.completion(
                    self.config, self.rule.ids, seeds[g][k], greedy, temperature
                ),
            )
            for g, k in places
        ]
        first = list(accumulate(map(len, seeds), initial=0))
        answers: dict[int, Answer] = {}

        def heard(place: int) -> None:
            g = places[place][0]
            mine = range(first[g], first[g] + len(seeds[g]))
            if all(i in answers for i in mine):
                told = zip(mine, seeds[g], strict=True)
                groups[g].rollouts = [self._rollout(answers[i], seed) for i, seed in told]
                arrived(g)

        self._draw(asks, groups, answers, heard)
        self.supply.rest()

    def close(self) -> None:
        """Let go of the engine."""
        self.engine.close()

    def _draw(
        self,
        asks: list[Ask],
        groups: list[Group],
        answers: dict[int, Answer],
        heard: Callable[[int], None],
    ) -> None:
        lost = 0
        while len(answers) < len(asks):
            missing = [i for i in range(len(asks)) if i not in answers]
            try:
                self._ready(groups)
                self._complete(asks, missing, answers, heard)
            except Lost as gone:
                lost += 1
                self.supply.lost(gone)
                if lost > self.lost_most:
                    why = f"{len(missing)} of {len(asks)} completions were missing; {gone}"
                    raise GenerationError(
                        Problem(f"the sampler was lost {lost} times in one batch", why=why)
                    ) from gone

    def _complete(
        self,
        asks: list[Ask],
        chosen: list[int],
        answers: dict[int, Answer],
        heard: Callable[[int], None] = unheard,
    ) -> None:
        """Draw asks[i] for the i in `chosen`, into answers[i]; `heard` is told each i."""

        def done(place: int, answer: Answer) -> None:
            answers[chosen[place]] = self.supply.true(answer)
            heard(chosen[place])

        self.engine.complete([asks[i] for i in chosen], done)

    def _ready(self, groups: list[Group]) -> None:
        """The engine is there, has the weights, and agrees about these prompts."""
        self.supply.current()
        if self.supply.checked:
            return
        probes = groups[: parity.PROMPTS]
        most = min(parity.TOKENS, self.config.max_completion_length)
        asks = [
            Ask(g.prompt_ids, sampling_params.plain(self.config, self.rule.ids, SEEDS + i, most))
            for i, g in enumerate(probes)
        ]
        answers: dict[int, Answer] = {}
        self._complete(asks, list(range(len(asks))), answers)
        told = [answers[i] for i in range(len(asks))]
        found = parity.check(probes, told, self.supply.policy, self.tolerance)
        self.supply.checked = True
        self.supply.note(
            f"parity of trainer and vLLM on {len(probes)} prompts: rms {found:.2g} nats"
        )

    def _rollout(self, answer: Answer, seed: int) -> Rollout:
        return Rollout(
            completion_ids=answer.ids,
            text=self.rule.text(answer.ids),
            finish_reason=answer.finish_reason,
            terminated=self.rule.terminated(answer.ids, answer.finish_reason),
            seed=seed,
            weight_version=self.supply.version,
            behaviour_logp=answer.logp,
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
        tokenizer=handshake.tokenizer(tokenizer),
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
    apart = bool(gpus()) if keys.core_process is None else keys.core_process
    environment = arguments.environment(run, keys)
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart))}
    transfer = _transfer(given)
    if transfer == "ipc":  # handles over our own pipe, to a child that listens nowhere
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if lora_slot.on(run):
        environment[lora_slot.VARIABLE] = str(folder / "adapter")
        lora_slot.blank(folder / "adapter", run)
    if keys.sleep != "none":
        given = given | {"enable_sleep_mode": True}
    environment |= visible_to_child(next(model.parameters()).device, keys.tensor_parallel_size)
    latest = folder / "logs" / "latest"
    log_file = (latest if latest.exists() else folder) / "engine.log"
    engine = InAChild(keys, given, environment, log_file, transfer)
    most = keys.max_restarts
    return _generator(engine, model, tokenizer, run, context, given["dtype"], most, note)


def visible_to_child(device: torch.device, count: int) -> dict[str, str]:
    """The environment of an engine that is to use the trainer's own GPU: else it takes the first,
    whichever rank this is. `count`: GPUs that the engine is spread over."""
    if device.type != "cuda":
        return {}
    first = device.index or 0
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus()[first : first + count])}


def _generator(
    engine: Engine, model: Any, tokenizer: Any, run: RunConfig, context: int | None,
    dtype: str, lost_most: int, note: Any,
) -> VllmGenerator:  # fmt: skip
    run_id = f"{run.name}.{secrets.token_hex(4)}"
    supply = Supply(engine, getattr(torch, dtype), run_id, note, allowed(run))
    rule = StopRule(tokenizer, model, run.generation)
    return VllmGenerator(supply, rule, run.generation, context, lost_most)


def allowed(run: RunConfig) -> Callable[..., float]:
    """What trainer and engine of a run may differ by, as a function of their dtypes."""
    config: Any = run.generation
    if (fixed := config.logp_tolerance) is not None:
        return lambda *dtypes: float(fixed)
    keys = getattr(config, BACKENDS[config.backend])
    cache = keys.kv_cache_dtype not in (None, "auto", "bfloat16", "float16")
    coarse = bool(keys.quantization or cache or arguments.count_experts(run))
    return partial(tolerance, on_gpu=bool(gpus()), coarse=coarse)


def _transfer(given: dict[str, Any]) -> str:
    name: str = given["weight_transfer_config"]["backend"]
    return name.removeprefix("rloo_")
