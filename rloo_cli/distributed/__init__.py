"""Several processes as one trainer.

Every rank knows a step's whole batch (ids, scores, advantages: small numbers); it samples, scores
and forwards its own share. So anything computed over a batch is the same on every rank, and that
code does not mention ranks: `world` has the few calls in which they communicate. How weights,
gradients and optimizer are spread is an `engine`; the loop does not know which one it has.

    device_count    how many GPUs and processes, without torch
    device_peaks    FLOP/s and bytes/s of GPUs by their data sheets
    engine          the engine protocol; one process, and ddp
    fsdp            FSDP2
    gather          whole weights of sharded models, unit by unit
    meta_load       models that are to be sharded: weights on rank 0, shells on all
    optimizer       optimizer, schedule, clipping, float32 masters
    paired_optimizer  two DeepSpeed engines' optimizers as one: policy and value model
    world           ranks, and their collectives
    zero            DeepSpeed ZeRO 1 to 3; the engine of each name
    zero_optimizer  DeepSpeed's optimizer behind ours

    overlap         copies of the model sum their gradients while backward still runs
"""
