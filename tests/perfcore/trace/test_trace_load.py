"""Files as profilers and copies leave them: pieces, known defects, damage."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfcore.errors import TraceError
from perfcore.trace import load
from perfcore.trace.execution_trace import is_execution_trace, read_execution_trace
from perfcore.trace.kineto import read_kineto
from perfcore.trace.load import read_events

DATA = Path(__file__).parents[2] / "data"
OP = '{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2, "args": {%s}}'

names = st.text(alphabet=st.sampled_from('ab},{"[]\\ \n'), max_size=12)
events = st.lists(
    st.fixed_dictionaries(
        {"ph": st.just("X"), "name": names, "args": st.lists(st.dictionaries(names, names), max_size=3)}
    )
)


@settings(max_examples=50, deadline=None)
@given(events, st.sampled_from([None, 1]), st.integers(1, 200))
def test_pieces_hold_every_event_in_order_however_the_file_is_laid_out(
    found: list[dict[str, Any]], indent: int | None, size: int
) -> None:
    head, tail = {"schemaVersion": 1}, {"traceName": "x", "deviceProperties": [{"id": 0}]}
    text = json.dumps({**head, "traceEvents": found, **tail}, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "PIECE_BYTES", size)
        patch.setattr(load, "read_bytes", lambda path: text.encode())
        properties, pieces = read_events(Path("any.json"))
        assert [e for piece in pieces for e in piece] == found
    assert properties == {**head, **tail}


@pytest.mark.parametrize(
    "defect",
    [
        '"memory bandwidth (GB/s)": inf',
        '"memory bandwidth (GB/s)": -nan',
        '"memory bandwidth (GB/s)": NaN',
        '"path": "C:\\users\\x"',
        '"path": "a\tb"',
        '"path": "a\\u12"',
        '"stack": [1, 2,]',
    ],
)
def test_known_defects_are_mended(tmp_path: Path, defect: str) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [' + OP % defect + ", " + OP % "" + ",\n]}")
    assert len(read_kineto(path).nested[0]) == 2


def test_names_that_are_no_utf_8_are_kept_readable(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(
        b'{"traceEvents": [' + (OP % "").encode().replace(b"aten::mm", b"aten::\xff\xfe") + b"]}"
    )
    assert read_kineto(path).ops[0].name.startswith("aten::")


def test_a_truncated_file_says_what_was_found(tmp_path: Path) -> None:
    whole = gzip.decompress((DATA / "dlrm_8xv100" / "rank7.pt.trace.json.gz").read_bytes())
    path = tmp_path / "cut.json"
    path.write_bytes(whole[:300_000])
    with pytest.raises(TraceError, match=r"cut\.json: not JSON, or truncated.*holds \d+ events") as caught:
        read_kineto(path)
    assert caught.value.hint is not None


def test_what_no_event_may_lack_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    odd = [
        '{"ph": "X", "cat": "cpu_op", "name": "no times"}',
        '{"ph": "X", "cat": "cpu_op", "name": "backwards", "tid": 1, "ts": 5, "dur": -3}',
        '{"ph": "X", "cat": "kernel", "name": "k", "ts": "1", "dur": "2", "args": {"stream": null, "correlation": "x"}}',
        '{"ph": "X", "cat": "cpu_op", "name": "odd", "tid": 1, "ts": 9, "dur": 1, "args": {"Input Dims": 3}}',
        "7",
        "null",
    ]
    path.write_text('{"traceEvents": [' + ", ".join([OP % "", *odd]) + "]}")
    trace = read_kineto(path)
    assert [op.name for op in trace.ops] == ["aten::mm", "odd"]
    assert len(trace.kernels) == 1


def test_clocks_of_new_files_are_relative_to_a_base(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text('{"baseTimeNanoseconds": 1727743122000000000, "traceEvents": [' + OP % "" + "]}")
    assert read_kineto(path).base_us == pytest.approx(1727743122000000.0)


def test_memory_stays_near_the_files_size(tmp_path: Path) -> None:
    """Parsed JSON of all events at once would take about ten times the file."""
    import tracemalloc

    whole = gzip.decompress((DATA / "dlrm_8xv100" / "rank7.pt.trace.json.gz").read_bytes()).decode()
    begin, end = whole.index("[", whole.index('"traceEvents"')) + 1, whole.rindex("]")
    path = tmp_path / "large.json"
    path.write_text(whole[:begin] + ",".join([whole[begin:end]] * 16) + whole[end:])
    tracemalloc.start()
    try:
        read_kineto(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 2 * load.PIECE_BYTES
    assert peak < 4 * path.stat().st_size


NODE = {
    "id": 5,
    "name": "aten::mm",
    "ctrl_deps": 3,
    "inputs": {"shapes": [[2, 3], [3, 4]], "types": ["Tensor(float)"] * 2},
}


def test_schemas_of_execution_traces(tmp_path: Path) -> None:
    old = {"id": 5, "name": "aten::mm", "parent": 3, "rf_id": 9, "tid": 2, "input_shapes": [[2, 3], [3, 4]], "input_types": ["Tensor(float)"] * 2}  # fmt: skip
    new = NODE | {"attrs": [{"name": "rf_id", "value": 9}, {"name": "tid", "value": 2}]}
    found = []
    for schema, node in (("1.0.1", old), ("1.1.1-chakra.0.0.4", new)):
        path = tmp_path / f"{schema}.json"
        thread = {"id": 2, "name": "[pytorch|profiler|execution_trace|thread]"}
        path.write_text(json.dumps({"schema": schema, "pid": 4, "nodes": [node, thread]}))
        assert is_execution_trace(path)
        read = read_execution_trace(path)
        assert (read.schema, read.pid) == (schema, 4)
        found.append(read.nodes)
    assert found[0] == found[1]
    assert found[0][0].shapes == ((2, 3), (3, 4))
    (tmp_path / "none.json").write_text('{"schema": "1.0.1"}')
    with pytest.raises(TraceError, match="has a list `nodes`, but there is none"):
        read_execution_trace(tmp_path / "none.json")
    assert np.all([not is_execution_trace(p) for p in (DATA / "small_traces").glob("*.gz")])
