"""From logits to a token: transformers' own processors in its own order, then the inverse CDF.

Randomness is one uniform number per token, drawn in advance from the completion's own generator on
the CPU. So a completion depends only on its seed: not on the batch, its neighbours, the rank, the
device's generator or a restart; and torch's global generator is left untouched.
"""

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from rloo_cli.config.schema import GenerationConfig
from rloo_cli.utils.files import JsonObject


def seeded_uniforms(seeds: list[int], length: int) -> Tensor:
    """Numbers in [0, 1), row i from seed i, in float64 on the CPU. -> (R, length)

    torch's CPU generator reads only the low 32 bits of a seed: about ten pairs of completions in a
    run of 300,000 share their numbers, and one pair in 8,000 steps of 1,024. This stays, since a
    change would give other completions for every published seed and for
    every resumed run.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(length, dtype=torch.float64, generator=g) for g in generators])


def logits_processors(
    config: GenerationConfig,
    stop_ids: set[int],
    prompt_width: int,
    greedy: bool,
    device: torch.device | str = "cpu",
) -> LogitsProcessorList:
    """The processors of the logits, called as `processors(ids, logits)`.

    `ids` (R, prompt_width + t) holds all ids so far. The repetition penalty counts all of
    them, so padding must repeat an id of the completion's own prompt. `greedy` leaves out
    temperature and filters.
    """
    chosen = LogitsProcessorList()
    if config.repetition_penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(float(config.repetition_penalty)))
    if config.min_tokens and stop_ids:
        banned = torch.tensor(sorted(stop_ids), device=device)
        chosen.append(MinNewTokensLengthLogitsProcessor(prompt_width, config.min_tokens, banned))
    chosen.extend(_bans_and_biases(config.kwargs, device))
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
    chosen.extend(_cutoffs(config.kwargs, device))
    return chosen


def _bans_and_biases(kwargs: JsonObject, device: torch.device | str) -> list[LogitsProcessor]:
    """The processors of generation.kwargs that also apply to greedy answers."""
    made: list[LogitsProcessor] = []
    if "sequence_bias" in kwargs:
        made.append(SequenceBiasLogitsProcessor(kwargs["sequence_bias"]))
    if "bad_words_ids" in kwargs:
        made.append(NoBadWordsLogitsProcessor(kwargs["bad_words_ids"]))
    if "suppress_tokens" in kwargs:
        made.append(SuppressTokensLogitsProcessor(kwargs["suppress_tokens"], str(device)))
    return made


def _cutoffs(kwargs: JsonObject, device: torch.device | str) -> list[LogitsProcessor]:
    """The filters of generation.kwargs, in transformers' order."""
    made: list[LogitsProcessor] = []
    if "typical_p" in kwargs:
        made.append(TypicalLogitsWarper(float(kwargs["typical_p"])))
    if "epsilon_cutoff" in kwargs:
        made.append(EpsilonLogitsWarper(float(kwargs["epsilon_cutoff"])))
    if "eta_cutoff" in kwargs:
        made.append(EtaLogitsWarper(float(kwargs["eta_cutoff"]), device=str(device)))
    return made


def allowed_ids(scores: Tensor) -> tuple[list[int], list[int]]:
    """The ids that the processors keep, row after row, and how many each row has. (R, V)"""
    allowed = scores > -torch.inf
    return allowed.nonzero()[:, 1].tolist(), allowed.sum(-1).tolist()


CDF_BLOCK = 64  # ids per block: first a block is found, then an id in it


def sample_tokens(scores: Tensor, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """The token whose CDF interval contains `uniform` (R,), or the most likely one if it is None.

    Returns the tokens and their log-probabilities under softmax(scores). Ties go to the lowest
    id. A log-probability is not finite where the scores were not.
    (R, V), (R,) -> (R,) long, (R,) float32
    """
    # Each probability is float32, their sums are float64: in float32 a running sum over 150k tokens
    # has an error larger than the probability of rare ones.
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
        beyond = ids >= p.shape[-1]  # the last block may have fewer ids
        within = p.gather(-1, ids.clamp(max=p.shape[-1] - 1)).double().masked_fill(beyond, 0.0)
        before = cdf.gather(-1, block) - sums.gather(-1, block)
        inner = _cdf(within)
        # Summed in another order, a block may be a rounding smaller: its last id is still in it.
        most = inner.amax(-1, keepdim=True)
        below = torch.nextafter(most, torch.zeros_like(most))
        hit = inner > (threshold[:, None] - before).minimum(below)
        tokens = ids.gather(-1, hit.to(torch.uint8).argmax(-1, keepdim=True)).squeeze(-1)
    # log(sum of exp(scores - their largest)), from p: its float32 rounding is the same in every p.
    total = sums.sum(-1).log() - p.amax(-1).double().log()
    chosen = scores.gather(-1, tokens[:, None]).squeeze(-1).double()
    return tokens, (chosen - scores.amax(-1) - total).float()


def _block_sums(p: Tensor) -> Tensor:
    """Sums over blocks of CDF_BLOCK ids; the last may have fewer. (R, V) -> (R, blocks) float64"""
    whole = p.shape[-1] // CDF_BLOCK * CDF_BLOCK
    sums = p[:, :whole].unflatten(-1, (-1, CDF_BLOCK)).sum(-1, dtype=torch.float64)
    if whole == p.shape[-1]:
        return sums
    return torch.cat([sums, p[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], -1)


def _cdf(p: Tensor) -> Tensor:
    """Running sum, and 0 where p is 0. (R, n) -> (R, n)

    A GPU adds in blocks, so its running sum may vary by a rounding where p is 0. A banned id has a
    CDF of 0, so it is never above a threshold, and never has the largest CDF.
    """
    return p.cumsum(-1).masked_fill_(p == 0, 0.0)
