from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from perfcore.graph import kernels as k
from perfcore.profile.fit_checks_memory import (
    MEMORY_FILE,
    MEMORY_SPLITS,
    memory_kernel_errors,
    trace_points,
)
from perfcore.profile.profile import load_profile

COLUMNS = ("kernel", "op_input_shapes", "kernels_per_op", "mean_us", "min_us", "max_us")
ROWS = (
    ("vectorized_elementwise_kernel", "((2048, 512), (), (0,))", 1, 9.9, 9.0, 11.0),
    ("vectorized_elementwise_kernel", "((1024, 1024), (1024, 1024), ())", 1, 16.0, 14.0, 18.0),
    ("vectorized_elementwise_kernel", "((1024, 1024), ())", 1, 7.0, 7.0, 7.0),
    ("unrolled_elementwise_kernel", "((1024,), (2048, 479), (479, 1024), (), ())", 1, 17.0, 17.0, 17.0),
    ("index_elementwise_kernel", "((2048, 27, 27), ())", 1, 17.4, 16.0, 18.0),
    ("reduce_kernel", "((2048, 1), ())", 1, 5.0, 5.0, 5.0),
    ("Memcpy DtoD (Device -> Device)", "((2048, 27, 27), (2048, 27, 27), ())", 1, 18.0, 18.0, 18.0),
    ("CatArrayBatchedCopy", "((), ())", 1, 52.4, 13.0, 95.0),
    # Too short, or of unknown work.
    ("vectorized_elementwise_kernel", "((128, 256), ())", 1, 1.0, 1.0, 1.0),
    ("vectorized_elementwise_kernel", "((1024,), ())", 2, 10.0, 2.0, 2.0),
    ("void splitKreduce_kernel", "((1, 2048), (2048, 256))", 1, 3.0, 3.0, 3.0),
    ("unrolled_elementwise_kernel", "((2048, 351), (2048, 351), ())", 1, 12.1, 12.0, 13.0),
)
TABLE = pd.DataFrame(ROWS, columns=list(COLUMNS))


def test_kernels_are_known_by_their_operators_shapes() -> None:
    points = trace_points(TABLE)
    assert [type(p.kernel).__name__ for p in points] == [
        *["Elementwise"] * 4,
        "PairGather",
        "Reduction",
        "Memcpy",
        *["Concat"] * 2,
    ]
    relu, sgd, zero, bias = (p.kernel for p in points[:4])
    assert isinstance(relu, k.Elementwise)
    for kernel, read, written in (
        (relu, 2048 * 512, 2048 * 512),
        (sgd, 2 * 1024**2, 1024**2),
        (zero, 0, 1024**2),
        (bias, 1024, 2048 * 1024),
    ):
        assert isinstance(kernel, k.Elementwise)
        assert (kernel.bytes_read, kernel.bytes_written) == (4 * read, 4 * written)
    assert [p.us for p in points[-2:]] == [13.0, 95.0]
    assert {p.kind for p in points} == set(MEMORY_SPLITS)


def test_time_of_an_operator_is_shared_by_its_kernels() -> None:
    two = TABLE.iloc[[1]].assign(kernels_per_op=2)
    assert [p.us for p in trace_points(two)] == [8.0]


def test_errors_are_those_of_the_profile(tmp_path) -> None:
    TABLE.to_csv(tmp_path / MEMORY_FILE)
    costs = load_profile("v100-sxm2-16gb").cost_model()
    found = dict(memory_kernel_errors(tmp_path, costs))
    assert list(found) == list(MEMORY_SPLITS)
    points = [p for p in trace_points(TABLE) if p.kind == "concat (trace)"]
    us = np.array([float(u) for u in costs.predict_us([p.kernel for p in points])])
    error = found["concat (trace)"]
    assert error.n == 2
    assert error.mape_pct == pytest.approx(100 * np.mean(np.abs(us / [13.0, 95.0] - 1)))


def test_kinds_without_a_row_are_left_out(tmp_path) -> None:
    TABLE.head(1).to_csv(tmp_path / MEMORY_FILE)
    costs = load_profile("v100-sxm2-16gb").cost_model()
    assert len(memory_kernel_errors(tmp_path, costs)) == 1
