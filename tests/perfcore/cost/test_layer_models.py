from __future__ import annotations

import pytest
from kernel_conformance import TOY, KernelModelConformance, faster_memory

from perfcore.cost.layers import LayerFormulas, LayerRate
from perfcore.cost.memory_bound import Rate
from perfcore.cost.stacking import FormulaModel
from perfcore.errors import ProfileError
from perfcore.graph import kernels as k

NAMES = ("batch_norm", "pooling", "layer_norm", "softmax", "dropout")


def formulas(device=TOY) -> LayerFormulas:
    return LayerFormulas(device, dict.fromkeys(NAMES, LayerRate(Rate(0.8, 3.0), Rate(0.5, 3.0))))


PRICES = formulas()
BYTES_PER_US = TOY.hbm_bytes_per_s / 1e6


class TestBatchNorm(KernelModelConformance):
    model = FormulaModel(PRICES.batch_norm)
    kernel = staticmethod(lambda s: k.BatchNorm(s * 100, 64.0, 4.0))
    work_dims = ("rows", "channels")
    least_bytes = staticmethod(lambda s: 3 * s * 100 * 64 * 4)

    def test_few_channels_leave_multiprocessors_idle(self):
        many, few = self.model.predict_us([k.BatchNorm(1e5, 96.0, 4.0), k.BatchNorm(2e5, 48.0, 4.0)])
        assert few - 3.0 == pytest.approx(2 * (many - 3.0))

    def test_hand_count(self):
        forward, backward = self.model.predict_us([k.BatchNorm(1e5, 96.0, 4.0, b) for b in (False, True)])
        assert forward == pytest.approx(3.0 + 3 * 96e5 * 4 / 0.8 / BYTES_PER_US)
        assert backward == pytest.approx(3.0 + 5 * 96e5 * 4 / 0.5 / BYTES_PER_US)


class TestPooling(KernelModelConformance):
    model = FormulaModel(PRICES.pooling)
    kernel = staticmethod(lambda s: k.Pooling("max", s * 400, s * 100, 4.0))
    work_dims = ("inputs", "outputs")
    least_bytes = staticmethod(lambda s: s * (1600 + 1200))

    def test_an_average_keeps_no_indices(self):
        most, mean = self.model.predict_us([k.Pooling(f, 4e6, 1e6, 4.0) for f in ("max", "avg")])
        assert most - mean == pytest.approx(8e6 / 0.8 / BYTES_PER_US)

    def test_other_functions_are_refused(self):
        with pytest.raises(
            ProfileError, match="`function` of a Pooling must be one of max, avg, but got 'lp'"
        ):
            self.model.predict_us([k.Pooling("lp", 4.0, 1.0, 4.0)])


class TestLayerNorm(KernelModelConformance):
    model = FormulaModel(PRICES.layer_norm)
    kernel = staticmethod(lambda s: k.LayerNorm(s, 512.0, 4.0, backward=True))
    work_dims = ("rows", "cols")
    least_bytes = staticmethod(lambda s: 5 * s * 512 * 4)

    def test_backward_is_two_kernels(self):
        forward, backward = self.model.predict_us([k.LayerNorm(1e4, 512.0, 4.0, b) for b in (False, True)])
        assert forward == pytest.approx(3.0 + 2 * 512e4 * 4 / 0.8 / BYTES_PER_US)
        assert backward == pytest.approx(6.0 + 5 * 512e4 * 4 / 0.5 / BYTES_PER_US)


class TestSoftmax(KernelModelConformance):
    model = FormulaModel(PRICES.softmax)
    kernel = staticmethod(lambda s: k.Softmax(s, 1000.0, 4.0, backward=True))
    work_dims = ("rows", "cols")
    least_bytes = staticmethod(lambda s: 3 * s * 1000 * 4)


class TestDropout(KernelModelConformance):
    model = FormulaModel(PRICES.dropout)
    kernel = staticmethod(lambda s: k.Dropout(s * 1000, 4.0))
    work_dims = ("elements",)
    least_bytes = staticmethod(lambda s: s * 9000)

    def test_faster_memory_helps(self):
        quick = FormulaModel(formulas(faster_memory(TOY, 2.0)).dropout)
        kernel = k.Dropout(1e8, 4.0)
        assert quick.predict_us([kernel])[0] - 3.0 == pytest.approx(
            (self.model.predict_us([kernel])[0] - 3.0) / 2
        )
