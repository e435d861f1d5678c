"""Ranks that differ are measured as the devices here are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from design_cases import random_design

from perfcore.measure.reduce import reduce_design


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_said_of_ranks_is_left_out_and_noted(ranks: int) -> None:
    base = random_design(np.random.default_rng(3), ranks=2, tables=2)
    unlike = replace(base, system=replace(base.system, slowness=(1.0, 2.0), hbm_bytes=(None, 20e9)))
    plain, said = reduce_design(base, ranks=ranks), reduce_design(unlike, ranks=ranks)
    assert said.design == plain.design
    assert said.design.system == base.system.even(ranks)
    assert set(said.notes) - set(plain.notes) == {
        "devices as they are here, whatever `system.ranks` says of them"
    }
