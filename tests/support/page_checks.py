"""What every page of every report must be: offline, accessible, with its formulas and descriptions."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe


def pages(folder):
    return sorted(folder.rglob("*.html"))


def check(page, path):
    """Open a page in a browser that is refused the network; `page` as `tests/browser/conftest.py` makes it."""
    page.goto(path.as_uri(), wait_until="load")
    for fold in page.locator("details").all():
        fold.evaluate("element => element.open = true")  # what is folded counts as well
    assert page.refused == [], path.name
    assert page.complaints == [], path.name
    assert page.locator("script").count() == 0, path.name
    broken = page.locator("img").evaluate_all("all => all.filter(i => !i.complete || !i.naturalWidth).length")
    assert broken == 0, path.name
    for image in page.locator("img").all():
        alt = image.get_attribute("alt") or ""
        assert len(alt) > 10 and not alt.startswith(("Figure without", "No description")), (path.name, alt)
    assert "$$" not in page.locator("main").inner_text(), path.name
    for formula in page.locator("math").all():
        box = formula.bounding_box()
        assert box and box["width"] > 3 and box["height"] > 3, (path.name, formula.get_attribute("alttext"))
    violations = [
        f"{v['id']} ({v['impact']}): {v['nodes'][0]['html'][:120]}"
        for v in Axe().run(page).response["violations"]
        if v["impact"] in ("serious", "critical")
    ]
    assert violations == [], (path.name, violations)
    for link in page.locator("a[href]").evaluate_all("all => all.map(a => a.getAttribute('href'))"):
        if not link.startswith(("#", "http")):
            assert (path.parent / link.split("#")[0]).exists(), (path.name, link)
