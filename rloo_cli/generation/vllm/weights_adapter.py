"""The trained adapter as an engine wants it: two factors a layer, in the serving dtype.

Names are those of peft's files. The second factor has the layer's scale in it (alpha / r, or as
rsLoRA has it), multiplied in float32 and rounded once, so the engine knows of no scale.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rloo_cli.policy import lora
from rloo_cli.generation.vllm.weights import Meta


class Adapter:
    """An adapted model's adapter and nothing else; `gather` makes a sharded tensor whole."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        gather: Callable[[Tensor], Tensor] = Tensor.contiguous,
    ):
        self.model, self.dtype, self.gather = model, dtype, gather
        self.scales = lora.scales(model)

    def metadata(self) -> list[Meta]:
        """What iteration brings, in the same order."""
        named = lora.named(self.model)
        return [Meta(name, self.dtype, tuple(t.shape)) for name, t in named.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in lora.named(self.model).items():
            whole = self.gather(tensor.detach()).float()
            if "lora_B" in name or "lora_embedding_B" in name:
                layer = name.removeprefix(lora.PREFIX).partition(".lora_")[0]
                whole = whole * self.scales[layer]
            yield name, whole.to(self.dtype).contiguous()
