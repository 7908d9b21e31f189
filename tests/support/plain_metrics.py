"""Every metric of a step once more, from what a run has written: samples, rollouts, checkpoints.

It shares nothing with the package: it reads the files by itself and computes with plain torch and
transformers' own forward. A metric is a `Part`, what several steps are merged from: a mean is a
total and a count, so that a line of several steps is their totals over their counts.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
NUM_PROMPTS = 64  # of the data set make:tiny
CHANGED_TENSORS, CHANGED_NUMBERS = 16, 256  # whose change update/changed_frac is of
INF = float("inf")


class Part(NamedTuple):
    """One metric of one step: `kind` says how several make a line."""

    kind: str  # mean, rms: total over count; min, max; last; each: the mean over steps
    value: float
    count: float = 1.0


Parts = dict[str, Part]


def mean(total: Any, count: Any) -> Part:
    return Part("mean", float(total), float(count))


def of_step(value: Any, count: Any) -> Part:
    """A number of the whole step, which is no sum, weighted by a count."""
    return Part("mean", float(value) * float(count), float(count))


def merged(steps: Sequence[Parts]) -> dict[str, float]:
    """The line of these steps."""
    line = {}
    for name in dict.fromkeys(n for parts in steps for n in parts):
        parts = [step[name] for step in steps if name in step]
        kind, values = parts[0].kind, [part.value for part in parts]
        count = sum(part.count for part in parts)
        if kind in ("mean", "rms"):
            whole = sum(values) / count if count else values[-1]
            line[name] = whole**0.5 if kind == "rms" else whole
        else:
            rules = {"min": min, "max": max, "last": lambda v: v[-1]}
            line[name] = rules.get(kind, lambda v: sum(v) / len(v))(values)
    return line


@dataclass(frozen=True)
class Rules:
    """How a run trains, said by the test and not read from the run."""

    weights: Mapping[str, float] = field(default_factory=lambda: {"digits": 1.0})
    beta: float = 0.05
    kind: str = "rloo"  # rloo, cispo, ppo, remax
    epsilon: float = 0.2
    cap: float = 5.0  # of cispo
    delta: float = INF
    iterations: int = 1
    rate: float = 0.01
    max_norm: float = INF
    missing_eos: float = 0.0
    overlong: tuple[int, int, float] | None = None  # max_length, cache, weight
    masks_truncated: bool = False
    drops_flat: bool = False
    resamples: bool = False
    correction: tuple[float, float] | None = None  # floor and cap of sequence weights, truncated


@dataclass
class Written:
    """What a run has left."""

    folder: Path
    start: Mapping[str, Tensor]  # the weights that it began with: its reference

    def lines(self, evaluations: bool = False) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line for line in lines if ("step_time" not in line) is evaluations]

    def samples(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / "samples" / f"{name}.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def record(self, step: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The head of a step's rollouts, with their texts, and their tensors."""
        path = self.folder / "rollouts" / f"step_{step:06d}.safetensors"
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            head = json.loads(file.metadata()["record"])
        return head | json.loads(bytes(tensors.pop("texts").tolist())), tensors

    def weights(self, step: int) -> Mapping[str, Tensor]:
        """The policy's weights after a step."""
        if step == 0:
            return self.start
        folder = self.folder / f"checkpoint-{step}"
        return load_file(folder / "model.safetensors")

    def model(self, step: int) -> Any:
        """The policy after a step, as transformers runs it."""
        config = next(self.folder.glob("checkpoint-*"))
        model = AutoModelForCausalLM.from_pretrained(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        model.load_state_dict(dict(self.weights(step)), strict=False)
        return model.eval()


@dataclass
class Row:
    """One completion of a step."""

    sample: dict[str, Any]
    prompt: list[int]
    ids: list[int]
    mask: list[int]
    logp: list[float]  # of the sampler, of each sampled token
    group: int

    @property
    def length(self) -> int:
        return sum(self.mask)


def read_rows(run: Written, step: int) -> list[Row]:
    """The completions of a step: its samples, and their ids from its rollouts."""
    head, tensors = run.record(step)
    samples = run.samples(f"step_{step:06d}")
    prompts = torch.split(tensors["prompt_ids"], tensors["prompt_lengths"].tolist())
    lengths = tensors["completion_lengths"].tolist()
    ids = torch.split(tensors["completion_ids"], lengths)
    logps = torch.split(tensors["behaviour_logp"], lengths)
    got = [rollout for group in head["groups"] for rollout in group["rollouts"]]
    per_group = len(samples) // len(prompts)
    rows = []
    for i, sample in enumerate(samples):
        mask = got[i].get("mask") or [1] * lengths[i]
        kept = [x for x, m in zip(logps[i].tolist(), mask, strict=True) if m]
        group = i // per_group
        rows.append(Row(sample, prompts[group].tolist(), ids[i].tolist(), mask, kept, group))
    return rows


def token_logits(model: Any, row: Row) -> tuple[Tensor, Tensor]:
    """Log-probabilities of all ids at each sampled token, float64, and the tokens. (T, V), (T)"""
    ids = torch.tensor([row.prompt + row.ids])
    logits = model(input_ids=ids).logits[0, len(row.prompt) - 1 : -1].double()
    kept = torch.tensor(row.mask).bool()
    return logits.log_softmax(-1)[kept], torch.tensor(row.ids)[kept]


def token_logp(model: Any, row: Row) -> Tensor:
    table, ids = token_logits(model, row)
    return table.gather(1, ids[:, None]).squeeze(1)


@torch.no_grad()
def token_entropy(model: Any, row: Row) -> Tensor:
    table, _ = token_logits(model, row)
    return -(table.exp() * table).sum(-1)


@dataclass
class Scored:
    """A step's completions with everything that follows from their scores, one list entry each."""

    rows: list[Row]
    plain: list[float | None]
    shaped: list[float | None]
    masked: list[bool]
    groups: list[list[int]]  # indices of rows

    def scorable(self, group: list[int]) -> list[int]:
        return [i for i in group if self.shaped[i] is not None]

    def is_flat(self, group: list[int]) -> bool:
        values = [self.shaped[i] for i in self.scorable(group)]
        return len(set(values)) < 2


def _gaps_by_depth(gaps: Sequence[Tensor]) -> Parts:
    """Squared gaps of the tokens 0-63, 64-511, 512-4095 and the later ones of completions."""
    parts: Parts = {}
    for first, end in ((0, 64), (64, 512), (512, 4096), (4096, None)):
        found = torch.cat([gap[first:end] for gap in gaps])
        if len(found):
            part = Part("rms", float(found.square().sum()), len(found))
            parts[f"sampling/logp_diff_from{first}"] = part
    return parts


def score_rows(rows: list[Row], rules: Rules) -> Scored:
    """Weighted sums of what the rewards said, then penalties."""
    plain: list[float | None] = []
    shaped: list[float | None] = []
    for row in rows:
        said = {n: v for n, v in row.sample["rewards"].items() if v is not None}
        score = sum(rules.weights[n] * v for n, v in said.items()) if said else None
        plain.append(score)
        if score is not None and rules.overlong is not None:
            longest, cache, weight = rules.overlong
            score += weight * min(0.0, max(-1.0, (longest - cache - row.length) / cache))
        if score is not None and not row.sample["terminated"]:
            score -= rules.missing_eos
        shaped.append(score)
    masked = [rules.masks_truncated and not row.sample["terminated"] for row in rows]
    groups = [[i for i, r in enumerate(rows) if r.group == g] for g in range(rows[-1].group + 1)]
    return Scored(rows, plain, shaped, masked, groups)


def std(values: Sequence[float]) -> float:
    middle = sum(values) / len(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


def score_parts(scored: Scored, rules: Rules) -> Parts:
    """Metrics of scores and groups."""
    rows, parts = scored.rows, Parts()
    for name in rules.weights:
        said = [v for r in rows if (v := r.sample["rewards"][name]) is not None]
        parts[f"reward/{name}/none_frac"] = mean(len(rows) - len(said), len(rows))
        if said:
            parts[f"reward/{name}/mean"] = mean(sum(said), len(said))
        if len(said) > 1:
            parts[f"reward/{name}/std"] = of_step(std(said), len(said))
    known = [s for s in scored.plain if s is not None]
    parts["reward/valid_frac"] = mean(len(known), len(rows))
    parts["reward"] = mean(sum(known), len(known))
    parts["reward_std_batch"] = of_step(std(known), len(known))
    whole = [g for g in scored.groups if len(scored.scorable(g)) >= 2]
    parts["groups/unscorable"] = Part("each", len(scored.groups) - len(whole))
    if whole:
        spreads = [std([scored.plain[i] or 0.0 for i in scored.scorable(g)]) for g in whole]
        parts["reward_std"] = mean(sum(spreads), len(whole))
    if whole and rules.kind in ("rloo", "cispo"):
        parts["frac_reward_zero_std"] = mean(sum(map(scored.is_flat, whole)), len(whole))
    flat = sum(map(scored.is_flat, scored.groups))
    parts["groups/dropped"] = Part("each", flat if rules.drops_flat or rules.resamples else 0)
    texts = [[tuple(rows[i].ids) for i in g] for g in scored.groups]
    parts["groups/duplicates"] = Part("each", sum(len(t) - len(set(t)) for t in texts))
    different = len({ids for t in texts for ids in t})
    parts["completions/unique_ratio"] = mean(different, len(rows))
    if len({tuple(row.prompt) for row in rows}) > 1:
        every = [ids for t in texts for ids in t]
        parts["completions/most_common_frac"] = mean(max(map(every.count, every)), len(rows))
    return parts


def length_parts(rows: list[Row]) -> Parts:
    """Metrics of lengths and ends."""
    ended = [r.length for r in rows if r.sample["terminated"]]
    parts = Parts()
    named = {"length": [r.length for r in rows], "terminated_length": ended}
    for name, lengths in named.items():
        if lengths:
            parts[f"completions/mean_{name}"] = mean(sum(lengths), len(lengths))
            parts[f"completions/min_{name}"] = Part("min", min(lengths))
            parts[f"completions/max_{name}"] = Part("max", max(lengths))
    parts["completions/clipped_ratio"] = mean(len(rows) - len(ended), len(rows))
    parts["val/num_eos_tokens"] = Part("each", len(ended))
    return parts


def sampler_parts(scored: Scored) -> Parts:
    """What the sampler's own log-probabilities say, over all completions that are not masked."""
    kept = [r for r, masked in zip(scored.rows, scored.masked, strict=True) if not masked]
    known = [x for r in kept for x in r.logp if not math.isnan(x)]
    tokens = sum(r.length for r in kept)
    return {
        "sampling/missing_frac": mean(tokens - len(known), tokens),
        "sampling/entropy": mean(-sum(known), tokens),
        "objective/entropy": mean(-sum(known), len(kept)),
    }


@dataclass
class Trainer:
    """One step trained again, from the weights before it: its own forward, loss and SGD."""

    run: Written
    rules: Rules
    step: int
    scored: Scored
    greedy: list[float] | None = None  # of each group
    values: list[Tensor] | None = None  # of each row, of a value model when the step began

    def __post_init__(self) -> None:
        self.model, self.reference = self.run.model(self.step - 1), self.run.model(0)
        self.parts: Parts = {}
        rules, scored = self.rules, self.scored
        active = [g for g in scored.groups if not (rules.drops_flat and scored.is_flat(g))]
        grouped = rules.kind in ("rloo", "cispo")
        self.usable = [
            i for g in active if not grouped or len(scored.scorable(g)) > 1
            for i in scored.scorable(g)
        ]  # fmt: skip
        self.trained = [i for i in self.usable if not scored.masked[i]]
        flat = {i for g in active if scored.is_flat(g) for i in g}
        skips_flat = grouped and rules.beta == 0
        self.forwarded = [i for i in self.trained if not (skips_flat and i in flat)]

    def run_step(self) -> Parts:
        rows = self.scored.rows
        with torch.no_grad():
            self.old = {i: token_logp(self.model, rows[i]) for i in self.forwarded}
            ref = {}
            if self.rules.beta:
                ref = {i: token_logp(self.reference, rows[i]) for i in self.forwarded}
            self.d = {i: self.old[i] - ref[i] for i in ref}
        self.kl = {i: float(d.sum()) for i, d in self.d.items()}
        self._advantages()
        self._objective()
        self._gaps()
        entropy = []
        self.updates: list[dict[str, float]] = []
        for _ in range(self.rules.iterations):
            entropy += [token_entropy(self.model, rows[i]) for i in self.forwarded]
            self._update()
        if entropy:
            whole = torch.cat(entropy)
            for name in ("entropy", "policy/entropy_avg"):
                self.parts[name] = mean(whole.sum(), len(whole))
        for name in self.updates[0]:
            found = [update[name] for update in self.updates]
            self.parts[name] = mean(sum(found), len(found))
        for name in ("learning_rate", "lr"):
            self.parts[name] = Part("last", self.rules.rate)
        self._ratios()
        self._work()
        return self.parts

    def _rewards(self, i: int) -> float:
        score = self.scored.shaped[i]
        assert score is not None
        return score - self.rules.beta * self.kl.get(i, 0.0)

    def _advantages(self) -> None:
        self.advantage: dict[int, Any] = {}
        kind = self.rules.kind
        if kind == "ppo":
            self._gae()
        for group in self.scored.groups if kind != "ppo" else ():
            chosen = [i for i in group if i in self.usable]
            reward = {i: self._rewards(i) for i in chosen}
            for i in chosen:
                others = [reward[j] for j in chosen if j != i]
                if kind == "remax":
                    assert self.greedy is not None
                    self.advantage[i] = reward[i] - self.greedy[self.scored.rows[i].group]
                elif self.scored.is_flat(group) and self.rules.beta == 0:
                    self.advantage[i] = 0.0
                elif kind == "cispo":
                    values = list(reward.values())
                    middle = sum(values) / len(values)
                    self.advantage[i] = (reward[i] - middle) / (std(values) + 1e-4)
                else:
                    self.advantage[i] = reward[i] - sum(others) / len(others)
        shown = [float(torch.as_tensor(a).mean()) for a in self.advantage.values()]
        if shown:
            self.parts |= {
                "advantages/mean": mean(sum(shown), len(shown)),
                "advantages/std": of_step(std(shown), len(shown)),
                "advantages/abs_max": Part("max", max(map(abs, shown))),
                "advantages/zero_frac": mean(sum(a == 0 for a in shown), len(shown)),
                "advantages/norm_skipped": Part("each", 0.0),
            }

    def _gae(self, lam: float = 0.95) -> None:
        """Whitened GAE, and returns, from the values that the step began with."""
        assert self.values is not None
        raw, self.returns = {}, {}
        for i in self.usable:
            earned = -self.rules.beta * self.d[i]
            earned[-1] += self.scored.shaped[i]
            value, found = self.values[i], torch.zeros_like(earned)
            after = last = 0.0
            for t in reversed(range(len(earned))):
                last = float(earned[t]) + after - float(value[t]) + lam * last
                found[t], after = last, float(value[t])
            raw[i], self.returns[i] = found, found + value
        whole = torch.cat([*raw.values()])
        scale = (whole.var(correction=0) + 1e-8).sqrt(), (whole.var() + 1e-8).sqrt()
        self.advantage = {i: (a - whole.mean()) / scale[1] for i, a in raw.items()}
        values = torch.cat([self.values[i] for i in self.usable])
        returns = torch.cat([self.returns[i] for i in self.usable])
        missed = returns - values
        explained = 1 - missed.var(correction=0) / returns.var(correction=0)
        self.parts["value/explained_variance"] = of_step(explained, len(returns))
        self.parts["loss/value_avg"] = mean(0.5 * missed.square().mean(), 1)
        self.parts["val/clipfrac_avg"] = mean(0, len(returns))  # of one pass: nothing has moved

    def _objective(self) -> None:
        beta, chosen = self.rules.beta, self.trained
        scores = sum(self.scored.shaped[i] or 0.0 for i in chosen)
        self.parts["objective/scores"] = mean(scores, len(chosen))
        total = sum(self.kl[i] for i in chosen) if beta else 0.0
        self.parts["objective/rlhf_reward"] = mean(scores - beta * total, len(chosen))
        if beta:
            self.parts["objective/kl"] = mean(total, len(chosen))
            self.parts["objective/non_score_reward"] = mean(-beta * total, len(chosen))
            tokens = sum(len(d) for d in self.d.values())
            self.parts["kl"] = mean(sum(self.kl.values()), tokens)

    def _gaps(self) -> None:
        """The sampler's log-probabilities against the trainer's."""
        if not self.forwarded:
            return
        rows = self.scored.rows
        theirs = {i: torch.tensor(rows[i].logp, dtype=torch.float64) for i in self.forwarded}
        gap = torch.cat([self.old[i] - theirs[i] for i in self.forwarded])
        self.parts |= {
            "sampling/kl": mean(-gap.sum(), len(self.forwarded)),
            "sampling/logp_diff_mean": mean(gap.abs().sum(), len(gap)),
            "sampling/logp_diff_rms": Part("rms", float(gap.square().sum()), len(gap)),
            "sampling/logp_diff_max": Part("max", float(gap.abs().max())),
            **_gaps_by_depth([self.old[i] - theirs[i] for i in self.forwarded]),
        }
        self.weight: dict[int, float] = {}
        if self.rules.correction is not None:
            floor, cap = self.rules.correction
            raw = {i: float((self.old[i] - theirs[i]).sum().exp()) for i in self.forwarded}
            self.weight = {i: min(max(w, floor), cap) for i, w in raw.items()}
            w, n = list(self.weight.values()), len(raw)
            total, squares = sum(raw.values()), sum(v * v for v in raw.values())
            name = "sampling/importance_sampling_ratio"
            self.parts |= {
                f"{name}/mean": mean(sum(w), n),
                f"{name}/min": Part("min", min(w)),
                f"{name}/max": Part("max", max(w)),
                "sampling/ess": of_step(total**2 / (n * squares), n),
                "sampling/capped_frac": mean(sum(self.weight[i] != raw[i] for i in raw), n),
                "sampling/masked_frac": mean(0, n),
            }

    def _units(self) -> list[tuple[int, Tensor, Tensor]]:
        """Row, log-ratio and log-probability of everything that has one ratio, with gradient."""
        units = []
        for i in self.forwarded:
            logp = token_logp(self.model, self.scored.rows[i])
            moved = logp - self.old[i]
            if self.rules.kind in ("rloo", "remax"):
                units.append((i, moved.sum()[None], logp))
            else:
                units.append((i, moved, logp))
        return units

    def _update(self) -> None:
        rules, total = self.rules, torch.zeros((), dtype=torch.float64)
        before = [w.detach().clone() for w in self.model.parameters()]
        self.seen: list[dict[str, Tensor]] = getattr(self, "seen", [])
        tokens = sum(self.scored.rows[i].length for i in self.trained)
        for i, moved, logp in self._units():
            ratio, a = moved.exp(), torch.as_tensor(self.advantage[i]).double()
            low, high = ratio < 1 - rules.epsilon, ratio > 1 + rules.epsilon
            capped = (ratio > rules.cap) & (a > 0)
            if rules.kind == "remax":
                total = total - a * logp.sum() / len(self.scored.rows)
            elif rules.kind == "cispo":
                term = -(ratio.detach().clamp(max=rules.cap) * a * logp).sum()
                total = total + term / self._all_tokens()
            else:
                gain = torch.minimum(
                    ratio * a, ratio.clamp(1 - rules.epsilon, 1 + rules.epsilon) * a
                )
                if rules.delta < INF:
                    gain = torch.where(a < 0, torch.maximum(gain, rules.delta * a), gain)
                share = tokens if rules.kind == "ppo" else len(self.scored.rows)
                total = total - gain.sum() * self.weight.get(i, 1.0) / (
                    self._all_tokens() if rules.kind == "ppo" else share
                )
            clips = rules.kind in ("rloo", "ppo")
            self.seen.append({
                "ratio": ratio.detach(), "moved": moved.detach(), "capped": capped,
                "low": low & (a < 0) & clips, "high": high & (a > 0) & clips,
                "delta": (ratio > rules.delta) & (a < 0) & clips,
            })  # fmt: skip
        self.model.zero_grad()
        if total.requires_grad:
            total.backward()
        gradients = [
            w.grad if w.grad is not None else torch.zeros_like(w) for w in self.model.parameters()
        ]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        scale = min(1.0, rules.max_norm / (norm + 1e-6))
        with torch.no_grad():
            for weight, gradient in zip(self.model.parameters(), gradients, strict=True):
                weight -= rules.rate * scale * gradient
        loss = float(total.detach())
        self.updates.append({
            "loss": loss, "policy_loss": loss, "loss/policy_avg": loss, "kl_loss": 0.0,
            "grad_norm": norm, "grad_clip_fraction": float(norm > rules.max_norm),
        })  # fmt: skip
        self._count_changes(before)

    def _all_tokens(self) -> int:
        """Tokens of every completion of the step that is not masked."""
        pairs = zip(self.scored.rows, self.scored.masked, strict=True)
        return sum(row.length for row, masked in pairs if not masked)

    def _count_changes(self, before: list[Tensor]) -> None:
        pairs = [*zip(before, self.model.parameters(), strict=True)]
        changed = numbers = 0
        for old, new in pairs[:: math.ceil(len(pairs) / CHANGED_TENSORS)]:
            step = math.ceil(old.numel() / CHANGED_NUMBERS)
            differs = (old.reshape(-1) != new.detach().reshape(-1))[::step]
            changed, numbers = changed + int(differs.sum()), numbers + len(differs)
        found = self.parts.get("update/changed_frac", mean(0, 0))
        self.parts["update/changed_frac"] = mean(found.value + changed, found.count + numbers)

    def _ratios(self) -> None:
        if not self.seen:
            return
        whole = {name: torch.cat([s[name] for s in self.seen]).double() for name in self.seen[0]}
        count, ratio = len(whole["ratio"]), whole["ratio"]
        low, high = whole["low"].sum(), whole["high"].sum()
        self.parts |= {
            "clip_ratio/low_mean": mean(low, count),
            "clip_ratio/high_mean": mean(high, count),
            "clip_ratio/region_mean": mean(low + high, count),
            "policy/clipfrac_avg": mean(low + high, count),
            "clip_ratio/low_min": Part(
                "min", min(float(s["low"].double().mean()) for s in self.seen)
            ),
            "clip_ratio/high_max": Part(
                "max", max(float(s["high"].double().mean()) for s in self.seen)
            ),
            "delta_ratio": mean(whole["delta"].sum(), count),
            "policy/approxkl_avg": mean(0.5 * whole["moved"].square().sum(), count),
            "val/ratio": mean(ratio.sum(), count),
            "val/ratio_var": of_step(ratio.var(correction=0), count),
            "ratio/min": Part("min", float(ratio.min())),
            "ratio/max": Part("max", float(ratio.max())),
        }
        if self.rules.kind == "cispo":
            self.parts["cispo_clip_ratio"] = mean(whole["capped"].sum(), count)

    def _work(self) -> None:
        """Positions of the training forwards: a group's prompt once, and no completion's last."""
        rows, passes = self.scored.rows, self.rules.iterations
        self.parts["perf/level"] = Part("last", 0.0)
        share = mean(len(self.forwarded), len(rows))
        self.parts["perf/forwarded_frac"] = share
        if self.forwarded:
            prompts = {rows[i].group: len(rows[i].prompt) for i in self.forwarded}
            positions = sum(prompts.values()) + sum(len(rows[i].ids) - 1 for i in self.forwarded)
            self.parts["perf/rows"] = Part("each", passes * positions)
            self.parts["perf/padding_frac"] = mean(0, positions)


def page_names() -> dict[str, list[str]]:
    """The names of docs/metrics.md by their headings."""
    sections: dict[str, list[str]] = {}
    heading = ""
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif found := re.match(r"\| `([^`]+)` \|", line):
            sections.setdefault(heading, []).append(found[1])
    return sections
