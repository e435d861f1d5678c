from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_conformance import TOY, KernelModelConformance

from perfcore.cost.embedding import EmbeddingFormulas
from perfcore.cost.memory_bound import Rate
from perfcore.cost.stacking import FormulaModel
from perfcore.errors import ProfileError
from perfcore.graph import kernels as k

FORMULAS = EmbeddingFormulas(device=TOY, lookup=Rate(0.9, 4.0), update=Rate(0.6, 5.0))
FORWARD = FormulaModel(FORMULAS.forward, sum_tables=True)
BACKWARD = FormulaModel(FORMULAS.backward, sum_tables=True)
ROWS = np.array([1e6, 5e5, 300.0])


def forward(scale=1.0, *, rows=ROWS, skew=0.0, batched=True, dim=64.0) -> k.EmbeddingForward:
    return k.EmbeddingForward(scale, rows, 10.0, dim, skew, 4.0, batched=batched)


def backward(scale=1.0, *, rows=ROWS, skew=0.0, optimizer="sgd", dim=64.0) -> k.EmbeddingBackward:
    return k.EmbeddingBackward(scale, rows, 10.0, dim, skew, 4.0, batched=True, optimizer=optimizer)


class TestForward(KernelModelConformance):
    model = FORWARD
    kernel = staticmethod(forward)
    work_dims = ("batch", "rows", "dim", "element_bytes")
    sums_tables = True
    least_bytes = staticmethod(lambda s: 3 * s * 64 * 4)  # the outputs

    def test_one_launch_pays_one_floor(self):
        together = self.model.predict_us([forward(2048.0)])[0]
        apart = sum(self.model.predict_us([forward(2048.0, rows=np.array([r]))])[0] for r in ROWS)
        assert apart - together == pytest.approx(2 * 4.0)

    def test_an_absent_shard_adds_nothing(self):
        present = self.model.predict_us([forward(2048.0)])[0]
        padded = self.model.predict_us([forward(2048.0, rows=np.append(ROWS, 0.0))])[0]
        assert padded == pytest.approx(present)

    def test_skew_helps_the_cache(self):
        uniform, skewed = self.model.predict_us([forward(65536.0, skew=s) for s in (0.0, 1.2)])
        assert skewed < 0.8 * uniform

    def test_hand_count_without_reuse(self):
        [us] = self.model.predict_us([forward(1000.0, rows=np.array([1e9]))])
        bytes_ = 1000 * (16 + 80 + 256 + 10 * 256)
        assert us == pytest.approx(4.0 + bytes_ / (0.9 * 1.2e12) * 1e6, rel=1e-3)

    def test_a_repeated_launch_finds_what_fits_in_the_cache(self):
        repeated = FormulaModel(replace(FORMULAS, repeated=True).forward, sum_tables=True)
        small, large = forward(128.0, rows=np.array([300.0])), forward(65536.0, rows=np.array([1e7]))
        assert repeated.predict_us([small])[0] < self.model.predict_us([small])[0]
        assert repeated.predict_us([large])[0] == self.model.predict_us([large])[0]

    def test_what_fits_is_counted_over_the_tables_of_a_launch(self):
        repeated = FormulaModel(replace(FORMULAS, repeated=True).forward, sum_tables=True)
        rows_of_a_table = TOY.l2_bytes / 256 / 4
        many = forward(1e5, rows=np.full(64, rows_of_a_table))
        assert repeated.predict_us([many])[0] == self.model.predict_us([many])[0]

    def test_tables_of_no_pooling_still_write_zeros(self):
        [us] = self.model.predict_us([k.EmbeddingForward(512.0, 100.0, 0.0, 64.0, 0.0, 4.0)])
        assert us > 4.0


class TestBackward(KernelModelConformance):
    model = BACKWARD
    kernel = staticmethod(backward)
    work_dims = ("batch", "rows", "dim", "pooling", "element_bytes")
    sums_tables = True

    def test_optimizer_state_costs_traffic(self):
        names = ("sgd", "rowwise_adagrad", "adagrad", "adam")
        us = [float(self.model.predict_us([backward(65536.0, optimizer=o)])[0]) for o in names]
        assert us == sorted(us)
        assert us[2] > 1.3 * us[0]

    def test_repeated_rows_are_written_once(self):
        many, few = self.model.predict_us([backward(65536.0, rows=np.array([r])) for r in (1e8, 1e3)])
        assert few < 0.5 * many

    def test_a_sparse_gradient_has_a_row_for_each_lookup(self):
        [us] = self.model.predict_us([backward(65536.0, rows=np.array([1e3]), optimizer=None)])
        assert us > 65536 * 10 * 256 / 1.2e12 * 1e6

    def test_efficiency_by_width_stands_still_beyond_its_ends(self):
        by_width = replace(FORMULAS, update=Rate(0.6, 0.0), update_widths=((256.0, 0.8), (512.0, 0.4)))
        [narrow, low, high, wide] = [
            float(
                FormulaModel(by_width.sparse_update).predict_us(
                    [k.SparseUpdate(1e6, 1e9, dim, 0.0, 4.0)],
                )[0]
            )
            / dim
            for dim in (32.0, 64.0, 128.0, 512.0)
        ]
        assert narrow == pytest.approx(low, rel=0.05)
        assert high == pytest.approx(wide, rel=0.05)
        assert high > 1.3 * low

    def test_an_unknown_optimizer_is_refused(self):
        with pytest.raises(ProfileError, match=r"must be one of sgd, .*'lion'"):
            self.model.predict_us([backward(16.0, optimizer="lion")])


class TestSparseUpdate(KernelModelConformance):
    model = FormulaModel(FORMULAS.sparse_update)
    kernel = staticmethod(lambda s: k.SparseUpdate(s * 10, 1e6, 64.0, 0.0, 4.0))
    work_dims = ("lookups", "rows", "dim", "element_bytes")
    least_bytes = staticmethod(lambda s: s * 10 * 256)


@pytest.mark.parametrize("shape", [(1,), (3, 1), (2, 3, 5)])
def test_tables_are_summed(shape):
    rows = np.full(shape, 1e5)
    for model, kernel in ((FORWARD, forward(64.0, rows=rows)), (BACKWARD, backward(64.0, rows=rows))):
        [us] = model.predict_us([kernel])
        assert us.shape == shape[:-1]
