"""Writes what an old run optimised: shaped scores, KL, ratio, aggregation, sampler's correction.

There is a rule for each value that changes its meaning (docs/OBJECTIVES.md, Dialects).
"""

import re

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.batch import take_number
from rloo_cli.compat.migrate.recipe import Recipe, our_defaults
from rloo_cli.compat.migrate.tables import Dialect
from rloo_cli.utils.files import JsonObject


def write_reward_shaping(recipe: Recipe, dialect: Dialect) -> None:
    """Write the clipping of scores and the two EOS penalties."""
    text, clip = recipe.original_text("reward_clip_range"), recipe.take("reward_clip_range")
    if isinstance(clip, str):  # "(-10, 10)" or "-10,10"
        clip = [float(x) for x in re.findall(r"[-+.\deE]+", clip)]
    if isinstance(clip, int | float):
        clip = [-clip, clip]
    if dialect.is_old_trl and not recipe.flags.get("normalize_reward"):
        if clip:
            recipe.dropped.append(f"{text}: acted only with normalize_reward")
        clip = None
    elif dialect.is_old_trl and clip is None:
        clip, text = [-10.0, 10.0], "the old default, which acted with normalize_reward"
    if clip:
        recipe.put("algorithm.reward_clip_range", [float(x) for x in clip], text)
    if dialect.is_old_trl:
        recipe.drop("whiten_rewards", "old RLOO never read it")
        recipe.drop("token_level_kl", "did nothing in old RLOO: the sum over tokens is the same")
    subtracted = take_number(recipe, "missing_eos_penalty", None)
    if subtracted is not None:
        penalty: JsonObject = {"mode": "subtract", "value": float(subtracted)}
        text = recipe.original_text("missing_eos_penalty")
        recipe.put("algorithm.missing_eos_penalty", penalty, f"{text}: taken off the score")
    penalty = {"mode": "replace", "value": float(take_number(recipe, "penalty_reward_value", -1))}
    if recipe.take("non_eos_penalty"):
        why = "non_eos_penalty: the score becomes penalty_reward_value"
        recipe.put("algorithm.missing_eos_penalty", penalty, why)
    elif "penalty_reward_value" in recipe.original_flags:
        recipe.dropped.append("penalty_reward_value: acted only with non_eos_penalty")


def write_objective(recipe: Recipe, dialect: Dialect) -> None:
    """Write KL, ratio, aggregation and the sampler's correction."""
    if (in_reward := recipe.take("kl_in_reward")) is not None:
        text = recipe.original_text("kl_in_reward")
        recipe.put("algorithm.kl_in", "reward" if in_reward else "loss", text)
        if not in_reward:
            recipe.put("algorithm.kl_estimator", "k3", f"{text}: k1 has no gradient in the loss")
    _write_loss(recipe)
    name = "importance_sampling_level"
    text, level = recipe.original_text(name), recipe.take(name)
    if level:
        ratio_level = tables.RATIO_LEVELS.get(level, level)
        why = ": the mean over tokens, as in GSPO" if ratio_level != level else ""
        recipe.put("algorithm.ratio_level", ratio_level, text + why)
    text, scale = recipe.original_text("scale_rewards"), recipe.take("scale_rewards")
    if scale is None and "scale_rewards" in recipe.original_flags:
        scale = "none"  # `none` was written, which YAML reads as null
    if several := recipe.take("multi_objective_aggregation"):
        value = "normalize_then_sum" if several == "normalize_then_sum" else "sum"
        why = recipe.original_text("multi_objective_aggregation")
        recipe.put("algorithm.multi_reward", value, why)
    if scale == "gdpo":
        recipe.put("algorithm.multi_reward", "normalize_then_sum", text)
    elif scale is not None:
        recipe.put("algorithm.advantage_scale", tables.ADVANTAGE_SCALES.get(scale, scale), text)
    if recipe.take("dynamic_sample"):
        recipe.put("algorithm.zero_std_groups", "resample", recipe.original_text("dynamic_sample"))
    if recipe.take("overlong_filter"):
        why = f"{recipe.original_text('overlong_filter')}; drop is advised over true"
        recipe.put("algorithm.mask_truncated_completions", True, why)
    _write_correction(recipe, dialect)


def _write_loss(recipe: Recipe) -> None:
    """Write `loss_type`. GRPO's configs leave open the keys that it chooses, RLOO's set them."""
    text, loss = recipe.original_text("loss_type"), recipe.take("loss_type")
    if isinstance(loss, list) and len(loss) == 1:
        loss = loss[0]
    if not loss:
        return
    if recipe.algorithm != "rloo":
        recipe.put("algorithm.loss_type", loss, text)
    elif loss in tables.LOSS_AGG:
        recipe.put("algorithm.loss_agg", tables.LOSS_AGG[loss], text)
    else:
        recipe.put("algorithm.loss_type", loss, text)
        if "algorithm.loss_type" in recipe.lines:
            for key in ("policy_loss", "ratio_level", "loss_agg"):
                recipe.put(f"algorithm.{key}", None, "loss_type says it")


def _write_correction(recipe: Recipe, dialect: Dialect) -> None:
    """Write the sampler's correction: `sequence_mask` is the level sequence, the mode mask."""
    on = recipe.take("vllm_importance_sampling_correction")
    mode = cap = floor = None
    texts = []
    for name in list(recipe.flags):
        if name.startswith(("vllm_importance_sampling_", "rollout_importance_sampling_")):
            texts.append(recipe.original_text(name))
            kind = name.partition("importance_sampling_")[2]
            if kind == "mode":
                mode = recipe.take(name)
                continue
            value = take_number(recipe, name, None)
            cap = value if kind in ("cap", "clip_max", "threshold") else cap
            floor = value if kind == "clip_min" else floor
    key, uses_vllm = "algorithm.correction", "generation" in recipe.groups
    defaults = dict(our_defaults().get(key) or {})
    if on is not None and not uses_vllm:
        text = recipe.original_text("vllm_importance_sampling_correction")
        recipe.dropped.append(f"{text}: use_vllm was off")
    if on is False:
        texts.append(recipe.original_text("vllm_importance_sampling_correction"))
        recipe.put(key, defaults | {"mode": "none"}, ", ".join(texts))
    elif mode or cap or floor:
        level, _, how = str(mode or "sequence_truncate").partition("_")
        is_swift = any("rollout_" in text for text in texts)
        new = {"mode": how, "level": level, "cap": float(cap or (2.0 if is_swift else 3.0))}
        new["floor"] = float(floor or 0.0)
        recipe.put(key, defaults | new, ", ".join(texts))
    elif uses_vllm and not texts:
        why = f"{dialect.title}'s default, where vLLM samples"
        recipe.put(key, defaults | dialect.correction, why)
    elif uses_vllm and on is True:
        chosen = dialect.correction
        if chosen["mode"] == "none":
            chosen = chosen | {"mode": "truncate"}
        recipe.put(key, defaults | chosen, ", ".join(texts))
