"""On-policy distillation: a student learns from a teacher on the student's own completions.

The teacher q is the model of `model.ref_path`, frozen, with the student's vocabulary, or the model
of a server (`teacher.base_url`), which returns log-probabilities of given tokens. kl_in=reward:
reverse KL, token by token, from the log-probabilities of the sampled tokens alone ("On-Policy
Distillation", Thinking Machines Lab, 2025),

    d_t  = old_logp_t - teacher_logp_t                        k1 of KL(student || teacher)
    A_t  = A_i - beta sum_{u >= t} kl_discount^(u-t) d_u      A_i: from the rewards only, 0 without
    loss = -mean_t min(rho_t A_t, clip(rho_t) A_t)            rho_t = pi(y_t) / pi_old(y_t)

kl_discount 0 is the gradient of each token's own KL(pi_t || q_t); with 1 a token is charged for
what follows too, which is the gradient of the completions' KL. kl_in=loss: the generalized
Jensen-Shannon divergence over the whole vocabulary (GKD, arXiv 2306.13649, eq. 1), b = jsd_beta,

    m_t  = b q_t + (1 - b) pi_t
    D_t  = b KL(q_t || m_t) + (1 - b) KL(pi_t || m_t)         0: KL(q || pi); 1: KL(pi || q)
    loss = policy term of A_i + beta mean_t D_t               its gradient is through pi_t alone

Without a reward, or with only weights of 0, every score is 0, and only the teacher counts. A
completion without a score is still trained on, with A_i = 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from rloo_cli.algorithms.common.completion_rules import needed_value_problems, switch_problems
from rloo_cli.algorithms.common.config import Switches
from rloo_cli.algorithms.common.family import aggregate_loss, estimate_kl
from rloo_cli.algorithms.common.forward_plan import ForwardPlan
from rloo_cli.algorithms.common.hooks import AdvantageInputs, Advantages, Loss, LossInputs
from rloo_cli.algorithms.common.teacher_rules import teacher_server_problems
from rloo_cli.algorithms.rloo import RLOO
from rloo_cli.config.schema import RunConfig, key
from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.utils.errors import Problem, clash_problems, value_problem

if TYPE_CHECKING:
    from torch import Tensor

    from rloo_cli.data.packing import MicroBatch

OPD = "algorithm=opd"
WHOLE = ("single", "ddp")  # engines with whole models in each process


class Config(Switches):
    name: Literal["opd"] = key("On-policy distillation from a teacher")
    kl_discount: float = key(
        "kl_in=reward: share of a later token's KL charged to a token, to the power of their"
        " distance; 0 = only its own, 1 = all that follow",
        ge=0,
        le=1,
    )
    jsd_beta: float = key(
        "kl_in=loss: the teacher's share of the mixture in GKD's divergence; 0 ="
        " KL(teacher || student), 1 = KL(student || teacher)",
        ge=0,
        le=1,
    )
    teacher: TeacherConfig = key("A teacher on a vLLM server, instead of model.ref_path")

    @property
    def teacher_server(self) -> TeacherConfig | None:
        """The teacher's server; None if the teacher is loaded here."""
        return None if self.teacher.base_url is None else self.teacher

    @property
    def needs_reference(self) -> bool:
        """Whether the teacher is loaded here."""
        return super().needs_reference and self.teacher_server is None

    @property
    def trains_kl_of_unscored(self) -> bool:
        """Every completion is trained on, with the teacher's term."""
        return True

    @property
    def learns_without_rewards(self) -> bool:
        """The teacher's term is enough; rewards are optional."""
        return True

    @property
    def teacher_jsd_beta(self) -> float | None:
        """`jsd_beta` if the teacher's whole distributions are needed; else None."""
        return self.jsd_beta if self.kl_in == "loss" else None


class OnPolicyDistillation(RLOO[Config]):
    """Advantages of the scores only; the teacher's part is added per token, in the loss."""

    def combine_rewards(self, raw: Tensor, weights: Sequence[float]) -> tuple[Tensor, Tensor]:
        """The default, but every completion gets a score of 0 if no reward has a weight.

        (F, P, K), F -> (P, K), (P, K) bool
        """
        if any(weights):
            return super().combine_rewards(raw, weights)
        score = raw.new_zeros(raw.shape[1:])
        return score, score == 0

    def advantages(self, inputs: AdvantageInputs) -> Advantages:
        """Rewards with the KL, for the metrics; advantages without it. (P, K) each -> (P, K)"""
        found = super().advantages(replace(inputs, kl=None))
        if inputs.kl is None:
            return found
        reward = inputs.score - self.config.beta * inputs.kl
        return replace(found, reward=reward.masked_fill(~inputs.scorable, 0.0))

    def loss(self, inputs: LossInputs) -> Loss:
        """The policy term with each token's charge in it, or with the divergence beside it."""
        config, micro_batch = self.config, inputs.micro_batch
        if config.kl_in == "reward":
            assert inputs.ref_logp is not None
            old = inputs.old_logp if micro_batch.kl_logp is None else micro_batch.kl_logp
            k = micro_batch.mask * estimate_kl(old.detach() - inputs.ref_logp, config)
            a = inputs.advantage
            a = a if a.shape == k.shape else a[micro_batch.sequence_ids]
            a = a - config.beta * discount_later_tokens(k, micro_batch, config.kl_discount)
            return super().loss(replace(inputs, advantage=a))
        assert inputs.divergence is not None
        found = super().loss(replace(inputs, ref_logp=None))
        pull = aggregate_loss(inputs.divergence, micro_batch, config)
        pull = config.beta * pull / inputs.denominator
        return replace(found, total=found.total + pull, kl=pull.detach())

    def forward_plan(self, run: RunConfig) -> ForwardPlan:
        """Every completion is trained on, including groups of equal scores."""
        return replace(super().forward_plan(run), every_completion=True)

    def rules(self, run: RunConfig) -> Iterator[Problem]:
        """Requirements of a teacher, and keys of a reference that a teacher ignores."""
        in_loss = self.config.kl_in == "loss"
        for problem in super().rules(run):
            # k1 in the loss is refused because of its gradient; the divergence has its own.
            if not (in_loss and problem.where == "algorithm.kl_estimator"):
                yield problem
        yield from _teacher_problems(self.config, run)
        yield from _idle_choices(self.config)
        if in_loss:
            yield from _whole_distribution_problems(run)

    def warnings(self, run: RunConfig) -> Iterator[str]:
        """Without those about rewards, which a distillation may leave out."""
        return (w for w in super().warnings(run) if not w.startswith("every reward has the weight"))


def discount_later_tokens(values: Tensor, micro_batch: MicroBatch, discount: float) -> Tensor:
    """sum_{u >= t} discount^(u-t) x_u over the later tokens of the same completion. (N,) -> (N,)

    Tokens of a completion are neighbours and in order, as in a `MicroBatch`.
    """
    if discount == 0:
        return values
    total, sequence = values.clone(), micro_batch.sequence_ids
    reach, factor = 1, discount
    # Each round doubles the reach of a sum: a loop over tokens would be sequential.
    longest = int(micro_batch.sequence_ids.bincount().max()) if len(values) else 0
    while reach < longest:
        same = sequence[:-reach] == sequence[reach:]
        later = total.new_zeros(len(total))
        later[:-reach] = total[reach:].where(same, 0.0)
        total, reach, factor = total + factor * later, reach * 2, factor * factor
    return total


def _teacher_problems(config: Config, run: RunConfig) -> Iterator[Problem]:
    if config.teacher_server is not None:
        server, ref_path = config.teacher_server, run.model.ref_path
        yield from teacher_server_problems(config, server, ref_path, run.generation)
    elif run.model.ref_path is None:
        fix = "a larger model with the student's vocabulary, or algorithm.teacher.base_url=the URL"
        fix += " of a vLLM server with one"
        what, why = "names no teacher", "the teacher would be a copy of the student"
        yield value_problem("model.ref_path", "null", what, fix, why)
    if config.beta == 0 or config.kl_in == "none":
        key = "algorithm.beta" if config.beta == 0 else "algorithm.kl_in"
        why = f"beta={config.beta:g} and kl_in={config.kl_in} remove the teacher from the loss"
        fix = "algorithm.beta=1.0 algorithm.kl_in=reward"
        yield Problem("nothing would be distilled", key, why, fix)
    if every := run.model.ref_sync.every:
        key, why = "model.ref_sync.every", "the teacher must not follow its student"
        yield value_problem(key, every, "does not go with algorithm=opd", 0, why)


def _idle_choices(config: Config) -> Iterator[Problem]:
    """Switches that are not read, or that do not work with per-token advantages."""
    plain = {"kl_in_baseline": False, "kl_credit": "sequence", "kl_ratio_weighted": False}
    plain |= {"turn_rewards": "sum", "dialect": None}
    why = "it is ignored: kl_discount sets what a token is charged for"
    yield from needed_value_problems(config, OPD, plain, why)
    refused = {
        "ratio_level": (
            config.kl_in == "reward" and not config.has_token_terms,
            "the teacher gives every token its own advantage, but a completion has only one ratio",
            "token, or algorithm.kl_in=loss",
        ),
        "zero_std_groups": (
            config.zero_std_groups != "keep",
            "a group of equal scores is trained on like any other, but this leaves it out",
            "keep",
        ),
    }
    yield from switch_problems(config, OPD, refused)


def _whole_distribution_problems(run: RunConfig) -> Iterator[Problem]:
    """kl_in=loss needs all logits of student and teacher at the same time."""
    engine = run.distributed.engine
    clashes = [
        (
            engine not in WHOLE,
            "algorithm.kl_in",
            f"distributed.engine={engine}",
            "a divergence over the whole vocabulary needs whole models in each process",
            "distributed=ddp, or algorithm.kl_in=reward",
        ),
        (
            run.model.ref_offload,
            "model.ref_offload",
            "model.ref_offload=true",
            "each forward pass needs teacher and student together on the device",
            "model.ref_offload=false, or algorithm.kl_in=reward",
        ),
    ]
    yield from clash_problems("algorithm.kl_in=loss", clashes)
