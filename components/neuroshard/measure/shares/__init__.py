"""A draw of cases, shared out: each pod measures its share, and the costs of all shares are merged."""
