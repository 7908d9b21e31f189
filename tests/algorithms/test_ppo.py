"""PPO: its arithmetic against the vector and against plain loops; a whole update against plain
torch; the value model, its layouts and where it comes from."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from algorithm_cases import column, micro
from hook_calls import ppo
from loop_cases import ENDS, PLAIN, apart, flat, row_logp, sampled, step, updated
from loop_cases import alone as make
from policy_cases import fresh, groups, packed
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from rloo_cli.algorithms.common.hooks import StepTokens, ValueLoss
from rloo_cli.data.batch import Batch
from rloo_cli.data.packing import LAYOUTS, whole_group_slices
from rloo_cli.policy import load
from rloo_cli.policy.shared_attention import native_attention
from rloo_cli.policy.value import ValueModel
from rloo_cli.reporting.log import RunLog
from rloo_cli.run import Run

CONF = Path(__file__).parents[2] / "conf" / "algorithm"
CPU = torch.device("cpu")


def config(**keys: Any) -> ppo.Config:
    """conf/algorithm/ppo.yaml with some keys changed."""
    values: dict[str, Any] = {}
    for name in ("rloo", "ppo"):
        values |= yaml.safe_load((CONF / f"{name}.yaml").read_text())
    values.pop("defaults")
    return ppo.Config(**values | keys)


def tokens(
    lengths: list[int], score: Any, value: Any, kl: Tensor | None = None, mask: Any = None
) -> StepTokens:
    """A step of these rows; `kl`: old - ref of each token."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths).long())
    ref = None if kl is None else -kl
    return StepTokens(
        score=torch.tensor(score, dtype=torch.float64),
        group=torch.arange(len(lengths)),
        sequence=sequence,
        mask=torch.ones(len(sequence), dtype=torch.float64) if mask is None else mask,
        old=torch.zeros(len(sequence), dtype=torch.float64),
        ref=ref,
        value=value,
    )


# The vector of token rewards, advantages and value loss, to 1e-6 in float64.

VALUES = column([[0.5, 0.2, 0.1]])
VECTOR = tokens([3], [1.0], VALUES, column([[-1.0, 0.1, -0.3]]))  # .05, -.005, 1.015 at beta .05


def near(found: Any, expected: list[float]) -> None:
    torch.testing.assert_close(
        found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-6
    )


def test_a_step_whose_completions_are_all_masked_has_no_values_and_advantages_of_zero() -> None:
    masked = tokens([3, 2], [1.0, 0.0], None, mask=torch.zeros(5, dtype=torch.float64))
    near(ppo.token_table(masked, config()).advantage, [0.0] * 5)
    with pytest.raises(AssertionError):
        ppo.token_table(tokens([3], [1.0], None), config())


def test_advantages_and_returns_are_those_of_the_vector() -> None:
    table = ppo.token_table(VECTOR, config(beta=0.05))
    near(table.returns, [0.976037, 0.964250, 1.015])
    assert table.returns is not None
    near(table.returns - VALUES, [0.476037, 0.764250, 0.915000])
    near(table.advantage, [-1.086765, 0.205438, 0.881327])


def fitted(new: Tensor, old: Tensor, returns: Tensor, **keys: Any) -> ValueLoss:
    m = micro([len(new)])
    m.value, m.returns = old, returns
    return ppo.value_loss(new, m, config(**keys), float(len(new)))


def test_the_value_loss_is_that_of_the_vector_and_is_weighed_by_vf_coef() -> None:
    returns = ppo.token_table(VECTOR, config(beta=0.05)).returns
    assert returns is not None
    got = fitted(column([[0.6, 0.9, 0.1]]), VALUES, returns)
    assert float(got.value) == pytest.approx(0.216168, abs=1e-6)
    assert got.clipped.tolist() == [False, True, False]
    assert float(got.total) == pytest.approx(0.1 * 0.216168, abs=1e-7)


def test_a_value_that_moved_too_far_towards_its_return_has_no_gradient() -> None:
    new = column([[0.9, 0.33, 0.0]]).requires_grad_()
    got = fitted(new, column([[0.5, 0.5, 0.5]]), column([[1.0, 0.0, 1.0]]), vf_coef=1.0)
    got.total.backward()
    assert new.grad is not None
    # 0.9: past 0.7, towards 1: none. 0.33: inside, as 0.3 is the edge. 0.0: away from 1: its own,
    # (V - R) / 3. At the edge itself torch 2.15 has another gradient of clamp than those before.
    near(new.grad, [0.0, 0.11, -1 / 3])


def test_tokens_without_a_return_and_masked_ones_have_no_value_loss_and_no_gradient() -> None:
    new = column([[0.6, 0.9, 0.1, 5.0, 7.0]]).requires_grad_()
    m = micro([5], torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]))
    m.value = column([[0.5, 0.2, 0.1, 0.0, 0.0]])
    m.returns = column([[0.976037, 0.964250, 1.015, 3.0, float("nan")]])
    got = ppo.value_loss(new, m, config(), 3.0)
    assert float(got.value) == pytest.approx(0.216168, abs=1e-6)
    got.total.backward()
    assert new.grad is not None and new.grad[3:].tolist() == [0.0, 0.0]
    assert got.counted.tolist() == [True, True, True, False, False]


# Plain loops over rows and tokens.


def by_hand(
    rows: list[list[float]], values: list[list[float]], gamma: float, lam: float
) -> list[list[float]]:
    """GAE as a double sum, row by row."""
    found = []
    for e, v in zip(rows, values, strict=True):
        later = [*v[1:], 0.0]
        d = [e[t] + gamma * later[t] - v[t] for t in range(len(e))]
        found.append(
            [sum((gamma * lam) ** (u - t) * d[u] for u in range(t, len(e))) for t in range(len(e))]
        )
    return found


def rewards_by_hand(lengths: list[int], score: list[float], k: Tensor, beta: float) -> Any:
    rows = [(-beta * part).tolist() for part in k.split(lengths)]
    for row, s in zip(rows, score, strict=True):
        row[-1] += s
    return rows


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_advantages_of_rows_of_all_lengths_are_a_double_sum(estimator: str, whiten: bool) -> None:
    torch.manual_seed(3)
    lengths, score = [4, 1, 7, 2], [1.0, -2.0, 0.5, 3.0]
    d, v = torch.randn(14, dtype=torch.float64), torch.randn(14, dtype=torch.float64)
    keys = {"gamma": 0.9, "lam": 0.8, "beta": 0.3, "kl_estimator": estimator}
    found = ppo.token_table(tokens(lengths, score, v, d), config(**keys, whiten_rewards=whiten))
    k = d if estimator == "k1" else torch.exp(-d) - 1 + d
    rows = rewards_by_hand(lengths, score, k, 0.3)
    if whiten:
        e = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
        e = (e - e.mean()) / (e.var() + 1e-8).sqrt() + e.mean()
        rows = [part.tolist() for part in e.split(lengths)]
    a = column(by_hand(rows, [part.tolist() for part in v.split(lengths)], 0.9, 0.8))
    torch.testing.assert_close(found.returns, a + v)
    torch.testing.assert_close(found.advantage, (a - a.mean()) / (a.var() + 1e-8).sqrt())


def test_masked_tokens_are_in_none_of_it_and_the_score_stands_on_the_last_trained_one() -> None:
    torch.manual_seed(4)
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 0], dtype=torch.float64)
    v, d = torch.randn(9, dtype=torch.float64), torch.randn(9, dtype=torch.float64)
    kept = mask > 0
    long = ppo.token_table(tokens([6, 3], [1.0, 2.0], v, d, mask), config())
    short = ppo.token_table(tokens([3, 2], [1.0, 2.0], v[kept], d[kept]), config())
    assert long.returns is not None and short.returns is not None
    torch.testing.assert_close(long.advantage[kept], short.advantage)
    torch.testing.assert_close(long.returns[kept], short.returns)
    assert not long.advantage[~kept].any() and not long.returns[~kept].any()


def test_a_row_without_a_trained_token_and_a_step_without_rows_are_left_alone() -> None:
    mask = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    value = column([[0.1, 0.2, 0.3, 0.4]])
    found = ppo.token_table(tokens([2, 2], [5.0, 1.0], value, mask=mask), config())
    alone = ppo.token_table(tokens([2], [1.0], value[2:]), config())
    torch.testing.assert_close(found.advantage[2:], alone.advantage)
    for nothing in (value[:0], None):
        none = ppo.token_table(tokens([], [], nothing), config())
        assert none.advantage.shape == (0,)


# A whole update against plain torch, row by row.


def row_values(model: Any, batch: Batch, p: int, k: int) -> Tensor:
    """V before each token of one completion, alone in a plain forward. (T,)"""
    group = batch.groups[p]
    completion = group.rollouts[k].completion_ids
    with native_attention(model):
        states = model.base_model(input_ids=torch.tensor([group.prompt_ids + completion]))[0]
    found: Tensor = model.score(states[0, len(group.prompt_ids) - 1 : -1]).squeeze(-1)
    return found


def plain_ppo(
    run: Run, batch: Batch, rows: list[tuple[int, int]], masks: dict[Any, Tensor], passes: int,
    rate: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the weights of policy and value model move by, in `passes` updates of plain descent."""
    assert run.value_model is not None and run.reference is not None
    settings, tau = run.config.algorithm, run.config.generation.temperature
    assert isinstance(settings, ppo.Config)
    first = flat(run)
    policy, critic = copy.deepcopy(run.policy.model), copy.deepcopy(run.value_model.model)
    weights = [*policy.parameters(), *critic.parameters()]
    started = torch.cat([p.detach().reshape(-1) for p in critic.parameters()]).clone()

    class Own:
        model = policy

    with torch.no_grad():
        old = {r: row_logp(Own, batch, *r, tau)[masks[r]] for r in rows}
        ref = {r: row_logp(run.reference, batch, *r, tau)[masks[r]] for r in rows}
        was = {r: row_values(critic, batch, *r)[masks[r]] for r in rows}
    e = []
    for r in rows:
        e.append((-settings.beta * (old[r] - ref[r])).double().tolist())
        e[-1][-1] += float(batch.shaped[r])
    got = by_hand(e, [was[r].double().tolist() for r in rows], settings.gamma, settings.lam)
    a = column(got)
    returns = {r: torch.tensor(x) + was[r] for r, x in zip(rows, got, strict=True)}
    white = (a - a.mean()) / (a.var() + 1e-8).sqrt()
    parts = dict(zip(rows, white.float().split([len(x) for x in got]), strict=True))
    for _ in range(passes):
        total = torch.zeros(())
        for r in rows:
            rho = (row_logp(Own, batch, *r, tau)[masks[r]] - old[r]).exp()
            low, high = 1 - settings.epsilon, 1 + settings.epsilon
            gain = torch.minimum(rho * parts[r], rho.clamp(low, high) * parts[r])
            v = row_values(critic, batch, *r)[masks[r]]
            reach = settings.epsilon_value
            held = torch.maximum(torch.minimum(v, was[r] + reach), was[r] - reach)
            worse = torch.maximum((v - returns[r]) ** 2, (held - returns[r]) ** 2)
            total = total + (-gain + settings.vf_coef * 0.5 * worse).sum()
        grads = torch.autograd.grad(total / len(a), weights, allow_unused=True)
        with torch.no_grad():
            for weight, grad in zip(weights, grads, strict=True):
                if grad is not None:
                    weight -= rate * grad
    moved = torch.cat([p.detach().reshape(-1) for p in policy.parameters()]) - first
    fitted = torch.cat([p.detach().reshape(-1) for p in critic.parameters()]) - started
    return moved, fitted


def stirred(run: Run) -> Run:
    """With a value model that is no copy, and whose head is not 0."""
    assert run.value_model is not None
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in run.value_model.model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=draw)
    return run


def values_flat(run: Run) -> Tensor:
    assert run.value_model is not None
    return torch.cat([w.detach().reshape(-1).clone() for w in run.value_model.model.parameters()])


UPDATES = {
    "as it comes": [],
    "several completions, discounted, a temperature": [
        "algorithm.num_generations=2", "algorithm.gamma=0.9", "generation.temperature=0.7",
        "algorithm.vf_coef=0.7", "algorithm.epsilon_value=0.05", "algorithm.beta=0.3",
    ],
    "truncated rows out": [
        "algorithm.mask_truncated_completions=true", "train.prompts_per_step=12",
    ],
    "padded": ["train.layout=padded", "train.micro_batch_size=1"],
}  # fmt: skip


@pytest.mark.slow_but("as it comes", "padded")
@pytest.mark.parametrize("kind", UPDATES)
def test_an_update_is_that_of_plain_torch(tmp_path: Path, kind: str) -> None:
    keys = ["algorithm=ppo", "algorithm.num_iterations=2", *PLAIN, ENDS, *UPDATES[kind]]
    run = stirred(make(tmp_path, *keys))
    batch = sampled(run)
    tools = batch.groups[0].rollouts[0]  # some tokens a tool's, its last ones among them
    tools.mask = [int(t % 3 != 1 and t < len(tools.completion_ids) - 1) or int(t == 0)
                  for t in range(len(tools.completion_ids))]  # fmt: skip
    rows = [(p, k) for p in range(len(batch.groups)) for k in range(batch.score.shape[1])
            if not batch.masked[p, k]]  # fmt: skip
    assert rows and (kind != "truncated rows out" or batch.masked.any())
    masks = {
        r: torch.tensor(g.mask or [1] * len(g.completion_ids)) > 0
        for r in rows
        for g in [batch.groups[r[0]].rollouts[r[1]]]
    }
    moved, fitted = plain_ppo(run, batch, rows, masks, 2, 0.01)
    before = flat(run), values_flat(run)
    updates = updated(run, batch)
    assert updates.num_updates == 2 and float(fitted.norm()) > 0 and float(moved.norm()) > 0
    assert apart(flat(run) - before[0], moved) < 2e-4  # two roundings of a weight to an update
    assert apart(values_flat(run) - before[1], fitted) < 2e-4


def test_a_row_that_has_no_score_is_nothing_for_the_value_model_to_learn(tmp_path: Path) -> None:
    def picky(completion_ids: Any, **_: Any) -> list[float | None]:
        return [None if i == 1 else float(len(ids)) for i, ids in enumerate(completion_ids)]

    found = []
    for all_of_them in (False, True):  # as metrics want them, or only those that count
        words = [*PLAIN, ENDS, f"train.forward_all={all_of_them}", "algorithm.num_iterations=1"]
        run = stirred(make(tmp_path, "algorithm=ppo", *words, rewards={"picky": picky}))
        batch, before = sampled(run), values_flat(run)
        assert not batch.scorable[1, 0] and batch.scorable.sum() == 3
        row = updated(run, batch).to_metrics()
        found.append((values_flat(run) - before, row["loss/value_avg"]))
    (one, got), (other, again) = found
    assert apart(other, one) < 1e-4 and again == pytest.approx(got, rel=1e-5)


def test_the_value_model_learns_what_returns_are_like(tmp_path: Path) -> None:
    def question(prompts: Any, **_: Any) -> list[float]:  # nothing that the policy could change
        return [2.0 * ("What" in prompt) for prompt in prompts]

    words = ["algorithm=ppo", "train.prompts_per_step=16", "algorithm.beta=0", "max_steps=6",
             "train.lr_scheduler=constant", "train.learning_rate=3e-3", "algorithm.vf_coef=1.0",
             "algorithm.epsilon_value=1.0", "generation.max_completion_length=3"]  # fmt: skip
    run = make(tmp_path, *words, rewards={"question": question})
    rows = [step(run)[1] for _ in range(6)]
    got = [row["value/explained_variance"] for row in rows]
    assert abs(got[0]) < 1e-6  # a head of zeros explains nothing
    assert got[-1] > 0.8 and rows[-1]["loss/value_avg"] < rows[0]["loss/value_avg"] / 4


# The value model.


def scorer(name: str = "qwen3") -> Any:
    """A random sequence classifier with one label, of the same families as policies."""
    settings = copy.deepcopy(fresh(name).config)
    settings.num_labels = 1
    torch.manual_seed(5)
    found = AutoModelForSequenceClassification.from_config(settings).eval()
    load.zero_dropout(found)
    return found


def rows_alone(model: Any) -> Tensor:
    found = []
    for group in groups():
        for rollout in group.rollouts:
            ids = torch.tensor([group.prompt_ids + rollout.completion_ids])
            states = model.base_model(input_ids=ids)[0][0, len(group.prompt_ids) - 1 : -1]
            found.append(model.score(states).squeeze(-1))
    return torch.cat(found)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_each_row_alone_in_every_layout(name: str, layout: str) -> None:
    model = scorer(name)
    with torch.no_grad():
        truth = rows_alone(model)
    critic = ValueModel(model, CPU)
    critic.choose_layout(layout, 64)
    found = critic.frozen_values(packed(groups(), [0, 1, 2], layout=layout))
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)
    assert critic.layout == layout and found.dtype == torch.float32


def test_a_layout_that_gives_other_hidden_states_is_not_taken(monkeypatch: Any) -> None:
    critic, real = ValueModel(scorer(), CPU), ValueModel.hidden

    def off(self: ValueModel, given: Any) -> Tensor:
        return real(self, given) + (0.1 if given.shared_layout is not None else 0.0)

    monkeypatch.setattr(ValueModel, "hidden", off)
    reason = critic.choose_layout("auto", 64)
    assert critic.layout == "packed" and "states are off" in reason


def test_values_have_a_gradient_and_frozen_ones_are_of_eval_mode() -> None:
    model = scorer()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    critic, given = ValueModel(model.train(), CPU), packed(groups(), [0, 1, 2])
    assert not critic.frozen_values(given).requires_grad
    assert torch.equal(critic.frozen_values(given), critic.frozen_values(given))
    assert not torch.equal(critic.values(given), critic.values(given)) and model.training
    critic.values(given).sum().backward()
    assert all(p.grad is not None for p in (critic.head.weight, next(model.parameters())))


def test_of_half_precision_the_head_stays_float32() -> None:
    critic = ValueModel(scorer().bfloat16(), CPU)
    assert critic.head.weight.dtype == torch.float32 and critic.dtype == torch.bfloat16
    critic.choose_layout("auto", 64)
    assert critic.frozen_values(packed(groups(), [0], layout=critic.layout)).dtype == torch.float32


def asked(run: Run, batch: Batch) -> Tensor:
    """V of every token of a batch, as the run's value model stands."""
    assert run.value_model is not None
    parts = whole_group_slices(batch.groups, range(len(batch.groups)))
    return run.value_model.frozen_values(run.value_model.pack(batch.groups, parts))


RM = ["reward=model", "reward.model.path=make:tiny_reward"]


def test_it_begins_as_the_reward_model_where_that_fits_and_else_as_the_policy(
    tmp_path: Path, sentence
) -> None:
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunLog, "note", lambda self, text: notes.append(text))
        run = make(tmp_path, "algorithm=ppo", *RM, rewards={})
        other = make(tmp_path, "algorithm=ppo", noise=0.0)
        named = make(tmp_path, "algorithm=ppo", "model.value.path=make:tiny_reward", noise=0.0)
    assert (
        run.value_model is not None
        and other.value_model is not None
        and named.value_model is not None
    )
    judge: Any = run.rewards[0].code.model.model  # type: ignore[attr-defined]
    for name, weight in run.value_model.model.named_parameters():
        assert torch.equal(weight, dict(judge.named_parameters())[name]), name
        assert weight.requires_grad
    batch = sampled(other)
    assert not asked(other, batch).any() and not other.value_model.head.weight.any()
    ours = dict(other.policy.model.model.named_parameters())
    for name, weight in other.value_model.model.model.named_parameters():
        assert torch.equal(weight, ours[name]), name
    assert torch.equal(named.value_model.head.weight, run.value_model.head.weight)
    sentence("\n".join(note for note in notes if note.startswith("the value model ")))
