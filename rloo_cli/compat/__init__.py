"""Interfaces of other trainers: code and configs written for them train here.

migrate/      reads their commands and configs, and writes recipes
trl           RLOOTrainer and GRPOTrainer with TRL's arguments, from Python
trl_callbacks transformers' callbacks, notified like plugin.Events
trl_objects   objects that a TRL script passes, as files and keys of a recipe
trl_results   a trainer's process, state and files, for scripts
trl_settings  TRL's configs as plain settings; trl_fields.txt has every field of them
"""
