from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from synthetic_problem import ToyEvaluator, ToySpace, brute_force, toy_evaluator

from dse.errors import StudyError
from dse.search.sampler import check_sampler, sampler_names
from dse.search.storage import StudyStorage
from dse.search.study import Effort, run_study

SPACE = ToySpace()
LIGHT = Effort(
    enumeration_limit=0, sample=256, batch=8, refine_rounds=4, refine_pairs=8, expand=4, expand_pairs=8,
    chunk=3, sample_chunk=64, polish_rounds=2,
)  # fmt: skip
OBJECTIVES = ("cost", "quality")


def search(*, trials=20, seed=5, effort=LIGHT, **options):
    return run_study(
        SPACE, toy_evaluator, objectives=OBJECTIVES, trials=trials, seed=seed, effort=effort, **options
    )


def assert_same(one, other):
    np.testing.assert_array_equal(one.codes, other.codes)
    np.testing.assert_array_equal(one.evaluation.objectives, other.evaluation.objectives)
    assert one.found.evaluated == other.found.evaluated
    assert one.found.feasible == other.found.feasible


def storage(tmp_path, **options):
    return StudyStorage(tmp_path, name="toy", objectives=OBJECTIVES, **options)


def test_a_small_space_is_enumerated_and_its_front_is_exact(tmp_path):
    seen = []
    result = search(effort=Effort(), on_batch=seen.append, storage=storage(tmp_path))
    front = brute_force(SPACE, ToyEvaluator())
    assert result.method == "exact"
    assert {
        tuple(o): tuple(c) for o, c in zip(result.evaluation.objectives, result.codes, strict=True)
    } == front
    assert seen[-1].trials == seen[-1].trials_total
    assert len(storage(tmp_path).trials()) == len(front)


def test_a_stopped_enumeration_goes_on_where_it_stood(tmp_path, monkeypatch):
    monkeypatch.setattr("dse.search.enumerate.CHUNK", 500)
    monkeypatch.setattr("dse.search.study.CHUNKS_PER_CHECKPOINT", 2)

    class StopError(Exception):
        pass

    def stop(progress):
        if progress.trials == 5:
            raise StopError

    with pytest.raises(StopError):
        search(effort=Effort(), storage=storage(tmp_path), on_batch=stop)
    assert storage(tmp_path).checkpoint().batch == 4
    seen = []
    again = search(effort=Effort(), storage=storage(tmp_path), on_batch=seen.append)
    assert seen[0].trials == 5
    assert_same(again, search(effort=Effort()))
    assert again.priced_before > 0
    assert len(storage(tmp_path).trials()) == len(again.codes)


def test_a_search_finds_the_whole_front_of_a_space_that_it_does_not_enumerate():
    space = ToySpace(widths=12, batches=16)
    effort = replace(Effort(), enumeration_limit=0, sample=1024)
    result = run_study(space, toy_evaluator, objectives=OBJECTIVES, trials=100, seed=1, effort=effort)
    exact = run_study(space, toy_evaluator, objectives=OBJECTIVES, trials=1, seed=1)
    assert result.method == "search"
    assert exact.method == "exact"
    found = {tuple(o) for o in result.evaluation.objectives}
    front = {tuple(o) for o in exact.evaluation.objectives}
    assert len(found & front) >= 0.95 * len(front)
    np.testing.assert_array_equal(
        result.evaluation.metrics["capacity"], ToyEvaluator().evaluate(result.codes).metrics["capacity"]
    )


def test_the_same_seed_gives_the_same_study_and_another_seed_another_one(tmp_path):
    one, other = (
        search(storage=storage(tmp_path / str(i)) if (tmp_path / str(i)).mkdir() is None else None)
        for i in (1, 2)
    )
    assert_same(one, other)
    assert search(seed=6).found.feasible != one.found.feasible
    first, second = (storage(tmp_path / str(i)).trials() for i in (1, 2))
    assert [(t.params, t.values, t.constraints) for t in first] == [
        (t.params, t.values, t.constraints) for t in second
    ]


def test_trials_are_stored_with_their_margins_and_origin(tmp_path):
    search(storage=storage(tmp_path), margins=("memory",))
    trials = storage(tmp_path).trials()
    assert [t.number for t in trials] == list(range(40))
    assert [t.user_attrs["origin"] for t in trials[:16]] == ["asked"] * 8 + ["refined"] * 8
    for trial in trials:
        assert trial.constraints["memory"] == trial.user_attrs["margin: memory"]
    assert {k: v for k, v in trials[8].system_attrs.items() if "generation" in k}


@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_a_stopped_study_goes_on_as_if_it_had_not_been_stopped(tmp_path, stop_after):
    class StopError(Exception):
        pass

    def stop(progress, calls=[]):  # noqa: B006 # counts the calls
        calls.append(progress)
        if len(calls) == stop_after:
            raise StopError

    with pytest.raises(StopError):
        search(storage=storage(tmp_path), on_batch=stop)
    again = search(storage=storage(tmp_path))
    assert_same(again, search())
    assert len(storage(tmp_path).trials()) == 40


def test_a_batch_stored_without_its_checkpoint_is_not_stored_twice(tmp_path):
    kept = storage(tmp_path)
    search(storage=kept, trials=8)
    old = kept.checkpoint()
    search(storage=storage(tmp_path), trials=20)
    kept.save(old)
    assert_same(search(storage=storage(tmp_path), trials=20), search())
    assert len(storage(tmp_path).trials()) == 40


def test_a_finished_study_is_read_back(tmp_path):
    one = search(storage=storage(tmp_path))
    again = search(storage=storage(tmp_path))
    assert again.resumed_from == again.trials == 20
    np.testing.assert_array_equal(again.codes, one.codes)


def test_sqlite_holds_the_same_study(tmp_path):
    url = f"sqlite:///{tmp_path / 'study.db'}"
    one = search(storage=storage(tmp_path, url=url), trials=8)
    assert_same(one, search(trials=8))
    trials = storage(tmp_path, url=url).trials()
    assert len(trials) == 16
    assert not (tmp_path / "study.journal").exists()


@pytest.mark.parametrize("name", sorted({*sampler_names()} - {"cmaes", "gp"}))
def test_every_sampler_resumes_to_the_same_study(tmp_path, name):
    search(storage=storage(tmp_path), trials=8, sampler=name)
    again = search(storage=storage(tmp_path), trials=16, sampler=name)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert_same(again, search(trials=16, sampler=name, storage=storage(whole)))
    told = [[t.params for t in storage(path).trials()] for path in (tmp_path, whole)]
    assert told[0] == told[1]


def test_without_a_feasible_candidate_the_nearest_is_named():
    result = run_study(
        SPACE, lambda: ToyEvaluator(limit=0.01), objectives=OBJECTIVES, trials=4, seed=0, effort=LIGHT
    )
    assert len(result.codes) == result.found.feasible == 0
    assert result.found.nearest_violation > 0
    assert result.found.nearest.shape == (1, 6)


def test_one_objective_is_a_front_of_one():
    result = run_study(
        SPACE,
        lambda: ToyEvaluator(objectives=1),
        objectives=("cost",),
        trials=8,
        seed=0,
        effort=LIGHT,
        sampler="tpe",
    )
    exact = run_study(SPACE, lambda: ToyEvaluator(objectives=1), objectives=("cost",), trials=1, seed=0)
    np.testing.assert_array_equal(result.codes, exact.codes)


def test_requests_that_cannot_be_served():
    with pytest.raises(StudyError, match=r"`trials >= 1` must hold, but got 0"):
        search(trials=0)
    with pytest.raises(StudyError, match=r"`sampler` must be one of .*, but got 'nsga'") as error:
        search(sampler="nsga")
    assert "nsga" in error.value.hint
    with pytest.raises(StudyError, match="serves one objective, but the space has 2"):
        search(sampler="cmaes")
    with pytest.raises(
        StudyError, match="cmaes sampler serves axes of numbers, but the choices of mode are none"
    ):
        check_sampler("cmaes", objectives=1, axes=SPACE.axes)
