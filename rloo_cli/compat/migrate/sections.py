"""Writes an old run's data, rewards, generation and folders.

There is one rule for each value that does not keep its meaning under a new name. Plain renames need
none: `config/old_names.py` has the whole table.
"""

import re
from pathlib import Path
from typing import get_args

from rloo_cli.compat.migrate import tables
from rloo_cli.compat.migrate.batch import take_number
from rloo_cli.compat.migrate.old_run import read_old_file
from rloo_cli.compat.migrate.recipe import Recipe, schema_refusal
from rloo_cli.compat.migrate.tables import Dialect
from rloo_cli.config.key_types import TrackerName
from rloo_cli.utils.errors import refuse
from rloo_cli.utils.files import JsonObject

NULL_NOTE = "here null is what the context leaves, at most 4096"


def write_data(recipe: Recipe, dialect: Dialect, script: str) -> None:
    """Write where the prompts come from, and what happens to long ones."""
    name = "dataset" if "dataset" in recipe.flags else "datasets"
    text, entries = recipe.original_text(name), recipe.take(name)
    entries = entries if isinstance(entries, list) else [entries]
    sources = [_dataset_source(entry) for entry in entries if entry]
    if len(sources) > 1:
        _write_mixture(recipe, sources, text)
    elif sources:
        for key, value in sources[0].items():
            note = "; its n rows were drawn at random" * (key == "max_samples")
            recipe.put(f"data.{key}", value, text + note)
    elif "_tldr" in script and dialect.is_old_trl and not recipe.flags.get("dataset_name"):
        recipe.put("data.path", tables.TLDR_DATASET, f"{script} had it built in")
    if "_tldr" in script and dialect.title in tables.TLDR_TEMPLATES:
        template, why = tables.TLDR_TEMPLATES[dialect.title], f"{script} put this around a post"
        recipe.put("data.template", template, why, keep_unsupported=False)
        recipe.put("data.max_prompt_length", 512, f"{script} left longer ones out")
    if Path(script).name in tables.VISION_SCRIPTS:
        _write_vision_script(recipe, script)
    if agent_script := recipe.take("agent_script"):
        _write_agent_script(recipe, str(agent_script))
    _write_prompt_limits(recipe, dialect)
    if sets := recipe.take("eval_sets"):  # of a trainer that is called from Python
        recipe.put("eval.sets", sets, "eval_dataset")
    if isinstance(recipe.flags.get("columns"), dict):
        recipe.put("data.columns", recipe.take("columns"), recipe.original_text("columns"))
    if "enable_thinking" in recipe.flags:
        kwargs = {"enable_thinking": bool(recipe.take("enable_thinking"))}
        text = recipe.original_text("enable_thinking")
        recipe.put("generation.chat_template_kwargs", kwargs, text)
    system = str(recipe.flags.get("system") or "")
    if system.endswith(".txt"):  # ms-swift takes a file here
        text = recipe.original_text("system")
        recipe.take("system")
        try:
            recipe.put("data.system", read_old_file(Path(system), errors="strict").strip(), text)
        except (OSError, ValueError):  # not here, or in another encoding
            recipe.notes.append(f"{text} is a file: set data.system to its text")


def _write_vision_script(recipe: Recipe, script: str) -> None:
    """Write what TRL's scripts for vision-language models set by themselves."""
    why = f"{script} had it built in"
    if not recipe.flags.get("dataset_name"):
        recipe.put("data.path", tables.VISION_DATASET, why)
    recipe.put("data.prompt_column", "problem", why)
    recipe.put("data.chat", True, f"{script} made a user's message of each; images come from image")
    recipe.put("data.max_pixels", tables.VISION_PIXELS, f"{script} left images of 512 pixels out")
    if not recipe.flags.get("reward_funcs"):
        recipe.groups["reward"] = (["think_format", "accuracy"], why)
    recipe.put(
        "data.system", tables.VISION_SYSTEM, f"it stands for {script}'s, which says the same"
    )
    recipe.notes.append(f"set data.system to the SYSTEM_PROMPT of {script}")


def _write_agent_script(recipe: Recipe, script: str) -> None:
    """Write what TRL's script for tools sets by itself; `script`: its path.

    Its tool, its rewards and the function that makes its prompts are taken from the script itself.
    """
    why = f"{script} had it built in"
    recipe.drop("dataset_name", f"{script} trains on data of its own")
    recipe.put("data.path", tables.AGENT_DATASET, why)
    recipe.put("data.map", f"{script}:{tables.AGENT_PROMPT}", why)
    recipe.flags["tools"] = [f"{script}:{tables.AGENT_TOOL}"]
    for name in tables.AGENT_REWARDS:
        recipe.put_reward(name, {"type": "function", "path": f"{script}:{name}"}, why)
    recipe.put("generation.chat_template_kwargs", {"enable_thinking": False}, why)
    recipe.notes += [
        f"{script} has to be there: this recipe names functions in it",
        f"{script} keeps the questions that begin with 'Does the gene ': name a function that does"
        " so in data.filter",
        f"{script} makes biogrid.db, which its tool reads, before it trains: make it once",
    ]


def _dataset_source(entry: object) -> JsonObject:
    """`path:subset#n`, or an entry of TRL's `datasets`, under the keys of our SourceConfig."""
    if isinstance(entry, dict):
        source: JsonObject = {k: entry.get(k) for k in ("path", "name", "split")}
    else:
        path, _, samples = str(entry).partition("#")
        path, _, subset = path.partition(":")
        source = {"path": path, "name": subset or None}
        source["max_samples"] = int(samples) if samples.isdigit() else None
    return {k: v for k, v in source.items() if v is not None}


def _write_mixture(recipe: Recipe, sources: list[JsonObject], original_text: str) -> None:
    """Write several data sets, which the old tool concatenated: each has its size as weight."""
    table: dict[str, JsonObject] = {}
    for source in sources:
        base = _slug_name(Path(str(source["path"])).stem).replace(".", "_").replace("-", "_")
        name = base if base not in table else f"{base}_{len(table) + 1}"
        table[name] = {"weight": float(source.get("max_samples") or 1)} | source
    recipe.put("data.mixture", table, original_text)
    recipe.put("data.path", None, "data.mixture says where the rows come from")
    if any(not {"max_samples", "weight"} & set(source) for source in sources):
        recipe.notes.append(
            f"{original_text}: the old tool put the data sets one after the other, so that each"
            " counted by its rows; data.mixture draws by weight: set the weights to the numbers of"
            " rows"
        )


def _write_prompt_limits(recipe: Recipe, dialect: Dialect) -> None:
    """Write how long a prompt may be, and what happens to longer ones."""
    key, limit = "data.max_prompt_length", "max_length" if dialect.is_swift else "max_prompt_length"
    is_new_trl = not dialect.is_old_trl and not dialect.is_swift
    if recipe.flags.get(limit):
        text = recipe.original_text(limit)
        recipe.put(key, int(take_number(recipe, limit, 0)), text)
        if limit == "max_prompt_length":
            recipe.put("data.overlong", "truncate_left", f"{text}: TRL kept the last tokens")
    elif dialect.is_old_trl and key not in recipe.lines:
        recipe.put(key, None, f"{dialect.title} had no limit; {NULL_NOTE}")
    elif is_new_trl and not re.search(r"0\.[12]", dialect.title):
        why = "TRL has no limit from 0.29 on; it kept the last 512 tokens up to 0.26"
        recipe.put(key, None, f"{why}; {NULL_NOTE}")
    elif is_new_trl:
        recipe.put(key, 512, "TRL kept the last 512 tokens")
        recipe.put("data.overlong", "truncate_left", "TRL kept the last 512 tokens")
    strategy = recipe.take("truncation_strategy")
    if strategy:
        overlong = {"delete": "filter", "left": "truncate_left"}.get(strategy, strategy)
        recipe.put("data.overlong", overlong, recipe.original_text("truncation_strategy"))


def write_generation(recipe: Recipe, dialect: Dialect) -> None:
    """Write when a completion stops, and the inference engine."""
    if recipe.flags.get("router_aux_loss_coef") == 0:
        text = recipe.original_text("router_aux_loss_coef")
        recipe.take("router_aux_loss_coef")
        recipe.put("generation.allow_moe", True, f"{text}: a router has no loss of its own here")
    ids = recipe.take("stop_token_id")
    if ids is not None:
        why = f"{recipe.original_text('stop_token_id')}, beside every EOS id"
        recipe.put("generation.stop_token_ids", ids if isinstance(ids, list) else [ids], why)
    stops = recipe.original_flags.get("stop_token")
    recipe.drop("stop_token", "every EOS id ends a completion here")
    if dialect.is_old_trl and ids is None and not stops:
        why = "no stop_token: the old run trained on what came after EOS too; delete to stop there"
        recipe.put("generation.ignore_eos", True, why)
    if "stop_words" in recipe.flags:
        stop = recipe.take("stop_words")
        stop = [stop] if isinstance(stop, str) else stop
        recipe.put("generation.stop", stop, recipe.original_text("stop_words"))
    if (top_k := take_number(recipe, "top_k", None)) is not None:
        recipe.put("generation.top_k", max(0, top_k), recipe.original_text("top_k"))
    if dialect.is_swift and not {"top_p", "top_k"} & set(recipe.original_flags):
        recipe.notes.append("top_p, top_k: ms-swift may have read them from generation_config.json")
    _write_inference_engine(recipe, dialect)


def _write_inference_engine(recipe: Recipe, dialect: Dialect) -> None:
    """Write vLLM, beside the trainer or as a server that the old run called."""
    engine = [n for n in recipe.flags if n.startswith("vllm_") and "importance" not in n]
    if not recipe.take("use_vllm"):
        for name in engine:
            recipe.drop(name, "use_vllm was off")
        return
    mode = recipe.take("vllm_mode")
    backend = f"vllm_{mode or dialect.vllm_mode}"
    why = recipe.original_text("vllm_mode") if mode else f"use_vllm, {dialect.title}'s default"
    recipe.groups["generation"] = (backend, why)
    if backend == "vllm_server":
        _write_server_address(recipe)
        for name in [*tables.COLOCATED_KEYS, "vllm_enable_sleep_mode", "sleep_level"]:
            recipe.drop(name, "it was the colocated engine's")
        return
    for name, key in tables.COLOCATED_KEYS.items():
        if (value := recipe.take(name)) is not None:
            recipe.put(f"generation.colocate.{key}", value, recipe.original_text(name))
    for name in ("vllm_enable_sleep_mode", "sleep_level"):
        if (value := recipe.take(name)) is not None:
            sleep = "weights" if value else "none"
            recipe.put("generation.colocate.sleep", sleep, recipe.original_text(name))
    for name in [n for n in engine if n.startswith("vllm_server_")]:
        recipe.drop(name, "the engine was colocated")


def _write_server_address(recipe: Recipe) -> None:
    """Write where the old run's server was."""
    url, host = recipe.take("vllm_server_base_url"), recipe.take("vllm_server_host")
    port = recipe.take("vllm_server_port")
    if url is None and (host or port):
        url = f"http://{host or '127.0.0.1'}:{port or 8000}"
    if url is not None:
        flag = "vllm_server_host" if host else "vllm_server_port"
        flag = "vllm_server_base_url" if "vllm_server_base_url" in recipe.original_flags else flag
        why = f"{recipe.original_text(flag)}; rloo vllm-serve starts it"
        recipe.put("generation.server.base_url", url, why)
    if (limit := recipe.take("vllm_server_timeout")) is not None:
        why = recipe.original_text("vllm_server_timeout")
        recipe.put("generation.server.ready_timeout_s", float(limit), why)


def write_rewards(recipe: Recipe, dialect: Dialect) -> None:
    """Write `reward_funcs`, reward models and their weights as one named entry each."""
    rewards: list[tuple[str, JsonObject, str]] = []  # name, {type, path}, its text in the old run
    for flag in ("reward_model_path", "reward_model_name_or_path", "reward_model"):
        if flag in recipe.flags:
            paths = recipe.take(flag)
            paths = paths if isinstance(paths, list) else [paths]
            for path in paths:
                name = "reward_model"
                name = _reward_entry(str(path), dialect, "")[0] if len(paths) > 1 else name
                entry = {"type": "model", "path": path}
                rewards.append((name, entry, recipe.original_text(flag)))
    functions, text = recipe.take("reward_funcs", []), recipe.original_text("reward_funcs")
    plugins = recipe.flags.get("external_plugins") or "rewards.py"
    recipe.drop("external_plugins", "rewards that are code are functions in it, by file.py:name")
    plugin = str(plugins[0] if isinstance(plugins, list) else plugins)
    for spec in functions if isinstance(functions, list | tuple) else [functions]:
        name, entry = _reward_entry(str(spec), dialect, plugin)
        rewards.append((name, entry, text))
        if entry.get("path") == f"{plugin}:{spec}":
            recipe.notes.append(f"reward {spec} is code: make it a function {plugin}:{spec}")
    if dialect.is_swift:  # it puts the reward model last, TRL first
        rewards.sort(key=lambda reward: reward[1]["type"] == "model" and reward[2] != text)
    weights = recipe.take("reward_weights")
    weights = weights if isinstance(weights, list | tuple) else [weights] if weights else []
    if weights and len(weights) != len(rewards):
        count = f"{len(weights)} weights, {len(rewards)} rewards: {[name for name, *_ in rewards]}"
        what = "reward_weights does not fit the rewards"
        fix = "give reward_weights a number for each reward, or leave it out"
        refuse("the old run", what, fix, count)
    tokenizers = recipe.take("reward_tokenizers") or []  # of a trainer called from Python
    for (_, entry, _), tokenizer in zip(rewards, tokenizers, strict=False):
        entry |= {"tokenizer": tokenizer} if tokenizer else {}
    taken: set[str] = set()
    for index, (name, entry, why) in enumerate(rewards):
        name = name if name not in taken else f"{name}_{index + 1}"
        taken.add(name)
        weight = float(weights[index]) if weights else 1.0
        if entry.get("type") == "overlong" and "soft_cache_length" in recipe.flags:
            _write_overlong_penalty(recipe, weight)
            continue
        recipe.put_reward(name, entry, why)
        if weights and schema_refusal(f"reward.{name}.type", entry["type"]) is None:
            recipe.put(f"reward.{name}.weight", weight, recipe.original_text("reward_weights"))
    if recipe.take("environment_reward"):  # TRL adds it with the weight 1
        recipe.put_reward("environment", {"type": "environment"}, "the environment's get_reward")
    elif "reward" not in recipe.groups and not any(k.startswith("reward.") for k in recipe.lines):
        recipe.notes.append("no reward is named in the old settings: add reward=NAME")


def _reward_entry(spec: str, dialect: Dialect, plugin: str) -> tuple[str, JsonObject]:
    """The name and the entry here of a reward as it was named; `plugin` has its code."""
    short = spec.rpartition(".")[2] if spec.startswith("trl.") else spec
    if short in dialect.rewards:
        return dialect.rewards[short], {"type": dialect.rewards[short]}
    if ":" in spec:
        return spec.rpartition(":")[2], {"type": "function", "path": spec}
    if "/" in spec and not spec.endswith(".py"):
        return re.sub(r"\W+|^(?=\d)", "_", Path(spec).name), {"type": "model", "path": spec}
    where, _, name = spec.rpartition(".")
    return name, {"type": "function", "path": f"{where or plugin}:{name}"}


def _write_overlong_penalty(recipe: Recipe, weight: float) -> None:
    cache = int(take_number(recipe, "soft_cache_length", 0))
    default = recipe.original_flags.get("max_completion_length", 512)
    max_length = int(take_number(recipe, "soft_max_length", default))
    value = {"max_length": max_length, "cache": cache, "weight": weight}
    recipe.put("algorithm.overlong_penalty", value, recipe.original_text("soft_cache_length"))


def write_run_settings(recipe: Recipe) -> None:
    """Write names and folders, the optimizer, and how many samples are printed."""
    folder, run = recipe.take("output_dir"), recipe.take("run_name", recipe.take("exp_name"))
    if folder:
        path = Path(str(folder))
        recipe.put("root", str(path.parent), recipe.original_text("output_dir"))
        recipe.put("name", _slug_name(path.name), recipe.original_text("output_dir"))
    elif run:
        flag = "run_name" if "run_name" in recipe.original_flags else "exp_name"
        recipe.put(
            "name", _slug_name(str(run)), f"{recipe.original_text(flag)}; no time stamp is added"
        )
    if folder and run:
        flag = "run_name" if "run_name" in recipe.original_flags else "exp_name"
        recipe.dropped.append(f"{recipe.original_text(flag)}: output_dir names the run")
    kind = str(recipe.take("optim", "adamw"))
    name = "adamw" if kind.startswith("adamw_torch") or kind == "adamw_hf" else kind
    if name == "adamw" and "optim" in recipe.original_flags:
        recipe.put("train.optimizer", name, recipe.original_text("optim"))
    elif name != "adamw":
        recipe.unsupported.append(f"train.optimizer: {name}  ({recipe.original_text('optim')})")
    betas = [take_number(recipe, "adam_beta1", 0.9), take_number(recipe, "adam_beta2", 0.999)]
    eps = take_number(recipe, "adam_epsilon", 1e-8)
    if any(n in recipe.original_flags for n in ("adam_beta1", "adam_beta2", "adam_epsilon")):
        value = {"betas": betas, "eps": eps}
        recipe.put("train.optimizer_kwargs", value, "adam_beta1, adam_beta2, adam_epsilon")
    if "max_grad_norm" in recipe.flags:
        norm = take_number(recipe, "max_grad_norm", None)
        recipe.put("train.max_grad_norm", norm or None, recipe.original_text("max_grad_norm"))
    _write_kept_checkpoints(recipe)
    _write_printed_samples(recipe)
    _write_trackers(recipe)
    if (resumed := recipe.take("resume_from_checkpoint")) is not None:
        text, mode = recipe.original_text("resume_from_checkpoint"), "never"
        if resumed:
            mode = "auto"
            recipe.notes.append(
                f"{text}: a run of ours goes on, a checkpoint of the old one cannot"
            )
        recipe.put("resume", mode, text)
    for name in ("eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy"):
        recipe.drop(name, "eval.every, checkpoint.every and logging.every count steps")
    for name in ("deepspeed", "fsdp"):
        if recipe.flags.get(name):
            recipe.take(name)
            if "distributed.engine" not in recipe.lines:
                text = recipe.original_text(name)
                recipe.dropped.append(f"{text}: one process has nothing to share")
    for name, why in tables.IGNORED_FLAGS.items():
        recipe.drop(name, why)


def _write_kept_checkpoints(recipe: Recipe) -> None:
    """Write checkpoint.keep_last, which is two at least."""
    if (kept := take_number(recipe, "save_total_limit", None)) is not None and kept >= 1:
        why = "; two at least, for one may be damaged" if kept < 2 else ""
        recipe.put("checkpoint.keep_last", max(2, int(kept)), f"save_total_limit={kept}{why}")


def _write_printed_samples(recipe: Recipe) -> None:
    """Write how many completions are printed: a number, or yes or no."""
    for name in ("num_completions_to_print", "log_completions"):
        shown = recipe.take(name)
        if isinstance(shown, int) and "logging.samples" not in recipe.lines:
            recipe.put("logging.samples", int(shown), f"{recipe.original_text(name)}: printed")
        elif shown is not None:
            recipe.dropped.append(f"{recipe.original_text(name)}: logging.samples=N prints them")


def _write_trackers(recipe: Recipe) -> None:
    """Write logging.trackers from report_to: one name or several, `all` or `none`."""
    text, named = recipe.original_text("report_to"), recipe.take("report_to")
    given = named if isinstance(named, list | tuple) else [named]
    names = [str(n) for n in given if n and n != "none"]
    if not names and "report_to" in recipe.original_flags:
        recipe.dropped.append(f"{text}: off, as here")
    known = [n for n in names if schema_refusal("logging.trackers", [n]) is None]
    if known:
        recipe.put("logging.trackers", known, text)
    for name in [n for n in names if n not in known]:
        what = f"report_to {name}"
        why = f"trackers are {', '.join(get_args(TrackerName))}, each by its name"
        recipe.dropped.append(f"{what}: {why}; metrics.jsonl has every step")


def _slug_name(name: str) -> str:
    """A name for a folder or an entry: what is no letter, digit or one of ._+- becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-._+") or "run"
