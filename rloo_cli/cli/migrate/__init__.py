"""`rloo migrate`: turn an old RLOO or GRPO command or config into a recipe that means the same.

    rloo migrate accelerate launch ... rloo_tldr.py --rloo_k 2 ...     the old command itself
    rloo migrate run.sh | config.yaml | config.json | train.py         or the file it is in
    --world-size N     processes the old run had, if its command does not say
    --from TRAINER     rloo or grpo (TRL's), swift; or a version of TRL: trl_0_9 (<=0.10),
                       trl_0_21 (0.11-0.21), trl_0_28 (0.22-0.28), grpo_0_16 (0.14-0.16),
                       grpo_0_28 (0.22-0.28); trl: RLOO or GRPO as its settings say
    --json             the recipe's text as JSON

The output is a recipe; everything that is not YAML is a comment, so `> my.yaml` keeps it all. The
old tool's defaults are written out where they differ from ours, with what was corrected. If nothing
says whether the old run was RLOO or GRPO, --from has to. OpenRLHF, verl and Megatron are recognised
and refused: algorithm.dialect=openrlhf and verl compute RLOO as they do.

    agent      Writes the tools and environments of an old run
    batch      Writes how much an old run did
    foreign    Refuses trainers whose runs are recognised and not converted
    model      Writes the model of an old run
    objective  Writes what an old run optimised
    old_run    Holds what was read of an old run
    parse      Reads the old settings from what `rloo migrate` is given
    python     Reads the old settings in a Python training script
    recipe     Holds the recipe that `rloo migrate` writes
    sections   Writes an old run's data, rewards, generation and folders
    shell      Reads shell scripts as bash does
    tables     Lists what other trainers call their settings, and their defaults
"""

import json
import re
from dataclasses import replace

from rloo_cli.cli.migrate import model, objective, tables
from rloo_cli.cli.migrate import sections as rules
from rloo_cli.cli.migrate.agent import write_agent
from rloo_cli.cli.migrate.batch import Dialect, write_batch_sizes, write_duration, write_schedule
from rloo_cli.cli.migrate.foreign import refuse_foreign_trainer
from rloo_cli.cli.migrate.old_run import OldRun
from rloo_cli.cli.migrate.parse import read_old_run
from rloo_cli.cli.migrate.recipe import Recipe
from rloo_cli.cli.migrate.tables import SWIFT_REWARDS, TRL_REWARDS
from rloo_cli.utils.errors import ConfigError, Problem
from rloo_cli.utils.files import JsonObject

DIALECTS = {
    name: Dialect(
        title, old, defaults, vllm_mode=mode, correction=correction,
        rewards={} if old else TRL_REWARDS,
    )
    for name, (title, old, _, defaults, mode, correction) in tables.TRL_VERSIONS.items()
}  # fmt: skip
DIALECTS["ms_swift"] = Dialect(
    "ms-swift", False, tables.SWIFT, 1, SWIFT_REWARDS, True,
    correction=tables.NO_CORRECTION,
)  # fmt: skip
FROM_CHOICES = [*DIALECTS, "swift", "rloo", "openrlhf", "verl"]
FROM_HINT = (
    "rloo migrate --from rloo ... or --from grpo ..., as it was (also: --from swift; a version of"
    " TRL: rloo migrate --help)"
)


def run(args: list[str]) -> int:
    """Print the recipe of an old run. Raises ConfigError for what cannot be read or converted."""
    options, old_args = _options(args)
    if "--help" in options or not old_args:
        print(__doc__)
        return 0 if "--help" in options else 2
    if (chosen := options.get("--from")) and chosen not in FROM_CHOICES:
        why = f"one of {', '.join(FROM_CHOICES)}"
        raise ConfigError(Problem(f"--from {chosen}: no such trainer", why=why))
    if chosen in tables.FOREIGN_TITLES:
        refuse_foreign_trainer(old_args, {}, chosen)
    old_run = read_old_run(old_args)
    world = _world_size(options, old_run)
    recipe = convert_to_recipe(old_run, _dialect_of(old_run, chosen or ""), world)
    print(json.dumps({"recipe": recipe}) if "--json" in options else recipe.rstrip("\n"))
    return 0


def convert_to_recipe(old_run: OldRun, dialect_name: str, world: int) -> str:
    """The text of the recipe for an old run on `world` processes."""
    dialect = DIALECTS[dialect_name]
    recipe = Recipe(old_run.flags, old_run.setting_format, notes=old_run.notes)
    recipe.launcher_file = old_run.launcher_file
    dialect = _choose_algorithm(recipe, old_run, dialect, dialect_name)
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
    unknown = recipe.put_remaining()
    _note_changed_defaults(recipe, dialect_name)
    for key, value in _dialect_defaults(dialect, recipe.original_flags).items():
        recipe.put_default(key, value, dialect.title)
    model.resolve_model_conflicts(recipe)
    per = f"{size.updates} update{'s' if size.updates > 1 else ''} per step"
    title = f"Migrated from {dialect.title}: {size.batch} completions per step, {per}."
    return recipe.render(title, unknown)


def _options(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """Our own flags, before the old command or after a file, and the arguments that are left."""
    options: dict[str, str] = {}
    rest = list(args)
    while rest and rest[0] != "--":
        at = 0 if rest[0].startswith("--") else 1  # `rloo migrate FILE --world-size 8`
        name, equals, value = rest[at].partition("=") if len(rest) > at else ("", "", "")
        if name in ("-h", "--help") and at == 0:
            return {"--help": ""}, []
        if name == "--json":
            options[name] = ""
            del rest[at]
            continue
        if name not in ("--from", "--world-size"):
            break
        if not equals and len(rest) < at + 2:
            raise ConfigError(Problem(f"{name} needs a value", fix=f"{name} N"))
        options[name] = value if equals else rest[at + 1]
        del rest[at : at + (1 if equals else 2)]
    return options, rest[1:] if rest[:1] == ["--"] else rest


def _world_size(options: dict[str, str], old_run: OldRun) -> int:
    """W, the old run's processes: by --world-size, by its launcher, or 1 with a note."""
    if text := options.get("--world-size"):
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(Problem(f"--world-size {text}: a whole number >= 1 is expected"))
        return int(text)
    if old_run.processes is None:
        old_run.notes.append(
            "the old run's number of processes is not known: 1 is assumed. With more, the batch was"
            " larger: rloo migrate --world-size N ..."
        )
        return 1
    old_run.notes.append(f"{old_run.processes} processes, by {old_run.processes_from}")
    return old_run.processes


def _dialect_of(old_run: OldRun, chosen: str) -> str:
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
        raise _other_method_error(method)


def _algorithm_kind(old_run: OldRun) -> str:
    """rloo or grpo, by the first of these that says so: command, class, script, settings, names."""
    method = old_run.method if old_run.tool == "trl" else ""
    stem = old_run.script.removesuffix(".py")
    if method in tables.OTHER_METHODS or (stem in tables.OTHER_METHODS and not old_run.kind):
        raise _other_method_error(method or stem)
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
    raise ConfigError(Problem("is the old run RLOO or GRPO?", "the old run", why, FROM_HINT))


def _kinds_in_name(text: str) -> set[str]:
    """The methods that parts of a name stand for."""
    parts = set(re.split(r"[^a-z]+", text.lower()))
    known_parts = {"grpo": tables.GRPO_NAME_PARTS, "rloo": tables.RLOO_NAME_PARTS}
    return {kind for kind, names in known_parts.items() if parts & names}


def _other_method_error(method: str) -> ConfigError:
    what = f"the old run was {method}: rloo migrate converts RLOO and GRPO"
    fix = "--from rloo or --from grpo, if it was one of them nevertheless"
    return ConfigError(Problem(what, "the old run", fix=fix))


def _choose_algorithm(recipe: Recipe, old_run: OldRun, dialect: Dialect, name: str) -> Dialect:
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
            raise ConfigError(Problem(what, "the old run", why))
        recipe.algorithm, more = tables.SWIFT_ESTIMATORS[estimator]
        dialect = replace(dialect, defaults=dialect.defaults | more)
    elif tables.TRL_VERSIONS[name][2] == "grpo":
        recipe.algorithm = estimator = "grpo"
    if recipe.algorithm != "rloo":
        what = "GRPO" if estimator == "grpo" else estimator
        recipe.groups["algorithm"] = (recipe.algorithm, f"the old run was {what}")
    return dialect


def _spread_kwargs(recipe: Recipe) -> None:
    """Make a flag top_p of `generation_kwargs: {top_p: 0.9}`; unknown settings keep the prefix."""
    if not isinstance(recipe.flags.get("generation_kwargs"), dict):
        return
    for name, value in recipe.take("generation_kwargs").items():
        flag = name if name in tables.SAMPLING_SETTINGS else f"generation_kwargs.{name}"
        recipe.flags.setdefault(flag, value)
        recipe.original_flags.setdefault(flag, value)


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
