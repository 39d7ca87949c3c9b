from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "node_classification.py"
CONFIGS = ROOT / "configs"

for module in ("jsonargparse", "rich", "scipy"):
    pytest.importorskip(module, reason="the extra 'train' is not installed")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("node_classification", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def no_network(example, monkeypatch):
    def refuse(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(example, "urlopen", refuse)


@pytest.fixture
def no_data(monkeypatch, tmp_path):
    monkeypatch.delenv("PYG_TIGA_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def raw_cora():
    folder = Path(os.environ.get("PYG_TIGA_DATA", ""), "planetoid", "Cora", "raw")
    if not folder.is_dir():
        pytest.skip("PYG_TIGA_DATA holds no planetoid/Cora/raw")
    return folder


def assert_is_cora(data):
    assert data.num_nodes == 2708
    assert data.num_edges == 10556
    assert int(data.train_mask.sum()) == 140


def test_reads_shared_data_without_writing_there(
    example, no_network, raw_cora, tmp_path, monkeypatch
):
    shared = tmp_path / "shared"
    copied = shared / "planetoid" / "Cora" / "raw"
    shutil.copytree(raw_cora, copied, copy_function=shutil.copyfile)
    monkeypatch.setenv("PYG_TIGA_DATA", str(shared))
    before = sorted(shared.rglob("*"))
    assert_is_cora(example.load_data("Cora", None))
    assert sorted(shared.rglob("*")) == before


def test_reads_a_root_of_planetoid(example, no_network, no_data, raw_cora, tmp_path):
    shutil.copytree(raw_cora, tmp_path / "Cora" / "raw", copy_function=shutil.copyfile)
    assert_is_cora(example.load_data("Cora", tmp_path))


def test_downloads_into_the_root(example, no_data, raw_cora, tmp_path, monkeypatch):
    monkeypatch.setattr(example.Planetoid, "url", raw_cora.as_uri())
    assert_is_cora(example.load_data("Cora", tmp_path / "new"))


def test_without_data_and_network_says_so(example, no_network, no_data, capsys):
    data = example.load_data("Cora", None)
    said = capsys.readouterr().out
    assert "PYG_TIGA_DATA" in said
    assert "no network" in said
    assert "synthetic" in said
    assert data.x.shape == (2708, 1433)


def test_a_silent_server_does_not_hang(example, no_data, monkeypatch, capsys):
    monkeypatch.setattr(example, "DOWNLOAD_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(example.Planetoid, "url", f"http://127.0.0.1:{port}")
        start = time.perf_counter()
        with pytest.raises(OSError, match="timed out"):
            example.download(Path("root"), "Cora")
        assert time.perf_counter() - start < 5


def test_block_model_is_like_cora_and_seeded(example):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    data = example.block_model_graph()
    assert torch.equal(torch.get_rng_state(), state)
    again = example.block_model_graph()
    assert torch.equal(data.edge_index, again.edge_index)
    assert torch.equal(data.x, again.x)
    assert torch.equal(data.train_mask, again.train_mask)
    assert data.num_edges == pytest.approx(10556, rel=0.1)
    same = data.y[data.edge_index[0]] == data.y[data.edge_index[1]]
    assert float(same.float().mean()) == pytest.approx(0.81, abs=0.03)
    splits = (data.train_mask, data.val_mask, data.test_mask)
    assert [int(mask.sum()) for mask in splits] == [140, 500, 1000]


def test_an_unknown_layer_is_named(example):
    config = example.Model(layer="sgae")
    with pytest.raises(ValueError, match=r"'model.layer' must be .*'sage'.*'sgae'"):
        example.Net(config, 4, 2)


@pytest.mark.parametrize("layer", ["sage", "gat"])
def test_learns_cora(example, no_network, raw_cora, capsys, layer):
    model = example.Model(layer, hidden_channels=64 if layer == "sage" else 8)
    accuracy = example.main(model, example.Training(epochs=40), device="cpu", seed=1)
    assert accuracy > 0.75
    assert f"test accuracy {accuracy:.1%}" in capsys.readouterr().out


@pytest.mark.parametrize("layer, op", [("sage", "spmm"), ("gat", "attention")])
def test_command_line_trains_and_explains(tmp_path, layer, op):
    config = CONFIGS / f"cora_{layer}.yaml"
    command = [sys.executable, str(SCRIPT), "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--training.epochs", "2"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2/2" in done.stdout
    assert "test accuracy" in done.stdout
    assert "conv1" in done.stdout
    assert op in done.stdout.lower()
