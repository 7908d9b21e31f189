"""The faces of other trainers: what was written for them trains here.

migrate/      reads their commands and configs, and writes recipes
trl           RLOOTrainer and GRPOTrainer with TRL's arguments, from Python
trl_callbacks transformers' callbacks, told of a run as plugin.Events are
trl_objects   what a TRL script passes as an object, as files and keys of a recipe
trl_results   a trainer's process, state and files, for scripts
trl_settings  TRL's configs as plain settings; trl_fields.txt has every field of them
"""
