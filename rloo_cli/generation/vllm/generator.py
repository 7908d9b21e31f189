"""The `Generator` of both vLLM backends, which only ever samples with the trainer's weights.

Nothing is sampled before the engine has confirmed that it has the trainer's weights, has reset
its caches, and agrees with the trainer's log-probabilities on real prompts. If the engine is
lost, the generator reconnects, sends the weights first, and samples only what
is missing, with the same seeds: a completion depends on its prompt, its seed and the weights.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from threading import Event
from typing import Any, cast

import torch

from rloo_cli.config import rules_model
from rloo_cli.config.rules_sampling import keeps_masks
from rloo_cli.config.schema import GenerationConfig, ModelConfig, RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.distributed.device_count import gpu_uuids, visible_gpus
from rloo_cli.generation import (
    GeneratorBase,
    check_prompt_lengths,
    ignore_arrival,
    logprob_tolerance,
)
from rloo_cli.generation.common.open_groups import OpenCompletion, OpenGroup
from rloo_cli.generation.common.stop_rule import StopRule
from rloo_cli.generation.vllm import (
    arguments,
    handshake,
    lora_slot,
    parity,
    required_parts,
    sampling_params,
    versions,
)
from rloo_cli.generation.vllm.child_engine import ColocatedEngine
from rloo_cli.generation.vllm.engine import (
    EngineCompletion,
    EngineLost,
    EngineRequest,
    InferenceEngine,
    InterruptibleEngine,
)
from rloo_cli.generation.vllm.engine_images import ban_image_tokens, images_to_send
from rloo_cli.generation.vllm.handshake import ExpectedServer
from rloo_cli.generation.vllm.http_engine import HttpEngine
from rloo_cli.generation.vllm.weight_sync import WeightSync
from rloo_cli.policy.vision import image_token_ids
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import ConfigError, GenerationError, Problem
from rloo_cli.utils.files import JsonObject

PARITY_SEED = 1_000_003  # first seed of the parity check; arbitrary
LOST_FIX = "find the reason in the sampler's log, then resume=auto"


class VllmGenerator(GeneratorBase):
    """Samples with an engine that `weight_sync` keeps at the trainer's weights.

    `max_engine_losses`: how often one call may lose its engine. `image_token_ids`: ids that are
    never sampled.
    """

    def __init__(
        self,
        weight_sync: WeightSync,
        stop_rule: StopRule,
        config: GenerationConfig,
        context_length: int | None,
        max_engine_losses: int,
        image_token_ids: Sequence[int] = (),
    ):
        self.weight_sync, self.engine = weight_sync, weight_sync.engine
        self.stop_rule, self.config, self.context_length = stop_rule, config, context_length
        self.max_engine_losses, self.image_token_ids = max_engine_losses, image_token_ids
        self.metrics = weight_sync.metrics
        self.is_held_awake = False
        self.losses_in_a_row = 0  # of `extend`

    @property
    def tolerance(self) -> float:
        """Rms nats per token by which trainer and engine may differ."""
        return self.weight_sync.tolerance

    @property
    def version(self) -> int:
        """The optimizer update whose weights it samples with."""
        return self.weight_sync.version

    def load(self, policy: Any, version: int) -> None:
        """Send the weights of optimizer update `version` now, and read their label back.

        An engine that is lost gets them before its next completion. Raises GenerationError if it
        reports another label.
        """
        self.weight_sync.set_policy(policy, version)
        try:
            self.weight_sync.ensure_synced()
        except EngineLost as lost:
            self.weight_sync.handle_engine_loss(lost)

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill `groups[i].rollouts`, one per seed and in order (`Generator.generate`).

        Raises GenerationError for wrong weights, versions or log-probabilities, if the engine was
        lost too often, or if a prompt leaves no tokens for a completion.
        """
        assert len(groups) == len(seeds), f"{len(groups)} groups, but seeds for {len(seeds)}"
        check_prompt_lengths(groups, self.config.max_completion_length, self.context_length)
        samples = [(g, k) for g, own in enumerate(seeds) for k in range(len(own))]
        images = [images_to_send(group.media, group.prompt_ids) for group in groups]

        def request(g: int, seed: int) -> EngineRequest:
            stop_ids = self.stop_rule.stop_ids
            asked = (self.config, stop_ids, seed, greedy, temperature)
            params = self._without_images(sampling_params.completion_params(*asked))
            if (most := groups[g].max_tokens) is not None:
                params |= {"max_tokens": most}
            return EngineRequest(groups[g].prompt_ids, params, images[g])

        asks = [request(g, seeds[g][k]) for g, k in samples]
        first = list(accumulate(map(len, seeds), initial=0))
        answers: dict[int, EngineCompletion] = {}
        trained = not greedy and temperature is None

        def heard(index: int) -> None:
            g = samples[index][0]
            if trained:
                self._check_mask(answers[index])
            mine = range(first[g], first[g] + len(seeds[g]))
            if all(i in answers for i in mine):
                pairs = zip(mine, seeds[g], strict=True)
                groups[g].rollouts = [
                    self._to_rollout(answers[i], seed, trained) for i, seed in pairs
                ]
                arrived(g)

        self._generate_all(asks, groups, answers, heard)
        if not self.is_held_awake:
            self.weight_sync.sleep()

    def make_ready(self, groups: list[Group]) -> None:
        """Connect, send the weights and compare both sides, as far as still needed."""
        check_prompt_lengths(groups, self.config.max_completion_length, self.context_length)
        self._ensure_engine_ready(groups)
        self.losses_in_a_row = 0

    def handle_engine_loss(self, error: Exception) -> None:
        """Give a lost engine up. Raises GenerationError if it was lost too often in a row."""
        assert isinstance(error, EngineLost), "it is another error"
        self.losses_in_a_row += 1
        self.weight_sync.handle_engine_loss(error)
        if self.losses_in_a_row > self.max_engine_losses:
            what = f"the sampler was lost {self.losses_in_a_row} times in a row"
            raise GenerationError(Problem(what, "generation", str(error), LOST_FIX)) from error

    def extend(
        self, groups: list[OpenGroup], ended: Callable[[OpenGroup], None], interrupted: Event
    ) -> None:
        """Continue unfinished completions (`CarryingGenerator.extend`).

        Each continues as a request whose prompt includes its own tokens so far.
        """
        version, engine = self.version, cast(InterruptibleEngine, self.engine)
        samples = [(group, c) for group in groups for c in group.unfinished]
        asks = [EngineRequest(_prefix(g, c), self._rest_params(c)) for g, c in samples]

        def heard(index: int, answer: EngineCompletion) -> None:
            group, completion = samples[index]
            if answer.ids:
                self._check_mask(self.weight_sync.check_completion(answer))
            self._add_answer(completion, answer, version)
            if not group.unfinished:
                ended(group)

        engine.generate_until(asks, heard, interrupted)

    def _rest_params(self, completion: OpenCompletion) -> JsonObject:
        """The sampling parameters for the rest of a completion."""
        stop_ids, seed = self.stop_rule.stop_ids, completion.segment_seed
        params = sampling_params.completion_params(self.config, stop_ids, seed, False, None)
        return params | {"max_tokens": self.config.max_completion_length - len(completion.ids)}

    def _add_answer(
        self, completion: OpenCompletion, answer: EngineCompletion, version: int
    ) -> None:
        """Add an answer's tokens. The engine does not know a stop string that began before an
        interruption: tokens after that string are cut off."""
        ids, logp, mask = answer.ids, answer.logp, answer.sampling_mask
        reason = None if answer.finish_reason == "abort" else answer.finish_reason
        known = len(completion.ids)
        window = self.stop_rule.stop_window if self.config.stop and known else 0
        for end in range(1, min(window, len(ids)) + 1):
            if self.stop_rule.finish_reason(completion.ids + ids[:end]) == "stop":
                ids, logp, reason = ids[:end], logp[:end], "stop"
                break
        if mask is not None:
            mask = mask.slice_tokens(0, len(ids))
        completion.add_tokens(ids, logp, version, reason, mask)

    def _check_mask(self, completion: EngineCompletion) -> None:
        """Check a completion's sampling mask, if the run keeps them.

        Raises GenerationError, and ConfigError (exit 2) if the engine sends none.
        """
        if not keeps_masks(self.config):
            return
        if completion.sampling_mask is None:
            raise ConfigError(handshake.no_masks_problem("the engine"))
        most = self.config.max_sampling_mask_ids
        completion.sampling_mask.check_tokens(completion.ids, most)

    @contextmanager
    def stay_awake(self) -> Iterator[None]:
        """Let the engine sleep only at the end of several calls of `generate`."""
        self.is_held_awake = True
        try:
            yield
            self.weight_sync.sleep()
        finally:
            self.is_held_awake = False

    @contextmanager
    def without_recovery(self) -> Iterator[None]:
        """Let a lost engine end `generate` here: another thread than the trainer's samples.

        GenerationError's cause is then EngineLost. Recovery needs the policy, which is training.
        """
        most, self.max_engine_losses = self.max_engine_losses, 0
        try:
            yield
        finally:
            self.max_engine_losses = most

    def forbid_recovery(self) -> None:
        """Never restart a lost engine from now on."""
        self.max_engine_losses = 0

    def carrying(self) -> "VllmGenerator":
        """This one: an engine can be interrupted."""
        return self

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _generate_all(
        self,
        requests: list[EngineRequest],
        groups: list[Group],
        completions: dict[int, EngineCompletion],
        on_completion: Callable[[int], None],
    ) -> None:
        lost = 0
        while len(completions) < len(requests):
            missing = [i for i in range(len(requests)) if i not in completions]
            try:
                self._ensure_engine_ready(groups)
                self._generate_chosen(requests, missing, completions, on_completion)
            except EngineLost as gone:
                lost += 1
                self.weight_sync.handle_engine_loss(gone)
                if lost > self.max_engine_losses:
                    why = f"{len(missing)} of {len(requests)} completions were missing; {gone}"
                    what = f"the sampler was lost {lost} times in one batch"
                    raise GenerationError(Problem(what, "generation", why, LOST_FIX)) from gone

    def _generate_chosen(
        self,
        requests: list[EngineRequest],
        request_indices: list[int],
        completions: dict[int, EngineCompletion],
        on_completion: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Sample the requests at these indices into `completions`, and report each index."""

        def done(index: int, answer: EngineCompletion) -> None:
            completions[request_indices[index]] = self.weight_sync.check_completion(answer)
            on_completion(request_indices[index])

        self.engine.generate([requests[i] for i in request_indices], done)

    def _ensure_engine_ready(self, groups: list[Group]) -> None:
        """Make sure that the engine answers, has the weights, and agrees on these prompts."""
        self.weight_sync.ensure_synced()
        if self.weight_sync.parity_checked:
            return
        probes = groups[: parity.PARITY_PROMPTS]
        longest = self.config.max_completion_length
        most = min(parity.PARITY_TOKENS, *(g.max_tokens or longest for g in probes))
        asks = [
            EngineRequest(
                g.prompt_ids,
                self._without_images(
                    sampling_params.parity_params(
                        self.config, self.stop_rule.stop_ids, PARITY_SEED + i, most
                    )
                ),
                images_to_send(g.media, g.prompt_ids),
            )
            for i, g in enumerate(probes)
        ]
        answers: dict[int, EngineCompletion] = {}
        self._generate_chosen(asks, list(range(len(asks))), answers)
        ordered = [answers[i] for i in range(len(asks))]
        for answer in ordered:
            self._check_mask(answer)
        found = parity.check_parity(probes, ordered, self.weight_sync.policy, self.tolerance)
        self.weight_sync.parity_checked = True
        self.weight_sync.note(
            f"parity of trainer and vLLM on {len(probes)} prompts: rms {found:.2g} nats"
        )

    def _without_images(self, params: JsonObject) -> JsonObject:
        """Parameters that never sample a token that stands for an image."""
        return ban_image_tokens(params, self.image_token_ids)

    def _to_rollout(self, completion: EngineCompletion, seed: int, trained: bool) -> Rollout:
        return Rollout(
            completion_ids=completion.ids,
            text=self.stop_rule.text(completion.ids),
            finish_reason=completion.finish_reason,
            terminated=self.stop_rule.terminated(completion.ids, completion.finish_reason),
            seed=seed,
            weight_version=self.weight_sync.version,
            behaviour_logp=completion.logp,
            sampling_mask=completion.sampling_mask if trained else None,
        )


def _prefix(group: OpenGroup, completion: OpenCompletion) -> list[int]:
    """The ids before a completion's next token; one shared list for siblings without a token."""
    prompt = group.group.prompt_ids
    return prompt + completion.ids if completion.ids else prompt


def build_server_generator(
    model: Any, tokenizer: Any, run: RunConfig, context_length: int | None, folder: Path, note: Any
) -> VllmGenerator:
    """Backend vllm_server."""
    config: Any = run.generation
    keys = config.server
    given = arguments.build_engine_arguments(run, keys, run.seed)
    expected = ExpectedServer(
        model=run.model.path,
        dtype=given["dtype"],
        tokenizer=handshake.tokenizer_fingerprint(tokenizer),
        max_model_len=given.get("max_model_len", 0),
        transfer=_transfer_backend(given),
        sampling_mask=keeps_masks(config),
        trainer_gpus=tuple(gpu_uuids(visible_gpus()[: environment_number("LOCAL_WORLD_SIZE", 1)])),
    )
    engine = HttpEngine(keys, folder, expected, note)
    most = keys.retries if keys.base_url else max(keys.retries, keys.max_restarts)
    return _build_vllm_generator(
        engine, model, tokenizer, run, context_length, given["dtype"], most, note
    )


def build_colocate_generator(
    model: Any, tokenizer: Any, run: RunConfig, context_length: int | None, folder: Path, note: Any
) -> VllmGenerator:
    """Backend vllm_colocate."""
    config: Any = run.generation
    keys = config.colocate
    given = arguments.build_engine_arguments(run, keys, run.seed)
    apart = bool(visible_gpus()) if keys.core_process is None else keys.core_process
    environment = arguments.engine_environment(run.model, config)
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart))}
    transfer = _transfer_backend(given)
    if transfer == "ipc":  # handles over our own pipe, to a child that listens nowhere
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if run.model.lora is not None:
        environment[lora_slot.ADAPTER_FOLDER_VARIABLE] = str(folder / "adapter")
        lora_slot.write_zero_adapter(folder / "adapter", run.model.lora)
    if keys.sleep != "none":
        given = given | {"enable_sleep_mode": True}
    environment |= child_gpu_environment(next(model.parameters()).device, keys.tensor_parallel_size)
    latest = folder / "logs" / "latest"
    log_file = (latest if latest.exists() else folder) / "engine.log"
    version = versions.installed_vllm_version()
    if warning := required_parts.untried_warning(version, bool(visible_gpus())):
        note(f"warning: {warning}")
    engine = ColocatedEngine(keys, given, environment, log_file, transfer)
    most = keys.max_restarts
    return _build_vllm_generator(
        engine, model, tokenizer, run, context_length, given["dtype"], most, note
    )


def child_gpu_environment(device: torch.device, num_gpus: int) -> dict[str, str]:
    """The environment of an engine that is to use the trainer's own GPU.

    Otherwise it takes GPU 0, whichever rank this is. `num_gpus`: how many the engine uses.
    """
    if device.type != "cuda":
        return {}
    first = device.index or 0
    return arguments.visible_gpu_environment(visible_gpus()[first : first + num_gpus])


def _build_vllm_generator(
    engine: InferenceEngine, model: Any, tokenizer: Any, run: RunConfig, context_length: int | None,
    dtype: str, max_engine_losses: int, note: Any,
) -> VllmGenerator:  # fmt: skip
    run_id = f"{run.name}.{secrets.token_hex(4)}"
    tolerance = run_tolerance(run.model, run.generation)
    supply = WeightSync(engine, getattr(torch, dtype), run_id, note, tolerance)
    rule = StopRule(tokenizer, model, run.generation)
    banned = sorted(image_token_ids(model.config))
    return VllmGenerator(supply, rule, run.generation, context_length, max_engine_losses, banned)


def run_tolerance(model: ModelConfig, generation: GenerationConfig) -> Callable[..., float]:
    """How far trainer and engine of a run may differ, as a function of their dtypes."""
    if (fixed := generation.logp_tolerance) is not None:
        return lambda *dtypes: float(fixed)
    keys = generation.own_keys
    cache = keys.kv_cache_dtype not in (None, "auto", "bfloat16", "float16")
    coarse = bool(keys.quantization or cache or rules_model.expert_count_key(model))
    return partial(logprob_tolerance, on_gpu=bool(visible_gpus()), coarse=coarse)


def _transfer_backend(engine_arguments: JsonObject) -> str:
    name: str = engine_arguments["weight_transfer_config"]["backend"]
    return name.removeprefix("rloo_")
