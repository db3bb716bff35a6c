"""Who proposes plans: each from nothing, or from the plan that is in place."""
