"""The part of the package that is compiled on the machine where it runs."""

from pyg_tiga.native.build import compiled, wait

__all__ = ["compiled", "wait"]
