"""The nightly run, above the stages: what to do, learning a kind of hardware, planning a model, how the night ended."""
