"""What a GPU would still be doing: waits in the right order, and a thread's own GPU.

CUDA is a stand-in here that records what it is asked for.
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_cases import alone, step
from torch import nn

from rloo_cli.generation.vllm import deadlines, transfer_send
from rloo_cli.generation.vllm.deadlines import BackgroundCall
from rloo_cli.generation.vllm.transfer_send import MIN_BUFFER_BYTES, packing_buffer_bytes
from rloo_cli.generation.vllm.weight_sync import CountedWeightSource
from rloo_cli.generation.vllm.weights import GatheredWeightSource, ModelWeightSource
from rloo_cli.utils import device_waits
from rloo_cli.utils.errors import MachineError
from rloo_cli.utils.timers import DeviceClock, HostClock, StepTimer


class Gpu:
    """Stands in for torch.cuda: `log` has the waits, and whatever a test adds."""

    def __init__(self, number: int = 0):
        self.log: list[str] = []
        self.number = number  # of the thread that a test runs in
        self.set: list[int] = []

    def is_initialized(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        self.log.append("device")

    def current_stream(self) -> "Gpu":
        return self

    def current_device(self) -> int:
        return self.number

    def set_device(self, number: int) -> None:
        self.set.append(number)


class Stream(Gpu):
    def synchronize(self, *_: Any) -> None:
        self.log.append("stream")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A stand-in for CUDA, with its waits recorded."""
    found = Gpu(3)
    stream = Stream()
    stream.log = found.log
    for name in ("is_initialized", "synchronize", "current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return found


def test_the_device_is_waited_for_before_any_weight_is_read(gpu: Gpu) -> None:
    class Source:
        def metadata(self) -> list[Any]:
            return []

        def __iter__(self) -> Any:
            gpu.log.append("read")
            yield "weight", torch.zeros(1)

    assert [name for name, _ in CountedWeightSource(None, Source())] == ["weight"]
    assert gpu.log == ["device", "read"]


def test_a_gathered_unit_is_waited_for_before_it_is_read_and_before_it_is_let_go(gpu: Gpu) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    names = [name for name, _ in model.named_parameters()]

    def units() -> Any:
        for half in (names[:2], names[2:]):
            gpu.log.append("gathered")
            yield {name: torch.zeros(2) for name in half}
            gpu.log.append("let go")

    for _ in GatheredWeightSource(model, torch.float32, units):
        gpu.log.append("packed")
    unit = ["gathered", "stream", "packed", "packed", "device", "let go"]
    assert gpu.log == [*unit, *unit]


def test_weights_are_waited_for_that_were_taken_apart_on_another_stream(gpu: Gpu) -> None:
    for _ in ModelWeightSource(nn.Linear(2, 2), torch.float32):
        gpu.log.append("packed")
    assert gpu.log == ["stream", "packed", "packed"]


class Event:
    """Stands in for torch.cuda.Event on a GPU that needs `busy` seconds for what it is given.

    The host needs no time at all: it has queued everything before the GPU has done the first part.
    """

    busy = 0.0
    synchronized = 0

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = Event.busy

    def synchronize(self) -> None:
        Event.synchronized += 1

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end.at - self.at)


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    """A stand-in for CUDA's events, on a GPU that has done nothing yet."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.busy, Event.synchronized = 0.0, 0
    return Event


@pytest.mark.parametrize("micro_batches", [1, 7, 40])
def test_a_step_waits_for_the_device_once_and_each_phase_has_what_the_device_did_in_it(
    gpu: Gpu, event: type[Event], micro_batches: int
) -> None:
    clock = StepTimer(clock=DeviceClock())
    clock.step_started_at -= 1000.0  # what the host waits at the lap
    for _ in range(micro_batches):
        with clock.phase("update"):
            event.busy += 1.0
            with clock.phase("reference"):
                event.busy += 2.0
            event.busy += 4.0
        event.busy += 0.5  # of no phase
    with clock.phase("optimizer"):
        event.busy += 8.0
    assert event.synchronized == 0 and gpu.log == []
    times = clock.lap()
    assert event.synchronized == 1 and gpu.log == []
    assert times["time/update"] == pytest.approx(5.0 * micro_batches)
    assert times["time/reference"] == pytest.approx(2.0 * micro_batches)
    assert times["time/optimizer"] == pytest.approx(8.0)
    assert times["step_time"] == pytest.approx(1000.0, abs=5.0)
    assert "time/update" not in clock.lap() and event.synchronized == 2


def test_a_phase_that_fails_has_what_the_device_did_in_it(gpu: Gpu, event: type[Event]) -> None:
    clock = StepTimer(clock=DeviceClock())
    with contextlib.suppress(ValueError), clock.phase("update"):
        event.busy += 3.0
        raise ValueError
    event.busy += 1.0
    assert clock.failed_phase == "update" and clock.seconds == {"update": 3.0}
    assert clock.lap()["time/update"] == pytest.approx(3.0) and clock.seconds == {}


class CountedClock(HostClock):
    """Counts its marks, and how often they are read."""

    def __init__(self) -> None:
        self.marks = self.reads = 0

    def mark(self) -> float:
        self.marks += 1
        return super().mark()

    def seconds_between(self, marks: Sequence[float]) -> list[float]:
        self.reads += 1
        return super().seconds_between(marks)


@pytest.mark.parametrize("tokens", [10_000, 30])
def test_the_clock_of_a_step_is_read_once_however_many_micro_batches_there_are(
    tmp_path: Path, tokens: int
) -> None:
    run = alone(tmp_path, f"train.micro_batch_tokens={tokens}", "train.forward_all=true")
    run.clock.clock = counted = CountedClock()
    step(run)
    assert counted.reads == 1
    updates = run.clock.lap()
    assert counted.reads == 2 and "time/update" not in updates
    assert counted.marks < 30 if tokens == 10_000 else counted.marks > 30


def test_a_thread_that_sends_weights_has_the_gpu_of_its_rank(gpu: Gpu) -> None:
    assert deadlines.run_with_deadline(5, "work", lambda: 7) == 7
    BackgroundCall(lambda: None).wait()
    assert gpu.set == [3, 3]


def test_a_buffer_holds_the_largest_tensor_and_is_no_larger_than_it_must() -> None:
    small, large = nn.Linear(4, 4), nn.Module()
    assert packing_buffer_bytes(ModelWeightSource(small, torch.bfloat16)) == MIN_BUFFER_BYTES
    with torch.device("meta"):
        large.embedding_params = nn.Embedding(152064, 3584)  # Qwen2.5-7B's: above 1 GiB
        large.head_params = nn.Linear(8, 8)
    found = packing_buffer_bytes(ModelWeightSource(large, torch.bfloat16))
    assert found == 152064 * 3584 * 2 > 2**30


class Lost:
    """A link whose send is spinning on the GPU. `aborts`: whether `shutdown` ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, aborts: bool):
        self.over, self.aborts, self.waited = threading.Event(), aborts, 0
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(transfer_send, "SEND_ABORT_TIMEOUT_S", 0.3)
        monkeypatch.setattr(device_waits, "_device_timeouts", [])

    def synchronize(self) -> None:
        self.waited += 1
        assert self.over.wait(20)

    def send_weights(self) -> None:
        raise AssertionError("it is lost")

    def shutdown(self) -> None:
        if self.aborts:
            self.over.set()


def test_a_lost_send_that_is_aborted_lets_the_device_go(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lost(monkeypatch, aborts=True)
    transfer_send.close_lost_sender(lost)
    device_waits.wait_for_device()
    assert lost.waited == 2 and gpu.set == [3]


def test_a_lost_send_that_never_ends_stops_the_run_and_no_later_wait_hangs(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, began = Lost(monkeypatch, aborts=False), time.monotonic()
    with pytest.raises(MachineError, match="still busy"):
        transfer_send.close_lost_sender(lost)
    device_waits.wait_for_device()
    assert not device_waits.is_device_done(5) and lost.waited == 1
    assert time.monotonic() - began < 5
    lost.over.set()
