"""Templates without indentation: what is cut, and what stays."""

from pathlib import Path

from django.template import Engine


def _render(folder: Path, source: str) -> str:
    (folder / "page.html").write_text(source)
    loaders = ["deployments.panel.template_loader.Loader"]
    return Engine(dirs=[str(folder)], loaders=loaders).get_template("page.html").source


def test_indentation_and_blank_lines_go(tmp_path: Path) -> None:
    """A line break stays where words would join; the indentation after it goes."""
    assert _render(tmp_path, "<p>\n    two\n\n    words\n</p>\n") == "<p>\ntwo\nwords\n</p>\n"


def test_white_space_that_is_shown_stays(tmp_path: Path) -> None:
    """The content of pre and textarea is left as it is."""
    shown = "<pre\n  class='spec'>\n  a\n\n    b</pre>"
    area = "<textarea>\n  c</textarea>"
    assert _render(tmp_path, f"<div>\n  {shown}\n  {area}\n</div>") == (
        f"<div>\n{shown}\n{area}\n</div>"
    )
