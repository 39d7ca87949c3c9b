from __future__ import annotations

import pytest
import torch

from benchmarks.graphs import (
    SPECS,
    GraphStore,
    load_graph,
    make_graph,
    real_graphs,
    tail_weights,
)

CPU = torch.device("cpu")
SYNTHETIC = [name for name in SPECS if name != "tiny"]


@pytest.mark.parametrize(
    ("name", "scale"), [("arxiv", 1.0), ("reddit", 1.0), ("products", 0.1)]
)
def test_weights_give_the_published_largest_degree(name, scale):
    spec = SPECS[name].scaled(scale)
    weights = tail_weights(spec.num_nodes, spec.num_edges, spec.largest, CPU)
    expected = spec.num_edges * float(weights[0] / weights.sum())
    assert expected == pytest.approx(spec.largest, rel=1e-6)
    assert (weights[:-1] > weights[1:]).all()


def test_full_size_arxiv_has_the_published_tail():
    graph = make_graph("arxiv", seed=7, device=CPU)
    assert graph.edge_index.shape == (2, 2_315_598)
    assert graph.num_nodes == 169_343
    incoming, outgoing = (
        torch.bincount(end, minlength=graph.num_nodes)
        for end in reversed(graph.edge_index)
    )
    assert int(incoming.max()) == pytest.approx(13_161, rel=0.05)
    # One permutation names both ends: a hub gives as it takes.
    assert int(incoming.argmax()) == int(outgoing.argmax())
    assert int(incoming.argmax()) != 0


@pytest.mark.parametrize("name", SYNTHETIC)
def test_graphs_are_in_range_seeded_and_unsorted(name):
    graph, again, other = (
        make_graph(name, seed=seed, device=CPU, scale=0.001) for seed in (7, 7, 8)
    )
    assert graph.name == f"{name}@0.001"
    assert graph.edge_index.dtype == torch.long
    assert int(graph.edge_index.min()) >= 0
    assert int(graph.edge_index.max()) < graph.num_nodes
    assert torch.equal(graph.edge_index, again.edge_index)
    assert not torch.equal(graph.edge_index, other.edge_index)
    assert (graph.edge_index[1].diff() < 0).any()


@pytest.mark.parametrize(
    ("name", "hubs", "degree"), [("hub5k", 4, 5e3), ("hub12k", 2, 12e3)]
)
def test_hub_rows(name, hubs, degree):
    graph = make_graph(name, seed=7, device=CPU)
    largest = torch.bincount(graph.edge_index[1]).sort(descending=True).values
    assert largest[:hubs].tolist() == [degree] * hubs
    assert largest[hubs] < 20


def test_mesh_rows_have_eight_near_neighbours():
    graph = make_graph("mesh8", seed=7, device=CPU, scale=0.01)
    source, target = graph.edge_index
    assert (torch.bincount(target, minlength=graph.num_nodes) == 8).all()
    apart = (source - target).abs()
    assert torch.minimum(apart, graph.num_nodes - apart).max() <= 32
    assert (apart > 0).all()


@pytest.mark.parametrize("by", [0, 1])
def test_compressed_form_holds_the_same_edges(by):
    graph = make_graph("arxiv", seed=7, device=CPU, scale=0.0005)
    pointer, other = graph.compressed(by)
    assert pointer.dtype == other.dtype == torch.int32
    row = torch.repeat_interleave(torch.arange(graph.num_nodes), pointer.diff())
    found = sorted(zip(row.tolist(), other.tolist(), strict=True))
    ends = graph.edge_index[by].tolist(), graph.edge_index[1 - by].tolist()
    assert found == sorted(zip(*ends, strict=True))


def test_store_holds_one_graph_and_releases_it():
    released = []
    store = GraphStore(CPU, 7, 0.001, lambda graph: released.append(graph.name))
    assert store.get("arxiv") is store.get("arxiv")
    store.get("mesh8")
    store.clear()
    assert released == ["arxiv@0.001", "mesh8@0.001"]


def test_real_graphs_come_from_the_data_folder(tmp_path, monkeypatch):
    import numpy as np

    (tmp_path / "graphs").mkdir()
    edges = np.array([[0, 1], [1, 2]], dtype=np.int32)
    np.savez(tmp_path / "graphs" / "small.npz", edge_index=edges, num_nodes=4)
    monkeypatch.setenv("PYG_TIGA_DATA", str(tmp_path))
    assert real_graphs(("small", "absent")) == ("small",)
    graph = load_graph("small", device=CPU)
    assert (graph.num_nodes, graph.num_edges) == (4, 2)
    with pytest.raises(FileNotFoundError, match="'absent' is neither"):
        load_graph("absent", device=CPU)
    monkeypatch.delenv("PYG_TIGA_DATA")
    assert real_graphs(("small",)) == ()
