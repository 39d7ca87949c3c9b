"""The plain formula of attention with two vectors, against dense softmaxes."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from pyg_tiga import _philox, testing
from pyg_tiga import reference_attention as reference
from tests import vector_checks
from tests.test_reference_attention import ROWS, SMALL

# Times the width of 3 it is 2, which rounds no gain.
SCALE = {"dot": 0.5, "dot_norm": 2 / 3, "gatv2": 0.2}


class Vectors:
    """A call with scores of two vectors, by the reference alone."""

    def __init__(self, form, row, dtype=torch.float64, **options):
        self.given = given = vector_checks.Given(form, row, dtype, **options)
        self.graph, self.form = testing.make_case(row).graph(), form
        self.leaves = given.tensors()
        self.keep = None
        if given.dropout:
            ids = given.num_edges + given.num_loops
            heads, p = given.heads, given.dropout
            self.keep = _philox.kept(given.seed, ids, heads, p)

    def parts(self, leaves):
        leaves = self.given.named(leaves)
        (value, row, col, att), number = self.given.operands(
            *leaves.values(), scale=SCALE[self.form]
        )
        return value, (row, value if col is None else col, att), number, leaves

    def options(self, number, leaves):
        return {
            "scale": number,
            "normed": self.form == "dot_norm",
            "edge_term": leaves.get("edge_bias"),
            "loop_term": leaves.get("loop_bias"),
            "num_loops": self.given.num_loops,
            "edge_mask": self.given.mask,
            "keep": self.keep,
            "dropout": self.given.dropout,
        }

    def attend(self, *leaves):
        value, vectors, *rest = self.parts(leaves)
        options = self.options(*rest)
        return reference.vector_attention(self.graph, value, *vectors, **options)

    def weights(self, *leaves):
        _, vectors, *rest = self.parts(leaves)
        options = self.options(*rest)
        return reference.vector_attention_weights(self.graph, *vectors, **options)


VECTORS = pytest.mark.parametrize("form", vector_checks.FORMS)
VECTOR_OPTIONS = pytest.mark.parametrize(
    "options", vector_checks.OPTIONS.values(), ids=vector_checks.OPTIONS
)


@ROWS
@VECTORS
@VECTOR_OPTIONS
def test_vectors_are_a_dense_softmax(row, form, options):
    vectors = Vectors(form, row, **options)
    out, largest, total = vectors.attend()
    expected, *weights = vectors.given.dense(scale=SCALE[form])
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(list(vectors.weights()), weights)
    assert not largest.requires_grad
    assert not total.requires_grad
    assert largest.shape == total.shape == out.shape[:2]
    assert (total >= 1).all()


@SMALL
@VECTORS
@VECTOR_OPTIONS
def test_derivatives_of_vectors(row, form, options):
    vectors = Vectors(form, row, **options)
    for call in (lambda *x: vectors.attend(*x)[0], vectors.weights):
        assert gradcheck(call, vectors.leaves)
        assert gradgradcheck(call, vectors.leaves)


@VECTORS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_vectors_of_half_precision_round_once(form, dtype):
    vectors = Vectors(form, testing.row("unsorted"), dtype, loops=True, biases=True)
    out, largest, total = vectors.attend()
    assert out.dtype == dtype
    assert largest.dtype == total.dtype == torch.float32
    truth = vectors.attend(*(x.double() for x in vectors.leaves))[0]
    bound = torch.finfo(dtype).eps * truth.abs() * 0.51 + 1e-5
    assert ((out.double() - truth).abs() <= bound).all()
