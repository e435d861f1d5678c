from __future__ import annotations

import numpy as np
import pytest
from kernel_conformance import TOY, KernelModelConformance, faster_memory

from perfcore.cost.memory_bound import MemoryBoundFormulas, Rate
from perfcore.cost.stacking import FormulaModel
from perfcore.errors import ProfileError
from perfcore.graph import kernels as k

KINDS = (
    "elementwise",
    "reduction",
    "concat",
    "transpose",
    "pair_gather",
    "fused_interaction",
    "sort",
    "multi_tensor",
    "memcpy",
    "memcpy_host",
    "memset",
)


def formulas(device=TOY, *, pageable_share=0.5) -> MemoryBoundFormulas:
    return MemoryBoundFormulas(
        device=device,
        rates={kind: Rate(0.8, 2.0) for kind in KINDS},
        function_rates={"tanh": Rate(0.5, 3.0)},
        scatter_cycles_per_element=50.0,
        pageable_share=pageable_share,
    )


PRICES = formulas()


class TestElementwise(KernelModelConformance):
    model = FormulaModel(PRICES.elementwise)
    kernel = staticmethod(lambda s: k.Elementwise("relu", s * 100, s * 400, s * 400))
    work_dims = ("bytes_read+bytes_written",)
    least_bytes = staticmethod(lambda s: s * 800)

    def test_hand_count(self):
        [us] = self.model.predict_us([k.Elementwise("add", 1.2e6, 9.6e6, 4.8e6)])
        assert us == pytest.approx(2.0 + 14.4e6 / (0.8 * 1.2e12) * 1e6)

    def test_a_function_has_its_own_rate(self):
        both = [k.Elementwise(f, 1e6, 4e6, 4e6) for f in ("relu", "tanh")]
        relu, tanh = self.model.predict_us(both)
        assert relu == pytest.approx(2.0 + 8e6 / (0.8 * 1.2e12) * 1e6)
        assert tanh == pytest.approx(3.0 + 8e6 / (0.5 * 1.2e12) * 1e6)

    def test_faster_memory_helps(self):
        kernel = k.Elementwise("add", 1e8, 8e8, 4e8)
        quick = FormulaModel(formulas(faster_memory(TOY, 2.0)).elementwise)
        assert quick.predict_us([kernel])[0] < self.model.predict_us([kernel])[0]


class TestReduction(KernelModelConformance):
    model = FormulaModel(PRICES.reduction)
    kernel = staticmethod(lambda s: k.Reduction(s * 10, 256.0, 4.0))
    work_dims = ("rows", "cols", "element_bytes")
    least_bytes = staticmethod(lambda s: s * 10 * 256 * 4)

    def test_whole_sum_writes_one_element(self):
        rows, whole = self.model.predict_us(
            [k.Reduction(1e4, 1e4, 4.0), k.Reduction(1e4, 1e4, 4.0, axis=None)]
        )
        assert rows - whole == pytest.approx((1e4 - 1) * 4 / (0.8 * 1.2e12) * 1e6, abs=1e-6)


class TestConcat(KernelModelConformance):
    model = FormulaModel(PRICES.concat)
    kernel = staticmethod(lambda s: k.Concat(s * 1000, 8.0))
    work_dims = ("bytes",)
    least_bytes = staticmethod(lambda s: 2 * s * 1000)


class TestTranspose(KernelModelConformance):
    model = FormulaModel(PRICES.transpose)
    kernel = staticmethod(lambda s: k.Transpose(s, 27.0, 128.0, 4.0))
    work_dims = ("batch", "m", "n", "element_bytes")
    least_bytes = staticmethod(lambda s: 2 * s * 27 * 128 * 4)

    def test_narrow_rows_waste_sectors(self):
        wide, narrow = self.model.predict_us(
            [k.Transpose(1e4, 64.0, 64.0, 4.0), k.Transpose(1e4, 2048.0, 2.0, 4.0)]
        )
        assert narrow > 1.5 * wide


class TestPairGather(KernelModelConformance):
    model = FormulaModel(PRICES.pair_gather)
    kernel = staticmethod(lambda s: k.PairGather(s, 27.0, 351.0, 4.0))
    work_dims = ("batch", "features", "pairs")
    least_bytes = staticmethod(lambda s: 2 * s * 351 * 4)

    def test_scatter_is_slower_than_gather(self):
        gather, scatter = self.model.predict_us(
            [k.PairGather(2048.0, 27.0, 351.0, 4.0, backward=b) for b in (False, True)]
        )
        assert scatter - gather == pytest.approx(2048 * 351 * 50 / (96 * 1.5e9) * 1e6)


class TestFusedInteraction(KernelModelConformance):
    model = FormulaModel(PRICES.fused_interaction)
    kernel = staticmethod(lambda s: k.FusedInteraction(s, 27.0, 128.0, 2.0))
    work_dims = ("batch", "features", "dim")
    least_bytes = staticmethod(lambda s: s * 27 * 128 * 2)

    def test_backward_moves_more(self):
        forward, backward = self.model.predict_us(
            [k.FusedInteraction(4096.0, 27.0, 128.0, 2.0, backward=b) for b in (False, True)]
        )
        assert backward > 1.4 * forward


class TestSort(KernelModelConformance):
    model = FormulaModel(PRICES.sort)
    kernel = staticmethod(lambda s: k.Sort(s * 100, 8.0))
    work_dims = ("keys",)
    least_bytes = staticmethod(lambda s: 2 * s * 100 * 16)

    def test_keys_alone_move_half(self):
        pairs, keys = self.model.predict_us([k.Sort(1e8, 8.0), k.Sort(1e8, 8.0, pairs=False)])
        assert pairs - 2.0 == pytest.approx(2 * (keys - 2.0))


class TestMultiTensor(KernelModelConformance):
    model = FormulaModel(PRICES.multi_tensor)
    kernel = staticmethod(lambda s: k.MultiTensor("sgd", s * 1000, 16.0, 12.0))
    work_dims = ("elements",)
    least_bytes = staticmethod(lambda s: s * 12000)

    def test_many_tensors_cost_their_tails(self):
        few, many = self.model.predict_us([k.MultiTensor("sgd", 1e6, n, 12.0) for n in (1.0, 97.0)])
        assert many - few == pytest.approx(2.0 * 96 / 96)


class TestMemcpy(KernelModelConformance):
    model = FormulaModel(PRICES.memcpy)
    kernel = staticmethod(lambda s: k.Memcpy(s * 1000, k.CopyKind.H2D_PINNED))
    work_dims = ("bytes",)
    least_bytes = staticmethod(lambda s: s * 1000)
    bytes_per_s = TOY.h2d_bytes_per_s

    def test_kinds(self):
        pinned, pageable, inside = self.model.predict_us(
            [k.Memcpy(1e9, kind) for kind in (k.CopyKind.H2D_PINNED, k.CopyKind.H2D_PAGEABLE, k.CopyKind.D2D)]
        )
        assert pinned - 2.0 == pytest.approx(1e9 / (0.8 * 20e9) * 1e6)
        assert pageable - 2.0 == pytest.approx(2 * (pinned - 2.0))
        assert inside - 2.0 == pytest.approx(2e9 / (0.8 * 1.2e12) * 1e6)


class TestMemset(KernelModelConformance):
    model = FormulaModel(PRICES.memset)
    kernel = staticmethod(lambda s: k.Memset(s * 1000))
    work_dims = ("bytes",)
    least_bytes = staticmethod(lambda s: s * 1000)


@pytest.mark.parametrize("efficiency", [0.0, -0.1, 1.01, float("nan")])
def test_an_impossible_efficiency_is_refused(efficiency):
    with pytest.raises(ProfileError, match=r"`0 < efficiency <= 1` must hold"):
        Rate(efficiency, 1.0)


def test_a_negative_floor_is_refused():
    with pytest.raises(ProfileError, match=r"`0 <= floor_us < 1e6` must hold.*-1"):
        Rate(0.5, -1.0)


def test_totals_are_added_up():
    parts = k.Total((np.array([[1e6]]), np.array([[2e6], [3e6]])))
    [us] = FormulaModel(PRICES.memset).predict_us([k.Memset(parts)])
    [plain] = FormulaModel(PRICES.memset).predict_us([k.Memset(np.array([[3e6], [4e6]]))])
    np.testing.assert_array_equal(us, plain)
