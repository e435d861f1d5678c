"""How long a trace takes from file to replayed step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from perfcore.trace.analysis import analyse
from perfcore.trace.kineto import read_kineto

DATA = Path(__file__).parents[1] / "data"
TRACES = {
    "one DLRM rank": "dlrm_8xv100/rank7.pt.trace.json.gz",
    "recommendation model, six steps": "recsys_a100/rank3.pt.trace.json.gz",
}


@pytest.mark.parametrize("name", TRACES)
def test_reading_and_replaying(benchmark, figure, name):
    path = DATA / TRACES[name]
    analyse([read_kineto(path)])  # compiled
    started = time.perf_counter()
    analysis = benchmark.pedantic(lambda: analyse([read_kineto(path)]), rounds=3)
    figure(
        f"trace read, accounted for and replayed at every level: {name}",
        f"{(time.perf_counter() - started) / 3:.2f} s",
    )
    assert analysis.ranks[0].exact.max_abs_pct < 0.5
