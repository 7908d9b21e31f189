"""The data: examples, prompts and their order, batches, and their layout for a forward pass.

batch           rollouts, groups and the batch of a step
bin_packing     which completions share a forward pass
dataset         find and open a data set's split, check its columns
filters         which examples are used: data.filter, data.streaming
mapping         data.map: a user's function that changes each example
mixture         several sources as one split: data.mixture
order           the order in which prompts are sampled
packing         lay groups out for a forward pass, and store what comes back
prompts         renders and tokenises the prompts of a split
rollout_files   the files of recorded rollouts: where they are, what their heads say
rollout_record  writes and reads the whole batch of a step
rollout_values  a rollout, or an episode with its turns, as plain values beside its tokens
segments        sums over segments, log-probabilities of targets
splits          the split that a run trains on, and its held-out sets
synthetic/      data and models that the project makes itself: make:NAME
tasks           procedural tasks of reasoning-gym: reasoning_gym:NAME
vocabulary      whether tokenizer, data and models have the same tokens
"""
