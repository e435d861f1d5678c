"""Design files: read, written, overridden, and refused with every mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dse.candidate import even_plan
from dse.config import dump_design, load_design
from dse.errors import ConfigError
from dse.placement.policy.options import Policy as PlacementPolicy
from dse.schema import DesignFile, Policy
from dse.table_csv import bundled_table_sets, bundled_tables, read_tables
from perfcore.design.design import Design
from perfcore.design.hardware import System, default_node, device, node
from perfcore.design.model import EmbeddingTable, Interaction, Loss, Model
from perfcore.design.sharding import ShardingPlan
from perfcore.design.training import (
    EmbeddingFusion,
    Fusion,
    IndexType,
    Launches,
    Optimizer,
    Precision,
    Training,
    can_capture,
)

DESIGNS = Path("spaces/designs")
TEXT = """
model:
  num_dense_features: 13
  tables: [{name: a, num_embeddings: 1000}, {name: b, num_embeddings: 5e3, pooling_factor: 3, skew: 1.05}]
  embedding_dim: 16
  bottom_hidden: [64]
  top_hidden: [64, 32]
training: {global_batch: 1024}
system: {node: dgx-a100-80gb, world_size: 4}
"""


def evenly(model: Model, training: Training, system: System, policy: str, fusion: Fusion) -> ShardingPlan:
    return even_plan(model, policy=policy, world_size=system.world_size)


def load(folder: Path, text: str, *overrides: str) -> Design:
    path = folder / "design.yaml"
    path.write_text(text, encoding="utf-8")
    return load_design(path, overrides=overrides, place=evenly)


def mistakes(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return [line.removeprefix(f"{folder}/") for line in caught.value.message.splitlines()]


def test_a_file_is_read_into_a_design(tmp_path: Path) -> None:
    design = load(tmp_path, TEXT)
    assert design.model.tables == (EmbeddingTable("a", 1000), EmbeddingTable("b", 5000, 3.0, 1.05))
    assert (design.model.bottom_hidden, design.model.top_hidden) == ((64,), (64, 32))
    assert (design.model.interaction, design.model.loss) == (Interaction.DOT, Loss.BCE)
    assert design.training == Training(1024)
    assert design.fusion == Fusion()
    assert design.system == System(device("a100-sxm4-80gb"), node("dgx-a100-80gb"), 4)
    assert design.sharding == evenly(design.model, design.training, design.system, "auto", design.fusion)


def test_the_policy_reaches_the_solver(tmp_path: Path) -> None:
    design = load(tmp_path, TEXT, "sharding.policy=row_wise")
    assert {t.type for t in design.sharding.tables} == {"row_wise"}


def test_one_rank_needs_no_solver(tmp_path: Path) -> None:
    def never(*_: object) -> ShardingPlan:
        raise AssertionError

    path = tmp_path / "d.yaml"
    path.write_text(TEXT, encoding="utf-8")
    design = load_design(path, overrides=["system.world_size=1"], place=never)
    assert design.sharding == ShardingPlan.on_one_rank(design.model)


@pytest.mark.parametrize("path", sorted(DESIGNS.glob("*.yaml")), ids=lambda p: p.stem)
def test_bundled_designs_load_and_survive_writing(path: Path, tmp_path: Path) -> None:
    design = load_design(path, place=evenly)
    assert load(tmp_path, dump_design(design)) == design
    assert f"device: {design.system.device.name}" in path.read_text(encoding="utf-8")


OWN_GPU = """
name: my-gpu
hbm_bytes: 150.0e+9
hbm_bytes_per_s: 6.0e+12
l2_bytes: 100.0e+6
l2_bytes_per_s: 12.0e+12
sm_count: 160
clock_hz: 2.0e+9
fp32_flops_per_s: 100.0e+12
tf32_flops_per_s: 800.0e+12
bf16_flops_per_s: 1600.0e+12
h2d_bytes_per_s: 50.0e+9
"""


def test_a_device_of_ones_own_brings_the_node_that_its_file_names(tmp_path: Path) -> None:
    path = tmp_path / "my_gpu.yaml"
    path.write_text(OWN_GPU + "default_node: dgx-h100\n", encoding="utf-8")
    design = load_design(DESIGNS / "dlrm_ddp.yaml", overrides=[f"system.device={path}"], place=evenly)
    assert (design.system.device.name, design.system.node.name) == ("my-gpu", "dgx-h100")


@pytest.mark.parametrize(
    ("file", "node"), [("criteo_8gpu", "dgx-a100-80gb"), ("dlrm_ddp", "dgx-1-v100-16gb")]
)
def test_a_device_of_ones_own_without_a_node_keeps_the_links_of_the_design(
    file: str, node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_gpu.yaml").write_text(OWN_GPU, encoding="utf-8")
    path = (DESIGNS / f"{file}.yaml").resolve()
    monkeypatch.chdir(tmp_path)
    design = load_design(path, overrides=["system.device=my_gpu.yaml"], place=evenly)
    assert (design.system.device.name, design.system.node.name) == ("my-gpu", node)


def test_a_device_of_ones_own_needs_a_node_from_somewhere(tmp_path: Path) -> None:
    text = (DESIGNS / "dlrm_ddp.yaml").read_text(encoding="utf-8")
    (tmp_path / "my_gpu.yaml").write_text(OWN_GPU, encoding="utf-8")
    own = tmp_path / "design.yaml"
    own.write_text(text.replace("device: v100-sxm2-16gb", "device: my_gpu.yaml"), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"`system.node` must be set, or my-gpu's description must name a"):
        load_design(own, place=evenly)


def test_published_workloads_have_their_published_sizes() -> None:
    default, mlperf, ddp = (
        load_design(DESIGNS / f"dlrm_{n}.yaml", place=evenly).model for n in ("default", "mlperf", "ddp")
    )
    assert [len(m.tables) for m in (default, mlperf, ddp)] == [8, 26, 8]
    assert [sum(t.num_embeddings for t in m.tables) for m in (default, mlperf, ddp)] == [
        8_000_000,
        60_573_618,
        640_000,
    ]
    assert [m.embedding_dim for m in (default, mlperf, ddp)] == [64, 128, 128]
    assert [m.tables[0].pooling_factor for m in (default, mlperf, ddp)] == [100, 1, 10]


def test_a_new_device_brings_its_usual_node(tmp_path: Path) -> None:
    design = load(tmp_path, TEXT, "system.device=h100-sxm")
    assert (design.system.device.name, design.system.node) == ("h100-sxm", default_node("h100-sxm"))


def test_a_new_device_leaves_a_node_that_is_set_too(tmp_path: Path) -> None:
    design = load(tmp_path, TEXT, "system.device=h100-sxm", "system.node=dgx-a100-40gb")
    assert (design.system.device.name, design.system.node.name) == ("h100-sxm", "dgx-a100-40gb")


def test_a_new_node_brings_its_own_device(tmp_path: Path) -> None:
    written = dump_design(load(tmp_path, TEXT))  # names both
    assert load(tmp_path, written, "system.node=dgx-h100").system.device.name == "h100-sxm"


def test_a_new_policy_replaces_the_plan(tmp_path: Path) -> None:
    written = dump_design(load(tmp_path, TEXT))
    again = load(tmp_path, written, "sharding.policy=data_parallel", "system.world_size=2")
    assert {t.type for t in again.sharding.tables} == {"data_parallel"}


def test_every_mistake_of_every_section_is_told(tmp_path: Path) -> None:
    text = TEXT.replace("dgx-a100-80gb", "dgx-a100").replace("64, 32", "64, 0").replace("1024", "-1")
    assert mistakes(tmp_path, text.replace("name: b", "name: [b]")) == [
        "design.yaml:4:46: model.tables.1.name: input should be a valid string, but got a list of 1",
        "design.yaml:7:20: model.top_hidden.1: input should be greater than or equal to 1, but got 0",
        "design.yaml:8:12: training.global_batch: input should be greater than or equal to 1, but got -1",
    ]
    late = TEXT.replace("dgx-a100-80gb", "dgx-a100-80").replace("name: b", "name: a")
    first, second = mistakes(tmp_path, late)
    assert first.startswith("design.yaml:4:3: model.tables: Table names must be unique, but 'a' occurs")
    assert second.startswith(
        "design.yaml:9:10: system.node: Node 'dgx-a100-80' is not in the catalogue. Did you mean 'dgx-a100-80gb'"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["system.world_size=3"],
            r"training\.global_batch: `global_batch % world_size == 0` must hold, but got ",
        ),
        (["system.world_size=12"], r"system\.world_size: `world_size` must be 1 to 8, or a multiple"),
        (["training.precision=fp16"], "input should be 'fp32', 'tf32' or 'bf16', but got 'fp16'"),
        (["training.global_batch=1e40"], r"training\.global_batch: input should be less than or equal to"),
        (["training.global_batch=.inf"], r"training\.global_batch: .*, but got inf"),
        (["training.optimizer=rowwise_adagrad"], "input should be 'sgd', 'adagrad' or 'adam'"),
        (
            ["model.tables=criteo_terabite"],
            "no bundled table set is called `criteo_terabite`.* did you mean `criteo_terabyte`",
        ),
        (["model.tables=own.csv"], r"model\.tables: .*own\.csv:1:1: cannot be read"),
        (["model.tables=[]"], r"model\.tables: 1 or more must be in the list"),
        (
            ["model.tables.0.embedding_dim=8"],
            r"model: The dot interaction needs one embedding_dim for all tables",
        ),
        (["sharding.policy=auto", "sharding.plan=[]"], r"sharding\.plan: 1 or more must be in the list"),
        (["system.node=null"], "give `node`, `device`, or both"),
        (
            ["sharding.plan=[{table: a, type: table_wise, ranks: [0]}]"],
            "sharding: The sharding plan must place",
        ),
        (
            ["sharding.plan=[{table: a, type: table_wise, ranks: [-1]}]"],
            r"sharding\.plan\.0\.ranks\.0: input should be gr",
        ),
    ],
)
def test_a_mistake_is_named_with_rule_and_value(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, TEXT, *overrides)


def test_own_hardware_is_read_from_files_and_checked(tmp_path: Path) -> None:
    keys = "gpus: 2\nintra_bytes_per_s: 5e10\nintra_latency_us: 9\ninter_bytes_per_s: 1e10\ninter_latency_us: 9\n"
    (tmp_path / "own.yaml").write_text(
        f"name: own\ndevice: t4\nhost_memory_bytes: 1e11\n{keys}", encoding="utf-8"
    )
    design = load(tmp_path, TEXT, "system.node=own.yaml", "system.world_size=2")
    assert (design.system.node.gpus, design.system.device.name) == (2, "t4")
    assert load(tmp_path, dump_design(design)) == design
    (tmp_path / "own.yaml").write_text(f"name: own\ndevise: t4\n{keys.replace('9', '-9')}", encoding="utf-8")
    lines = mistakes(tmp_path, TEXT, "system.node=own.yaml")
    assert len(lines) == 5
    assert any("own.yaml:2:1: devise: unknown key `devise`; did you mean `device`?" in line for line in lines)
    assert any("host_memory_bytes: this key is needed, but it is missing" in line for line in lines)


def test_an_own_device_may_stand_in_the_file(tmp_path: Path) -> None:
    own = replace(device("a100-sxm4-80gb"), name="a100-fast", hbm_bytes_per_s=3e12)
    design = load(tmp_path, TEXT)
    changed = design.with_system(replace(design.system, device=own))
    assert load(tmp_path, dump_design(changed)) == changed


tables_st = st.lists(
    st.builds(
        EmbeddingTable,
        name=st.text(min_size=1, max_size=8),
        num_embeddings=st.integers(1, 10**9),
        pooling_factor=st.floats(0, 1e6),
        skew=st.floats(0, 5),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda t: t.name,
).map(tuple)
widths_st = st.lists(st.integers(1, 4096), max_size=3).map(tuple)
models_st = st.builds(
    Model,
    num_dense_features=st.integers(1, 512),
    tables=tables_st,
    embedding_dim=st.integers(1, 512),
    bottom_hidden=widths_st,
    top_hidden=widths_st,
    interaction=st.sampled_from(Interaction),
    loss=st.sampled_from(Loss),
)
training_st = st.builds(
    Training,
    global_batch=st.integers(1, 10**6).map(lambda b: b * 8),
    precision=st.sampled_from(Precision),
    optimizer=st.sampled_from([Optimizer.SGD, Optimizer.ADAM]),
    table_optimizer=st.sampled_from(Optimizer),
    table_precision=st.sampled_from([Precision.FP32, Precision.BF16]),
    pinned_input=st.booleans(),
    read_loss=st.booleans(),
    synchronize=st.booleans(),
    index_dtype=st.sampled_from(IndexType),
)


@given(
    model=models_st,
    training=training_st,
    policy=st.sampled_from(Policy),
    world_size=st.sampled_from([1, 2, 8]),
    embedding=st.sampled_from(EmbeddingFusion),
    launches=st.sampled_from(Launches),
)
@settings(deadline=None, max_examples=50)
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    model: Model,
    training: Training,
    policy: Policy,
    world_size: int,
    embedding: EmbeddingFusion,
    launches: Launches,
) -> None:
    system = System(device("a100-sxm4-80gb"), node("dgx-a100-80gb"), world_size)
    assume(can_capture(launches, embedding))
    fusion = Fusion(embedding=embedding, launches=launches)
    plan = (
        even_plan(model, policy=policy, world_size=world_size)
        if world_size > 1
        else ShardingPlan.on_one_rank(model)
    )
    design = Design(model, training, fusion, plan, system)
    assert load(tmp_path_factory.mktemp("design"), dump_design(design)) == design


def test_policies_are_those_of_the_solver() -> None:
    assert {str(p) for p in Policy} == {str(p) for p in PlacementPolicy}


@pytest.mark.parametrize("name", bundled_table_sets())
def test_bundled_table_sets_load(name: str) -> None:
    tables = bundled_tables(name)
    assert len(tables) == {"synthetic_856": 856}.get(name, 26)
    assert DesignFile.model_fields  # the schema that names them


def test_the_terabyte_set_has_the_mlperf_sizes() -> None:
    rows = [t.num_embeddings for t in bundled_tables("criteo_terabyte")]
    assert (rows[0], rows[9], rows[19], max(rows), min(rows)) == (39884406, 38532951, 39979771, 39979771, 3)
    assert sum(t.pooling_factor for t in bundled_tables("criteo_terabyte_multihot")) == 214


def csv_mistakes(folder: Path, text: str) -> list[str]:
    path = folder / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_tables(path)
    return [line.removeprefix(f"{folder}/") for line in caught.value.message.splitlines()]


def test_own_tables_come_from_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("rows, dim,pooling,table\n100,8,2.5,a\n\n200,,1,b\n", encoding="utf-8")
    assert read_tables(tmp_path / "t.csv") == (
        EmbeddingTable("a", 100, 2.5, 0.0, 8),
        EmbeddingTable("b", 200),
    )


def test_every_bad_row_of_a_csv_file_is_told(tmp_path: Path) -> None:
    text = "rows,pooling_factor,name\n1,1,a\n0,nan,b\nmany,1,c\n5,1\n7,1,a\n"
    assert csv_mistakes(tmp_path, text) == [
        "t.csv:3:1: num_embeddings: input should be greater than or equal to 1, but got 0",
        "t.csv:3:3: pooling_factor: input should be a finite number, but got nan",
        "t.csv:4:1: num_embeddings: input should be a valid integer, but got 'many'",
        "t.csv:5:1: (row): 3 cells are needed, but got 2",
        "t.csv:6:1: name: 'a' is already there, in line 2",
    ]


def test_a_bad_header_of_a_csv_file_is_told_first(tmp_path: Path) -> None:
    assert csv_mistakes(tmp_path, "row,name,name\n1,a,b\n") == [
        "t.csv:1:1: row: unknown column; did you mean `rows`?",
        "t.csv:1:10: name: this column is there twice",
        "t.csv:1:1: num_embeddings: this column is needed, but it is missing",
    ]
    assert "num_embeddings: this column is needed" in csv_mistakes(tmp_path, "")[0]
    assert csv_mistakes(tmp_path, "rows\n") == [
        "t.csv:1:1: (top level): 1 to 100000 tables are needed, but got 0"
    ]
