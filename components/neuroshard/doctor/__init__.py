"""What this machine can do, and how to fix what fails: `neuroshard doctor`."""
