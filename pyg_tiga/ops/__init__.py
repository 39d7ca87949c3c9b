"""Operations on relations, each with two roads to one body.

`eager` enters through an `autograd.Function` on a `Graph`, which costs the host less;
`library` is the `torch.library` op that `torch.compile` sees. Both run `bodies` and share
the gradient rules of `gradients`.
"""
