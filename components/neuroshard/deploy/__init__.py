"""Room 5: plan -> release: publish, swap the live pointer, roll back."""
