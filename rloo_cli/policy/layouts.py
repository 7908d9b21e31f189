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
from rloo_cli.data.packing import LAYOUTS, Micro, pack, whole
from rloo_cli.policy import shared_attention
from rloo_cli.policy.layout_support import why_not_shared
from rloo_cli.policy.model import Policy, evaluating, size
from rloo_cli.utils.errors import ConfigError, NumbersError, Problem

HALF = (torch.bfloat16, torch.float16)
CLOSE = 1e-3  # nats per completion, in float32
ROUNDED = 1.5, 0.02  # in half precision: times what other kernels show on rows alone, plus this
PROMPTS, COMPLETIONS = (7, 4), ((5, 1, 3), (2, 6, 4))  # lengths of the probe


@dataclass(frozen=True)
class Level:
    """What a model was found to be good for."""

    layout: str
    head: str  # fused; model = its own, whole logits
    why: str  # what kept it from better ones; "" = nothing

    def __str__(self) -> str:
        return f"{self.layout}, head {self.head}" + (f" ({self.why})" if self.why else "")


def settle(policy: Policy, wanted: str, longest: int | None) -> Level:
    """Find the level of a policy, and set it up for that. `wanted`: a layout, or auto.

    `longest`: the most positions of a row, prompt and completion. Raises ConfigError where the
    layout that is wanted would give other numbers than the model.
    """
    probe = Probe(policy)
    reasons = find(policy, wanted, longest, probe)
    reason = _fuse(policy, probe)
    reasons += [] if reason is None else [f"no fused head: {reason}"]
    head = "fused" if policy.scorer.fused else "model"
    return Level(policy.layout, head, "; ".join(reasons))


def find(policy: Any, wanted: str, longest: int | None, probe: "Probe") -> list[str]:
    """Set a policy (or a value model) up for the best layout; why it has none of the better ones.

    Raises ConfigError where the layout that is wanted would give other numbers than the model.
    """
    reasons: list[str] = []
    for layout in LAYOUTS if wanted == "auto" else (wanted,):
        reason = attempt(policy, layout, longest, probe)
        if reason is None:
            break
        reasons.append(f"not {layout}: {reason}")
        if layout == wanted or layout == LAYOUTS[-1]:
            raise ConfigError(
                Problem(
                    f"train.layout = {wanted}: this model cannot be computed so",
                    "train.layout",
                    "; ".join(reasons),
                    "train.layout=auto" if wanted != "auto" else "another model",
                )
            )
    return reasons


def follow(policy: Policy, other: Policy) -> None:
    """Give a policy the level of another one that has the same architecture."""
    if other.layout == "shared":
        shared_attention.install(policy.model)
    policy.layout = other.layout
    policy.scorer.fused, policy.scorer.scale = other.scorer.fused, other.scorer.scale


class Probe:
    """Two groups of random ids, and what the model says of each completion alone. (S,)"""

    off = "log-probabilities are off by {:.2g} nats"

    def __init__(self, policy: Any) -> None:
        self.groups = probes(policy)
        self.policy = policy
        self.truth = self.alone()
        check_finite(policy.model, self.truth)
        own = getattr(policy, "dtype", None) or next(policy.model.parameters()).dtype
        self.exact = own is torch.float32
        self.usual = 0.0 if self.exact else self._noise()

    def alone(self, name: str | None = None) -> Tensor:
        """What the model says of each completion in a row of its own. -> (S,)

        `name`: by another attention than the model's own.
        """
        return _alone(self.policy, self.groups, name)

    def sums(self, layout: str) -> Tensor:
        """Log-probability of each completion as it is set up now. -> (S,)"""
        parts = whole(self.groups, range(len(self.groups)))
        micro = pack(self.groups, parts, device=self.policy.device, layout=layout)
        with torch.no_grad(), evaluating(self.policy.model):
            (found,), _ = self.policy.call(micro, [self.policy.temperature], False)
        count_calls(self.policy.model, micro)
        return segments.row_sum(found.double(), micro.sequence, micro.sequences)

    def gap(self, found: Tensor) -> Tensor:
        """How far each completion is from the truth. -> (S,)"""
        return (found - self.truth).abs()

    def _noise(self) -> float:
        """Mean nats per completion that kernels in another order make in half precision.

        Between padded rows and rows alone, or between two of the model's own attentions on rows
        alone where that is more: some kernels give padded rows the very same bits.
        """
        found = float(self.gap(self.sums("padded")).mean())
        settable = getattr(self.policy.model, "_can_set_attn_implementation", lambda: False)()
        for name in ("eager", "sdpa") if settable else ():
            try:
                other = self.alone(name)
            except Exception:  # an attention that this model does not have
                continue
            found = max(found, float(self.gap(other).mean()))
        return found

    def differs(self, layout: str) -> str | None:
        """How far off this layout is, where that is more than rounding."""
        gap = self.gap(self.sums(layout))
        worst, most = float(gap.max()), CLOSE
        if not self.exact:
            worst, most = float(gap.mean()), ROUNDED[0] * self.usual + ROUNDED[1]
        return None if worst <= most else self.off.format(worst)


def check_finite(model: Any, found: Tensor) -> None:
    """Raises NumbersError where what a model says at its loaded weights is not a number."""
    if not bool(found.isnan().any()):
        return
    bad = [n for n, p in model.named_parameters() if p.numel() and not bool(p.isfinite().all())]
    why = f"{len(bad)} of its tensors hold NaN or inf: {', '.join(bad[:3])}" if bad else ""
    why = why or "its tensors are finite: they overflow in this dtype"
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    what = f"{name} says nothing but NaN before any training"
    raise NumbersError(Problem(what, "model.path", why, "other weights, or model.dtype=float32"))


def count_calls(model: Any, micro: Micro) -> None:
    """Raises NotShared where not every layer asked our attention for a shared row just computed."""
    if micro.shared is not None:
        layers = model.config.get_text_config().num_hidden_layers
        if micro.shared.calls[0] != layers:
            raise shared_attention.NotShared(
                f"our attention was called {micro.shared.calls[0]} times in {layers} layers"
            )


def attempt(policy: Any, layout: str, longest: int | None, probe: Probe) -> str | None:
    """Set a policy (or a reward model) up for a layout; why it may not have it, and then it is as
    before.
    """
    if layout == "shared" and (reason := why_not_shared(policy.model, longest)):
        return reason
    if layout == "packed" and not policy.names_positions:
        return "it takes no positions"
    if layout == "shared":
        shared_attention.install(policy.model)
    try:
        reason = probe.differs(layout)
    except Exception as error:  # a model's own code, given what it was not made for
        if layout == LAYOUTS[-1]:
            raise
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
    if reason is None:
        policy.layout = layout
    else:
        shared_attention.uninstall(policy.model)
    return reason


def _fuse(policy: Policy, probe: Probe) -> str | None:
    """Let the head be computed in tiles; why not, and then it is the model's own."""
    scorer, config = policy.scorer, policy.model.config.get_text_config()
    if type(scorer.head) is not torch.nn.Linear:
        return f"the output embedding is a {type(scorer.head).__name__}"
    if getattr(policy.model, "base_model", policy.model) is policy.model:
        return "the model has no backbone of its own"
    if getattr(config, "final_logit_softcapping", None):
        return "soft-capped logits"
    scorer.scale = float(getattr(config, "logit_scale", None) or 1.0)
    scorer.scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    scorer.fused = True
    try:
        reason = probe.differs(policy.layout)
    except Exception as error:  # its backbone answers in another form
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:150]}"
    scorer.fused = reason is None
    return reason


def probes(policy: Any) -> list[Group]:
    """Two groups of three completions of unequal lengths, one of a single token."""
    words = size(policy.model.get_input_embeddings().weight)[0]
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(words, (count,), generator=draw).tolist()
        return found

    return [
        Group(i, {}, "", ids(p), [Rollout(ids(c), "", "length", False, 0, 0) for c in lengths])
        for i, (p, lengths) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True))
    ]


@contextmanager
def _exact_head(model: Any) -> Iterator[None]:
    """While inside, a head of half precision multiplies in float32: logits that are rounded to
    bfloat16 are further from the truth than what is compared with them."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.dtype not in HALF:
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
def _alone(policy: Policy, groups: list[Group], name: str | None = None) -> Tensor:
    """Each completion in a row of its own, by the model's plain forward and head. -> (S,)

    `name`: of another attention than the model's own.
    """
    model, found = policy.model, []
    with evaluating(model), shared_attention.native(model, name), _exact_head(model):
        for group in groups:
            for rollout in group.rollouts:
                ids = group.prompt_ids + rollout.completion_ids
                row = torch.tensor([ids], device=policy.device)
                logits = policy.call(row, (), False)
                rows = logits[0, len(group.prompt_ids) - 1 : -1]
                target = row[0, len(group.prompt_ids) :]
                logp = segments.target_logp(rows, target, policy.temperature)
                found.append(logp.double().sum())
    return torch.stack(found)
