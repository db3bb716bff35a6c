"""Steps timed in a trainer."""
