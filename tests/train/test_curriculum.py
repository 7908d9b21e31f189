"""A reward that changes with the training: what trainer_state says in a real run."""

from loop_cases import alone

from rloo_cli.train.loop import run_training_loop


def test_a_reward_can_change_from_step_to_step(tmp_path) -> None:
    """Length in the first step; from the second on the opposite, by the state it is given."""
    seen = []

    def turning(completion_ids, trainer_state, **_):
        seen.append((trainer_state.step, trainer_state.max_steps, len(trainer_state.log_history)))
        sign = 1.0 if trainer_state.step == 0 else -1.0
        return [sign * (1 + len(set(ids))) for ids in completion_ids]

    run = alone(tmp_path, "max_steps=2", rewards={"turning": turning})
    run_training_loop(run)
    assert seen == [(0, 2, 0), (1, 2, 1)]
    first, second = (row["reward/turning/mean"] for row in run.log.metrics_lines)
    assert first > 0 > second
