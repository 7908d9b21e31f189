"""Tokenizers with tools in their templates, a sampler that says what it is told, and episodes."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rloo_cli.agents.class_ import Config as ClassConfig
from rloo_cli.agents.common import call_parsers
from rloo_cli.agents.common.episodes import EpisodeGenerator, EpisodeRules
from rloo_cli.agents.common.turn_rendering import TurnRenderer
from rloo_cli.agents.tools import Config as ToolsConfig
from rloo_cli.config import registry
from rloo_cli.data.batch import Group, Rollout
from rloo_cli.data.render import render_prompt
from rloo_cli.generation import GeneratorBase, ignore_arrival

STOP = "<|im_end|>"
CHATML = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ m.content }}\n</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3's: only the last assistant message has a place to think.
THINKING = CHATML.replace(
    "{{ m.content or '' }}",
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}",
)
LLAMA3 = (
    "{% for m in messages %}<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end|>\n\n"
    "{% if m.tool_calls %}{{ {'name': m.tool_calls[0].function.name,"
    " 'parameters': m.tool_calls[0].function.arguments} | tojson }}{% else %}"
    "{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content | tojson }},"
    ' "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% endfor %}]<|im_end|>{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
PLAIN = (  # nothing ends an assistant's turn but a new line
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TEMPLATES = {
    "chatml": CHATML, "thinking": THINKING, "llama3": LLAMA3, "mistral": MISTRAL, "plain": PLAIN,
}  # fmt: skip
LIMITS: dict[str, Any] = {
    "max_turns": 4, "max_tool_s": 5.0, "max_observation_tokens": 64, "max_episode_tokens": None,
    "on_tool_error": "tell", "on_bad_call": "tell", "workers": 2, "parser": "hermes",
    "renderer": "difference",
}  # fmt: skip


def chat_tokenizer(template: str = "chatml") -> PreTrainedTokenizerFast:
    """Bytes, a few merges that like to cross the edges of a text, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    edges = ("\u010at", "\u010a\u010a", "\u0120\u0120", ">\u010a", "r:")
    merges = [(pair[0], pair[1]) for pair in edges]
    words = [*alphabet, *("".join(m) for m in merges)]
    plain = Tokenizer(models.BPE({t: i for i, t in enumerate(words)}, merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=STOP, pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|start|>", "<|end|>", "<s>"],
    )  # fmt: skip
    fast.chat_template = TEMPLATES[template]
    return fast


class ScriptedSampler(GeneratorBase):
    """A `Generator` that says `script(prompt_text, seed)`, and notes what it is asked."""

    def __init__(self, tokenizer: Any, script: Callable[[str, int], str], version: int = 0):
        self.tokenizer, self.script, self.version = tokenizer, script, version
        self.metrics: dict[str, float] = {}
        self.tolerance = 0.0
        self.asked: list[list[list[int]]] = []  # the prompts of each wave
        self.seeds: list[int] = []

    def load(self, policy: object, version: int) -> None:
        self.version = version

    def close(self) -> None:
        pass

    def generate(
        self, groups: Any, seeds: Any, greedy: bool = False, temperature: float | None = None,
        arrived: Callable[[int], None] = ignore_arrival,
    ) -> None:  # fmt: skip
        self.asked.append([g.prompt_ids for g in groups])
        for i, (group, group_seeds) in enumerate(zip(groups, seeds, strict=True)):
            group.rollouts = [self._rollout(group, seed) for seed in group_seeds]
            self.seeds += group_seeds
            arrived(i)

    def _rollout(self, group: Group, seed: int) -> Rollout:
        said = self.script(self.tokenizer.decode(group.prompt_ids), seed)
        ended = not said.endswith("...")
        ids = self.tokenizer(said, add_special_tokens=False)["input_ids"]
        ids = [*ids, self.tokenizer.eos_token_id] if ended else ids
        reason = "stop" if ended else "length"
        return Rollout(ids, said, reason, ended, seed, self.version, [-0.5] * len(ids))


def call_text(name: str, **arguments: object) -> str:
    """A call in Hermes' form."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def tools_agent(specs: Sequence[str], **keys: Any) -> Any:
    """The config of agent=tools."""
    return ToolsConfig(kind="tools", tools=list(specs), **LIMITS | keys)


def class_agent(environments: dict[str, str], **keys: Any) -> Any:
    """The config of agent=class."""
    return ClassConfig(kind="class", environments=environments, **LIMITS | keys)


def episode_generator(
    config: Any, script: Callable[[str, int], str], template: str = "chatml",
    context: int | None = None,
) -> EpisodeGenerator:  # fmt: skip
    """Episodes of an agent's config, sampled by a script."""
    tokenizer = chat_tokenizer(template)
    tool_set = registry.registered_module("agents", config.kind).load_tools(config)
    renderer = TurnRenderer(tokenizer, {}, {tokenizer.eos_token_id})
    parser = call_parsers.choose_parser(config.parser, tokenizer)[1]
    rules = EpisodeRules(config, tool_set, renderer, parser, 64, context)
    return EpisodeGenerator(ScriptedSampler(tokenizer, script), rules)


def asked_groups(generator: EpisodeGenerator, *rows: dict[str, object]) -> list[Group]:
    """A group for each row, whose prompt is its column `prompt`."""
    groups = []
    for i, row in enumerate(rows):
        prompt = [{"role": "user", "content": row.get("prompt", "go")}]
        example = {n: v for n, v in row.items() if n != "prompt"}
        schemas = generator.rules.tools.schemas_of(example)
        ids = render_prompt(prompt, generator.rules.renderer.tokenizer, {"tools": schemas})
        groups.append(Group(i, example, prompt, ids))
    return groups


def play(generator: EpisodeGenerator, *rows: dict[str, object], k: int = 1) -> list[Group]:
    """Episodes of these rows, K each."""
    groups = asked_groups(generator, *(rows or ({},)))
    try:
        generator.generate(groups, [[100 * i + j for j in range(k)] for i in range(len(groups))])
    finally:
        generator.close()
    return groups


def write_file(folder: Path, text: str, name: str = "tools.py") -> str:
    """A file of the user's. -> its path"""
    path = folder / name
    path.write_text(text)
    return str(path)
