"""`make audit`: known weaknesses of the packages that are installed beside this one, by pip-audit.

    python tests/house/audit.py PIP_AUDIT

pip-audit asks a database over the network. Exits with 1 where it knows of a weakness, with 3 where
the database cannot be had: nothing was audited then, which is not the same as nothing found.
"""

import json
import subprocess
import sys
import sysconfig
from typing import Any

FOUND, NOT_AUDITED = 1, 3
LIMIT_S = 600


def audit_packages(pip_audit: str, folder: str) -> int:
    """Print what is known of the packages in a folder. -> the exit code"""
    words = [pip_audit, "--path", folder, "--format", "json", "--progress-spinner", "off"]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
        packages: list[dict[str, Any]] = json.loads(ended.stdout)["dependencies"]
    except (OSError, ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        why = type(error).__name__
        if not isinstance(error, OSError | subprocess.TimeoutExpired):
            why = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1][:300]
        print(f"nothing was audited: pip-audit has no database here: {why}")
        return NOT_AUDITED
    skipped = [p["name"] for p in packages if "skip_reason" in p]
    if len(skipped) == len(packages):
        print("nothing was audited: pip-audit's database knows none of the packages here")
        return NOT_AUDITED
    weak = [(p, v) for p in packages for v in p.get("vulns", [])]
    for package, known in weak:
        fixed = ", ".join(known.get("fix_versions") or []) or "no version yet"
        print(f"{package['name']} {package['version']}: {known['id']}, mended in {fixed}")
    print(f"{len(packages) - len(skipped)} packages audited, {len(weak)} weaknesses known")
    if skipped:
        print(f"not known to the database: {', '.join(skipped)}")
    return FOUND if weak else 0


if __name__ == "__main__":
    sys.exit(audit_packages(sys.argv[1], sysconfig.get_paths()["purelib"]))
