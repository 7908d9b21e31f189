"""The model: loading it, and log-probabilities of completions under it.

classifier_forward  score by a sequence classifier's own forward
divergence          a student's distance from a teacher, over the whole vocabulary
flash_kernels       torch's flash kernels over segments
fused_head          log-probabilities without whole logits
layout_support      requirements of a layout on a model's code
layouts             choose padded, packed or shared by trying each
load                load models and tokenizers
lora                LoRA adapters
masked_head         log-probabilities over the ids that a sampler kept
memory              how many tokens fit a forward pass
model               the policy: log-probabilities of micro-batches
offload             move models and optimizer off the device and back
quantization        4- and 8-bit base weights
reference           the reference model: frozen, moving, offloaded, or the adapter's base
reward_adapter      load a reward model that is an adapter
reward_load         load a reward model
reward_scores       scores of a sequence classifier, packed
row_selection       pick rows of hidden states, with gradients added in float32
shared_attention    attention over a prompt that its completions share
token_budget        tokens per training forward: one rule for run and plan
value               PPO's value model
vision              images in a forward pass: the tower once for each prompt
"""
