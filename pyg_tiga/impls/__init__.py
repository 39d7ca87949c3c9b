"""Ways to run a problem: our kernels, the vendor's (`torch.sparse`), and scatter."""
