"""Converts an old run, once it is read, to the text of a recipe that means the same.

`choose_dialect` says which trainer and version the old run was of; `convert_to_recipe` lets each
file of this folder write its part.
"""

import re
from dataclasses import replace

from rloo_cli.compat.migrate import model, objective, tables
from rloo_cli.compat.migrate import sections as rules
from rloo_cli.compat.migrate.agent import write_agent
from rloo_cli.compat.migrate.batch import write_batch_sizes, write_duration, write_schedule
from rloo_cli.compat.migrate.old_run import OldRun
from rloo_cli.compat.migrate.recipe import Recipe
from rloo_cli.compat.migrate.tables import DIALECTS, Dialect
from rloo_cli.generation.transformers import SAMPLING_KWARGS
from rloo_cli.utils.errors import ConfigError, Problem, refuse
from rloo_cli.utils.files import JsonObject

FROM_HINT = (
    "rloo migrate --from rloo ... or --from grpo ..., as it was (also: --from swift; a version of"
    " TRL: rloo migrate --help)"
)


def convert_to_recipe(old_run: OldRun, dialect_name: str, world: int) -> str:
    """The text of the recipe for an old run on `world` processes."""
    return build_recipe(old_run, dialect_name, world).render()


def build_recipe(old_run: OldRun, dialect_name: str, world: int) -> Recipe:
    """The recipe for an old run on `world` processes, and what could not be carried over."""
    dialect = DIALECTS[dialect_name]
    recipe = Recipe(old_run.flags, old_run.setting_format, notes=old_run.notes)
    recipe.launcher_file, recipe.nodes = old_run.launcher_file, old_run.nodes
    dialect = _choose_algorithm(recipe, old_run, dialect)
    _spread_kwargs(recipe)
    size = write_batch_sizes(recipe, dialect, world)
    steps = write_duration(recipe, dialect, size)
    write_schedule(recipe, dialect, size, steps)
    model.write_model_keys(recipe, dialect)
    rules.write_data(recipe, dialect, old_run.script)
    rules.write_rewards(recipe, dialect)
    rules.write_generation(recipe, dialect)
    write_agent(recipe)
    objective.write_reward_shaping(recipe, dialect)
    objective.write_objective(recipe, dialect)
    rules.write_run_settings(recipe)
    recipe.unknown = recipe.put_remaining()
    _note_changed_defaults(recipe, dialect_name)
    for key, value in _dialect_defaults(dialect, recipe.original_flags).items():
        recipe.put_default(key, value, dialect.title)
    model.resolve_model_conflicts(recipe)
    per = f"{size.updates} update{'s' if size.updates > 1 else ''} per step"
    recipe.title = f"Migrated from {dialect.title}: {size.batch} completions per step, {per}."
    return recipe


def choose_dialect(old_run: OldRun, chosen: str) -> str:
    """The key of DIALECTS for the old run's tool and version.

    Raises ConfigError for another method than RLOO or GRPO, and if nothing says which of the two.
    """
    names = set(old_run.flags)
    is_swift = not chosen and (old_run.tool == "swift" or names & tables.ONLY_SWIFT)
    if chosen in ("swift", "ms_swift") or is_swift:
        _refuse_other_swift(old_run)
        return "ms_swift"
    if chosen in DIALECTS and chosen not in ("trl", "grpo"):
        return chosen
    kind = chosen if chosen in ("rloo", "grpo") else _algorithm_kind(old_run)
    if kind == "grpo":
        if names & tables.ONLY_0_16:
            return "grpo_0_16"
        return "grpo_0_28" if names & tables.UP_TO_0_28 else "grpo"
    only_old, only_new = tables.ONLY_OLD, tables.ONLY_NEW
    if chosen != "trl" and names & only_old and len(names & only_old) >= len(names & only_new):
        return "trl_0_9" if names & tables.ONLY_0_9 else "trl_0_21"
    return "trl_0_28" if names & tables.UP_TO_0_28 else "trl"


def _refuse_other_swift(old_run: OldRun) -> None:
    """Raise ConfigError for another method of ms-swift: without rlhf_type, `swift rlhf` is DPO."""
    method = str(old_run.flags.get("rlhf_type") or "")
    if not method and "advantage_estimator" not in old_run.flags and old_run.tool == "swift":
        is_rlhf = old_run.method == "rlhf"
        method = "dpo, which swift rlhf is by default" if is_rlhf else old_run.method
    elif not method:
        method = "grpo"
    if method != "grpo":
        raise _other_method_error(method, old_run)


def _algorithm_kind(old_run: OldRun) -> str:
    """rloo or grpo, by the first of these that says so: command, class, script, settings, names."""
    method = old_run.method if old_run.tool == "trl" else ""
    stem = old_run.script.removesuffix(".py")
    if method in tables.OTHER_METHODS or (stem in tables.OTHER_METHODS and not old_run.kind):
        raise _other_method_error(method or stem, old_run)
    names = set(old_run.flags)
    by_setting = {"grpo": names & tables.ONLY_GRPO, "rloo": names & tables.ONLY_RLOO}
    run_names = " ".join(str(old_run.flags.get(n) or "") for n in tables.RUN_NAME_FLAGS)
    hints = (
        {k for k in ("rloo", "grpo") if k in (old_run.kind, old_run.tool, method)},
        _kinds_in_name(stem),
        {kind for kind, settings in by_setting.items() if settings},
        _kinds_in_name(run_names),
        _kinds_in_name(old_run.file),
    )
    for hint in hints:
        if len(hint) == 1:
            return hint.pop()
    why = "nothing in it says: no command or class, no name, no setting that only one of them has"
    refuse("the old run", "is the old run RLOO or GRPO?", FROM_HINT, why)


def _kinds_in_name(text: str) -> set[str]:
    """The methods that parts of a name stand for."""
    parts = set(re.split(r"[^a-z]+", text.lower()))
    known_parts = {"grpo": tables.GRPO_NAME_PARTS, "rloo": tables.RLOO_NAME_PARTS}
    return {kind for kind, names in known_parts.items() if parts & names}


def _other_method_error(method: str, old_run: OldRun) -> ConfigError:
    what = f"the old run was {method}: rloo migrate converts RLOO and GRPO"
    if method in tables.DISTILLATIONS:
        words = "rloo train algorithm=gkd model.path=STUDENT model.ref_path=TEACHER data.path=DATA"
        why = "the student's own completions are learned from (lmbda 1); beta is algorithm.jsd_beta"
        urls = [old_run.flags[n] for n in tables.TEACHER_SERVERS if n in old_run.flags]
        if urls:
            words = f"rloo train algorithm=opd algorithm.teacher.base_url={urls[0]}"
            words += " model.path=STUDENT data.path=DATA"
            why = "the student's own completions are learned from (lmbda 1), by the reverse KL of"
            why += " their tokens, which is all that a server tells"
        return ConfigError(Problem(what, "the old run", why, words, more="docs/algorithms.md"))
    fix = "--from rloo or --from grpo, if it was one of them nevertheless"
    why = "another method has another loss, whose settings mean nothing to these two"
    return ConfigError(Problem(what, "the old run", why, fix))


def _choose_algorithm(recipe: Recipe, old_run: OldRun, dialect: Dialect) -> Dialect:
    """Choose the old run's algorithm. Returns the dialect with the defaults of that algorithm."""
    recipe.take("rlhf_type")
    ppo_flags = {"vf_coef", "cliprange_value"} & set(recipe.original_flags)
    if old_run.script.startswith("ppo") or ppo_flags:
        recipe.notes.append("the old run was PPO; this recipe is RLOO: no value model, K >= 2")
    estimator = "rloo"
    if dialect.is_swift:
        estimator = str(recipe.take("advantage_estimator", "grpo"))
        if estimator not in tables.SWIFT_ESTIMATORS:
            what = f"advantage_estimator {estimator} is not known"
            why = f"one of {', '.join(tables.SWIFT_ESTIMATORS)}"
            fix = "--advantage_estimator grpo, or another of these"
            refuse("the old run", what, fix, why)
        recipe.algorithm, more = tables.SWIFT_ESTIMATORS[estimator]
        dialect = replace(dialect, defaults=dialect.defaults | more)
    elif dialect.kind == "grpo":
        recipe.algorithm = estimator = "grpo"
    if recipe.algorithm != "rloo":
        what = "GRPO" if estimator == "grpo" else estimator
        recipe.groups["algorithm"] = (recipe.algorithm, f"the old run was {what}")
    return dialect


def _spread_kwargs(recipe: Recipe) -> None:
    """Make a flag of each entry of generation_kwargs and model_init_kwargs that has a key here.

    What the sampler takes beside these stays together; what it does not keeps the prefix.
    """
    for kwargs, flags in tables.SPREAD_KWARGS.items():
        if recipe.flags.get(kwargs) == {}:
            recipe.drop(kwargs, "there are none in it")
        elif isinstance(recipe.flags.get(kwargs), dict):
            taken = _sampler_takes(recipe) if kwargs == "generation_kwargs" else None
            _spread(recipe, kwargs, flags, taken)
    for name in tables.STRUCTURED_FLAGS:
        if not recipe.flags.get("use_vllm"):
            recipe.drop(name, "use_vllm was off")
        elif regex := recipe.take(name):
            kwargs = recipe.flags.setdefault("generation_kwargs", {})
            kwargs["structured_outputs"] = {"regex": regex}
            text = recipe.original_text(name)
            recipe.notes.append(f"{text}: generation.kwargs has it as structured_outputs")


def _sampler_takes(recipe: Recipe) -> tuple[str, ...] | None:
    """The names that generation.kwargs may have with the old run's sampler; None: any of vLLM's."""
    return None if recipe.flags.get("use_vllm") else SAMPLING_KWARGS


def _spread(
    recipe: Recipe, kwargs: str, flags: tuple[str, ...], taken: tuple[str, ...] | None
) -> None:
    rest: JsonObject = {}
    for name, value in recipe.take(kwargs, {}).items():
        if name not in flags and (taken is None or name in taken):
            rest[name] = value
            continue
        flag = name if name in flags else f"{kwargs}.{name}"
        flag = "model_revision" if flag == "revision" else flag  # as a command line calls it
        recipe.flags.setdefault(flag, value)
        recipe.original_flags.setdefault(flag, value)
    if rest:
        recipe.flags[kwargs] = rest


def _note_changed_defaults(recipe: Recipe, name: str) -> None:
    """Note defaults that are used and that differ in other versions of TRL."""
    changed = {
        "trl": tables.CHANGED_DEFAULTS,
        "grpo": tables.CHANGED_GRPO_DEFAULTS,
        "grpo_0_28": tables.CHANGED_GRPO_DEFAULTS,
    }
    for flag, text in changed.get(name, {}).items():
        silent = flag not in recipe.original_flags
        needed = {"vllm_mode": "use_vllm", "use_bias_correction_kl": "beta"}.get(flag)
        if silent and (needed is None or recipe.original_flags.get(needed)):
            recipe.notes.append(f"{flag} is TRL's default, which was {text}")


def _dialect_defaults(dialect: Dialect, flags: JsonObject) -> JsonObject:
    """The old tool's defaults for what the command leaves out."""
    if "full" in (flags.get("train_type"), flags.get("tuner_type")):
        return dialect.defaults | {"train.learning_rate": tables.SWIFT_FULL_LEARNING_RATE}
    return dialect.defaults
