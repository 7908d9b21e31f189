"""Settings hard-coded in TRL's own scripts, which their commands do not show."""

from collections.abc import Callable
from dataclasses import dataclass

from rloo_cli.utils.files import JsonObject


@dataclass(frozen=True)
class BuiltIn:
    """The settings of one script."""

    flags: JsonObject  # by the old names; the command's flags win
    keys: JsonObject  # ours
    notes: list[str]


def images(script: str) -> BuiltIn:
    """TRL's scripts for models that see images."""
    flags: JsonObject = {
        "dataset_name": "lmms-lab/multimodal-open-r1-8k-verified",
        "reward_funcs": ["think_format_reward", "accuracy_reward"],
    }
    keys: JsonObject = {
        "data.prompt_column": "problem",
        "data.chat": True,  # a user's message of each; images come from the column image
        "data.max_pixels": 512 * 512,
        "data.system": "First think about the question, between <think> and </think>, then answer"
        " it.",
    }
    said = f"set data.system to the SYSTEM_PROMPT of {script}, which says what the one here does"
    return BuiltIn(flags, keys, [said, f"{script} left images of 512 pixels and more out"])


def tools(script: str) -> BuiltIn:
    """TRL's script for tools: they, its rewards and its prompts are functions in it."""
    rewards = ("correctness_reward", "structure_reward", "query_reward")
    flags: JsonObject = {
        "tools": [f"{script}:query_biogrid"],
        "reward_funcs": [f"{script}:{name}" for name in rewards],
    }
    keys: JsonObject = {
        "data.path": "qgallouedec/biogrid_qa",
        "data.map": f"{script}:format_example",
        "generation.chat_template_kwargs": {"enable_thinking": False},
    }
    notes = [
        f"{script} must exist: this recipe names functions in it",
        f"{script} keeps the questions that begin with 'Does the gene ': name a function that does"
        " so in data.filter",
        f"{script} makes biogrid.db, which its tool reads, before it trains: make it once",
    ]
    return BuiltIn(flags, keys, notes)


BUILT_IN: dict[str, Callable[[str], BuiltIn]] = {  # of a script's path
    "grpo_vlm.py": images, "rloo_vlm.py": images, "grpo_agent.py": tools
}  # fmt: skip
# The data of TRL's TL;DR scripts up to 0.21, and the text that they put around a post.
TLDR_DATASET = "trl-internal-testing/tldr-preference-sft-trl-style"
TLDR_TEMPLATES = {"TRL <=0.10": " {prompt}", "TRL 0.11-0.21": "User: {prompt}\n\nAssistant:"}
