"""Takes the pictures of the docs again: `python -m tests.panel.pictures`.

The panel is real, its records are the tests' own; nothing on the pictures is of any installation.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.panel.browsing import chromium, login
from tests.panel.site import ROOT, panel

FOLDER = ROOT / "docs" / "pictures"
SHOTS = (
    ("overview", "/", "light", 1280, 860),
    ("deployment", "/deployments/mistral-medium-3.5/", "dark", 1280, 860),
    ("build", "/builds/7/", "light", 1280, 900),
    ("phone", "/", "dark", 390, 780),
)


def main() -> int:
    """Bring the panel up, look at it, keep what was seen."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="mm-pictures-") as folder,
        panel(Path(folder)) as site,
        chromium() as browser,
    ):
        for name, address, theme, width, height in SHOTS:
            context = browser.new_context(
                base_url=site.url,
                color_scheme="dark" if theme == "dark" else "light",
                viewport={"width": width, "height": height},
            )
            page = context.new_page()
            login(page, "ada")
            page.goto(address)
            page.locator("html[data-stream=on]").wait_for()
            page.screenshot(path=FOLDER / f"{name}.png")
            context.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
