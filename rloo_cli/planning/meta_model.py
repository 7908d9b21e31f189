"""Counts a model on torch's meta device: parameters, and autograd memory per token.

transformers builds the model from a config without weights. Its forward on meta tensors only
computes shapes, and `saved_tensors_hooks` records what each layer keeps. Attention is replaced by a
version that keeps what a fused kernel keeps: queries, keys, values, output, a log-sum-exp per head.
Only `model_spec` imports this file, when needed: torch and transformers take seconds.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from rloo_cli.config.vision_models import has_tower
from rloo_cli.planning.model_counts import Linear, ModelSizes, ModelSpec, TowerSpec
from rloo_cli.policy import layout_support, vision
from rloo_cli.policy.load import zero_dropout
from rloo_cli.utils.files import JsonObject

TOKENS = 16  # of the forward on the meta device
KEPT = "rloo_kept"  # the name under which transformers finds our attention and experts
DTYPES = (torch.bfloat16, torch.float32)
NOT_READ = ("attn_implementation", "_attn_implementation", "quantization_config")  # of config.json
# Parameters of a Llama, for a model_type unknown to transformers.
LLAMA_NEEDS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
LLAMA_TAKES = ("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings",
               "tie_word_embeddings", "attention_bias", "mlp_bias")  # fmt: skip


class _KeptAttention(torch.autograd.Function):
    """Keeps the same tensors as fused attention. (N, heads, T, D) queries -> (N, T, heads, D_v)"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)  # strides of the queries, as in torch's own kernels
        if value.shape[-1] != query.shape[-1]:
            output = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output.transpose(1, 2)


def _attend(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
    """Attention function for transformers. (N, heads, T, D) queries -> (N, T, heads, D_v)"""
    return _KeptAttention.apply(query, key, value), None  # type: ignore[no-untyped-call]


def _compute_experts(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Experts function for transformers. (T, H) and twice (T, k) -> (T, H)

    Which experts a token has is unknown on the meta device, and does not change the kept tensors.
    """

    def multiply(values: Tensor, stack: Tensor) -> Tensor:
        return values @ (stack[0] if experts.is_transposed else stack[0].T)

    rows = hidden.repeat_interleave(index.shape[-1], 0)  # (T * k, H)
    if experts.has_gate:
        inner = experts._apply_gate(multiply(rows, experts.gate_up_proj))
    else:
        inner = experts.act_fn(multiply(rows, experts.up_proj))
    output = multiply(inner, experts.down_proj) * weights.reshape(-1, 1)
    return output.view(*index.shape, -1).sum(1).to(hidden.dtype)


AttentionInterface.register(KEPT, _attend)
ALL_EXPERTS_FUNCTIONS.register(KEPT, _compute_experts)


def count_model(values: JsonObject) -> ModelSpec:
    """The unnamed spec of the model of a config.json; for a model_type unknown to transformers,
    of a Llama of the same size.

    Raises KeyError for a size missing for such a Llama, else what transformers raises for values
    that it cannot build a model from.
    """
    model, guessed = _build_model(values)
    config, decoder = model.config.get_text_config(), model.get_decoder()
    layers = _largest_list(decoder.modules())
    head, table = model.get_output_embeddings(), model.get_input_embeddings().weight
    separate = 0 if head.weight is table else _count(head.parameters())
    tower = _count_tower(model, decoder, values)
    beside = 0 if tower is None else tower.tower_params + tower.projector_params
    body = _count(model.parameters()) - table.numel() - separate - beside
    used = getattr(config, "num_experts_per_tok", None) or 1
    config = (getattr(config, "per_layer_config", None) or [config])[0]
    heads = getattr(config, "num_attention_heads", None) or 0
    rows, hidden = head.weight.shape
    width = getattr(config, "head_dim", None) or hidden // max(heads, 1)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    never_shared = layout_support.why_not_shared(model, 1) is not None
    has_window = not never_shared and layout_support.why_not_shared(model) is not None

    def forward() -> None:
        decoder(input_ids=torch.zeros(1, TOKENS, dtype=torch.long, device="meta"), use_cache=False)

    return ModelSpec(
        name="",
        source="",
        context_length=None,
        sizes=ModelSizes(len(layers), hidden, heads, kv_heads, width, rows),
        linears=tuple(_sum_linears(layers)),
        embedding_params=table.numel(),
        head_params=separate,
        body_params=body,
        layer_params=max(_count(layer.parameters()) for layer in layers),
        active_params=body - _idle_expert_params(layers, used),
        layer_kept_bytes=_kept_bytes(model, layers, forward, 1 / len(layers)),
        transient_values=max(_transient_values(layer, hidden, used) for layer in layers),
        layout="packed" if never_shared else "shared",
        window=getattr(config, "sliding_window", None) if has_window else None,
        tower=tower,
        guessed=guessed,
    )


def _build_model(values: JsonObject) -> tuple[PreTrainedModel, bool]:
    """The model on the meta device, without dropout, and whether its family is a guess."""
    values = {k: v for k, v in values.items() if k not in NOT_READ}
    if guessed := values.get("model_type") not in CONFIG_MAPPING:
        text = values | (values.get("text_config") or {})
        needed = {name: text[name] for name in LLAMA_NEEDS}
        values = {"model_type": "llama"} | {k: text[k] for k in LLAMA_TAKES if k in text} | needed
    config = AutoConfig.for_model(**values)
    images = has_tower(values) and type(config) in AutoModelForImageTextToText._model_mapping
    auto_class: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    with torch.device("meta"):
        try:
            model = auto_class.from_config(config, attn_implementation=KEPT, dtype=torch.float32)
        except KeyError:  # older models have a class per attention
            model = auto_class.from_config(config, attn_implementation="eager")
    zero_dropout(model)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = KEPT
    return model.train(), guessed


def _largest_list(modules: Iterable[nn.Module]) -> nn.ModuleList:
    """The list of modules with the most parameters: a model's layers. Raises ValueError."""
    lists = [module for module in modules if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError("it has no list of layers")
    return max(lists, key=lambda found: _count(found.parameters()))


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _linears_of(layer: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The linear layers in a decoder layer, with their module paths."""
    for path, module in layer.named_modules():
        name = path.rpartition(".")[2]
        if isinstance(module, nn.Linear):
            yield path, Linear(name, module.in_features, module.out_features, 1)
        elif isinstance(module, Conv1D):
            yield path, Linear(name, module.nx, module.nf, 1)
        for part, weight in module.named_parameters(recurse=False):
            if weight.ndim == 3 and "experts" in path:
                inputs_first = weight if getattr(module, "is_transposed", False) else weight.mT
                experts, inputs, outputs = inputs_first.shape
                yield path, Linear(part, inputs, outputs, experts, True)


def _sum_linears(layers: Iterable[nn.Module]) -> Iterator[Linear]:
    """Linear layers of all decoder layers, grouped by name and shape."""
    found: Counter[Linear] = Counter()
    for layer in layers:
        for _, linear in _linears_of(layer):
            found[linear._replace(copies=1)] += linear.copies
    return (linear._replace(copies=copies) for linear, copies in found.items())


def _idle_expert_params(layers: Iterable[nn.Module], used: int) -> int:
    """Parameters of the experts that a token does not use."""
    linears = (linear for layer in layers for _, linear in _linears_of(layer) if linear.is_expert)
    return sum(max(x.copies - used, 0) * x.inputs * x.outputs for x in linears)


def _transient_values(layer: nn.Module, hidden: int, used: int) -> int:
    """Values per token in a layer's MLP while it computes, plus two hidden states.

    `used`: experts per token.
    """
    total = 2 * hidden
    for path, linear in _linears_of(layer):
        if "attn" not in path and "attention" not in path:
            width = linear.inputs if linear.outputs == hidden else linear.outputs
            total += width * (used if linear.is_expert else 1)
    return total


def _kept_bytes(
    model: nn.Module, layers: nn.ModuleList, forward: Callable[[], None], share: float
) -> tuple[float, float]:
    """Bytes per token kept by layers for a backward pass, times `share`: bfloat16, float32.

    `forward`: a forward of `TOKENS` tokens through them. If the model's own code cannot compute on
    meta tensors, the inputs and outputs of its linear layers are counted instead.
    """
    kept = []
    for dtype in DTYPES:
        model.to(dtype)
        try:
            total = _saved_bytes(model, layers, forward) / TOKENS
        except Exception:  # code that reads tensor values, or needs other arguments
            total = _bytes_of_linears(layers, dtype)
        kept.append(share * total)
    return kept[0], kept[1]


def _bytes_of_linears(layers: nn.ModuleList, dtype: torch.dtype) -> float:
    """Bytes per token of the inputs and outputs of these layers' linear layers."""
    each = (linear for layer in layers for _, linear in _linears_of(layer))
    return float(dtype.itemsize * sum(x.inputs + x.outputs for x in each))


def _saved_bytes(model: nn.Module, layers: nn.ModuleList, forward: Callable[[], None]) -> int:
    """Bytes that autograd saves inside the layers, without weights and shared inputs."""
    others = [*model.parameters(), *model.buffers()]
    held: dict[int, Tensor] = {}  # by storage: meta tensors have no address
    inside: list[nn.Module] = []

    def enter(layer: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        inside.append(layer)
        shared = [*arguments[1:], *(v for k, v in named.items() if k != "hidden_states")]
        others.extend(x for x in _pytree.tree_leaves(shared) if isinstance(x, Tensor))

    def leave(*_: Any) -> None:
        inside.clear()

    def note(tensor: Tensor) -> Tensor:
        if inside:
            held[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(leave).remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
        forward()
    known = {tensor.untyped_storage()._cdata for tensor in others}
    return sum(t.untyped_storage().nbytes() for key, t in held.items() if key not in known)


def _count_tower(
    model: PreTrainedModel, decoder: nn.Module, values: JsonObject
) -> TowerSpec | None:
    """The vision tower; None for a text model. Raises ValueError for one without layers."""
    if not has_tower(values):
        return None
    family, config = vision.family_of_model(model), model.config
    text = (decoder, model.get_output_embeddings(), model.get_input_embeddings())
    of_text = {id(p) for part in text for p in part.parameters()}
    apart = {n: p for n, p in model.named_parameters() if id(p) not in of_text}

    def count_named(modules: tuple[str, ...]) -> int:
        return _count(p for n, p in apart.items() if {*modules} & {*n.split(".")})

    of_decoder = {*decoder.modules()}
    layers = _largest_list(m for m in model.modules() if m not in of_decoder)
    patches, side = _patches_per_token(config)

    def forward() -> None:
        for layer in layers:
            _run_tower_layer(layer, config.vision_config)

    return TowerSpec(
        tower_params=_count(apart.values()) if family is None else count_named(family.towers),
        projector_params=0 if family is None else count_named(family.projectors),
        layers=len(layers),
        patches_per_token=patches,
        pixels_per_token=patches * side * side,
        patch_kept_bytes=_kept_bytes(model, layers, forward, 1.0),
    )


def _run_tower_layer(layer: nn.Module, config: Any) -> None:
    """A forward of `TOKENS` patches of one image. `config`: the tower's."""
    names = inspect.signature(layer.forward).parameters
    width = next(_linears_of(layer))[1].inputs
    heads = getattr(config, "num_heads", None) or config.num_attention_heads
    angles = torch.empty(TOKENS, width // heads, device="meta")
    hidden = torch.empty(
        TOKENS, width, device="meta", dtype=next(layer.parameters()).dtype, requires_grad=True
    )
    # The lengths of images must be real tensors.
    given = {"cu_seqlens": torch.tensor([0, TOKENS]), "position_embeddings": (angles, angles),
             "attention_mask": None}  # fmt: skip
    flat = "cu_seqlens" in names
    layer(hidden if flat else hidden[None], **{k: v for k, v in given.items() if k in names})


def _patches_per_token(config: Any) -> tuple[int, int]:
    """Patches of a tower per token of the language model, and a patch's side length."""
    tower = config.vision_config

    def whole(value: Any) -> int:  # a pair is square
        return int(value[0] if isinstance(value, list | tuple) else value)

    side, merge = whole(tower.patch_size), getattr(tower, "spatial_merge_size", None)
    if merge is not None:
        return int(merge) ** 2, side
    if (scale := getattr(config, "scale_factor", None)) is not None:
        return int(scale) ** 2, side
    if (ratio := getattr(config, "downsample_ratio", None)) is not None:
        return round(ratio**-2), side
    patches = (whole(tower.image_size) // side) ** 2
    return max(1, round(patches / (getattr(config, "mm_tokens_per_image", None) or patches))), side
