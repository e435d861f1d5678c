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
        self._first_at = self._started
        self._live: Live | None = None

    def __enter__(self) -> ProgressLine:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(
                "preparing the tables …", console=self._console, refresh_per_second=8, transient=False
            )
            self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Progress, *, best: str) -> None:
        """Show where the study stands; `best` says what the best so far is."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._first_at = progress, now
        if self._live is not None:
            from rich.text import Text

            text = self.text(progress, now, best=best)
            self._live.update(Text(text, no_wrap=True, overflow="ellipsis"))
        elif now - self._drawn >= PLAIN_EVERY_S or progress.trials >= progress.trials_total:
            self._drawn = now
            self._console.print(
                self.text(progress, now, best=best),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def text(self, progress: Progress, now_s: float, *, best: str) -> str:
        """The line: trials, designs priced, rate, front, best, time and time left.

        Rate and time left count from the first update, when the tables stood.
        """
        first, found = self._first or progress, progress.found
        elapsed_s = now_s - self._first_at
        priced, done = found.evaluated - first.found.evaluated, progress.trials - first.trials
        parts = [
            f"{progress.trials}/{progress.trials_total} {progress.unit}",
            f"{people(found.evaluated)} designs priced",
            f"{people(priced / elapsed_s)}/s" if priced and elapsed_s > 0 else "",
            f"front {len(found.codes)}",
            best,
            f"{now_s - self._started:.0f} s",
        ]
        if 0 < done < progress.trials_total - first.trials:
            parts.append(f"about {elapsed_s / done * (progress.trials_total - progress.trials):.0f} s left")
        return " · ".join(part for part in parts if part)


def people(number: float) -> str:
    """A count as people read it: three digits and a suffix."""
    for suffix, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.3g} {suffix}"
    return f"{number:.0f}"
