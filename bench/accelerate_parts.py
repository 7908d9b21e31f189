"""Which parts of accelerate give what ours give: each beside ours, on two gloo ranks.

    python bench/accelerate_parts.py

One row per part: equal or not, the figures, and the line of accelerate that decides it. Training
parts do two updates of SGD in float32 on one small model: first of three micro-batches, then of
one, with a factor on the gradient that is only known after the backward passes (what advantages
that are normalised over the step need), and with the gradient's norm looked at before the step.
"""

import contextlib
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

UPDATES, RATE, FACTOR = (3, 1), 0.1, 0.5
Row = tuple[str, str, str, str]  # part, equal or not, figures, the line that decides it
REPEATS = 200


def model() -> Qwen3ForCausalLM:
    """A small model, the same on every rank and each time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=128, **sizes, **heads)).float()


def losses(module: nn.Module, rank: int) -> Iterator[tuple[Tensor, bool]]:
    """Every micro-batch's loss, and whether it is the last of its update."""
    for update, count in enumerate(UPDATES):
        for number in range(count):
            torch.manual_seed(100 * update + 10 * number + rank)
            ids = torch.randint(0, 128, (2, 8))
            yield module(input_ids=ids, labels=ids).loss / count, number == count - 1


def alone() -> list[Tensor]:
    """The weights that one process comes to, with both ranks' micro-batches."""
    module = model()
    generators = [losses(module, rank) for rank in range(2)]
    for first, second in zip(*generators, strict=True):
        for loss, _ in (first, second):
            loss.backward()
        if first[1]:
            _sgd(module, 0.5 * FACTOR)
    return [p.detach().clone() for p in module.parameters()]


def _sgd(module: nn.Module, factor: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= RATE * factor * parameter.grad
            parameter.grad = None


def difference(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of any weight."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one call, of many."""
    call()
    start = time.perf_counter()
    for _ in range(REPEATS):
        call()
    return (time.perf_counter() - start) / REPEATS


def process_state(rank: int) -> Iterator[Row]:
    """Numbers and device, and who makes the process group."""
    from accelerate import PartialState

    state = PartialState(cpu=True, backend="gloo")
    found = state.process_index, state.num_processes, state.local_process_index
    equal = found == (rank, 2, rank)
    yield "process state", _said(equal), f"rank, size, local rank {found}", "state.py:315"
    same = state.device == torch.device("cpu")
    yield "device", _said(same), f"{state.device}; ours cpu", "state.py:843"


def object_collectives(rank: int) -> Iterator[Row]:
    """Values of every rank, and of rank 0."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list, gather_object

    from rloo_cli.distributed.world import World

    PartialState(cpu=True, backend="gloo")
    world = World(rank, 2, torch.device("cpu"), 2, dist.new_group(), dist.new_group())
    value = {"rank": rank, "text": "x" * 1000}
    equal = gather_object([value]) == world.gather(value)
    theirs, ours = seconds(lambda: gather_object([value])), seconds(lambda: world.gather(value))
    shown = f"{theirs * 1e6:.0f} us a call; ours {ours * 1e6:.0f}"
    yield "gather_object", _said(equal), shown, "operations.py:500"
    box = [value]
    broadcast_object_list(box)
    equal = box[0] == world.broadcast_from_rank0(value)
    theirs = seconds(lambda: broadcast_object_list([value]))
    ours = seconds(lambda: world.broadcast_from_rank0(value))
    shown = f"{theirs * 1e6:.0f} us a call; ours {ours * 1e6:.0f}"
    yield "broadcast_object_list", _said(equal), shown, "operations.py:695"
    # A wait for what rank 0 does alone may be longer than any other: a group of its own.
    patient = dist.new_group(timeout=timedelta(seconds=60))
    dist.barrier()
    if rank == 0:
        time.sleep(8)
    box, why = [value], ""
    try:
        dist.broadcast_object_list(box, 0, patient)
    except RuntimeError as error:
        why = str(error)
    yield "deadline of its own: our group", _said(not why), why or "waited 8 s", ""
    dist.barrier(patient)
    if rank == 0:
        time.sleep(8)
    try:
        broadcast_object_list([value])
    except RuntimeError:
        why = "gave up after the 5 s of the default group"
    yield "deadline of its own: accelerate", _said(not why), why, "operations.py:695"


def fsdp2(rank: int) -> Iterator[Row]:
    """Weights after two updates of unequal numbers of micro-batches."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    names = {"auto_wrap_policy": "transformer_based_wrap",
             "transformer_cls_names_to_wrap": ["Qwen3DecoderLayer"],
             "cpu_ram_efficient_loading": False}  # fmt: skip
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **names)
    given = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision="no",
                            device=torch.device("cpu"), is_main_process=rank == 0,
                            parallelism_config=None)  # fmt: skip
    module = fsdp2_prepare_model(given, model())
    for loss, last in losses(module, rank):
        loss.backward()
        if last:
            _sgd(module, FACTOR)
    found = [p.detach().full_tensor() for p in module.parameters()]
    apart = difference(found, alone())
    yield "fsdp2_prepare_model", _said(apart < 1e-6), f"{apart:.1e} from one process", ""


def deepspeed(rank: int) -> Iterator[Row]:
    """The same through accelerate's wrapper of DeepSpeed's engine."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from accelerate.utils import DeepSpeedEngineWrapper

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    module = model()
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2},
                "zero_allow_untested_optimizer": True, "gradient_clipping": 0.0}  # fmt: skip
    for how in ("ours: the engine driven directly", "DeepSpeedEngineWrapper", "late factor"):
        module = model()
        start = [p.detach().clone() for p in module.parameters()]
        inner = torch.optim.SGD(module.parameters(), lr=RATE)
        engine, *_ = deepspeed.initialize(
            model=module, optimizer=inner, config=settings, dist_init_required=False
        )
        wrapper, moved = DeepSpeedEngineWrapper(engine), 0.0
        for loss, last in losses(engine, rank):
            if how.startswith("ours"):
                engine.set_gradient_accumulation_boundary(last)
                engine.backward(loss * FACTOR)
                if last:
                    engine.step()
                continue
            wrapper.backward(loss * FACTOR, sync_gradients=last)
            if last and not moved:
                moved = difference([p.detach() for p in module.parameters()], start)
        if how == "late factor":
            why = "weights have moved when backward returns" if moved else "weights still stand"
            yield "factor and norm before the step", _said(not moved), why, "utils/deepspeed.py:281"
        else:
            apart = difference([p.detach() for p in module.parameters()], alone())
            figures = f"{apart:.1e} from one process"
            yield how, _said(apart < 1e-6), figures, "utils/deepspeed.py:267"


def _said(equal: bool) -> str:
    return "equal" if equal else "NOT equal"


PARTS = (process_state, object_collectives, fsdp2, deepspeed)


def work(rank: int, number: int, port: int, file: str) -> None:
    """Measure one part on one rank; rank 0 adds its rows to the file."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}  # fmt: skip
    os.environ.update({name: str(value) for name, value in here.items()})
    torch.set_num_threads(1)
    part = PARTS[number]
    dist.init_process_group("gloo", timeout=timedelta(seconds=5 if number == 1 else 60))
    with contextlib.redirect_stdout(sys.stderr):
        rows = list(part(rank))
    if rank == 0:
        with Path(file).open("a") as out:
            out.writelines("\t".join(row) + "\n" for row in rows)
    else:
        time.sleep(10)  # rank 0 waits for nobody: a part may have broken the group
    os._exit(0)


def main() -> None:
    import accelerate

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows")
        for number in range(len(PARTS)):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            mp.spawn(work, (number, port, str(file)), nprocs=2)
        rows = file.read_text().splitlines()
    table = Table(title=f"accelerate {accelerate.__version__}, torch {torch.__version__}, gloo")
    for name in ("part", "numbers", "seen", "decided by"):
        table.add_column(name)
    for row in rows:
        table.add_row(*row.split("\t"))
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
