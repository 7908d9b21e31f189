"""From logits to a token: transformers' own processors in its own order, then the inverse CDF.

Randomness is one uniform number per token, drawn up front from the completion's own generator on
the CPU. So a completion depends on its seed alone: not on the batch, its neighbours, the rank, the
device's generator or a restart; and torch's global generator is left as it was.
"""

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rloo_cli.schema import GenerationConfig


def uniforms(seeds: list[int], length: int) -> Tensor:
    """Numbers in [0, 1), row i from seed i, in float64 on the CPU. -> (R, length)"""
    rows = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(length, dtype=torch.float64, generator=g) for g in rows])


def processors(
    config: GenerationConfig,
    stop: set[int],
    width: int,
    greedy: bool,
    device: torch.device | str = "cpu",
) -> LogitsProcessorList:
    """What changes the logits, called as `processors(seen, logits)`.

    `seen` (R, width + t) holds all ids so far. The repetition penalty looks at every one of them,
    so places that are padding must repeat an id of the row's own prompt. `greedy` leaves out
    temperature and filters.
    """
    chosen = LogitsProcessorList()
    if config.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
    if config.min_tokens and stop:
        banned = torch.tensor(sorted(stop), device=device)
        chosen.append(MinNewTokensLengthLogitsProcessor(width, config.min_tokens, banned))
    if greedy:
        return chosen
    if config.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(float(config.temperature)))
    if config.top_k:
        chosen.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1.0:
        chosen.append(TopPLogitsWarper(float(config.top_p)))
    if config.min_p is not None:
        chosen.append(MinPLogitsWarper(float(config.min_p)))
    return chosen


def pick(scores: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token whose stretch of the CDF holds `uniform` (R,), or the likeliest if it is None.

    Returns the tokens and their log-probabilities under softmax(scores). Ties go to the lowest
    id. A log-probability that is not finite says that the scores were not.
    (R, V), (R,) -> (R,) long, (R,) float32
    """
    # float64: in float32 the running sum over 150k tokens is off by more than the rare ones weigh
    logp = torch.log_softmax(scores.double(), dim=-1)
    if uniform is None:
        tokens = scores.argmax(-1)
    else:
        p = logp.exp()
        # A GPU adds in blocks, so its running sum may wobble by a rounding where p is 0. A banned
        # token keeps a CDF of 0 and is never above the threshold; the largest CDF is not its own.
        cdf = p.cumsum(-1).masked_fill(p == 0, 0.0)
        threshold = uniform * cdf.amax(-1)
        tokens = (cdf > threshold[:, None]).to(torch.uint8).argmax(-1)
    return tokens, logp.gather(-1, tokens[:, None]).squeeze(-1).float()
