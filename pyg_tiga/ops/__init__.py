"""Operations on relations, each with two roads to one body.

`eager` enters through an `autograd.Function` on a `Graph`, which costs the host less;
`library` is the `torch.library` op that `torch.compile` sees. Both run `bodies` and
share the gradient rules of `gradients`.
"""

from pyg_tiga.impls.triton_build import TritonBuild
from pyg_tiga.relation import fused

fused.inject(TritonBuild())
