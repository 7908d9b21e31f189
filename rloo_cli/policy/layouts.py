"""Chooses a model's layout and head: the fastest that give the model's own numbers.

There are three checks (README, Fast), and each is needed. The config and the code are searched for
windows, caps, sinks and dropout (`layout_support`). The calls of our attention are counted: one per
layer, with its plan. At the loaded weights, log-probabilities of two groups are compared with those
of each completion alone through the model's own forward. falcon_h1 passes the first two checks but
is wrong; opt is right shared and wrong packed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloo_cli.data import segments
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.episode_media import row_media
from rloo_cli.data.packing import LAYOUTS, MicroBatch, pack_micro_batch, whole_group_slices
from rloo_cli.policy import shared_attention
from rloo_cli.policy.layout_support import why_not_shared
from rloo_cli.policy.load import HALF_DTYPES
from rloo_cli.policy.model import PlainSequence, Policy, in_eval_mode, weight_shape
from rloo_cli.utils.errors import NumbersError, refuse

FLOAT32_PROBE_TOLERANCE = 1e-3  # nats per completion, in float32
# In half precision: this factor times the noise of the model's kernels, plus this many nats.
HALF_PROBE_TOLERANCE = (1.5, 0.02)
PROBE_PROMPT_LENGTHS, PROBE_COMPLETION_LENGTHS = (7, 4), ((5, 1, 3), (2, 6, 4))  # tokens


class HasLayout(Protocol):
    """A model whose layout is chosen here: a policy, a value model or a reward model."""

    model: PreTrainedModel
    layout: str

    @property
    def names_position_ids(self) -> bool: ...


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that a model supports, and why not a better one."""

    layout: str
    head: str  # fused; model = the model's own, with whole logits
    why: str  # why it has no better layout or head; "" = it has the best

    def __str__(self) -> str:
        return f"{self.layout}, head {self.head}" + (f" ({self.why})" if self.why else "")

    def with_model_head(self, why: str) -> "LayoutChoice":
        """The same layout with the model's own head, for one more reason."""
        return replace(self, head="model", why=f"{self.why}; {why}".lstrip("; "))


def choose_policy_layout(policy: Policy, requested: str, max_length: int | None) -> LayoutChoice:
    """Find the best layout of a policy, and set the policy up for it.

    `requested`: a layout, or auto. `max_length`: the most positions of a sequence, prompt and
    completion. Raises ConfigError if the requested layout gives other numbers than the model.
    """
    probe = LayoutProbe(policy)
    reasons = set_best_layout(policy, requested, max_length, probe)
    reason = _try_fused_head(policy, probe)
    reasons += [] if reason is None else [f"no fused head: {reason}"]
    head = "fused" if policy.logprob_module.use_fused_head else "model"
    return LayoutChoice(policy.layout, head, "; ".join(reasons))


def set_best_layout(
    policy: HasLayout, requested: str, max_length: int | None, probe: "LayoutProbe"
) -> list[str]:
    """Set a policy (or a value model) up for its best layout. -> why it has no better one

    `requested` and `max_length` are those of `choose_policy_layout`.

    Raises ConfigError if the requested layout gives other numbers than the model.
    """
    reasons: list[str] = []
    for layout in LAYOUTS if requested == "auto" else (requested,):
        reason = try_layout(policy, layout, max_length, probe)
        if reason is None:
            break
        reasons.append(f"not {layout}: {reason}")
        if layout == requested or layout == LAYOUTS[-1]:
            what = f"train.layout = {requested} is not supported for this model"
            fix = "train.layout=auto" if requested != "auto" else "another model"
            refuse("train.layout", what, fix, "; ".join(reasons))
    return reasons


def copy_layout(policy: Policy, source: Policy) -> None:
    """Give a policy the layout of another one that has the same architecture."""
    if source.layout == "shared":
        shared_attention.install_shared_attention(policy.model)
    policy.layout = source.layout
    policy.logprob_module.use_fused_head = source.logprob_module.use_fused_head
    policy.logprob_module.logit_scale = source.logprob_module.logit_scale


def share_layout(
    policy: Policy, teacher: Policy, choice: LayoutChoice, max_length: int | None
) -> LayoutChoice:
    """Give a policy and the teacher of its whole distributions one layout, and their own heads.

    Both then compute the same micro-batches. `choice` is the policy's so far. Every model supports
    padded, which both get if they would have different layouts.
    """
    why = "whole logits for the teacher's divergence"
    if policy.layout != teacher.layout:
        for model in (policy, teacher):
            shared_attention.uninstall_shared_attention(model.model)
            set_best_layout(model, LAYOUTS[-1], max_length, LayoutProbe(model))
        why = f"the same as its teacher's; {why}"
        choice = replace(choice, layout=LAYOUTS[-1])
    for model in (policy, teacher):
        model.logprob_module.use_fused_head = False
    return choice.with_model_head(why)


class LayoutProbe:
    """Two groups of random ids, and the log-probability of each completion alone. (S,)"""

    mismatch_text = "log-probabilities are off by {:.2g} nats"

    def __init__(self, policy: Any) -> None:
        self.groups = probe_groups(policy)
        self.policy = policy
        self.expected = self.values_alone()
        check_images_matter(policy, self.groups)
        check_finite_probe(policy.model, self.expected)
        dtype = getattr(policy, "dtype", None) or next(policy.model.parameters()).dtype
        self.is_float32 = dtype is torch.float32
        self.kernel_noise = 0.0 if self.is_float32 else self._measure_noise()

    def values_alone(self, attention: str | None = None) -> Tensor:
        """Log-probability of each completion in a sequence of its own. -> (S,)

        `attention`: the name of an attention to use instead of the model's own.
        """
        return _logprobs_alone(self.policy, self.groups, attention)

    def layout_values(self, layout: str) -> Tensor:
        """Log-probability of each completion in this layout. -> (S,)"""
        parts = whole_group_slices(self.groups, range(len(self.groups)))
        batch = pack_micro_batch(
            self.groups, parts, None, self.policy.device, layout, True, self.policy.vision
        )
        with torch.no_grad(), in_eval_mode(self.policy.model):
            (logp,), *_ = self.policy.call(batch, [self.policy.temperature], False)
        check_attention_calls(self.policy.model, batch)
        return segments.segment_sum(logp.double(), batch.sequence_ids, batch.num_sequences)

    def differences(self, values: Tensor) -> Tensor:
        """The distance of each completion from its value alone. -> (S,)"""
        return (values - self.expected).abs()

    def _measure_noise(self) -> float:
        """Mean nats per completion by which kernels with another order of summation differ.

        It is measured between padded sequences and sequences alone, or between two of the model's
        own attentions on sequences alone if that is more: some kernels give identical bits for
        padded ones.
        """
        noise = float(self.differences(self.layout_values("padded")).mean())
        settable = getattr(self.policy.model, "_can_set_attn_implementation", lambda: False)()
        for name in ("eager", "sdpa") if settable else ():
            try:
                other = self.values_alone(name)
            except Exception:  # an attention that this model does not have
                continue
            noise = max(noise, float(self.differences(other).mean()))
        return noise

    def mismatch_reason(self, layout: str) -> str | None:
        """A text that says how much this layout differs; None if only by rounding."""
        gap = self.differences(self.layout_values(layout))
        worst, most = float(gap.max()), FLOAT32_PROBE_TOLERANCE
        if not self.is_float32:
            factor, constant = HALF_PROBE_TOLERANCE
            worst, most = float(gap.mean()), factor * self.kernel_noise + constant
        return None if worst <= most else self.mismatch_text.format(worst)


def check_finite_probe(model: PreTrainedModel, values: Tensor) -> None:
    """Raise NumbersError if the model's outputs at its loaded weights are not finite."""
    if not bool(values.isnan().any()):
        return
    bad = [n for n, p in model.named_parameters() if p.numel() and not bool(p.isfinite().all())]
    why = f"{len(bad)} of its tensors hold NaN or inf: {', '.join(bad[:3])}" if bad else ""
    why = why or "its tensors are finite: the forward overflows in this dtype"
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    what = f"{name} returns NaN before any training"
    refuse("model.path", what, "use other weights, or model.dtype=float32", why, error=NumbersError)


def check_images_matter(policy: Any, groups: list[Group]) -> None:
    """Raise NumbersError if other pixels do not change the log-probabilities of completions.

    A model whose tower got no weights, or is not called, would be trained as a text model.
    """
    shown = [replace(g, rollouts=g.rollouts[:1]) for g in groups if g.media is not None][:1]
    if not shown:
        return
    before = _logprobs_alone(policy, shown)
    media = shown[0].media
    assert media is not None
    other = media.copy_unread()
    other.tensors = media.tensors | {"pixel_values": -media.tensors["pixel_values"]}
    after = _logprobs_alone(policy, [replace(shown[0], media=other)])
    if torch.equal(before, after):
        what = f"{type(policy.model).__name__} does not see its images"
        why = "with all pixels negated, log-probabilities do not change at all"
        refuse("model.path", what, "a checkpoint with its vision tower", why, error=NumbersError)


def check_attention_calls(model: PreTrainedModel, micro_batch: MicroBatch) -> None:
    """Raise SharedAttentionError if a layer did not call our attention."""
    if micro_batch.shared_layout is not None:
        layers = model.config.get_text_config().num_hidden_layers
        if micro_batch.shared_layout.attention_calls[0] != layers:
            calls = micro_batch.shared_layout.attention_calls[0]
            message = f"our attention was called {calls} times in {layers} layers"
            raise shared_attention.SharedAttentionError(message)


def try_layout(
    policy: HasLayout, layout: str, max_length: int | None, probe: LayoutProbe
) -> str | None:
    """Set a model up for a layout. -> None, or why it is unusable: then nothing has changed"""
    if layout == "shared" and (reason := why_not_shared(policy.model, max_length)):
        return reason
    if layout == "packed" and not policy.names_position_ids:
        return "it does not accept positions"
    if layout == "shared":
        shared_attention.install_shared_attention(policy.model)
    try:
        reason = probe.mismatch_reason(layout)
    except Exception as error:  # a model may fail on unexpected inputs
        if layout == LAYOUTS[-1]:
            raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
    if reason is None:
        policy.layout = layout
    else:
        shared_attention.uninstall_shared_attention(policy.model)
    return reason


def _try_fused_head(policy: Policy, probe: LayoutProbe) -> str | None:
    """Set the fused head up. -> None, or why it is unusable: then the model's own head stays"""
    module, config = policy.logprob_module, policy.model.config.get_text_config()
    if type(module.head) is not torch.nn.Linear:
        return f"the output embedding is a {type(module.head).__name__}"
    if getattr(policy.model, "base_model", policy.model) is policy.model:
        return "the model has no backbone of its own"
    if getattr(config, "final_logit_softcapping", None):
        return "soft-capped logits"
    module.logit_scale = float(getattr(config, "logit_scale", None) or 1.0)
    module.logit_scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    module.use_fused_head = True
    try:
        reason = probe.mismatch_reason(policy.layout)
    except Exception as error:  # its backbone may return something else
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
    module.use_fused_head = reason is None
    return reason


def probe_groups(policy: HasLayout) -> list[Group]:
    """Two groups of three completions of unequal lengths, one of a single token."""
    vocab_size = weight_shape(policy.model.get_input_embeddings().weight)[0]
    generator = torch.Generator().manual_seed(0)

    special = {getattr(policy.model.config, n, None) for n in ("image_token_id", "video_token_id")}

    def ids(count: int) -> list[int]:
        drawn: list[int] = torch.randint(vocab_size, (count,), generator=generator).tolist()
        return [0 if i in special else i for i in drawn]  # an image token needs an image

    probe_lengths = zip(PROBE_PROMPT_LENGTHS, PROBE_COMPLETION_LENGTHS, strict=True)
    groups = [
        Group(i, {}, "", ids(p), [Rollout(ids(c), "", "length", False, 0, 0) for c in lengths])
        for i, (p, lengths) in enumerate(probe_lengths)
    ]
    for example, lengths in zip(
        getattr(policy, "image_examples", ()), PROBE_COMPLETION_LENGTHS, strict=False
    ):
        rollouts = [Rollout(ids(c), "", "length", False, 0, 0) for c in lengths]
        groups.append(replace(example, rollouts=rollouts))
    return groups


@contextmanager
def _float32_head(model: PreTrainedModel) -> Iterator[None]:
    """Let a head of half precision multiply in float32 inside.

    Logits rounded to bfloat16 are less exact than the numbers that they are compared with.
    """
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.dtype not in HALF_DTYPES:
        yield
        return

    def exact(input: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(input.float(), head.weight.float(), bias)

    head.forward = exact  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward


@torch.no_grad()
def _logprobs_alone(policy: Policy, groups: list[Group], attention: str | None = None) -> Tensor:
    """Log-probability of each completion alone, by the model's plain forward and head. -> (S,)"""
    model, sums = policy.model, []
    native_attention = shared_attention.native_attention(model, attention)
    with in_eval_mode(model), native_attention, _float32_head(model):
        for group in groups:
            for rollout in group.rollouts:
                sequence = group.prompt_ids + rollout.completion_ids
                ids = torch.tensor([sequence], device=policy.device)
                media = row_media(group, rollout, policy.vision)
                whole = ids if media is None else PlainSequence(ids, media)
                logits = policy.call(whole, (), False)[0, len(group.prompt_ids) - 1 : -1]
                target = ids[0, len(group.prompt_ids) :]
                logp = segments.target_logprobs(logits, target, policy.temperature)
                sums.append(logp.double().sum())
    return torch.stack(sums)
