"""All that knows vLLM: its arguments, its server, its weight transfer, and how it is asked.

    arguments   a run's config -> the arguments of a vLLM engine            no torch, no vLLM
    server      the process of `rloo vllm-serve`: vLLM's own API server behind our guard
    child       the process of a colocated engine
    plugin, receive   what runs inside vLLM's own processes
    generator   the `Generator`: requests out (`asking`), rollouts in
    supply      the truth about weights: what the engine has, and what it must have (`parity`)
    remote, colocated   the two kinds of `Engine`: over HTTP (`servers`, `wire`), over a `pipe`
    link, gloo, source  the sending end of a weight transfer
    versions    what vLLM before 0.32 has otherwise, or lacks                no torch, no vLLM

Only `server`, `child`, `plugin`, `receive` and what they ask of `versions` import vLLM; a trainer
never does, except for NCCL and CUDA IPC, whose sending halves are vLLM's.
"""
