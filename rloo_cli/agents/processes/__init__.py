"""Where tools and environments run: processes that may be killed at any time.

nursery    forks a process for each caller, with the user's code imported already
tool_pool  the parent's side: processes, deadlines, kills
worker     answers calls in such a process
"""
