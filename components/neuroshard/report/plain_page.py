"""What pages without scripts have in common: a title, cards, notes, pictures, and a table of all rows. Nothing is fetched."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined

from neuroshard.core.clean import cleaned
from neuroshard.report.svg import drawn

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} · NeuroShard</title>
<style>{{ style | safe }} svg { max-width: 100%; height: auto; background: #ffffff; }</style>
</head>
<body>
<header><div class="titles"><h1>{{ title }}</h1><p>{{ what }}</p>
<p class="quiet">{% block legend %}{% endblock %}</p>
</div></header>
<main>
<section>
  <div class="cards">{% for card in cards %}
    <div class="card"><h3>{{ card.title }}</h3><p class="figure">{{ card.figure }}</p><p class="quiet">{{ card.note }}</p></div>
  {% endfor %}</div>
  {% for note in notes %}<p class="note">{{ note }}</p>{% endfor %}
</section>
<section><div class="pair">
{% block pictures %}{% endblock %}
</div></section>
<section><h2>{% block table %}{% endblock %}</h2>
  <div class="scroll"><table>
    <thead><tr>{% for name in columns %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
    <tbody>{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
    {% endfor %}</tbody>
  </table></div>
  <p class="quiet">{% block under_table %}{% endblock %}</p>
</section>
</main>
</body>
</html>
"""


def plain_page(blocks: str, fields: Mapping[str, Any], charts: Mapping[str, dict[str, Any] | None]) -> str:
    """The page as HTML, with these `blocks` of Jinja2: `legend`, `pictures`, the `table`'s heading, and what is `under_table`.

    `fields` are `title`, `what`, `cards` (each a title, figure and note), `notes`, `columns`, `rows`, and what blocks name.
    `charts` are specifications of Vega-Lite by the names that blocks have for their pictures; None is no picture.
    """
    environment = Environment(
        loader=DictLoader({"page": PAGE}),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string('{% extends "page" %}' + blocks).render(
        **cleaned(dict(fields)),
        style=(files("neuroshard.report") / "page" / "style.css").read_text(encoding="utf-8"),
        **{name: "" if spec is None else drawn(spec) for name, spec in charts.items()},
    )
