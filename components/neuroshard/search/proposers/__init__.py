"""Proposers: each makes plans from nothing, or from the current plan."""
