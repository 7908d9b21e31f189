"""What a run writes and shows: metrics, log lines, the panel, curves, advice."""
