"""The switches and the arithmetic that algorithms share.

base                the class Algorithm and its hooks
completion_rules    rules about a step's completions: siblings, turns, older weights
config              every shared switch; presets of loss_type
dialect             other trainers' constants
family              KL, advantages and loss with every switch; `rloo.py` is the version without
forward_plan        which forward passes a config needs
hooks               inputs and outputs of the hooks
importance_weights  correction of the sampler's mismatch
rules               choices that do not go together
score               several rewards to one score; penalties, clips
teacher_rules       what a teacher's server supports (opd)
token_advantage     an advantage per token; rewards of an episode's turns
"""
