from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from dse.progress import ProgressLine, people
from dse.search.found import Found
from dse.search.study import Progress

NOTHING = Found.nothing(axes=2, objectives=1)


def at(trials, evaluated):
    return Progress(trials, 100, replace(NOTHING, evaluated=evaluated))


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1 k"), (3_598_560_000, "3.6 G"), (708_007, "708 k")]
)
def test_counts_as_people_read_them(number, text):
    assert people(number) == text


def test_the_line_counts_rate_and_time_left_from_the_first_update(monkeypatch):
    clock = iter([100.0, 126.0, 131.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    line = ProgressLine(Console(file=io.StringIO()))
    line.update(at(0, 1000), best="")
    line.update(at(25, 51_000), best="best 3.2")
    text = line.text(at(25, 51_000), 131.0, best="best 3.2")
    assert (
        text == "25/100 trials · 51 k designs priced · 10 k/s · front 0 · best 3.2 · 31 s · about 15 s left"
    )


def test_without_a_terminal_the_end_is_a_line_of_its_own():
    out = io.StringIO()
    with ProgressLine(Console(file=out, width=40)) as line:
        line.update(at(0, 10), best="nothing feasible yet")
        line.update(at(100, 2000), best="a text that is much longer than the width of the console")
    (printed,) = out.getvalue().splitlines()
    assert printed.startswith("100/100 trials · 2 k designs priced")


def test_a_terminal_shows_the_line_in_place():
    out = io.StringIO()
    with ProgressLine(Console(file=out, force_terminal=True, width=120)) as line:
        line.update(at(50, 10), best=f"best {np.float64(2.5):.3g}")
    assert "preparing the tables" in out.getvalue()
    assert "50/100 trials" in out.getvalue()
