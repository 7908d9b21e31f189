"""The loop and what it is made of.

advantages     forward passes without gradient before an update, and its advantages
between_steps  what happens between two steps: log, evaluation, checkpoint, stop
build          from a config to a Run: data, rewards, tokenizer, model, engine, generator
guards         checks before an update: finite numbers, sampler, something to learn
loop           THE LOOP
memory_check   predicted against measured memory and seconds at the end of a run
memory_errors  the message when memory runs out: phase, longest sequence, keys
minibatches    splits a batch into updates and micro-batches
step           the two kinds of update, their micro-batches and the optimizer step
summary        summary.json, and the table at the end of a run
supervised/    supervised fine-tuning and reward models
worker         the process of one rank
"""
