"""Reports: one HTML page, and in text what `show`, `diff`, `releases` and the end of a run print."""
