"""The loop and what it is made of.

advantages        forward passes without gradient before an update, and its advantages
between_steps     what happens between two steps: log, evaluation, checkpoint, stop
build             from a config to a Run: data, rewards, tokenizer
build_model       the second half of it: model, engine, generator, layouts
guards            checks before an update: finite numbers, sampler, something to learn
loop              THE LOOP
memory_check      predicted against measured memory at the end of a run
minibatches       splits a batch into updates and micro-batches
summary           summary.json, and the table at the end of a run
supervised/       supervised fine-tuning and reward models
sweep_turns       a member's side of a sweep's turns
token_advantages  advantages of each token (PPO, REINFORCE++), and the update of the value model
worker            the process of one rank
"""
