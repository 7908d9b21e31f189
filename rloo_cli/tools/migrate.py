"""`rloo migrate`: an old RLOO command or config -> a recipe of ours that means the same.

    rloo migrate accelerate launch ... rloo_tldr.py --rloo_k 2 ...     the old command itself
    rloo migrate run.sh | config.yaml | config.json | train.py         or the file it is in
    --world-size N     processes the old run had, where its command does not say
    --from DIALECT     trl_0_9 (<=0.10), trl_0_21 (0.11-0.21), trl (>=0.22) or ms_swift

The output is a recipe; everything that is not YAML is a comment, so `> my.yaml` keeps it all. The
old tool's defaults are written out where they differ from ours, with what was corrected.
"""

from dataclasses import replace
from typing import Any

from rloo_cli.errors import ConfigError, Problem
from rloo_cli.tools import migrate_objective as objective
from rloo_cli.tools import migrate_rules as rules
from rloo_cli.tools.migrate_batch import Dialect, duration, schedule, sizes
from rloo_cli.tools.migrate_read import Given, read
from rloo_cli.tools.migrate_recipe import Recipe

OLD: dict[str, Any] = {
    "algorithm.num_generations": 2,
    "algorithm.beta": 0.05,
    "algorithm.epsilon": 0.2,
    "algorithm.num_iterations": 4,
    "generation.temperature": 0.7,
    "generation.max_completion_length": 53,
    "train.learning_rate": 5e-5,
    "train.lr_scheduler": "linear",
    "train.weight_decay": 0.0,
    "train.max_grad_norm": None,  # its loop never clipped
}
NEW: dict[str, Any] = {
    "algorithm.num_generations": 2,
    "algorithm.beta": 0.05,
    "algorithm.epsilon": 0.2,
    "algorithm.num_iterations": 1,
    "generation.temperature": 1.0,
    "generation.max_completion_length": 256,
    "train.learning_rate": 1e-6,
    "train.lr_scheduler": "linear",
    "train.weight_decay": 0.0,
    "train.max_grad_norm": 1.0,
}
SWIFT: dict[str, Any] = NEW | {
    "algorithm.num_generations": 8,
    "algorithm.beta": 0.04,
    "algorithm.ratio_level": "token",
    "algorithm.loss_agg": "sequence_mean",
    "generation.temperature": 0.9,
    "generation.max_completion_length": 512,
    "data.overlong": "truncate_left",
    "data.max_prompt_length": None,
    "train.learning_rate": 1e-4,
    "train.lr_scheduler": "cosine",
    "train.weight_decay": 0.1,
    "train.optimizer_kwargs": {"betas": [0.9, 0.95]},
}
GRPO = {"algorithm.num_generations": 8, "algorithm.beta": 0.0}  # TRL's
ESTIMATORS = {"grpo": "grpo", "reinforce_plus_plus": "reinforce_pp"}
TRL_REWARDS = {
    "accuracy_reward": "accuracy",
    "reasoning_accuracy_reward": "reasoning_accuracy",
    "think_format_reward": "think_format",
    "get_soft_overlong_punishment": "overlong",
}
SWIFT_REWARDS = {
    "accuracy": "accuracy",
    "format": "answer_tags",
    "cosine": "cosine_length",
    "repetition": "repetition",
    "soft_overlong": "overlong",
}
DIALECTS = {
    "trl_0_9": Dialect("TRL <=0.10", True, OLD),
    "trl_0_21": Dialect("TRL 0.11-0.21", True, OLD),
    "trl": Dialect("TRL >=0.22", False, NEW, rewards=TRL_REWARDS),
    "ms_swift": Dialect("ms-swift", False, SWIFT, device_batch=1, rewards=SWIFT_REWARDS),
}
ONLY_0_9 = {"non_eos_penalty", "penalty_reward_value"}
ONLY_OLD = {"rloo_k", "num_ppo_epochs", "kl_coef", "cliprange", "num_mini_batches"} | ONLY_0_9
ONLY_OLD |= {"response_length", "total_episodes", "sft_model_path", "missing_eos_penalty"}
ONLY_OLD |= {"local_rollout_forward_batch_size", "stop_token", "normalize_reward", "token_level_kl"}
ONLY_NEW = {"num_generations", "beta", "epsilon", "steps_per_generation", "reward_funcs"}
ONLY_NEW |= {"max_completion_length", "num_iterations", "generation_batch_size"}
ONLY_SWIFT = {"advantage_estimator", "rlhf_type", "kl_in_reward", "train_type", "tuner_type"}


def run(args: list[str]) -> int:
    """Print the recipe of an old run. Raises ConfigError for what cannot be read or converted."""
    options, words = _options(args)
    if "--help" in options or not words:
        print(__doc__)
        return 0 if "--help" in options else 2
    given = read(words)
    world = _world(options, given)
    name = options.get("--from") or _detect(given)
    if name not in DIALECTS:
        choices = ", ".join(DIALECTS)
        raise ConfigError(Problem(f"--from {name}: no such dialect", why=f"one of {choices}"))
    print(convert(given, name, world), end="")
    return 0


def convert(given: Given, name: str, world: int) -> str:
    """Old settings -> the text of a recipe."""
    dialect = DIALECTS[name]
    if given.tool == "grpo":
        dialect = replace(dialect, defaults=dialect.defaults | GRPO)
    recipe = Recipe(given.flags, given.said_as, notes=given.notes, launcher=given.processes_from)
    _which_algorithm(recipe, given)
    size = sizes(recipe, dialect, world)
    steps = duration(recipe, dialect, size)
    schedule(recipe, dialect, size, steps)
    rules.model(recipe, dialect)
    rules.data(recipe, dialect, given.script)
    rules.rewards(recipe, dialect)
    rules.generation(recipe, dialect)
    objective.shaping(recipe, dialect)
    objective.objective(recipe, dialect)
    rules.housekeeping(recipe)
    unknown = recipe.rest()
    for key, value in _defaults(dialect, recipe.given).items():
        recipe.default(key, value, dialect.title)
    per = f"{size.updates} update{'s' if size.updates > 1 else ''} per step"
    title = f"Migrated from {dialect.title}: {size.batch} completions per step, {per}."
    return recipe.render(title, unknown)


def _options(args: list[str]) -> tuple[dict[str, str], list[str]]:
    """Our own flags, before the old command or after a file; the rest are its words."""
    options: dict[str, str] = {}
    words = list(args)
    own = ("--from", "--world-size")
    while words and words[0] != "--":
        at = 0 if words[0].startswith("--") else 1  # `rloo migrate FILE --world-size 8`
        name, equals, value = words[at].partition("=") if len(words) > at else ("", "", "")
        if name in ("-h", "--help") and at == 0:
            return {"--help": ""}, []
        if name not in own:
            break
        if not equals and len(words) < at + 2:
            raise ConfigError(Problem(f"{name} needs a value", fix=f"{name} N"))
        options[name] = value if equals else words[at + 1]
        del words[at : at + (1 if equals else 2)]
    return options, words[1:] if words[:1] == ["--"] else words


def _world(options: dict[str, str], given: Given) -> int:
    """W, the old run's processes: said, launched, or 1 with a warning."""
    if text := options.get("--world-size"):
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(Problem(f"--world-size {text}: a whole number >= 1 is expected"))
        return int(text)
    if given.processes is None:
        given.notes.append(
            "the old run's number of processes is not said: 1 is assumed. With more, the batch was"
            " larger: rloo migrate --world-size N ..."
        )
        return 1
    given.notes.append(f"{given.processes} processes, by {given.processes_from}")
    return given.processes


def _detect(given: Given) -> str:
    """The dialect, by the command's tool and the names in it."""
    names = set(given.flags)
    if given.tool == "swift" or names & ONLY_SWIFT:
        return "ms_swift"
    if names & ONLY_OLD and len(names & ONLY_OLD) >= len(names & ONLY_NEW):
        return "trl_0_9" if names & ONLY_0_9 else "trl_0_21"
    return "trl"


def _which_algorithm(recipe: Recipe, given: Given) -> None:
    """Choose the algorithm that the old run was; say so where it was no RLOO."""
    estimator = recipe.take("advantage_estimator", "grpo")
    was_grpo = given.tool == "grpo" or recipe.take("rlhf_type") == "grpo"
    if given.script.startswith("ppo") or {"vf_coef", "cliprange_value"} & set(recipe.given):
        recipe.notes.append("the old run was PPO; this recipe is RLOO: no value model, K >= 2")
    if estimator == "rloo" or not (was_grpo or "advantage_estimator" in recipe.given):
        return
    what = "GRPO" if estimator == "grpo" else estimator
    if estimator in ESTIMATORS:
        recipe.groups["algorithm"] = (ESTIMATORS[estimator], f"the old run was {what}")
    else:
        recipe.notes.append(
            f"the old run was {what}; this recipe is RLOO: the baseline is the mean of the other"
            " completions, KL is in the reward, and no std divides the advantage"
        )


def _defaults(dialect: Dialect, flags: dict[str, Any]) -> dict[str, Any]:
    """What the old tool assumed where the command says nothing."""
    found = dialect.defaults
    if "full" in (flags.get("train_type"), flags.get("tuner_type")):
        found = found | {"train.learning_rate": 1e-5}
    return found
