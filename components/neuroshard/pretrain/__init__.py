"""Room 3: costs -> a cost model, and how far it can be trusted."""
