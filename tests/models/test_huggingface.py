"""Weights of folders that transformers wrote, read in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpctrain.config.huggingface import parse_config, read_config
from hpctrain.errors import ConfigError
from hpctrain.models.decoder import Decoder
from hpctrain.models.huggingface import WeightFiles, make_shapes
from tests.models.reference import CASES, make_reference

MATRIX = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(params=["one file", "many files"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    reference = make_reference(torch.float32, **CASES["qwen2"])
    reference.save_pretrained(tmp_path, max_shard_size="5GB" if request.param == "one file" else "20KB")
    return tmp_path


def test_parts_are_those_of_the_whole(folder: Path) -> None:
    state = make_reference(torch.float32, **CASES["qwen2"]).state_dict()
    files = WeightFiles(folder)
    assert set(files.names()) == set(state)
    for name, value in state.items():
        assert files.shape(name) == tuple(value.shape)
        assert torch.equal(files.read(name), value)
    for index in ((slice(3, 9),), (slice(0, 16), slice(5, 7)), (slice(None), slice(30, 32)), (slice(4, 4),)):
        assert torch.equal(files.read(MATRIX, index), state[MATRIX][index])


def test_the_folder_fills_a_decoder(folder: Path) -> None:
    config, files = parse_config(read_config(folder)), WeightFiles(folder)
    files.check(config)
    decoder = Decoder(config)
    decoder.load_state_dict({name: files.read(name) for name in make_shapes(config)}, strict=True)


def test_only_the_bytes_of_a_part_are_read(tmp_path: Path) -> None:
    rows, columns = 1 << 16, 256  # 64 MiB
    save_file(
        {"x": torch.arange(rows).float().repeat_interleave(columns).view(rows, columns)},
        tmp_path / "model.safetensors",
    )
    before = _resident_bytes()
    part = WeightFiles(tmp_path).read("x", (slice(8, 10),))
    assert part.tolist() == [[8.0] * columns, [9.0] * columns]
    assert _resident_bytes() - before < rows * columns


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("change", ["missing", "unknown", "of another shape"])
def test_a_folder_of_another_model_is_refused_by_name(change: str, tmp_path: Path) -> None:
    reference = make_reference(torch.float32, **CASES["qwen2"])
    reference.save_pretrained(tmp_path)
    config, path = parse_config(read_config(tmp_path)), tmp_path / "model.safetensors"
    state: dict[str, Any] = load_file(path)
    if change == "missing":
        del state[MATRIX]
    elif change == "unknown":
        state["model.layers.0.mlp.router.weight"] = torch.zeros(2)
    else:
        state[MATRIX] = torch.zeros(2, 2)
    save_file(state, path)
    named = "router" if change == "unknown" else MATRIX
    with pytest.raises(ConfigError, match=rf"1 {change} \(.*{named}"):
        WeightFiles(tmp_path).check(config)


def test_tensors_that_old_folders_have_too_many_are_passed_over(tmp_path: Path) -> None:
    reference = make_reference(torch.float32, **CASES["qwen2, tied"])
    reference.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, path)
    WeightFiles(tmp_path).check(parse_config(read_config(tmp_path)))


def test_files_that_are_not_there_are_said(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError, match="neither"):
        WeightFiles(tmp_path_factory.mktemp("empty"))
    if len(shards := sorted(folder.glob("model-*.safetensors"))) > 1:
        shards[1].unlink()
        with pytest.raises(ConfigError, match=shards[1].name):
            WeightFiles(folder)


def test_a_truncated_file_is_said(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ConfigError, match="download the file again"):
        WeightFiles(tmp_path)
