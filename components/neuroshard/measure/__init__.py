"""Room 2: cases -> costs, on the synthetic formula, this machine's CPU, or its GPUs."""
