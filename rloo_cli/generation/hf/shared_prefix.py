"""Decoding with each prompt's keys and values computed, stored and read once per group.

All prompts of a batch are one row without padding, in which positions restart; then each completion
adds a token at a time (`kv_cache`). It works only for models whose attention can be replaced:
`why_not` decides from the config, and the first time also by comparing numbers.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo_cli.data.media import axis_positions, media_of_rows, parts_of, vision_of
from rloo_cli.generation.hf.decode_batch import DecodeBatch, DecodeSequence, group_starts
from rloo_cli.generation.hf.kv_cache import DECODE_ATTENTION_NAME, SharedPrefixCache
from rloo_cli.policy.layout_support import why_not_shared
from rloo_cli.policy.model import head_on_positions
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.policy.vision import image_token_ids, media_arguments
from rloo_cli.utils.errors import RunError
from rloo_cli.utils.files import JsonObject

MAX_FLOAT32_ERROR = 1e-3  # nats: the largest error of a token's log-probability in float32
MAX_MEAN_ERROR = 0.05  # nats: the mean error per token in coarser dtypes
PROBE_PROMPT_TOKENS, PROBE_COMPLETION_TOKENS = 24, 4  # tokens that are compared


class SharedPrefix:
    """Prefills and decodes with our attention in place of the model's."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self.mismatch: str | None = None  # how the numbers differ; "" = they agree

    def why_not(self, sequences: list[DecodeSequence], max_completion_length: int) -> str | None:
        """Why these sequences, with up to `max_completion_length` more tokens each, cannot be
        decoded this way, or None. The model must be in eval mode, without gradient.
        """
        longest = max(len(s.prompt_ids) for s in sequences) + max_completion_length
        reason = why_not_shared(self.model, longest, training=False)
        if reason is None and self.mismatch is None:
            self.mismatch = self._compare_with_plain(sequences) or ""
        return reason or self.mismatch or None

    def decoding_attention(self) -> AbstractContextManager[None]:
        """A context in which our attention replaces the model's own."""
        return native_attention(self.model, DECODE_ATTENTION_NAME)

    def prefill(
        self, sequences: list[DecodeSequence], max_completion_length: int
    ) -> tuple[DecodeBatch, Tensor]:
        """Run each group's prompt once. Returns the whole batch and its logits (R, V)."""
        device = next(self.model.parameters()).device
        starts = group_starts(sequences)
        prompts = [sequences[i].prompt_ids for i in starts]
        lengths = [len(prompt) for prompt in prompts]
        counts = [b - a for a, b in zip(starts, [*starts[1:], len(sequences)], strict=True)]
        batch = DecodeBatch.from_sequences(sequences, max_completion_length, device)
        batch.cache = SharedPrefixCache(lengths, counts, max_completion_length, device)
        ids = torch.tensor([[i for prompt in prompts for i in prompt]], device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        shown: JsonObject = {}
        media = [sequences[i].media for i in starts]
        inputs = media_of_rows([*map(parts_of, media)], vision_of(media), ids.cpu())
        if inputs is not None:
            parts = [torch.arange(n) for n in lengths]
            axes = torch.cat(axis_positions(media, parts), 1)[:, None].to(device)
            positions = axes[0] if len(axes) == 1 else axes
            shown = media_arguments(self.model, inputs.move_to(device))
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        batch.cache.begin_forward(is_prefill=True)
        with head_on_positions(self.model.get_output_embeddings(), last):
            logits = self._run_model(batch.cache, ids, positions, **shown)
        group_of_sequence = torch.repeat_interleave(torch.tensor(counts, device=device))
        return batch, logits[group_of_sequence]

    def forward(self, batch: DecodeBatch, end: int) -> Tensor:
        """Run the token before position `end` of every sequence. Returns its logits (R, V)."""
        batch.cache.begin_forward(is_prefill=False)
        ids, positions = batch.input_ids[:, end - 1 : end], batch.position_ids(end - 1, end)
        return self._run_model(batch.cache, ids, positions)

    def _run_model(
        self, prefix_cache: SharedPrefixCache, input_ids: Tensor, position_ids: Tensor,
        **shown: object,
    ) -> Tensor:  # fmt: skip
        """(B, n), (B, n) -> (positions that the head sees, V)"""
        inputs = shown | {"input_ids": input_ids, "position_ids": position_ids}
        out = self.model(**inputs, use_cache=False, prefix_cache=prefix_cache)
        prefix_cache.end_forward(self.num_layers)
        logits: Tensor = out.logits
        return logits.reshape(-1, logits.shape[-1]).float()

    def _compare_with_plain(self, sequences: list[DecodeSequence]) -> str | None:
        """Compare forced tokens after two prompts with plain forwards of single sequences.

        There are three sequences, then two, so that siblings, padding and empty slots all occur.
        """
        special = image_token_ids(self.model.config)  # they need images, which probes lack
        first, last = (
            [i for i in sequence.prompt_ids if i not in special]
            for sequence in (sequences[0], sequences[-1])
        )
        first, last = first[:PROBE_PROMPT_TOKENS], last[: PROBE_PROMPT_TOKENS // 2]
        probes = []
        for group, prompt, offset in ((0, first, 0), (0, first, 1), (1, last, 0)):
            forced = (prompt * (PROBE_COMPLETION_TOKENS + 1))[offset:][:PROBE_COMPLETION_TOKENS]
            probes.append(DecodeSequence(group, prompt, 0, completion_ids=forced))
        try:
            with self.decoding_attention():
                logprobs = self._forced_logprobs(probes)
        except RunError:  # from a signal
            raise
        except Exception as error:  # a model may raise anything for unknown arguments
            return f"it fails with ours: {str(error).strip()[:200] or type(error).__name__}"
        off = torch.cat([(a - self._plain_logprobs(s)[: len(a)]).abs() for a, s in logprobs])
        value, limit = off.max().item(), MAX_FLOAT32_ERROR
        if next(self.model.parameters()).dtype not in (torch.float32, torch.float64):
            value, limit = off.mean().item(), MAX_MEAN_ERROR
        if value <= limit:  # false for NaN
            return None
        return f"log-probabilities differ by {value:.2g} from those of a plain forward"

    def _forced_logprobs(self, probes: list[DecodeSequence]) -> list[tuple[Tensor, DecodeSequence]]:
        """Log-probabilities of each probe's ids, computed as those of samples. [(T,), probe]"""
        batch, logits = self.prefill(probes, PROBE_COMPLETION_TOKENS)
        logp: dict[int, list[Tensor]] = {id(probe): [] for probe in probes}
        for t in range(PROBE_COMPLETION_TOKENS):
            for probe, token_logp in zip(batch.sequences, logits.log_softmax(-1), strict=True):
                logp[id(probe)].append(token_logp[probe.completion_ids[t]])
            if t == PROBE_COMPLETION_TOKENS - 1:
                break
            end = batch.prompt_width + t + 1
            batch.input_ids[:, end - 1] = torch.tensor(
                [p.completion_ids[t] for p in batch.sequences]
            )
            if t == PROBE_COMPLETION_TOKENS // 2:
                batch.keep_sequences([1, 2])
            logits = self.forward(batch, end)
        return [(torch.stack(logp[id(probe)]), probe) for probe in probes]

    def _plain_logprobs(self, sequence: DecodeSequence) -> Tensor:
        """The log-probabilities of the completion by a plain forward. -> (T,)"""
        device = next(self.model.parameters()).device
        ids = torch.tensor([sequence.prompt_ids + sequence.completion_ids], device=device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
        logp = logits.log_softmax(-1)[len(sequence.prompt_ids) - 1 : -1]
        return logp.gather(-1, ids[0, len(sequence.prompt_ids) :, None]).squeeze(-1)
