"""A reward model: any sequence classifier with one label, with its own tokenizer.

What it is fed, `reading` says; how rows are computed, `policy.scores`. Weights, tokenizer and the
first row are looked at before the policy's weights load, and that row is shown in the log.
"""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rloo_cli.config import hf_cache
from rloo_cli.config.schema import Positive, RewardConfig, Text, key
from rloo_cli.rewards.common.model_inputs import PromptCompletion, RewardInputEncoder
from rloo_cli.rewards.common.text import Completion
from rloo_cli.rewards.engine.ready import RewardSetup
from rloo_cli.utils.errors import ConfigError, MachineError, Problem

Device = Annotated[str, Field(pattern=r"^(auto|[a-z]+(:\d+)?)$")]
# Keys of from_pretrained that are keys of ours, or must not be given at all.
RESERVED_MODEL_KWARGS = ("revision", "dtype", "torch_dtype", "trust_remote_code", "use_safetensors",
             "device_map", "output_loading_info", "ignore_mismatched_sizes")  # fmt: skip
REFERENCE_COLUMNS = (
    "reference",
    "solution",
    "answer",
    "ground_truth",
    "label",
    "summary",
    "chosen",
)


class Config(RewardConfig):
    type: Literal["model"] = key("model")
    path: Text = key("Hub name or folder of the reward model, or make:tiny_reward")
    tokenizer: Text | None = key("Hub name or folder of its tokenizer; null = path")
    revision: Text | None = key("Branch, tag or commit of a hub model")
    model_kwargs: dict[str, Any] = key("Passed to from_pretrained of the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "Weights' dtype, the head's aside; auto = bfloat16 on a GPU that has it, else float32"
    )
    trust_remote_code: bool = key("Run Python code that comes with it (dangerous)")
    input: Literal["auto", "text", "ids"] = key(
        "What it reads: the sampled ids, or text; auto = ids where both tokenizers agree"
    )
    keep_eos: bool = key("End plain text that ended by itself with the tokenizer's EOS")
    batch_size: Positive = key("Rows per forward pass where rows are padded")
    max_length: Positive | None = key("Most tokens of a row; longer ones lose their beginning")
    device: Device = key("Where it computes: auto = where the policy does, cpu, cuda, cuda:N")
    offload: bool = key("Lies in CPU memory while it has nothing to score")


def problems(config: Config, where: str) -> Iterator[Problem]:
    """What these keys forbid each other."""
    if config.workers:
        key, why = f"{where}.workers", "each would hold a copy of the model"
        yield Problem(f"{key}: a reward model has none", key, why, f"{key}=0")


def preflight(config: Config) -> None:
    """What its config.json tells without torch. Raises MachineError, ConfigError for its keys."""
    given = [name for name in RESERVED_MODEL_KWARGS if name in config.model_kwargs]
    if given:
        why = "rloo gives it by a key of its own, or must not: pickled and random weights"
        raise ConfigError(Problem(f"model_kwargs may not hold {given[0]}", "model_kwargs", why))
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
        raise MachineError(Problem(f"{config.path} is not a reward model", "", why, fix))


def _why_not_reward_model(values: dict[str, Any], config: Config) -> str:
    """Why a config.json is none of a reward model, as far as it tells; "" = it may be one."""
    if values.get("auto_map"):
        kind = str(values.get("model_type", "")).replace("-", "_")
        spec = find_spec("transformers")
        native = spec is not None and Path(spec.origin or "").with_name("models").joinpath(kind)
        if config.trust_remote_code:
            return ""  # its class may be named as it likes
        if not (kind and native and native.is_dir()):
            return "it brings Python code of its own, and trust_remote_code is false"
    classes = values.get("architectures") or []
    if classes and not any("ForSequenceClassification" in str(c) for c in classes):
        return f"it is a {classes[0]}, which has no score head"
    labels = values.get("id2label")
    count = len(labels) if isinstance(labels, dict) else values.get("num_labels")
    count = config.model_kwargs.get("num_labels", count)
    if classes and count != 1:
        # transformers writes down every number of labels but 2.
        return f"it has {2 if count is None else count} labels; a reward model has one"
    return ""


def load(name: str, config: Config) -> "tuple[RewardModel, dict[str, Any]]":
    """The reward model, which `ready` will load, and no fixed arguments."""
    return RewardModel(name, config), {}


def ready(code: "RewardModel", setup: RewardSetup) -> None:
    """Load it and show what it is fed. Raises MachineError, ConfigError."""
    code.prepare_model(setup)


class RewardModel:
    """A reward that is a model: its tokenizer, how it reads, and its weights."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self.config, self.config_key = name, config, f"reward.{name}"
        self.reader: RewardInputEncoder | None = None
        self.model: Any = None

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Completion],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        finish_reasons: list[str],
        group_index: list[int],
    ) -> list[float]:
        """(B,) scores, in float32. Raises ValueError for a row that the model cannot hold."""
        assert self.reader is not None, f"{self.config_key} was not made ready"
        given = zip(prompts, completions, prompt_ids, completion_ids, finish_reasons, strict=True)
        rows = [self.reader.encode(PromptCompletion(*row)) for row in given]
        longest, most = max(map(len, rows), default=0), self._max_positions()
        if most is not None and longest > most:
            fix = f"{self.config_key}.max_length={most} cuts such rows"
            raise ValueError(f"a row of {longest} tokens; {self.config.path} has {most}; {fix}")
        scores: list[float] = self.model.score(rows, group_index)
        return scores

    def prepare_model(self, setup: RewardSetup) -> None:
        """Tokenizer, weights and layout, a first score. Raises MachineError, ConfigError."""
        config = self.config
        if config.trust_remote_code:
            setup.log_note(
                f"warning: {self.config_key}.trust_remote_code is on: code of {config.path} runs"
            )
        own = setup.reward_load.load_reward_tokenizer(self.config_key, config)
        self.reader = RewardInputEncoder(
            own, setup.tokenizer, config.input, config.keep_eos, config.max_length
        )
        for prompts in setup.splits:
            self.reader.check_split(prompts)
        self._check_input_mode(own)
        self.model = setup.reward_load.load_reward_model(self.config_key, config, own, setup.device)
        by_ids = all(why is None for why in self.reader.why_not_ids.values())
        longest = setup.max_tokens + 1 + len(self.reader.turn_end_ids) if by_ids else None
        self._check_length(longest)
        said = self.model.choose_layout(config.max_length or longest)
        setup.log_note(
            f"{self.config_key}: {config.path} on {self.model.device} in {self.model.dtype}, reads"
            f" {self._describe_input()}; rows are {said}"
        )
        self._show_example(setup)

    def _check_input_mode(self, tokenizer: Any) -> None:
        assert self.reader is not None
        for conversational, why in self.reader.why_not_ids.items():
            if conversational and why is not None and not tokenizer.chat_template:
                what = f"{self.config.path} has no chat template, and the prompts are conversations"
                fix = f"{self.config_key}.tokenizer=FOLDER of one that has"
                raise MachineError(
                    Problem(what, f"{self.config_key}.tokenizer", "it reads text", fix)
                )
            if why is not None and self.config.input == "ids":
                what = f"{self.config_key}.input = ids, and the tokenizers do not agree"
                raise ConfigError(
                    Problem(what, f"{self.config_key}.input", why, f"{self.config_key}.input=auto")
                )

    def _check_length(self, max_tokens: int | None) -> None:
        most = self._max_positions()
        if most is not None and max_tokens is not None and max_tokens > most:
            what = (
                f"{self.config.path} has {most} positions, and rows of {max_tokens} tokens may come"
            )
            fix = f"{self.config_key}.max_length={most}, which cuts the beginning of longer rows"
            raise ConfigError(Problem(what, f"{self.config_key}.max_length", "", fix))

    def _max_positions(self) -> int | None:
        """The most tokens of a row that the model could not hold; None = all are cut before."""
        found: int | None = self.model.max_positions
        cut = self.config.max_length
        return None if cut is not None and found is not None and cut <= found else found

    def _describe_input(self) -> str:
        assert self.reader is not None
        kinds = set(self.reader.why_not_ids.values())
        reasons = sorted(why for why in kinds if why is not None)
        ids = "the sampled ids" if None in kinds else ""
        return " and ".join(filter(None, [ids, f"text ({'; '.join(reasons)})" if reasons else ""]))

    def _show_example(self, setup: RewardSetup) -> None:
        """One completion of the first prompt, and a worse one: the ids, and what they score."""
        assert self.reader is not None
        if not setup.splits:
            return
        prompts = setup.splits[0]
        columns = prompts.examples[0]
        told = (columns.get(name) for name in REFERENCE_COLUMNS)
        good = next((text for text in told if isinstance(text, str) and text), "Yes.")
        words = good.split()
        worse = " ".join(reversed(words)) if len(words) > 1 else good[::-1]
        rows = [_answer_to_first_prompt(prompts, text, setup.tokenizer) for text in (good, worse)]
        ids = [self.reader.encode(row) for row in rows]
        try:
            scores = self.model.score(ids, [0, 0])
        except Exception as error:  # whatever a model's own code raises
            why = f"{type(error).__name__}: {str(error).strip()[:300]}"
            what = f"{self.config.path} cannot score a row of this data"
            raise MachineError(Problem(what, f"{self.config_key}.path", why)) from None
        if not all(map(math.isfinite, scores)):
            what, fix = f"{self.config.path} scores {scores}", f"{self.config_key}.dtype=float32"
            raise MachineError(Problem(what, f"{self.config_key}.dtype", "no finite number", fix))
        setup.log_note(
            f"{self.config_key} is fed {len(ids[0])} ids, "
            f"{describe_ids(self.reader.tokenizer, ids[0])}: "
            f"{self.reader.tokenizer.decode(ids[0])[-120:]!r} scores {scores[0]:.4g}, that "
            "answer in"
            f" reverse {scores[1]:.4g}"
        )


def describe_ids(tokenizer: Any, ids: list[int]) -> str:
    """The first and last ids with the tokens that they are."""
    tokens = tokenizer.convert_ids_to_tokens(ids)
    pairs = [f"{i} {token!r}" for i, token in zip(ids, tokens, strict=True)]
    return ", ".join(pairs if len(pairs) <= 8 else [*pairs[:3], "...", *pairs[-4:]])


def _answer_to_first_prompt(prompts: Any, text: str, tokenizer: Any) -> PromptCompletion:
    """An answer to the first prompt as if it had been sampled, and had ended."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    said: Completion = text
    if prompts.conversational:
        said = [{"role": "assistant", "content": text}]
    return PromptCompletion(prompts.prompts[0], said, prompts.prompt_ids[0], ids, "stop")
