"""The reward `contains`."""

from rloo_cli.rewards.contains import Config, score

COMMON = {"weight": 1.0, "timeout_s": 1.0, "retries": 0, "on_error": "raise", "scope": "batch"}
COMMON |= {"max_error_rate": 0.2, "nan_is_none": False, "only": {}, "workers": 0, "cache": False}
CONFIG = Config(type="contains", column="keywords", ignore_case=True, **COMMON)


def test_contains_is_the_share_of_the_wanted_strings():
    columns = {"keywords": [["blue", "Sky"], "green", None]}
    assert score(["The sky is blue", "red", "red"], columns, CONFIG) == [1.0, 0.0, None]
