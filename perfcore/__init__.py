"""perfcore: fast critical-path prediction of DLRM training-iteration time.

This package root needs the standard library and numpy only, so that `perfcore.measure` starts on a
bare GPU machine; catboost, numba and torch are imported where they are used.
"""

from __future__ import annotations

__version__ = "0.1.0"
