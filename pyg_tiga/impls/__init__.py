"""Ways to run a problem: `triton` (ours), `vendor` (cuSPARSE, torch.sparse), `scatter`."""
