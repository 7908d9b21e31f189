"""Decoding with each prompt's keys and values computed, stored and read once per group.

All prompts of a batch are one row without padding, in which positions restart; then each row adds
a token at a time (`kept`). Only for models whose attention may be replaced: `why_not` says, from
the config, and then from numbers, the first time.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from rloo_cli.generation.hf.decode_batch import Row, State, firsts
from rloo_cli.generation.hf.kv_cache import NAME, Kept
from rloo_cli.policy.layout_support import why_not_shared
from rloo_cli.policy.model import picked
from rloo_cli.policy.shared_attention import native
from rloo_cli.utils.errors import RunError

MOST, MEAN = 1e-3, 0.05  # nats per token: the most in float32, the mean in what is coarser
PROBE, FORCED = 24, 4  # tokens of a prompt, and of a completion, that are compared


class Shared:
    """The way of a model whose attention may be ours: prefill, then a token at a time."""

    def __init__(self, model: Any):
        self.model = model
        self.layers = model.config.get_text_config().num_hidden_layers
        self.checked: str | None = None  # why the numbers speak against it; "" = they do not

    def why_not(self, rows: list[Row], length: int) -> str | None:
        """Why these rows, with up to `length` tokens each, cannot be decoded this way, or None.

        The model is in eval mode, without gradient.
        """
        longest = max(len(row.prompt) for row in rows) + length
        reason = why_not_shared(self.model, longest, training=False)
        if reason is None and self.checked is None:
            self.checked = self._compare(rows) or ""
        return reason or self.checked or None

    def holding(self) -> AbstractContextManager[None]:
        """Our attention in place of the model's own, which is back afterwards."""
        return native(self.model, NAME)

    def prefill(self, rows: list[Row], length: int) -> tuple[State, Tensor]:
        """Run each group's prompt once. Returns the state of all rows and the logits (R, V)."""
        device = next(self.model.parameters()).device
        starts = firsts(rows)
        prompts = [rows[r].prompt for r in starts]
        lengths = [len(prompt) for prompt in prompts]
        counts = [b - a for a, b in zip(starts, [*starts[1:], len(rows)], strict=True)]
        state = State.of(rows, length, device)
        state.cache = Kept(lengths, counts, length, device)
        ids = torch.tensor([[i for prompt in prompts for i in prompt]], device=device)
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
        last = torch.tensor(lengths, device=device).cumsum(0) - 1
        state.cache.start(prompts=True)
        with picked(self.model.get_output_embeddings(), last):
            logits = self._run(state.cache, ids, positions)
        owner = torch.repeat_interleave(torch.tensor(counts, device=device))
        return state, logits[owner]

    def forward(self, state: State, end: int) -> Tensor:
        """Run the token before place `end` of every row. Returns its logits (R, V)."""
        state.cache.start(prompts=False)
        return self._run(state.cache, state.seen[:, end - 1 : end], state.positions(end - 1, end))

    def _run(self, kept: Kept, ids: Tensor, positions: Tensor) -> Tensor:
        """(B, n) twice -> (rows that the head sees, V)"""
        out = self.model(input_ids=ids, position_ids=positions, use_cache=False, kept=kept)
        kept.end(self.layers)
        logits: Tensor = out.logits
        return logits.reshape(-1, logits.shape[-1]).float()

    def _compare(self, rows: list[Row]) -> str | None:
        """Forced tokens after two prompts, ours against plain forwards of single rows.

        Three rows, then two, so that siblings, padding and slots without a row all occur.
        """
        prompts = [rows[0].prompt[:PROBE], rows[-1].prompt[: PROBE // 2]]
        forced = [(p * (FORCED + 1))[k : k + FORCED] for p in prompts for k in range(2)]
        probes = [Row(g // 2, prompts[g // 2], 0, ids=forced[g]) for g in range(3)]
        try:
            with self.holding():
                found = self._forced(probes)
        except RunError:  # a signal's, which came meanwhile
            raise
        except Exception as error:  # whatever a model's code makes of arguments it does not know
            return f"it cannot be run so: {str(error).strip()[:200] or type(error).__name__}"
        off = torch.cat([(a - self._alone(row)[: len(a)]).abs() for a, row in found])
        exact = next(self.model.parameters()).dtype in (torch.float32, torch.float64)
        value, limit = (off.max().item(), MOST) if exact else (off.mean().item(), MEAN)
        if value <= limit:  # not so for NaN
            return None
        return f"log-probabilities differ by {value:.2g} from those of a plain forward"

    def _forced(self, probes: list[Row]) -> list[tuple[Tensor, Row]]:
        """Log-probabilities of each probe's ids, the way samples get them. [(T,), row]"""
        state, logits = self.prefill(probes, FORCED)
        logp: dict[int, list[Tensor]] = {id(row): [] for row in probes}
        for t in range(FORCED):
            for row, line in zip(state.rows, logits.log_softmax(-1), strict=True):
                logp[id(row)].append(line[row.ids[t]])
            if t == FORCED - 1:
                break
            end = state.width + t + 1
            state.seen[:, end - 1] = torch.tensor([row.ids[t] for row in state.rows])
            if t == FORCED // 2:
                state.keep([1, 2])
            logits = self.forward(state, end)
        return [(torch.stack(logp[id(row)]), row) for row in probes]

    def _alone(self, row: Row) -> Tensor:
        """The textbook, for as many tokens as the row's probe got. -> (T,)"""
        ids = torch.tensor([row.prompt + row.ids], device=next(self.model.parameters()).device)
        logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
        logp = logits.log_softmax(-1)[len(row.prompt) - 1 : -1]
        return logp.gather(-1, ids[0, len(row.prompt) :, None]).squeeze(-1)
