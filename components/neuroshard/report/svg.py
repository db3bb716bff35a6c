"""Charts of pages without scripts: Vega-Lite drawn as SVG, and its colours."""

from typing import Any

# as many as readers tell apart
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#8c6d31",
    "#6d7889",
    "#1c2430",
    "#b4b000",
)


def drawn(spec: dict[str, Any]) -> str:
    """A Vega-Lite specification as SVG, on white ground."""
    import vl_convert

    quiet = {"labelColor": "#5a6472", "titleColor": "#5a6472", "gridColor": "#d8dce3", "domainColor": "#d8dce3"}
    config = {
        "font": "system-ui, sans-serif", "view": {"stroke": None}, "axis": {**quiet, "titleFontWeight": 500},
        "legend": {"labelLimit": 180, "orient": "bottom", "columns": 3},
    }  # fmt: skip
    svg: str = vl_convert.vegalite_to_svg({"width": 520, "height": 300, "background": None, "config": config, **spec})
    return svg
