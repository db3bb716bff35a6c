"""Pages of HTML: a template, pictures, and what they show. A page fetches nothing.

The charts are Vega-Lite's (docs/decisions.md), drawn by the package vl-convert as SVG, or in the page by the script that comes
with it. Names of tables are untrusted: the template escapes them, and the data cannot end its block. The Content-Security-Policy
allows only the scripts whose digests it lists, and no access to the network.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from neuroshard.core.clean import cleaned
from neuroshard.files.disk import write_bytes

MOST_COLOURS = 10  # of pictures.json: as many as readers tell apart


def plain_page(fields: Mapping[str, Any]) -> str:
    """A page without scripts.

    `fields` are `title`, `what` and `legend`; `cards` (each a title, figure and note), `notes`, and `pictures` (each a title, svg
    and note); and a table's `heading`, `columns`, `rows`, and what is `under_table`.
    """
    return _rendered("plain.html", fields, scripts=[])


def scripted_page(fields: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The page of a plan: `fields` fill the template report.html, `data` is what the scripts draw."""
    scripts = [_apart(_charts()), _apart(_piece("lists.js") + _piece("main.js"))]
    return _rendered("report.html", fields, scripts=scripts, data=_block(cleaned(data)))


def charts(name: str, words: Mapping[str, Any]) -> dict[str, Any]:
    """Specifications of Vega-Lite by name, of a file of page/, with these `words` for its `$word`s."""
    found: dict[str, Any] = json.loads(Template(_piece(name)).safe_substitute(words))
    return found


def drawn(name: str, words: Mapping[str, str] | None = None, **rows: list[dict[str, Any]]) -> str:
    """A chart of page/pictures.json as SVG, with the rows of each of its data."""
    import vl_convert

    found = charts("pictures.json", words or {})
    svg: str = vl_convert.vegalite_to_svg({**found["common"], **found[name], "datasets": cleaned(rows)})
    return svg


def write_page(out: Path, html: str) -> int:
    """Write a page, whole or not at all; its size in bytes."""
    data = html.encode(errors="replace")  # the name of a file may not be text
    write_bytes(out, data)
    return len(data)


def _piece(name: str) -> str:
    return (files("neuroshard.report") / "page" / name).read_text(encoding="utf-8")


def _rendered(name: str, fields: Mapping[str, Any], *, scripts: list[str], **more: str) -> str:
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # of the extra `report`, which text has no need of

    pieces = Environment(
        loader=FunctionLoader(_piece), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = pieces.get_template(name)
    return page.render(**cleaned(fields), policy=_policy(scripts), style=_piece("style.css"), scripts=scripts, **more)


def _apart(script: str) -> str:
    """A script in its own scope: the bundle alone has thousands of short names."""
    return f"(() => {{{script}\n}})();"


@cache
def _charts() -> str:
    """Vega, Vega-Lite and vega-embed as one script. Bundling takes about three seconds."""
    from vl_convert import javascript_bundle

    script = javascript_bundle("window.vegaEmbed = vegaEmbed;")
    # an HTML parser ends a script at the first `</script`, wherever it is; to JavaScript both spellings are the same
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r\n", "\n")


def _policy(scripts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _block(data: Mapping[str, Any]) -> str:
    """JSON in which no HTML parser finds a tag."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
