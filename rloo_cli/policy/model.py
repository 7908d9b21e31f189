"""Log-probabilities of completion tokens under a causal language model.

The head runs only on the positions that predict a completion token. The fused head
never computes their whole logits (`fused_head`); for tokens sampled from a part of the
vocabulary it computes only that part's logits (`masked_head`). With the model's own head, a
hook picks these positions out of the hidden states as they enter the output embedding, so
later changes to the logits (soft-capping) still happen. `layouts` decides which head and
which layout.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rloo_cli.data import packing, segments
from rloo_cli.data.batch import Group
from rloo_cli.data.media import Media, unseen_image
from rloo_cli.data.packing import GroupSlice, KeptIds, MicroBatch
from rloo_cli.data.vision_processor import VisionProcessor
from rloo_cli.policy import vision
from rloo_cli.policy.divergence import blockwise_jsd
from rloo_cli.policy.fused_head import token_logp
from rloo_cli.policy.masked_head import KeptLogits, kept_logprobs
from rloo_cli.policy.row_selection import select_rows
from rloo_cli.policy.shared_attention import SHARED_LAYOUT_ARGUMENT
from rloo_cli.utils.fault_injection import poison_tensor
from rloo_cli.utils.files import JsonObject

# Of tokens that stand for images: their probability is 0 in every dtype, and so is probability
# times logit, which -inf would make NaN.
NEVER_SAMPLED_LOGIT = -1e4


class LogProbs(NamedTuple):
    """Results per completion token of a micro-batch, in float32."""

    logp: Tensor  # (N,) at the sampling temperature
    kl_logp: Tensor | None  # (N,) at the KL's own temperature; None = the same
    entropy: Tensor | None  # (N,) in nats, without gradient
    divergence: Tensor | None = None  # (N,) from the teacher, with gradient; None = no teacher


class TeacherLogits(NamedTuple):
    """A teacher's logits for every completion token of a micro-batch."""

    logits: Tensor  # (N, V)
    beta: float  # its share of the mixture (`divergence.generalized_jsd`)


class PlainSequence(NamedTuple):
    """One prompt with its images and a completion, in the form of the model's own forward."""

    input_ids: Tensor  # (1, T)
    media: Media


def own_inputs(sequence: Tensor | PlainSequence) -> JsonObject:
    """The arguments of the model's forward, which runs the tower and computes positions itself."""
    if isinstance(sequence, Tensor):
        return {"use_cache": False, "input_ids": sequence}
    ids, media = sequence
    inputs: JsonObject = {n: t.to(ids.device) for n, t in media.tensors.items()}
    inputs |= {"use_cache": False, "input_ids": ids}
    types = (ids == media.vision.image_token_id).int()
    if media.vision.family.axes > 1:
        inputs["mm_token_type_ids"] = types
    if media.vision.family.two_way_images:
        inputs["token_type_ids"] = types
    return inputs


class LogprobModule(nn.Module):
    """Backbone and head in one module, which a parallel engine wraps.

    With `use_fused_head` the head is computed in tiles instead of by the model's own forward. Up to
    `keep_logits_bytes` of logits are kept for the backward pass, which recomputes the others.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.use_fused_head, self.keep_logits_bytes, self.logit_scale = False, 0, 1.0
        self.float32_head = False  # `model.lm_head_fp32`
        self.entropy_grad = False  # the loss has an entropy bonus: never with a fused head
        self.head: nn.Module = model.get_output_embeddings()
        self.never_sampled = sorted(vision.image_token_ids(model.config))
        self.names_position_ids, self.takes_position_ids = position_ids_support(model)

    def forward(
        self,
        micro_batch: MicroBatch | Tensor | PlainSequence,
        temperatures: Sequence[float],
        want_entropy: bool,
        teacher: TeacherLogits | None = None,
    ) -> Tensor | tuple[list[Tensor], Tensor | None, Tensor | None]:
        """log p of the completion tokens at each temperature; entropy at the first. (N,) each

        For tokens with a sampling mask both refer to the distribution over its ids.

        With a teacher also the divergence from it, at the last temperature, with gradient. It needs
        whole logits, so the head must not be fused.

        Given ids (1, T) instead of a micro-batch, or with images a `PlainSequence`, return the
        model's own logits (1, T, V). A sharded model must always be called through this module,
        which gathers its weights.
        """
        if not isinstance(micro_batch, MicroBatch):
            return self._sampled_logits(self.model(**own_inputs(micro_batch)).logits)
        if self.use_fused_head:
            assert teacher is None, "a divergence needs whole logits"
            return *self._fused_results(micro_batch, temperatures, want_entropy), None
        logits = self.logits(micro_batch)
        divergence = None
        if teacher is not None:
            divergence = blockwise_jsd(logits, teacher.logits, temperatures[-1], teacher.beta)
        if (kept := micro_batch.kept) is not None:
            chosen = logits[kept.token, kept.ids].float()
            return *self._kept_results(chosen, kept, temperatures, want_entropy), divergence
        logp = [segments.target_logprobs(logits, micro_batch.target, t) for t in temperatures]
        if self.entropy_grad and torch.is_grad_enabled():
            return logp, segments.token_entropy(logits, temperatures[0]), divergence
        if not want_entropy:
            return logp, None, divergence
        with torch.no_grad():
            entropy = segments.token_entropy(logits.detach(), temperatures[0])
        return logp, entropy, divergence

    def _fused_results(
        self, micro_batch: MicroBatch, temperatures: Sequence[float], want_entropy: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """log p at each temperature, entropy at the first, without whole logits. (N,) each"""
        states = self.model.base_model(**self._forward_inputs(micro_batch))[0]
        states, rows = states.reshape(-1, states.shape[-1]), micro_batch.logit_index
        head, kept = cast(nn.Linear, self.head), micro_batch.kept
        bias = self._head_bias(head)

        def tiles(hidden: Tensor) -> list[tuple[Tensor, Tensor | None]]:
            return [
                token_logp(
                    hidden, head.weight, micro_batch.target, bias=bias, scale=self.logit_scale,
                    temperature=t, want_entropy=want_entropy and not i, float32=self.float32_head,
                    keep_bytes=self.keep_logits_bytes // len(temperatures), row_index=rows,
                )
                for i, t in enumerate(temperatures)
            ]  # fmt: skip

        def kept_rows(hidden: Tensor) -> Tensor:
            assert kept is not None
            hidden = select_rows(hidden, rows, torch.float32)
            chosen: Tensor = KeptLogits.apply(hidden, head.weight, head.bias, kept)
            return chosen * self.logit_scale

        with replaced_forward(head, tiles if kept is None else kept_rows):
            results = head(states)
        if kept is not None:
            return self._kept_results(results, kept, temperatures, want_entropy)
        return [result[0] for result in results], results[0][1]

    def _kept_results(
        self, chosen: Tensor, kept: KeptIds, temperatures: Sequence[float], want_entropy: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """The same over only the kept ids, from their logits `chosen` (M,). (N,) each"""
        found = [kept_logprobs(chosen / temperature, kept) for temperature in temperatures]
        entropy = found[0][1]
        if not (self.entropy_grad and torch.is_grad_enabled()):
            entropy = entropy.detach()
        needed = want_entropy or entropy.requires_grad
        return [logp for logp, _ in found], entropy if needed else None

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        """Logits that predict a completion token, by the model's own head. -> (N, V)"""
        with head_on_positions(self.head, micro_batch.logit_index):
            logits: Tensor = self.model(**self._forward_inputs(micro_batch)).logits
        return self._sampled_logits(logits.squeeze(0))

    def _sampled_logits(self, logits: Tensor) -> Tensor:
        """Logits of a distribution without tokens that stand for images. (..., V) -> (..., V)"""
        if not self.never_sampled:
            return logits
        index = torch.tensor(self.never_sampled, device=logits.device)
        return logits.index_fill(-1, index, NEVER_SAMPLED_LOGIT)

    def _head_bias(self, head: nn.Linear) -> Tensor | None:
        """The head's bias, with a large negative one for tokens that are never sampled. (V,)"""
        if not self.never_sampled:
            return cast(Tensor | None, head.bias)
        size, weight = weight_shape(head.weight)[0], head.weight
        without = self._sampled_logits(torch.zeros(size, dtype=weight.dtype, device=weight.device))
        return without if head.bias is None else head.bias + without

    def _forward_inputs(self, micro_batch: MicroBatch) -> JsonObject:
        inputs = forward_inputs(micro_batch, self.takes_position_ids)
        if (media := micro_batch.media) is not None:
            with replaced_forward(
                self.model.base_model, lambda: vision.image_vectors(self.model, media)
            ):
                vectors = self.model.base_model()
            inputs |= vision.media_arguments(self.model, media, vectors)
        return inputs


def position_ids_support(model: PreTrainedModel) -> tuple[bool, bool]:
    """Whether a module's forward names `position_ids`, and whether it accepts them at all."""
    parameters = inspect.signature(model.forward).parameters
    is_named = "position_ids" in parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return is_named, is_named or takes_any


def forward_inputs(micro_batch: MicroBatch, takes_position_ids: bool) -> JsonObject:
    """The arguments of the model's, or its backbone's, forward for a micro-batch."""
    inputs: JsonObject = {"input_ids": micro_batch.input_ids, "use_cache": False}
    if takes_position_ids:
        inputs["position_ids"] = micro_batch.position_ids
    if micro_batch.attention_mask is not None:
        inputs["attention_mask"] = micro_batch.attention_mask
    if micro_batch.shared_layout is not None:
        inputs[SHARED_LAYOUT_ARGUMENT] = micro_batch.shared_layout
    return inputs


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Let calls of the module run this function inside.

    A parallel engine that gathers a module's weights at each call does so for these calls too.
    """
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


@contextmanager
def head_on_positions(head: nn.Module, positions: Tensor) -> Iterator[None]:
    """Let the output embedding compute only these positions of the hidden states. (N,)"""

    def pick(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0]
        return (select_rows(hidden.reshape(-1, hidden.shape[-1]), positions)[None], *args[1:])

    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


class Policy:
    """A causal language model as a distribution over completions, at one temperature.

    `kl_temperature`: that of the KL, if it is another one. `device`: where it computes, if its
    weights are not there yet.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        kl_temperature: float | None = None,
        device: torch.device | None = None,
    ):
        self.model = model
        self.logprob_module = LogprobModule(model)
        self.call: nn.Module = self.logprob_module  # or an engine around it
        self.dtype: torch.dtype = next(model.parameters()).dtype  # of its products
        self.meta_weights: Any = None  # `distributed.gather`, if the model has no weights yet
        self.gather_weights: Any = None  # gathers all weights if no rank has them whole
        self._device = device
        self.temperature = temperature
        self.kl_temperature = temperature if kl_temperature is None else kl_temperature
        self.layout = "padded"  # until `layouts` finds a better one
        # The teacher of whole distributions, and its share of the mixture; None = no teacher.
        self.teacher: tuple[Policy, float] | None = None
        self.image_examples: list[Group] = []  # prompts with images, for the check of layouts
        self.vision: VisionProcessor | None = None  # of episodes' images
        # Shows the tower an image in text micro-batches, if ranks synchronize in every forward.
        self.blank_vision: VisionProcessor | None = None

    @property
    def device(self) -> torch.device:
        return self._device or next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens in the embedding."""
        return weight_shape(self.model.get_input_embeddings().weight)[0]

    @property
    def names_position_ids(self) -> bool:
        """Whether the model's forward names `position_ids`."""
        return self.logprob_module.names_position_ids

    def pack(
        self,
        groups: Sequence[Group],
        group_slices: Sequence[GroupSlice],
        masked: Tensor | None = None,
    ) -> MicroBatch:
        """Pack these completions in this model's layout, on its device."""
        micro_batch = packing.pack_micro_batch(
            groups, group_slices, masked, self.device, self.layout, True, self.vision
        )
        if micro_batch.media is None and self.blank_vision is not None:
            micro_batch.media = unseen_image(self.blank_vision, micro_batch.input_ids)
        return micro_batch

    def logp(self, micro_batch: MicroBatch, want_entropy: bool = False) -> LogProbs:
        """Log-probabilities of the completion tokens, with gradient; entropy if wanted."""
        apart = self.kl_temperature != self.temperature
        temperatures = [self.temperature, *([self.kl_temperature] if apart else [])]
        arguments = [micro_batch, temperatures, want_entropy]
        if self.teacher is not None and torch.is_grad_enabled():
            teacher, beta = self.teacher
            arguments.append(TeacherLogits(teacher.frozen_logits(micro_batch), beta))
        logp, entropy, divergence = self.call(*arguments)
        kl_logp = logp[1] if apart else None
        return LogProbs(poison_tensor("logp", logp[0]), kl_logp, entropy, divergence)

    @torch.no_grad()
    def frozen_logp(self, micro_batch: MicroBatch) -> LogProbs:
        """As `logp`, in eval mode and without gradient, as the reference needs it."""
        with in_eval_mode(self.model):
            return self.logp(micro_batch)

    @torch.no_grad()
    def frozen_logits(self, micro_batch: MicroBatch) -> Tensor:
        """Logits of a micro-batch's completion tokens, in its layout and eval mode. -> (N, V)"""
        with in_eval_mode(self.model):
            return self.logprob_module.logits(micro_batch)


@contextmanager
def in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Keep the model in eval mode inside: without dropout, and with a cache, which gradient
    checkpointing turns off in training mode."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def uncompiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Let layers that train.compile has compiled run uncompiled inside: a sampler's calls of one
    token, whose keys grow with each, would compile them again."""
    compiled = [(m, call) for m in model.modules() if (call := m._compiled_call_impl) is not None]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def weight_shape(weight: Tensor) -> tuple[int, ...]:
    """The shape of a weight, also of one that DeepSpeed has partitioned."""
    return tuple(getattr(weight, "ds_shape", weight.shape))
