"""What goes wrong on a device is a sentence, what was measured so far is kept, and the same command goes on."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from measure_designs import small

from perfcore.design.design import to_dict
from perfcore.errors import ProfileError, UnsupportedError
from perfcore.graph import kernels as k
from perfcore.measure import collect as sweep
from perfcore.measure import files, isolate
from perfcore.measure.__main__ import main
from perfcore.measure.collect import Collected, collect
from perfcore.measure.device_state import busy_before
from perfcore.measure.failures import breaks_the_device, first_line, status_of
from perfcore.measure.isolate import Settings, measure_here
from perfcore.measure.iteration import check_device
from perfcore.measure.kernels import Timing
from perfcore.measure.record import Status, read_samples, write_samples
from perfcore.measure.samples import KernelSample, SampleFolder

# What torch raises, word for word as its users report it.
NO_KERNELS = "CUDA error: no kernel image is available for execution on the device\nCUDA kernel errors might be asynchronously reported"
OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 11040)."
INSUFFICIENT = "CUDA error: CUDA driver version is insufficient for CUDA runtime version"
MISMATCH = "Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination\nFailed to initialize NVML: Driver/library version mismatch"
FORWARD = "CUDA error: forward compatibility was attempted on non supported HW"
BUSY = "CUDA error: all CUDA-capable devices are busy or unavailable"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
FULL = "[Errno 28] No space left on device"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("said", "status", "meaning"),
    [
        (NO_KERNELS, Status.UNSUPPORTED, "no kernels for the GPU's architecture"),
        (OLD_DRIVER, Status.UNSUPPORTED, "driver is older than this torch's CUDA"),
        (INSUFFICIENT, Status.UNSUPPORTED, "driver is older than this torch's CUDA"),
        (MISMATCH, Status.UNSUPPORTED, "do not fit together"),
        (FORWARD, Status.UNSUPPORTED, "do not fit together"),
        (BUSY, Status.UNSUPPORTED, "another process holds the GPU"),
        (CUBLAS, Status.OUT_OF_MEMORY, "memory is full"),
        (
            "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory",
            Status.OUT_OF_MEMORY,
            "full",
        ),
        ("something else", Status.CRASHED, "something else"),
    ],
)
def test_what_torch_says_is_understood(said: str, status: Status, meaning: str) -> None:
    found, why = status_of(RuntimeError(said))
    assert found is status
    assert meaning in why
    assert "\n" not in why
    assert first_line(RuntimeError(said)) in why


def test_out_of_memory_errors_are_just_that() -> None:
    assert (
        status_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))[0]
        is Status.OUT_OF_MEMORY
    )
    assert status_of(MemoryError())[0] is Status.OUT_OF_MEMORY
    assert breaks_the_device(RuntimeError(ILLEGAL))
    assert not breaks_the_device(RuntimeError(NO_KERNELS))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError(NO_KERNELS), Status.UNSUPPORTED),
        (RuntimeError(OLD_DRIVER), Status.UNSUPPORTED),
        (torch.OutOfMemoryError("CUDA out of memory"), Status.OUT_OF_MEMORY),
        (RuntimeError(ILLEGAL), Status.CRASHED),
        (ValueError("a bug"), None),
    ],
)
def test_a_designs_failure_is_its_status(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: Status | None
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(isolate, "measure_iteration", fails)
    request = {"name": "x", "design": to_dict(small()), "settings": asdict(Settings())}
    if status is None:  # a mistake of this program is not hidden
        with pytest.raises(ValueError, match="a bug"):
            measure_here(request)
    else:
        answer = measure_here(request)
        assert answer["status"] == status
        assert first_line(error) in answer["detail"]


@pytest.mark.parametrize("said", [NO_KERNELS, OLD_DRIVER, BUSY])
def test_a_device_of_no_use_is_refused_before_the_sweep(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(torch, "ones", fails)
    assert main(["collect", "--device", "cpu", "--out", str(tmp_path / "s"), "--budget", "1s"]) == 2
    shown = capsys.readouterr().err
    assert f"cpu cannot be measured: {status_of(RuntimeError(said))[1]}." in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "s").exists()


def test_without_cuda_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError(f"{OLD_DRIVER}\nPlease update it")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", fails)
    with pytest.raises(UnsupportedError, match=r"sees 0: The NVIDIA driver on your system is too old"):
        check_device("cuda")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(UnsupportedError, match=r"sees 0\.$"):
        check_device("cuda")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A sweep of a few kernels without loops or collectives; counts the timed ones."""
    timed: list[int] = []
    cases = sweep.all_cases("cpu")[:40:4]

    def instantly(*_: Any, **__: Any) -> Iterator[Timing]:
        timed.append(1)
        yield Timing((1.0,) * 5, "warm", "wall")
        yield Timing((2.0,) * 5, "cold", "wall")

    monkeypatch.setattr(sweep, "all_cases", lambda _: cases)
    monkeypatch.setattr(sweep, "time_case", instantly)
    monkeypatch.setattr(sweep, "_loops", lambda *_, **__: (0, []))
    monkeypatch.setattr(sweep, "worlds", lambda _: [])
    return timed


def test_a_full_disk_ends_the_sweep_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: list[int]
) -> None:
    real, lines = Path.open, []

    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.name == "kernels.jsonl" and args[:1] == ("a",):
            lines.append(1)
            if len(lines) > 6:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ProfileError, match="the disk is full") as caught:
        collect(tmp_path, device="cpu", budget_s=5.0)
    assert "run the same command again" in str(caught.value.hint)
    monkeypatch.setattr(Path, "open", real)
    kept = len(SampleFolder(tmp_path).samples())
    assert kept == 5  # after the environment's line
    before = len(quick)
    again = collect(tmp_path, device="cpu", budget_s=5.0)
    assert again.kernels + kept >= len(SampleFolder(tmp_path).samples())
    assert len(quick) - before <= 10 - kept // 2  # what is known is not measured again


def test_a_full_disk_leaves_the_loops_of_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "loops.json"
    write_samples(path, [], environment={"n": 1})
    before = path.read_text()

    def full(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ProfileError, match=r"loops\.json: cannot be written: the disk is full"):
        write_samples(path, [], environment={"n": 2})
    monkeypatch.undo()
    assert path.read_text() == before
    assert read_samples(path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["loops.json"]


def test_a_device_that_fails_ends_the_sweep_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: list[int]
) -> None:
    good = sweep.time_case

    def fails_later(*args: Any, **kwargs: Any) -> Iterator[Timing]:
        if len(quick) >= 3:
            raise RuntimeError(ILLEGAL)
        yield from good(*args, **kwargs)

    monkeypatch.setattr(sweep, "time_case", fails_later)
    found = collect(tmp_path, device="cpu", budget_s=5.0)
    assert found.kernels == 6
    assert "illegal memory access" in found.stopped
    assert any("Run the same command again to go on" in line for line in found.remarks)
    assert len(SampleFolder(tmp_path).samples()) == 6


def test_one_kernel_without_memory_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: list[int]
) -> None:
    good, calls = sweep.time_case, []

    def hungry(*args: Any, **kwargs: Any) -> Iterator[Timing]:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        yield from good(*args, **kwargs)

    monkeypatch.setattr(sweep, "time_case", hungry)
    found = collect(tmp_path, device="cpu", budget_s=5.0)
    assert found.kernels > 2
    assert any("CUDA out of memory" in line for line in found.refused)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"utilization.gpu": "93"}, "The GPU was 93 % in use before"),
        ({"utilization.gpu": "0", "load": 99.0}, ""),
        ({"utilization.gpu": "[N/A]", "load": 0.0}, ""),
        ({"load": 1e3}, "load was 1000 on"),
        ({"load": 0.0}, ""),
        ({}, ""),
    ],
)
def test_another_program_on_the_device_is_told(state: dict[str, Any], words: str) -> None:
    assert words in busy_before(state)
    assert bool(busy_before(state)) is bool(words)


def test_a_large_spread_is_told() -> None:
    lines = Collected(10, 2, 4, ("Gemm: no",), busy="The GPU was busy.", stopped="it failed").remarks
    assert any("4 timings spread by more than a fifth: another program" in line for line in lines)
    assert {"The GPU was busy.", "not measured: Gemm: no"} <= set(lines)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        collect(tmp_path / "file", device="cpu", budget_s=1.0)
    assert "disk is full" in files.cannot_write(tmp_path, OSError(errno.EDQUOT, "quota")).message


def test_an_interruption_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "collect", interrupted)
    assert main(["collect", "--device", "cpu", "--out", str(tmp_path)]) == 130
    assert "what was measured is kept" in capsys.readouterr().err


@pytest.mark.parametrize(("budget_s", "times"), [(10.0, 1), (100.0, 2)])
def test_collectives_are_measured_again_where_time_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, budget_s: float, times: int
) -> None:
    kernel = k.Collective(k.CollectiveKind.ALL_REDUCE, 256.0, 2.0, 2.0)
    asked: list[float] = []

    def measured(size: int, *, device: str, seconds: float) -> Iterator[KernelSample]:
        asked.append(seconds)
        yield KernelSample(kernel, Timing((1.0,) * 5, "cold", "wall"))

    monkeypatch.setattr(sweep, "worlds", lambda _: [2])
    monkeypatch.setattr(sweep, "measure_collectives", measured)
    folder = SampleFolder(tmp_path)
    folder.create()
    for _ in range(2):
        sweep._collectives(folder, device="cpu", budget_s=budget_s, say=lambda _: None)
    assert len(asked) == times
    assert len(folder.collective_samples()) == times


def test_collectives_that_fail_leave_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> Iterator[KernelSample]:
        raise UnsupportedError("Collectives of 2 ranks could not be measured: no gloo.")
        yield

    monkeypatch.setattr(sweep, "worlds", lambda _: [2, 4])
    monkeypatch.setattr(sweep, "measure_collectives", fails)
    folder = SampleFolder(tmp_path)
    folder.create()
    done, refused = sweep._collectives(folder, device="cpu", budget_s=9.0, say=lambda _: None)
    assert (done, len(refused)) == (0, 2)
    assert not folder.collectives.exists()


def test_a_machine_without_torch_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["collect", "--device", "cpu", "--out", str(tmp_path / "samples")]) == 2
    assert "Measuring needs torch and numpy, but torch is missing. Install it: pip install torch" in (
        capsys.readouterr().err
    )
