import json
from dataclasses import replace

import numpy as np
import pytest
from torchrec_cases import design_of, sharding

pytest.importorskip("torchrec.distributed", reason="TorchRec is not installed: make test-torchrec")
pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's own, about itself

from dse.placement.instances.instance import Objective  # noqa: E402
from dse.placement.solver.problem import loads_of  # noqa: E402
from dse.placement.torchrec import Job, Machine, compare, compare_design, estimate, job_of  # noqa: E402
from dse.placement.torchrec.assigned import (  # noqa: E402
    Choice,
    assignment_of_choices,
    plan_of_assignment,
    price_ms,
)
from dse.placement.torchrec.comparison import DEFAULT, OURS, THEIRS  # noqa: E402
from dse.placement.torchrec.run_planner import plans_of  # noqa: E402
from perfcore.design.model import EmbeddingTable  # noqa: E402
from perfcore.design.sharding import ShardingPlan, ShardingType  # noqa: E402
from perfcore.predictor import Predictor  # noqa: E402
from perfcore.profile.profile import profile_for  # noqa: E402

OBJECTIVES = tuple(o.value for o in Objective)


def random_job(seed, *, tables=8, hbm_gib=80.0):
    rng = np.random.default_rng(seed)
    made = tuple(
        EmbeddingTable(
            f"table_{i}",
            int(10 ** rng.uniform(2, 7)),
            float(rng.uniform(0, 30)),
            embedding_dim=int(rng.choice([64, 128, 256])),
        )
        for i in range(tables)
    )
    return Job(made, 512, Machine(4, 2, hbm_gib))


@pytest.mark.parametrize("seed", range(4))
def test_the_solver_is_never_worse_than_torchrecs_best(seed):
    hbm_gib = 2.0 if seed % 2 else 80.0  # tables of up to 10 GB: tight and wide
    found = compare(random_job(seed, hbm_gib=hbm_gib), torchrec_time_s=20.0, time_limit_s=1.0)
    for objective in OBJECTIVES:
        theirs, ours = (found.best(planner, objective) for planner in (THEIRS, OURS))
        if theirs is not None:
            assert ours is not None
            assert getattr(ours, f"{objective}_ms") <= getattr(theirs, f"{objective}_ms") * (1 + 1e-9)
    for plan in found.plans:
        assert plan.fits
        assert plan.lower_bound_ms is None or plan.lower_bound_ms <= plan.objective_ms * (1 + 1e-9)


def test_a_comparison_is_plain_json_and_a_table():
    found = compare(random_job(7), torchrec_time_s=20.0, time_limit_s=1.0, column_widths=(None, 32))
    data = json.loads(json.dumps(found.to_json()))
    assert (data["tables"], data["ranks"]) == (8, 4)
    assert {t["setting"] for t in data["torchrec_settings"]} >= {"default", "columns down to 32"}
    assert [p["planner"] for p in data["plans"]] == [THEIRS] * 3 + [OURS] * 2
    assert data["saved_pct"]["iteration_time"] is None
    assert all(data["saved_pct"][o] >= -1e-7 for o in OBJECTIVES)
    lines = found.lines()
    assert len(lines) == 6
    assert f"{found.plans[0].rating_ms:.4f}" in lines[1]


def test_where_nothing_fits_both_say_so():
    job = Job((EmbeddingTable("a", 10_000_000, embedding_dim=128),), 512, Machine(2, 2, hbm_gib=0.5))
    found = compare(job, torchrec_time_s=5.0, time_limit_s=1.0)
    assert [t.rating_ms for t in found.tried if t.setting == "default"] == [None]
    assert [p for p in found.plans if p.planner == THEIRS] == []
    assert not any(p.fits for p in found.plans)


def test_tables_larger_than_the_devices_are_placed_behind_caches():
    tables = (
        EmbeddingTable("large", 50_000_000, 4.0, embedding_dim=128),  # 24 GiB
        EmbeddingTable("small", 1000, 4.0, embedding_dim=128),
    )
    job = Job(tables, 512, Machine(2, 2, hbm_gib=8.0, host_gib=64.0), cache_ratios=(0.2, 0.05))
    found = compare(job, torchrec_time_s=10.0, time_limit_s=1.0, column_widths=(None,))
    assert {p.planner for p in found.plans} == {OURS, THEIRS}
    assert all(p.fits for p in found.plans)
    without = compare(replace(job, cache_ratios=()), torchrec_time_s=5.0, time_limit_s=1.0)
    assert not any(p.fits for p in without.plans)
    instance = estimate(job, column_widths=(None,))
    assert {k for k in instance.kernels if "cach" in k} == {"fused_uvm_caching@0.05", "fused_uvm_caching@0.2"}
    assert instance.host_bytes.max() == 50_000_000 * 128 * 4


def test_a_design_whose_tables_do_not_fit_is_a_job_with_caches():
    small, large = design_of([sharding(ShardingType.TABLE_WISE, [0])]), 10**10
    assert job_of(small).cache_ratios == ()
    model = replace(small.model, tables=(replace(small.model.tables[0], num_embeddings=large),))
    assert job_of(replace(small, model=model)).cache_ratios == (0.2, 0.05)


def test_a_torchrec_plan_has_one_price_as_choices_and_as_a_placement():
    job = replace(random_job(3, hbm_gib=1.0), cache_ratios=(0.2, 0.05))
    widths = (None, 64, 32)
    instance = estimate(job, column_widths=widths)
    for found in plans_of(job, column_widths=widths, time_limit_s=20.0):
        assignment = assignment_of_choices(instance, found.rating)
        wanted = {o: loads_of(instance.problem(o), assignment).objective for o in Objective}
        assert price_ms(job, plan_of_assignment(instance, assignment)) == pytest.approx(wanted)


def test_torchrecs_rating_is_the_one_that_its_own_model_gives():
    """The plan's rating by `NoopPerfModel`, from TorchRec's options, against the rating from the instance."""
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.perf_models import NoopPerfModel
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

    from dse.placement.torchrec import objects
    from dse.placement.torchrec.packages import quiet

    job = random_job(5)
    with quiet():
        topology, constraints = objects.topology_of(job.machine), objects.constraints_of(job, None)
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=job.batch_per_rank,
            constraints=constraints,
            storage_reservation=FixedPercentageStorageReservation(job.machine.reserved_share),
            stats=[],
        )
        planner.plan(objects.collection_of(job), objects.sharders())
        rating_ms = NoopPerfModel(topology).rate(planner._best_plan)
    by_name = {o.name: o for o in planner._best_plan}
    options = [by_name[objects.name_of(t)] for t in range(len(job.tables))]
    choices = [Choice(o.sharding_type, o.compute_kernel, tuple(s.rank for s in o.shards)) for o in options]
    instance = estimate(job)
    assignment = assignment_of_choices(instance, choices)
    assert loads_of(instance.problem(Objective.RATING), assignment).objective == pytest.approx(rating_ms)
    found = plans_of(job, column_widths=(None,), time_limit_s=20.0)
    default = next(f for f in found if f.setting == DEFAULT)
    mine = loads_of(instance.problem(Objective.RATING), assignment_of_choices(instance, default.rating))
    assert mine.objective == pytest.approx(rating_ms)


def test_pieces_that_torchrec_does_not_price_have_no_price():
    design = design_of([sharding(ShardingType.TABLE_WISE, [0])])
    job = job_of(design)
    grid = replace(design.sharding.tables[0], type=ShardingType.GRID_SHARD, ranks=(0, 1, 2, 3))
    assert price_ms(job, ShardingPlan((grid,))) is None
    three = replace(design.sharding.tables[0], type=ShardingType.COLUMN_WISE, ranks=(0, 1, 2))
    assert price_ms(job, ShardingPlan((three,))) is None
    two = replace(three, ranks=(0, 1))
    assert price_ms(job, ShardingPlan((two,))) is not None


def test_a_designs_plan_is_predicted_to_be_as_fast_as_torchrecs_or_faster():
    design = design_of(
        [sharding(ShardingType.TABLE_WISE, [0])] * 5,
        rows=[4_000_000, 900_000, 50_000, 300, 20],
        dims=[64, 128, 32, 64, 128],
    )
    predictor = Predictor(profile_for(design.system.device, design.system.node))
    found = compare_design(design, predictor=predictor, torchrec_time_s=10.0, time_limit_s=2.0)
    ours = found.best(OURS, "iteration_time")
    assert ours == found.plans[-1] or ours.iteration_time_ms == found.plans[-1].iteration_time_ms
    assert all(p.iteration_time_ms >= found.plans[-1].iteration_time_ms * (1 - 1e-9) for p in found.plans)
    assert found.to_json()["saved_pct"]["iteration_time"] >= -1e-7
    assert found.plans[-1].lower_bound_ms <= found.plans[-1].iteration_time_ms
