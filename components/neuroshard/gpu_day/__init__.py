"""The day a GPU is there: everything that only hardware can show, by one command, in stages that continue where they stopped."""
