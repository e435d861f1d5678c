"""The accuracy page states what the profiles state."""

from __future__ import annotations

from pathlib import Path

from perfcore.profile.accuracy import main, replaced, section
from perfcore.profile.profile import BUNDLED, load_profile


def test_every_stated_error_is_on_the_page_beside_the_roofline() -> None:
    text = section(BUNDLED)
    own = (e for e in load_profile("h100-sxm").known_errors if "left out" not in e.kernel)
    for error in own:
        numbers = f"{error.gmae_pct:.1f} / {error.mape_pct:.1f}"
        assert any(numbers in line and "h100-sxm" in line for line in text.splitlines()), error
    [row] = [x for x in text.splitlines() if x.startswith("| gemm_bf16 | h100-sxm | 4,795")]
    assert row.count(" / ") == 2


def test_the_page_in_the_documents_is_current() -> None:
    assert section(BUNDLED) in Path("docs/accuracy.md").read_text(encoding="utf-8")


def test_the_command_writes_a_page_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    assert main(["--page", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == "# Accuracy\n\n" + section(BUNDLED)
    path.write_text(replaced("# Mine\n", "<!-- kernels: begin -->\nold\n<!-- kernels: end -->\nlast\n"))
    assert main(["--page", str(path)]) == 0
    assert path.read_text(encoding="utf-8") == "# Mine\n\n" + section(BUNDLED) + "last\n"
