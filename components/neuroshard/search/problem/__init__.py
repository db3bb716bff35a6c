"""A sharding task as arrays, and plans of it."""
