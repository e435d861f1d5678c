"""Small pieces of HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


def escaped(value: object) -> str:
    """A value as text that HTML shows unchanged."""
    return html.escape(str(value))


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = ()) -> str:
    """An HTML table of texts that are already escaped; `numeric` columns stand to the right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f'<{tag} class="{"num" if i in numeric else "wrap" if len(v) > 40 else ""}">{v}</{tag}>'
            for i, v in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', head)}</tr></thead>" if any(head) else ""
    return f"<table>{top}<tbody>{body}</tbody></table>"
