"""Tables that HBM does not hold: which are cached, which lie in host memory, and how many rows are cached."""
