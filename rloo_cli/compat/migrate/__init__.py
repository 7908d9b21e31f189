"""Reads commands and configs of TRL and ms-swift, and writes recipes that mean the same.

table      the old settings whose value changes with the name; the names are in config/old_names.txt
versions   the old tools' defaults by version, and which version an old run was of
scripts    what TRL's own scripts set by themselves
read       reads the old settings: of one command, or of one YAML or JSON file
convert    converts an old run, once it is read, to the text of a recipe
batch, model, objective, rules   what becomes a key only together with other settings
recipe     holds the recipe that `rloo migrate` writes, and applies the tables
commands   converts commands that serve or evaluate
other_trainers  refuses other trainers, scripts and notebooks, each with what to do instead
"""
