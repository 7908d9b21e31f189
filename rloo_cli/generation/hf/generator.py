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
from rloo_cli.generation import check_lengths, tolerance, unheard
from rloo_cli.generation.common.stop_rule import StopRule
from rloo_cli.generation.hf import sampling
from rloo_cli.generation.hf.decode_batch import Row, places_that_fit, split
from rloo_cli.generation.hf.plain_prefix import Plain, selectable
from rloo_cli.generation.hf.shared_prefix import Shared
from rloo_cli.generation.transformers import Config
from rloo_cli.policy.model import evaluating
from rloo_cli.policy.shared_attention import native
from rloo_cli.utils import signals
from rloo_cli.utils.errors import GenerationError, NumbersError, Problem
from rloo_cli.utils.fault_injection import fault

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
        self.rule = StopRule(tokenizer, model, config)
        self.version = 0
        self.facts: dict[str, float] = {}
        own = next(model.parameters()).dtype
        by_dtype = tolerance(str(own), coarse=own != torch.float32)
        self.tolerance = config.logp_tolerance or by_dtype
        self.plain, self.shared = Plain(model), Shared(model)
        self.told: set[str] = set()

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
        arrived: Callable[[int], None] = unheard,
    ) -> None:
        """Fill `groups[i].rollouts`, one per seed and in order (`Generator.generate`).

        `greedy` takes the likeliest token, with repetition penalty and min_tokens but without
        temperature and filters, and behaviour_logp is then of that distribution. Raises
        GenerationError when a prompt leaves no room for its completion, NumbersError when logits
        are not finite.
        """
        if len(groups) != len(seeds):
            raise GenerationError(f"{len(groups)} groups, but seeds for {len(seeds)}")
        check_lengths(groups, self.config.max_completion_length, self.context_length)
        rows = [Row(i, groups[i].prompt_ids, seed) for i, own in enumerate(seeds) for seed in own]
        family: list[list[Row]] = [[] for _ in groups]
        for row in rows:
            family[row.group].append(row)

        def ended(row: Row) -> None:
            if all(sibling.reason is not None for sibling in family[row.group]):
                groups[row.group].rollouts = [self._rollout(own) for own in family[row.group]]
                arrived(row.group)

        # no_grad and not inference_mode: a model may keep a buffer it computes here (rotary
        # frequencies of a long prompt), and an inference tensor breaks the backward pass later.
        with evaluating(self.model), native(self.model), torch.no_grad():
            most = places_that_fit(self.config, self.model, next(self.model.parameters()).device)
            for batch in split(rows, self.config, most):
                fault("gen.request")
                way = self._way(batch)
                with way.holding():
                    self._decode(way, batch, greedy, temperature, ended)

    def _decode(
        self,
        way: Plain | Shared,
        rows: list[Row],
        greedy: bool,
        temperature: float | None,
        ended: Callable[[Row], None],
    ) -> None:
        """Sample these rows to their ends, all in one batch; `ended` hears of each."""
        state, logits = way.prefill(rows, self.config.max_completion_length)
        width, config = state.width, self.config
        if temperature is not None:
            config = config.model_copy(update={"temperature": temperature})
        process: Any = sampling.processors(
            config, self.rule.ids, width, greedy, device=logits.device
        )
        for end in range(width, state.seen.shape[1]):
            signals.check()
            fault("gen.chunk")
            scores = process(state.seen[:, :end], logits)
            uniform = None if greedy else state.uniforms[:, end - width]
            tokens, logp = sampling.pick(scores, uniform)
            state.seen[:, end] = tokens
            self._record(state.rows, tokens.tolist(), logp.tolist(), ended)
            alive = [r for r, row in enumerate(state.rows) if row.reason is None]
            if not alive:
                return
            if 4 * len(alive) <= 3 * len(state.rows) and selectable(state.cache):
                state.keep(alive)
            logits = way.forward(state, end + 1)

    def _record(
        self,
        rows: list[Row],
        tokens: list[int],
        logp: list[float],
        ended: Callable[[Row], None],
    ) -> None:
        for row, token, value in zip(rows, tokens, logp, strict=True):
            if row.reason is not None:
                continue  # a finished row that is still in the batch
            if not math.isfinite(value):
                raise NumbersError(
                    Problem(
                        "the model's logits are not finite",
                        f"generation, prompt {row.group} of the batch, token {len(row.ids)}",
                        fix="check the weights: a learning rate too high, or float16 overflow",
                    )
                )
            row.ids.append(token)
            row.logp.append(value)
            row.reason = self.rule.reason(row.ids)
            if row.reason is not None:
                ended(row)

    def _way(self, rows: list[Row]) -> Plain | Shared:
        """How these rows are decoded; what speaks against the faster way is said once."""
        if self.config.transformers.shared_prompt == "auto":
            reason = self.shared.why_not(rows, self.config.max_completion_length)
            if reason is None:
                return self.shared
            if reason not in self.told:
                self.told.add(reason)
                name = type(self.model).__name__
                log.info("%s: a prompt's keys are kept once per completion: %s", name, reason)
        return self.plain

    def _rollout(self, row: Row) -> Rollout:
        reason = row.reason or "length"
        return Rollout(
            completion_ids=row.ids,
            text=self.rule.text(row.ids),
            finish_reason=reason,
            terminated=self.rule.terminated(row.ids, reason),
            seed=row.seed,
            weight_version=self.version,
            behaviour_logp=row.logp,
        )


def build(
    model: Any, tokenizer: Any, run: RunConfig, context: int | None, folder: Path, note: Any
) -> TransformersGenerator:
    """Backend transformers."""
    config: Any = run.generation
    return TransformersGenerator(model, tokenizer, config, context)
