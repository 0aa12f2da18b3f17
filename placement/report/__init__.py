"""A plan explained: ``explain_text`` for a terminal, ``to_json`` for programs, HTML and dot to look at."""

from placement.report.data import explain_data, to_json
from placement.report.dot import to_dot
from placement.report.html import to_fragment, to_html
from placement.report.text import explain_text
from placement.report.views import view

__all__ = ["explain_data", "explain_text", "to_dot", "to_fragment", "to_html", "to_json", "view"]
