"""What the steps of trainers took beside what plans promised: its record, in the store, and cost models corrected by it."""
