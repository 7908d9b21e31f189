"""Values on the command line: escapes in double quotes are YAML's, a path may begin with ~."""

import pytest

from rloo_cli.config.compose import compose_config
from rloo_cli.utils.errors import ConfigError


def composed(override: str) -> object:
    """The value that an override gives its key."""
    key = override.partition("=")[0].split(".")
    value: object = compose_config(["+recipe=smoke", override]).values
    for part in key:
        assert isinstance(value, dict)
        value = value[part]
    return value


@pytest.mark.parametrize(
    ("override", "value"),
    [
        (r'data.template="Q: {prompt}\nA:"', "Q: {prompt}\nA:"),
        (r"data.template='Q: {prompt}\nA:'", r"Q: {prompt}\nA:"),
        (r'data.template="a\tb\\c"', "a\tb\\c"),
        (r'data.template="it\'s \"{prompt}\"\\"', 'it\'s "{prompt}"\\'),
        (r'data.template="{prompt} caf\u00e9"', "{prompt} café"),
        (r'generation.stop=["\n\n","Q: ", \'\n\']'.replace("\\'", "'"), ["\n\n", "Q: ", "\\n"]),
        ("root=~/runs", "~/runs"),
        ("root='~/runs'", "~/runs"),
    ],
)
def test_an_override_has_the_value_that_yaml_gives_the_same_text(
    override: str, value: object
) -> None:
    if r"\'" in override:
        override = override.replace(r"\'", "'")  # YAML has no escape for a single quote
    assert composed(override) == value


def test_an_escape_that_yaml_does_not_have_is_refused_with_both_ways_to_write_it() -> None:
    with pytest.raises(ConfigError) as refused:
        composed(r'data.template="\d {prompt}"')
    problem = refused.value.problems[0]
    assert "data.template" in problem.where and r"'\d {prompt}'" in problem.fix
