"""What an installed package needs here, as lines for `pip install --requirement`, but for some.

python tests/support/needs_of.py PACKAGE [LEFT_OUT ...]
"""

import sys
from importlib.metadata import requires

from packaging.requirements import Requirement


def needs(package: str, left_out: list[str]) -> list[str]:
    """The requirements whose markers hold here, without the packages `left_out`."""
    found = []
    for line in requires(package) or []:
        need = Requirement(line)
        if need.name in left_out or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        need.marker = None
        found.append(str(need))
    return found


if __name__ == "__main__":
    print("\n".join(needs(sys.argv[1], sys.argv[2:])))
