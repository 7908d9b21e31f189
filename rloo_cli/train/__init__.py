"""The loop and what it is made of.

advantages        no-grad passes before an update: old/ref logprobs, KL, reward, advantage; also
between_steps     between-step hook: eval, checkpoint, stop?, sweep turn
build             a config to a Run: data, rewards, tokenizer, then the model
build_model       its second half: model, engine, generator, layouts
guards            pre-update checks: finite, sampler mismatch, nothing to learn
loop              THE LOOP
memory_check      predicted against measured memory at the end of a run
minibatches       split a batch into updates and micro-batches
summary           summary.json + end-of-run table
supervised/       supervised fine-tuning and reward models
sweep_turns       worker side of sweep time-sharing
token_advantages  per-token advantages (PPO, REINFORCE++) and the value-model update
worker            the process of one rank
"""
