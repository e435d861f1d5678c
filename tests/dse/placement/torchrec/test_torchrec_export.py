import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec_cases import design_of, every_kind, sharding, shardings

from dse.errors import SpaceError
from dse.placement.torchrec import (
    Job,
    Machine,
    estimate,
    export_plan,
    job_of,
    machine_of,
    plan_of_json,
    read_plan,
)
from dse.placement.torchrec.packages import INSTALL
from perfcore.design.model import EmbeddingTable
from perfcore.design.sharding import ComputeKernel, ShardingType, shards_of
from perfcore.errors import DesignError, MissingPackageError

WORLD, GPUS = 4, 2


def run(source):
    names = {"__name__": "plan"}
    exec(compile(source, "plan.py", "exec"), names)
    return names


def arrays(design, plan):
    shards = shards_of(plan, design.model, world_size=WORLD, local_world_size=GPUS)
    return {name: getattr(shards, name) for name in shards.__dataclass_fields__}


@settings(deadline=None, max_examples=50)
@given(st.lists(shardings(world=WORLD, gpus=GPUS), min_size=1, max_size=6))
def test_an_exported_plan_read_again_holds_the_same_shards(placed):
    design = design_of(placed, world=WORLD, gpus=GPUS)
    read = plan_of_json(run(export_plan(design))["as_json"](), design)
    wanted, found = arrays(design, design.sharding), arrays(design, read)
    for name in wanted:
        # TorchRec cuts columns in fours: a piece may be as much wider or narrower, for each of the pieces in it.
        slack = 4.0 * WORLD if name == "dim" else 0.0
        np.testing.assert_allclose(found[name], wanted[name], atol=slack, err_msg=name)
    np.testing.assert_array_equal(found["dim"].sum(axis=0), wanted["dim"].sum(axis=0))


@settings(deadline=None, max_examples=50)
@given(
    placed=shardings(world=WORLD, gpus=GPUS),
    rows=st.integers(1, 50),
    dim=st.integers(8, 40).map(lambda fours: 4 * fours),
)
def test_exported_shards_cover_the_table_once(placed, rows, dim):
    design = design_of([placed], world=WORLD, gpus=GPUS, rows=[rows], dims=[dim])
    plan = run(export_plan(design))
    covered = np.zeros((rows, dim), dtype=int)
    for row, column, height, width, rank in plan["shards_of"]("table_0"):
        assert 0 <= rank < WORLD
        assert width % 4 == 0
        covered[row : row + height, column : column + width] += 1
    copies = WORLD if placed.type is ShardingType.DATA_PARALLEL else 1
    np.testing.assert_array_equal(covered, copies)


def test_a_program_prints_its_plan_and_needs_nothing_of_the_project(tmp_path):
    design = design_of(every_kind())
    path = tmp_path / "plan.py"
    path.write_text(export_plan(design))
    forbid = f"import sys, runpy; sys.modules.update(dse=None, perfcore=None); runpy.run_path({str(path)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", forbid], capture_output=True, text=True, check=True)
    printed = tmp_path / "plan.json"
    printed.write_text(done.stdout)
    assert [t.type for t in read_plan(printed, design).tables] == [t.type for t in design.sharding.tables]


def test_kernels_and_cache_ratios_are_kept():
    cached = sharding(ShardingType.TABLE_WISE, [0], ComputeKernel.FUSED_UVM_CACHING, 0.125)
    design = design_of([cached, sharding(ShardingType.ROW_WISE, range(WORLD), ComputeKernel.FUSED_UVM)])
    plan = run(export_plan(design))
    assert [(t["kernel"], t["cache_load_factor"]) for t in plan["TABLES"].values()] == [
        ("fused_uvm_caching", 0.125),
        ("fused_uvm", None),
    ]
    assert plan_of_json(plan["as_json"](), design) == design.sharding


def test_a_cache_without_a_load_factor_has_fbgemms():
    design = design_of([sharding(ShardingType.TABLE_WISE, [0])])
    data = {"tables": {"table_0": {"type": "table_wise", "kernel": "fused_uvm_caching", "ranks": [1]}}}
    assert plan_of_json(data, design).tables[0].cache_ratio == 0.2


def test_unequal_column_pieces_of_a_plan_become_equal_ones():
    design = design_of([sharding(ShardingType.TABLE_WISE, [0])])
    shards = [[0, 0, 40, 24, 3], [0, 24, 40, 8, 1]]
    data = {"tables": {"table_0": {"type": "column_wise", "kernel": "fused", "shards": shards}}}
    assert plan_of_json(data, design).tables[0].ranks == (3, 3, 3, 1)


@pytest.mark.parametrize(
    ("placed", "dims", "message"),
    [
        (sharding(ShardingType.TABLE_WISE, [0]), [30], "multiples of 4, but table 'table_0' has 30"),
        (sharding(ShardingType.COLUMN_WISE, [0, 1, 2]), [8], "8 columns in 3 pieces"),
        (sharding(ShardingType.ROW_WISE, [0, 2]), [32], r"among ranks=\(0, 2\)"),
    ],
)
def test_what_torchrec_cannot_do_is_refused(placed, dims, message):
    with pytest.raises(SpaceError, match=message):
        export_plan(design_of([placed], dims=dims))


def entry(**changes):
    good = {"type": "table_wise", "kernel": "fused", "ranks": [0], "shards": None}
    return {"tables": {"table_0": good | changes}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "needs the key `tables`"),
        ({"tables": {}}, "'table_0' is only in the design"),
        ({"tables": {"table_0": {}, "x": {}}}, "'x' is only in the plan"),
        ({"tables": {"table_0": 3}}, "needs `type` and `kernel`"),
        (entry(type="diagonal"), "needs one of table_wise"),
        (entry(kernel="key_value"), "has 'key_value'"),
        (entry(ranks=None), "neither `ranks` nor `shards`"),
        (entry(ranks=["0"]), "neither `ranks` nor `shards`"),
        (entry(shards=[[0, 0, 40, 32]]), "list of 5 integers"),
        (entry(shards=[[0, 0, 40, 32.0, 0]]), "list of 5 integers"),
        (
            entry(type="column_wise", shards=[[0, 0, 40, 200, 0], [0, 200, 40, 152, 1]]),
            "multiples of the narrowest",
        ),
        (
            entry(type="column_wise", shards=[[0, 0, 40, 32, 0], [0, 32, 40, 0, 1]]),
            "multiples of the narrowest",
        ),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(data, message):
    with pytest.raises(SpaceError, match=message):
        plan_of_json(data, design_of([sharding(ShardingType.TABLE_WISE, [0])]))


def test_a_rank_outside_the_world_is_refused_when_the_plan_is_used():
    design = design_of([sharding(ShardingType.TABLE_WISE, [0])])
    plan = plan_of_json(entry(ranks=[WORLD]), design)
    with pytest.raises(DesignError, match="rank < world_size"):
        shards_of(plan, design.model, world_size=WORLD)


def test_a_file_that_is_no_json_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("{")
    with pytest.raises(SpaceError, match=r"plan.json is no plan in JSON"):
        read_plan(path, design_of([sharding(ShardingType.TABLE_WISE, [0])]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_ranks": 12}, "whole machines"),
        ({"num_ranks": 0}, "whole machines"),
        ({"num_ranks": 8, "reserved_share": 1.0}, "reserved_share"),
        ({"num_ranks": 8, "hbm_gib": 0.0}, "`hbm_gib > 0`"),
        ({"num_ranks": 8, "host_gib": 0.0}, "`host_gib > 0`"),
    ],
)
def test_impossible_machines_are_refused(change, message):
    with pytest.raises(SpaceError, match=message):
        Machine(**change)


def test_impossible_jobs_are_refused():
    table = EmbeddingTable("a", 10, embedding_dim=8)
    with pytest.raises(SpaceError, match="at least one table"):
        Job((), 1, Machine(1))
    with pytest.raises(SpaceError, match="batch_per_rank >= 1"):
        Job((table,), 0, Machine(1))
    with pytest.raises(SpaceError, match="cache_ratio < 1"):
        Job((table,), 1, Machine(1), cache_ratios=(1.0,))
    with pytest.raises(SpaceError, match="'b' has none"):
        Job((table, EmbeddingTable("b", 10)), 1, Machine(1))


def test_a_designs_job_has_its_tables_and_machine():
    design = design_of([sharding(ShardingType.TABLE_WISE, [0])], dims=[64])
    job = job_of(design)
    assert job.tables[0].embedding_dim == 64
    assert job.batch_per_rank == 8
    assert job.machine == machine_of(design.system)
    assert (job.machine.num_ranks, job.machine.ranks_per_host) == (4, 2)
    assert job.machine.hbm_gib_per_s == 2039.0


@pytest.mark.skipif(
    find_spec("fbgemm_gpu") is not None, reason="TorchRec is installed, so that its absence cannot be tested"
)
def test_without_torchrec_the_command_that_installs_it_is_named():
    with pytest.raises(MissingPackageError, match="needs TorchRec") as caught:
        estimate(Job((EmbeddingTable("a", 10, embedding_dim=8),), 1, Machine(1)))
    assert caught.value.hint == INSTALL


def test_plain_values_of_a_plan_survive_json():
    design = design_of(every_kind())
    data = run(export_plan(design))["as_json"]()
    assert json.loads(json.dumps(data)) == data
