"""Estimates what a run needs before it starts: memory of each rank, disk, tokens, steps and hours.

It is arithmetic on a checked config and on a model's counts. No weights are loaded. For the models
of `known_models.json` no torch is imported either: their plans take about a second. Any other model
is counted on torch's meta device.

    plan_inputs     the planned run, in numbers
    device          properties of a GPU or a machine
    duration        seconds and FLOP of a step
    machine_plan    the plan on this machine, and why it does not fit
    meta_model      counts a model on torch's meta device: parameters, autograd memory
    model_counts    counts of a model
    model_spec      a model's parameters, layers, heads; known_models.json: the built-in ones
    overlap_times   seconds of a step under each generation.overlap
    peak_memory     activations and buffers at their peak
    plan            the whole plan, and which keys to change
    static_memory   weights, gradients, optimizer state, reference
    text            the plan as text
    vllm_memory     memory of vLLM's engine
"""
