"""Kernels of a CSV file, priced."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dse.cli import app
from dse.errors import ConfigError, StorageError
from dse.kernel_table import KINDS, priced_rows, read_kernels, write_rows
from perfcore.graph.kernels import DType, Gemm
from perfcore.profile.profile import load_profile

EXAMPLES = Path("docs/kernels.csv")


def kernels_csv(folder: Path, text: str) -> Path:
    path = folder / "kernels.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_documented_rows_hold_every_kind() -> None:
    table = read_kernels(EXAMPLES)
    assert [row["kind"] for row in table.rows] == list(KINDS)
    assert [type(k) for k in table.kernels] == list(KINDS.values())


def test_a_price_is_the_models_with_its_interval() -> None:
    costs = load_profile("h100-sxm").cost_model()
    table = read_kernels(EXAMPLES)
    row = priced_rows(table, costs)[0]
    kernel = Gemm(4096.0, 1024.0, 512.0, DType.BF16)
    us, spread = float(costs.predict_us([kernel])[0]), costs.log_error_90(kernel)
    assert float(row["predicted_us"]) == pytest.approx(us, rel=1e-5)
    assert float(row["low_us"]) == pytest.approx(us / math.exp(spread), rel=1e-5)
    assert float(row["high_us"]) == pytest.approx(us * math.exp(spread), rel=1e-5)
    assert row["calibrated"] == "measured"


def test_the_command_writes_the_columns_beside_the_files(tmp_path: Path) -> None:
    path = kernels_csv(tmp_path, "kind,dtype,batch,m,n,k\ngemm,bf16,1,4096,1024,512\ngemm,fp32,1,64,64,64\n")
    result = CliRunner().invoke(
        app, ["profiles", "price", "a100-sxm4-80gb", str(path), "-o", str(tmp_path / "p.csv")]
    )
    assert result.exit_code == 0, result.output
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "kind",
        "dtype",
        "batch",
        "m",
        "n",
        "k",
        "predicted_us",
        "low_us",
        "high_us",
        "calibrated",
    ]
    assert all(float(r["low_us"]) < float(r["predicted_us"]) < float(r["high_us"]) for r in rows)


@pytest.mark.parametrize("words", [["price", "h100-sxm"], ["price", "h100-sxm", "x.csv"], ["a", "b"]])
def test_words_that_make_no_command_are_refused(words: list[str]) -> None:
    assert CliRunner().invoke(app, ["profiles", *words]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m,n\n1,2\n", r"kernels\.csv:1: a column `kind` is needed, but the columns are m, n"),
        ("kind\nconv\n", r"kernels\.csv:2: `kind` must be one of gemm, .*, but got 'conv'"),
        ("kind,m,n\ngemm,1,2\n", r"kernels\.csv:2: a gemm needs a value in column `k`"),
        (
            "kind,dtype,m,n,k\ngemm,bf16,x,2,3\n",
            r"kernels\.csv:2: `m` must be a number of at least 0, but got 'x'",
        ),
        ("kind,dtype,m,n,k\ngemm,bf16,-1,2,3\n", r"`m` must be a number of at least 0, but got '-1'"),
        ("kind,dtype,m,n,k\ngemm,fp8,1,2,3\n", r"`dtype` must be one of fp32, tf32, bf16, but got 'fp8'"),
        (
            "kind,bytes,parts,split\nconcat,8,2,maybe\n",
            r"`split` must be one of true, false, but got 'maybe'",
        ),
    ],
)
def test_a_wrong_cell_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_kernels(kernels_csv(tmp_path, text))


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read"):
        read_kernels(tmp_path / "none.csv")
    table = read_kernels(EXAMPLES)
    with pytest.raises(StorageError, match=r"p\.csv cannot be written"):
        write_rows(tmp_path / "nowhere" / "p.csv", table, [])
