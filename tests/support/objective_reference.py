"""The update that the formulas say, once more: plain torch in float64, one completion at a time.

It uses nothing of `rloo_cli`: the section numbers are those of the specification that the package
implements. Keys are the plain values of a config's `algorithm` section. Written for reading, not
for speed: whoever changes a formula in the package has to change it here as well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

LOSS_TYPES = {
    "grpo": ("clip", "token", "sequence_mean"),
    "dr_grpo": ("clip", "token", "constant"),
    "bnpo": ("clip", "token", "token_mean_local"),
    "dapo": ("clip", "token", "token_mean"),
    "gspo": ("clip", "geometric", "sequence_mean"),
    "cispo": ("cispo", "token", "token_mean"),
    "sapo": ("sapo", "token", "sequence_mean"),
    "luspo": ("luspo", "geometric", "sequence_sum"),
    "vespo": ("vespo", "token", "token_mean"),
}
PER_TOKEN = ("reinforce", "cispo", "vespo")  # policy losses that have a term for every token
Columns = list[list[Tensor]]  # (T,) of each completion of each prompt


@dataclass
class Completion:
    """One completion as it was sampled."""

    ids: list[int]
    mask: list[int]
    ended: bool
    behaviour: list[float] | None = None  # NaN where the sampler did not say


@dataclass
class Given:
    """Everything of a step that is not computed from the model."""

    prompts: list[list[int]]
    rows: list[list[Completion]]  # P of K
    raw: Tensor  # (F, P, K), NaN = None
    weights: list[float]
    greedy_rows: list[Completion]
    greedy_raw: Tensor  # (F, P, 1)
    memory: dict[str, float]  # ema, ema_weight
    step: int
    seed: int
    longest: int  # generation.max_completion_length
    groups_per_micro: int | None  # of loss_agg=token_mean_local


@dataclass
class Forward:
    """What the models say of every completion token."""

    logp: Columns
    kl_logp: Columns
    entropy: Columns
    value: Columns


def resolved(keys: dict[str, Any]) -> dict[str, Any]:
    """The keys with what loss_type says in the null ones, and a penalty written out."""
    keys = dict(keys)
    if keys["loss_type"] is not None:
        parts = zip(
            ("policy_loss", "ratio_level", "loss_agg"), LOSS_TYPES[keys["loss_type"]], strict=True
        )
        keys |= {name: value for name, value in parts if keys[name] is None}
    if not isinstance(keys["missing_eos_penalty"], dict):
        keys["missing_eos_penalty"] = {"mode": "subtract", "value": keys["missing_eos_penalty"]}
    return keys


def deviation(x: Tensor) -> float:
    """Bessel-corrected, 0 for fewer than two."""
    return float(x.std()) if len(x) > 1 else 0.0


def unequal(x: Tensor) -> bool:
    return len(x) > 1 and bool(x.max() != x.min())


def standardised(x: Tensor, eps: float) -> Tensor:
    return (x - x.mean()) / (deviation(x) + eps) if unequal(x) else torch.zeros_like(x)


class Reference:
    """One step under one set of keys."""

    def __init__(self, keys: dict[str, Any], given: Given):
        self.a, self.given = resolved(keys), given
        self.p, self.k = len(given.rows), len(given.rows[0])
        self.by_token = self.a["name"] in ("ppo", "reinforce_pp")
        self.charged = self.a["kl_in"] == "reward" and self.a["beta"] > 0
        lengths = torch.tensor([[sum(r.mask) for r in own] for own in given.rows])
        ended = torch.tensor([[r.ended for r in own] for own in given.rows])
        self.score, self.scorable, self.masked = self.scores(given.raw, lengths, ended)
        self.greedy = torch.zeros(self.p)
        if self.a["name"] == "remax":
            lengths = torch.tensor([[sum(r.mask)] for r in given.greedy_rows])
            ended = torch.tensor([[r.ended] for r in given.greedy_rows])
            greedy, said, _ = self.scores(given.greedy_raw, lengths, ended)
            self.greedy, self.scorable = greedy[:, 0], self.scorable & said
        self.lengths = torch.tensor(
            [[0 if self.masked[p, k] else sum(given.rows[p][k].mask) for k in range(self.k)]
             for p in range(self.p)]
        )  # fmt: skip
        self.active = [
            p for p in range(self.p)
            if self.a["zero_std_groups"] == "keep" or unequal(self.score[p][self.scorable[p]])
        ]  # fmt: skip
        self.usable = self.scorable.clone()
        if self.a["baseline"] in ("loo", "group_mean"):
            self.usable &= self.scorable.sum(1, keepdim=True) >= 2

    # 2.2, 2.3, 2.7
    def scores(self, raw: Tensor, lengths: Tensor, ended: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shaped score, scorable, masked: (P, K) each."""
        a, weights = self.a, self.given.weights
        if a["dialect"] == "ms_swift":
            raw = raw.nan_to_num(0.0)
        said = ~raw.isnan()
        score, scorable = torch.zeros(raw.shape[1:]).double(), torch.zeros(raw.shape[1:]).bool()
        for f, weight in enumerate(weights):
            value = raw[f].nan_to_num(0.0)
            if a["multi_reward"] == "normalize_then_sum":
                value = torch.zeros_like(value)
                for p in range(len(value)):
                    if said[f, p].any():
                        value[p][said[f, p]] = standardised(raw[f, p][said[f, p]], 1e-4)
            score = score + weight * value
            scorable |= said[f] & (weight != 0)
        if a["multi_reward"] == "normalize_then_sum" and scorable.any():
            score = score.masked_scatter(scorable, standardised(score[scorable], 1e-4))
        masked = torch.zeros_like(scorable)
        if a["mask_truncated_completions"] is not False:
            masked = ~ended
            if a["mask_truncated_completions"] == "drop":
                scorable = scorable & ended
        rule, eos = a["overlong_penalty"], a["missing_eos_penalty"]
        if rule is not None:
            free = rule["max_length"] - rule["cache"]
            for p, k in np.ndindex(*score.shape):
                over = (int(lengths[p, k]) - free) / rule["cache"]
                score[p, k] -= rule["weight"] * min(max(over, 0.0), 1.0)
        if eos["mode"] == "subtract":
            score = torch.where(ended, score, score - eos["value"])
        elif eos["mode"] == "replace":
            score = torch.where(ended, score, torch.full_like(score, eos["value"]))
        if a["normalize_rewards"] and unequal(score[scorable]):
            score = score.masked_scatter(scorable, standardised(score[scorable], 1e-8))
        if a["reward_clip_range"] is not None and a["dialect"] != "openrlhf":
            score = score.clamp(*a["reward_clip_range"])
        return score.masked_fill(~scorable, 0.0), scorable, masked

    # 2.4
    def estimate(self, d: Tensor) -> Tensor:
        """k1, k2 or k3 of d = log p - log q."""
        dialect, kind = self.a["dialect"], self.a["kl_estimator"]
        if dialect == "nemo_rl":
            d = d.clamp(-20, 20)
        k = {"k1": d, "k2": d**2 / 2, "k3": (-d).clamp(-20, 20).exp() - 1 + d}[kind]
        return k.clamp(-10, 10) if dialect in ("openrlhf", "nemo_rl") else k

    def mask(self, p: int, k: int) -> Tensor:
        """(T,) of a completion: 0 everywhere where it is masked out."""
        own = torch.tensor(self.given.rows[p][k].mask, dtype=torch.float64)
        return own * 0 if self.masked[p, k] else own

    def advantages(self, old: Forward, ref: Columns | None) -> None:
        """Fill `token_advantage` and `returns` (T,) of every row. 2.4 to 2.6, section 3."""
        a, shape = self.a, (self.p, self.k)
        self.costs = [[torch.zeros(len(r.ids)).double() for r in own] for own in self.given.rows]
        if ref is not None and self.charged:
            for p, k in np.ndindex(*shape):
                d = old.kl_logp[p][k] - ref[p][k]
                self.costs[p][k] = a["beta"] * self.mask(p, k) * self.estimate(d)
        if self.by_token:
            self._token_table(old)
            return
        cost = torch.tensor([[float(c.sum()) for c in own] for own in self.costs]).double()
        reward = (self.score - cost).masked_fill(~self.scorable, 0.0)
        rows = torch.zeros(shape).bool()
        rows[self.active] = self.usable[self.active]
        value = self._centred(reward if a["kl_in_baseline"] else self.score, rows)
        value = self._scaled(value, rows)
        if a["dialect"] == "openrlhf" and a["reward_clip_range"] is not None:
            value = value.clamp(*a["reward_clip_range"])
        to_go = a["kl_credit"] == "to_go" and self.charged
        if not a["kl_in_baseline"] and not to_go:
            value = value - cost
        value = self._normalised(value.masked_fill(~rows, 0.0), rows)
        self.value = value
        self.token_advantage = [
            [torch.full_like(self.costs[p][k], float(value[p, k])) for k in range(self.k)]
            for p in range(self.p)
        ]
        if to_go:
            for p, k in np.ndindex(*shape):
                rest = self.costs[p][k].flip(0).cumsum(0).flip(0)
                self.token_advantage[p][k] = (value[p, k] - rest) * float(rows[p, k])
        self.one_value = not to_go

    # 2.5
    def _centred(self, x: Tensor, rows: Tensor) -> Tensor:
        kind, out = self.a["baseline"], torch.zeros_like(x)
        if kind in ("loo", "group_mean"):
            for p in self.active:
                own = x[p][rows[p]]
                n = len(own)
                if unequal(own):
                    out[p][rows[p]] = (own - own.mean()) * (n / (n - 1) if kind == "loo" else 1)
            return out
        if kind == "batch_mean":
            own = x[rows]
            return out.masked_scatter(rows, own - own.mean()) if unequal(own) else out
        if kind == "ema":
            weight = self.given.memory.get("ema_weight", 0.0)
            x = x - (self.given.memory["ema"] / weight if weight else 0.0)
        elif kind == "greedy":
            x = x - self.greedy[:, None]
        return x.masked_fill(~rows, 0.0)

    def _scaled(self, x: Tensor, rows: Tensor) -> Tensor:
        kind, x, said = self.a["advantage_scale"], x.clone(), torch.zeros_like(rows)
        said[self.active] = self.scorable[self.active]  # a lone score of a group counts in the step
        for p, k in rows.nonzero().tolist():
            others = said[p].clone()
            others[k] = False
            among = {
                "none": self.score[p][:0], "group": self.score[p][said[p]],
                "batch": self.score[said], "loo_std": self.score[p][others],
            }[kind]  # fmt: skip
            if unequal(among):
                x[p, k] /= deviation(among) + (1e-6 if kind == "loo_std" else 1e-4)
        return x

    # 2.6
    def _normalised(self, x: Tensor, rows: Tensor) -> Tensor:
        if not self.a["normalize_advantages"] or not unequal(x[rows]):
            return x
        if self.a["baseline"] in ("loo", "group_mean"):
            telling = any(unequal(self.score[p][rows[p]]) for p in self.active)
        else:
            telling = unequal(self.score[rows])
        if not telling and self.a["dialect"] not in ("trl", "trl_0_21"):
            return x
        eps = 1e-8 if self.a["dialect"] == "trl_0_21" else 1e-4
        return x.masked_scatter(rows, standardised(x[rows], eps))

    # section 3, reinforce_pp and ppo
    def _token_table(self, old: Forward) -> None:
        a = self.a
        rows = [(p, k) for p in self.active for k in range(self.k) if self.usable[p, k]]
        found, kept, returns = {}, {}, {}
        for p, k in rows:
            kept[p, k] = self.mask(p, k) > 0
            e = -self.costs[p][k][kept[p, k]]
            if len(e):
                e[-1] += self.score[p, k]
            found[p, k] = e
        if a["name"] == "ppo":
            if a["whiten_rewards"]:
                found = self._whitened(found, centre=False)
            for (p, k), e in found.items():
                v = old.value[p][k].detach()[kept[p, k]]
                gain, later = torch.zeros_like(e), 0.0
                for t in reversed(range(len(e))):
                    after = v[t + 1] if t + 1 < len(e) else 0.0
                    later = e[t] + a["gamma"] * after - v[t] + a["gamma"] * a["lam"] * later
                    gain[t] = later
                found[p, k], returns[p, k] = gain, gain + v
            found = self._whitened(found)
        else:
            for (p, k), e in found.items():
                if a["minus_group_mean"]:
                    siblings = self.score[p][self.usable[p]]
                    found[p, k] = torch.full_like(e, float(self.score[p, k] - siblings.mean()))
                else:
                    gain, later = torch.zeros_like(e), 0.0
                    for t in reversed(range(len(e))):
                        later = e[t] + a["gamma"] * later
                        gain[t] = later
                    found[p, k] = gain
            if unequal(torch.tensor([float(self.score[p, k]) for p, k in rows])):
                found = self._whitened(found)
        self.token_advantage = [[torch.zeros_like(c) for c in own] for own in self.costs]
        self.returns = [[torch.full_like(c, math.nan) for c in own] for own in self.costs]
        for p, k in rows:
            self.token_advantage[p][k][kept[p, k]] = found[p, k]
            if returns:
                self.returns[p][k][kept[p, k]] = returns[p, k]
        self.one_value = False

    @staticmethod
    def _whitened(
        found: dict[tuple[int, int], Tensor], centre: bool = True
    ) -> dict[tuple[int, int], Tensor]:
        every = torch.cat([torch.zeros(0).double(), *found.values()])
        if not len(every):
            return found
        mean = every.mean()
        if not unequal(every):
            return {i: x * 0 + (0.0 if centre else x) for i, x in found.items()}
        scale = (every.var() + 1e-8).sqrt()
        return {i: (x - mean) / scale + (0.0 if centre else mean) for i, x in found.items()}

    # which groups each update has
    def shares(self) -> list[list[list[int]]]:
        """The groups of each update, of each iteration."""
        order, found = np.arange(self.p), []
        for iteration in range(self.a["num_iterations"]):
            if self.a["num_minibatches"] > 1:
                seed = [self.given.seed, self.given.step, iteration]
                order = np.random.Generator(np.random.PCG64(seed)).permutation(np.arange(self.p))
            parts = np.array_split(order, self.a["num_minibatches"])
            found.append([sorted(int(i) for i in part) for part in parts])
        return found

    def learns(self, share: Sequence[int]) -> bool:
        """Whether an update of these groups has a token to learn from."""
        return self.trained(share) > 0

    def trained(self, share: Sequence[int]) -> int:
        rows = [p for p in share if p in self.active]
        return int((self.lengths * self.usable)[rows].sum())

    # 2.8 to 2.11
    def loss(self, now: Forward, old: Forward, ref: Columns | None, share: Sequence[int]) -> Tensor:
        """The update's loss over these groups, with gradient. ()"""
        a = self.a
        counted = torch.ones_like(self.usable)
        if a["loss_denominator"] == "valid":
            pulled = a["kl_in"] == "loss" and a["beta"] > 0  # then every KL is in the loss
            counted = (self.usable | pulled) & ~self.masked
        n = max(int(counted[share].sum()), 1)
        tokens = max(int((self.lengths * counted)[share].sum()), 1)
        used = [p for p in share if p in self.active]
        every = max(int(self.lengths[used].sum()), 1)
        micros = self._micros(used)
        total = torch.zeros(()).double()
        for micro in micros:
            local = sum(int(self.lengths[p].sum()) for p in micro)
            for p in micro:
                for k in range(self.k):
                    if not self.lengths[p, k]:
                        continue
                    divisor = {
                        "sequence_sum": n, "sequence_mean": n, "token_mean": tokens,
                        "constant": n * self.given.longest,
                        "token_mean_local": local * len(micros),
                    }[a["loss_agg"]]  # fmt: skip
                    total = total + self._row(now, old, ref, p, k) / divisor
                    bonus = (self.mask(p, k) * now.entropy[p][k]).sum() / every
                    total = total - a["entropy_coef"] * bonus
                    if a["name"] == "ppo":
                        total = total + self._value_loss(now, old, p, k) / max(
                            self.trained(share), 1
                        )
        return total

    def _micros(self, used: list[int]) -> list[list[int]]:
        """Groups that are computed together; only token_mean_local depends on it."""
        size = self.given.groups_per_micro
        some = [p for p in used if self.lengths[p].any()]
        if self.a["loss_agg"] != "token_mean_local" or size is None:
            return [used]
        return [some[i : i + size] for i in range(0, len(some), size)]

    def _row(self, now: Forward, old: Forward, ref: Columns | None, p: int, k: int) -> Tensor:
        """One completion's policy term and KL, aggregated within itself; not yet divided."""
        a, m = self.a, self.mask(p, k)
        logp, before = now.logp[p][k], old.logp[p][k].detach()
        behaviour = before
        if (said := self.given.rows[p][k].behaviour) is not None:
            got = torch.tensor(said, dtype=torch.float64)
            behaviour = torch.where(got.isnan(), before, got)
        base = behaviour if a["correction"]["mode"] == "bypass" else before
        term, per_token = self._policy(logp, before, behaviour, base, m, p, k)
        total = self._aggregated(term, per_token, m)
        if a["kl_in"] == "loss" and ref is not None:
            pull = self.estimate(now.kl_logp[p][k] - ref[p][k])
            if a["dialect"] == "nemo_rl":
                x = now.kl_logp[p][k]
                pull = torch.where(pull.abs() < 10, pull * (x - x.detach()).exp(), pull)
            if a["kl_ratio_weighted"]:
                pull = pull * (logp - base).clamp(-20, 20).exp()
            total = total + self._aggregated(a["beta"] * pull, True, m)
        return total

    def _aggregated(self, term: Tensor, per_token: bool, m: Tensor) -> Tensor:
        count, kind = m.sum(), self.a["loss_agg"]
        if not per_token:
            return term if kind in ("sequence_sum", "sequence_mean") else term * count
        total = (m * term).sum()
        return total / count if kind == "sequence_mean" else total

    def _weights(self, before: Tensor, behaviour: Tensor, m: Tensor) -> tuple[Tensor | None, bool]:
        """2.8: the weight of each token or of the completion, and which of the two it is."""
        rule = self.a["correction"]
        mode, low, high = rule["mode"], rule["floor"], rule["cap"]
        if mode in ("auto", "none", "bypass"):
            return None, False
        delta = m * (before - behaviour)
        level = "token" if mode == "filter" else rule["level"]
        log = {"token": delta, "sequence": delta.sum(), "geometric": delta.sum() / m.sum()}[level]
        w = log.clamp(-20, 20).exp()
        mean = (delta.sum() / m.sum()).exp()
        region = rule["geometric_range"] or (0.0, math.inf)
        near = (mean >= region[0]) & (mean <= region[1])
        if mode == "truncate":
            return w.clamp(low, high) * near, level == "token"
        judged = mean if mode == "filter" else w
        return w * ((judged >= low) & (judged <= high)) * near, level == "token"

    def _policy(
        self,
        logp: Tensor,
        before: Tensor,
        behaviour: Tensor,
        base: Tensor,
        m: Tensor,
        p: int,
        k: int,
    ) -> tuple[Tensor, bool]:
        """2.9, 2.10: the loss per token (True) or of the completion, with weights."""
        a, kind, level = self.a, self.a["policy_loss"], self.a["ratio_level"]
        w, by_token = self._weights(before, behaviour, m)
        d = m * (logp - base)
        if w is not None and by_token and level != "token":
            d = d.detach() + m * w * (logp - logp.detach())
        log = {"token": d, "sequence": d.sum(), "geometric": d.sum() / m.sum()}[level]
        rho = log.clamp(-a["log_ratio_clamp"], a["log_ratio_clamp"]).exp()
        per_token = kind in PER_TOKEN or level == "token"
        advantage = self.token_advantage[p][k] if per_token else self.token_advantage[p][k][0]
        high = a["epsilon"] if a["epsilon_high"] is None else a["epsilon_high"]
        if kind == "reinforce":
            term = -advantage * logp
        elif kind == "cispo":
            cap = math.inf if a["epsilon_high"] is None else a["epsilon_high"]
            term = -rho.detach().clamp(max=cap) * advantage * logp
        elif kind == "sapo":
            t = torch.where(advantage > 0, 1.0, 1.05)
            term = -torch.sigmoid(t * (rho - 1)) * 4 / t * advantage
        elif kind == "vespo":
            term = -self._vespo(logp - base, w, by_token, advantage, m) * advantage * logp
        else:
            gain = torch.minimum(rho * advantage, rho.clamp(1 - a["epsilon"], 1 + high) * advantage)
            if a["delta"] is not None:
                least = torch.maximum(gain, a["delta"] * advantage)
                gain = torch.where(advantage < 0, least, gain)
            term = -gain * (m.sum() if kind == "luspo" else 1)
        if w is not None and kind != "vespo" and (per_token or not by_token):
            term = term * w
        if a["off_policy_threshold"] is not None:
            fell = ((behaviour - logp).detach() * m).sum() / m.sum()
            if fell > a["off_policy_threshold"]:
                term = torch.where(advantage < 0, term * 0, term)
        return term, per_token

    @staticmethod
    def _vespo(
        log_ratio: Tensor, w: Tensor | None, by_token: bool, advantage: Tensor, m: Tensor
    ) -> Tensor:
        whole = (m * log_ratio.detach()).clamp(-20, 20).sum()
        if w is not None:
            log = w.log().clamp(math.log(1e-8), 20)
            whole = whole + ((m * log).sum() if by_token else log)
        whole = whole.clamp(math.log(1e-8), 20)
        up, down = (whole * 2 + 3 - 3 * whole.exp()).exp(), (whole * 3 + 2 - 2 * whole.exp()).exp()
        return torch.where(advantage >= 0, up, down)

    def _value_loss(self, now: Forward, old: Forward, p: int, k: int) -> Tensor:
        a, target = self.a, self.returns[p][k]
        counted = (self.mask(p, k) > 0) & ~target.isnan()
        v, v_old, target = (x[counted] for x in (now.value[p][k], old.value[p][k].detach(), target))
        near = v_old + (v - v_old).clamp(-a["epsilon_value"], a["epsilon_value"])
        worse = torch.maximum((v - target) ** 2, (near - target) ** 2)
        return a["vf_coef"] * 0.5 * worse.sum()


def forward(
    model: Callable[..., Any], given: Given, temperature: float, kl_temperature: float,
    values: Any = None,
) -> Forward:  # fmt: skip
    """Every completion through the model, padded on the right. `values`: a classifier."""
    flat = [(x, r) for x, own in zip(given.prompts, given.rows, strict=True) for r in own]
    width = max(len(x) + len(r.ids) for x, r in flat)
    ids = torch.zeros(len(flat), width).long()
    attention = torch.zeros(len(flat), width).long()
    for n, (x, r) in enumerate(flat):
        ids[n, : len(x) + len(r.ids)] = torch.tensor(x + r.ids)
        attention[n, : len(x) + len(r.ids)] = 1
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    worth = None
    if values is not None:
        hidden = values.base_model(input_ids=ids, attention_mask=attention, use_cache=False)
        worth = values.score(hidden[0]).squeeze(-1)
    out = Forward([], [], [], [])
    for p, own in enumerate(given.rows):
        columns: Forward = Forward([], [], [], [])
        for k, r in enumerate(own):
            n, start = p * len(own) + k, len(given.prompts[p]) - 1
            z = logits[n, start : start + len(r.ids)]
            target = torch.tensor(r.ids)[:, None]
            sampled = (z / temperature).log_softmax(-1)
            columns.logp.append(sampled.gather(1, target)[:, 0])
            other = (z / kl_temperature).log_softmax(-1)
            columns.kl_logp.append(other.gather(1, target)[:, 0])
            columns.entropy.append(-(sampled.exp() * sampled).sum(-1))
            if worth is not None:
                columns.value.append(worth[n, start : start + len(r.ids)])
        for name in ("logp", "kl_logp", "entropy", "value"):
            getattr(out, name).append(getattr(columns, name))
    return out
