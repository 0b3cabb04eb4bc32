"""The benchmarks measure what they say, on the smallest models."""

from __future__ import annotations

import pytest
import torch

import pleviz
from pleviz import benchmarks, load_records
from pleviz.homes import registered_bytes
from pleviz.measure import MeasureError
from pleviz.measure.bench import greedy
from tests.test_homes import DEVICES, make
from tests.tiny import KINDS, tiny_model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_trace_is_equal_for_every_home_and_notices_one_bit(kind, device):
    model = make(kind, device)
    ids, sums = benchmarks.greedy_trace(model, 12)
    assert ids.shape == sums.shape == (12,)
    with pleviz.offload(model, "auto"):
        again = benchmarks.greedy_trace(model, 12)
    assert torch.equal(again[0], ids) and torch.equal(again[1], sums)
    weight = (
        model.lm_head.weight if hasattr(model, "lm_head") else model.get_output_embeddings().weight
    )
    with torch.no_grad():
        weight[5, 5] = torch.nextafter(weight[5, 5], torch.tensor(torch.inf, device=device))
    changed = benchmarks.greedy_trace(model, 12)
    assert not torch.equal(changed[1], sums)


def test_first_touch_reads_the_file_cold_and_warm(tmp_path):
    tiny_model("gemma4").save_pretrained(tmp_path)
    cold, warm = benchmarks.first_touch(tmp_path, count=50)
    assert (cold["page_cache"], warm["page_cache"]) == ("cold", "warm")
    assert cold["bytes"] == 50 * 4 * 8 * 4 and cold["seconds"] > 0


def test_greedy_record_compares_a_process_for_each_home(tmp_path):
    pleviz.build("gemma-4-E2B", dtype=torch.bfloat16).save_pretrained(tmp_path / "model")
    record = greedy(
        {"gemma-4-E2B": tmp_path / "model"}, tmp_path / "g.json", tokens=5, device="cpu"
    )
    assert [row["home"] for row in record.rows] == ["gpu", "file"]
    assert all(row["tokens_equal"] and row["checksums_equal"] for row in record.rows)
    assert load_records(tmp_path / "g.json") == (record,)
    with pytest.raises(MeasureError, match="greedy decoding of x gpu failed"):
        greedy({"x": tmp_path}, tmp_path / "no.json", tokens=5, device="cpu")
    assert not (tmp_path / "no.json").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_attaching_makes_no_private_copy(kind, tmp_path):
    big = {
        "vocab_size": 100_000,
        "vocab_size_per_layer_input": 100_000,
        "hidden_size_per_layer_input": 64,
    }
    model = tiny_model(kind, dtype=torch.bfloat16, **big).to("cuda")
    model.save_pretrained(tmp_path)
    rows = {row["home"]: row for row in benchmarks.attach(model, tmp_path)}
    nbytes = rows["file"]["table_bytes"]
    for home in ("mapped", "file"):
        assert rows[home]["registered_bytes"] >= nbytes
        assert rows[home]["added_anonymous_bytes"] < 0.1 * nbytes
    assert rows["cpu"]["registered_bytes"] == 0
    assert registered_bytes() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["gpu", "mapped", "cpu"])
def test_profile_counts_waits(home):
    model = make("gemma4", "cuda", num_hidden_layers=4)
    with pleviz.offload(model, home):
        row = benchmarks.decode_step_profile(model)
    assert (row["host_waits_per_step"] >= 1) == (home == "cpu")
    assert row["kernels_per_step"] > 10 and row["timeline"]


@pytest.mark.gpu
@pytest.mark.parametrize("home", ["gpu", "mapped", "cpu"])
def test_gather_times_reports_a_bandwidth(home):
    with pleviz.offload(make("gemma4", "cuda"), home) as handle:
        rows = benchmarks.gather_times(handle._model, counts=(1, 100))
    assert [row["ids"] for row in rows] == [1, 100]
    assert all(0 < row["seconds"] < 1 for row in rows)


@pytest.mark.gpu
def test_paired_speed_has_every_home(tmp_path):
    model = make("gemma4", "cuda")
    model.save_pretrained(tmp_path)
    rows = benchmarks.paired_speed(model, tmp_path, prompt=64, rounds=1, steps=2)
    assert {row["home"] for row in rows} == {"gpu", "mapped", "file", "cpu"}
    assert all(row["ratio_to_gpu"] == 1 for row in rows if row["home"] == "gpu")
    assert pleviz.home_of(model) == "gpu" and registered_bytes() == 0
