"""Keys that a run with images in its prompts cannot use, refused before any weights load.

Each of these would train on other numbers than the config says: a value model that reads image
tokens as text, a model whose engine cannot be imported.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.config.agent import agent_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.vision_models import VISION_FAMILIES, has_tower, text_model_problem
from rloo_cli.utils.errors import ConfigError, DataError, Problem
from rloo_cli.utils.files import JsonObject

# Of the families, those that vLLM 0.32 runs without torchvision (its CPU build has none).
WITHOUT_TORCHVISION = ("idefics3", "qwen2_5_vl", "qwen2_vl", "llava_next")
AGENTS_WITH_IMAGES = ("tools", "class")


def check_image_run(config: RunConfig, has_gpu: bool | None) -> None:
    """Check a run whose prompts, or those of a held-out set, have images.

    `has_gpu`: whether this machine has one; None = the run is planned for another machine. Raises
    ConfigError, once for every key that rules images out, and DataError for a text-only model.
    """
    values = _model_values(config.model.path, config.model.revision)
    if values and not has_tower(values):
        raise DataError(text_model_problem(config.model.path, values))
    generation, kind = config.generation, str(values.get("model_type"))
    problems = [*_obstacles(config, kind if values else None)]
    if has_gpu is not None and generation.is_engine and not generation.own_keys.is_external:
        why, fix = _vllm_obstacle(kind, has_gpu)
        if why:
            problems.append(Problem(f"{generation.backend} samples", "generation", why, fix))
    if problems:
        raise ConfigError(
            *[replace(p, what=f"the prompts have images, and {p.what}") for p in problems]
        )


def why_no_tool_images(config: RunConfig) -> str | None:
    """Why tools of this run may not answer with images, as a message to them; None = they may."""
    kind = _model_type(config.model.path, config.model.revision)
    if kind is None:
        return "and the model takes only text"
    found = next(_obstacles(config, kind), None)
    return None if found is None else f"and {found.what}: {found.why}"


def _obstacles(config: RunConfig, kind: str | None) -> Iterator[Problem]:
    """Keys that rule out images in a run's rows, wherever the images come from."""
    if config.algorithm.teacher_server is not None:
        key, why = "algorithm.teacher.base_url", "the server gets only token ids"
        yield Problem("the teacher is on a server", key, why, f"{key}=null model.ref_path=TEACHER")
    if config.algorithm.name == "ppo":
        why = "the value model reads only text"
        yield Problem("PPO has a value model", "algorithm", why, "algorithm=rloo")
    agent = agent_config(config)
    if agent is not None and agent.kind not in AGENTS_WITH_IMAGES:
        why, fix = f"agent={agent.kind} supports only text", "agent=tools, agent=class, agent=null"
        yield Problem("the agent does not support images", "agent", why, fix)
    if config.generation.overlap == "carry":
        key, why = "generation.overlap", "the images of unfinished completions are not kept"
        yield Problem("unfinished completions are carried over", key, why, f"{key}=none")
    path = config.model.ref_path
    if path is not None and _model_type(path, None) != kind:
        why, fix = f"{path} processes them differently, or not at all", "one of the policy's family"
        yield Problem("the reference is another kind of model", "model.ref_path", why, fix)


def _vllm_obstacle(kind: str | None, has_gpu: bool) -> tuple[str, str]:
    """Why vLLM does not sample from this kind of model here, and what to do; "" if it does."""
    family = VISION_FAMILIES.get(str(kind))
    if family is not None and family.two_way_images and not has_gpu:
        why = "without a GPU its attention lets an image's tokens see only those before them"
        return why, "generation=transformers"
    if kind in WITHOUT_TORCHVISION or importlib.util.find_spec("torchvision") is not None:
        return "", ""
    why = f"vLLM's code for {kind} imports torchvision, which is not installed here"
    return why, "pip install torchvision, as it fits your torch; or generation=transformers"


def _model_type(path: str, revision: str | None) -> str | None:
    """The model's family; None if it has no vision tower, or no readable config.json here."""
    values = _model_values(path, revision)
    return str(values.get("model_type")) if has_tower(values) else None


def _model_values(path: str, revision: str | None) -> JsonObject:
    """The config.json of the model, or of the kind that is built here; {} if not readable here."""
    name = path.removeprefix(synthetic.MAKE_PREFIX)
    if name != path:
        kind = synthetic.SYNTHETIC_VISION_TYPES.get(name)
        return {"model_type": kind or name} | ({"vision_config": {}} if kind else {})
    try:
        return hf_cache.read_model_config(path, revision)
    except ValueError:
        return {}
