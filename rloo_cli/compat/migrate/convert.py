"""Converts an old run, once it is read, to an equivalent recipe.

Settings that become a key only together with others come first, then the tables, setting by
setting, then the old tool's defaults.
"""

from pathlib import Path

from rloo_cli.compat.migrate import model, objective, rules
from rloo_cli.compat.migrate.batch import write_batch_sizes, write_duration, write_schedule
from rloo_cli.compat.migrate.read import OldRun
from rloo_cli.compat.migrate.recipe import Recipe, old_run_error
from rloo_cli.compat.migrate.versions import DIALECTS, SWIFT_ESTIMATORS
from rloo_cli.generation.transformers import SAMPLING_KWARGS
from rloo_cli.utils.files import JsonObject

# Entries of these arguments that have their own settings here.
SPREAD_KWARGS = {
    "generation_kwargs": ("top_p", "top_k", "min_p", "temperature", "repetition_penalty"),
    "model_init_kwargs": (
        "torch_dtype", "dtype", "attn_implementation", "revision", "trust_remote_code"
    ),
}  # fmt: skip
STRUCTURED_FLAGS = (
    "vllm_structured_outputs_regex", "vllm_guided_decoding_regex", "structured_outputs_regex"
)  # fmt: skip


def convert_to_recipe(old_run: OldRun, dialect_name: str, world: int) -> str:
    """The text of the recipe for an old run on `world` processes."""
    return build_recipe(old_run, dialect_name, world).render()


def build_recipe(old_run: OldRun, dialect_name: str, world: int) -> Recipe:
    """The recipe for an old run on `world` processes, and what could not be carried over."""
    dialect = DIALECTS[dialect_name]
    recipe = Recipe(old_run.flags, old_run.setting_format, dialect, old_run.notes)
    defaults = _choose_algorithm(recipe, old_run)
    rules.take_built_in(recipe, old_run.script)
    _spread_kwargs(recipe)
    size = write_batch_sizes(recipe, old_run, world)
    write_schedule(recipe, size, write_duration(recipe, size))
    defaults |= model.write_model(recipe)
    rules.write_data(recipe, Path(old_run.script).name)
    rules.write_rewards(recipe)
    rules.write_agent(recipe)
    rules.write_run_settings(recipe)
    objective.write_engine(recipe)
    objective.write_stops(recipe)
    objective.write_objective(recipe)
    recipe.apply_table()
    for key, value in defaults.items():
        recipe.put_default(key, value, dialect.title)
    model.resolve_model_conflicts(recipe)
    if not dialect.is_swift:
        recipe.notes.append(
            f"settings missing in the old run are {dialect.title}'s defaults; if its version had"
            " others: rloo migrate --from VERSION (rloo migrate --help)"
        )
    per = f"{size.updates} update{'s' if size.updates > 1 else ''} per step"
    recipe.title = f"Migrated from {dialect.title}: {size.batch} completions per step, {per}."
    return recipe


def _choose_algorithm(recipe: Recipe, old_run: OldRun) -> JsonObject:
    """Choose the old run's algorithm. -> the defaults of its tool and of the algorithm"""
    dialect = recipe.dialect
    recipe.take("rlhf_type")
    ppo_flags = {"vf_coef", "cliprange_value"} & set(recipe.original_flags)
    if Path(old_run.script).name.startswith("ppo") or ppo_flags:
        recipe.notes.append("the old run was PPO; this recipe is RLOO: no value model, K >= 2")
    recipe.algorithm = estimator = dialect.kind
    more: JsonObject = {}
    if dialect.is_swift:
        estimator = str(recipe.take("advantage_estimator", "grpo"))
        if estimator not in SWIFT_ESTIMATORS:
            why = f"one of {', '.join(SWIFT_ESTIMATORS)}"
            fix = "--advantage_estimator grpo, or another of these"
            raise old_run_error(f"advantage_estimator {estimator} is not known", why, fix)
        recipe.algorithm, more = SWIFT_ESTIMATORS[estimator]
    if recipe.algorithm != "rloo":
        what = "GRPO" if estimator == "grpo" else estimator
        recipe.groups["algorithm"] = (recipe.algorithm, f"the old run was {what}")
    return dialect.defaults | more


def _spread_kwargs(recipe: Recipe) -> None:
    """Make a setting of each entry of generation_kwargs and model_init_kwargs that has a key here.

    What the sampler takes beside these stays together; what it does not keeps the prefix.
    """
    uses_vllm = recipe.flags.get("use_vllm")
    for kwargs, own in SPREAD_KWARGS.items():
        given = recipe.flags.get(kwargs)
        if not given or not isinstance(given, dict):
            recipe.drop([kwargs] if given == {} else [], "it is empty")
            continue
        takes_all = kwargs == "model_init_kwargs" or uses_vllm
        rest = {
            k: v for k, v in given.items() if k not in own and (takes_all or k in SAMPLING_KWARGS)
        }
        del recipe.flags[kwargs]
        for name in [n for n in given if n not in rest]:
            flag = name if name in own else f"{kwargs}.{name}"
            flag = "model_revision" if flag == "revision" else flag  # its name on the command line
            recipe.add_flags({flag: given[name]})
        if rest:
            recipe.flags[kwargs] = rest
    if not uses_vllm:
        recipe.drop(STRUCTURED_FLAGS, "use_vllm was off")
    for name in STRUCTURED_FLAGS:
        if regex := recipe.take(name):
            kwargs = recipe.flags.setdefault("generation_kwargs", {})
            kwargs["structured_outputs"] = {"regex": regex}
            text = recipe.original_text(name)
            recipe.notes.append(f"{text}: generation.kwargs has it as structured_outputs")
