"""What the package is made of: the wheel's bill of materials, the audit of what is installed."""

import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from audit import audit_packages
from sbom import ROOT, SBOM_FILE, bill_of_materials, sbom_text


def test_the_bill_of_materials_is_that_of_pyproject() -> None:
    assert SBOM_FILE.read_text() == sbom_text(), "make sbom"


def test_the_bill_names_every_dependency_with_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bill = bill_of_materials({"project": project})
    by_name = {entry["name"]: entry for entry in bill["components"]}
    assert len(by_name) == len(bill["components"]) > 30
    ranges = {p["name"]: p["value"] for p in by_name["hydra-core"]["properties"]}
    assert ranges == {"rloo:range": "<1.4,>=1.3.6"} and by_name["hydra-core"]["scope"] == "required"
    assert by_name["vllm"]["scope"] == "optional" and by_name["vllm"]["purl"] == "pkg:pypi/vllm"
    assert len(bill["dependencies"][0]["dependsOn"]) == len(by_name)
    assert bill["metadata"]["component"]["version"] == project["version"]


@pytest.mark.slow
def test_a_wheel_carries_the_bill_in_its_metadata(tmp_path: Path) -> None:
    words = ["--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run([sys.executable, "-m", "build", *words], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if "/sboms/" in n]
        assert name.endswith(f".dist-info/sboms/{SBOM_FILE.name}")
        assert json.loads(archive.read(name))["bomFormat"] == "CycloneDX"


WEAK = {"id": "GHSA-1", "fix_versions": ["2"]}
ANSWERS = {
    "nothing known": ({"dependencies": [{"name": "a", "version": "1", "vulns": []}]}, 0, "1 pack"),
    "a weakness": (
        {"dependencies": [{"name": "a", "version": "1", "vulns": [WEAK]}]}, 1, "GHSA-1, mended in 2"
    ),
    "it knows nobody": (
        {"dependencies": [{"name": "a", "skip_reason": "not found"}]}, 3, "knows none of the pack"
    ),
    "no database": (None, 3, "nothing was audited: pip-audit has no database here: no route"),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_an_audit_without_a_database_is_no_good_news(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, code, said = ANSWERS[case]
    program = tmp_path / "pip-audit"
    text = "" if answer is None else json.dumps(answer)
    program.write_text(f"#!/bin/sh\necho '{text}'\necho 'no route' >&2\nexit 1\n")
    program.chmod(0o755)
    assert audit_packages(str(program), str(tmp_path)) == code
    assert said in capsys.readouterr().out
    assert audit_packages(str(tmp_path / "none"), str(tmp_path)) == 3
