"""Triton kernels. They take pointers, sizes and constexprs, and choose nothing.

Importing a module of this package imports Triton; the launchers in `pyg_tiga.impls` do
so on first use.
"""
