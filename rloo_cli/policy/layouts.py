"""Which layout a model gets, and which head: the fastest one that gives the model's own numbers.

Three gates (README, Fast), none of which can go. What can be read: windows, caps, sinks, dropout
(`static`). What can be counted: our attention was called once per layer, with its plan. What can be
compared: at the loaded weights, log-probabilities of two groups against each row alone through the
model's own forward. falcon_h1 passes the first two and is wrong; opt is right shared and wrong
packed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rloo_cli.data import segments
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.packing import LAYOUTS, MicroBatch, pack_micro_batch, whole_group_slices
from rloo_cli.policy import shared_attention
from rloo_cli.policy.layout_support import why_not_shared
from rloo_cli.policy.load import HALF_DTYPES
from rloo_cli.policy.model import Policy, in_eval_mode, weight_shape
from rloo_cli.utils.errors import ConfigError, NumbersError, Problem

FLOAT32_PROBE_TOLERANCE = 1e-3  # nats per completion, in float32
HALF_PROBE_TOLERANCE = (
    1.5,
    0.02,
)  # in half precision: times what other kernels show on rows alone, plus this
PROBE_PROMPT_LENGTHS, PROBE_COMPLETION_LENGTHS = (
    (7, 4),
    ((5, 1, 3), (2, 6, 4)),
)  # lengths of the probe


@dataclass(frozen=True)
class LayoutChoice:
    """What a model was found to be good for."""

    layout: str
    head: str  # fused; model = its own, whole logits
    why: str  # what kept it from better ones; "" = nothing

    def __str__(self) -> str:
        return f"{self.layout}, head {self.head}" + (f" ({self.why})" if self.why else "")


def choose_policy_layout(policy: Policy, requested: str, max_length: int | None) -> LayoutChoice:
    """Find the level of a policy, and set it up for that. `wanted`: a layout, or auto.

    `longest`: the most positions of a row, prompt and completion. Raises ConfigError where the
    layout that is wanted would give other numbers than the model.
    """
    probe = LayoutProbe(policy)
    reasons = set_best_layout(policy, requested, max_length, probe)
    reason = _try_fused_head(policy, probe)
    reasons += [] if reason is None else [f"no fused head: {reason}"]
    head = "fused" if policy.logprob_module.use_fused_head else "model"
    return LayoutChoice(policy.layout, head, "; ".join(reasons))


def set_best_layout(
    policy: Any, requested: str, max_length: int | None, probe: "LayoutProbe"
) -> list[str]:
    """Set a policy (or a value model) up for the best layout; why it has none of the better ones.

    Raises ConfigError where the layout that is wanted would give other numbers than the model.
    """
    reasons: list[str] = []
    for layout in LAYOUTS if requested == "auto" else (requested,):
        reason = try_layout(policy, layout, max_length, probe)
        if reason is None:
            break
        reasons.append(f"not {layout}: {reason}")
        if layout == requested or layout == LAYOUTS[-1]:
            raise ConfigError(
                Problem(
                    f"train.layout = {requested}: this model cannot be computed so",
                    "train.layout",
                    "; ".join(reasons),
                    "train.layout=auto" if requested != "auto" else "another model",
                )
            )
    return reasons


def copy_layout(policy: Policy, source: Policy) -> None:
    """Give a policy the level of another one that has the same architecture."""
    if source.layout == "shared":
        shared_attention.install_shared_attention(policy.model)
    policy.layout = source.layout
    policy.logprob_module.use_fused_head, policy.logprob_module.logit_scale = (
        source.logprob_module.use_fused_head,
        source.logprob_module.logit_scale,
    )


class LayoutProbe:
    """Two groups of random ids, and what the model says of each completion alone. (S,)"""

    mismatch_text = "log-probabilities are off by {:.2g} nats"

    def __init__(self, policy: Any) -> None:
        self.groups = probe_groups(policy)
        self.policy = policy
        self.expected = self.values_alone()
        check_finite_probe(policy.model, self.expected)
        own = getattr(policy, "dtype", None) or next(policy.model.parameters()).dtype
        self.is_float32 = own is torch.float32
        self.kernel_noise = 0.0 if self.is_float32 else self._measure_noise()

    def values_alone(self, attention: str | None = None) -> Tensor:
        """What the model says of each completion in a row of its own. -> (S,)

        `name`: by another attention than the model's own.
        """
        return _logprobs_alone(self.policy, self.groups, attention)

    def layout_values(self, layout: str) -> Tensor:
        """Log-probability of each completion as it is set up now. -> (S,)"""
        parts = whole_group_slices(self.groups, range(len(self.groups)))
        micro = pack_micro_batch(self.groups, parts, device=self.policy.device, layout=layout)
        with torch.no_grad(), in_eval_mode(self.policy.model):
            (found,), _ = self.policy.call(micro, [self.policy.temperature], False)
        check_attention_calls(self.policy.model, micro)
        return segments.segment_sum(found.double(), micro.sequence_ids, micro.num_sequences)

    def differences(self, values: Tensor) -> Tensor:
        """How far each completion is from the truth. -> (S,)"""
        return (values - self.expected).abs()

    def _measure_noise(self) -> float:
        """Mean nats per completion that kernels in another order make in half precision.

        Between padded rows and rows alone, or between two of the model's own attentions on rows
        alone where that is more: some kernels give padded rows the very same bits.
        """
        found = float(self.differences(self.layout_values("padded")).mean())
        settable = getattr(self.policy.model, "_can_set_attn_implementation", lambda: False)()
        for name in ("eager", "sdpa") if settable else ():
            try:
                other = self.values_alone(name)
            except Exception:  # an attention that this model does not have
                continue
            found = max(found, float(self.differences(other).mean()))
        return found

    def mismatch_reason(self, layout: str) -> str | None:
        """How far off this layout is, where that is more than rounding."""
        gap = self.differences(self.layout_values(layout))
        worst, most = float(gap.max()), FLOAT32_PROBE_TOLERANCE
        if not self.is_float32:
            worst, most = (
                float(gap.mean()),
                HALF_PROBE_TOLERANCE[0] * self.kernel_noise + HALF_PROBE_TOLERANCE[1],
            )
        return None if worst <= most else self.mismatch_text.format(worst)


def check_finite_probe(model: Any, values: Tensor) -> None:
    """Raises NumbersError where what a model says at its loaded weights is not a number."""
    if not bool(values.isnan().any()):
        return
    bad = [n for n, p in model.named_parameters() if p.numel() and not bool(p.isfinite().all())]
    why = f"{len(bad)} of its tensors hold NaN or inf: {', '.join(bad[:3])}" if bad else ""
    why = why or "its tensors are finite: they overflow in this dtype"
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    what = f"{name} says nothing but NaN before any training"
    raise NumbersError(Problem(what, "model.path", why, "other weights, or model.dtype=float32"))


def check_attention_calls(model: Any, micro_batch: MicroBatch) -> None:
    """Raises SharedAttentionError where a layer did not ask our attention for a shared row."""
    if micro_batch.shared_layout is not None:
        layers = model.config.get_text_config().num_hidden_layers
        if micro_batch.shared_layout.attention_calls[0] != layers:
            raise shared_attention.SharedAttentionError(
                f"our attention was called {micro_batch.shared_layout.attention_calls[0]} times "
                f"in {layers} layers"
            )


def try_layout(policy: Any, layout: str, max_length: int | None, probe: LayoutProbe) -> str | None:
    """Set a policy (or a reward model) up for a layout; why it may not have it, and then it is as
    before.
    """
    if layout == "shared" and (reason := why_not_shared(policy.model, max_length)):
        return reason
    if layout == "packed" and not policy.names_position_ids:
        return "it takes no positions"
    if layout == "shared":
        shared_attention.install_shared_attention(policy.model)
    try:
        reason = probe.mismatch_reason(layout)
    except Exception as error:  # a model's own code, given what it was not made for
        if layout == LAYOUTS[-1]:
            raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
    if reason is None:
        policy.layout = layout
    else:
        shared_attention.uninstall_shared_attention(policy.model)
    return reason


def _try_fused_head(policy: Policy, probe: LayoutProbe) -> str | None:
    """Let the head be computed in tiles; why not, and then it is the model's own."""
    scorer, config = policy.logprob_module, policy.model.config.get_text_config()
    if type(scorer.head) is not torch.nn.Linear:
        return f"the output embedding is a {type(scorer.head).__name__}"
    if getattr(policy.model, "base_model", policy.model) is policy.model:
        return "the model has no backbone of its own"
    if getattr(config, "final_logit_softcapping", None):
        return "soft-capped logits"
    scorer.logit_scale = float(getattr(config, "logit_scale", None) or 1.0)
    scorer.logit_scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    scorer.use_fused_head = True
    try:
        reason = probe.mismatch_reason(policy.layout)
    except Exception as error:  # its backbone answers in another form
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
    scorer.use_fused_head = reason is None
    return reason


def probe_groups(policy: Any) -> list[Group]:
    """Two groups of three completions of unequal lengths, one of a single token."""
    words = weight_shape(policy.model.get_input_embeddings().weight)[0]
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(words, (count,), generator=draw).tolist()
        return found

    return [
        Group(i, {}, "", ids(p), [Rollout(ids(c), "", "length", False, 0, 0) for c in lengths])
        for i, (p, lengths) in enumerate(
            zip(PROBE_PROMPT_LENGTHS, PROBE_COMPLETION_LENGTHS, strict=True)
        )
    ]


@contextmanager
def _float32_head(model: Any) -> Iterator[None]:
    """While inside, a head of half precision multiplies in float32: logits that are rounded to
    bfloat16 are further from the truth than what is compared with them."""
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
    """Each completion in a row of its own, by the model's plain forward and head. -> (S,)

    `name`: of another attention than the model's own.
    """
    model, found = policy.model, []
    with (
        in_eval_mode(model),
        shared_attention.native_attention(model, attention),
        _float32_head(model),
    ):
        for group in groups:
            for rollout in group.rollouts:
                ids = group.prompt_ids + rollout.completion_ids
                row = torch.tensor([ids], device=policy.device)
                logits = policy.call(row, (), False)
                rows = logits[0, len(group.prompt_ids) - 1 : -1]
                target = row[0, len(group.prompt_ids) :]
                logp = segments.target_logprobs(rows, target, policy.temperature)
                found.append(logp.double().sum())
    return torch.stack(found)
