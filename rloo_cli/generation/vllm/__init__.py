"""Everything about vLLM: its arguments, its server, its weight transfer, and its requests.

Only `server`, `child_process`, `group_route`, `plugin`, `receive` and what they ask of `versions`
import vLLM; a trainer never does, except for NCCL and CUDA IPC, whose sending halves are vLLM's.

    config           the keys of a vLLM engine, shared by server and colocated engine
    arguments        a run's config to the arguments of a vLLM engine; no torch, no vLLM
    model_runner     which of vLLM's model runners an engine uses; no torch, no vLLM
    versions         differences of vLLM before 0.28; no torch, no vLLM
    required_parts   what an untested vLLM must have, and what it lacks; no torch
    generator        the `Generator`: requests out, rollouts in
    sampling_params  the sampling parameters of a request
    weight_sync      which weights an engine has, and which it should have
    parity           trainer and engine compared on prompts of the data
    engine_images    images sent with a prompt, and the ids they must become
    engine           the interface of an engine, wherever it runs
    http_engine      rollout servers as an engine
    teacher          a served teacher's log-probabilities of given tokens
    http             HTTP to these servers
    discovery        which rollout servers a run uses, and the state each is in
    handshake        what trainer and server must agree on before weights are sent
    deadlines        waiting for another process
    child_engine     an engine on the trainer's own device, in a child process
    child_pipe       that child process and the one pipe to it
    child_main       the child's side
    transfer_send    the sending end of a weight transfer
    transfer_gloo    weights over gloo, for machines without GPUs
    weights          the trainer's weights, or its adapter, in the form an engine needs
    lora_slot        the engine's slot for the one trained adapter
    receive/         the receiving ends, inside vLLM's workers
    plugin           loaded by vLLM in each of its processes
    server           the process of `rloo vllm-serve`
    group_route      POST /rloo/generate: one request for a whole group
    auth             access control of a rollout server's routes
    server_file      server.json
"""
