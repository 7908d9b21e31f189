"""agent=rollout: episodes that a function of the user's plays.

generator     calls the function, and makes rollouts of what it returns
returned_rows checks what it returned
turn_sampler  what it samples turns with
"""
