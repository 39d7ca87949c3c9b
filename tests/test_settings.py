from __future__ import annotations

import dataclasses
import timeit
from pathlib import Path

import pytest

from pyg_tiga import _settings
from pyg_tiga._settings import Settings, settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for entry in dataclasses.fields(Settings):
        monkeypatch.delenv(f"PYG_TIGA_{entry.name.upper()}", raising=False)


def test_defaults():
    assert settings() == Settings(validate="sync", strict=False, data=None)


@pytest.mark.parametrize(
    "variable, text, name, value",
    [
        ("PYG_TIGA_VALIDATE", "sync", "validate", "sync"),
        ("PYG_TIGA_VALIDATE", "deferred", "validate", "deferred"),
        ("PYG_TIGA_STRICT", "0", "strict", False),
        ("PYG_TIGA_STRICT", "1", "strict", True),
        ("PYG_TIGA_NATIVE", "auto", "native", "auto"),
        ("PYG_TIGA_NATIVE", "wait", "native", "wait"),
        ("PYG_TIGA_NATIVE", "off", "native", "off"),
        ("PYG_TIGA_DATA", "some/folder", "data", Path("some/folder")),
        ("PYG_TIGA_DATA", "~", "data", Path.home()),
    ],
)
def test_reads_the_variable(monkeypatch, variable, text, name, value):
    monkeypatch.setenv(variable, text)
    assert getattr(settings(), name) == value


@pytest.mark.parametrize(
    "variable, text, allowed",
    [
        ("PYG_TIGA_VALIDATE", "never", "'sync' or 'deferred'"),
        ("PYG_TIGA_VALIDATE", "SYNC", "'sync' or 'deferred'"),
        ("PYG_TIGA_STRICT", "yes", "'0' or '1'"),
        ("PYG_TIGA_NATIVE", "0", "'auto' or 'wait' or 'off'"),
    ],
)
def test_malformed_value_names_variable_allowed_and_got(
    monkeypatch, variable, text, allowed
):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError) as caught:
        settings()
    message = str(caught.value)
    assert variable in message
    assert allowed in message
    assert repr(text) in message


def test_a_bad_value_is_reported_at_every_call_until_mended(monkeypatch):
    monkeypatch.setenv("PYG_TIGA_STRICT", "2")
    for _ in range(2):
        with pytest.raises(ValueError, match="PYG_TIGA_STRICT"):
            settings()
    monkeypatch.setenv("PYG_TIGA_STRICT", "1")
    assert settings().strict


def test_empty_counts_as_unset(monkeypatch):
    monkeypatch.setenv("PYG_TIGA_VALIDATE", "")
    assert settings().validate == "sync"


def test_a_change_is_seen_at_the_next_call(monkeypatch):
    assert not settings().strict
    monkeypatch.setenv("PYG_TIGA_STRICT", "1")
    assert settings().strict
    monkeypatch.delenv("PYG_TIGA_STRICT")
    assert not settings().strict


def test_unchanged_environment_is_not_parsed_again(monkeypatch):
    first = settings()
    monkeypatch.setenv("PYG_TIGA_SOMETHING_ELSE", "1")
    assert settings() is first


def test_settings_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().strict = True


def test_a_look_costs_little():
    settings()
    best = min(timeit.repeat(settings, number=2000, repeat=5)) / 2000
    assert best < 5e-6


def test_every_setting_is_documented():
    text = (Path(__file__).parents[1] / "docs" / "environment.md").read_text()
    for entry in dataclasses.fields(Settings):
        assert f"`{_settings.PREFIX}{entry.name.upper()}`" in text
