"""All that knows vLLM: its arguments, its server, its weight transfer, and how it is asked.

    arguments   a run's config -> the arguments of a vLLM engine            no torch, no vLLM
    server      the process of `rloo vllm-serve`: vLLM's own API server behind our guard
    child       the process of a colocated engine
    plugin, receive   what runs inside vLLM's own processes
    generator   the `Generator`: requests out, rollouts in, and the truth about weights
    remote, colocated   the two kinds of `Engine` that it speaks to

Only `server`, `child`, `plugin` and `receive` import vLLM; a trainer never does, except for NCCL
and CUDA IPC, whose sending halves are vLLM's.
"""
