"""`make sbom`: the bill of materials that the wheel carries (PEP 770), as CycloneDX 1.6.

    python tests/house/sbom.py > rloo-cli.cdx.json

It names what pyproject.toml asks for, with its ranges and the extras that bring it. The package
bundles no code of others, so there is nothing else to name; what is installed somewhere is known
there alone (`pip inspect`, `make audit`). No time and no number of its own: equal inputs, equal
bytes.
"""

import json
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SBOM_FILE = ROOT / "rloo-cli.cdx.json"
NOT_SHIPPED = ("test", "bench")  # extras for those who work on the package


def bill_of_materials(pyproject: dict[str, Any]) -> dict[str, Any]:
    """The bill of a project, from the values of its pyproject.toml."""
    project = pyproject["project"]
    name, version = project["name"], project["version"]
    asked: dict[str, dict[str, Any]] = {}
    groups = {"": project["dependencies"]} | project["optional-dependencies"]
    for extra, texts in groups.items():
        for text in () if extra in NOT_SHIPPED else texts:
            requirement = Requirement(text)
            key = str(canonicalize_name(requirement.name))
            entry = asked.setdefault(key, _component(key, required=not extra))
            about = [("range", str(requirement.specifier) or "any"), ("extra", extra)]
            about.append(("marker", str(requirement.marker or "")))
            entry["properties"] += [
                {"name": f"rloo:{what}", "value": value} for what, value in about if value
            ]
    ours = {
        "type": "application", "bom-ref": f"pkg:pypi/{name}@{version}", "name": name,
        "version": version, "description": project["description"],
        "licenses": [{"license": {"id": project["license"]}}],
        "purl": f"pkg:pypi/{name}@{version}",
    }  # fmt: skip
    components = [asked[key] for key in sorted(asked)]
    links = [{"ref": ours["bom-ref"], "dependsOn": [entry["bom-ref"] for entry in components]}]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json", "bomFormat": "CycloneDX",
        "specVersion": "1.6", "version": 1, "metadata": {"component": ours},
        "components": components, "dependencies": links,
    }  # fmt: skip


def _component(name: str, required: bool) -> dict[str, Any]:
    return {
        "type": "library", "bom-ref": f"pkg:pypi/{name}", "name": name, "purl": f"pkg:pypi/{name}",
        "scope": "required" if required else "optional", "properties": [],
    }  # fmt: skip


def sbom_text() -> str:
    """The file as it has to be now."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return json.dumps(bill_of_materials(pyproject), indent=2) + "\n"


if __name__ == "__main__":
    print(sbom_text(), end="")
