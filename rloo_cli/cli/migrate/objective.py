"""What an old run optimised: shaped scores, KL, ratio, aggregation, the sampler's correction.

One rule for each value that does not keep its meaning under a new name
(docs/OBJECTIVES.md, Dialects).
"""

import re

from rloo_cli.cli.migrate import tables
from rloo_cli.cli.migrate.batch import Dialect, number
from rloo_cli.cli.migrate.recipe import Recipe, ours


def shaping(recipe: Recipe, dialect: Dialect) -> None:
    """Normalising, clipping and the two EOS penalties."""
    said = recipe.said("reward_clip_range")
    clip = recipe.take("reward_clip_range")
    if isinstance(clip, str):  # "(-10, 10)" or "-10,10"
        clip = [float(x) for x in re.findall(r"[-+.\deE]+", clip)]
    if isinstance(clip, int | float):
        clip = [-clip, clip]
    if dialect.old and not recipe.flags.get("normalize_reward"):
        if clip:
            recipe.dropped.append(f"{said}: acted only with normalize_reward")
        clip = None
    elif dialect.old and clip is None:
        clip, said = [-10.0, 10.0], "the old default, which acted with normalize_reward"
    if clip:
        recipe.put("algorithm.reward_clip_range", [float(x) for x in clip], said)
    if dialect.old:
        recipe.drop("whiten_rewards", "old RLOO never read it")
        recipe.drop("token_level_kl", "did nothing in old RLOO: the sum over tokens is the same")
    subtract = number(recipe, "missing_eos_penalty")
    if subtract is not None:
        value = {"mode": "subtract", "value": float(subtract)}
        said = recipe.said("missing_eos_penalty")
        recipe.put("algorithm.missing_eos_penalty", value, f"{said}: taken off the score")
    value = {"mode": "replace", "value": float(number(recipe, "penalty_reward_value", -1))}
    if recipe.take("non_eos_penalty"):
        why = "non_eos_penalty: the score becomes penalty_reward_value"
        recipe.put("algorithm.missing_eos_penalty", value, why)
    elif "penalty_reward_value" in recipe.given:
        recipe.dropped.append("penalty_reward_value: acted only with non_eos_penalty")


def objective(recipe: Recipe, dialect: Dialect) -> None:
    """KL, ratio, aggregation and the sampler's correction."""
    if recipe.take("kl_in_reward") is False:
        said = recipe.said("kl_in_reward")
        recipe.put("algorithm.kl_in", "loss", said)
        recipe.put("algorithm.kl_estimator", "k3", f"{said}: k1 has no gradient in the loss")
    _loss(recipe)
    said, level = recipe.said("importance_sampling_level"), recipe.take("importance_sampling_level")
    if level:
        mine = tables.RATIO_LEVELS.get(level, level)
        why = ": the mean over tokens, as in GSPO" if mine != level else ""
        recipe.put("algorithm.ratio_level", mine, said + why)
    said, scale = recipe.said("scale_rewards"), recipe.take("scale_rewards")
    if scale is None and "scale_rewards" in recipe.given:
        scale = "none"  # the word, which reads as null
    if recipe.take("multi_objective_aggregation") == "normalize_then_sum":
        why = recipe.said("multi_objective_aggregation")
        recipe.put("algorithm.multi_reward", "normalize_then_sum", why)
    if scale == "gdpo":
        recipe.put("algorithm.multi_reward", "normalize_then_sum", said)
    elif scale is not None:
        recipe.put("algorithm.advantage_scale", tables.SCALE.get(scale, scale), said)
    if recipe.take("dynamic_sample"):
        recipe.put("algorithm.zero_std_groups", "resample", recipe.said("dynamic_sample"))
    if recipe.take("overlong_filter"):
        why = f"{recipe.said('overlong_filter')}; drop is advised over true"
        recipe.put("algorithm.mask_truncated_completions", True, why)
    _correction(recipe, dialect)


def _loss(recipe: Recipe) -> None:
    """`loss_type` of GRPO fills its own switches, which are open; RLOO's are not."""
    said, loss = recipe.said("loss_type"), recipe.take("loss_type")
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


def _correction(recipe: Recipe, dialect: Dialect) -> None:
    """Importance weights against the sampler: `sequence_mask` -> level sequence, mode mask."""
    on = recipe.take("vllm_importance_sampling_correction")
    mode = cap = floor = None
    said = []
    for name in list(recipe.flags):
        if name.startswith(("vllm_importance_sampling_", "rollout_importance_sampling_")):
            said.append(recipe.said(name))
            value = recipe.take(name)
            kind = name.partition("importance_sampling_")[2]
            mode = value if kind == "mode" else mode
            cap = value if kind in ("cap", "clip_max", "threshold") else cap
            floor = value if kind == "clip_min" else floor
    whole = dict(ours().get("algorithm.correction") or {})
    if on is False:
        said.append(recipe.said("vllm_importance_sampling_correction"))
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
