"""Base units inside (bytes, flops, microseconds); conversion at the edge."""

from __future__ import annotations

from typing import Final

US_PER_S: Final = 1e6
US_PER_MS: Final = 1e3
BYTES_PER_GIB: Final = 2**30
BYTES_PER_MIB: Final = 2**20
GIGA: Final = 1e9
S_PER_H: Final = 3600.0
