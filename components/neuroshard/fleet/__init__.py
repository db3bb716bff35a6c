"""The hardware of a fleet, and which kinds of it no usable cost model covers."""
