"""A reward model: any sequence classifier with one label, with its own tokenizer.

`common/model_inputs.py` makes its inputs, `policy.reward_scores` computes the scores. Weights,
tokenizer and a first input are checked before the policy's weights load; the log shows that input.
"""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rloo_cli.config import hf_cache
from rloo_cli.config.schema import PathText, Positive, RewardConfig, Text, key
from rloo_cli.rewards.common.model_inputs import PromptCompletion, RewardInputEncoder
from rloo_cli.rewards.common.text import Completion
from rloo_cli.rewards.engine.ready import RewardScorer, RewardSetup
from rloo_cli.utils.errors import MachineError, Problem, refuse, require_package
from rloo_cli.utils.files import JsonObject

if TYPE_CHECKING:  # these import torch
    from transformers import PreTrainedTokenizerBase

    from rloo_cli.data.batch import Prompt
    from rloo_cli.data.prompts import Prompts

Device = Annotated[str, Field(pattern=r"^(auto|[a-z]+(:\d+)?)$")]
# Arguments of from_pretrained that have their own key here, or must not be set at all.
RESERVED_MODEL_KWARGS = ("revision", "dtype", "torch_dtype", "trust_remote_code", "use_safetensors",
             "device_map", "output_loading_info", "ignore_mismatched_sizes")  # fmt: skip
# Columns that may have a good answer, for the example in the log.
REFERENCE_COLUMNS = ("reference", "solution", "answer", "ground_truth", "label", "summary",
             "chosen")  # fmt: skip

EXTRA = "a reward model at `path`, and torch"


class Config(RewardConfig):
    type: Literal["model"] = key("model")
    path: PathText = key("Hub name or folder of the reward model, or make:tiny_reward")
    tokenizer: PathText | None = key("Hub name or folder of its tokenizer; null = path")
    revision: Text | None = key("Branch, tag or commit of a hub model")
    model_kwargs: JsonObject = key("Passed to from_pretrained of the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "The weights' dtype, except the head's; auto = bfloat16 on a GPU that has it, else float32"
    )
    trust_remote_code: bool = key("Run Python code that comes with it (dangerous)")
    input: Literal["auto", "text", "ids"] = key(
        "Its input: the sampled ids, or text; auto = ids if both tokenizers agree"
    )
    keep_eos: bool = key("Append the tokenizer's EOS to plain text that ended on its own")
    batch_size: Positive = key("Completions per forward pass if inputs are padded")
    max_length: Positive | None = key("Most tokens of an input; longer ones are cut at the start")
    device: Device = key("Device: auto = the policy's, cpu, cuda, cuda:N")
    offload: bool = key("Keep it in CPU memory while it is idle")


def problems(config: Config, where: str) -> Iterator[Problem]:
    """The combinations of keys that are refused."""
    if config.workers:
        key, why = f"{where}.workers", "each would have a copy of the model"
        yield Problem(f"{key} does not apply to a reward model", key, why, f"{key}=0")


def preflight(config: Config) -> None:
    """Check its config.json, without torch. Raises MachineError, ConfigError for model_kwargs."""
    given = [name for name in RESERVED_MODEL_KWARGS if name in config.model_kwargs]
    if given:
        why = "it has its own key in rloo, or is unsafe: pickled or random weights"
        name = given[0].removeprefix("torch_")  # transformers' older name of dtype
        own = name in type(config).model_fields
        fix = f"reward.NAME.{name}={config.model_kwargs[given[0]]}" if own else "leave it out"
        what = f"model_kwargs must not have {given[0]}"
        refuse("model_kwargs", what, fix, why)
    if hf_cache.adapter_base_path(config.path) is not None:
        require_package("this machine", "peft", "peft", f"{config.path} is an adapter")
    try:
        values = hf_cache.read_model_config(config.path, config.revision)
        why = (
            hf_cache.model_config_problem(values)
            or hf_cache.model_config_problem(config.model_kwargs)
            or _why_not_reward_model(values, config)
        )
    except ValueError as error:
        why = str(error)
    if why:
        fix = "path=ORG/NAME of a sequence classifier with one label"
        if "trust_remote_code" in why:
            fix = "trust_remote_code=true, if you trust its authors; nothing was run"
        refuse("path", f"{config.path} is not a reward model", fix, why, error=MachineError)


def _why_not_reward_model(values: JsonObject, config: Config) -> str:
    """Why a model with this config.json is not a reward model; "" = it may be one."""
    if values.get("auto_map"):
        kind = str(values.get("model_type", "")).replace("-", "_")
        spec = find_spec("transformers")
        native = spec is not None and Path(spec.origin or "").with_name("models").joinpath(kind)
        if config.trust_remote_code:
            return ""  # its class may have any name
        if not (kind and native and native.is_dir()):
            return "it comes with its own Python code, and trust_remote_code is false"
    classes = values.get("architectures") or []
    if classes and not any("ForSequenceClassification" in str(c) for c in classes):
        return f"it is a {classes[0]}, which has no score head"
    labels = values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else values.get("num_labels")
    count = config.model_kwargs.get("num_labels", count)
    if classes and count != 1:
        # transformers omits the number of labels from the file if it is 2.
        return f"it has {2 if count is None else count} labels; a reward model has one"
    return ""


def load(name: str, config: Config) -> "tuple[RewardModel, dict[str, object]]":
    """The reward model, which `ready` will load, and no fixed arguments."""
    return RewardModel(name, config), {}


def ready(code: "RewardModel", setup: RewardSetup) -> None:
    """Load it and log an example of its input. Raises MachineError, ConfigError."""
    code.prepare_model(setup)


class RewardModel:
    """A reward that is a model: its weights, its tokenizer, and the encoder of its inputs."""

    model: RewardScorer  # once `prepare_model` loaded it

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.config, self.config_key = name, config, f"reward.{name}"
        self.reader: RewardInputEncoder | None = None

    def __call__(
        self,
        prompts: "list[Prompt]",
        completions: list[Completion],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        finish_reasons: list[str],
        group_index: list[int],
    ) -> list[float]:
        """(B,) scores, in float32. Raises ValueError for an input that is too long."""
        assert self.reader is not None, f"{self.config_key} was not made ready"
        columns = zip(prompts, completions, prompt_ids, completion_ids, finish_reasons, strict=True)
        inputs = [self.reader.encode(PromptCompletion(*values)) for values in columns]
        longest, most = max(map(len, inputs), default=0), self._max_positions()
        if most is not None and longest > most:
            fix = f"{self.config_key}.max_length={most} cuts such rows"
            raise ValueError(f"a row of {longest} tokens; {self.config.path} has {most}; {fix}")
        return self.model.score(inputs, group_index)

    def prepare_model(self, setup: RewardSetup) -> None:
        """Load tokenizer and weights, and score an example. Raises MachineError, ConfigError."""
        config, name = self.config, self.config_key
        if config.trust_remote_code:
            setup.log_note(f"warning: {name}.trust_remote_code is on: code of {config.path} runs")
        tokenizer = setup.reward_load.load_reward_tokenizer(name, config)
        self.reader = RewardInputEncoder(
            tokenizer, setup.tokenizer, config.input, config.keep_eos, config.max_length
        )
        for prompts in setup.splits:
            self.reader.check_split(prompts)
        self._check_input_mode(tokenizer)
        self.model = setup.reward_load.load_reward_model(name, config, tokenizer, setup.device)
        by_ids = all(why is None for why in self.reader.why_not_ids.values())
        longest = setup.max_tokens + 1 + len(self.reader.turn_end_ids) if by_ids else None
        self._check_length(longest)
        layout = self.model.choose_layout(config.max_length or longest)
        setup.log_note(
            f"{name}: {config.path} on {self.model.device} in {self.model.dtype}, reads"
            f" {self._describe_input()}; rows are {layout}"
        )
        self._show_example(setup)

    def _check_input_mode(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        assert self.reader is not None
        for conversational, why in self.reader.why_not_ids.items():
            if conversational and why is not None and not tokenizer.chat_template:
                what = f"{self.config.path} has no chat template, but the prompts are conversations"
                key = f"{self.config_key}.tokenizer"
                fix = f"{key}=FOLDER of a tokenizer with one"
                refuse(key, what, fix, "it reads text", error=MachineError)
            if why is not None and self.config.input == "ids":
                key = f"{self.config_key}.input"
                what = f"{key} = ids, but the tokenizers differ"
                refuse(key, what, f"{key}=auto", why)

    def _check_length(self, max_tokens: int | None) -> None:
        most = self._max_positions()
        if most is not None and max_tokens is not None and max_tokens > most:
            path, key = self.config.path, f"{self.config_key}.max_length"
            what = f"{path} has {most} positions, but rows may have {max_tokens} tokens"
            fix = f"{key}={most}, which cuts the beginning of longer rows"
            why = "it cannot read tokens beyond its last position"
            refuse(key, what, fix, why)

    def _max_positions(self) -> int | None:
        """The most tokens of an input; None = no limit, or `max_length` cuts inputs to fit."""
        most, cut = self.model.max_positions, self.config.max_length
        return None if cut is not None and most is not None and cut <= most else most

    def _describe_input(self) -> str:
        assert self.reader is not None
        kinds = set(self.reader.why_not_ids.values())
        reasons = sorted(why for why in kinds if why is not None)
        ids = "the sampled ids" if None in kinds else ""
        return " and ".join(filter(None, [ids, f"text ({'; '.join(reasons)})" if reasons else ""]))

    def _show_example(self, setup: RewardSetup) -> None:
        """Score a good answer to the first prompt, and a worse one, and log the ids and scores."""
        assert self.reader is not None
        if not setup.splits:
            return
        prompts = setup.splits[0]
        references = (prompts.examples[0].get(name) for name in REFERENCE_COLUMNS)
        good = next((text for text in references if isinstance(text, str) and text), "Yes.")
        parts = good.split()
        worse = " ".join(reversed(parts)) if len(parts) > 1 else good[::-1]
        answers = [_answer_to_first_prompt(prompts, a, setup.tokenizer) for a in (good, worse)]
        ids = [self.reader.encode(answer) for answer in answers]
        try:
            scores = self.model.score(ids, [0, 0])
        except Exception as error:  # a model's own code may raise anything
            what = f"{self.config.path} cannot score an answer to the first prompt"
            key = f"{self.config_key}.path"
            fix = f"{key}=ORG/NAME of a sequence classifier with one label"
            refuse(key, what, fix, error, error=MachineError)
        if not all(map(math.isfinite, scores)):
            what, fix = f"{self.config.path} scores {scores}", f"{self.config_key}.dtype=float32"
            refuse(f"{self.config_key}.dtype", what, fix, "it is not finite", error=MachineError)
        tokenizer = self.reader.tokenizer
        setup.log_note(
            f"{self.config_key} gets {len(ids[0])} ids, {describe_ids(tokenizer, ids[0])}: "
            f"{tokenizer.decode(ids[0])[-120:]!r} scores {scores[0]:.4g}, that answer in reverse "
            f"{scores[1]:.4g}"
        )


def describe_ids(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    """The first and last ids, each with its token."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    pairs = [f"{i} {token!r}" for i, token in zip(ids, tokens, strict=True)]
    return ", ".join(pairs if len(pairs) <= 8 else [*pairs[:3], "...", *pairs[-4:]])


def _answer_to_first_prompt(
    prompts: "Prompts", text: str, tokenizer: "PreTrainedTokenizerBase"
) -> PromptCompletion:
    """An answer to the first prompt, as if sampled and ended on its own."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    answer: Completion = text
    if prompts.conversational:
        answer = [{"role": "assistant", "content": text}]
    return PromptCompletion(prompts.prompts[0], answer, prompts.prompt_ids[0], ids, "stop")
