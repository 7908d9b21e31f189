"""One of several ranks that does what a test's own function says: `fork_cases.on_ranks`."""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from rloo_cli.distributed.world import World


def main() -> None:
    """Meet the others, call the function, write down what it returns."""
    folder, spec = sys.argv[1:]
    file, _, name = spec.partition(":")
    sys.path.append(str(Path(file).parent))
    module = Path(file).stem
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    code = 1
    try:
        dist.init_process_group("gloo")
        group, patient = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
        world = World(rank, size, torch.device("cpu"), size, group, patient)
        found = getattr(importlib.import_module(module), name)(world)
        Path(folder, f"rank_{rank}.json").write_text(json.dumps(found))
        dist.barrier()  # nobody leaves while another one still asks it something
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
