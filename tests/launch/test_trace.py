"""`plan --trace`: places traced in processes of their own, beside the closed form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.config.schema import (
    ClusterConfig,
    Config,
    DecoderConfig,
    OptimConfig,
    ParallelismConfig,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.errors import ConfigError
from hpctrain.launch.trace import places_of, read_results, trace_report
from hpctrain.plan.backbones import read_costs
from hpctrain.plan.plan import make_plan


def test_an_unknown_backbone_is_measured_and_known_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = Config(model=VisionConfig(backbone="resnet14t", image_size=[64, 64]), run_root=str(tmp_path))
    config.data.root = str(tmp_path / "none")
    assert make_plan(config).memory == ()
    assert trace_report(config, make_plan(config), as_json=True) == 0
    (row,) = json.loads(capsys.readouterr().out)["trace"]
    assert row["closed_form_bytes"] == pytest.approx(row["traced_bytes"], rel=0.05)
    assert {each["kind"] for each in row["collectives"]} == {"all_reduce"}
    assert set(read_costs(tmp_path / "cache" / "hpctrain" / "backbones.json")) == {"resnet14t"}
    (memory,) = make_plan(config).memory
    assert memory.tensors == row["closed_form_bytes"]


def decoder(tmp_path: Path) -> Config:
    config = Config(model=DecoderConfig(vocab_size=512, hidden_size=64, intermediate_size=128))
    assert isinstance(config.model, DecoderConfig)
    config.model.num_hidden_layers, config.model.num_attention_heads = 4, 4
    config.model.num_key_value_heads = 4
    config.data = TokenDataConfig(root=str(tmp_path / "none"), sequence_length=64)
    config.optim = OptimConfig(global_batch_size=4)
    config.parallelism = ParallelismConfig(pp=2, dp_replicate=1, microbatch_size=1)
    config.cluster = ClusterConfig(ranks_per_node=2)
    config.run_root = str(tmp_path)
    return config


@pytest.mark.long
def test_the_table_has_first_and_last_place_and_what_they_send(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = decoder(tmp_path)
    assert trace_report(config, make_plan(config), as_json=False) == 0
    shown = capsys.readouterr().out
    for line in ("pp=0, 2 blocks", "pp=1, 2 blocks"):
        assert line in shown
    sends = [line for line in shown.splitlines() if " send " in line]
    assert [line.split()[-2] for line in sends] == ["4", "4"]  # one a microbatch each way


def test_what_cannot_be_traced_is_said_in_the_words_of_the_one_who_knows(tmp_path: Path) -> None:
    plan = make_plan(decoder(tmp_path))
    assert places_of(plan) == [0, 1]
    for place in places_of(plan):
        error = {"error": ["a trace with offload", "fakes do not tell", "trace without it"]}
        (tmp_path / f"place_{place}.json").write_text(json.dumps(error))
    with pytest.raises(ConfigError, match="a trace with offload"):
        read_results(plan, tmp_path)
