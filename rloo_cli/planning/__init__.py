"""What a run will take, told beforehand: memory of each rank, disk, tokens, steps and hours.

Arithmetic on a checked config and on models' config.json. No weights are loaded and no torch is
imported, so that `rloo plan` answers in about a second on a machine without a GPU.
"""
