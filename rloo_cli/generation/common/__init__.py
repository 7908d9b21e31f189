"""What every backend shares.

across_ranks   sampling and scoring shared over ranks
ahead          the next batch, drawn beside the update (overlap: ahead)
batch_source   where a step's batch comes from, and what ahead and carry share
carry          groups that continue under the next weights (overlap: carry)
forced_answers text that asks for an answer, where a completion does not end in time
open_groups    groups whose completions are being sampled
pacing         how many groups may be begun, so that no token is too old
rank0_proxy    ranks other than 0 ask rank 0's sampler
rollouts       prompts to a sampled and scored batch
stop_rule      where a completion ends
weights_check  whether the sampler had the trainer's weights
"""
