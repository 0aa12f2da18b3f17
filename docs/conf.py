"""How Sphinx makes the site of these pages: ``make docs``."""

project = "placement"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}

# Links to a heading, `text.md#names`, as GitHub makes them.
myst_heading_anchors = 3
# Options and outputs are shown as they are typed: no curly quotes, and `--` is no dash.
smartquotes = False
# Pages show faulty specs on purpose; Sphinx then colours what it can, and would say so each time.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "alabaster"
html_theme_options = {"description": "Placements as types, collectives as conversions", "page_width": "72rem"}
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
