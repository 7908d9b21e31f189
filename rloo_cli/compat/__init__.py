"""The faces of other trainers: what was written for them trains here.

migrate/      reads their commands, configs and scripts, and writes recipes
trl           RLOOTrainer and GRPOTrainer with TRL's arguments, from Python
trl_objects   what a TRL script passes as an object, as files and keys of a recipe
trl_settings  TRL's configs as plain settings
"""
