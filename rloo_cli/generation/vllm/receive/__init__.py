"""The receiving ends of a weight transfer, which run inside vLLM's workers.

`CompleteUpdateMixin` is shared by all: every layer of the engine must have received all
of its elements before an update may end (a frozen tower, in the first). vLLM itself only logs a
layer that received none, and leaves uninitialized memory in one that received half.

    adapter  the receiver of an adapter
    gloo     the gloo receiver: our own, for machines without GPUs
    ipc      the CUDA IPC receiver, with complete updates
    nccl     vLLM's NCCL receiver, with complete updates
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rloo_cli.generation.vllm import versions

MAX_NAMES_SHOWN = 20  # names in one message

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine as Base
else:
    Base = object


class CompleteUpdateMixin(Base):
    """Mixed in before one of vLLM's transfer engines."""

    had_all = False  # whether an update of this connection brought all weights

    def init_transfer_engine(self, init_info: Any) -> None:
        self.had_all = False
        super().init_transfer_engine(init_info)

    def finish_weight_update(self) -> None:
        """Raises ValueError that lists the layers that did not receive all of their weights.

        A trainer sends frozen weights only in its first update, so a vision tower or its projector
        may then be left unchanged as a whole.
        """
        incomplete = incomplete_layers(self.model)
        kept = parts_left_out(self.model, {n for n, a, _ in incomplete if not a})
        if self.had_all:
            incomplete = [layer for layer in incomplete if layer[0] not in kept]
        # Even a refused update must be closed: otherwise the engine would refuse the next one.
        with _no_warning_of_layers_left_out() if kept else nullcontext():
            super().finish_weight_update()
        if incomplete:
            raise missing_weights_error([f"{n} ({a} of {b} elements)" for n, a, b in incomplete])
        self.had_all = True
        refresh_heads(self.model)


def parts_left_out(model: nn.Module, empty: set[str]) -> set[str]:
    """Those of the `empty` layers, which received nothing, that belong to a part (a vision tower,
    its projector) of which no layer received anything."""
    if not empty or not hasattr(model, "get_mm_mapping"):
        return set()
    names: Any = cast(Any, model).get_mm_mapping()
    connector, tower = (
        {n for n, layer in model.named_modules() if _takes_weights(layer) and n.startswith(start)}
        for start in (tuple(names.connector), tuple(names.tower_model))
    )
    return {n for part in (connector, tower - connector) if part <= empty for n in part}


def _takes_weights(layer: nn.Module) -> bool:
    own = next(layer.parameters(recurse=False), None)
    return own is not None and get_layerwise_info(layer).can_load()


@contextmanager
def _no_warning_of_layers_left_out() -> Iterator[None]:
    """Silence vLLM's warning about each unchanged layer: here it is intended."""
    log = logging.getLogger(layerwise.__name__)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def missing_weights_error(layers: list[str]) -> ValueError:
    """The error that ends an update: it names the first MAX_NAMES_SHOWN of these layers."""
    more = f" and {len(layers) - MAX_NAMES_SHOWN} more" if len(layers) > MAX_NAMES_SHOWN else ""
    return ValueError(f"weights are missing: {', '.join(layers[:MAX_NAMES_SHOWN])}{more}")


def incomplete_layers(model: nn.Module) -> list[tuple[str, int, int]]:
    """Layers that received too few elements in this update: name, received, expected. The padding
    that rounds up an embedding's rows is never sent."""
    incomplete, not_counted = [], versions.uncounted_parameters()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or versions.is_deferred_layer(layer):
            continue  # complete, or only scales, which checkpoints lack
        # Buffers are not counted: the engine makes them itself.
        parameters = layer.named_parameters(recurse=False)
        expected = sum(p.numel() for parameter, p in parameters if parameter not in not_counted)
        if isinstance(layer, VocabParallelEmbedding):
            expected = expected * shard_vocab_size(layer) // layer.num_embeddings_per_partition
        if info.load_numel < expected and not _tied_head(model, layer):
            incomplete.append((name or "(model)", info.load_numel, expected))
    return incomplete


def shard_vocab_size(layer: VocabParallelEmbedding) -> int:
    """Tokens in this process's share of the vocabulary, without padding: all padding is at the end
    of the vocabulary, so the last shares have fewer tokens, or none."""
    shard = layer.shard_indices
    return int(shard.org_vocab_end_index - shard.org_vocab_start_index)


def _tied_head(model: nn.Module, layer: nn.Module) -> bool:
    """Whether the layer's parameter is the embedding's, which is sent once, under that name. The
    head of a model with a vision tower is its language model's."""
    owner = next((m for m in model.modules() if getattr(m, "lm_head", None) is layer), None)
    config: Any = getattr(owner, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "tie_word_embeddings", False))


def refresh_heads(model: nn.Module) -> None:
    """Pack tied heads again on a machine without a GPU: there a head that is tied to the
    embedding computes with a packed copy of its weights, which a reload does not change."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)
