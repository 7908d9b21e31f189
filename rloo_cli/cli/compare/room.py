"""Runs side by side: reading them, grouping them, what can be said of them, charts and tables."""
