"""Local search: perturb a plan, descend by moves and swaps, keep the best."""
