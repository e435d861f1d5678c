"""One live line on stderr while a study runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dse.search.study import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

PLAIN_EVERY_S = 10.0


class ProgressLine:
    """Redrawn in place on a terminal; elsewhere a line of its own now and then."""

    def __init__(self, console: Console) -> None:
        """A line that has not been drawn yet."""
        self._console = console
        self._started = self._drawn = time.monotonic()
        self._first: Progress | None = None
        self._live: Live | None = None

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(
                "preparing the tables …", console=self._console, refresh_per_second=8, transient=False
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Progress, *, best: str) -> None:
        """Show where the study stands; `best` says what the best so far is."""
        self._first = self._first or progress
        now = time.monotonic()
        if self._live is not None:
            self._live.update(self.text(progress, now - self._started, best=best))
        elif now - self._drawn >= PLAIN_EVERY_S or progress.trials >= progress.trials_total:
            self._drawn = now
            self._console.print(
                self.text(progress, now - self._started, best=best),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def text(self, progress: Progress, elapsed_s: float, *, best: str) -> str:
        """The line: trials, candidates, rate, front, best, time left."""
        first = self._first or progress
        found = progress.found
        rate = (found.evaluated - (0 if first.trials == 0 else first.found.evaluated)) / max(elapsed_s, 1e-9)
        done = progress.trials - first.trials
        left = elapsed_s / done * (progress.trials_total - progress.trials) if done > 0 else None
        parts = [
            f"{progress.trials}/{progress.trials_total} {progress.unit}",
            f"{people(found.evaluated)} designs priced",
            f"{people(rate)}/s",
            f"front {len(found.codes)}",
            best,
            f"{elapsed_s:.0f} s" + (f", about {left:.0f} s left" if left is not None and left >= 1 else ""),
        ]
        return " · ".join(part for part in parts if part)


def people(number: float) -> str:
    """A count as people read it: three digits and a suffix."""
    for suffix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.3g} {suffix}"
    return f"{number:.0f}"
