"""Room 1: tables -> cases to measure."""
