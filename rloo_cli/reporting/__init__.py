"""What a run writes and shows: metrics, log lines, the panel, curves, health rules.

conversation    the turns of an episode, as parts with a heading
curves          matplotlib curves of one run
display         a live panel, or plain lines
episode_metrics  the metrics of episodes: turns, calls, failures
eval_lines      the lines of metrics.jsonl that are evaluations
events          what a run tells code of the user's
health/         rules: what goes wrong in a run, how it shows, what to change
log             metrics.jsonl, samples, terminal
metrics_lines   reads metrics.jsonl, of a long run in little memory
panel           the panel, for a terminal or as SVG
prompt_ledger   the fate of every prompt, line by line
staleness_metrics  how old the weights were that sampled
statistics      intervals of scores and win rates, means over seeds, differences
token_strip     the tokens of a few samples, with their log-probabilities
trackers/       accelerate's trackers (wandb, tensorboard ...), in processes of their own
step_metrics    a step's metrics: rewards, advantages, speed, memory
update_metrics  metrics of an update, summed over its micro-batches
"""
