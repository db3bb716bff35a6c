"""The processes that measure: how they start, answer, and end."""
