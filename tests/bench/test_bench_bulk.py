"""Rate of bulk prediction over a whole space, sampled uniformly: the terabyte one, or a small one unmeasured."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import pytest

from dse.candidate import column
from dse.search.evaluator import SpaceEvaluator
from dse.search.table_cache import TableCache
from dse.study_config import load_space
from perfcore.profile.profile import profile_for

SPACES = Path(__file__).parents[2] / "spaces"
SAMPLES = 1_000_000


@pytest.fixture(scope="module")
def measured(request):
    option = request.config.getoption
    return option("benchmark_enable") or not option("benchmark_disable")


@pytest.fixture(scope="module")
def study(measured):
    return load_space(SPACES / ("dlrm_terabyte.yaml" if measured else "dlrm_small.yaml"))


@pytest.fixture(scope="module")
def tables(study, tmp_path_factory):
    """The evaluator from a cache, and CPU seconds to build its tables and to read them."""
    profile = profile_for(study.space.device, study.space.node)
    cache = TableCache(tmp_path_factory.mktemp("cache"), smallest_bytes=0)
    seconds = []
    for _ in ("cold", "warm"):
        begin = time.process_time()
        evaluator = SpaceEvaluator(study, profile, cache=cache)
        seconds.append(time.process_time() - begin)
    return evaluator, seconds


@pytest.fixture(scope="module")
def samples(study, measured):
    return study.space.sample(np.random.default_rng(0), SAMPLES if measured else 1000)


@pytest.mark.benchmark(group="bulk", timer=time.process_time)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_designs_per_second(benchmark, figure, study, tables, samples, world_size):
    codes = samples[column(study.space, samples, "system.world_size") == world_size]
    if not len(codes):
        pytest.skip(f"the space has no designs on {world_size} ranks")
    time_us, hbm_bytes, _ = benchmark(tables[0].times.price, codes)
    assert np.all(np.isfinite(time_us))
    assert np.all(time_us > 0)
    assert np.all(hbm_bytes > 0)
    if benchmark.stats:
        rate = len(codes) / benchmark.stats.stats.min
        benchmark.extra_info["designs_per_s"] = rate
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        figure(f"{study.space.name}, {ranks}, times and memory", f"{rate / 1e6:.2f} M designs/s")


@pytest.mark.benchmark(group="bulk", timer=time.process_time)
def test_candidates_per_second(benchmark, figure, study, tables, samples):
    evaluator, (cold_s, warm_s) = tables
    evaluation = benchmark(evaluator.evaluate, samples)
    assert np.all(np.isfinite(evaluation.objectives))
    if benchmark.stats:
        rate = len(samples) / benchmark.stats.stats.min
        peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        table_mib = evaluator.times.table_bytes / 2**20
        benchmark.extra_info |= {
            "candidates_per_s": rate,
            "tables_built_s": cold_s,
            "tables_read_s": warm_s,
            "table_mib": table_mib,
            "peak_mib": peak_mib,
        }
        figure(f"{study.space.name}, all ranks, objectives", f"{rate / 1e6:.2f} M designs/s")
        figure("  tables built", f"{cold_s:.1f} s")
        figure("  tables read from the cache", f"{warm_s:.2f} s")
        figure("  memory of the tables", f"{table_mib:.0f} MiB")
        figure("  peak memory of the process", f"{peak_mib:.0f} MiB")
