"""`rloo migrate` on commands and configs of TRL and ms-swift, by facts."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from migrate_cases import checked

from rloo_cli.cli.migrate import run
from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError

CORPUS = yaml.safe_load((Path(__file__).parent / "migrate_corpus.yaml").read_text())
LENGTHS = {"steps", "epochs", "episodes"}


def facts(run, text) -> dict:
    """What a checked recipe means, by the corpus' names."""
    model, algorithm, generation = run.model, run.algorithm, run.generation
    lora, bits = model.lora, model.quantization
    sources = list(run.data.mixture_sources.values())
    named = "path: org/stand-in" in text
    return {
        "algo": algorithm.name,
        "K": algorithm.num_generations,
        "B": run.episodes_per_step,
        "updates": run.updates_per_step,
        "steps": run.max_steps,
        "epochs": run.train.epochs,
        "episodes": run.total_episodes,
        "lr": run.train.learning_rate,
        "warmup": run.train.warmup_steps,
        "schedule": run.train.lr_scheduler,
        "beta": algorithm.beta,
        "kl_in": algorithm.kl_in,
        "kl_weighted": algorithm.kl_ratio_weighted,
        "epsilon": algorithm.epsilon,
        "loss": algorithm.loss_type,
        "ratio": algorithm.ratio_level,
        "agg": algorithm.loss_agg,
        "scale": algorithm.advantage_scale,
        "multi": algorithm.multi_reward,
        "correction": algorithm.correction.mode,
        "normalize_rewards": algorithm.normalize_rewards,
        "normalize_advantages": algorithm.normalize_advantages,
        "comp": generation.max_completion_length,
        "temp": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "sampler": generation.backend,
        "prompt": run.data.max_prompt_length,
        "data": [s.path for s in sources] or (None if named else run.data.path),
        "weights_of_data": list(run.data.mixture_weights.values()),
        "subset": run.data.name,
        "split": run.data.split,
        "eval_split": run.data.eval_split,
        "rows": run.data.max_samples,
        "system": run.data.system,
        "columns": run.data.columns,
        "template": generation.chat_template_kwargs,
        "rewards": [reward_fact(n, r) for n, r in run.rewards.items() if n != "stand_in"],
        "weights": [r.weight for r in run.rewards.values()],
        "model": model.path,
        "dtype": model.dtype,
        "ref_every": model.ref_sync.every,
        "ref_alpha": model.ref_sync.alpha,
        "lora": lora.r if lora and lora.peft_type == "LORA" else None,
        "alpha": lora and lora.alpha,
        "dropout": lora and lora.dropout,
        "layers": lora and lora.target_modules,
        "adapter": lora and lora.peft_type,
        "adapter_arguments": lora and lora.kwargs,
        "dora": lora and lora.use_dora,
        "bits": bits and bits.bits,
        "engine": run.distributed.engine,
        "name": run.name,
        "seed": run.seed,
    }


def reward_fact(name: str, entry) -> str:
    path = getattr(entry, "path", "")
    return f"{entry.type}:{path}" if entry.type in ("model", "function") else entry.type


def words_of(case: dict) -> list[str]:
    """Write a case's files; the words after `rloo migrate`."""
    for name, text in case.get("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    if "run" in case:
        return [case["run"]]
    return shlex.split(case["args"]) if "args" in case else [next(iter(case["files"]))]


def wrong(case: dict, capsys, folder: Path) -> str | None:
    """What migrate makes of a case that is not what the case says."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    words = words_of(case)
    try:
        run(words)
    except ConfigError as error:
        capsys.readouterr()
        text = " ".join(str(error).split())
        known = "refused" in case and re.search(case["refused"], text)
        return None if known else f"refused: {text[:400]}"
    text = capsys.readouterr().out
    if "refused" in case:
        return "it was not refused"
    plain = " ".join(text.replace("#", "").split())
    missing = [s for s in case.get("said", ()) if not re.search(s, plain)]
    if missing:
        return f"it does not say {missing}"
    try:
        found = facts(*checked(text, folder))
    except ConfigError as error:
        return f"the recipe does not compose: {error}"
    want = CORPUS["facts"][case["like"]] | case.get("want", {})
    if LENGTHS & set(case.get("want", {})):
        want = {k: v for k, v in want.items() if k not in LENGTHS or k in case["want"]}
    other = {k: (v, found[k]) for k, v in want.items() if found[k] != v}
    return "; ".join(f"{k} is {is_}, and should be {v}" for k, (v, is_) in other.items()) or None


@pytest.mark.slow
def test_every_command_of_the_corpus_means_what_it_meant_or_is_refused(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    compose_config()  # the shipped recipes are registered once, and not for each case
    monkeypatch.setattr("rloo_cli.config.compose.register_config_dirs", lambda folders: None)
    assert len(CORPUS["cases"]) >= 110
    found = {case["is"]: wrong(case, capsys, tmp_path) for case in CORPUS["cases"]}
    assert len(found) == len(CORPUS["cases"])  # every name is another
    problems = [f"{name}: {problem}" for name, problem in found.items() if problem]
    assert not problems, "\n".join(["", *problems])


@pytest.mark.parametrize("case", CORPUS["facts"].items(), ids=lambda case: case[0])
def test_the_facts_of_a_version_say_the_whole_of_it(case):
    needed = {"algo", "K", "B", "epochs", "lr", "beta", "comp", "prompt", "temp", "lora"}
    assert needed | {"rewards", "data"} <= case[1].keys()
