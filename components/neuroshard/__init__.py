"""NeuroShard: measure embedding-table costs, learn them, and search sharding plans ("pre-train, and search")."""

__version__ = "0.1.0"
