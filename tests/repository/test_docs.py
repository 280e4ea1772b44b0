"""Pages stay short, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import ROOT
from tests.tools import config_page

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
RESULTS = sorted((ROOT / "benchmarks").rglob("*.md"))
LIMITS = {"README.md": 900, "CHANGELOG.md": 300}
GENERATED = "config.md"


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_a_page_is_short(page: Path) -> None:
    if page.name != GENERATED:
        assert len(page.read_text().split()) <= LIMITS.get(page.name, 1800)


def test_the_pages_are_short_together() -> None:
    written = [page for page in PAGES if page.name != GENERATED]
    assert len(written) > 8 and sum(len(page.read_text().split()) for page in written) <= 20_000


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not link.startswith("http")
    ]
    for link in links:
        path, _, section = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if section and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert section in map(anchor, headings), link


def test_the_page_on_the_config_is_current() -> None:
    page = (ROOT / "docs" / GENERATED).read_text(encoding="utf-8")
    assert page == config_page.page(), (
        "run python -m tests.tools.config_page --write docs/config.md"
    )
