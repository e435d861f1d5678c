"""The style sheet that all pages share."""

from __future__ import annotations

import re
from importlib import resources


def style() -> str:
    """The style sheet of the design report."""
    page = resources.files("dse.report").joinpath("template.html").read_text(encoding="utf-8")
    found = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert found is not None, "the design report's template has a style sheet"
    return found[1]
