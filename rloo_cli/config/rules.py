"""Rules that involve more than one key, or files on disk.

An algorithm's own rules are in its file (`rules`); these apply to the whole run. Each
problem's `where` is the dotted key; `messages.locate_problem` turns it into a file and line.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from pathlib import Path

from rloo_cli.config import agent as config_agent
from rloo_cli.config import (
    hf_cache,
    prompt_limit,
    registry,
    rules_code,
    rules_lora,
    rules_model,
    rules_overlap,
    rules_paths,
    rules_sampling,
    rules_target,
    synthetic,
    template,
)
from rloo_cli.config import judge as config_judge
from rloo_cli.config.agent import EpisodeConfig
from rloo_cli.config.pasted import guess_name
from rloo_cli.config.schema import (
    DataConfig,
    DistributedConfig,
    EvalConfig,
    Frozen,
    GenerationConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from rloo_cli.utils.errors import Problem, clash_problems, value_problem
from rloo_cli.utils.files import JsonObject

SHARDED_ENGINES = ("zero3", "fsdp2")  # engines that shard the weights
ENGINES_WITH_OFFLOAD = {"optimizer": ("zero1", "zero2", "zero3"), "parameters": ("zero3", "fsdp2")}


def distributed_problems(
    section: DistributedConfig, model: ModelConfig, prompts_per_step: int
) -> Iterator[Problem]:
    """Problems of the section `distributed`."""
    engine = section.engine
    processes = (section.num_processes or 1) * section.num_nodes
    for leaf in ("num_processes", "num_nodes") if engine == "single" else ():
        number, key = getattr(section, leaf) or 1, f"distributed.{leaf}"
        why, fix = (
            "single means one process on one device",
            f"distributed=ddp (or zero2, fsdp2) {key}={number}",
        )
        yield from clash_problems(
            "distributed.engine=single", [(number > 1, key, f"{key}={number}", why, fix)]
        )
    if engine != "single":
        yield from prompts_per_rank_problems(prompts_per_step, processes)
    engines = ENGINES_WITH_OFFLOAD.get(section.offload, (engine,))
    key, offload = "distributed.offload", f"distributed.offload={section.offload}"
    why, fix = f"offload needs one of: {', '.join(engines)}", f"distributed={engines[-1]} {offload}"
    yield from clash_problems(
        f"distributed.engine={engine}", [(engine not in engines, key, offload, why, fix)]
    )
    yield from _shards(engine, model)
    if section.rdzv is not None and parse_address(section.rdzv) is None:
        what, why = "is not host:port", "the port is a number from 0 (any free port) to 65535"
        fix = "null, or distributed.rdzv=HOST:29500"
        yield value_problem("distributed.rdzv", repr(section.rdzv), what, fix, why)


def _shards(engine: str, model: ModelConfig) -> Iterator[Problem]:
    """Keys that need unsharded weights, with an engine that shards them."""
    if engine not in SHARDED_ENGINES:
        return
    why = f"{engine} shards the weights, but this key needs full weights in each process"
    needs_whole = {  # key -> whether it is set, and a fix
        "model.quantization": (model.quantization is not None, "distributed=ddp"),
        "model.ref_sync.every": (model.ref_sync.every > 0, "distributed=zero2"),
        "model.ref_offload": (model.ref_offload, "model.ref_offload=false: it is sharded anyway"),
    }
    clashes = ((is_set, key, key, why, fix) for key, (is_set, fix) in needs_whole.items())
    yield from clash_problems(f"distributed.engine={engine}", clashes)


def prompts_per_rank_problems(prompts: int, processes: int) -> Iterator[Problem]:
    """Fewer prompts per step than processes: some would have nothing to train on."""
    if prompts < processes:
        key = "train.prompts_per_step"
        why = f"a prompt's completions stay on one process; {processes - prompts} would have none"
        fix = f"{processes}, or train in {prompts} process{'es' * (prompts > 1)}: "
        fix += "distributed.num_processes and distributed.num_nodes"
        yield value_problem(key, prompts, f"is less than the {processes} processes", fix, why)


def parse_address(text: str) -> tuple[str, int] | None:
    """host:port, or [host]:port -> (host, port); None if it is neither."""
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    fits = colon and host and port.isascii() and port.isdigit() and int(port) < 65536
    return (host, int(port)) if fits and (":" not in host or text.startswith("[")) else None


def data_problems(data: DataConfig, held_out: Mapping[str, DataConfig]) -> Iterator[Problem]:
    """Problems of a run's data sources."""
    named = list(data.mixture_sources)
    if (data.path is None) != bool(named):
        why = f"data.path={data.path or 'null'}, data.mixture={', '.join(named) or 'null'}"
        key, fix = ("data.mixture", "null") if named else ("data.path", "PATH")
        what = "set either data.path or data.mixture"
        yield Problem(what, key, f"found {why}", f"data.path={fix}")
    elif named and data.eval_split is not None and not held_out.keys() - {""}:
        fix = "null, and eval.sets.NAME={path: ..., split: ...} for held-out data"
        what, why = (
            "names a split of data.path, but a mixture has no data.path",
            f"sources: {', '.join(named)}",
        )
        yield value_problem("data.eval_split", data.eval_split, what, fix, why)
    for key, source in configured_splits(data, held_out).items():
        yield from _streaming(key, source)
        yield from _template(key, source)
        yield from _task(key, source)


def _task(key: str, source: DataConfig) -> Iterator[Problem]:
    """Problems of data.task, which belongs to paths reasoning_gym:NAME."""
    of_task = (source.path or "").startswith(synthetic.TASK_PREFIX)
    if of_task and source.task is None:
        why = f"{key}.path={source.path} is a task, which needs a number of questions"
        fix = f"data=reasoning_gym, or {key}.task={{size: 5000, eval_size: 200, seed: 1, ...}}"
        yield Problem(f"{key}.task is null", f"{key}.task", why, fix)
    if not of_task or source.task is None:
        return
    if source.task.curriculum is not None and source.shuffle:
        why = "data.shuffle=true would mix its stages"
        fix = "data.shuffle=false, or curriculum: null"
        yield Problem(f"{key}.task.curriculum is set", f"{key}.task.curriculum", why, fix)
    if source.task.curriculum == []:
        why = "expected at least one difficulty"
        fix = "null, or [{max_digits: 1}, {max_digits: 2}]"
        yield value_problem(f"{key}.task.curriculum", "[]", "has no difficulty", fix, why)
    names = [*source.task.difficulty, *(n for s in source.task.curriculum or () for n in s)]
    for name in sorted({*names} & {"seed", "size"}):
        where = f"{key}.task.difficulty"
        why = f"it belongs directly under {key}.task"
        yield Problem(f"{name} is not a difficulty", where, why, f"{key}.task.{name}=...")


def _streaming(key: str, source: DataConfig) -> Iterator[Problem]:
    if not source.streaming:
        return
    if source.max_samples is None:
        why = "streaming reads examples up to that number; without it, it would read all"
        fix = f"10000, or {key}.streaming=false"
        yield value_problem(f"{key}.max_samples", "null", f"with {key}.streaming", fix, why)
    elif synthetic.row_source(source.path or "") is not None:
        why = f"{source.path} is generated locally: it cannot be streamed"
        yield value_problem(f"{key}.streaming", "true", "has no effect", "false", why)


def _template(key: str, source: DataConfig) -> Iterator[Problem]:
    try:
        list(template.split_template(source.template or ""))
    except ValueError as error:
        fix = "{column} for a column, {{ and }} for braces"
        yield Problem(f"{key}.template cannot be read", f"{key}.template", str(error), fix)


def user_code_specs(
    data: DataConfig, held_out: Mapping[str, DataConfig], agent: EpisodeConfig | None
) -> dict[str, str]:
    """Key -> file.py:name of every filter, map and tool in the user's code, without duplicates."""
    codes: dict[str, str] = {}
    for key, split in configured_splits(data, held_out).items():
        for leaf, spec in (("filter", split.filter), ("map", split.map)):
            if isinstance(spec, str) and spec not in codes.values():
                codes[f"{key}.{leaf}"] = spec
    return codes | (agent.code_specs() if agent is not None else {})


def configured_splits(
    data: DataConfig, held_out: Mapping[str, DataConfig]
) -> dict[str, DataConfig]:
    """Key -> data config of every split that a run reads; "data" or "data.mixture.NAME" first."""
    sources = {f"data.mixture.{name}": source for name, source in data.mixture_sources.items()}
    sets = {f"eval.sets.{name}": held for name, held in held_out.items() if name}
    return (sources or {"data": data}) | sets


# transformers' names, copied because importing it is slow; a test compares the two.
LR_SCHEDULES = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt", "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
    "warmup_stable_decay", "greedy",
)  # fmt: skip
# Independent of the run's length.
LENGTH_FREE_SCHEDULES = ("constant", "constant_with_warmup")
RUN_LENGTH_KEYS = ("max_steps", "total_episodes", "train.epochs")


def run_problems(run: RunConfig, needs_reward: bool = True) -> Iterator[Problem]:
    """Problems of a run whose keys are each valid by themselves."""
    model, data, generation, algorithm = run.model, run.data, run.generation, run.algorithm
    agent = config_agent.agent_config(run)
    yield from _length(run.length_keys)
    if len(run.length_keys) == 1 and (steps := run.num_steps()) is not None:
        yield from _warmup(run.train, steps, run.updates_per_step)
    yield from _batch(run.train, algorithm.num_generations)
    if needs_reward and not run.rewards and not algorithm.learns_without_rewards:
        why = "without a reward there is nothing to learn"
        yield Problem("no reward is chosen", "reward", why, "reward=accuracy")
    yield from distributed_problems(run.distributed, model, run.train.prompts_per_step)
    yield from registry.algorithm_class(algorithm.name)(algorithm).rules(run)
    backend = registry.registered_module("generation", generation.backend)
    if hasattr(backend, "rules"):
        yield from backend.rules(generation, data.max_prompt_length)
    yield from rules_paths.path_problems(
        rules_paths.named_paths(run), model.chat_template, run.root
    )
    yield from rules_model.model_file_problems(
        model, algorithm.needs_reference, generation.allow_moe
    )
    yield from rules_model.init_kwargs_problems(model, generation)
    yield from data_problems(data, run.held_out)
    yield from _rewards(run.rewards)
    specs = user_code_specs(data, run.held_out, agent)
    yield from _user_code(run.rewards, run.eval.judge, specs)
    yield from _optimizer(run.train)
    yield from _context(model, data.max_prompt_length, generation.max_completion_length)
    has_agent, engine = agent is not None, run.distributed.engine
    yield from rules_overlap.overlap_problems(generation, model, engine, has_agent)
    yield from rules_sampling.mask_problems(generation)
    yield from rules_sampling.budget_problems(generation, has_agent)
    yield from _sampling(generation)
    yield from _attention(model)
    yield from rules_lora.adapter_problems(model, generation, engine, algorithm.needs_reference)
    yield from _evaluation(run.eval, run.rewards)
    yield from rules_target.target_problems(run.target, run.eval, run.rewards, run.held_out)
    yield from config_judge.judge_problems(run.eval, run.held_out, generation)
    yield from config_agent.agent_reward_problems(agent, run.rewards)
    yield from config_agent.prompt_problems(agent, data, run.held_out)
    yield from config_agent.agent_problems(agent, generation, run.distributed)


def _length(lengths: Mapping[str, float]) -> Iterator[Problem]:
    keys = [*lengths]
    if len(keys) == 1:
        return
    what = "set exactly one of max_steps, total_episodes, train.epochs"
    why = f"found {' and '.join(f'{k}={lengths[k]}' for k in keys) or 'none of them'}"
    kept = [" ".join(f"{k}=null" for k in keys if k != one) for one in reversed(keys)]
    fix = ", or ".join(kept) or "max_steps=100"
    yield Problem(what, keys[-1] if keys else "max_steps", why, fix)


def _warmup(train: TrainConfig, steps: int, updates_per_step: int) -> Iterator[Problem]:
    """A run that ends during warm-up never reaches its learning rate."""
    updates = steps * updates_per_step
    if train.lr_scheduler != "constant" and train.warmup_steps >= max(updates, 1):
        key, what = "train.warmup_steps", "is not shorter than the run"
        why = f"{steps} steps x {updates_per_step} updates = {updates} updates"
        yield value_problem(key, train.warmup_steps, what, updates // 10, why)


def _batch(train: TrainConfig, k: int) -> Iterator[Problem]:
    why = f"it counts completions, {k} per prompt (algorithm.num_generations)"
    for name in ("micro_batch_size", "no_grad_batch_size"):
        key, size = f"train.{name}", getattr(train, name)
        if size is not None and size % k:
            low, high = max(k, size // k * k), ceil(size / k) * k
            near = f"{low} or {key}={high}" if high != low else low
            yield value_problem(key, size, "is not a multiple of the group size", near, why)


def _rewards(rewards: Mapping[str, RewardConfig]) -> Iterator[Problem]:
    for name, entry in rewards.items():
        if entry.workers > 1 and entry.scope == "batch":
            scope = f"reward.{name}.scope"
            why = f"{scope} = batch: all completions of a step are scored in one call"
            key, what = f"reward.{name}.workers", "cannot split one call"
            yield value_problem(key, entry.workers, what, f"1, or {scope}=row", why)
        rules = getattr(registry.registered_module("rewards", entry.type), "problems", None)
        yield from rules(entry, f"reward.{name}") if rules else ()


def _user_code(
    rewards: Mapping[str, RewardConfig], judge: Frozen | None, specs: Mapping[str, str]
) -> Iterator[Problem]:
    """Problems of the user's own code, which is parsed, not run."""
    entries = rewards.items()
    codes = {f"reward.{n}.path": getattr(c, "path", "") for n, c in entries if c.type == "function"}
    if isinstance(judge, config_judge.RewardJudge) and judge.reward.type == "function":
        codes["eval.judge.reward.path"] = judge.reward.path
    for key, spec in {**codes, **specs}.items():
        yield from rules_code.code_problems(key, spec)


def _optimizer(train: TrainConfig) -> Iterator[Problem]:
    """An optimizer or a schedule that is neither shipped nor user code."""
    shipped = {"optimizer": ("adamw",), "lr_scheduler": LR_SCHEDULES}
    for name, names in shipped.items():
        key, value = f"train.{name}", getattr(train, name)
        if ":" in value:
            yield from rules_code.code_problems(key, value)
        elif value not in names:
            why = f"one of: {', '.join(names)}; or your own file.py:name"
            yield value_problem(key, repr(value), "is unknown", guess_name(value, names), why)


def local_model_config(path: str) -> JsonObject:
    """The language model's part of a local model's config.json; {} if the file is missing."""
    values = hf_cache.read_model_config(path) if Path(path).expanduser().exists() else {}
    text_config: JsonObject = values.get("text_config", values)
    return text_config


def _evaluation(evaluation: EvalConfig, rewards: Mapping[str, RewardConfig]) -> Iterator[Problem]:
    k, pass_at, reward = evaluation.num_generations, evaluation.pass_at, evaluation.pass_reward
    if pass_at is not None and (too_many := [n for n in pass_at if n > k]):
        why = f"each prompt has {k} completions (eval.num_generations)"
        what, fix = (
            f"eval.pass_at asks for pass@{max(too_many)}",
            f"eval.num_generations={max(too_many)}",
        )
        yield Problem(what, "eval.pass_at", why, fix)
    if reward is not None and reward not in rewards:
        what, why = "is not a reward of this run", f"rewards: {', '.join(rewards)}"
        near = guess_name(reward, rewards)
        yield value_problem("eval.pass_reward", repr(reward), what, near, why)


def _context(model: ModelConfig, longest_prompt: int | None, longest: int) -> Iterator[Problem]:
    """A context that is too short for this prompt and completion length."""
    path, key = model.path, "generation.max_completion_length"
    try:
        values = hf_cache.read_model_config(path, model.revision)
        limit = prompt_limit.model_context_length(model)
        why = hf_cache.model_config_problem(values)
    except ValueError as error:
        limit, why = None, str(error)
    if why:
        fix = "model.path=ORG/NAME or a folder, with a valid config.json"
        yield Problem(f"model.path = {path!r} cannot be loaded", "model.path", why, fix)
        return
    prompt = longest_prompt or 1
    if limit is None or longest + prompt <= limit:
        return
    needed = f"max_prompt_length {prompt}" if longest_prompt else "a prompt of 1 token"
    fix = f"{key}={limit // 2}" if limit > 1 else "a model with a longer context"
    if prompt > limit - limit // 2:
        fix += f" data.max_prompt_length={limit - limit // 2}"
    if limit > longest:
        key, fix = "data.max_prompt_length", f"data.max_prompt_length={limit - longest}"
    what = f"prompt and completion do not fit the model's context of {limit} tokens"
    why = f"{needed} + max_completion_length {longest} = {longest + prompt}"
    yield Problem(what, key, why, fix)


def _attention(model: ModelConfig) -> Iterator[Problem]:
    attention, key = model.attn_implementation or "", "model.attn_implementation"
    if "/" in attention and not model.trust_remote_code:
        why = "a hub kernel is code that is downloaded and run"
        fix = "model.trust_remote_code=true, if you trust its authors"
        yield Problem(f"{key} = {attention!r} is not trusted", key, why, fix)


def _sampling(generation: GenerationConfig) -> Iterator[Problem]:
    least, most = generation.min_tokens, generation.max_completion_length
    if least > most:
        what = "exceeds the completion length"
        why = f"generation.max_completion_length = {most}: no completion could end by itself"
        yield value_problem("generation.min_tokens", least, what, most, why)
