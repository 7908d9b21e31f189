"""Logs a step, evaluates, saves checkpoints, and decides whether to continue."""

import torch
from torch import Tensor

from rloo_cli.checkpoint import manifest, save
from rloo_cli.data.batch import Batch
from rloo_cli.evaluation.evaluate import evaluate_run
from rloo_cli.policy import offload
from rloo_cli.policy.reward_scores import RewardModelScorer
from rloo_cli.reporting import step_metrics
from rloo_cli.reporting import target as targets
from rloo_cli.reporting.staleness_metrics import one_lag_metrics, staleness_metrics
from rloo_cli.reporting.update_metrics import UpdateMetrics
from rloo_cli.run import Run
from rloo_cli.train import guards
from rloo_cli.utils import sweep_time_slices
from rloo_cli.utils.files import JsonObject, read_json


def evaluate_and_checkpoint(run: Run) -> bool:
    """Evaluate and save a checkpoint if they are due. -> whether the training continues"""
    guards.check_health_guards(run)
    state, config = run.state, run.config
    last = state.step >= run.num_steps
    due = config.eval.at_start if not state.step else last or _is_due(state.step, config.eval.every)
    if due and run.step_progress is None and state.evaluated != state.step:
        evaluate_run(run)
        state.evaluated = state.step
        guards.check_health_guards(run)
    if state.step and (last or _is_due(state.step, config.checkpoint.every)):
        with run.clock.phase("save"):
            save.save_checkpoint(run)
            if not last:
                run.log.draw_curves(rate_limited=True)
    reached = targets.is_target_reached(config.target, run.log, state.step)
    if run.world.check_stop(end_asked=run.log.events.end_asked() or reached) and not last:
        if reached:
            result = targets.target_result(config.target, run.log)
            run.log.note(f"the run ends: {targets.target_text(result)}")
        run.num_steps = state.step
        return evaluate_and_checkpoint(run)
    if sweep_time_slices.is_sweep_trial() and not last:
        _wait_for_time_slice(run)
    return not last


def _is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _wait_for_time_slice(run: Run) -> None:
    """Wait for this trial's time slice; the wait does not count in the run's own time."""
    judge = None if run.judge is None else run.judge.reward
    codes = [reward.code for reward in (*run.rewards, judge) if reward is not None]
    scorers = [getattr(code, "model", None) for code in codes]  # a reward's code may be a user's
    models = [p.model for p in (run.policy, run.reference, run.value_model) if p is not None]
    models += [s.model for s in scorers if isinstance(s, RewardModelScorer)]
    moved: list[tuple[Tensor, torch.device]] = []

    def to_cpu() -> None:
        optimizer = offload.iter_optimizer_tensors(run.optimizer)
        moved.extend(offload.offload_tensors([*offload.iter_model_tensors(models), *optimizer]))

    hooks = sweep_time_slices.TimeSliceHooks(
        save=lambda: _save_for_clone(run), offload=to_cpu,
        reload=lambda: offload.reload_tensors(moved), check_stop=run.world.check_stop,
    )  # fmt: skip
    run.clock.leave_out(sweep_time_slices.wait_in_sweep(run.state.step, hooks))


def _save_for_clone(run: Run) -> str | None:
    """Save a checkpoint. -> its folder, or at the start run.json's `came_from`; None on failure"""
    save.save_checkpoint(run)
    if run.saved_position != run.position:
        return None
    folder = run.folder / manifest.checkpoint_name(run.position)
    came_from: str | None = read_json(run.folder / "run.json").get("came_from")
    return str(folder.absolute()) if folder.is_dir() else came_from


METRICS = {"Progress and time": [  # read by utils.metrics
    ("step", "count", "last", "rollout batches so far; one line of metrics.jsonl per logged step"),
    ("updates", "count", "last", "optimizer updates so far"),
    ("episode", "count", "last", "completions of the steps' batches so far"),
    ("sampled_completions", "count", "last",
     "completions sampled so far: those of `episode`, those that zero_std_groups=resample threw "
     "away, and ReMax's greedy ones"),
    ("num_tokens", "tokens", "last",
     "tokens of prompts and completions of the steps' batches so far, including those of tools and "
     "environments"),
    ("epoch", "passes", "last", "prompts drawn so far, divided by the prompts of the data"),
    ("eps", "1/s", "last", "completions of `episode` per second, since this attempt began"),
], "Prompts and completions": [
    ("data/dropped_long", "count", "last", "prompts left out as too long, since the start"),
    ("data/truncated", "count", "last", "prompts cut as too long, since the start"),
]}  # fmt: skip


def log_step(run: Run, batch: Batch, updates: UpdateMetrics) -> None:
    """Log a finished step: its metrics, and the number of values under each mean."""
    state, settings = run.state, run.config.algorithm
    every_kl = settings.trains_kl_of_unscored
    metrics: JsonObject = step_metrics.rollout_metrics(
        batch, settings.scales_by_batch, settings.compares_siblings,
        run.config.generation.answer_budget is not None,
    )  # fmt: skip
    metrics |= step_metrics.advantage_metrics(batch, settings.kl_weight, every_kl)
    metrics |= updates.to_metrics() | step_metrics.sampler_metrics(batch)
    metrics |= run.clock.lap()
    metrics |= run.source.step_metrics(metrics["step_time"], metrics.get("time/exposed", 0.0))
    metrics |= step_metrics.speed_metrics(
        batch, updates, metrics, run.layout_choice.layout, settings.num_iterations, run.world
    )
    aged, lag_counts = staleness_metrics(batch, state.updates - updates.num_updates)
    metrics |= aged
    if run.source.has_one_lag and "sampling/logp_diff_rms" in metrics:
        gap, lag_counts = one_lag_metrics(metrics, float(updates.sums["gap_tokens"]))
        metrics |= gap
    metrics |= {
        "step": state.step,
        "num_tokens": state.tokens,
        "episode": state.episodes,
        "sampled_completions": state.sampled,
        "eps": (state.episodes - run.episodes_before) / run.clock.elapsed(),
        "epoch": state.place / len(run.prompts),
        "updates": state.updates,
        "data/dropped_long": run.prompts.dropped,
        "data/truncated": run.prompts.truncated,
    }
    counts = step_metrics.mean_counts(batch, updates, metrics, every_kl) | lag_counts
    run.log.step(metrics, counts, batch, run.num_steps)
