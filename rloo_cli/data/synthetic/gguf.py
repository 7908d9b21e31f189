"""GGUF files as ordinary model folders: dequantized once to float32, and kept in the cache.

`transformers` reads the file and needs the package `gguf` for it. The conversion runs in a process
of its own, which can be given packages that are not installed here, and whose memory is free again
when it ends. A quantized weight is what its file says, to the last bit: float32 holds every value
that the formats of llama.cpp can express.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rloo_cli.data.cache import cached_folder, report_progress
from rloo_cli.utils.child_process import package_environment, python_command
from rloo_cli.utils.errors import MachineError, refuse

GGUF_MAGIC = b"GGUF"
INSTALL_HINT = "pip install 'rloo-cli[gguf]'"


def converted_gguf_folder(path: str) -> Path:
    """The model folder made from a GGUF file; made on first use, and again when the file changes.

    Raises MachineError if it is not a GGUF file or cannot be converted.
    """
    file = Path(path).expanduser().absolute()
    with file.open("rb") as content:
        if content.read(4) != GGUF_MAGIC:
            why = f"it does not begin with {GGUF_MAGIC.decode()}"
            fix = "name a whole GGUF file, or the folder of a model"
            refuse("model.path", f"{file} is not a GGUF file", fix, why, error=MachineError)
    status = file.stat()
    recipe = f"gguf-{file}-{status.st_size}-{status.st_mtime_ns}"
    report_progress(f"{file.name} is converted")
    return cached_folder(f"gguf-{file.stem}", recipe, lambda folder: convert_gguf(file, folder))


def convert_gguf(file: Path, folder: Path, packages: Sequence[Path] = ()) -> None:
    """Write the model and the tokenizer of a GGUF file into `folder`, as safetensors of float32.

    packages: folders in which the child process looks for packages first. Raises MachineError with
    the last line of what the child said.
    """
    environment = dict(os.environ) | package_environment()
    parts = [*map(str, packages), environment["PYTHONPATH"]]
    environment |= {"PYTHONPATH": os.pathsep.join(parts), "HF_HUB_OFFLINE": "1"}
    command = python_command("-m", "rloo_cli.data.synthetic.gguf", str(file), str(folder))
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        last_line = (child.stderr.strip().splitlines() or [f"exit {child.returncode}"])[-1]
        what = f"{file} cannot be converted into a model folder"
        fix = INSTALL_HINT if "gguf" in last_line and "install" in last_line else ""
        refuse("model.path", what, fix, last_line[:400], error=MachineError)


def _convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = str(file.parent), file.name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    # The model is dequantized now, and is saved as any other.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
