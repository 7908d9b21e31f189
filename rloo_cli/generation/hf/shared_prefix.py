"""Decoding with each prompt's keys and values computed, stored and read once per group.

All prompts of a batch are one row without padding, in which positions restart; then each row adds
a token at a time (`kept`). Only for models whose attention may be replaced: `why_not` says, from
the config, and then from numbers, the first time.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rloo_cli.generation.hf.decode_batch import DecodeBatch, DecodeSequence, group_starts
from rloo_cli.generation.hf.kv_cache import DECODE_ATTENTION_NAME, SharedPrefixCache
from rloo_cli.policy.layout_support import why_not_shared
from rloo_cli.policy.model import head_on_positions
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.utils.errors import RunError

MAX_FLOAT32_ERROR, MAX_MEAN_ERROR = (
    1e-3,
    0.05,
)  # nats per token: the most in float32, the mean in what is coarser
PROBE_PROMPT_TOKENS, PROBE_COMPLETION_TOKENS = (
    24,
    4,
)  # tokens of a prompt, and of a completion, that are compared


class SharedPrefix:
    """The way of a model whose attention may be ours: prefill, then a token at a time."""

    def __init__(self, model: Any):
        self.model = model
        self.num_layers = model.config.get_text_config().num_hidden_layers
        self.mismatch: str | None = None  # why the numbers speak against it; "" = they do not

    def why_not(self, sequences: list[DecodeSequence], max_completion_length: int) -> str | None:
        """Why these rows, with up to `length` tokens each, cannot be decoded this way, or None.

        The model is in eval mode, without gradient.
        """
        longest = max(len(row.prompt_ids) for row in sequences) + max_completion_length
        reason = why_not_shared(self.model, longest, training=False)
        if reason is None and self.mismatch is None:
            self.mismatch = self._compare_with_plain(sequences) or ""
        return reason or self.mismatch or None

    def decoding_attention(self) -> AbstractContextManager[None]:
        """Our attention in place of the model's own, which is back afterwards."""
        return native_attention(self.model, DECODE_ATTENTION_NAME)

    def prefill(
        self, sequences: list[DecodeSequence], max_completion_length: int
    ) -> tuple[DecodeBatch, Tensor]:
        """Run each group's prompt once. Returns the state of all rows and the logits (R, V)."""
        device = next(self.model.parameters()).device
        starts = group_starts(sequences)
        prompts = [sequences[r].prompt_ids for r in starts]
        lengths = [len(prompt) for prompt in prompts]
        counts = [b - a for a, b in zip(starts, [*starts[1:], len(sequences)], strict=True)]
        state = DecodeBatch.from_sequences(sequences, max_completion_length, device)
        state.cache = SharedPrefixCache(lengths, counts, max_completion_length, device)
        ids = torch.tensor([[i for prompt in prompts for i in prompt]], device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        state.cache.begin_forward(is_prefill=True)
        with head_on_positions(self.model.get_output_embeddings(), last):
            logits = self._run_model(state.cache, ids, positions)
        owner = torch.repeat_interleave(torch.tensor(counts, device=device))
        return state, logits[owner]

    def forward(self, batch: DecodeBatch, end: int) -> Tensor:
        """Run the token before place `end` of every row. Returns its logits (R, V)."""
        batch.cache.begin_forward(is_prefill=False)
        return self._run_model(
            batch.cache, batch.input_ids[:, end - 1 : end], batch.position_ids(end - 1, end)
        )

    def _run_model(
        self, prefix_cache: SharedPrefixCache, input_ids: Tensor, position_ids: Tensor
    ) -> Tensor:
        """(B, n) twice -> (rows that the head sees, V)"""
        out = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            prefix_cache=prefix_cache,
        )
        prefix_cache.end_forward(self.num_layers)
        logits: Tensor = out.logits
        return logits.reshape(-1, logits.shape[-1]).float()

    def _compare_with_plain(self, sequences: list[DecodeSequence]) -> str | None:
        """Forced tokens after two prompts, ours against plain forwards of single rows.

        Three rows, then two, so that siblings, padding and slots without a row all occur.
        """
        prompts = [
            sequences[0].prompt_ids[:PROBE_PROMPT_TOKENS],
            sequences[-1].prompt_ids[: PROBE_PROMPT_TOKENS // 2],
        ]
        forced = [
            (p * (PROBE_COMPLETION_TOKENS + 1))[k : k + PROBE_COMPLETION_TOKENS]
            for p in prompts
            for k in range(2)
        ]
        probes = [
            DecodeSequence(g // 2, prompts[g // 2], 0, completion_ids=forced[g]) for g in range(3)
        ]
        try:
            with self.decoding_attention():
                found = self._forced_logprobs(probes)
        except RunError:  # a signal's, which came meanwhile
            raise
        except Exception as error:  # whatever a model's code makes of arguments it does not know
            return f"it cannot be run so: {str(error).strip()[:200] or type(error).__name__}"
        off = torch.cat([(a - self._plain_logprobs(row)[: len(a)]).abs() for a, row in found])
        exact = next(self.model.parameters()).dtype in (torch.float32, torch.float64)
        value, limit = (
            (off.max().item(), MAX_FLOAT32_ERROR) if exact else (off.mean().item(), MAX_MEAN_ERROR)
        )
        if value <= limit:  # not so for NaN
            return None
        return f"log-probabilities differ by {value:.2g} from those of a plain forward"

    def _forced_logprobs(self, probes: list[DecodeSequence]) -> list[tuple[Tensor, DecodeSequence]]:
        """Log-probabilities of each probe's ids, the way samples get them. [(T,), row]"""
        state, logits = self.prefill(probes, PROBE_COMPLETION_TOKENS)
        logp: dict[int, list[Tensor]] = {id(row): [] for row in probes}
        for t in range(PROBE_COMPLETION_TOKENS):
            for row, line in zip(state.sequences, logits.log_softmax(-1), strict=True):
                logp[id(row)].append(line[row.completion_ids[t]])
            if t == PROBE_COMPLETION_TOKENS - 1:
                break
            end = state.prompt_width + t + 1
            state.input_ids[:, end - 1] = torch.tensor(
                [row.completion_ids[t] for row in state.sequences]
            )
            if t == PROBE_COMPLETION_TOKENS // 2:
                state.keep_sequences([1, 2])
            logits = self.forward(state, end)
        return [(torch.stack(logp[id(row)]), row) for row in probes]

    def _plain_logprobs(self, sequence: DecodeSequence) -> Tensor:
        """The textbook, for as many tokens as the row's probe got. -> (T,)"""
        ids = torch.tensor(
            [sequence.prompt_ids + sequence.completion_ids],
            device=next(self.model.parameters()).device,
        )
        logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
        logp = logits.log_softmax(-1)[len(sequence.prompt_ids) - 1 : -1]
        return logp.gather(-1, ids[0, len(sequence.prompt_ids) :, None]).squeeze(-1)
