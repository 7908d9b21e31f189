"""Estimates what a run needs before it starts: memory of each rank, disk, tokens, steps and hours.

This is arithmetic on a checked config and on models' config.json. No weights are loaded and no
torch is imported, so that `rloo plan` answers in about a second on a machine without a GPU.

    plan_inputs     the run that is planned, in numbers
    device          what a GPU or a machine has
    duration        seconds and FLOP of a step
    machine_plan    the plan on this machine, and why it does not fit
    model_spec      parameters, layers, heads of a model from its config.json
    model_families  how each family's weights are counted; a table of known models
    overlap_times   seconds of a step under each generation.overlap
    peak_memory     activations and buffers at their peak
    plan            the whole plan, and which keys to change
    static_memory   weights, gradients, optimizer state, reference
    text            the plan as text
    vision_tower    a vision tower's parameters, and what an image costs
    vllm_memory     memory of vLLM's engine
"""
