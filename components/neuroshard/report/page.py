"""The page: a template, our scripts, the charting library, and the data as one block of JSON. The page fetches nothing.

The charts are Vega-Lite's; its script comes from the package vl-convert (docs/decisions.md). Names of tables are
untrusted: the template escapes them, and the data cannot end its block. The page's Content-Security-Policy allows only the
scripts whose digests it lists, and no access to the network.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from neuroshard.core.clean import cleaned

SCRIPTS = ("format.js", "lists.js", "charts.js", "main.js")


def render(fields: Mapping[str, Any], data: Mapping[str, Any]) -> str:
    """The page as HTML. `fields` fill the template, `data` is what the scripts draw."""
    scripts = [_apart(_charts()), _apart("".join(_piece(name) for name in SCRIPTS))]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(_piece("page.html")).render(
        **cleaned(fields),
        policy=_policy(scripts),
        style=_piece("style.css"),
        scripts=scripts,
        data=_block(cleaned(data)),
    )


def _piece(name: str) -> str:
    return (files("neuroshard.report") / "page" / name).read_text(encoding="utf-8")


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
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _block(data: Mapping[str, Any]) -> str:
    """JSON in which no HTML parser finds a tag."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
