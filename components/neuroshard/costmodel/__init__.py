"""First floor: features, nets, and the bundle that pretrain writes and search reads."""
