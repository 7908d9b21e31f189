"""`distributed.accelerate_config`: what a file of `accelerate config` comes to."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloo_cli.config.check import check_config
from rloo_cli.config.compose import compose_config
from rloo_cli.config.schema import DistributedConfig
from rloo_cli.utils.errors import ConfigError

# As `accelerate config` writes them, and TRL ships them.
USUAL: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no",
    "machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16",
    "num_machines": 1, "num_processes": 8, "rdzv_backend": "static", "same_network": True,
    "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False,
}  # fmt: skip
ZERO = {"deepspeed_multinode_launcher": "standard", "offload_optimizer_device": "none",
        "offload_param_device": "none", "zero3_init_flag": True, "zero_stage": 3}  # fmt: skip
FSDP = {"fsdp_activation_checkpointing": False, "fsdp_version": 2, "fsdp_offload_params": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}  # fmt: skip


def distributed(folder: Path, content: dict[str, Any], *overrides: str) -> DistributedConfig:
    """The section `distributed` of a run with such a file."""
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump(content))
    keys = ["train.prompts_per_step=8", f"distributed.accelerate_config={file}"]
    return check_config(compose_config(["+recipe=smoke", *keys, *overrides])).distributed


@pytest.mark.parametrize(
    ("content", "engine", "processes", "nodes", "offload"),
    [
        ({"distributed_type": "NO"}, "single", 1, 1, "none"),
        ({"distributed_type": "MULTI_GPU"}, "ddp", 8, 1, "none"),
        ({"distributed_type": "MULTI_GPU", "num_machines": 2}, "ddp", 4, 2, "none"),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP}, "fsdp2", 8, 1, "none"),
        ({"distributed_type": "FSDP", "fsdp_config": FSDP | {"fsdp_offload_params": True}},
         "fsdp2", 8, 1, "parameters"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO}, "zero3", 8, 1, "none"),
        ({"distributed_type": "DEEPSPEED",
          "deepspeed_config": ZERO | {"zero_stage": 2, "offload_optimizer_device": "cpu"}},
         "zero2", 8, 1, "optimizer"),
    ],
)  # fmt: skip
def test_a_file_sets_engine_offload_processes_and_machines(
    tmp_path: Path, content: dict[str, Any], engine: str, processes: int, nodes: int, offload: str
) -> None:
    found = distributed(tmp_path, USUAL | content)
    assert (found.engine, found.num_processes) == (engine, processes)
    assert (found.num_nodes, found.offload) == (nodes, offload)
    assert found.accelerate_config is None  # config.yaml holds what it said, and needs no file


def test_deepspeeds_own_json_is_read_and_auto_is_left_to_us(tmp_path: Path) -> None:
    own = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
           "gradient_clipping": "auto", "train_batch_size": "auto"}  # fmt: skip
    (tmp_path / "ds.json").write_text(json.dumps(own))
    section = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": True}
    content = USUAL | {"distributed_type": "DEEPSPEED", "deepspeed_config": section}
    found = distributed(tmp_path, content)
    assert (found.engine, found.offload) == ("zero3", "parameters")


def test_a_key_on_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    content = USUAL | {"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO}
    found = distributed(tmp_path, content, "distributed.num_processes=2")
    assert (found.engine, found.num_processes) == ("zero3", 2)


@pytest.mark.parametrize(
    ("content", "overrides", "said"),
    [
        ({"distributed_type": "MULTI_GPU"}, ["distributed=fsdp2"], "the engine is set twice"),
        ({"distributed_type": "MEGATRON_LM"}, [], "unknown engine"),
        ({"distributed_type": "MULTI_GPU", "num_processes": 3, "num_machines": 2}, [],
         "different numbers of processes"),
        ({"distributed_type": "MULTI_GPU", "num_processes": "all"}, [], "not a valid number"),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "fp8"}, [], "mixed_precision: fp8"),
        ({"distributed_type": "MULTI_GPU"}, ["model.dtype=float32"], "model.dtype=bfloat16"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
         [], "this strategy is not supported"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": True}},
         ["model.gradient_checkpointing=false"], "model.gradient_checkpointing=true"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 4}}, [],
         "unknown DeepSpeed stage"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": ZERO | {"gradient_clipping": 0.3}},
         [], "train.max_grad_norm=0.3"),
        ({"distributed_type": "DEEPSPEED",
          "deepspeed_config": ZERO | {"offload_param_device": "nvme"}},
         [], "offload only supports CPU memory"),
        ({"distributed_type": "MULTI_GPU", "parallelism_config": {"tp_size": 2}}, [],
         "parallelism_config is not supported"),
        ({"distributed_type": "FSDP", "fsdp_config": 3}, [], "fsdp_config is not a section"),
    ],
)  # fmt: skip
def test_what_would_be_obeyed_by_half_is_refused(
    tmp_path: Path, content: dict[str, Any], overrides: list[str], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        distributed(tmp_path, USUAL | content, *overrides)
    assert said in str(caught.value)
    assert "distributed.accelerate_config" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "No such file"), ("a: [", "cannot be read"), ("- 1", "is not a mapping of settings")],
)
def test_a_file_that_is_not_one_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "mine.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_config(["+recipe=smoke", f"distributed.accelerate_config={file}"])
    assert said in str(caught.value) and "mine.yaml" in str(caught.value)
