"""`dse calibrate` and `dse profiles fit`: mistakes are answered in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dse.cli import app
from perfcore.profile.profile import BUNDLED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "-o", "{tmp}/p", "--budget", "soon"], "a duration like 60s or 3m"),
        (["calibrate", "-o", "{tmp}/p", "--budget", "0s"], "`budget > 0`"),
        (["calibrate", "-o", "{tmp}/p", "--device", "cuda:99"], "needs a CUDA GPU"),
        (["calibrate", "-o", str(BUNDLED / "t4")], "never overwritten"),
        (["profiles", "fit"], "needs a folder of samples"),
        (["profiles", "fit", "{tmp}/none", "-o", "{tmp}/p"], "samples are needed"),
        (["profiles", "t4", "samples"], "belong to `dse profiles fit`"),
        (["validate", "{tmp}", "--recalibrate", "{tmp}/p"], "needs `--profile`"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [a.replace("{tmp}", str(tmp_path)) for a in arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
