from __future__ import annotations

import copy
import logging
import pickle

import pytest

from pyg_tiga.errors import UnsupportedError, log_fallback

REJECTIONS = {
    "triton": ["device is 'cpu', needs 'cuda'", "dtype is float64, needs float32"],
    "vendor": ["relation kind is 'window', needs 'csr'"],
}


def test_message_lists_every_reason_of_every_implementation():
    message = str(UnsupportedError("no implementation of spmm fits", REJECTIONS))
    assert message.startswith("no implementation of spmm fits")
    for name, reasons in REJECTIONS.items():
        assert f"{name}:" in message
        assert all(reason in message for reason in reasons)


def test_is_a_not_implemented_error_and_keeps_the_rejections():
    with pytest.raises(NotImplementedError) as caught:
        raise UnsupportedError("no fit", REJECTIONS)
    assert caught.value.rejections == REJECTIONS


def test_without_rejections_the_message_stands_alone():
    error = UnsupportedError("no fit")
    assert str(error) == "no fit"
    assert error.rejections == {}


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_survives_copy_and_pickle(clone):
    error = UnsupportedError("no fit", REJECTIONS)
    again = clone(error)
    assert str(again) == str(error)
    assert again.rejections == REJECTIONS


def test_rejections_are_detached_from_the_caller():
    reasons = {"triton": ["one"]}
    error = UnsupportedError("no fit", reasons)
    reasons["triton"].append("two")
    assert error.rejections == {"triton": ["one"]}


def test_a_fallback_is_logged_once_for_each_reason(caplog):
    log_fallback.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pyg_tiga"):
        for why in ("aggr is 'std'", "aggr is 'std'", "a hook is registered"):
            log_fallback("SAGEConv", why)
    assert [record.getMessage() for record in caplog.records] == [
        "SAGEConv falls back: aggr is 'std'",
        "SAGEConv falls back: a hook is registered",
    ]
