"""Benchmarks print what they found as a table of figures at the end; nothing fails on time."""

from __future__ import annotations

import pytest

FIGURES = pytest.StashKey()


def pytest_configure(config):
    config.stash[FIGURES] = []


@pytest.fixture
def figure(request):
    """Adds a line to the table: what, and how much."""

    def add(what, value):
        request.config.stash[FIGURES].append((what, value))

    return add


def pytest_terminal_summary(terminalreporter, config):
    figures = config.stash[FIGURES]
    if figures:
        terminalreporter.section("figures (CPU time of one core)")
        width = max(len(what) for what, _ in figures)
        for what, value in figures:
            terminalreporter.write_line(f"{what:<{width}}  {value:>20}")
