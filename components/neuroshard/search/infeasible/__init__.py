"""Whether a plan fits at all, and what would help where none does."""
