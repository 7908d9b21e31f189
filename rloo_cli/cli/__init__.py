"""Verbs of the command line, one file or folder each; `main` dispatches to them.

answers         console output of verbs, and --json
compare/        rloo compare
completion      rloo completion
config          rloo config
docs            rloo docs
doctor          rloo doctor
eval            rloo eval
eval_target     what rloo eval evaluates: a recipe, run or checkpoint
fetch           rloo fetch
key_page        docs/keys.md: every key with type, default, meaning and reason
key_values      every key with its values, as JSON
ledger          rloo ledger
main            the command line: finds the verb, turns errors into exit codes
migrate         rloo migrate
multirun        --multirun: jobs, other sweepers and launchers, objective
plan            rloo plan, and train --dry-run
push            rloo push
recipes         rloo recipes
record          rloo record
replay          rloo replay
report          rloo report
reward/         rloo reward
runs            rloo runs
samples         rloo samples
slurm           rloo slurm
slurm_cluster   what the cluster offers
slurm_template  fill a batch script
supervised      rloo sft, rloo reward-model
sweep           rloo sweep
sync            rloo sync
top             rloo top
train           rloo train
verb_parser     one argparse parser of each verb
verbs           the verbs: their words, flags and examples
verify_resume   rloo verify-resume
vllm_serve      rloo vllm-serve
"""
