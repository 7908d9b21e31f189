"""`zero1`, `zero2`, `zero3`: DeepSpeed's engine, driven directly.

accelerate's wrapper gives the same sums, but it makes the optimizer's step inside the last
`backward` (accelerate 1.15, utils/deepspeed.py:281). Here the norm is computed before the step,
which is only made if it is finite, and a factor on all gradients (an advantage's normalization,
known late) goes through the loss scale. So DeepSpeed's engine is driven directly: the boundary is
set before each backward pass.

This file knows all engines: `build_engine` creates one by name.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.config.schema import DistributedConfig, LoraConfig, TrainConfig
from rloo_cli.distributed import gather
from rloo_cli.distributed.engine import DDPEngine, ParallelEngine
from rloo_cli.distributed.fsdp import FSDPEngine
from rloo_cli.distributed.optimizer import TrainingOptimizer, build_optimizer
from rloo_cli.distributed.paired_optimizer import PairedOptimizer
from rloo_cli.distributed.world import World
from rloo_cli.distributed.zero_optimizer import ZeroOptimizer
from rloo_cli.policy.load import HALF_DTYPES
from rloo_cli.policy.model import Policy
from rloo_cli.utils.files import JsonObject

DEEPSPEED_DTYPE_SECTIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class DeepSpeedEngine(ParallelEngine):
    """Optimizer state in shards; from stage 2 on gradients too, in stage 3 the weights."""

    lockstep = True

    @property
    def stage(self) -> int:
        return int(self.distributed_config.engine.removeprefix("zero"))

    @property
    def sharded(self) -> bool:  # type: ignore[override]
        return self.stage == 3

    def distribute_policy(self, policy: Policy, num_updates: int) -> TrainingOptimizer:
        """Give the policy to DeepSpeed. -> its optimizer"""
        self.deepspeed_engine, optimizer = self._start_engine(
            policy.logprob_module, policy.model, [], policy.meta_weights, policy.dtype, num_updates
        )
        policy.call, policy.meta_weights = self.deepspeed_engine, None
        if (value := self.value_model) is None:
            return optimizer
        self.value_engine, second = self._start_engine(
            value.forward_module, value.model, [value.head], value.meta_weights, value.dtype,
            num_updates, "value.",
        )  # fmt: skip
        value.call, value.meta_weights = self.value_engine, None
        return PairedOptimizer(optimizer, second, self.train_config.max_grad_norm)

    def _start_engine(
        self,
        root: nn.Module,
        model: PreTrainedModel,
        heads: list[nn.Module],
        meta_weights: gather.MetaWeights | None,
        dtype: torch.dtype,
        num_updates: int,
        prefix: str = "",
    ) -> tuple[Any, ZeroOptimizer]:
        """Give a model to DeepSpeed. `root`: the module to call. -> its engine, its optimizer

        `heads`: units beside the decoder layers. `prefix`: of its parameters' names.
        """
        deepspeed = _import_deepspeed()
        settings = self._deepspeed_config(dtype)
        if self.stage == 3:
            for unit in (*gather.decoder_layers(model), *heads, root):
                gather.materialize_unit(unit, meta_weights, self.world, None)
                if dtype in HALF_DTYPES:
                    _cast_parameters(unit, dtype)
                deepspeed.zero.Init(module=unit, config_dict_or_path=settings, dtype=dtype)
        trained = [p for p in model.parameters() if p.requires_grad]
        inner = build_optimizer(trained, self.train_config)
        engine, *_ = deepspeed.initialize(
            model=root, optimizer=inner, config=settings, dist_init_required=False
        )
        return engine, ZeroOptimizer(engine, inner, model, self.train_config, num_updates, prefix)

    def distribute_frozen(self, policy: Policy) -> None:
        """Shard a frozen policy in stage 3, by torch's fully_shard; DeepSpeed has no light way."""
        if self.stage == 3:
            FSDPEngine(self.world, self.train_config, self.distributed_config).distribute_frozen(
                policy
            )

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Run a backward pass. DeepSpeed averages over ranks, and completes it in the last one."""
        self._backward(self.deepspeed_engine, loss, is_last)

    def backward_value(self, loss: Tensor, is_last: bool) -> None:
        """Run a backward pass of the value model, as `backward` does the policy's."""
        self._backward(self.value_engine, loss, is_last)

    def _backward(self, engine: Any, loss: Tensor, is_last: bool) -> None:
        engine.set_gradient_accumulation_boundary(is_last)
        engine.backward(loss * self.world.size)

    @contextmanager
    def gathered_parameters(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
    ) -> Iterator[list[Tensor]]:
        """These weights, gathered inside the context, in the dtype that DeepSpeed keeps."""
        if self.stage < 3:
            yield [p.detach() for p in parameters]
            return
        with _import_deepspeed().zero.GatheredParameters(list(parameters)):
            yield [p.detach() for p in parameters]

    def _deepspeed_config(self, dtype: torch.dtype) -> JsonObject:
        """DeepSpeed's own config."""
        config, on_gpu = self.distributed_config, self.world.device.type == "cuda"
        # In half precision stage 1 is another DeepSpeed optimizer; 2 gives the same numbers.
        stage = 2 if self.stage == 1 and dtype in DEEPSPEED_DTYPE_SECTIONS else self.stage
        zero: JsonObject = {"stage": stage, "overlap_comm": on_gpu}
        max_grad_norm = self.train_config.max_grad_norm or 0.0
        if config.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        if config.offload == "parameters":
            zero["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
        settings: JsonObject = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # Two models are clipped by their common norm, which neither engine knows.
            "gradient_clipping": max_grad_norm if self.value_model is None else 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }
        if dtype in DEEPSPEED_DTYPE_SECTIONS:
            settings[DEEPSPEED_DTYPE_SECTIONS[dtype]] = {"enabled": True}
            settings["data_types"] = {"grad_accum_dtype": "fp32"}
        return settings


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast float32 parts of half-precision models: adapters, the head of a value model.

    DeepSpeed keeps float32 masters of trained weights. In stages 1 and 2 it casts all itself.
    """
    for weight in module.parameters():
        if weight.dtype is torch.float32 and not hasattr(weight, "ds_id"):
            weight.data = weight.data.to(dtype)


def _import_deepspeed() -> Any:
    """Import DeepSpeed, without its log lines and the helper that it would compile for a CPU."""
    os.environ.setdefault("LOCAL_RANK", "0")  # for a single process without a number
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
    return deepspeed


ENGINE_CLASSES: dict[str, type[ParallelEngine]] = {
    "single": ParallelEngine,
    "ddp": DDPEngine,
    "fsdp2": FSDPEngine,
    "zero1": DeepSpeedEngine,
    "zero2": DeepSpeedEngine,
    "zero3": DeepSpeedEngine,
}


def build_engine(
    world: World, train: TrainConfig, distributed: DistributedConfig, lora: LoraConfig | None
) -> ParallelEngine:
    """Build the engine named by `distributed.engine`."""
    return ENGINE_CLASSES[distributed.engine](world, train, distributed, lora)
