"""Where a cost model comes from: a folder, a store, a datasheet or a file; and whether a published one is good enough."""
