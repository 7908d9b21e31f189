"""The switches and the arithmetic that algorithms share.

advantage           baselines, scaling, normalising
aggregate           token terms to one loss, and its denominator
base                the class Algorithm and its hooks
config              every shared switch; loss types written out
dialect             other trainers' constants
forward_plan        which forward passes a config needs
importance_weights  correction of the sampler's mismatch
kl                  KL estimators, and where the KL goes
lagging             what completions of older weights allow (generation.overlap)
loss                the loss of a micro-batch
loss_types          the terms of CISPO, SAPO, VESPO
policy_loss         ratios, clipping, their metrics
rules               choices that do not go together
score               several rewards to one score; penalties, clips
siblings            what compares siblings, where there are too few
teacher_rules       what a teacher's server can be asked for (opd)
token_advantage     an advantage per token
turn_credit         rewards of an episode's turns
"""
