"""Works out the losses and gradients of the family by hand, and writes them into vectors.json.

    python tests/algorithms/vectors_made.py

Plain Python in float64: no tensor, no autograd, nothing of the package. A formula takes the log-
probabilities twice, as what moves and as what it is told to hold still (the stop gradients), and
its gradient is a complex step: with h = 1e-30 there is no difference to cancel, so the derivative
is exact to a rounding (Squire and Trapp, SIAM Review 40, 1998). Minimum, clamp and comparison look
at the real part, as they do in the code that is tested.

The published numbers are not written: a loss that is not the published one to 1e-6 ends the script
with its name. So vectors.json holds what was published, and beside it the gradients of the same
formulas; `--check` writes nothing, and fails where the file would change.
"""

import cmath
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "vectors.json"
H = 1e-30  # the complex step
EPSILON, BETA, MAX_LENGTH = 0.2, 0.1, 8
Rows = list[list[Any]]  # ragged, one list per completion
Loss = Callable[[Rows, Rows], Any]  # (what moves, the same held still) -> the loss of the update


def gradient(loss: Loss, logp: Rows) -> list[float]:
    """d loss / d logp of every token, in one column."""
    out, flat = [], [x for row in logp for x in row]
    for t in range(len(flat)):
        moved = [x + H * 1j if u == t else x for u, x in enumerate(flat)]
        out.append(complex(loss(cut(moved, logp), logp)).imag / H)
    return out


def real(x: Any) -> float:
    return complex(x).real


def smaller(x: Any, y: Any) -> Any:
    return x if real(x) <= real(y) else y


def larger(x: Any, y: Any) -> Any:
    return x if real(x) >= real(y) else y


def clamp(x: Any, low: float, high: float) -> Any:
    return low if real(x) < low else high if real(x) > high else x


def sigmoid(x: Any) -> Any:
    return 1 / (1 + cmath.exp(-x))


# The parts of an objective (docs/algorithms.md).


def clip(ratio: Any, a: float, high: float = EPSILON, delta: float | None = None) -> Any:
    gain = smaller(ratio * a, clamp(ratio, 1 - EPSILON, 1 + high) * a)
    if delta is not None and a < 0:
        gain = larger(gain, delta * a)
    return -gain


def sapo(ratio: Any, a: float) -> Any:
    tau = 1.0 if a > 0 else 1.05
    return -sigmoid(tau * (ratio - 1)) * 4 / tau * a


def vespo_weight(log_w: float, a: float) -> float:
    k, lam = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    return real(cmath.exp(lam + k * log_w - lam * cmath.exp(log_w)))


def k1(d: Any) -> Any:
    return d


def k2(d: Any) -> Any:
    return d * d / 2


def k3(d: Any) -> Any:
    return cmath.exp(-d) - 1 + d


def sequence_sum(terms: Rows) -> Any:
    return sum(sum(row) for row in terms) / len(terms)


def sequence_mean(terms: Rows) -> Any:
    return sum(sum(row) / len(row) for row in terms) / len(terms)


def token_mean(terms: Rows) -> Any:
    return sum(sum(row) for row in terms) / sum(len(row) for row in terms)


def constant(terms: Rows) -> Any:
    return sum(sum(row) for row in terms) / (len(terms) * MAX_LENGTH)


def each(term: Callable[..., Any], *columns: Rows) -> Rows:
    """`term` of every token."""
    return [[term(*one) for one in zip(*rows, strict=True)] for rows in zip(*columns, strict=True)]


def spread(rows: Sequence[float], like: Rows) -> Rows:
    return [[value] * len(row) for value, row in zip(rows, like, strict=True)]


def whitened(values: list[float], eps: float) -> list[float]:
    """(x - mean) / sqrt(var + eps), with Bessel's correction."""
    mean = sum(values) / len(values)
    var = sum((x - mean) ** 2 for x in values) / (len(values) - 1)
    return [(x - mean) / (var + eps) ** 0.5 for x in values]


def cut(values: Sequence[Any], like: Rows) -> Rows:
    """A flat column in rows again."""
    rest = iter(values)
    return [[next(rest) for _ in row] for row in like]


def leave_one_out(r: list[float]) -> list[float]:
    return [x - (sum(r) - x) / (len(r) - 1) for x in r]


def loo_std(s: list[float]) -> list[float]:
    """NeMo RL's: the std of the other scores."""
    out = []
    for i in range(len(s)):
        others = [x for j, x in enumerate(s) if j != i]
        n, mean = len(others), sum(others) / len(others)
        out.append(((sum(x * x for x in others) / n - mean**2) * n / (n - 1)) ** 0.5)
    return out


class Batch:
    """The four completions of DIAL."""

    def __init__(self, dial: dict[str, Any]) -> None:
        self.old: Rows = dial["old"]
        self.ref: Rows = dial["ref"]
        self.new = each(lambda x, d: x + d, self.old, dial["step"])
        self.score: list[float] = dial["scores"]
        self.kl = [sum(r) for r in each(lambda x, y: x - y, self.old, self.ref)]
        self.reward = [s - BETA * k for s, k in zip(self.score, self.kl, strict=True)]

    def tokens(self, a: Sequence[float], policy: Callable[..., Any], agg: Any) -> Loss:
        """A loss whose terms are `policy(ratio, A)` of every token."""
        return self.by_token(spread(a, self.old), policy, agg)

    def by_token(self, a: Rows, policy: Callable[..., Any], agg: Any) -> Loss:
        def loss(moving: Rows, still: Rows) -> Any:
            return agg(each(lambda x, o, w: policy(cmath.exp(x - o), w), moving, self.old, a))

        return loss

    def logs(self, a: Sequence[float], agg: Any, weight: Any = None) -> Loss:
        """REINFORCE: -w A logp of every token; the weight sees only what is held still."""

        def loss(moving: Rows, still: Rows) -> Any:
            w = weight(still) if weight else spread([1.0] * len(a), still)
            return agg(each(lambda x, c, b: -c * b * x, moving, w, spread(a, still)))

        return loss

    def rows(self, a: Sequence[float], policy: Any, mean: bool, weigh: bool = False) -> Loss:
        """One ratio per completion: of the sum of its log-ratios, or of their mean."""

        def loss(moving: Rows, still: Rows) -> Any:
            total = 0.0
            for x, o, b in zip(moving, self.old, a, strict=True):
                d = sum(x) - sum(o)
                term = policy(cmath.exp(d / len(x) if mean else d), b)
                total = total + term * (len(x) if weigh else 1)
            return total / len(a)

        return loss

    def penalty(self, k: Any, agg: Any, weight: Any = None) -> Loss:
        """BETA times a token's KL in the loss, weighted by its ratio, by score, or not."""

        def loss(moving: Rows, still: Rows) -> Any:
            base = {"ratio": self.old, "score": still}.get(weight, moving)
            terms = each(lambda x, r, b: k(x - r) * cmath.exp(x - b), moving, self.ref, base)
            return BETA * agg(terms)

        return loss


def plus(one: Loss, other: Loss) -> Loss:
    return lambda moving, still: one(moving, still) + other(moving, still)


def dialects(b: Batch) -> dict[str, tuple[Any, Loss, Loss | None]]:
    """Every row of DIAL: its advantages, its policy term, its KL term."""
    a0, raw = leave_one_out(b.reward), leave_one_out(b.score)
    scaled = [a / (std + 1e-6) for a, std in zip(raw, loo_std(b.score), strict=True)]
    scored = b.penalty(k3, token_mean, "score")
    dual = lambda ratio, a: clip(ratio, a, delta=3.0)  # noqa: E731

    def rest(row: list[float], ref: list[float], t: int) -> float:
        return sum(row[t:]) - sum(ref[t:])

    to_go = [
        [a - BETA * rest(row, ref, t) for t in range(len(row))]
        for a, row, ref in zip(raw, b.old, b.ref, strict=True)
    ]
    earned = [
        [s - BETA * rest(row, ref, t) for t in range(len(row))]
        for s, row, ref in zip(b.score, b.old, b.ref, strict=True)
    ]
    flat = [x for row in earned for x in row]
    mean = sum(b.score) / len(b.score)
    above = [s - mean for s in b.score]
    centred = [x for row in spread(above, b.old) for x in row]
    batch = [r - sum(b.reward) / len(b.reward) for r in b.reward]
    greedy = [r - 0.25 for r in b.reward]
    plain, minus = cut(whitened(flat, 1e-8), b.old), cut(whitened(centred, 1e-8), b.old)
    taught = {discount: distilled(b, raw, discount) for discount in (0.0, 0.5)}
    return {
        "paper": (a0, b.logs(a0, sequence_sum), None),
        "trl, default": (a0, b.rows(a0, clip, mean=False), None),
        "verl, KL in reward": (a0, b.tokens(a0, dual, token_mean), None),
        "verl, KL off": (raw, b.tokens(raw, dual, token_mean), None),
        "openrlhf": (to_go, b.by_token(to_go, clip, token_mean), None),
        "ms_swift": (a0, b.tokens(a0, clip, sequence_mean), None),
        "nemo_rl, loo_std off": (raw, b.tokens(raw, clip, token_mean), scored),
        "nemo_rl, loo_std on": (scaled, b.tokens(scaled, clip, token_mean), scored),
        "nemo_rl reinforce, loo_std off": (raw, b.logs(raw, token_mean), scored),
        "nemo_rl reinforce, loo_std on": (scaled, b.logs(scaled, token_mean), scored),
        "reinforce, batch_mean": (batch, b.logs(batch, sequence_sum), None),
        "remax, greedy 0.25": (greedy, b.logs(greedy, sequence_sum), None),
        "reinforce_pp": (plain, b.by_token(plain, clip, token_mean), None),
        "reinforce_pp, minus_group_mean": (
            minus, b.by_token(minus, clip, token_mean), b.penalty(k2, token_mean),
        ),
        "opd": (raw, b.by_token(taught[0.0], clip, token_mean), None),
        "opd, kl_discount 0.5": (raw, b.by_token(taught[0.5], clip, token_mean), None),
    }  # fmt: skip


def distilled(b: Batch, a: Sequence[float], discount: float) -> Rows:
    """A completion's advantage minus BETA times each token's log-ratio to the teacher, and what of
    the later tokens' a discount leaves.
    """
    rows = []
    for own, d in zip(a, each(lambda x, y: x - y, b.old, b.ref), strict=True):
        charges = [
            sum(discount ** (u - t) * x for u, x in enumerate(d) if u >= t) for t in range(len(d))
        ]
        rows.append([own - BETA * charge for charge in charges])
    return rows


def loss_types(b: Batch, a: list[float]) -> dict[str, tuple[Loss, Loss | None]]:
    """Every row of LOSS-GRPO."""

    def capped(cap: float) -> Any:
        return lambda still: each(lambda x, o: min(real(cmath.exp(x - o)), cap), still, b.old)

    def phi(still: Rows) -> Rows:
        logs = [sum(x) - sum(o) for x, o in zip(still, b.old, strict=True)]
        return spread([vespo_weight(d, w) for d, w in zip(logs, a, strict=True)], still)

    def tokens(agg: Any) -> tuple[Loss, None]:
        return b.tokens(a, clip, agg), None

    grpo = b.tokens(a, clip, sequence_mean)
    return {
        "grpo": (grpo, None),
        "bnpo": tokens(token_mean),  # one micro-batch
        "dapo": tokens(token_mean),
        "dr_grpo": tokens(constant),
        "sapo": (b.tokens(a, sapo, sequence_mean), None),
        "gspo": (b.rows(a, clip, mean=True), None),
        "cispo": (b.logs(a, token_mean, capped(5.0)), None),
        "cispo, cap 1.1": (b.logs(a, token_mean, capped(1.1)), None),
        "luspo": (b.rows(a, clip, mean=True, weigh=True), None),
        "vespo": (b.logs(a, token_mean, phi), None),
        "grpo, k3 in loss": (grpo, b.penalty(k3, sequence_mean)),
        "grpo, ratio-weighted k3": (grpo, b.penalty(k3, sequence_mean, "ratio")),
    }


def generalized(v: dict[str, Any]) -> None:
    """GAE (arXiv 1506.02438) and PPO's clipped value loss, into the vector."""
    e, value, gamma, lam = v["token_rewards"], v["value"], v["gamma"], v["lam"]
    a, later, after = [0.0] * len(e), 0.0, 0.0
    for t in reversed(range(len(e))):
        later = a[t] = e[t] + gamma * after - value[t] + gamma * lam * later
        after = value[t]
    returns = [x + y for x, y in zip(a, value, strict=True)]
    published(v, "advantage", a)
    published(v, "returns", returns)
    published(v, "whitened", whitened(a, 1e-8))
    low = [[x - v["epsilon_value"], x + v["epsilon_value"]] for x in value]

    def loss(moving: Rows, still: Rows) -> Any:
        terms = [
            larger((x - r) ** 2, (clamp(x, *bounds) - r) ** 2)
            for x, r, bounds in zip(moving[0], returns, low, strict=True)
        ]
        return sum(terms) / len(terms) / 2

    published(v, "value_loss", real(loss([v["new_value"]], [v["new_value"]])))
    v["value_gradient"] = rounded(gradient(loss, [v["new_value"]]))


def divergence(v: dict[str, Any]) -> None:
    """GKD's generalized JSD (arXiv 2306.13649, eq. 1) of one token, with the student's gradient."""

    def shares(logits: Sequence[Any]) -> list[Any]:
        powers = [cmath.exp(x) for x in logits]
        return [x / sum(powers) for x in powers]

    def kl(p: list[Any], q: list[Any]) -> Any:
        return sum(x * (cmath.log(x) - cmath.log(y)) for x, y in zip(p, q, strict=True))

    teacher = shares(v["teacher"])
    for case in v["cases"]:
        b = case["beta"]

        def loss(moving: Rows, still: Rows, b: float = b) -> Any:
            student = shares(moving[0])
            mixture = [b * y + (1 - b) * x for x, y in zip(student, teacher, strict=True)]
            if b in (0, 1):
                return kl(student, teacher) if b else kl(teacher, student)
            return b * kl(teacher, mixture) + (1 - b) * kl(student, mixture)

        published(case, "divergence", real(loss([v["student"]], [v["student"]])))
        case["gradient"] = rounded(gradient(loss, [v["student"]]))


def normalized(norm: dict[str, Any], pulled: dict[str, Any]) -> None:
    """What TRL up to 0.21 divides by: std + 1e-8; its successors std + 1e-4. No guard in either."""
    groups = [leave_one_out([float(x) for x in row]) for row in norm["scores"]]
    flat = [x for row in groups for x in row]
    for name, eps in (("normalized", 1e-4), ("normalized trl_0_21", 1e-8)):
        published(norm, name, cut(over_std(flat, eps), groups))
    published(norm, "first_alone trl_0_21", over_std(groups[0], 1e-8)[0])
    pull = [-pulled["beta"] * k for k in pulled["kl"]]
    for name, eps in (("unguarded", 1e-4), ("unguarded trl_0_21", 1e-8)):
        published(pulled, name, over_std(leave_one_out(pull), eps))


def over_std(values: list[float], eps: float) -> list[float]:
    mean = sum(values) / len(values)
    std = (sum((x - mean) ** 2 for x in values) / (len(values) - 1)) ** 0.5
    return [(x - mean) / (std + eps) for x in values]


def published(case: dict[str, Any], name: str, found: Any) -> None:
    """Compare with the published number; write it where none was published."""
    if name not in case:
        case[name] = rounded(found)
    if not close(case[name], found):
        raise SystemExit(f"{name}: the file has {case[name]}, worked out {found}")


def close(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(close(*p) for p in zip(one, other, strict=True))
    return bool(abs(one - other) <= 1e-6)


def rounded(value: Any) -> Any:
    """To 8 decimals, a whole number without its point, and no -0."""
    if isinstance(value, list):
        return [rounded(x) for x in value]
    found = round(value, 8) + 0.0
    return int(found) if found == int(found) else found


def fill(case: dict[str, Any], b: Batch, policy: Loss, kl: Loss | None, total: bool) -> None:
    """Losses (`total`: with the KL term) and, of the sum of both terms, the gradients."""
    whole = policy if kl is None else plus(policy, kl)
    for where, x in (("at_old", b.old), ("at_new", b.new)):
        published(case, where, real((whole if total else policy)(x, x)))
        if kl is not None:
            published(case, f"kl_{where}", real(kl(x, x)))
        case[f"token_gradient_{where}"] = rounded(gradient(whole, x))


def laid_out(value: Any, indent: int = 0, used: int = 0) -> str:
    """JSON that fits 100 columns: on one line where it can be, else its entries on their own."""
    text, pad = json.dumps(value), " " * (indent + 2)
    if len(text) + used < 98 and indent:
        return text
    if isinstance(value, dict):
        heads = [f"{pad}{json.dumps(key)}: " for key in value]
        each_one = zip(heads, value.values(), strict=True)
        entries = [head + laid_out(x, indent + 2, len(head)) for head, x in each_one]
        return "{\n" + ",\n".join(entries) + "\n" + " " * indent + "}"
    if not isinstance(value[0], list | dict):
        inner = textwrap.fill(text[1:-1], 98, initial_indent=pad, subsequent_indent=pad)
        return f"[\n{inner}\n{' ' * indent}]"
    entries = [pad + laid_out(x, indent + 2, len(pad)) for x in value]
    return "[\n" + ",\n".join(entries) + "\n" + " " * indent + "]"


def main() -> None:
    text = FILE.read_text()
    vectors = json.loads(text)
    dial, grpo = vectors["DIAL"], vectors["LOSS-GRPO"]
    b = Batch(dial)
    for name, (a, policy, kl) in dialects(b).items():
        case = dial["cases"][name]
        if isinstance(a[0], list):
            published(case, "token_advantages", [x for row in a for x in row])
        else:
            published(case, "advantage", a)
        fill(case, b, policy, kl, total=False)
    for name, (policy, kl) in loss_types(b, grpo["advantage"]).items():
        fill(grpo[name], b, policy, kl, total=True)
    generalized(vectors["GAE"])
    divergence(vectors["JSD"])
    normalized(vectors["NORM"], vectors["NORM-KL"])
    after = laid_out(vectors) + "\n"
    if "--check" not in sys.argv:
        FILE.write_text(after)
    elif after != text:
        raise SystemExit(f"{FILE.name} would change: python tests/algorithms/vectors_made.py")


if __name__ == "__main__":
    main()
