"""The contract of a kernel model, written once; every model's test class inherits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfcore.cost.model import Calibration
from perfcore.design.hardware import Device
from perfcore.errors import DesignError
from perfcore.graph.kernels import dims, with_dims

TOY = Device(
    name="toy-gpu",
    description="A device that nobody built",
    hbm_bytes=64e9,
    hbm_bytes_per_s=1.2e12,
    l2_bytes=24e6,
    l2_bytes_per_s=4e12,
    sm_count=96,
    clock_hz=1.5e9,
    fp32_flops_per_s=18e12,
    tf32_flops_per_s=120e12,
    bf16_flops_per_s=240e12,
    h2d_bytes_per_s=20e9,
)


# Inherited by design: every subclass is its own test of the same property.
PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


class KernelModelConformance:
    """Subclasses give the model, a kernel that grows with `scale`, and which dims must be positive to work."""

    model: ClassVar[Any]
    kernel: ClassVar[Callable[..., Any]]  # scale (array) -> kernel
    work_dims: ClassVar[tuple[str, ...]]  # each takes the work away; dims joined by + do so together
    sums_tables: ClassVar[bool] = False
    least_bytes: ClassVar[Callable[..., Any] | None] = None  # scale -> bytes that must move
    bytes_per_s: ClassVar[float] = TOY.hbm_bytes_per_s

    SCALES = np.array([1.0, 2.0, 3.0, 8.0, 64.0, 100.0, 1000.0, 4096.0])

    def one(self, scale: Any) -> np.ndarray:
        [us] = self.model.predict_us([type(self).kernel(np.asarray(scale, dtype=np.float64))])
        return us

    def scales(self) -> np.ndarray:
        return self.SCALES[:, None, None] if self.sums_tables else self.SCALES[:, None]

    def test_positive_and_finite(self):
        us = self.one(self.scales())
        assert us.shape == (len(self.SCALES), 1)
        assert np.all(np.isfinite(us))
        assert np.all(us > 0)

    def test_no_work_takes_no_time(self):
        kernel = type(self).kernel(self.scales())
        for name in self.work_dims:
            nothing = with_dims(kernel, **{n: np.zeros_like(self.scales()) for n in name.split("+")})
            [us] = self.model.predict_us([nothing])
            assert np.all(us == 0), name

    def test_many_at_once_equal_one_by_one(self):
        together = self.one(self.scales())
        apart = [self.one(self.scales()[i : i + 1]) for i in range(len(self.SCALES))]
        np.testing.assert_allclose(together, np.concatenate(apart), rtol=1e-9)

    def test_kernels_of_one_call_equal_calls_of_one_kernel(self):
        kernels = [type(self).kernel(self.scales()[i : i + 3]) for i in (0, 2, 4)]
        for us, kernel in zip(self.model.predict_us(kernels), kernels, strict=True):
            np.testing.assert_allclose(us, self.model.predict_us([kernel])[0], rtol=1e-9)

    def test_no_kernels_no_times(self):
        assert self.model.predict_us([]) == []

    @PROPERTY
    @given(scale=st.floats(1.0, 1e4))
    def test_twice_the_work_is_not_faster(self, scale):
        shape = (1, 1, 1) if self.sums_tables else (1, 1)
        less, more = self.one(np.full(shape, scale)), self.one(np.full(shape, 2 * scale))
        assert np.all(more >= less * (1 - 1e-9))

    @PROPERTY
    @given(scale=st.floats(1.0, 1e6))
    def test_never_faster_than_the_data_sheet(self, scale):
        if type(self).least_bytes is None:
            pytest.skip("not bound by bandwidth")
        shape = (1, 1, 1) if self.sums_tables else (1, 1)
        least_us = type(self).least_bytes(scale) / self.bytes_per_s * 1e6
        assert self.one(np.full(shape, scale)).item() >= least_us * (1 - 1e-9)

    def test_negative_dims_are_refused(self):
        kernel = type(self).kernel(self.scales())
        name = self.work_dims[0].split("+")[0]
        with pytest.raises(DesignError, match=rf"`{name} >= 0` must hold for a {type(kernel).__name__}.*=-3"):
            self.model.predict_us([with_dims(kernel, **{name: -3.0})])

    def test_nan_dims_are_refused(self):
        kernel = type(self).kernel(self.scales())
        for name in dims(kernel):
            with pytest.raises(DesignError, match=rf"`{name} >= 0` must hold .*=nan"):
                self.model.predict_us([with_dims(kernel, **{name: float("nan")})])

    def test_shapes_that_do_not_broadcast_are_refused(self):
        kernel = type(self).kernel(self.scales())
        names = list(dims(kernel))
        if len(names) < 2:
            pytest.skip("one dim always broadcasts")
        wrong = {names[0]: np.ones((2, 2, 2)), names[1]: np.ones((3, 3, 3))}
        with pytest.raises(DesignError, match="must broadcast together"):
            self.model.predict_us([with_dims(kernel, **wrong)])

    def test_calibration_is_stated(self):
        assert self.model.calibration(type(self).kernel(self.scales())) in list(Calibration)


def faster_memory(device: Device, by: float) -> Device:
    """The same device with quicker memory and cache."""
    return replace(
        device, hbm_bytes_per_s=device.hbm_bytes_per_s * by, l2_bytes_per_s=device.l2_bytes_per_s * by
    )
