"""agent=rollout: episodes that a user function plays.

generator     calls the function, and makes rollouts of its rows
returned_rows checks those rows
turn_sampler  the sampler that the function gets
"""
