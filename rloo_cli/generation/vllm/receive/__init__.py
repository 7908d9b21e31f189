"""The receiving ends of a weight transfer, which run inside vLLM's workers.

`Accounted` is what they have in common: every layer of the engine must have received all of its
elements before an update may end. vLLM itself only logs a layer that received none, and fills one
that received half with whatever was in memory.

    adapter  The receiver of an adapter
    gloo     The gloo receiver: our own engine for machines without GPUs
    ipc      The CUDA IPC receiver, accounted
    nccl     vLLM's NCCL receiver, accounted
"""

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rloo_cli.generation.vllm import versions

MAX_NAMES_SHOWN = 20  # names in one message

if TYPE_CHECKING:
    Base = Any
else:
    Base = object


class CompleteUpdateMixin(Base):
    """Goes before one of vLLM's engines in the order of base classes."""

    def finish_weight_update(self) -> None:
        """Raises ValueError that lists the layers that did not receive all of their weights."""
        left = [
            f"{name} ({got} of {all_} elements)"
            for name, got, all_ in incomplete_layers(self.model)
        ]
        # Even an update that is refused must close: the engine would take no other one.
        super().finish_weight_update()
        if left:
            more = f" and {len(left) - MAX_NAMES_SHOWN} more" if len(left) > MAX_NAMES_SHOWN else ""
            raise ValueError(f"weights are missing: {', '.join(left[:MAX_NAMES_SHOWN])}{more}")
        refresh_heads(self.model)


def incomplete_layers(model: Any) -> list[tuple[str, int, int]]:
    """Layers under reload that received too few elements: name, received, expected.

    Embeddings may be padded to a round number of rows, which nobody sends.
    """
    found, not_counted = [], versions.uncounted_parameters()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if not info.can_load() or versions.is_deferred_layer(layer):
            continue  # complete; or scales, which no checkpoint of ours has
        # Buffers are made, not sent.
        expected = sum(
            p.numel() for own, p in layer.named_parameters(recurse=False) if own not in not_counted
        )
        if isinstance(layer, VocabParallelEmbedding):
            expected = expected * shard_vocab_size(layer) // layer.num_embeddings_per_partition
        if info.load_numel < expected and not _tied_head(model, layer):
            found.append((name or "(model)", info.load_numel, expected))
    return found


def shard_vocab_size(layer: VocabParallelEmbedding) -> int:
    """Rows of this process's share of a vocabulary that a checkpoint has: padding is all in the
    last shares, so they have fewer, or none."""
    shard = layer.shard_indices
    rows: int = shard.org_vocab_end_index - shard.org_vocab_start_index
    return rows


def _tied_head(model: Any, layer: Any) -> bool:
    """It has the embedding's own parameter, which is sent once, under the embedding's name."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    return bool(tied) and layer is getattr(model, "lm_head", None)


def refresh_heads(model: Any) -> None:
    """Without a GPU a head that is tied to the embedding keeps a packed copy of its weights, which
    a reload leaves as it was; the old head would go on answering."""
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)
