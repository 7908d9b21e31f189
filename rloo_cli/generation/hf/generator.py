"""Decoding with the trainer's own model: one prefill per prompt, then one token per step.

Not `model.generate`: that draws from the global generator, so a sample would depend on its batch,
and it prefills every sibling. Here a prompt is prefilled once per group, and what is kept of it is
shared by the group's completions where the model allows it (`shared`), repeated for them elsewhere
(`plain`). Finished rows leave the batch when a quarter of it has finished. Padding is known from
lengths and filled with an id of the row's own prompt, so that there is no pad id to confuse with
EOS.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.generation import check_prompt_lengths, ignore_arrival, logprob_tolerance
from rloo_cli.generation.common.stop_rule import StopRule
from rloo_cli.generation.hf import sampling
from rloo_cli.generation.hf.decode_batch import (
    DecodeSequence,
    max_decode_tokens,
    split_decode_batches,
)
from rloo_cli.generation.hf.repeated_prefix import RepeatedPrefix, can_select_sequences
from rloo_cli.generation.hf.shared_prefix import SharedPrefix
from rloo_cli.generation.transformers import Config
from rloo_cli.policy.model import in_eval_mode
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.utils import signals
from rloo_cli.utils.errors import GenerationError, NumbersError, Problem
from rloo_cli.utils.fault_injection import trigger_fault

log = logging.getLogger(__name__)


class TransformersGenerator:
    """Samples with `model` itself, so it always has the policy's weights.

    `context_length`: most places the model can hold; None = not known, not checked.
    Raises ConfigError for stop strings that can never be found.
    """

    def __init__(self, model: Any, tokenizer: Any, config: Config, context_length: int | None):
        self.model = model
        self.config = config
        self.context_length = context_length
        self.stop_rule = StopRule(tokenizer, model, config)
        self.version = 0
        self.metrics: dict[str, float] = {}
        own = next(model.parameters()).dtype
        by_dtype = logprob_tolerance(str(own), coarse=own != torch.float32)
        self.tolerance = config.logp_tolerance or by_dtype
        self.repeated_prefix, self.shared_prefix = RepeatedPrefix(model), SharedPrefix(model)
        self.logged_reasons: set[str] = set()

    def load(self, policy: Any, version: int) -> None:
        """Note the version: the weights are the policy's own."""
        self.version = version

    def close(self) -> None:
        """Nothing is held between calls."""

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill `groups[i].rollouts`, one per seed and in order (`Generator.generate`).

        `greedy` takes the likeliest token, with repetition penalty and min_tokens but without
        temperature and filters, and behaviour_logp is then of that distribution. Raises
        GenerationError when a prompt leaves no room for its completion, NumbersError when logits
        are not finite.
        """
        if len(groups) != len(seeds):
            raise GenerationError(f"{len(groups)} groups, but seeds for {len(seeds)}")
        check_prompt_lengths(groups, self.config.max_completion_length, self.context_length)
        rows = [
            DecodeSequence(i, groups[i].prompt_ids, seed)
            for i, own in enumerate(seeds)
            for seed in own
        ]
        family: list[list[DecodeSequence]] = [[] for _ in groups]
        for row in rows:
            family[row.group_index].append(row)

        def ended(row: DecodeSequence) -> None:
            if all(sibling.finish_reason is not None for sibling in family[row.group_index]):
                groups[row.group_index].rollouts = [
                    self._to_rollout(own) for own in family[row.group_index]
                ]
                arrived(row.group_index)

        # no_grad and not inference_mode: a model may keep a buffer it computes here (rotary
        # frequencies of a long prompt), and an inference tensor breaks the backward pass later.
        with in_eval_mode(self.model), native_attention(self.model), torch.no_grad():
            most = max_decode_tokens(self.config, self.model, next(self.model.parameters()).device)
            for batch in split_decode_batches(rows, self.config, most):
                trigger_fault("gen.request")
                way = self._choose_prefix(batch)
                with way.decoding_attention():
                    self._decode(way, batch, greedy, temperature, ended)

    def _decode(
        self,
        prefix: RepeatedPrefix | SharedPrefix,
        sequences: list[DecodeSequence],
        greedy: bool,
        temperature: float | None,
        on_finished: Callable[[DecodeSequence], None],
    ) -> None:
        """Sample these rows to their ends, all in one batch; `ended` hears of each."""
        state, logits = prefix.prefill(sequences, self.config.max_completion_length)
        width, config = state.prompt_width, self.config
        if temperature is not None:
            config = config.model_copy(update={"temperature": temperature})
        process: Any = sampling.logits_processors(
            config, self.stop_rule.stop_ids, width, greedy, device=logits.device
        )
        for end in range(width, state.input_ids.shape[1]):
            signals.raise_if_stopped()
            trigger_fault("gen.chunk")
            scores = process(state.input_ids[:, :end], logits)
            uniform = None if greedy else state.uniforms[:, end - width]
            tokens, logp = sampling.sample_tokens(scores, uniform)
            state.input_ids[:, end] = tokens
            self._record(state.sequences, tokens.tolist(), logp.tolist(), on_finished)
            alive = [r for r, row in enumerate(state.sequences) if row.finish_reason is None]
            if not alive:
                return
            if 4 * len(alive) <= 3 * len(state.sequences) and can_select_sequences(state.cache):
                state.keep_sequences(alive)
            logits = prefix.forward(state, end + 1)

    def _record(
        self,
        sequences: list[DecodeSequence],
        tokens: list[int],
        logp: list[float],
        on_finished: Callable[[DecodeSequence], None],
    ) -> None:
        for row, token, value in zip(sequences, tokens, logp, strict=True):
            if row.finish_reason is not None:
                continue  # a finished row that is still in the batch
            if not math.isfinite(value):
                raise NumbersError(
                    Problem(
                        "the model's logits are not finite",
                        f"generation, prompt {row.group_index} of the batch, token "
                        f"{len(row.completion_ids)}",
                        fix="check the weights: a learning rate too high, or float16 overflow",
                    )
                )
            row.completion_ids.append(token)
            row.logp.append(value)
            row.finish_reason = self.stop_rule.finish_reason(row.completion_ids)
            if row.finish_reason is not None:
                on_finished(row)

    def _choose_prefix(self, sequences: list[DecodeSequence]) -> RepeatedPrefix | SharedPrefix:
        """How these rows are decoded; what speaks against the faster way is said once."""
        if self.config.transformers.shared_prompt == "auto":
            reason = self.shared_prefix.why_not(sequences, self.config.max_completion_length)
            if reason is None:
                return self.shared_prefix
            if reason not in self.logged_reasons:
                self.logged_reasons.add(reason)
                name = type(self.model).__name__
                log.info("%s: a prompt's keys are kept once per completion: %s", name, reason)
        return self.repeated_prefix

    def _to_rollout(self, sequence: DecodeSequence) -> Rollout:
        reason = sequence.finish_reason or "length"
        return Rollout(
            completion_ids=sequence.completion_ids,
            text=self.stop_rule.text(sequence.completion_ids),
            finish_reason=reason,
            terminated=self.stop_rule.terminated(sequence.completion_ids, reason),
            seed=sequence.seed,
            weight_version=self.version,
            behaviour_logp=sequence.logp,
        )


def build_transformers_generator(
    model: Any, tokenizer: Any, run: RunConfig, context_length: int | None, folder: Path, note: Any
) -> TransformersGenerator:
    """Backend transformers."""
    config: Any = run.generation
    return TransformersGenerator(model, tokenizer, config, context_length)
