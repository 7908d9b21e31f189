"""What `gpu.py` runs: the batch, the random models, and one train phase for each variant.

A train phase is what follows once completions are scored: TRL's order of work is a pass for the old
log-probabilities, one for the reference's, forward and backward; `rloo` has no pass of the first
kind. No optimizer step: it is the same in both. Weights are the same numbers in every variant, all
of them exact in bfloat16, so that gradients differ by their computation alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from shapes import Shape
from sides import BETA
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from rloo_cli.config.schema import LoraConfig
from rloo_cli.data import segments
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import GroupSlice, whole_group_slices
from rloo_cli.policy import layouts, lora
from rloo_cli.policy.model import Policy
from rloo_cli.policy.reference import AdapterReference, Reference
from rloo_cli.utils import paths

try:
    from trl.trainer.utils import add_fused_lm_head
except ImportError:  # then `logp_in_chunks` is what it does, without its kernels
    add_fused_lm_head = None

FIRST, CLIP, CHUNK = 2, 0.2, 4096  # CHUNK: rows of logits at once
NOISE = 0.5  # between policy and reference, times the weights' mean size
KEEP = 2_000_000_000  # bytes of logits that may be kept, the package's default


@dataclass(frozen=True)
class Variant:
    """One way to compute the same gradient."""

    name: str
    tool: str  # trl, rloo
    layout: str
    gc: bool
    note: str
    keep: int = 0  # bytes of the head's logits kept for backward
    autocast: bool = False  # on a GPU
    alone: bool = False  # each completion is a group of its own: the prompt again for each


_TRL = "weights and reference float32 under bfloat16 autocast; old, reference and train passes"
_OURS = "bfloat16 weights with float32 masters and gradients, bfloat16 reference; no old pass"
_ALL = (
    Variant("trl_gc", "trl", "padded", True, _TRL, autocast=True),
    Variant("trl_nogc", "trl", "padded", False, _TRL, autocast=True),
    Variant("packed", "rloo", "packed", False, _OURS, KEEP),
    Variant("shared_gc", "rloo", "shared", True, _OURS),
    Variant("shared", "rloo", "shared", False, _OURS, KEEP),
    # only when asked for
    Variant("shared_again", "rloo", "shared", False, f"{_OURS}; logits made again", 0),
    Variant("packed_varlen", "rloo", "shared", False, f"{_OURS}; our attention, prompt repeated",
            KEEP, alone=True),
    Variant("fp32", "trl", "padded", False, "float32 throughout: what gradients are compared with"),
)  # fmt: skip
VARIANTS = {variant.name: variant for variant in _ALL}
DEFAULT = [variant.name for variant in _ALL[:5]]


@dataclass
class Case:
    """A batch that was sampled and scored. P groups of K completions."""

    groups: list[Group]
    score: Tensor  # (P, K)

    @property
    def lengths(self) -> list[tuple[int, list[int]]]:
        """Of each prompt, and of its completions."""
        return [(len(g.prompt_ids), [r.length for r in g.rollouts]) for g in self.groups]


def case(shape: Shape, seed: int) -> Case:
    """The batch of a workload: lengths, ids and scores from the seed."""
    drawn = torch.Generator().manual_seed(seed)

    def ids(span: tuple[int, int]) -> list[int]:
        size = int(torch.randint(span[0], span[1] + 1, (), generator=drawn))
        return torch.randint(FIRST, shape.vocabulary, (size,), generator=drawn).tolist()

    def rollout() -> Rollout:
        return Rollout(ids(shape.completion), "", "length", False, 0, 0)

    groups = [
        Group(i, {}, "", ids(shape.prompt), [rollout() for _ in range(shape.k)])
        for i in range(shape.prompts)
    ]
    return Case(groups, torch.randn(shape.prompts, shape.k, generator=drawn))


def config(shape: Shape) -> Any:
    """The model's config."""
    more = {} if shape.architecture == "gpt_neox" else {"num_key_value_heads": shape.kv_heads}
    if shape.architecture == "qwen3":
        more["head_dim"] = shape.head_dim
    return AutoConfig.for_model(
        shape.architecture,
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **more,
    )


@torch.no_grad()
def build(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int, noise: float) -> Any:
    """Random weights, made on the device: the same for the same seed. `noise`: on top of them."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(shape), dtype=torch.float32)
    for weight in model.parameters():  # and no buffer: rotary frequencies stay float32
        if noise:
            weight.add_(torch.randn_like(weight), alpha=noise * float(weight.abs().mean()))
        weight.data = weight.bfloat16().to(dtype)
    return model


def adapt(model: Any, shape: Shape, seed: int) -> LoraConfig:
    """Put adapters in, of which only those are trained; moved, so that they change something."""
    values = yaml.safe_load((paths.CONF / "lora" / "default.yaml").read_text())
    keys = LoraConfig(**values | {"r": shape.lora, "alpha": 2.0 * shape.lora})
    lora.attach_adapter(model, keys, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.01 * torch.randn(weight.shape).to(weight))
    return keys


def advantages(score: Tensor, kl: Tensor) -> Tensor:
    """Leave-one-out over rewards. (P, K), (P, K) -> (P, K)"""
    reward = score - BETA * kl
    k = reward.shape[1]
    return (reward - reward.mean(1, keepdim=True)) * k / (k - 1)


def loss(log_ratio: Tensor, advantage: Tensor, count: int) -> Tensor:
    """RLOO's clipped loss over completions, a share of `count`. (S,), (S,) -> ()"""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.min(ratio * advantage, clipped * advantage).sum() / count


class Phase:
    """A policy and a reference on the device, and a train phase over them."""

    def __init__(self, variant: Variant, case: Case, device: torch.device):
        self.variant, self.case, self.device = variant, case, device
        self.score = case.score.to(device)
        self.level = "padded"

    def prepare(self, model: Any, frozen: Any) -> None:
        """What all variants need of their models. `frozen`: None under an adapter."""
        self.model: Any = model.train()
        if frozen is not None:
            frozen.eval().requires_grad_(False)
        if self.variant.gc:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def micros(self, size: int) -> list[range]:
        """Groups of each micro-batch."""
        count = len(self.case.groups)
        return [range(i, min(i + size, count)) for i in range(0, count, size)]

    def run(self, size: int) -> Tensor:
        """The phase, `size` groups per micro-batch; gradients are left. -> (B,) logp"""
        raise NotImplementedError


class Trl(Phase):
    """TRL 1.16's order of work: `_get_per_token_logps_and_entropies` and `_compute_loss`."""

    def __init__(self, variant: Variant, shape: Shape, case: Case, device: torch.device, seed: int):
        super().__init__(variant, case, device)
        self.half = variant.autocast and device.type == "cuda"
        model = build(shape, device, torch.float32, seed, 0.0)
        self.frozen = None if shape.lora else build(shape, device, torch.float32, seed, NOISE)
        if shape.lora:
            adapt(model, shape, seed)
        self.layers = lora.adapter_layers(model) if shape.lora else []
        self.prepare(model, self.frozen)
        if add_fused_lm_head is not None:
            add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
            if self.frozen is not None:
                add_fused_lm_head(self.frozen, temperature=1.0)

    def reference(self, rows: slice) -> Tensor:
        """Of the frozen model, or of the policy without its adapter. -> (b, c)"""
        if self.frozen is not None:
            return self.logp(self.frozen, rows)
        with lora.use_adapter(self.layers, None):
            return self.logp(self.model, rows)

    def pad(self) -> None:
        """The whole batch once: prompts on the left, completions on the right. (B, p), (B, c)"""
        pairs = [(g.prompt_ids, r.completion_ids) for g in self.case.groups for r in g.rollouts]
        prompts = [torch.tensor(p) for p, _ in pairs]
        answers = [torch.tensor(c) for _, c in pairs]
        left = pad_sequence(prompts, True, -1, "left")
        right = pad_sequence(answers, True, -1, "right")
        rows = torch.cat([left, right], 1).to(self.device)
        self.mask, self.ids = (rows >= 0).long(), rows.clamp(min=0)
        self.keep = right.shape[1]

    def logp(self, model: Any, rows: slice) -> Tensor:
        """Of the completions' tokens, 0 on padding. -> (b, c)"""
        ids, mask = self.ids[rows], self.mask[rows]
        labels = ids.masked_fill(mask == 0, -100)
        labels[:, : -self.keep] = -100
        half = torch.autocast(self.device.type, torch.bfloat16)
        with half if self.half else nullcontext():
            if add_fused_lm_head is None:
                return logp_in_chunks(model, ids, mask, labels)[:, -self.keep :]
            found = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        return found.log_probs[:, -self.keep :]

    def run(self, size: int) -> Tensor:
        k = self.score.shape[1]
        spans = [slice(m.start * k, m.stop * k) for m in self.micros(size)]
        with compact_head():
            self.pad()
            with torch.no_grad():
                old = torch.cat([self.logp(self.model, rows) for rows in spans])
                ref = torch.cat([self.reference(rows) for rows in spans])
            kl, old = (old - ref).sum(1), old.sum(1)
            value = advantages(self.score, kl.view_as(self.score)).flatten()
            found = []
            for rows in spans:
                logp = self.logp(self.model, rows).sum(1)
                loss(logp - old[rows], value[rows], self.score.numel()).backward()
                found.append(logp.detach())
        return torch.cat(found)


class Rloo(Phase):
    """`rloo`: whole groups in a layout, no old pass, what `loop.backward` and `optimizer` do."""

    def __init__(self, variant: Variant, shape: Shape, case: Case, device: torch.device, seed: int):
        super().__init__(variant, case, device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.policy = Policy(build(shape, device, dtype, seed, 0.0), 1.0)
        keys = adapt(self.policy.model, shape, seed) if shape.lora else None
        self.prepare(self.policy.model, None)
        longest = shape.prompt[1] + shape.completion[1]
        self.level = str(layouts.choose_policy_layout(self.policy, variant.layout, longest))
        self.frozen = self.reference(shape, dtype, seed, keys, longest)
        self.policy.logprob_module.keep_logits_bytes = variant.keep
        trained = [w for w in self.model.parameters() if w.requires_grad]
        self.masters = [w.detach().float() for w in trained if w.dtype != torch.float32]
        for weight in trained:
            if weight.dtype != torch.float32:
                weight.grad_dtype = torch.float32  # as `optimizer.Optimizer`

    def reference(
        self, shape: Shape, dtype: torch.dtype, seed: int, keys: LoraConfig | None, longest: int
    ) -> Reference:
        """A model of its own, or the policy without its adapter."""
        if keys is not None:
            sync = SimpleNamespace(every=0)
            given: Any = SimpleNamespace(lora=keys, ref_sync=sync, ref_path=None)
            found: Reference = AdapterReference(self.policy, 1.0, given, seed)
            layouts.copy_layout(found, self.policy)
            return found
        found = Reference(build(shape, self.device, dtype, seed, NOISE), 1.0)
        layouts.choose_policy_layout(found, self.variant.layout, longest)
        return found

    def parts(self, index: range) -> list[GroupSlice]:
        """The completions of these groups."""
        parts = whole_group_slices(self.case.groups, index)
        return [(i, (k,)) for i, ks in parts for k in ks] if self.variant.alone else parts

    def run(self, size: int) -> Tensor:
        found = []
        for index in self.micros(size):
            micro = self.policy.pack(self.case.groups, self.parts(index))
            ref = self.frozen.frozen_logp(micro).logp
            logp = self.policy.logp(micro).logp
            gap = logp.detach() - ref
            score = self.score[index.start : index.stop]
            kl, of_row = (
                segments.segment_sum(x, micro.sequence_ids, micro.num_sequences)
                for x in (gap, logp - logp.detach())
            )
            value = advantages(score, kl.view_as(score)).flatten()
            loss(of_row, value, self.score.numel()).backward()
            found.append(
                segments.segment_sum(logp.detach(), micro.sequence_ids, micro.num_sequences)
            )
        return torch.cat(found)


def phase(variant: Variant, shape: Shape, case: Case, device: torch.device, seed: int) -> Phase:
    """Build a variant's models on the device."""
    return (Trl if variant.tool == "trl" else Rloo)(variant, shape, case, device, seed)


@contextmanager
def compact_head() -> Iterator[None]:
    """TRL's head on the completions' rows alone, as on a GPU: else a CPU would take all."""
    if add_fused_lm_head is None:
        yield
        return
    with mock.patch("trl.trainer.utils._use_triton", lambda device: True):
        yield


def logp_in_chunks(model: Any, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    """Where TRL is not installed: log_softmax over chunks, made again in backward. -> (b, T)"""
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)[0][:, :-1]
    wanted, target = labels[:, 1:] != -100, labels[:, 1:]
    head = model.get_output_embeddings()

    def some(rows: Tensor, words: Tensor) -> Tensor:
        return head(rows).float().log_softmax(-1).gather(1, words[:, None]).squeeze(1)

    pairs = zip(hidden[wanted].split(CHUNK), target[wanted].split(CHUNK), strict=True)
    found = torch.cat([checkpoint(some, rows, words, use_reentrant=False) for rows, words in pairs])
    return found.new_zeros(wanted.shape).masked_scatter(wanted, found)
