"""Local search: perturb a plan, descend, keep the better."""
