"""Waiting for what a GPU still has to do, and telling a thread which GPU is ours.

Kernels are only queued by the call that starts them, and the current device belongs to a thread.
Without a GPU, or before CUDA was asked for anything, nothing here does anything.
"""

import threading

import torch

_device_timeouts: list[
    str
] = []  # has an entry once a GPU did not come free: it is not waited for again


def wait_for_device() -> None:
    """Return once everything that was queued on the current GPU, on any stream, is done.

    Or at once where `is_device_done` has found that it does not end: what comes then is the end of
    the process, which no wait may hold back.
    """
    if torch.cuda.is_initialized() and not _device_timeouts:  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def is_device_done(limit_s: float) -> bool:
    """Whether everything that was queued on the current GPU is done within so many seconds."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return True
    number = current_gpu()

    def wait() -> None:
        use_gpu(number)
        torch.cuda.synchronize()

    # CUDA has no wait with a deadline: a thread waits, and is left behind.
    waiting = threading.Thread(target=wait, daemon=True)
    if not _device_timeouts:
        waiting.start()
        waiting.join(limit_s)
    if _device_timeouts or waiting.is_alive():
        _device_timeouts.append(f"no end after {limit_s:g} s")
    return not _device_timeouts


def wait_for_stream() -> None:
    """Return once everything that was queued on the current stream of this thread is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def current_gpu() -> int | None:
    """The number of this thread's GPU; None where CUDA is not in use."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def use_gpu(number: int | None) -> None:
    """Make a GPU the current one of this thread, whose own begins as number 0."""
    if number is not None:
        torch.cuda.set_device(number)


def release_cached_memory() -> None:
    """Give back what torch keeps of freed tensors: another process cannot use it otherwise."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
