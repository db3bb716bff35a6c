"""Names of tables that try to become code where a page forgets that they are text."""

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>alert(2)</script>",
    "{{ 7 * 7 }}${alert(3)}'\"`",
    "__proto__",
)
