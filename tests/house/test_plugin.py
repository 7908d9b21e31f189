"""`rloo_cli.plugin`: what a user's own file imports stays as it is from one version to the next.

A name may be added. What is here may not be renamed or taken away, nor a field or an argument of
it: change this table only with a line in CHANGELOG.md that says how a file is to be changed.
"""

import dataclasses
import inspect
from typing import Any

from rloo_cli import plugin

# Name -> fields of a dataclass, members of a class, or arguments of a function, in their order.
# None: a type, or a section of the config, whose keys `rloo config --json` lists.
FACE: dict[str, str | None] = {
    "AdvantageInputs": "score kl scorable state greedy_score normalize",
    "Advantages": "reward advantage usable norm_skipped factor",
    "Algorithm": (
        "is_algorithm resolved_values config advantages token_advantages loss value_loss "
        "next_state rules warnings forward_plan combine_rewards shape_scores"
    ),
    "AlgorithmConfig": None,
    "Completion": None,
    "ForwardPlan": "reference value_model by_scores separate every_completion",
    "Loss": (
        "total policy kl ratio low high delta unit_mask row_low row_high log_ratio_sq "
        "weight raw_weight capped bonus metrics"
    ),
    "LossInputs": (
        "logp old_logp ref_logp micro_batch advantage denominator kl_logp entropy num_tokens"
    ),
    "Problem": "what where why fix more",
    "RLOO": (
        "advantages is_algorithm resolved_values config token_advantages loss value_loss "
        "next_state rules warnings forward_plan combine_rewards shape_scores"
    ),
    "RewardConfig": None,
    "RunConfig": None,
    "StepTokens": "score group sequence mask old ref value",
    "Switches": None,
    "TokenAdvantages": "advantage returns norm_skipped",
    "TrainerState": (
        "global_step step max_steps epoch episode num_input_tokens_seen num_train_epochs "
        "log_history"
    ),
    "ValueLoss": "total value clipped counted",
    "in_reward": "config",
    "key": "meaning limits",
    "texts": "completions",
    "usable_rows": "scorable config",
}


def members(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    if isinstance(value, type):
        ours = [c for c in value.__mro__ if c.__module__.startswith("rloo_cli")]
        return [name for c in ours for name in vars(c) if not name.startswith("_")]
    return list(inspect.signature(value).parameters)


def test_what_a_users_file_may_import_is_what_it_was() -> None:
    assert set(FACE) <= set(plugin.__all__)
    for name, known in FACE.items():
        if known is not None:
            assert set(known.split()) <= set(members(getattr(plugin, name))), name


def test_fields_and_arguments_keep_their_order() -> None:
    """New ones come behind: a file may give the first ones by position."""
    for name, known in FACE.items():
        value = getattr(plugin, name)
        if known is not None and (dataclasses.is_dataclass(value) or not isinstance(value, type)):
            assert members(value)[: len(known.split())] == known.split(), name
