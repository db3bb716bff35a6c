"""What hardware is there, and which kinds no current cost model covers."""
