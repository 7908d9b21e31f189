"""A run's output: metrics, log lines, the panel, curves, health rules.

conversation    the turns of an episode, as parts with a heading
curves          matplotlib curves of one run
display         a live panel, or plain lines
episode_metrics  the metrics of episodes: turns, calls, failures
eval_lines      the lines of metrics.jsonl that are evaluations
events          callbacks: user code that is notified of a run's events
health/         rules: what can go wrong in a run, its symptoms, what to change
log             metrics.jsonl, samples, terminal
metrics_lines   reads metrics.jsonl with little memory, even of a long run
panel           the panel, for a terminal or as SVG
prompt_ledger   the fate of every prompt, line by line
staleness_metrics  the age of the weights that sampled
statistics      intervals of scores and win rates, means over seeds, differences
target          the held-out score that ends a run, and the clock until then
token_strip     the tokens of a few samples, with their log-probabilities
trackers/       accelerate's trackers (wandb, tensorboard ...), in separate processes
step_metrics    a step's metrics: rewards, advantages, speed, memory
update_metrics  metrics of an update, summed over its micro-batches
"""
