"""What a run whose prompts have images cannot do, said before any weights load.

Each of these would train on other numbers than the config asks for: a value model that reads image
tokens as words, a model whose engine cannot be imported, a tower whose weights no rank has whole.
"""

import importlib.util
from collections.abc import Mapping

from rloo_cli.config import hf_cache, synthetic
from rloo_cli.config.agent import agent_config
from rloo_cli.config.prompt_limit import VLLM_SECTIONS
from rloo_cli.config.schema import RunConfig
from rloo_cli.config.vision_models import has_tower
from rloo_cli.data.batch import Group
from rloo_cli.data.prompts import Prompts
from rloo_cli.utils.errors import ConfigError, Problem

NUM_EXAMPLES = 2  # prompts with images that layouts are tried on
# Of the families, those that vLLM 0.32 runs without torchvision (its CPU build has none).
WITHOUT_TORCHVISION = ("idefics3",)
WHOLE_WEIGHTS_ENGINES = ("single", "ddp")
AGENTS_WITH_IMAGES = ("tools", "class")


def check_image_run(config: RunConfig, prompts_by_set: Mapping[str | None, Prompts]) -> None:
    """Raises ConfigError, once for everything, where a prompt has images and a key rules them out.

    Held-out sets count too.
    """
    engine, backend, problems = config.distributed.engine, config.generation.backend, []
    if config.model.freeze and engine not in WHOLE_WEIGHTS_ENGINES:
        what, why = f"model.freeze with distributed.engine = {engine!r}", "it shards every weight"
        problems.append(Problem(what, "model.freeze", why, "model.freeze=[] or distributed=ddp"))
    if not any(any(prompts.media) for prompts in prompts_by_set.values()):
        if problems:
            raise ConfigError(*problems)
        return

    def refuse(key: str, what: str, why: str, fix: str) -> None:
        problems.append(Problem(f"the prompts have images, and {what}", key, why, fix))

    if engine not in WHOLE_WEIGHTS_ENGINES:
        why = "a tower is run apart from the layers, whose weights are gathered one by one"
        refuse("distributed.engine", f"{engine} shards the model", why, "distributed=ddp")
    kind = _model_type(config.model.path, config.model.revision)
    if backend in VLLM_SECTIONS and _engine_is_here(config) and not _vllm_imports(kind):
        why = f"vLLM's code for {kind} imports torchvision, which is not installed here"
        fix = "pip install torchvision, as it fits your torch; or generation=transformers"
        refuse("generation", f"{backend} samples", why, fix)
    if config.algorithm.teacher_server is not None:
        why, fix = "it is sent ids alone", "algorithm.teacher.base_url=null model.ref_path=TEACHER"
        refuse("algorithm.teacher.base_url", "a server has the teacher", why, fix)
    if config.algorithm.name == "ppo":
        why = "the value model reads text alone"
        refuse("algorithm", "PPO has a value model", why, "algorithm=rloo")
    agent = agent_config(config)
    if agent is not None and agent.kind not in AGENTS_WITH_IMAGES:
        why = f"agent={agent.kind} is sent texts alone"
        refuse("agent", "the agent takes none", why, "agent=tools, agent=class or agent=null")
    if config.generation.overlap == "carry":
        why = "prompts of unfinished completions are kept without their images"
        refuse("generation.overlap", "completions are carried on", why, "generation.overlap=none")
    if config.model.ref_path is not None and _model_type(config.model.ref_path, None) != kind:
        why = f"{config.model.ref_path} takes them in another way, or takes none"
        fix = "one of the policy's family"
        refuse("model.ref_path", "the reference is another kind of model", why, fix)
    if problems:
        raise ConfigError(*problems)


def why_no_tool_images(config: RunConfig) -> str | None:
    """Why tools of this run may not answer with images, for them to be told; None = they may."""
    model, engine = config.model, config.distributed.engine
    kind = _model_type(model.path, model.revision)
    if kind is None:
        return "and the model takes text alone"
    agent = agent_config(config)
    if agent is not None and agent.kind not in AGENTS_WITH_IMAGES:
        return f"and agent={agent.kind} is sent texts alone"
    if engine not in WHOLE_WEIGHTS_ENGINES:
        return f"and distributed.engine={engine} shards the model"
    if config.algorithm.name == "ppo":
        return "and the value model of algorithm=ppo reads text alone"
    if config.algorithm.teacher_server is not None:
        return "and the server of algorithm.teacher.base_url is sent ids alone"
    if config.generation.overlap == "carry":
        return "and generation.overlap=carry keeps none"
    if model.ref_path is not None and _model_type(model.ref_path, None) != kind:
        return "and the model of model.ref_path takes them in another way, or takes none"
    return None


def _engine_is_here(config: RunConfig) -> bool:
    """Whether this machine runs the engine, and no server elsewhere."""
    keys = getattr(config.generation, VLLM_SECTIONS[config.generation.backend])
    return getattr(keys, "base_url", None) is None


def _vllm_imports(kind: str | None) -> bool:
    """Whether vLLM can import its code for this kind of model here."""
    return kind in WITHOUT_TORCHVISION or importlib.util.find_spec("torchvision") is not None


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
