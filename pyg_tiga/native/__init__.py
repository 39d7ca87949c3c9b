"""The part of the package that is compiled on the machine where it runs."""

from pyg_tiga.native.build import steps_class, wait

__all__ = ["steps_class", "wait"]
