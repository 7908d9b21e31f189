"""Decoding with the trainer's own model: one prefill per prompt, then one token per step.

`model.generate` is not used: it samples with the global random generator, so that a sample would
depend on its batch, and it prefills every sibling. Here a prompt is prefilled once per group; the
group's completions share its keys and values where the model allows it (`shared_prefix`), and have
copies otherwise (`repeated_prefix`). Finished completions leave the batch when a quarter of it has
finished. Padding is known from lengths and filled with an id of the completion's own prompt, so
that no pad id can be taken for EOS.
"""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rloo_cli.config.rules_sampling import keeps_masks
from rloo_cli.config.schema import RunConfig
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.sampling_mask import SamplingMask, too_many_ids
from rloo_cli.generation import (
    Generator,
    GeneratorBase,
    GeneratorWrapper,
    check_prompt_lengths,
    ignore_arrival,
    logprob_tolerance,
)
from rloo_cli.generation.common.open_groups import OpenCompletion, OpenGroup
from rloo_cli.generation.common.stop_rule import StopRule
from rloo_cli.generation.hf import decode_batch, sampling
from rloo_cli.generation.hf.decode_batch import DecodeSequence
from rloo_cli.generation.hf.grammar import Grammar, load_grammar
from rloo_cli.generation.hf.repeated_prefix import RepeatedPrefix, can_select_sequences
from rloo_cli.generation.hf.shared_prefix import SharedPrefix
from rloo_cli.generation.transformers import Config
from rloo_cli.policy import lora
from rloo_cli.policy.model import Policy, in_eval_mode, uncompiled_layers
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.policy.vision import image_token_ids
from rloo_cli.utils import signals
from rloo_cli.utils.errors import NumbersError
from rloo_cli.utils.fault_injection import trigger_fault

log = logging.getLogger(__name__)

GatherWeights = Callable[[], Iterator[dict[str, Tensor]]]  # all weights, whole, unit by unit


class TransformersGenerator(GeneratorBase):
    """Samples with `model`: the policy itself, or a copy that `ReplicaGenerator` keeps up to date.

    `context_length` is the model's largest number of positions; None = not known, not checked.
    Raises ConfigError for stop strings that can never be found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        context_length: int | None,
    ):
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
        self.image_token_ids = sorted(image_token_ids(model.config))
        self.grammar: Grammar | None = None
        if (form := config.kwargs.get("structured_outputs")) is not None:
            size, stop_ids = model.get_input_embeddings().weight.shape[0], self.stop_rule.stop_ids
            self.grammar = load_grammar(form, tokenizer, size, stop_ids)

    def load(self, policy: Policy, version: int) -> None:
        """Store the version: the weights are the policy's own."""
        self.version = version

    def close(self) -> None:
        """Do nothing: the sampler holds nothing between calls."""

    def generate(
        self,
        groups: list[Group],
        seeds: list[list[int]],
        greedy: bool = False,
        temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:
        """Fill `groups[i].rollouts`, one per seed and in order (`Generator.generate`).

        `greedy` takes the most likely token, with repetition penalty and min_tokens but without
        temperature and filters; behaviour_logp is also taken without them. Raises GenerationError
        when a prompt leaves no room for its completion, NumbersError when logits are not finite.
        """
        assert len(groups) == len(seeds), f"{len(groups)} groups, but seeds for {len(seeds)}"
        check_prompt_lengths(groups, self.config.max_completion_length, self.context_length)
        family = [
            [
                DecodeSequence(
                    i, group.prompt_ids, seed, media=group.media, max_tokens=group.max_tokens
                )
                for seed in group_seeds
            ]
            for i, (group, group_seeds) in enumerate(zip(groups, seeds, strict=True))
        ]
        sequences = [sequence for siblings in family for sequence in siblings]

        def ended(row: DecodeSequence) -> None:
            if all(sibling.finish_reason is not None for sibling in family[row.group_index]):
                siblings = family[row.group_index]
                groups[row.group_index].rollouts = [self._to_rollout(s) for s in siblings]
                arrived(row.group_index)

        self._decode_all(sequences, greedy, temperature, ended)

    def carrying(self) -> "TransformersGenerator":
        """This one: decoding can be interrupted."""
        return self

    def make_ready(self, groups: list[Group]) -> None:
        """Check the prompts' lengths; there is nothing to connect to."""
        check_prompt_lengths(groups, self.config.max_completion_length, self.context_length)

    def extend(
        self,
        groups: list[OpenGroup],
        ended: Callable[[OpenGroup], None],
        interrupted: Event,
    ) -> None:
        """Continue unfinished completions (`CarryingGenerator.extend`).

        Prompt and kept tokens are read again with the current weights.
        """
        version, owners = self.version, dict[int, tuple[OpenGroup, OpenCompletion]]()
        sequences: list[DecodeSequence] = []
        for group in groups:
            prompt, shared = group.group.prompt_ids, -1 - len(sequences)
            for c in group.unfinished:
                # Siblings without a token share a prefix, the prompt; others have their own.
                index = len(sequences) if c.ids else shared
                sequence = DecodeSequence(index, prompt + c.ids, c.segment_seed)
                sequence.kept_ids = list(c.ids)
                sequences.append(sequence)
                owners[id(sequence)] = group, c

        def finished(sequence: DecodeSequence) -> None:
            group, completion = owners.pop(id(sequence))
            _add_tokens(completion, sequence, version)
            if not group.unfinished:
                ended(group)

        sequences.sort(key=lambda s: s.group_index)  # siblings are neighbours
        try:
            self._decode_all(sequences, False, None, finished, interrupted)
        finally:
            for sequence in sequences:
                if (owner := owners.get(id(sequence))) is not None:
                    _add_tokens(owner[1], sequence, version)

    def handle_engine_loss(self, error: Exception) -> None:
        """Raise the error: this sampler runs in-process and cannot reconnect."""
        raise error

    def _decode_all(
        self,
        sequences: list[DecodeSequence],
        greedy: bool,
        temperature: float | None,
        on_finished: Callable[[DecodeSequence], None],
        interrupted: Event | None = None,
    ) -> None:
        """Sample these completions, batch by batch, to their ends or until `interrupted`."""
        # no_grad and not inference_mode: a model may keep a buffer it computes here (rotary
        # frequencies of a long prompt), and an inference tensor breaks the backward pass later.
        eager = uncompiled_layers(self.model)
        with in_eval_mode(self.model), native_attention(self.model), eager, torch.no_grad():
            device = next(self.model.parameters()).device
            limit = decode_batch.max_decode_tokens(self.config, self.model, device)
            # If all of them can share prompts, so can any subset.
            once = bool(limit and sequences) and isinstance(
                self._choose_prefix(sequences), SharedPrefix
            )
            for batch in decode_batch.split_decode_batches(sequences, self.config, limit, once):
                trigger_fault("gen.request")
                prefix = self._choose_prefix(batch)
                with prefix.decoding_attention():
                    self._decode(prefix, batch, greedy, temperature, on_finished, interrupted)

    def _decode(
        self,
        prefix: RepeatedPrefix | SharedPrefix,
        sequences: list[DecodeSequence],
        greedy: bool,
        temperature: float | None,
        on_finished: Callable[[DecodeSequence], None],
        interrupted: Event | None = None,
    ) -> None:
        """Sample these completions to their ends, in one batch; calls `on_finished` with each."""
        if interrupted is not None and interrupted.is_set():
            return
        state, logits = prefix.prefill(sequences, self._longest_rest(sequences))
        width, config = state.prompt_width, self.config
        if temperature is not None:
            config = config.model_copy(update={"temperature": temperature})
        elif not greedy and keeps_masks(config):  # masks of trained completions only
            for sequence in sequences:
                sequence.sampling_mask = SamplingMask()
        stop_ids = self.stop_rule.stop_ids
        process = sampling.logits_processors(config, stop_ids, width, greedy, logits.device)
        for end in range(width, state.input_ids.shape[1]):
            signals.raise_if_stopped()
            trigger_fault("gen.chunk")
            if interrupted is not None and interrupted.is_set():
                return
            if self.image_token_ids:  # a sampled one would need an image
                logits[:, self.image_token_ids] = -math.inf
            if self.grammar is not None:
                self.grammar.mask_logits(state.sequences, logits)
            scores = process(state.input_ids[:, :end], logits)
            uniform = None if greedy else state.uniforms[:, end - width]
            tokens, logp = sampling.sample_tokens(scores, uniform)
            state.input_ids[:, end] = tokens
            if state.sequences[0].sampling_mask is not None:
                self._record_masks(state.sequences, *sampling.allowed_ids(scores))
            self._record(state.sequences, tokens.tolist(), logp.tolist(), on_finished)
            alive = [i for i, s in enumerate(state.sequences) if s.finish_reason is None]
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
        for sequence, token, value in zip(sequences, tokens, logp, strict=True):
            ids = sequence.completion_ids
            if sequence.finish_reason is not None:
                continue  # finished, but still in the batch
            if not math.isfinite(value):
                where = f"token {len(ids)} of prompt {sequence.group_index} of the batch"
                raise NumbersError(
                    f"the model's logits are not finite: log-probability {value} for {where};"
                    " the learning rate may be too high, or float16 overflows"
                )
            ids.append(token)
            sequence.logp.append(value)
            sequence.finish_reason = self.stop_rule.finish_reason(
                sequence.all_ids, sequence.max_tokens
            )
            if sequence.finish_reason is not None:
                on_finished(sequence)

    def _record_masks(
        self, sequences: list[DecodeSequence], ids: list[int], counts: list[int]
    ) -> None:
        """Store the ids that each sequence's next token is chosen from. Raises GenerationError."""
        most, end = self.config.max_sampling_mask_ids, 0
        for sequence, count in zip(sequences, counts, strict=True):
            begin, end = end, end + count
            if sequence.finish_reason is not None:
                continue
            if count > most:
                raise too_many_ids(len(sequence.all_ids), count, most)
            assert sequence.sampling_mask is not None
            sequence.sampling_mask.append_token(ids[begin:end])

    def _choose_prefix(self, sequences: list[DecodeSequence]) -> RepeatedPrefix | SharedPrefix:
        """How to decode these completions; the reason against the faster way is logged once."""
        if self.config.transformers.shared_prompt == "auto":
            reason = self.shared_prefix.why_not(sequences, self._longest_rest(sequences))
            if reason is None:
                return self.shared_prefix
            if reason not in self.logged_reasons:
                self.logged_reasons.add(reason)
                name = type(self.model).__name__
                log.info("%s: a prompt's keys are kept once per completion: %s", name, reason)
        return self.repeated_prefix

    def _longest_rest(self, sequences: list[DecodeSequence]) -> int:
        """The most tokens that one of these can still get."""
        most = self.config.max_completion_length
        return max((s.max_tokens or most) - len(s.kept_ids) for s in sequences)

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
            sampling_mask=sequence.sampling_mask,
        )


class ReplicaGenerator(GeneratorWrapper):
    """`inner` samples with `copy`, a whole copy of weights that are sharded or changing.

    It receives them before each step: decoding waits for no other rank. All ranks call
    `gather_weights` together. Of a model with an adapter the adapter alone is gathered, by the
    names of peft's files.
    """

    def __init__(self, inner: Generator, copy: PreTrainedModel, gather_weights: GatherWeights):
        super().__init__(inner)
        self.gather_weights = gather_weights
        adapted = lora.has_adapter(copy)
        self.parameters: dict[str, Tensor] = (
            {**lora.adapter_tensors(copy)} if adapted else {**dict(copy.named_parameters())}
        )

    @torch.no_grad()
    def load(self, policy: Policy, version: int) -> None:
        """Copy the trainer's current weights."""
        for unit in self.gather_weights():
            for name, tensor in unit.items():
                self.parameters[name].copy_(tensor)
        self.inner.load(policy, version)


def _add_tokens(completion: OpenCompletion, sequence: DecodeSequence, version: int) -> None:
    """Add the tokens that the weights of `version` sampled to a completion."""
    completion.add_tokens(
        sequence.completion_ids, sequence.logp, version, sequence.finish_reason,
        sequence.sampling_mask,
    )  # fmt: skip


def build_transformers_generator(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run: RunConfig,
    context_length: int | None,
    folder: Path,
    note: Callable[[str], None],
) -> TransformersGenerator:
    """Build the generator of generation=transformers."""
    return TransformersGenerator(model, tokenizer, cast(Config, run.generation), context_length)
