"""Overhead tables: the bundled files, the JSON schema's errors, and how published means become a table."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.design.hardware import CATALOGUE
from perfcore.errors import ProfileError
from perfcore.overheads import CONSTANTS, OpOverheads, OverheadTable, overheads_from_json, to_json
from perfcore.profile.overhead_sources import profiler_us_per_event
from perfcore.profile.overhead_table import Built, assemble
from perfcore.profile.published_overheads import read_published
from perfcore.trace.extract import Overhead
from perfcore.trace.kineto import read_kineto

TESTS = Path(__file__).parents[1]
BUNDLED = sorted(CATALOGUE.glob("*/overheads.json"))
# Ops of a DLRM's training iteration, on one GPU and on many.
DLRM_OPS = [
    "aten::linear",
    "aten::relu",
    "aten::cat",
    "aten::bmm",
    "aten::index",
    "aten::sigmoid",
    "aten::binary_cross_entropy",
    "aten::mse_loss",
    "aten::to",
    "aten::ones_like",
    "aten::view",
    "aten::transpose",
    "AddmmBackward0",
    "ReluBackward0",
    "BmmBackward0",
    "CatBackward0",
    "IndexBackward0",
    "SigmoidBackward0",
    "BinaryCrossEntropyBackward0",
    "MseLossBackward0",
    "TBackward0",
    "ViewBackward0",
    "TransposeBackward0",
    "torch::autograd::AccumulateGrad",
    "Optimizer.step#SGD.step",
    "Optimizer.step#Adagrad.step",
    "Optimizer.step#Adam.step",
    "Optimizer.zero_grad#SGD.zero_grad",
    "Optimizer.zero_grad#Adam.zero_grad",
    "fbgemm::bounds_check_indices",
    "fbgemm::split_embedding_codegen_lookup_sgd_function",
    "fbgemm::split_embedding_codegen_lookup_rowwise_adagrad_function",
    "torch::autograd::CppNode<SplitLookupFunction_sgd_Op>",
    "torch::autograd::CppNode<SplitLookupFunction_rowwise_adagrad_Op>",
    "aten::embedding_bag",
    "EmbeddingBagBackward0",
    "ToCopyBackward0",
    "MmBackward0",
    "All2All_Pooled_Wait",
    "ReduceScatter_Req",
    "nccl:all_to_all",
    "nccl:all_reduce",
]
# One iteration of DLRM_default, as its authors' trace of 2021 shows it: op, launches.
LINEAR, RELU = ("aten::linear", 2), ("aten::relu", 1)
LAYER_BACKWARD = [
    ("AddmmBackward0", 3),
    ("torch::autograd::AccumulateGrad", 1),
    ("TBackward0", 0),
    ("torch::autograd::AccumulateGrad", 1),
]
RELU_BACKWARD = ("ReluBackward0", 1)
DLRM_DEFAULT = [
    ("Optimizer.zero_grad#SGD.zero_grad", 12),
    *[("aten::to", 1)] * 3,
    *[LINEAR, RELU] * 2,
    *[("aten::to", 0)] * 4,
    ("LookupFunction", 1),
    ("aten::view", 0),
    ("aten::cat", 1),
    ("aten::transpose", 0),
    ("aten::bmm", 1),
    *[("aten::to", 1)] * 2,
    ("aten::index", 1),
    ("aten::cat", 1),
    *[LINEAR, RELU] * 3,
    LINEAR,
    ("aten::sigmoid", 1),
    ("aten::mse_loss", 2),
    ("aten::ones_like", 1),
    ("MseLossBackward0", 2),
    ("SigmoidBackward0", 1),
    *[*LAYER_BACKWARD, RELU_BACKWARD] * 3,
    *LAYER_BACKWARD,
    ("CatBackward0", 0),
    ("IndexBackward0", 11),
    ("SliceBackward0", 2),
    ("BmmBackward0", 2),
    ("TransposeBackward0", 0),
    ("CatBackward0", 0),
    ("ViewBackward0", 0),
    ("LookupFunctionBackward", 1),
    *[RELU_BACKWARD, *LAYER_BACKWARD] * 2,
    ("Optimizer.step#SGD.step", 12),
]


def bundled(path: Path) -> OverheadTable:
    return overheads_from_json(json.loads(path.read_text()))


def v100() -> OverheadTable:
    return bundled(CATALOGUE / "v100-sxm2-16gb" / "overheads.json")


def host_us(table: OverheadTable, op: str, launches: int) -> float:
    times = table.of(op)
    if not launches:
        return times.t1_us + times.alone_us
    between = (launches - 1) * times.t5_us
    return times.t1_us + times.t2_us + launches * times.t4_us + between + times.t3_us


def valid(**changes: Any) -> dict[str, Any]:
    op = {"t1_us": 1, "t2_us": 2, "t3_us": 3, "t4_us": 4, "t5_us": 5, "alone_us": 6, "count": 7}
    data = {
        "schema_version": 1,
        "provenance": {"constants": dict.fromkeys(CONSTANTS, "a stopwatch")},
        **dict.fromkeys(CONSTANTS, 10),
        "default": op,
        "by_op": {"aten::relu": op},
    }
    return {k: v for k, v in (data | changes).items() if v is not None}


def test_both_bundled_tables_are_there() -> None:
    assert [p.parent.name for p in BUNDLED] == ["a100-sxm4-80gb", "v100-sxm2-16gb"]


@pytest.mark.parametrize("path", BUNDLED, ids=lambda p: p.parent.name)
def test_bundled_tables_load_and_know_the_ops_of_a_dlrm(path: Path) -> None:
    table = bundled(path)
    assert table.unknown(DLRM_OPS) == {}
    assert overheads_from_json(to_json(table)) == table


@pytest.mark.parametrize("path", BUNDLED, ids=lambda p: p.parent.name)
def test_bundled_tables_say_where_they_come_from(path: Path) -> None:
    provenance = bundled(path).provenance
    assert provenance["sources"]
    assert provenance["date"][:2] == "20"
    assert 0 < provenance["profiler_us_per_event"]["traces"] < 2
    assert all(len(provenance["constants"][name]) > 10 for name in CONSTANTS)
    assert provenance["factors"]


@pytest.mark.parametrize("path", BUNDLED, ids=lambda p: p.parent.name)
def test_bundled_numbers_are_of_the_order_that_the_field_reports(path: Path) -> None:
    table = bundled(path)
    assert 4 <= table.launch_latency_us <= 13
    assert 0 < table.graph_gap_us <= table.kernel_gap_us <= 4
    assert 5 <= table.default.t1_us <= 15
    assert 12 <= table.default.t2_us <= 25
    assert 3 <= table.default.t4_us <= 11
    assert table.of("AddmmBackward0").t2_us > table.of("ReluBackward0").t2_us


def test_trimming_factors_undo_a_bias_towards_short_times() -> None:
    assert all(1 < f < 2 for f in v100().provenance["factors"]["trimming"].values())


def test_host_time_of_a_dlrm_iteration_is_near_what_a_host_bound_one_took() -> None:
    """DLRM_default at batch 512 took 4.57 ms on a V100 without the profiler, its kernels less than half of that."""
    total_us = sum(host_us(v100(), op, launches) for op, launches in DLRM_DEFAULT)
    assert v100().unknown(op for op, _ in DLRM_DEFAULT) == {}
    assert total_us == pytest.approx(4570, rel=0.15)


def test_host_time_is_below_what_profiled_runs_took() -> None:
    """Ten iterations of DLRM_default at batch 2048 took the profiled host 103.4 and 109.6 ms (waits for the GPU's 66.7 included)."""
    total_us = sum(host_us(v100(), op, launches) for op, launches in DLRM_DEFAULT)
    idle_us = (103_392 - 66_692) / 10
    assert idle_us < total_us < 10_339


def test_the_default_serves_unknown_ops_and_is_counted() -> None:
    table = overheads_from_json(valid())
    assert table.of("aten::tanh") is table.default
    assert table.unknown(["aten::tanh", "aten::relu", "aten::tanh"]) == {"aten::tanh": 2}


def test_aliases_take_the_overheads_of_their_target() -> None:
    table = overheads_from_json(valid(aliases={"aten::relu_": "aten::relu"}))
    assert table.of("aten::relu_") == table.of("aten::relu")
    assert "aliases" not in to_json(table)


times = st.floats(0, 1e6, allow_nan=False)
ops = st.builds(OpOverheads, times, times, times, times, times, times, st.integers(0, 10**9))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(min_size=1), ops, max_size=4), ops, times, st.integers(1, 10**6))
def test_tables_survive_json(
    by_op: dict[str, OpOverheads], default: OpOverheads, us: float, depth: int
) -> None:
    provenance = {"constants": dict.fromkeys(CONSTANTS, "made up")}
    table = OverheadTable(by_op, default, us, us, us, us, depth, provenance)
    assert overheads_from_json(json.loads(json.dumps(to_json(table)))) == table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "overheads.schema_version must be 1, but got 2"),
        ({"kernel_gap_us": None}, "overheads needs the key 'kernel_gap_us', but it is missing"),
        ({"by_ops": {}}, "overheads has no key 'by_ops'"),
        ({"kernel_gap_us": -1}, "`0 <= overheads.kernel_gap_us < inf` must hold, but got -1"),
        ({"kernel_gap_us": float("nan")}, "overheads.kernel_gap_us < inf` must hold, but got nan"),
        ({"graph_launch_us": "9"}, "overheads.graph_launch_us < inf` must hold, but got '9'"),
        ({"queue_depth": 0}, "`overheads.queue_depth >= 1` must hold for an integer, but got 0"),
        ({"queue_depth": 9.5}, "`overheads.queue_depth >= 1` must hold for an integer, but got 9.5"),
        ({"by_op": []}, r"overheads.by_op must be a mapping, but got \[\]"),
        ({"default": 3}, "overheads.default must be a mapping, but got 3"),
        ({"by_op": {"aten::mm": {"t1_us": 1}}}, "overheads.by_op.aten::mm needs the key 't2_us'"),
        ({"by_op": {"x": valid()["default"] | {"t4": 1}}}, "overheads.by_op.x has no key 't4'"),
        ({"by_op": {"x": valid()["default"] | {"t4_us": True}}}, "`0 <= overheads.by_op.x.t4_us < inf`"),
        ({"by_op": {"x": valid()["default"] | {"count": -1}}}, "`overheads.by_op.x.count >= 0`"),
        ({"provenance": {}}, "overheads.provenance.constants must be a mapping, but got None"),
        (
            {"provenance": {"constants": {"launch_latency_us": "x"}}},
            "overheads.provenance.constants.kernel_gap_us must name the source of kernel_gap_us",
        ),
        ({"aliases": {"a": "b"}}, "overheads.aliases.a must name an op of by_op, but got 'b'"),
        (
            {"aliases": {"aten::relu": "aten::relu"}},
            "overheads.aliases.aten::relu must not be in by_op as well",
        ),
    ],
)
def test_wrong_files_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        overheads_from_json(valid(**changes))


def test_alien_json_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"overheads must be a mapping, but got \[1\]"):
        overheads_from_json([1])


def test_a_misspelt_key_is_answered_with_the_nearest() -> None:
    with pytest.raises(ProfileError) as caught:
        overheads_from_json(valid(by_ops={}))
    assert caught.value.hint == "Did you mean 'by_op'?"


def test_what_an_op_was_not_seen_to_do_is_filled() -> None:
    means = {
        ("a", Overhead.T2): 10.0,
        ("a", Overhead.T3): 4.0,
        ("a", Overhead.T4): 5.0,
        ("b", Overhead.T2): 20.0,
        ("b", Overhead.T3): 8.0,
        ("b", Overhead.T5): 6.0,
        ("view", Overhead.ALONE): 3.0,
    }
    table = assemble(
        Built(means, {"a": 3, "b": 1}),
        t1_us={"a": 1.0, "b": 1.0, "view": 2.0},
        constants=dict.fromkeys([c for c in CONSTANTS if c != "queue_depth"], (1.0, "x")),
        provenance={"factors": {}},
    )
    assert table.default.t2_us == pytest.approx((3 * 10 + 20) / 4)
    assert table.of("a") == OpOverheads(1.0, 10.0, 4.0, 5.0, 6.0, 14.0, 3)
    assert table.of("view").alone_us == 3.0
    assert table.of("view").t2_us == table.default.t2_us


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / name).write_text("\n".join(lines) + "\n")


def test_published_means_are_renamed_weighted_and_freed_of_waits(tmp_path: Path) -> None:
    figure = "overhead_type,op,model,batch_size,mean_us(read off),std_us(read off)"
    write(
        tmp_path,
        "overheads_T1_from_figure.csv",
        figure,
        "T1,(all),DLRM_DDP,512,8,5",
        "T1,(all),DLRM_DDP,1024,6,5",
    )
    lines = (
        "T2,AccumulateGrad,DLRM_DDP,512,9,1",
        "T5,TBackward0,DLRM_DDP,512,3,1",
        "T5,aten::linear,DLRM_DDP,512,30,1",
        "T5,aten::linear,DLRM_DDP,2048,99,1",
        "T2,aten::linear,DLRM_DDP,2048,44,1",
    )
    write(tmp_path, "overheads_T2_T3_T5_top10_ops_from_figure.csv", figure, *lines)
    write(
        tmp_path,
        "overheads_T1_T2_by_op_model_batch_2022.csv",
        "overhead_type,op,model,batch_size,mean_us,std_us,count",
        "T2,aten::linear,DLRM_DDP,512,40,1,300",
        "T2,aten::linear,DLRM_DDP,1024,20,1,100",
        "T2,aten::linear,DLRM_DDP,8192,999,1,100",
        "T2,aten::linear,resnet50,512,999,1,100",
        "T2,aten::mul,resnet50,64,19,1,100",
        "T2,aten::mul,DLRM_DDP,8192,999,1,100",
        "T1,(all ops),DLRM_default,256,12,10,1000",
        "T1,(all ops),DLRM_default,512,8,3,940",
        "T1,(all ops),DLRM_default,4096,1,3,940",
        "T2,aten::linear,DLRM_MLPerf,256,30,3,300",
        "T2,aten::relu,DLRM_MLPerf,256,10,3,100",
        "T2,aten::sigmoid,DLRM_MLPerf,256,99,3,100",
        "T2,aten::linear,DLRM_MLPerf,1024,25,3,299",
        "T2,aten::relu,DLRM_MLPerf,1024,5,3,90",
    )
    header = "run,overhead_type,op_or_launch,mean_us,std_us"
    write(
        tmp_path,
        "overheads_T1_to_T5_dlrm_default_2021.csv",
        header,
        "r,T2,AddmmBackward,68,1",
        "r,T3,aten::to,197,192",
        "r,T3,aten::to,6,2",
        "r,T4,cudaLaunchKernel,11,1",
        "r,T5,AddmmBackward,46,1",
        "r,T5,aten::relu,0,0",
    )
    write(tmp_path, "overheads_T1_to_T5_dlrm_mlperf_2021.csv", header, "r,T5,AddmmBackward,999,1")
    published = read_published(tmp_path)
    assert published.figures == {
        ("(all)", Overhead.T1): 7,
        ("torch::autograd::AccumulateGrad", Overhead.T2): 9,
        ("TBackward0", Overhead.ALONE): 3,
        ("aten::linear", Overhead.T5): 30,  # without the batch at which outputs are zeroed first
        ("aten::linear", Overhead.T2): 44,
    }
    assert published.all_figures == published.figures | {("aten::linear", Overhead.T5): (30 + 99) / 2}
    assert published.table_2022 == {
        ("aten::linear", Overhead.T2): pytest.approx((300 * 40 + 100 * 20 + 299 * 25) / 699),
        ("aten::relu", Overhead.T2): 5,
        ("aten::mul", Overhead.T2): 19,
        ("(all)", Overhead.T1): (8 + 1) / 2,
    }
    assert published.counts == {"aten::linear": 699, "aten::mul": 100, "aten::relu": 90, "(all)": 1880}
    # Totals over the ops of a model that have both, with outliers over without.
    assert published.trimming == {
        "T1": {"DLRM_default": 1.5},
        "T2": {"DLRM_MLPerf": (300 * 30 + 100 * 10) / (300 * 25 + 100 * 5)},
    }
    assert published.runs_2021 == {
        ("AddmmBackward0", Overhead.T2): 68,
        ("AddmmBackward0", Overhead.T5): 46,
        ("aten::to", Overhead.T3): 6,
    }


def test_the_profilers_cost_is_at_most_the_spacing_of_its_events() -> None:
    trace = read_kineto(TESTS / "data" / "dlrm_8xv100" / "rank7.pt.trace.json.gz")
    silent = [op for op in trace.ops if op.name == "TBackward0"]
    spacing = np.mean(np.concatenate([np.diff(op.event_starts_us) for op in silent]))
    assert 0 < profiler_us_per_event([trace]) < spacing
