"""Where a step is not that of TRL 1.16.0, and how: both sides by their own formula.

The names say what TRL does and what we do. Metrics have a file of their own, `test_trl_metrics.py`.
"""

import math

import pytest
import torch
from loop_cases import ENDS, PLAIN, apart, digits, leave_one_out, table
from transformers import GPT2Config, GPT2LMHeadModel
from trl_cases import both, gaps, sums

from rloo_cli.data.synthetic import tiny
from rloo_cli.utils.errors import RewardError

pytestmark = pytest.mark.trl

A, KL, TWO = "algorithm.", "algorithm.beta=0.3", "train.micro_batch_size=8"
STILL = (*PLAIN, ENDS, TWO, "train.learning_rate=1e-12")  # weights stay what they were
MASKED = "algorithm.mask_truncated_completions=true"
CLOSE = 1e-5
EOS, PAD = 1, 0


def normalized(values):
    return (values - values.mean()) / (values.std() + 1e-4)


@pytest.mark.slow
def test_trl_counts_masked_rows_in_the_loss_and_we_do_not_with_equal_gradients(tmp_path):
    ours, theirs = both(tmp_path, *STILL, KL, MASKED)
    batch = ours.batch
    assert 0 < int(batch.masked.sum()) < 16
    assert gaps(ours, theirs)[0] < CLOSE
    # On-policy every ratio is 1; TRL's masked rows have an empty sum, so theirs is 1 as well.
    assert theirs.row["loss"] == pytest.approx(float(-batch.advantage.mean()), abs=1e-6)
    kept = batch.advantage[~batch.masked]
    assert ours.row["loss"] == pytest.approx(float(-kept.sum()) / 16, abs=1e-6)
    assert abs(ours.row["loss"] - theirs.row["loss"]) > 0.01


@pytest.mark.slow
def test_trl_normalises_where_only_kl_differs_and_we_leave_the_step_alone(tmp_path):
    def same(completion_ids, **_):
        return [1.0] * len(completion_ids)

    words = (*STILL, "algorithm.beta=0.001", f"{A}normalize_advantages=true")
    ours, theirs = both(tmp_path, *words, rewards={"same": same})
    raw = torch.tensor(leave_one_out((-0.001 * ours.batch.kl).tolist())).double()
    assert torch.allclose(ours.batch.advantage, raw, atol=1e-12)
    assert ours.row["advantages/norm_skipped"] == 1.0 and float(raw.abs().max()) < 0.02
    assert apart(theirs.advantages(ours.batch), normalized(raw)) < 1e-3
    assert float(theirs.advantages(ours.batch).abs().max()) > 1


@pytest.mark.slow
def test_trl_leaves_rounding_in_advantages_of_equal_scores_and_ours_are_0(tmp_path):
    def same(completion_ids, **_):
        return [0.7] * len(completion_ids)

    ours, theirs = both(
        tmp_path, *STILL, "algorithm.beta=0", f"{A}num_generations=8",
        "train.prompts_per_step=2", rewards={"same": same},
    )  # fmt: skip
    assert float(ours.batch.advantage.abs().max()) == 0.0
    assert 0 < float(theirs.advantages(ours.batch).abs().max()) < 1e-6


@pytest.mark.slow
def test_trl_scores_a_row_by_a_reward_of_weight_0_and_we_do_not(tmp_path):
    def some(completion_ids, **_):
        return [None if i % 4 == 0 else s for i, s in enumerate(digits(completion_ids))]

    rewards = {"some": some, "always": digits}
    words = (*STILL, "algorithm.beta=0", "reward.always.weight=0.0")
    ours, theirs = both(tmp_path, *words, rewards=rewards)
    said = [[None if k == 0 else float(s) for k, s in enumerate(row)] for row in ours.batch.raw[0]]
    as_0 = [[0.0 if s is None else s for s in row] for row in said]
    ours_by_hand = torch.tensor(leave_one_out(said)).double()
    theirs_by_hand = torch.tensor(leave_one_out(as_0)).double()
    assert apart(ours.batch.advantage, ours_by_hand) < CLOSE
    assert apart(theirs.advantages(ours.batch), theirs_by_hand) < CLOSE
    assert apart(ours_by_hand, theirs_by_hand) > 0.1


@pytest.mark.slow
def test_trl_spreads_an_infinite_score_over_its_group_and_we_stop(tmp_path):
    def broken(completion_ids, **_):
        return [math.inf if i == 2 else float(i) for i in range(len(completion_ids))]

    with pytest.raises(RewardError, match="inf"):
        both(tmp_path, *STILL, "algorithm.beta=0", rewards={"broken": broken})
    ours, theirs = both(tmp_path, *STILL, "algorithm.beta=0", trl_rewards={"broken": broken})
    first = theirs.advantages(ours.batch)[0].tolist()
    assert first[2] == 0.0 and all(a < -1e38 for k, a in enumerate(first) if k != 2)


# What has ended.


def completions(*last):
    """16 completions of 16 ids, or shorter ones that end with EOS; the given ones come last."""
    plain = [[40 + 3 * i + j for j in range(4 + i % 3)] + [EOS] for i in range(16 - len(last))]
    return [*plain, *last]


@pytest.mark.slow
def test_trl_takes_a_last_pad_for_an_end_and_we_for_a_token_like_others(tmp_path):
    cut = [[60 + i for i in range(15)] + [PAD], [80 + i for i in range(16)]]
    ours, theirs = both(tmp_path, *PLAIN, TWO, KL, MASKED, completions=completions(*cut))
    assert ours.row["completions/clipped_ratio"] == 2 / 16
    assert theirs.row["completions/clipped_ratio"] == 1 / 16
    assert ours.batch.masked.flatten().tolist() == [False] * 14 + [True] * 2
    assert int((theirs.scored[0]["completion_mask"].sum(1) == 0).sum()) == 1
    assert gaps(ours, theirs)[0] > 0.01


@pytest.mark.slow
def test_trl_takes_a_stop_string_for_a_truncation_and_we_for_an_end(tmp_path):
    ids = tiny.tiny_tokenizer()("so be it.")["input_ids"]
    ours, theirs = both(
        tmp_path, *PLAIN, TWO, KL, MASKED, "generation.stop=['it.']",
        completions=completions(ids),
    )  # fmt: skip
    rollout = ours.batch.groups[-1].rollouts[-1]
    assert rollout.terminated and rollout.finish_reason == "stop"
    assert ours.row["completions/clipped_ratio"] == 0.0
    assert theirs.row["completions/clipped_ratio"] == 1 / 16
    assert gaps(ours, theirs)[0] > 0.01


@pytest.mark.slow
def test_trl_leaves_a_stop_id_in_the_text_that_rewards_read_and_we_do_not(tmp_path):
    seen = []

    def read(completions, completion_ids, **_):
        seen.append(completions)
        return digits(completion_ids)

    end = tiny.tiny_tokenizer()("!")["input_ids"][0]
    said = completions([50, 51, 52, end])
    ours, theirs = both(
        tmp_path, *PLAIN, TWO, KL, f"generation.stop_token_ids=[{end}]",
        rewards={"read": read}, completions=said,
    )  # fmt: skip
    mine, other = seen
    assert mine[:15] == other[:15] and other[15] == mine[15] + "!"
    assert theirs.row["completions/clipped_ratio"] == ours.row["completions/clipped_ratio"] == 0
    assert gaps(ours, theirs)[0] < CLOSE


# How a step is cut and laid out.


@pytest.mark.slow
def test_trl_shuffles_rows_over_micro_batches_and_we_keep_groups_whole(tmp_path):
    # One mini-batch: both add up to the same. Of several, TRL's have rows of other prompts.
    ours, theirs = both(tmp_path, *STILL, KL)
    ends = [[row // 4 for row in rows] for rows in theirs.rows(ours.batch)]
    assert len(ends) == 2 and all(len(rows) == 8 for rows in ends)
    assert any(0 < rows.count(p) < 4 for rows in ends for p in range(4))
    assert gaps(ours, theirs)[0] < CLOSE


@pytest.mark.slow
def test_trl_counts_left_padding_as_positions_and_we_do_not(tmp_path):
    """Seen with absolute positions: TRL passes the model an attention mask and no positions."""
    tokens = tiny.tiny_tokenizer()
    tokens.save_pretrained(tmp_path / "gpt2")
    torch.manual_seed(0)
    shape = {"n_positions": 1024, "n_embd": 32, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokens), **shape, **ends))
    model.save_pretrained(tmp_path / "gpt2")
    ours, theirs = both(tmp_path, *STILL, KL, f"model.path={tmp_path / 'gpt2'}")
    batch = ours.batch
    lengths = torch.tensor([len(g.prompt_ids) for g in batch.groups])
    longest = lengths == lengths.max()
    assert 0 < int(longest.sum()) < 4
    alone = torch.stack(
        [torch.stack([t.sum() for t in row]) for row in table(ours.run.policy, batch)]
    )
    other = theirs.scored[0]["old_logps"].view(4, 4)
    assert torch.allclose(sums(batch), alone, rtol=1e-5)
    assert torch.allclose(other[longest], alone[longest], rtol=1e-5)
    assert float((other - alone)[~longest].abs().max()) > 0.1
    assert gaps(ours, theirs)[0] > 0.1
