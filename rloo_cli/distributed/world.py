"""The collectives of ranks: a few calls with deadlines, which all ranks make in the same order.

If ranks fail, all ranks raise the first failing rank's error at their next collective. Plain
objects are sent pickled, only between processes of one run.

accelerate's PartialState decides who a rank is and which GPU is its own; it takes over the process
group created here, because a store that it creates listens on every interface (state.py:237).
Its object collectives are not used: they use the default group and its deadline
(utils/operations.py:500 and :695), but waiting for work that only rank 0 does needs a longer one.
Its state of a single process is not used either: a GPU has no number there (state.py:747). Line
numbers are those of accelerate 1.15.
"""

import contextlib
import os
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from rloo_cli.config.schema import DistributedConfig, GenerationConfig, RunConfig
from rloo_cli.config.teacher import TeacherConfig
from rloo_cli.distributed import device_count
from rloo_cli.utils import errors, heartbeat, signals
from rloo_cli.utils.environment import environment_number
from rloo_cli.utils.errors import (
    ConfigError,
    DataError,
    GenerationError,
    MachineError,
    NumbersError,
    Problem,
    RunError,
    Stopped,
    refuse,
)
from rloo_cli.utils.files import JsonObject

T = TypeVar("T")
# One of these is in torch's message if the other side of a collective is gone.
COLLECTIVE_ERRORS = (
    "gloo", "Gloo", "NCCL", "ProcessGroup", "Connection closed", "Connection reset", "Broken pipe",
)  # fmt: skip
RANK0_TIMEOUT_FACTOR = (
    4.0  # times a generation's own deadlines that the others wait for a rank that leads
)
STOP_POLL_INTERVAL_S = 1.0
# Pieces of work without a poll, however short they were: even if one suddenly takes a hundred times
# as long, the signal of a scheduler is still handled in time.
MAX_POLLS_SKIPPED = 32


class StopPoll:
    """Decides how often ranks ask each other whether one of them received a stop signal.

    A poll makes all ranks wait for the slowest, and a micro-batch may take only milliseconds. So
    ranks poll about once a second, and must agree without communication on the micro-batches
    between two polls: each poll gives all ranks the longest micro-batch of any rank, from which
    they compute how many come before the next poll. `clock`: in seconds, each rank's own.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.remaining = 0  # pieces of work before the next poll
        self.slowest_s = 0.0  # of a piece of work since the last poll, on this rank
        self.started_at: float | None = None  # of the current piece of work

    def is_due(self) -> bool:
        """Whether the ranks poll now, between two pieces of work."""
        now = self.clock()
        if self.started_at is not None:
            self.slowest_s = max(self.slowest_s, now - self.started_at)
        self.started_at = now
        self.remaining -= 1
        return self.remaining < 0

    def record_poll(self, slowest_s: float, frequent: bool) -> None:
        """Record a poll. `slowest_s`: the largest of all ranks.

        `frequent`: small pieces of work follow. Else the next poll is not skipped, because the
        duration of the next piece of work is unknown.
        """
        fits = int(STOP_POLL_INTERVAL_S / slowest_s) if slowest_s > 0 else 1
        self.remaining = (
            max(0, min(fits, MAX_POLLS_SKIPPED) - 1)
            if frequent and self.started_at is not None
            else 0
        )
        self.slowest_s, self.started_at = 0.0, self.clock() if frequent else None


@dataclass(frozen=True)
class World:
    """This process's rank, and the device that it computes on."""

    rank: int
    size: int
    device: torch.device
    local_world_size: int = 1  # ranks on this machine
    group: dist.ProcessGroup | None = None  # of CPU tensors, None with one rank
    long_timeout_group: dist.ProcessGroup | None = None  # for work that only rank 0 does
    stop_poll: StopPoll = field(default_factory=StopPoll)  # of `check_stop`

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a small tensor over all ranks; the same tensor with one rank."""
        if self.size == 1:
            return values
        total = values.detach().cpu()
        _run_collective("a sum", lambda: dist.all_reduce(total, group=self.group))
        return total.to(values.device)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank. Anything that can be pickled."""
        if self.size == 1:
            return [value]
        return [pickle.loads(data) for data in self._all_gather_bytes(pickle.dumps(value))]

    def run_on_all_ranks(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank. -> all results; raises the first failing rank's error"""
        if self.size == 1:
            return [work()]
        error: BaseException | None = None
        result, wrong = b"", None
        try:
            result = pickle.dumps(work())
        except Exception as raised:
            error, wrong = raised, _error_to_dict(raised)
        messages = [pickle.loads(m) for m in self._all_gather_bytes(pickle.dumps((result, wrong)))]
        _raise_first_error([w for _, w in messages], self.rank, error)
        return [pickle.loads(value) for value, _ in messages]

    def run_on_rank0(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0. -> its result on all ranks; raises its error on all ranks"""
        if self.size == 1:
            return work()
        message: tuple[T | None, JsonObject | None] | None = None
        error: BaseException | None = None
        if self.is_main:
            try:
                message = (work(), None)
            except Exception as raised:
                error, message = raised, (None, _error_to_dict(raised))
        value, wrong = cast(tuple[T, JsonObject | None], self.broadcast_from_rank0(message))
        _raise_first_error([wrong], self.rank, error)
        return value

    def rank0_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0, then on the others, which find its results in the cache.

        Raises rank 0's error on all ranks.
        """
        found: list[T] = []
        self.run_on_rank0(lambda: found.append(work()))
        return found[0] if found else work()

    def broadcast_from_rank0(self, value: object) -> Any:
        """Rank 0's value on all ranks. They wait for it as long as a generation may take."""
        if self.size == 1:
            return value
        box = [value]
        _run_collective(
            "rank 0's work", lambda: dist.broadcast_object_list(box, 0, self.long_timeout_group)
        )
        return box[0]

    def check_stop(self, frequent: bool = False, end_asked: bool = False) -> bool:
        """Raise Stopped on every rank if any of them received a stop signal.

        `frequent`: all ranks call this before each of many small pieces of work. They poll each
        other at the first one, and then about once a second. -> whether any rank passed
        `end_asked`: the training then ends as if this were its last step.
        """
        if self.size == 1:
            signals.raise_if_stopped()
            return end_asked
        if frequent and not self.stop_poll.is_due():
            return False
        asked = float(signals.stop_requested_at() is not None)
        flags = torch.tensor([asked, self.stop_poll.slowest_s, float(end_asked)]).double()
        _run_collective(
            "a signal", lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        )
        asked, slowest, ends = flags.tolist()
        self.stop_poll.record_poll(slowest, frequent)
        if asked:
            stopped = Stopped(f"stopped, because another rank got a signal: {signals.STOPPED_FIX}")
            try:
                signals.raise_if_stopped()
            except Stopped as found:
                stopped = found
            _mark_shared_error(stopped, is_remote=False)
            raise stopped
        return bool(ends)

    def rank_shard(self, count: int) -> range:
        """This rank's share of `count` consecutive items."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def _all_gather_bytes(self, message: bytes) -> list[bytes]:
        messages = [b""] * self.size
        _run_collective(
            "the others", lambda: dist.all_gather_object(messages, message, group=self.group)
        )
        return messages


def single_process_world(config: DistributedConfig) -> World:
    """One process and its device. Raises MachineError for a GPU that torch does not see."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    check_devices()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return World(rank=0, size=1, device=device)


def cpu_world() -> World:
    """A process that only saves."""
    return World(0, 1, torch.device("cpu"))


def join_world(run: RunConfig) -> World:
    """Join the process group described by RANK, WORLD_SIZE, MASTER_ADDR, ... in the environment.

    An engine other than `single` has a process group with one rank too. Raises GenerationError
    if some ranks do not join within distributed.timeout_s.
    """
    config, teacher = run.distributed, run.algorithm.teacher_server
    size = environment_number("WORLD_SIZE", 1)
    if config.engine == "single" and size == 1:
        return single_process_world(config)
    local_ranks = environment_number("LOCAL_WORLD_SIZE", 1)
    state, threads = join_process_group(config.timeout_s), torch.get_num_threads()
    device = state.device if torch.cuda.is_available() else torch.device("cpu")  # "cpu:0" there
    if config.threads is not None:
        threads = config.threads
    elif local_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:  # else each would use all cores
        threads = max(1, (os.cpu_count() or 1) // local_ranks)
    torch.set_num_threads(threads)
    if size == 1:
        return World(0, 1, device)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_s))
    long_wait_s = config.timeout_s + RANK0_TIMEOUT_FACTOR * _generation_timeout_s(
        run.generation, teacher
    )
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=long_wait_s))
    return World(state.process_index, state.num_processes, device, local_ranks, group, patient)


def join_process_group(timeout_s: float) -> PartialState:
    """Join the process group of RANK and WORLD_SIZE, unless this process is in one already.

    -> accelerate's state. The number of CPU threads is unchanged. Raises MachineError
    if torch does not see the GPUs, GenerationError if some ranks do not join within `timeout_s`.
    """
    check_devices()
    size, rank = environment_number("WORLD_SIZE", 1), environment_number("RANK", 0)
    on_gpu, threads = torch.cuda.is_available(), torch.get_num_threads()
    limit = timedelta(seconds=timeout_s)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if not dist.is_initialized():
        _run_collective(
            "all ranks at the start", lambda: _init_process_group(backend, rank, size, limit)
        )
    os.environ.setdefault("LOCAL_RANK", "0")  # for a single process without a number
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the number of threads, which the caller sets
        state = PartialState(cpu=not on_gpu, backend=None if on_gpu else "gloo")
    torch.set_num_threads(threads)
    return state


def join_ranks(run: RunConfig) -> World:
    """This process alone, or as a rank that one of rloo's verbs has started.

    For a single process `distributed.engine` is ignored.
    """
    if environment_number("WORLD_SIZE", 1) == 1:
        return single_process_world(run.distributed)
    heartbeat.start_heartbeat()
    return join_world(run)


def check_devices() -> None:
    """Raise MachineError if the machine has GPUs and torch sees none.

    Otherwise it would silently train on the CPU, a hundred times slower.
    """
    why = "" if torch.cuda.is_available() else device_count.hidden_gpu_evidence()
    if why:
        refuse(
            "distributed",
            "this machine has GPUs, but torch sees none of them",
            "install torch with CUDA; in Slurm srun --gpus-per-node=N (slurm.gpus_per_node=N);"
            " to train on the CPU: CUDA_VISIBLE_DEVICES= rloo ...",
            f"{why}; torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
            error=MachineError,
        )


def _init_process_group(backend: str, rank: int, size: int, timeout: timedelta) -> None:
    """Create the process group, with the store that the launcher set up."""
    if size == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    handle = os.environ.get("RLOO_STORE_FD")
    if handle is None and "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has a store already
        dist.init_process_group(backend, timeout=timeout)
        return
    host, port = os.environ["MASTER_ADDR"], environment_number("MASTER_PORT", 0)
    given: JsonObject = {}
    if rank == 0 and handle is not None:
        given = {"master_listen_fd": socket.socket(fileno=int(handle)).detach()}
    store = dist.TCPStore(
        host, port, size, rank == 0, timeout=timeout, wait_for_workers=False, **given
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _generation_timeout_s(generation: GenerationConfig, teacher: TeacherConfig | None) -> float:
    """Seconds that rank 0 may wait for its servers, by their own deadlines."""
    names = ("ready_timeout_s", "sync_timeout_s", "request_timeout_s", "reconnect_timeout_s")
    asked = (generation.own_keys, teacher)
    return sum(float(getattr(keys, name, 0.0)) for keys in asked for name in names)


def _run_collective(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        why = str(error).strip().partition("\n")[0][:300]
        raise rank_lost_error(f"waiting for {what}", why) from error


def rank_lost_error(where: str, why: str) -> GenerationError:
    """The error of a rank whose peers are gone, or do not answer within the deadline."""
    fix = "see each rank's log in this folder; distributed.timeout_s is the deadline"
    error = GenerationError(Problem("another rank stopped responding", where, why, fix))
    error.__dict__["lost"] = True
    return error


@contextlib.contextmanager
def explain_lost_ranks(where: str) -> Iterator[None]:
    """Turn torch's error of a collective into one that says that another rank is gone.

    `where`: what this rank was doing. Raises GenerationError.
    """
    try:
        yield
    except RuntimeError as error:
        if environment_number("WORLD_SIZE", 1) == 1 or not is_collective_error(error):
            raise
        raise rank_lost_error(where, str(error).strip().partition("\n")[0]) from error


def is_collective_error(error: RuntimeError) -> bool:
    """Whether this is torch's error for a collective whose other side is gone."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, dist.DistError) or any(w in str(error) for w in COLLECTIVE_ERRORS)


def is_rank_lost(error: BaseException) -> bool:
    """Whether this error means that other ranks are gone, so collectives are impossible."""
    return bool(error.__dict__.get("lost"))


def _error_to_dict(error: BaseException) -> JsonObject:
    """An error as plain values."""
    kinds = [k.__name__ for k in type(error).__mro__ if getattr(errors, k.__name__, None) is k]
    problems = [asdict(p) for p in error.problems] if isinstance(error, RunError) else []
    return {"kinds": kinds, "problems": problems, "text": f"{type(error).__name__}: {error}"}


def _raise_first_error(
    errors_by_rank: list[JsonObject | None], rank: int, local_error: BaseException | None
) -> None:
    """Raise the first failing rank's error; Stopped only if no rank has another error."""
    wrong = [(r, e) for r, e in enumerate(errors_by_rank) if e is not None]
    if not wrong:
        return
    real = [(r, e) for r, e in wrong if "Stopped" not in e["kinds"]] or wrong
    who, error = real[0]
    if who == rank and local_error is not None:
        _mark_shared_error(local_error, is_remote=False)
        raise local_error
    kind: Any = getattr(errors, next(iter(error["kinds"]), ""), RunError)
    why, fix = "no rank can continue without it", f"its traceback is in the log of rank {who}"
    problems = [Problem(**p) for p in error["problems"]] or [
        Problem(f"rank {who}: {error['text']}", f"rank {who}", why, fix)
    ]
    copy = kind(*problems)
    _mark_shared_error(copy, is_remote=True)
    raise copy


def _mark_shared_error(error: BaseException, is_remote: bool) -> None:
    """Mark an error that all ranks now raise. `is_remote`: it arose on another rank."""
    error.__dict__["everywhere"] = True
    error.__dict__["elsewhere"] = is_remote


def is_shared_error(error: BaseException) -> bool:
    """Whether all ranks raise this error, so that they can still run collectives."""
    return bool(error.__dict__.get("everywhere"))


def is_remote_error(error: BaseException) -> bool:
    """Whether the error is another rank's, which reports it."""
    return bool(error.__dict__.get("elsewhere"))


def is_printed_elsewhere(error: BaseException) -> bool:
    """Whether another rank prints this error: it arose there, or every rank finds the same."""
    alike = isinstance(error, ConfigError | DataError | NumbersError | Stopped)
    return is_remote_error(error) or (alike and environment_number("RANK", 0) > 0)
