"""Graph attention and aggregation at the speed of memory, inside PyG models.

Example:
    >>> import pyg_tiga as tg
    >>> from pyg_tiga.nn import SAGEConv  # the same layer as PyG's
"""

from pyg_tiga import functional, nn
from pyg_tiga.errors import UnsupportedError
from pyg_tiga.functional import spmm_csr
from pyg_tiga.nn import explain
from pyg_tiga.relation.graph import Graph
from pyg_tiga.relation.memo import forget

__version__ = "0.1.0"

__all__ = [
    "Graph",
    "UnsupportedError",
    "explain",
    "forget",
    "functional",
    "nn",
    "spmm_csr",
]
