"""Counts of a model: sizes, linear layers, parameters by part, and bytes per token."""

from dataclasses import dataclass
from typing import NamedTuple


class ModelSizes(NamedTuple):
    """The sizes of a language model, under common names."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


class Linear(NamedTuple):
    """Linear layers of one name and shape."""

    name: str
    inputs: int
    outputs: int
    copies: int  # in all layers
    is_expert: bool = False  # part of one tensor with the other experts of its layer


class TowerSpec(NamedTuple):
    """A vision tower and its projector. Sizes are numbers of parameters."""

    tower_params: int  # frozen by `model.freeze=[vision]`
    projector_params: int
    layers: int
    patches_per_token: int  # patches that become one token of the language model
    pixels_per_token: int
    patch_kept_bytes: tuple[float, float]  # kept per patch by all layers: bfloat16, float32

    def saved_bytes(self, bytes_per_weight: int) -> float:
        """Bytes kept for the backward pass per image token."""
        return self.patches_per_token * self.patch_kept_bytes[bytes_per_weight == 4]


@dataclass(frozen=True)
class ModelSpec:
    """A language model for a plan. Sizes are numbers of parameters, not bytes."""

    name: str
    source: str  # where its config.json was found
    context_length: int | None
    sizes: ModelSizes
    linears: tuple[Linear, ...]  # of all layers
    embedding_params: int  # token table
    head_params: int  # 0 = tied to the token table
    body_params: int  # everything but embedding, head and tower
    layer_params: int  # the largest layer
    active_params: int  # body parameters used by one token
    layer_kept_bytes: tuple[float, float]  # kept by a layer per token: bfloat16, float32
    transient_values: int  # temporary values of a layer per token
    layout: str  # the fastest exact layout for the model
    window: int | None = None  # of its attention: longer sequences are packed
    tower: TowerSpec | None = None  # of a vision-language model
    guessed: bool = False  # unknown family, counted as a Llama

    @property
    def total_params(self) -> int:
        """All parameters, a vision tower's too."""
        tower = 0 if self.tower is None else self.tower.tower_params + self.tower.projector_params
        return self.embedding_params + self.head_params + self.body_params + tower

    @property
    def output_embedding_params(self) -> int:
        """The output embedding, tied or not: usually the largest tensor."""
        return self.sizes.vocab_size * self.sizes.hidden

    def layout_for(self, length: int) -> str:
        """The layout for sequences of up to this many tokens."""
        return "packed" if self.window is not None and length > self.window else self.layout

    def saved_bytes(self, bytes_per_weight: int) -> float:
        """Bytes per token kept by a layer for its backward pass."""
        return self.layer_kept_bytes[bytes_per_weight == 4]

    def transient_bytes(self, bytes_per_weight: int) -> float:
        """Bytes per token held by a layer while it computes."""
        return float(bytes_per_weight * self.transient_values)

    def kv_bytes(self, bytes_per_weight: int) -> int:
        """Bytes of keys and values of one token in all layers."""
        return 2 * self.sizes.layers * self.sizes.kv_width * bytes_per_weight
