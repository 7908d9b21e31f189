"""Runs of the smoke recipe as a plan sees them, with a model whose every number is known."""

import functools
from pathlib import Path
from typing import Any

from rloo_cli.config import check
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import RunConfig
from rloo_cli.planning import device, model_spec
from rloo_cli.planning.device import GIB, Device
from rloo_cli.planning.plan_inputs import PlanInputs

# 3 layers of: attention 4 * 64 * 64, MLP 3 * 64 * 128, norms 2 * 64; tables of 1000 * 64.
SMALL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
    "num_hidden_layers": 3, "vocab_size": 1000, "max_position_embeddings": 256,
}  # fmt: skip
LAYER = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
TABLE = 1000 * 64
COUNT = 2 * TABLE + 3 * LAYER + 64
GPU = device.find_device("80GiB")
ENGINES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp2")
ADAPTER = (
    "model.lora={peft_type: LORA, r: 8, alpha: 16, dropout: 0.0, target_modules: TARGETS,"
    " exclude_modules: [], modules_to_save: [], bias: none, use_rslora: false, use_dora: false,"
    " path: null, kwargs: {}}"
)


@functools.cache
def checked(*words: str) -> RunConfig:
    """The smoke recipe's config with `words`."""
    return check.check_config(compose_config(["+recipe=smoke", *words]))


def lora(targets: str = "all-linear") -> str:
    """The word that trains adapters of rank 8 alone."""
    return ADAPTER.replace("TARGETS", targets)


def case(
    *words: str, ranks: int = 1, gpu: Device = GPU, values: Any = None, **more: Any
) -> PlanInputs:
    """A run of a model with these values of a config.json (SMALL) on `ranks` GPUs."""
    run = checked(*words)
    model = model_spec.parse_model_spec(values or SMALL, "small", "the test")
    beta = getattr(run.algorithm, "beta", 0.0) > 0 and run.model.lora is None
    given = {"max_prompt_tokens": 20, "reference_model": model if beta else None} | more
    return PlanInputs(run=run, model=model, device=gpu, ranks=ranks, **given)


def large(name: str = "Qwen/Qwen2.5-7B", *words: str, ranks: int = 8, **more: Any) -> PlanInputs:
    """The same for a well-known model."""
    found = case(*words, ranks=ranks, **more)
    model = model_spec.load_model_spec(name)
    return PlanInputs(
        **{**vars(found), "model": model, "reference_model": found.reference_model and model}
    )


__all__ = ["GIB", "Path"]
