"""Waits for a GPU's queued work, and gets and sets the GPU of a thread.

A call that starts a kernel only queues it, and the current device belongs to a thread. Without a
GPU, or before CUDA is initialized, these functions do nothing.
"""

import threading

import torch

_device_timeouts: list[str] = []  # non-empty once a GPU has hung: then nothing waits for it again


def wait_for_device() -> None:
    """Return when all work queued on the current GPU, on any stream, is done.

    It returns at once if `is_device_done` has found that the GPU hangs: the process is ending then,
    and must not wait.
    """
    if torch.cuda.is_initialized() and not _device_timeouts:  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def is_device_done(limit_s: float) -> bool:
    """Whether all work queued on the current GPU finishes within this many seconds."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    number = current_gpu()

    def wait() -> None:
        use_gpu(number)
        torch.cuda.synchronize()

    # CUDA has no wait with a deadline: a thread waits, and is abandoned.
    thread = threading.Thread(target=wait, daemon=True)
    if not _device_timeouts:
        thread.start()
        thread.join(limit_s)
    if _device_timeouts or thread.is_alive():
        _device_timeouts.append(f"no end after {limit_s:g} s")
    return not _device_timeouts


def wait_for_stream() -> None:
    """Return when all work queued on this thread's current stream is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def current_gpu() -> int | None:
    """The number of this thread's GPU; None if CUDA is not in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def use_gpu(number: int | None) -> None:
    """Make a GPU the current one of this thread; in a new thread it is number 0."""
    if number is not None:
        torch.cuda.set_device(number)


def release_cached_memory() -> None:
    """Release torch's cached memory of freed tensors for other processes."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
