"""How long tests wait for what must end: long enough for any machine, however busy. Only what hangs takes it all."""

HANGS = 1800.0  # seconds
