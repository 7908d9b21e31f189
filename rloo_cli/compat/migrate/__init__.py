"""Reads commands and configs of TRL and ms-swift, and writes recipes that mean the same.

table      the old settings whose value changes with the name; the names are in config/old_names.txt
versions   the old tools' defaults by version, and detection of an old run's version
scripts    settings hard-coded in TRL's own scripts
read       reads the old settings: of one command, or of one YAML or JSON file
convert    converts an old run, once it is read, to the text of a recipe
batch      writes the batch, the length and the schedule of an old run
model      writes its model: path, adapter, quantized weights, a moving reference
objective  writes its objective and sampling
rules      writes its data, rewards, tools and folders
recipe     holds the recipe that `rloo migrate` writes, and applies the tables
commands   converts commands that serve or evaluate
other_trainers  refuses other trainers, scripts and notebooks, each with an alternative
"""
