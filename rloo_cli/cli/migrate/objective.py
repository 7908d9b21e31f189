"""What an old run optimised: shaped scores, KL, ratio, aggregation, the sampler's correction.

One rule for each value that does not keep its meaning under a new name
(docs/OBJECTIVES.md, Dialects).
"""

import re

from rloo_cli.cli.migrate import tables
from rloo_cli.cli.migrate.batch import Dialect, take_number
from rloo_cli.cli.migrate.recipe import Recipe, our_defaults


def write_reward_shaping(recipe: Recipe, dialect: Dialect) -> None:
    """Normalising, clipping and the two EOS penalties."""
    said = recipe.original_text("reward_clip_range")
    clip = recipe.take("reward_clip_range")
    if isinstance(clip, str):  # "(-10, 10)" or "-10,10"
        clip = [float(x) for x in re.findall(r"[-+.\deE]+", clip)]
    if isinstance(clip, int | float):
        clip = [-clip, clip]
    if dialect.is_old_trl and not recipe.flags.get("normalize_reward"):
        if clip:
            recipe.dropped.append(f"{said}: acted only with normalize_reward")
        clip = None
    elif dialect.is_old_trl and clip is None:
        clip, said = [-10.0, 10.0], "the old default, which acted with normalize_reward"
    if clip:
        recipe.put("algorithm.reward_clip_range", [float(x) for x in clip], said)
    if dialect.is_old_trl:
        recipe.drop("whiten_rewards", "old RLOO never read it")
        recipe.drop("token_level_kl", "did nothing in old RLOO: the sum over tokens is the same")
    subtract = take_number(recipe, "missing_eos_penalty")
    if subtract is not None:
        value = {"mode": "subtract", "value": float(subtract)}
        said = recipe.original_text("missing_eos_penalty")
        recipe.put("algorithm.missing_eos_penalty", value, f"{said}: taken off the score")
    value = {"mode": "replace", "value": float(take_number(recipe, "penalty_reward_value", -1))}
    if recipe.take("non_eos_penalty"):
        why = "non_eos_penalty: the score becomes penalty_reward_value"
        recipe.put("algorithm.missing_eos_penalty", value, why)
    elif "penalty_reward_value" in recipe.original_flags:
        recipe.dropped.append("penalty_reward_value: acted only with non_eos_penalty")


def write_objective(recipe: Recipe, dialect: Dialect) -> None:
    """KL, ratio, aggregation and the sampler's correction."""
    if recipe.take("kl_in_reward") is False:
        said = recipe.original_text("kl_in_reward")
        recipe.put("algorithm.kl_in", "loss", said)
        recipe.put("algorithm.kl_estimator", "k3", f"{said}: k1 has no gradient in the loss")
    _write_loss(recipe)
    said, level = (
        recipe.original_text("importance_sampling_level"),
        recipe.take("importance_sampling_level"),
    )
    if level:
        mine = tables.RATIO_LEVELS.get(level, level)
        why = ": the mean over tokens, as in GSPO" if mine != level else ""
        recipe.put("algorithm.ratio_level", mine, said + why)
    said, scale = recipe.original_text("scale_rewards"), recipe.take("scale_rewards")
    if scale is None and "scale_rewards" in recipe.original_flags:
        scale = "none"  # the word, which reads as null
    if recipe.take("multi_objective_aggregation") == "normalize_then_sum":
        why = recipe.original_text("multi_objective_aggregation")
        recipe.put("algorithm.multi_reward", "normalize_then_sum", why)
    if scale == "gdpo":
        recipe.put("algorithm.multi_reward", "normalize_then_sum", said)
    elif scale is not None:
        recipe.put("algorithm.advantage_scale", tables.ADVANTAGE_SCALES.get(scale, scale), said)
    if recipe.take("dynamic_sample"):
        recipe.put("algorithm.zero_std_groups", "resample", recipe.original_text("dynamic_sample"))
    if recipe.take("overlong_filter"):
        why = f"{recipe.original_text('overlong_filter')}; drop is advised over true"
        recipe.put("algorithm.mask_truncated_completions", True, why)
    _write_correction(recipe, dialect)


def _write_loss(recipe: Recipe) -> None:
    """`loss_type` of GRPO fills its own switches, which are open; RLOO's are not."""
    said, loss = recipe.original_text("loss_type"), recipe.take("loss_type")
    if isinstance(loss, list) and len(loss) == 1:
        loss = loss[0]
    if not loss:
        return
    if recipe.algorithm != "rloo":
        recipe.put("algorithm.loss_type", loss, said)
    elif loss in tables.LOSS_AGG:
        recipe.put("algorithm.loss_agg", tables.LOSS_AGG[loss], said)
    else:
        recipe.put("algorithm.loss_type", loss, said)
        if "algorithm.loss_type" in recipe.lines:
            for key in ("policy_loss", "ratio_level", "loss_agg"):
                recipe.put(f"algorithm.{key}", None, "loss_type says it")


def _write_correction(recipe: Recipe, dialect: Dialect) -> None:
    """Importance weights against the sampler: `sequence_mask` -> level sequence, mode mask."""
    on = recipe.take("vllm_importance_sampling_correction")
    mode = cap = floor = None
    said = []
    for name in list(recipe.flags):
        if name.startswith(("vllm_importance_sampling_", "rollout_importance_sampling_")):
            said.append(recipe.original_text(name))
            value = recipe.take(name)
            kind = name.partition("importance_sampling_")[2]
            mode = value if kind == "mode" else mode
            cap = value if kind in ("cap", "clip_max", "threshold") else cap
            floor = value if kind == "clip_min" else floor
    whole = dict(our_defaults().get("algorithm.correction") or {})
    if on is False:
        said.append(recipe.original_text("vllm_importance_sampling_correction"))
        recipe.put("algorithm.correction", whole | {"mode": "none"}, ", ".join(said))
    elif mode or cap or floor:
        level, _, how = str(mode or "sequence_truncate").partition("_")
        is_swift = any("rollout_" in text for text in said)
        new = {"mode": how, "level": level, "cap": float(cap or (2.0 if is_swift else 3.0))}
        new["floor"] = float(floor or 0.0)
        recipe.put("algorithm.correction", whole | new, ", ".join(said))
    elif "generation" in recipe.groups and dialect.correction and not said:
        said_by = f"{dialect.title}'s default, where vLLM samples"
        recipe.put("algorithm.correction", whole | dialect.correction, said_by)
    elif "generation" in recipe.groups and on is True and dialect.correction:
        chosen = dialect.correction
        if chosen["mode"] == "none":
            chosen = chosen | {"mode": "truncate"}
        recipe.put("algorithm.correction", whole | chosen, ", ".join(said))
