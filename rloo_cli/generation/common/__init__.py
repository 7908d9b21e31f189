"""What every backend shares.

across_ranks   sampling and scoring shared over ranks
rank0_proxy    ranks other than 0 ask rank 0's sampler
record_player  plays the completions that another run recorded
rollouts       prompts to a sampled and scored batch
stop_rule      where a completion ends
"""
