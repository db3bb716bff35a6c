"""The day a GPU is there: everything that only hardware can show, by one command, in stages that go on where they stopped."""
