"""What a run whose prompts have images cannot do, said before any weights load.

Each of these would train on other numbers than the config asks for: a value model that reads image
tokens as words, a model whose engine cannot be imported, a tower whose weights no rank has whole.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.config.agent import agent_config
from rloo_cli.config.prompt_limit import VLLM_SECTIONS
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.vision_models import VISION_FAMILIES, has_tower
from rloo_cli.data.batch import Group
from rloo_cli.data.prompts import Prompts
from rloo_cli.utils.errors import ConfigError, Problem

NUM_EXAMPLES = 2  # prompts with images that layouts are tried on
# Of the families, those that vLLM 0.32 runs without torchvision (its CPU build has none).
WITHOUT_TORCHVISION = ("idefics3", "qwen2_5_vl", "qwen2_vl", "llava_next")
WHOLE_WEIGHTS_ENGINES = ("single", "ddp")
AGENTS_WITH_IMAGES = ("tools", "class")


def check_image_run(
    config: RunConfig, prompts_by_set: Mapping[str | None, Prompts], has_gpu: bool
) -> None:
    """Raises ConfigError, once for everything, where a prompt has images and a key rules them out.

    Held-out sets count too. `has_gpu`: whether this machine has one.
    """
    engine, backend, problems = config.distributed.engine, config.generation.backend, []
    if config.model.freeze and engine not in WHOLE_WEIGHTS_ENGINES:
        what, why = f"model.freeze with distributed.engine = {engine!r}", "it shards every weight"
        problems.append(Problem(what, "model.freeze", why, "model.freeze=[] or distributed=ddp"))
    if any(any(prompts.media) for prompts in prompts_by_set.values()):
        kind = _model_type(config.model.path, config.model.revision)
        found = [*_obstacles(config, kind)]
        if backend in VLLM_SECTIONS and _engine_is_here(config):
            why, fix = _vllm_obstacle(kind, has_gpu)
            found += [Problem(f"{backend} samples", "generation", why, fix)] if why else []
        problems += [replace(p, what=f"the prompts have images, and {p.what}") for p in found]
    if problems:
        raise ConfigError(*problems)


def why_no_tool_images(config: RunConfig) -> str | None:
    """Why tools of this run may not answer with images, for them to be told; None = they may."""
    kind = _model_type(config.model.path, config.model.revision)
    if kind is None:
        return "and the model takes text alone"
    found = next(_obstacles(config, kind), None)
    return None if found is None else f"and {found.what}: {found.why}"


def _obstacles(config: RunConfig, kind: str | None) -> Iterator[Problem]:
    """What rules out images in a run's rows, wherever they come from."""
    engine = config.distributed.engine
    if engine not in WHOLE_WEIGHTS_ENGINES:
        why = "a tower is run apart from the layers, whose weights are gathered one by one"
        yield Problem(f"{engine} shards the model", "distributed.engine", why, "distributed=ddp")
    if config.algorithm.teacher_server is not None:
        key, why = "algorithm.teacher.base_url", "it is sent ids alone"
        yield Problem("a server has the teacher", key, why, f"{key}=null model.ref_path=TEACHER")
    if config.algorithm.name == "ppo":
        why = "the value model reads text alone"
        yield Problem("PPO has a value model", "algorithm", why, "algorithm=rloo")
    agent = agent_config(config)
    if agent is not None and agent.kind not in AGENTS_WITH_IMAGES:
        why, fix = f"agent={agent.kind} is sent texts alone", "agent=tools, agent=class, agent=null"
        yield Problem("the agent takes none", "agent", why, fix)
    if config.generation.overlap == "carry":
        key, why = "generation.overlap", "the images of unfinished completions are not kept"
        yield Problem("completions are carried on", key, why, f"{key}=none")
    path = config.model.ref_path
    if path is not None and _model_type(path, None) != kind:
        why, fix = f"{path} takes them in another way, or takes none", "one of the policy's family"
        yield Problem("the reference is another kind of model", "model.ref_path", why, fix)


def _engine_is_here(config: RunConfig) -> bool:
    """Whether this machine runs the engine, and no server elsewhere."""
    keys = getattr(config.generation, VLLM_SECTIONS[config.generation.backend])
    return getattr(keys, "base_url", None) is None


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
    """The model's family; None where it has no tower, or its config.json cannot be read here."""
    try:
        values = hf_cache.read_model_config(synthetic.resolve_model_path(path), revision)
    except ValueError:
        return None
    return str(values.get("model_type")) if has_tower(values) else None


def image_examples(prompts: Prompts) -> list[Group]:
    """The shortest prompts with most images, as empty groups: layouts are tried on them."""
    shown = [(-len(m.sources), len(m.prompt_ids), i) for i, m in enumerate(prompts.media) if m]
    return [prompts.group_of(i) for _, _, i in sorted(shown)[:NUM_EXAMPLES]]
