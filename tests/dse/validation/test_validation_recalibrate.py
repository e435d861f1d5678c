"""A correction from measured designs, and the profile that carries it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dse.config import load_design
from dse.errors import DseError
from dse.placement import plan_for
from dse.validation.recalibrate import recalibrated, write_recalibrated
from perfcore.errors import ProfileError
from perfcore.predictor import Predictor
from perfcore.profile.profile import BUNDLED, load_profile

DESIGN = Path("spaces/designs/dlrm_default.yaml")


@given(
    factor=st.floats(0.3, 3.0),
    predicted=st.lists(st.floats(1.0, 1e4), min_size=3, max_size=8),
)
@settings(max_examples=50, deadline=None)
def test_a_common_factor_is_found_and_helps(factor: float, predicted: list[float]) -> None:
    found = recalibrated(predicted, [p * factor for p in predicted])
    assert found.factor == pytest.approx(factor)
    assert found.after_mape_pct == pytest.approx(0.0, abs=1e-6)
    assert found.before_mape_pct == pytest.approx(100 * abs(1 / factor - 1), rel=1e-6, abs=1e-6)


def test_after_is_of_designs_left_out() -> None:
    """By hand: each design corrected with the geometric mean of the others' ratios."""
    predicted, measured = [10.0, 10.0, 10.0], [10.0, 20.0, 40.0]
    corrected = [10 * np.sqrt(2 * 4), 10 * np.sqrt(1 * 4), 10 * np.sqrt(1 * 2)]
    errors = [abs(c / m - 1) for c, m in zip(corrected, measured, strict=True)]
    found = recalibrated(predicted, measured)
    assert found.after_mape_pct == pytest.approx(100 * np.mean(errors))
    assert not found.helps


def test_two_designs_are_too_few() -> None:
    with pytest.raises(DseError, match="at least 3"):
        recalibrated([1.0, 2.0], [1.0, 2.0])


def test_a_corrected_profile_predicts_scaled_iterations(tmp_path: Path) -> None:
    found = recalibrated([1.0, 2.0, 3.0], [1.5, 3.0, 4.5])
    write_recalibrated("t4", tmp_path / "mine", found, source="a test")
    design = load_design(DESIGN, place=plan_for)
    before, after = (
        Predictor(load_profile(p)).iteration_time_us(design) for p in ("t4", str(tmp_path / "mine"))
    )
    assert after == pytest.approx(1.5 * before, rel=1e-6)
    again = recalibrated([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    write_recalibrated(str(tmp_path / "mine"), tmp_path / "twice", again, source="a test")
    assert Predictor(load_profile(str(tmp_path / "twice"))).iteration_time_us(design) == pytest.approx(
        3 * before
    )


def test_bundled_profiles_are_never_written(tmp_path: Path) -> None:
    found = recalibrated([1.0, 2.0, 3.0], [1.5, 3.0, 4.5])
    with pytest.raises(ProfileError, match="never overwritten"):
        write_recalibrated("t4", BUNDLED / "t4", found, source="a test")
    write_recalibrated("t4", tmp_path / "mine", found, source="a test")
    with pytest.raises(DseError, match="is the profile that is corrected"):
        write_recalibrated(str(tmp_path / "mine"), tmp_path / "mine", found, source="a test")
