import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torchrec_cases import design_of, every_kind, sharding

pytest.importorskip("torchrec.distributed", reason="TorchRec is not installed: make test-torchrec")
pytestmark = pytest.mark.filterwarnings("ignore")  # TorchRec's own, about itself

from dse.placement.instances.instance import read_instance  # noqa: E402
from dse.placement.torchrec import (  # noqa: E402
    Job,
    Machine,
    estimate,
    export_plan,
    job_of,
    machine_of,
    objects,
    plan_of_json,
    plan_of_torchrec,
    run_planner,
)
from dse.placement.torchrec.packages import quiet  # noqa: E402
from dse.table_csv import bundled_tables  # noqa: E402
from perfcore.design.model import EmbeddingTable  # noqa: E402
from perfcore.design.sharding import ComputeKernel, ShardingPlan, ShardingType  # noqa: E402
from perfcore.design.training import Optimizer, Precision  # noqa: E402
from perfcore.units import BYTES_PER_GIB  # noqa: E402

INSTANCES = Path(__file__).parents[3] / "data" / "sharding_instances"
WORLD, GPUS = 4, 2
TRAIN_STEP = Path(__file__).parent / "train_step.py"


def job_of_set(name, *, ranks, batch):
    tables = tuple(replace(t, embedding_dim=t.embedding_dim or 128) for t in bundled_tables(name))
    return Job(tables, batch, Machine(ranks))


def exported(design):
    names = {"__name__": "plan"}
    exec(compile(export_plan(design), "plan.py", "exec"), names)
    return names


def module_of(design):
    """A model with the design's tables that takes no memory."""
    import torch
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    tables = zip(design.model.tables, design.model.table_dims, strict=True)
    configs = [
        EmbeddingBagConfig(
            name=t.name, feature_names=[f"f {t.name}"], num_embeddings=t.num_embeddings, embedding_dim=dim
        )
        for t, dim in tables
    ]
    return torch.nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))


@pytest.mark.parametrize(
    ("stored", "tables", "ranks", "batch", "widths"),
    [
        ("criteo_onehot_26x8", "criteo_terabyte", 8, 8192, (None,)),
        ("criteo_v2_26x8", "criteo_terabyte_multihot", 8, 8192, (None,)),
        ("criteo_v2_cw_26x8", "criteo_terabyte_multihot", 8, 8192, (32,)),
        ("synth_856x128", "synthetic_856", 128, 1024, (None,)),
    ],
)
def test_stored_instances_are_made_anew_number_for_number(stored, tables, ranks, batch, widths):
    made = estimate(job_of_set(tables, ranks=ranks, batch=batch), column_widths=widths)
    wanted = read_instance(INSTANCES / f"{stored}.json.gz")
    assert (made.types, made.kernels) == (wanted.types, wanted.kernels)
    for name in ("where", "first_option", "first_shard", "cost_ms", "bytes"):
        np.testing.assert_array_equal(getattr(made, name), getattr(wanted, name), err_msg=name)
    assert made.capacity_bytes == wanted.capacity_bytes


ODD_TABLES = (
    EmbeddingTable("ten rows on sixteen ranks", 10, 2.0, embedding_dim=64),
    EmbeddingTable("one row", 1, 1.0, embedding_dim=256),
    EmbeddingTable("no lookups", 1000, 0.0, embedding_dim=8),
    EmbeddingTable("odd rows", 1_000_003, 7.3, embedding_dim=384),
)


@pytest.mark.parametrize("ratio", [None, 0.1])
@pytest.mark.parametrize("optimizer", [*Optimizer])
def test_one_estimate_a_run_of_shards_gives_what_one_a_shard_gives(optimizer, ratio):
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

    ratios = () if ratio is None else (ratio,)
    job = Job(ODD_TABLES, 64, Machine(16), Precision.BF16, optimizer, ratios)
    with quiet():
        topology, constraints = objects.topology_of(job.machine), objects.constraints_of(job, 32, ratio)
        enumerator = EmbeddingEnumerator(topology, job.batch_per_rank, constraints)
        options = enumerator.enumerate(objects.collection_of(job), objects.sharders())
    plain = [
        (
            s.perf.fwd_compute,
            s.perf.fwd_comms,
            s.perf.bwd_compute,
            s.perf.bwd_comms,
            s.storage.hbm,
            s.storage.ddr,
        )
        for o in options
        for s in o.shards
    ]
    made = estimate(job, column_widths=(32,))
    np.testing.assert_array_equal(made.cost_ms, [p[:4] for p in plain])
    np.testing.assert_array_equal(made.bytes, [p[4] / BYTES_PER_GIB * BYTES_PER_GIB for p in plain])
    if ratio is not None:
        np.testing.assert_array_equal(made.host_bytes, [p[5] for p in plain])
    assert made.types == tuple(o.sharding_type for o in options)


def test_several_column_widths_give_the_union_of_their_options():
    job = Job(ODD_TABLES[-1:], 64, Machine(16))
    made = estimate(job, column_widths=(None, 64, 32))
    pieces = np.diff(made.first_shard)[np.array(made.types) == "column_wise"]
    assert sorted(pieces) == [3, 6, 12]


def test_exported_shardings_are_those_that_torchrecs_own_generators_make():
    from torchrec.distributed import sharding_plan as generators

    dense, fused = "dense", "fused"
    design = design_of(
        [
            sharding(ShardingType.TABLE_WISE, [3]),
            sharding(ShardingType.COLUMN_WISE, [2, 0]),
            sharding(ShardingType.ROW_WISE, range(WORLD)),
            sharding(ShardingType.TABLE_ROW_WISE, [2, 3]),
            sharding(ShardingType.DATA_PARALLEL, range(WORLD)),
            sharding(ShardingType.TABLE_WISE, [1], ComputeKernel.FUSED_UVM),
        ],
        rows=[41, 42, 43, 45, 46, 47],
    )
    module = module_of(design)
    wanted = generators.construct_module_sharding_plan(
        module[0],
        {
            "table_0": generators.table_wise(rank=3, compute_kernel=fused),
            "table_1": generators.column_wise(ranks=[2, 0], compute_kernel=fused),
            "table_2": generators.row_wise(compute_kernel=fused),
            "table_3": generators.table_row_wise(host_index=1),
            "table_4": generators.data_parallel(),
            "table_5": generators.table_wise(rank=1, compute_kernel="fused_uvm"),
        },
        local_size=GPUS,
        world_size=WORLD,
        device_type="cuda",
    )
    wanted["table_3"].compute_kernel = fused  # its generator takes none
    assert wanted["table_4"].compute_kernel == dense
    made = exported(design)["sharding_plan"](module).plan["0"]
    for name, expected in wanted.items():
        assert made[name] == expected, name


def test_an_exported_plan_passes_torchrecs_validation():
    from torchrec.distributed.planner import planners

    design = design_of(every_kind(), world=WORLD, gpus=GPUS)
    module = module_of(design)
    plan = exported(design)["sharding_plan"](module)
    with quiet():
        topology = objects.topology_of(machine_of(design.system))
        planners.validate_modules_inclusion_in_sharding_plan(plan, module, objects.sharders())
        planners.validate_rank_assignment(plan, topology)
    assert plan_of_torchrec(plan, design) == plan_of_json(exported(design)["as_json"](), design)


def test_torchrecs_validation_does_find_a_missing_module():
    from torchrec.distributed.planner import planners
    from torchrec.distributed.planner.types import PlannerError

    design = design_of([sharding(ShardingType.TABLE_WISE, [3])], world=WORLD, gpus=GPUS)
    module = module_of(design)
    plan = exported(design)["sharding_plan"](module)
    plan.plan.clear()
    with quiet(), pytest.raises(PlannerError, match="not present"):
        planners.validate_modules_inclusion_in_sharding_plan(plan, module, objects.sharders())


def test_a_model_with_other_tables_is_refused():
    design = design_of([sharding(ShardingType.TABLE_WISE, [0])])
    other = design_of([sharding(ShardingType.TABLE_WISE, [0])] * 2)
    wider = design_of([sharding(ShardingType.TABLE_WISE, [0])], dims=[64])
    plan = exported(design)["sharding_plan"]
    with pytest.raises(ValueError, match="'table_1'"):
        plan(module_of(other))
    with pytest.raises(ValueError, match=r"\(40, 32\) rows and columns of table table_0"):
        plan(module_of(wider))


def test_a_models_own_names_of_the_tables_can_be_given():
    design = design_of([sharding(ShardingType.TABLE_WISE, [r]) for r in (3, 1)])
    model = replace(design.model, tables=tuple(replace(t, name=f"cat {t.name}") for t in design.model.tables))
    plan = ShardingPlan(tuple(replace(s, table=f"cat {s.table}") for s in design.sharding.tables))
    module = module_of(replace(design, model=model, sharding=plan))
    names = {t.name: f"cat {t.name}" for t in design.model.tables}
    made = exported(design)["sharding_plan"](module, names=names).plan["0"]
    assert {name: p.ranks for name, p in made.items()} == {"cat table_0": [3], "cat table_1": [1]}


def test_a_plan_of_torchrecs_planner_is_read_and_exported_again():
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    design = design_of(
        [sharding(ShardingType.TABLE_WISE, [0])] * 4,
        rows=[1_000_000, 50_000, 10, 4_000_000],
        dims=[128, 256, 64, 128],
    )
    module = module_of(design)
    with quiet():
        topology = objects.topology_of(machine_of(design.system))
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=design.local_batch, stats=[])
        planned = planner.plan(module, objects.sharders())
    again = exported(replace(design, sharding=plan_of_torchrec(planned, design)))["sharding_plan"](module)
    for name, expected in planned.plan["0"].items():
        made = again.plan["0"][name]
        assert (made.sharding_type, made.compute_kernel) == (expected.sharding_type, expected.compute_kernel)
        assert made.sharding_spec == expected.sharding_spec
    assert job_of(design).batch_per_rank == design.local_batch


def test_two_processes_train_a_step_with_an_exported_plan(tmp_path):
    """Every kind of sharding, over gloo: after a step each shard equals its part of the unsharded model's step."""
    design = design_of(every_kind(world=2, gpus=2), world=2, gpus=2, rows=list(range(40, 48)))
    path = tmp_path / "plan.py"
    path.write_text(export_plan(design))
    command = [sys.executable, "-W", "ignore", str(TRAIN_STEP), str(path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(tmp_path / "store")],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [p.communicate(timeout=240) for p in ranks]
    for process, (out, err) in zip(ranks, results, strict=True):
        assert process.returncode == 0, err[-3000:]
        assert out.startswith("checked ")
    values = sum(int(out.split()[1]) for out, _ in results)
    replicated = next(
        t.num_embeddings
        for t, s in zip(design.model.tables, design.sharding.tables, strict=True)
        if s.type is ShardingType.DATA_PARALLEL
    )
    assert values == 32 * (sum(t.num_embeddings for t in design.model.tables) + replicated)


def test_torchrecs_planner_is_run_with_each_setting():
    job = job_of_set("criteo_terabyte_multihot", ranks=8, batch=8192)
    found = list(run_planner.plans_of(job, column_widths=(None, 32), time_limit_s=60.0))
    assert [f.setting for f in found][:3] == ["uniform first", "default", "columns down to 32"]
    assert all(f.rating is not None and len(f.rating) == len(job.tables) for f in found)
