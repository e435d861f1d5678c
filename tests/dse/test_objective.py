"""Metrics, objectives and constraints."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.constraints import Constraint, fits, labels_of, margins_of
from dse.errors import SpaceError
from dse.objective import METRICS, Circumstances, Objective, metrics_of, objective_values

US, BYTES = np.array([1000.0, 2000.0]), np.array([2.0**30, 2.0**31])
BATCH, WORLD = np.array([1000.0, 4000.0]), np.array([1.0, 8.0])


def metrics(**circumstances: float) -> dict[str, np.ndarray]:
    known = Circumstances(**circumstances)  # type: ignore[arg-type]
    return metrics_of(US, BYTES, global_batch=BATCH, world_size=WORLD, circumstances=known)


def test_every_metric_has_its_value() -> None:
    found = metrics(dataset_samples=3.6e9, price_per_gpu_hour=2.0)
    assert set(found) == set(METRICS)
    expected = {
        "iteration_time_ms": [1.0, 2.0],
        "time_per_sample_us": [1.0, 0.5],
        "time_per_sample_ns": [1000.0, 500.0],
        "samples_per_second": [1e6, 2e6],
        "gpu_time_per_sample_us": [1.0, 4.0],
        "hours_per_epoch": [1.0, 0.5],
        "gpu_hours_per_epoch": [1.0, 4.0],
        "cost_per_epoch_usd": [2.0, 8.0],
        "hbm_gib": [1.0, 2.0],
        "global_batch": [1000.0, 4000.0],
        "world_size": [1.0, 8.0],
    }
    for name, values in expected.items():
        assert found[name] == pytest.approx(values), name


def test_what_is_not_known_is_nan() -> None:
    found = metrics()
    for name in ("hours_per_epoch", "cost_per_epoch_usd", "quality_loss", "quality_std"):
        assert np.isnan(found[name]).all()


def test_the_data_loader_bounds_the_iteration() -> None:
    slow = metrics(input_samples_per_s=5e5)
    assert slow["iteration_time_ms"] == pytest.approx([2.0, 8.0])
    assert slow["samples_per_second"] == pytest.approx([5e5, 5e5])


def test_the_loaders_of_several_machines_add_up() -> None:
    slow = metrics(node_samples_per_s=2.5e5, gpus_per_node=4)
    assert slow["samples_per_second"] == pytest.approx([2.5e5, 5e5])


@given(st.floats(1, 1e9), st.floats(1, 1e9))
@settings(deadline=None, max_examples=50)
def test_a_limit_never_makes_anything_faster(us: float, limit: float) -> None:
    one = np.array([us])
    kwargs = {"global_batch": np.array([4096.0]), "world_size": np.array([2.0])}
    free = metrics_of(one, one, circumstances=Circumstances(), **kwargs)
    bound = metrics_of(one, one, circumstances=Circumstances(input_samples_per_s=limit), **kwargs)
    assert bound["iteration_time_ms"][0] >= free["iteration_time_ms"][0]
    assert bound["samples_per_second"][0] <= limit * (1 + 1e-9)


def test_what_is_maximised_is_negated() -> None:
    objectives = (Objective("hbm_gib"), Objective("samples_per_second", minimize=False))
    assert objective_values(objectives, metrics()) == pytest.approx(np.array([[1.0, -1e6], [2.0, -2e6]]))
    assert [o.direction for o in objectives] == ["minimize", "maximize"]


def test_margins_are_relative_and_feasible_up_to_zero() -> None:
    constraints = (fits(2.0), Constraint("samples_per_second", min=1.5e6, max=4e6))
    margins = margins_of(constraints, metrics())
    assert margins == pytest.approx(np.array([[-0.5, 1 / 3, -0.75], [0.0, -1 / 3, -0.5]]))
    assert labels_of(constraints) == (
        "hbm_gib <= 2",
        "samples_per_second >= 1.5e+06",
        "samples_per_second <= 4e+06",
    )


def test_an_unknown_metric_is_never_feasible() -> None:
    assert np.isinf(margins_of((Constraint("quality_loss", max=0.1),), metrics())).all()


def test_a_limit_of_zero_has_an_absolute_margin() -> None:
    assert margins_of((Constraint("hbm_gib", max=0.0),), metrics())[:, 0].tolist() == [1.0, 2.0]


def test_no_constraints_have_no_margins() -> None:
    assert margins_of((), metrics()).shape == (2, 0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [({}, "needs `min` or `max`"), ({"min": 2.0, "max": 1.0}, "`min <= max` must hold for 'hbm_gib'")],
)
def test_constraints_that_make_no_sense(limits: dict[str, float], message: str) -> None:
    with pytest.raises(SpaceError, match=message):
        Constraint("hbm_gib", **limits)
