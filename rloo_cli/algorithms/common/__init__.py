"""The switches and the arithmetic that algorithms share.

base                the class Algorithm and its hooks
completion_rules    rules about a step's completions: siblings, turns, older weights
config              every shared switch; loss types written out
dialect             other trainers' constants
family              KL, advantages and loss with every switch; `rloo.py` has them without
forward_plan        which forward passes a config needs
hooks               what hooks are given and return
importance_weights  correction of the sampler's mismatch
rules               choices that do not go together
score               several rewards to one score; penalties, clips
teacher_rules       what a teacher's server can be asked for (opd)
token_advantage     an advantage per token; rewards of an episode's turns
"""
