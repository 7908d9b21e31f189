"""What happens between two steps: evaluation, checkpoints, and the question whether to go on."""

from rloo_cli import checkpoint
from rloo_cli.evaluate import evaluate
from rloo_cli.parts import Run


def pause(run: Run) -> bool:
    """Between two steps: evaluation and a checkpoint where they are due; whether to go on."""
    state, config = run.state, run.config
    last = state.step >= run.steps
    due = config.eval.at_start if not state.step else last or _at(state.step, config.eval.every)
    if due and run.cycle is None and state.evaluated != state.step:
        evaluate(run)
        state.evaluated = state.step
    if state.step and (last or _at(state.step, config.checkpoint.every)):
        with run.clock.phase("save"):
            checkpoint.save(run)
    run.world.check_stop()
    return not last


def _at(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
