"""Reads commands and configs of TRL and ms-swift, and writes recipes that mean the same.

agent      writes the tools and environments of an old run
batch      writes how much an old run did
commands   converts commands that serve or evaluate
convert    converts an old run, once it is read, to the text of a recipe
model      writes the model of an old run
objective  writes what an old run optimised
old_run    holds what was read of an old run
other_trainers  refuses other trainers, scripts and notebooks, each with what to do instead
parse      reads the old settings: of one command, or of one YAML or JSON file
recipe     holds the recipe that `rloo migrate` writes
sections   writes an old run's data, rewards, generation and folders
tables     lists what TRL and ms-swift call their settings, and their defaults
"""
