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

from rloo_cli.config.schema import GenerationConfig


def seeded_uniforms(seeds: list[int], length: int) -> Tensor:
    """Numbers in [0, 1), row i from seed i, in float64 on the CPU. -> (R, length)

    torch's CPU generator reads the low 32 bits of a seed and no more: two completions of a run of
    300,000 share their numbers about ten times, two of one step of 1,024 once in 8,000 steps. It
    stays so, since other numbers would be other completions for every seed that was ever published
    and for every run that is resumed.
    """
    rows = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(length, dtype=torch.float64, generator=g) for g in rows])


def logits_processors(
    config: GenerationConfig,
    stop_ids: set[int],
    prompt_width: int,
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
    if config.min_tokens and stop_ids:
        banned = torch.tensor(sorted(stop_ids), device=device)
        chosen.append(MinNewTokensLengthLogitsProcessor(prompt_width, config.min_tokens, banned))
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


CDF_BLOCK = 64  # ids whose probabilities are added up before one of them is looked for


def sample_tokens(scores: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token whose stretch of the CDF holds `uniform` (R,), or the likeliest if it is None.

    Returns the tokens and their log-probabilities under softmax(scores). Ties go to the lowest
    id. A log-probability that is not finite says that the scores were not.
    (R, V), (R,) -> (R,) long, (R,) float32
    """
    # Each probability in float32, their sums in float64: in float32 a running sum over 150k tokens
    # is off by more than the rare ones weigh.
    p = scores.softmax(-1, dtype=torch.float32)
    sums = _block_sums(p)
    if uniform is None:
        tokens = scores.argmax(-1)
    else:
        # Which block, then which id in it: a CDF over all ids would be the largest tensor here.
        cdf = _cdf(sums)
        threshold = uniform * cdf.amax(-1)
        block = (cdf > threshold[:, None]).to(torch.uint8).argmax(-1, keepdim=True)
        ids = block * CDF_BLOCK + torch.arange(CDF_BLOCK, device=p.device)
        beyond = ids >= p.shape[-1]  # of the last block
        within = p.gather(-1, ids.clamp(max=p.shape[-1] - 1)).double().masked_fill(beyond, 0.0)
        before = cdf.gather(-1, block) - sums.gather(-1, block)
        inner = _cdf(within)
        # Added in another order, a block may come to a rounding less: its last id is in it still.
        most = inner.amax(-1, keepdim=True)
        below = torch.nextafter(most, torch.zeros_like(most))
        hit = inner > (threshold[:, None] - before).minimum(below)
        tokens = ids.gather(-1, hit.to(torch.uint8).argmax(-1, keepdim=True)).squeeze(-1)
    # log(sum of exp) of the scores less their largest: p holds it, but for a rounding in float32
    # that is the same in every p.
    total = sums.sum(-1).log() - p.amax(-1).double().log()
    chosen = scores.gather(-1, tokens[:, None]).squeeze(-1).double()
    return tokens, (chosen - scores.amax(-1) - total).float()


def _block_sums(p: Tensor) -> Tensor:
    """Sums of BLOCK neighbours; the last may have fewer. (R, V) -> (R, blocks) float64"""
    whole = p.shape[-1] // CDF_BLOCK * CDF_BLOCK
    sums = p[:, :whole].unflatten(-1, (-1, CDF_BLOCK)).sum(-1, dtype=torch.float64)
    if whole == p.shape[-1]:
        return sums
    return torch.cat([sums, p[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], -1)


def _cdf(p: Tensor) -> Tensor:
    """Running sum, and 0 where p is 0.

    A GPU adds in blocks, so its running sum may wobble by a rounding where p is 0. What is banned
    keeps a CDF of 0 and is never above a threshold; the largest CDF is not its own. (R, n) both
    """
    return p.cumsum(-1).masked_fill_(p == 0, 0.0)
