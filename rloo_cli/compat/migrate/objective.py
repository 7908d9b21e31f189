"""Writes the objective and the sampling of an old run, if several settings become one key.

A setting whose value changes on its own is in `table.py` (docs/algorithms.md, Dialects).
"""

import re

from rloo_cli.compat.migrate.recipe import Recipe, our_defaults

# The values of RLOO's `loss_type` that are an aggregation here.
LOSS_AGG = {
    "grpo": "sequence_mean", "dapo": "token_mean", "dr_grpo": "constant", "bnpo": "token_mean_local"
}  # fmt: skip
IMPORTANCE = ("vllm_importance_sampling_", "rollout_importance_sampling_")
CAPS = ("cap", "clip_max", "threshold")  # suffixes of the upper bound's names


def write_objective(recipe: Recipe) -> None:
    """Write the shaping of scores, the loss and the sampler's correction."""
    _write_reward_clip(recipe)
    replaced = recipe.take_number("penalty_reward_value", -1)
    if recipe.take("non_eos_penalty"):
        why = "non_eos_penalty: the score becomes penalty_reward_value"
        penalty = {"mode": "replace", "value": float(replaced)}
        recipe.put("algorithm.missing_eos_penalty", penalty, why)
    elif "penalty_reward_value" in recipe.original_flags:
        recipe.dropped.append("penalty_reward_value: acted only with non_eos_penalty")
    if recipe.flags.get("kl_in_reward") is False:
        text = recipe.original_text("kl_in_reward")
        recipe.put("algorithm.kl_estimator", "k3", f"{text}: k1 has no gradient in the loss")
    if recipe.flags.get("scale_rewards") == "gdpo":
        recipe.take("scale_rewards")
        text = recipe.original_text("scale_rewards")
        recipe.put("algorithm.multi_reward", "normalize_then_sum", text)
    _write_loss(recipe)
    _write_correction(recipe)


def _write_reward_clip(recipe: Recipe) -> None:
    """Write the clipping of scores, which up to TRL 0.21 applied only to normalized scores."""
    text, clip = recipe.original_text("reward_clip_range"), recipe.take("reward_clip_range")
    if isinstance(clip, str):  # "(-10, 10)" or "-10,10"
        clip = [float(x) for x in re.findall(r"[-+.\deE]+", clip)]
    if isinstance(clip, int | float):
        clip = [-clip, clip]
    if recipe.dialect.is_old_trl and not recipe.flags.get("normalize_reward"):
        if clip:
            recipe.dropped.append(f"{text}: acted only with normalize_reward")
        clip = None
    elif recipe.dialect.is_old_trl and clip is None:
        clip, text = [-10.0, 10.0], "the old default, which acted with normalize_reward"
    if clip:
        recipe.put("algorithm.reward_clip_range", [float(x) for x in clip], text)


def _write_loss(recipe: Recipe) -> None:
    """Write `loss_type`. GRPO's configs leave open the keys that it sets, RLOO's set them."""
    text, losses = recipe.original_text("loss_type"), recipe.take_list("loss_type")
    loss = losses[0] if len(losses) == 1 else losses
    if recipe.algorithm == "rloo" and str(loss) in LOSS_AGG:
        recipe.put("algorithm.loss_agg", LOSS_AGG[str(loss)], text)
    elif loss:
        recipe.put("algorithm.loss_type", loss, text)
        if recipe.algorithm == "rloo" and "algorithm.loss_type" in recipe.lines:
            for key in ("policy_loss", "ratio_level", "loss_agg"):
                recipe.put(f"algorithm.{key}", None, "loss_type says it")


def _write_correction(recipe: Recipe) -> None:
    """Write the sampler's correction: `sequence_mask` is the level sequence, the mode mask."""
    names = [n for n in recipe.flags if n.startswith(IMPORTANCE)]
    text = ", ".join(recipe.original_text(name) for name in names)
    on = recipe.take("vllm_importance_sampling_correction")
    said = {name.partition("importance_sampling_")[2]: name for name in names}
    mode = recipe.take(said.get("mode", ""))
    cap = next((recipe.take_number(said[n]) for n in CAPS if n in said), None)
    floor = recipe.take_number(said.get("clip_min", ""))
    uses_vllm, default = "generation" in recipe.groups, recipe.dialect.correction
    correction = dict(our_defaults().get("algorithm.correction") or {})
    if on is not None and not uses_vllm:
        recipe.dropped.append(f"{text}: use_vllm was off")
    if on is False:
        correction["mode"] = "none"
    elif mode or cap or floor:
        level, _, how = str(mode or "sequence_truncate").partition("_")
        usual = 2.0 if "threshold" in said or recipe.dialect.is_swift else 3.0
        correction |= {"mode": how, "level": level}
        correction |= {"cap": float(cap or usual), "floor": float(floor or 0.0)}
    elif uses_vllm and (not names or on):
        correction |= default
        text = text or f"{recipe.dialect.title}'s default, where vLLM samples"
        if on and default["mode"] == "none":
            correction["mode"] = "truncate"
    else:
        return
    recipe.put("algorithm.correction", correction, text)


def write_engine(recipe: Recipe) -> None:
    """Write vLLM, in the trainer or as a server that the old run called."""
    engine = [n for n in recipe.flags if n.startswith("vllm_") and not n.startswith(IMPORTANCE)]
    if not recipe.take("use_vllm"):
        recipe.drop([*engine, "sleep_level"], "use_vllm was off")
        return
    mode = recipe.take("vllm_mode")
    why = f"use_vllm, {recipe.dialect.title}'s default"
    why = recipe.original_text("vllm_mode") if mode else why
    backend = f"vllm_{mode or recipe.dialect.vllm_mode}"
    recipe.groups["generation"] = (backend, why)
    if backend == "vllm_colocate":
        servers = [n for n in engine if n.startswith("vllm_server_")]
        recipe.drop(servers, "the engine was colocated")
        return
    recipe.drop(recipe.names_of("generation.colocate."), "it was the colocated engine's")
    url, host = recipe.take("vllm_server_base_url"), recipe.take("vllm_server_host")
    port = recipe.take("vllm_server_port")
    if url is None and (host or port):
        url = f"http://{host or '127.0.0.1'}:{port or 8000}"
    if url is not None:
        why = "where the old run's server was; rloo vllm-serve starts one"
        recipe.put("generation.server.base_url", url, why)


def write_stops(recipe: Recipe) -> None:
    """Write stop conditions, and sampling settings known only to the old tool."""
    given = recipe.original_flags
    if recipe.dialect.is_old_trl and not given.get("stop_token") and "stop_token_id" not in given:
        why = "no stop_token: the old run trained on what came after EOS too; delete to stop there"
        recipe.put("generation.ignore_eos", True, why)
    if recipe.dialect.is_swift and not {"top_p", "top_k"} & set(given):
        recipe.notes.append("top_p, top_k: ms-swift may have read them from generation_config.json")
