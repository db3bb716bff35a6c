"""Pictures of all of the above, in text for now: what `show`, `releases` and the end of a run print."""
