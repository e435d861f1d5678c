"""What stopped a measurement, in a sentence that says what to do."""

from __future__ import annotations

import torch

from perfcore.measure.record import Status

# What CUDA, its driver and its libraries say, and what it means. Lower case; the first that fits counts.
_KNOWN = (
    (
        "no kernel image is available",
        Status.UNSUPPORTED,
        "this torch has no kernels for the GPU's architecture: install a build for its compute capability",
    ),
    (
        "driver version is insufficient",
        Status.UNSUPPORTED,
        "the NVIDIA driver is older than this torch's CUDA: update the driver, or install a torch for an older CUDA",
    ),
    (
        "driver on your system is too old",
        Status.UNSUPPORTED,
        "the NVIDIA driver is older than this torch's CUDA: update the driver, or install a torch for an older CUDA",
    ),
    (
        "forward compatibility was attempted",
        Status.UNSUPPORTED,
        "driver and CUDA libraries do not fit together: restart after a driver update, or mend the container's libraries",
    ),
    (
        "driver/library version mismatch",
        Status.UNSUPPORTED,
        "driver and CUDA libraries do not fit together: restart after a driver update, or mend the container's libraries",
    ),
    (
        "system not yet initialized",
        Status.UNSUPPORTED,
        "the GPUs' fabric is not up: start nvidia-fabricmanager of the driver's version",
    ),
    (
        "exclusive",
        Status.UNSUPPORTED,
        "another process holds the GPU, which is in exclusive mode: end it, or name another GPU with --device cuda:<index>",
    ),
    (
        "busy or unavailable",
        Status.UNSUPPORTED,
        "another process holds the GPU, or it has failed: end that process, or name another GPU with --device cuda:<index>",
    ),
    ("cuda error: out of memory", Status.OUT_OF_MEMORY, "the device's memory is full"),
    ("cublas_status_alloc_failed", Status.OUT_OF_MEMORY, "the device's memory is full"),
    ("allocate memory", Status.OUT_OF_MEMORY, "the memory is full"),
)


def status_of(err: BaseException) -> tuple[Status, str]:
    """How a measurement ended, and why, in a sentence."""
    said = first_line(err)
    if isinstance(err, (MemoryError, torch.OutOfMemoryError)):
        return Status.OUT_OF_MEMORY, said
    lower = str(err).lower()
    for words, status, meaning in _KNOWN:
        if words in lower:
            return status, f"{meaning} ({said})"
    return Status.CRASHED, said


def breaks_the_device(err: BaseException) -> bool:
    """After it the process's CUDA context gives nothing but errors: nothing more can be measured in it."""
    lower = str(err).lower()
    sticky = (
        "illegal memory access",
        "device-side assert",
        "unspecified launch failure",
        "ecc error",
        "misaligned",
    )
    return any(words in lower for words in sticky)


def first_line(err: BaseException) -> str:
    """The first line of what an exception says, or its name."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0]
