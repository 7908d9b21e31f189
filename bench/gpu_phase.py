"""Rows of `gpu.py` about the train phase: TRL's order of work beside ours, on the same batch.

A train phase is what follows once completions are scored: TRL's order of work is a pass for the old
log-probabilities, one for the reference's, forward and backward; `rloo` has no pass of the first
kind. The optimizer is left out: it is the same in both. Each variant is alone on the device. First
the gradients of a few groups are compared with a float32 one and with TRL's autocast; then the
variants take turns, and a turn is a phase that does not count and one that does. Micro-batches hold
up to `tokens` token positions in every variant, and half as many each time memory is full.
"""

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from gpu_kernels import add_gradients_in_float32
from gpu_models import (
    SEED,
    Facts,
    SampledBatch,
    attach_random_adapter,
    data_sheet_flops,
    draw_batch,
    product_flops,
    random_model,
    release_memory,
    sized_shape,
    verdict_of,
)
from shapes import SHAPES, Shape
from sides import BETA
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from rloo_cli.config.schema import LoraConfig
from rloo_cli.data import segments
from rloo_cli.data.bin_packing import ForwardCost
from rloo_cli.data.packing import whole_group_slices
from rloo_cli.policy import layouts, lora
from rloo_cli.policy.memory import model_forward_cost
from rloo_cli.policy.model import Policy
from rloo_cli.policy.reference import AdapterReference, Reference
from rloo_cli.utils.device_waits import wait_for_device

try:
    from trl.trainer.utils import add_fused_lm_head
except ImportError:  # then `logp_in_chunks` is what it does, without its kernels
    add_fused_lm_head = None
try:
    from liger_kernel.transformers import monkey_patch as liger
except ImportError:
    liger = None

CLIP, CHUNK = 0.2, 4096  # CHUNK: rows of logits at once
NOISE = 0.5  # between policy and reference, times the weights' mean size
KEEP = 2_000_000_000  # bytes of logits that may be kept, the package's default
BASE, TRUTH = "trl", "float32"
# Relative distance of gradients from TRL's beyond which a variant is refuted. bfloat16 rounds to
# .004, and a gradient is a small difference of large sums; float32 proves that layouts are equal.
MATCH = {"float32": 1e-4, "bfloat16": 0.1}
# From the float32 gradient: times as far as TRL's autocast, plus. bfloat16 weights round between
# layers too, autocast does not: 1.4 to 2 times as far on a CPU.
FARTHER = {"float32": (1.0, 1e-4), "bfloat16": (2.0, 0.02)}


@dataclass(frozen=True)
class Variant:
    """One way to compute the same gradient."""

    name: str
    layout: str
    checkpointing: bool
    keep: int = 0  # bytes of the head's logits kept for backward
    half: bool = False  # bfloat16 weights on a GPU; else float32 ones, under autocast for TRL
    liger: bool = False

    @property
    def is_trl(self) -> bool:
        """Whether it is TRL's order of work."""
        return self.layout == "padded"


VARIANTS = {variant.name: variant for variant in (
    Variant(TRUTH, "padded", True),
    Variant(BASE, "padded", True),
    Variant("trl_best", "padded", False, half=True, liger=True),
    Variant("packed", "packed", False, KEEP, half=True),
    Variant("shared_recomputed", "shared", True, half=True),
    Variant("shared", "shared", False, KEEP, half=True),
)}  # fmt: skip


def leave_one_out(score: Tensor, kl: Tensor) -> Tensor:
    """Advantages of rewards over their siblings' mean. (P, K), (P, K) -> (P, K)"""
    reward = score - BETA * kl
    k = reward.shape[1]
    return (reward - reward.mean(1, keepdim=True)) * k / (k - 1)


def clipped_loss(log_ratio: Tensor, advantage: Tensor, count: int) -> Tensor:
    """RLOO's clipped loss over completions, a share of `count`. (S,), (S,) -> ()"""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.min(ratio * advantage, clipped * advantage).sum() / count


class Phase:
    """A policy and a reference on the device, and a train phase over a batch."""

    def __init__(self, variant: Variant, shape: Shape, device: torch.device):
        self.variant, self.shape, self.device = variant, shape, device
        self.model: Any = None
        self.level = "padded"

    def prepare(self, model: Any, frozen: Any) -> None:
        """Put the models in their modes. `frozen`: None under an adapter."""
        self.model = model.train()
        if frozen is not None:
            frozen.eval().requires_grad_(False)
        if self.variant.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def run(self, batch: SampledBatch, tokens: int) -> Tensor:
        """Leave the gradient of a batch in the model. -> (B,) log p of whole completions"""
        raise NotImplementedError


class TrlPhase(Phase):
    """TRL 1.16's order of work: `_get_per_token_logps_and_entropies` and `_compute_loss`."""

    def __init__(self, variant: Variant, shape: Shape, device: torch.device):
        super().__init__(variant, shape, device)
        gpu = device.type == "cuda"
        self.autocast = gpu and variant.name != TRUTH
        dtype = torch.bfloat16 if gpu and variant.half else torch.float32
        model = random_model(shape, device, dtype)
        self.frozen = None if shape.lora else random_model(shape, device, dtype, NOISE)
        if shape.lora:
            attach_random_adapter(model, shape)
        self.layers = lora.adapter_layers(model) if shape.lora else []
        self.prepare(model, self.frozen)
        if variant.liger and gpu and has_liger_kernel(model):
            self.level = "padded, liger-kernel"
            for each in (model, self.frozen):
                if each is not None:
                    liger._apply_liger_kernel_to_instance(each, fused_linear_cross_entropy=False)
        if add_fused_lm_head is not None:
            add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
            if self.frozen is not None:
                add_fused_lm_head(self.frozen, temperature=1.0)

    def reference_logp(self, rows: slice) -> Tensor:
        """By the frozen model, or by the policy without its adapter. -> (b, c)"""
        if self.frozen is not None:
            return self.logp(self.frozen, rows)
        with lora.use_adapter(self.layers, None):
            return self.logp(self.model, rows)

    def pad(self, batch: SampledBatch) -> None:
        """The whole batch once: prompts on the left, completions on the right. (B, p), (B, c)"""
        pairs = [(g.prompt_ids, r.completion_ids) for g in batch.groups for r in g.rollouts]
        left = pad_sequence([torch.tensor(p) for p, _ in pairs], True, -1, "left")
        right = pad_sequence([torch.tensor(c) for _, c in pairs], True, -1, "right")
        rows = torch.cat([left, right], 1).to(self.device)
        self.mask, self.ids = (rows >= 0).long(), rows.clamp(min=0)
        self.keep = right.shape[1]

    def logp(self, model: Any, rows: slice) -> Tensor:
        """Log-probabilities of the completions' tokens, 0 on padding. -> (b, c)"""
        ids, mask = self.ids[rows], self.mask[rows]
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : -self.keep] = -100
        half = torch.autocast(self.device.type, torch.bfloat16)
        with half if self.autocast else nullcontext():
            if add_fused_lm_head is None:
                return logp_in_chunks(model, ids, mask, labels)[:, -self.keep :]
            found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return found.log_probs[:, -self.keep :]

    def run(self, batch: SampledBatch, tokens: int) -> Tensor:
        score = batch.score.to(self.device)
        with compact_head():
            self.pad(batch)
            size = max(1, tokens // self.ids.shape[1])
            spans = [slice(i, i + size) for i in range(0, len(self.ids), size)]
            with torch.no_grad():
                old = torch.cat([self.logp(self.model, rows) for rows in spans])
                ref = torch.cat([self.reference_logp(rows) for rows in spans])
            kl, old = (old - ref).sum(1), old.sum(1)
            value = leave_one_out(score, kl.view_as(score)).flatten()
            found = []
            for rows in spans:
                logp = self.logp(self.model, rows).sum(1)
                clipped_loss(logp - old[rows], value[rows], score.numel()).backward()
                found.append(logp.detach())
        return torch.cat(found)


class RlooPhase(Phase):
    """`rloo`: whole groups in a layout, no old pass."""

    def __init__(self, variant: Variant, shape: Shape, device: torch.device):
        super().__init__(variant, shape, device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.policy = Policy(random_model(shape, device, dtype), 1.0)
        keys = attach_random_adapter(self.policy.model, shape) if shape.lora else None
        self.prepare(self.policy.model, None)
        longest = shape.prompt[1] + shape.completion[1]
        self.level = str(layouts.choose_policy_layout(self.policy, variant.layout, longest))
        self.frozen = self.build_reference(dtype, keys, longest)
        self.policy.logprob_module.keep_logits_bytes = variant.keep
        trained = [w for w in self.model.parameters() if w.requires_grad]
        self.masters = [w.detach().float() for w in trained if w.dtype != torch.float32]
        add_gradients_in_float32(self.model)

    def build_reference(
        self, dtype: torch.dtype, keys: LoraConfig | None, longest: int
    ) -> Reference:
        """A model of its own, or the policy without its adapter."""
        if keys is not None:
            sync = SimpleNamespace(every=0)
            given: Any = SimpleNamespace(lora=keys, ref_sync=sync, ref_path=None)
            adapted: Reference = AdapterReference(self.policy, 1.0, given, SEED)
            layouts.copy_layout(adapted, self.policy)
            return adapted
        found = Reference(random_model(self.shape, self.device, dtype, NOISE), 1.0)
        layouts.choose_policy_layout(found, self.variant.layout, longest)
        return found

    def micro_batches(self, batch: SampledBatch, tokens: int) -> list[range]:
        """The groups of each micro-batch: one, and more while their token positions fit."""
        spans, start, held = [], 0, 0
        for number, (prompt, completions) in enumerate(batch.lengths):
            prompts = 1 if self.variant.layout == "shared" else len(completions)
            positions = prompts * prompt + sum(completions)
            if held and held + positions > tokens:
                spans.append(range(start, number))
                start, held = number, 0
            held += positions
        return [*spans, range(start, len(batch.groups))]

    def run(self, batch: SampledBatch, tokens: int) -> Tensor:
        scores, found = batch.score.to(self.device), []
        for index in self.micro_batches(batch, tokens):
            micro = self.policy.pack(batch.groups, whole_group_slices(batch.groups, index))
            ref = self.frozen.frozen_logp(micro).logp
            logp = self.policy.logp(micro).logp
            gap = logp.detach() - ref
            score = scores[index.start : index.stop]
            kl, of_row, whole = (
                segments.segment_sum(x, micro.sequence_ids, micro.num_sequences)
                for x in (gap, logp - logp.detach(), logp.detach())
            )
            value = leave_one_out(score, kl.view_as(score)).flatten()
            clipped_loss(of_row, value, scores.numel()).backward()
            found.append(whole)
        return torch.cat(found)


def has_liger_kernel(model: Any) -> bool:
    """Whether liger-kernel is installed and knows the model's architecture."""
    return liger is not None and model.config.model_type in liger.MODEL_TYPE_TO_APPLY_LIGER_FN


@contextmanager
def compact_head() -> Iterator[None]:
    """TRL's head on the completions' rows alone, as on a GPU: on a CPU it would compute all."""
    if add_fused_lm_head is None:
        yield
        return
    with mock.patch("trl.trainer.utils._use_triton", lambda device: True):
        yield


def logp_in_chunks(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Without TRL: log_softmax over chunks, recomputed in backward. (b, T) each -> (b, T)"""
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0][:, :-1]
    wanted, target = labels[:, 1:] != -100, labels[:, 1:]
    head = model.get_output_embeddings()

    def some(rows: Tensor, words: Tensor) -> Tensor:
        return head(rows).float().log_softmax(-1).gather(1, words[:, None]).squeeze(1)

    pairs = zip(hidden[wanted].split(CHUNK), target[wanted].split(CHUNK), strict=True)
    found = torch.cat([checkpoint(some, rows, words, use_reentrant=False) for rows, words in pairs])
    return found.new_zeros(wanted.shape).masked_scatter(wanted, found)


@dataclass
class Measured:
    """What is known of one variant."""

    variant: Variant
    tokens: int  # positions of a micro-batch; 0 = not even the smallest fits
    level: str = ""
    cost: ForwardCost | None = None
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0  # of a phase, with weights, gradients and reference
    off_trl: float | None = None  # relative distance of the gradient
    off_float32: float | None = None
    logp: Tensor | None = None  # (B,)


class PhaseBench:
    """One workload: its batch, its variants, and what they took."""

    def __init__(self, shape: Shape, names: list[str], device: torch.device, tokens: int):
        self.shape, self.device, self.batch = shape, device, draw_batch(shape)
        self.found = {name: Measured(VARIANTS[name], tokens) for name in names}

    def build(self, found: Measured) -> Phase:
        """A variant's models, alone on the device."""
        release_memory()
        kind = TrlPhase if found.variant.is_trl else RlooPhase
        return kind(found.variant, self.shape, self.device)

    def run_phase(self, phase: Phase, found: Measured, batch: SampledBatch) -> bool:
        """Run a phase, with half the tokens each time memory is full. -> whether it fits"""
        smallest = (self.shape.prompt[1] + self.shape.completion[1]) // 2
        while found.tokens >= smallest:
            try:
                found.logp = phase.run(batch, found.tokens).float().cpu()
                return True
            except torch.OutOfMemoryError:
                found.tokens //= 2
                found.seconds.clear()
            drop_gradients(phase.model)  # outside: the error holds on to what did not fit
            release_memory()
        found.tokens = 0
        return False

    def compare_gradients(self, groups: int) -> None:
        """The gradient of the first groups by every variant: float32 and TRL's come first."""
        batch, known = self.batch.first_groups(groups), {}
        for name in sorted(self.found, key=lambda name: (name != TRUTH, name != BASE)):
            gradient = self.compare_gradient(self.found[name], batch, known)
            if name in (BASE, TRUTH) and gradient:
                known[name] = gradient

    def compare_gradient(
        self, found: Measured, batch: SampledBatch, known: dict[str, dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Note how far a variant's gradient is from those known. -> it, on the CPU in float32"""
        phase = self.build(found)
        if not self.run_phase(phase, found, batch):
            return {}
        found.level, found.cost = phase.level, model_forward_cost(phase.model)
        gradient = {n: w.grad for n, w in phase.model.named_parameters() if w.grad is not None}
        off = {base: gradient_distance(gradient, exact) for base, exact in known.items()}
        found.off_trl, found.off_float32 = off.get(BASE), off.get(TRUTH)
        keeps = found.variant.name in (BASE, TRUTH)
        return {n: g.float().cpu() for n, g in gradient.items()} if keeps else {}

    def time_round(self) -> None:
        """One turn of every variant but the float32 one."""
        for name, found in self.found.items():
            if found.tokens and name != TRUTH:
                self.time_variant(found)

    def time_variant(self, found: Measured) -> None:
        """One phase that does not count and one that does. Its models are gone at the end."""
        phase, gpu = self.build(found), self.device.type == "cuda"
        if not self.run_phase(phase, found, self.batch):
            return
        drop_gradients(phase.model)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        wait_for_device()
        began, tokens = time.perf_counter(), found.tokens
        self.run_phase(phase, found, self.batch)
        wait_for_device()
        if found.tokens == tokens:
            found.seconds.append(time.perf_counter() - began)
        if gpu:
            found.peak_bytes = max(found.peak_bytes, torch.cuda.max_memory_allocated())

    def gradients_match(self, dtype: str) -> bool:
        """Whether each of our variants that fits has the gradient of TRL's order of work, and is
        about as near to the float32 one. A gradient that was not compared does not match."""
        ours = [m for m in self.found.values() if not m.variant.is_trl and m.cost is not None]
        times, plus = FARTHER[dtype]
        off_trl, off_float32 = (
            max((math.inf if off is None else off for off in each), default=math.inf)
            for each in ([m.off_trl for m in ours], [m.off_float32 for m in ours])
        )
        allowed = times * (self.found[BASE].off_float32 or 0.0) + plus
        return off_trl <= MATCH[dtype] and off_float32 <= allowed


def drop_gradients(model: Any) -> None:
    """Set every gradient to None."""
    for weight in model.parameters():
        weight.grad = None


def gradient_distance(gradient: dict[str, Tensor], base: dict[str, Tensor]) -> float:
    """Relative L2 distance of whole gradients, by parameter name; any shapes, the same in both."""
    if gradient.keys() != base.keys():
        raise RuntimeError(f"gradients of other weights: {sorted(gradient.keys() ^ base.keys())}")
    apart, size = 0.0, 0.0
    for name, known in base.items():
        known = known.to(gradient[name].device)
        apart += float((gradient[name].float() - known).double().square().sum())
        size += float(known.double().square().sum())
    return (apart / size) ** 0.5


def forward_flops(cost: ForwardCost, batch: SampledBatch, layout: str) -> tuple[float, float]:
    """FLOP of one forward pass's body, and of its head.

    A row of the head for each completion token; causal pairs, also where a kernel masks them.
    """
    rows, pairs, tokens = 0, 0.0, 0
    width = max(p for p, _ in batch.lengths) + max(max(cs) for _, cs in batch.lengths)
    for p, cs in batch.lengths:
        tokens += sum(cs)
        inner = [c - 1 for c in cs]  # the last token predicts nothing
        if layout == "padded":
            rows += width * len(cs)
            pairs += len(cs) * width**2 / 2
        elif layout == "packed":
            rows += sum(p + c for c in inner)
            pairs += sum((p + c) ** 2 / 2 for c in inner)
        else:
            rows += p + sum(inner)
            pairs += p**2 / 2 + sum(c * p + c**2 / 2 for c in inner)
    body = 2.0 * cost.layer_params * rows + 4.0 * cost.num_layers * cost.attention_width * pairs
    return body, 2.0 * cost.hidden_size * cost.vocab_size * tokens


def phase_flops(
    cost: ForwardCost, batch: SampledBatch, layout: str, fewer_passes: int = 0
) -> float:
    """FLOP that a train phase needs: (old,) reference, forward, and backward, which is two passes.

    Recomputation is not counted. `fewer_passes`: 1 where adapters alone are trained, so that
    backward costs one pass, or where beta is 0.
    """
    passes = (5 if layout == "padded" else 4) - fewer_passes
    return passes * sum(forward_flops(cost, batch, layout))


def train_phase(device: str, dtype: str, sizes: Facts) -> Iterator[Facts]:
    """A train phase in all its variants: gradients compared, then timed in turns."""
    shape, here = sized_shape(SHAPES[sizes["workload"]], sizes), torch.device(device)
    bench = PhaseBench(shape, list(VARIANTS), here, sizes["tokens"])
    bench.compare_gradients(sizes["judged_groups"])
    kind = "bfloat16" if here.type == "cuda" else "float32"
    product = product_flops(here, 128 if sizes["tiny"] else 8192)
    facts = {"verdict": verdict_of(bench.gradients_match(kind)),
             "tflops_of_the_product": product / 1e12}  # fmt: skip
    yield facts | phase_facts(bench, product)
    for _ in range(sizes["rounds"]):
        bench.time_round()
        yield facts | phase_facts(bench, product)


def phase_facts(bench: PhaseBench, product: float) -> Facts:
    """The facts of all turns so far. A ratio is TRL's seconds over those of our fastest variant."""
    sheet = data_sheet_flops(bench.device)
    middle = {n: statistics.median(m.seconds) for n, m in bench.found.items() if m.seconds}
    ours = min((s for n, s in middle.items() if n.startswith("shared")), default=None)
    base, table = bench.found[BASE].logp, []
    for name, found in bench.found.items():
        if found.cost is None:
            table.append({"variant": name, "level": "does not fit"})
            continue
        line: Facts = {"variant": name, "level": found.level, "tokens": found.tokens,
                       "gradient off TRL": found.off_trl,
                       "off float32": found.off_float32}  # fmt: skip
        if name in middle:
            layout, adapters = found.variant.layout, int(bench.shape.lora > 0)
            flop = phase_flops(found.cost, bench.batch, layout, adapters)
            rate = flop / middle[name]
            line |= {
                "ms": 1000 * middle[name], "least": 1000 * min(found.seconds),
                "most": 1000 * max(found.seconds), "MFU": rate / sheet if sheet else None,
                "of the product": rate / product, "peak GB": found.peak_bytes / 1e9 or None,
                "logp off": float((found.logp - base).abs().mean()) if base is not None else None,
                "ratio": middle[name] / ours if ours and found.variant.is_trl else None,
            }  # fmt: skip
        table.append(line)
    ratios = {row["variant"]: row.get("ratio") for row in table}
    return {
        "ms": 1000 * ours if ours else None, "ratio_trl": ratios.get(BASE),
        "ratio_trl_best": ratios.get("trl_best"), "rounds": len(bench.found["shared"].seconds),
        "table": table,
    }  # fmt: skip
