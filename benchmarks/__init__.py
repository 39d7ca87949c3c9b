"""Benchmarks: named graphs, peers in the same run, records and their report."""
