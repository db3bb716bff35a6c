"""What tables beyond HBM take more: behind a cache in HBM, or in host memory (core/tiers.py)."""

from typing import NamedTuple

from neuroshard.costmodel.protocol import Floats


class BeyondHbm(NamedTuple):
    """Ms that each of N tables takes more than in HBM, (N,) each: through a cache that misses nothing, for each row that it
    misses, and in host memory. A missed row comes before forward, while another is written back."""

    cached_forward: Floats
    missed: Floats
    host_forward: Floats
    cached_backward: Floats
    host_backward: Floats

    @property
    def cached_ms(self) -> Floats:
        """Through a cache that misses nothing, forward and backward."""
        return self.cached_forward + self.cached_backward

    @property
    def host_ms(self) -> Floats:
        """In host memory, forward and backward."""
        return self.host_forward + self.host_backward
