"""Verbs of the command line, one file or folder each; `main` takes them off the command line.

compare/        rloo compare
completion      rloo completion
config          rloo config
doctor          rloo doctor
eval            rloo eval
eval_target     what rloo eval evaluates: a recipe, run or checkpoint
fetch           rloo fetch
hydra_app       a verb under Hydra: its flags, jobs and errors
json_answer     --json of verbs that say much while they work
key_page        docs/keys.md: every key with type, default, meaning and reason
key_values      every key with its values, as JSON
ledger          rloo ledger
main            the command line: verbs, Hydra
migrate         rloo migrate
multirun        Hydra's multirun: launchers, names, objective
plan            rloo plan, and train --dry-run
push            rloo push
recipes         rloo recipes
replay          rloo replay
report          rloo report
reward/         rloo reward
run_arguments   reads the arguments of a verb about a run
runs            rloo runs
samples         rloo samples
slurm           rloo slurm
slurm_cluster   what the cluster offers
slurm_template  fill a batch script
supervised      rloo sft, rloo reward-model
sweep           rloo sweep
sync            rloo sync
top             rloo top
verb_help       the help texts
verify_resume   rloo verify-resume
vllm_serve      rloo vllm-serve
"""
