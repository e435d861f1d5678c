from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import synthetic_problem
from synthetic_problem import ToyEvaluator, ToySpace, toy_evaluator

from dse.errors import SpaceError, StudyError
from dse.search.executor import InProcessExecutor, RayExecutor
from dse.search.refine import Sample
from dse.search.storage import StudyStorage
from dse.search.study import Effort, run_study

SPACE = ToySpace()
EFFORT = Effort(enumeration_limit=0, sample=2048, batch=8, refine_rounds=3, chunk=2, sample_chunk=128)


@dataclass(frozen=True)
class Fail:
    def __call__(self, space, evaluator):
        raise SpaceError("`a < b` must hold, but got (a=2, b=1).", hint="Lower a.")


def search(**options):
    return run_study(
        SPACE, toy_evaluator, objectives=("cost", "quality"), trials=24, seed=3, effort=EFFORT, **options
    )


def test_the_evaluator_is_built_once_and_tasks_keep_their_order():
    built = []
    with InProcessExecutor().start(SPACE, lambda: built.append(1) or ToyEvaluator()) as pool:
        counts = [found.evaluated for found in pool.map(Sample((i,), i + 1) for i in range(5))]
    assert counts == [1, 2, 3, 4, 5]
    assert built == [1]


def test_an_expected_failure_of_a_task_comes_through():
    with InProcessExecutor().start(SPACE, toy_evaluator) as pool, pytest.raises(SpaceError, match="a < b"):
        list(pool.map([Fail()]))


def test_a_pool_needs_workers():
    with pytest.raises(StudyError, match=r"`workers >= 1` must hold, but got 0"):
        RayExecutor(0)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_two_ray_workers_give_the_same_study_even_when_one_dies():
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(synthetic_problem)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with RayExecutor(2).start(SPACE, toy_evaluator) as pool:

        @dataclass(frozen=True)
        class Running:
            """The pool that is there already; its first worker is killed in the middle of the study."""

            width: int = 2

            def start(self, space, factory):
                from contextlib import nullcontext

                return nullcontext(pool)

        def kill_one(progress, killed=[]):  # noqa: B006 # remembers
            if progress.trials >= 8 and not killed:
                killed.append(pool.pids()[0])
                os.kill(killed[0], signal.SIGKILL)

        distributed = search(executor=Running(), on_batch=kill_one)
        with pytest.raises(SpaceError, match="a < b") as error:
            list(pool.map([Fail()]))
        assert error.value.hint == "Lower a."
        assert len(set(pool.pids())) == 2
    alone = search()
    np.testing.assert_array_equal(alone.codes, distributed.codes)
    np.testing.assert_array_equal(alone.evaluation.objectives, distributed.evaluation.objectives)
    assert alone.found.evaluated == distributed.found.evaluated
    assert not ray.is_initialized()


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
import test_search_executor as t
from synthetic_problem import ToyEvaluator
from dse.search.storage import StudyStorage
from dse.search.study import run_study
storage = StudyStorage(Path({run!r}), name="toy", objectives=("cost", "quality"))
run_study(t.SPACE, lambda: ToyEvaluator(delay_s=0.004), objectives=("cost", "quality"), trials=24, seed=3,
          effort=t.EFFORT, storage=storage, on_batch=lambda p: print(p.trials, flush=True))
"""


@pytest.mark.slow
def test_a_study_killed_by_the_system_resumes_to_the_same_result(tmp_path):
    script = SCRIPT.format(here=str(Path(__file__).parent), run=str(tmp_path))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout:
            if int(line) >= 8:
                time.sleep(0.05)  # into the middle of the next batch
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL
    kept = StudyStorage(tmp_path, name="toy", objectives=("cost", "quality"))
    assert kept.checkpoint().asked in (8, 16)
    resumed = search(storage=kept)
    whole = search()
    assert resumed.resumed_from in (8, 16)
    np.testing.assert_array_equal(resumed.codes, whole.codes)
    assert resumed.found.evaluated == whole.found.evaluated
    assert len(StudyStorage(tmp_path, name="toy", objectives=("cost", "quality")).trials()) == 48
