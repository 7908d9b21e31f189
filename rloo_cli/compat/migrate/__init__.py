"""Reads commands, configs and scripts of other trainers, and writes recipes that mean the same.

agent      writes the tools and environments of an old run
batch      writes how much an old run did
commands   converts commands that serve or evaluate
convert    converts an old run, once it is read, to the text of a recipe
foreign    refuses a trainer whose runs are recognised and not converted: ms-swift's Megatron
foreign_recipe  writes what OpenRLHF's and verl's runs have in common
foreign_run     reads their commands, scripts and configs
foreign_table   reads foreign_names.txt: each of their settings, and what becomes of it
model      writes the model of an old run
objective  writes what an old run optimised
openrlhf   writes the recipe of an OpenRLHF run
old_run    holds what was read of an old run
parse      reads the old settings from what `rloo migrate` is given
python     reads the old settings in a Python training script
recipe     holds the recipe that `rloo migrate` writes
sections   writes an old run's data, rewards, generation and folders
shell      reads shell scripts as bash does
tables     lists what other trainers call their settings, and their defaults
verl       writes the recipe of a verl run
"""
