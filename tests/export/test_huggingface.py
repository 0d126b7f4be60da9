"""What `hpctrain export hf` writes, opened by transformers and peft: their logits are those of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from hpctrain.checkpoint import writer
from hpctrain.config.huggingface import parse_config
from hpctrain.config.load import save_config
from hpctrain.config.schema import Config, DecoderConfig, LoraConfig, TokenDataConfig, VisionConfig
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.export import huggingface, main
from hpctrain.export.huggingface import export_huggingface
from hpctrain.models.decoder import Decoder
from hpctrain.models.lora import apply_lora
from tests.helpers.ranks import run_ranks
from tests.models.reference import CASES, content_of, make_decoder, make_reference, make_tokens, widened

# peft asks transformers by an old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
EXACT = {"rtol": 1e-10, "atol": 1e-10}  # float64, from the same fp32 weights
TEMPLATE = "{% for turn in messages %}{{ turn.content }}</s>{% endfor %}"


def make_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True)
    vocabulary = {word: i for i, word in enumerate(["<unk>", "</s>", "xin", "chào", "bạn"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def save_run(run: Path, model: DecoderConfig, state: dict[str, Tensor], world: int = 1) -> Path:
    """Write a run folder with a checkpoint, by the real writer; each rank holds a share of every tensor."""

    def save(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        shares = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state.items()}
        writer.save(
            run / "checkpoints", step=4, attempt="1_0_0", state={"model": shares, "optim": {}}, facts={},
            group=dist.group.WORLD, timeout_s=30, layout={},
        )  # fmt: skip

    data = TokenDataConfig(root=str(run.parent / "data"))
    if not (run.parent / "data").exists():
        make_tokenizer(run.parent / "data" / "tokenizer")
    run.mkdir(parents=True)
    save_config(Config(model=model, data=data), run / "config.yaml")
    run_ranks(world, save)
    return run


def make_trained(case: str) -> Decoder:
    return make_decoder(make_reference(torch.float32, **CASES[case]))


def logits_of(model: Any) -> Tensor:
    token_BL, position_BL, *_ = make_tokens(2, 11)
    with torch.no_grad():
        if isinstance(model, Decoder):
            return model.double().logits(token_BL, position_BL)
        with widened():
            rotary = model.get_decoder().rotary_emb
            rotary.__init__(rotary.config)  # its frequencies were rounded to fp32
            result: Tensor = model.double()(input_ids=token_BL, use_cache=False).logits
            return result


def open_folder(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def save_base(folder: Path, case: str) -> DecoderConfig:
    """Write a base model as `transformers` does; return its config with the folder."""
    reference = make_reference(torch.float32, **CASES[case])
    reference.config.eos_token_id = 3
    reference.generation_config = GenerationConfig(eos_token_id=3, bos_token_id=2)
    reference.save_pretrained(folder)
    (folder / "LICENSE").write_text("be kind")
    config = parse_config(content_of(reference))
    config.pretrained = str(folder)
    return config


@pytest.mark.parametrize(
    "case",
    [
        "llama, llama3",
        "llama, tied",
        "llama, bias",
        "mistral, window",
        "mistral",
        "qwen2, window from layer 1 on",
        "qwen2, yarn",
        "qwen3, tied",
        "qwen3, window",
    ],
)
def test_transformers_opens_the_folder_and_gives_the_same_logits(case: str, tmp_path: Path) -> None:
    decoder = make_trained(case)
    run = save_run(tmp_path / "run", decoder.config, decoder.state_dict())
    report = export_huggingface(run, tmp_path / "out", "fp32")
    assert report.num_parameters == sum(p.numel() for p in decoder.parameters())
    opened = open_folder(tmp_path / "out")
    torch.testing.assert_close(logits_of(opened), logits_of(decoder), **EXACT)


def test_any_number_of_ranks_may_have_saved_it(tmp_path: Path) -> None:
    decoder = make_trained("qwen3, tied")
    run = save_run(tmp_path / "run", decoder.config, decoder.state_dict(), world=3)
    export_huggingface(run, tmp_path / "out", "fp32")
    written, state = load_file(tmp_path / "out" / "model.safetensors"), decoder.state_dict()
    assert written.keys() == state.keys()  # a tied head has none
    assert all(torch.equal(written[name], state[name]) for name in state)


def test_bf16_weights_are_rounded_once(tmp_path: Path) -> None:
    decoder = make_trained("qwen2")
    run = save_run(tmp_path / "run", decoder.config, decoder.state_dict())
    export_huggingface(run, tmp_path / "out")
    opened = open_folder(tmp_path / "out", "auto")  # type: ignore[arg-type]
    assert all(p.dtype is torch.bfloat16 for p in opened.parameters())
    for name, value in opened.state_dict().items():
        assert torch.equal(value, decoder.state_dict()[name].bfloat16())


def test_shards_are_cut_at_their_size_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "MAX_SHARD_BYTES", 20_000)
    decoder = make_trained("qwen3")
    run = save_run(tmp_path / "run", decoder.config, decoder.state_dict())
    export_huggingface(run, tmp_path / "out", "fp32")
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    sizes = [sum(t.nbytes for t in load_file(path).values()) for path in shards]
    assert len(shards) > 2 and max(sizes) <= 20_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    assert index["metadata"]["total_size"] == sum(sizes)
    torch.testing.assert_close(logits_of(open_folder(tmp_path / "out")), logits_of(decoder), **EXACT)


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[Path, Decoder]:
    """A run that trained an adapter on a base model, and its decoder."""
    config = save_base(tmp_path / "base", "qwen2")
    config.lora = LoraConfig(rank=3, alpha=5.0, targets=["q_proj", "o_proj", "up_proj"])
    decoder = make_trained("qwen2")
    apply_lora(decoder, config.lora)
    for name, parameter in decoder.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    trained = {name: p.detach() for name, p in decoder.named_parameters() if p.requires_grad}
    return save_run(tmp_path / "run", config, trained), decoder


def test_an_adapter_is_merged_into_the_weights(adapted: tuple[Path, Decoder], tmp_path: Path) -> None:
    run, decoder = adapted
    export_huggingface(run, tmp_path / "out", "fp32")
    # the sum of weight and adapter is rounded to fp32 once: 2⁻²⁴ of weights near 1, 44 terms, three layers
    torch.testing.assert_close(
        logits_of(open_folder(tmp_path / "out")), logits_of(decoder), rtol=1e-4, atol=1e-4
    )
    base = logits_of(open_folder(tmp_path / "base"))
    assert (base - logits_of(decoder)).abs().max() > 0.1


def test_peft_opens_the_adapter_and_gives_the_same_logits(
    adapted: tuple[Path, Decoder], tmp_path: Path
) -> None:
    run, decoder = adapted
    report = export_huggingface(run, tmp_path / "out", "fp32", adapter=True)
    assert report.is_adapter and report.num_parameters == 3 * 3 * (64 + 64 + 76)
    base = open_folder(tmp_path / "base")
    opened = PeftModel.from_pretrained(base, tmp_path / "out")
    assert opened.peft_config["default"].base_model_name_or_path == str(tmp_path / "base")
    torch.testing.assert_close(logits_of(opened), logits_of(decoder), **EXACT)
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_the_tokenizer_of_the_data_goes_with_the_model(tmp_path: Path) -> None:
    config = save_base(tmp_path / "base", "qwen2")
    run = save_run(tmp_path / "run", config, make_trained("qwen2").state_dict())
    export_huggingface(run, tmp_path / "out")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert tokenizer("xin chào bạn")["input_ids"] == [2, 3, 4]
    said = tokenizer.apply_chat_template([{"role": "user", "content": "xin"}], tokenize=False)
    assert said == "xin</s>"
    assert (tmp_path / "out" / "LICENSE").read_text() == "be kind"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (2, [1, 3])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 3


def test_without_the_data_the_tokenizer_of_the_base_is_taken(tmp_path: Path) -> None:
    config = save_base(tmp_path / "base", "qwen2")
    make_tokenizer(tmp_path / "other")
    for path in (tmp_path / "other").iterdir():
        path.rename(tmp_path / "base" / path.name)
    (tmp_path / "data").mkdir()
    run = save_run(tmp_path / "run", config, make_trained("qwen2").state_dict())
    export_huggingface(run, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE


def test_what_cannot_be_exported_is_said(tmp_path: Path) -> None:
    decoder = make_trained("llama")
    run = save_run(tmp_path / "run", decoder.config, decoder.state_dict())
    with pytest.raises(ConfigError, match=r"lora\.rank=0"):
        export_huggingface(run, tmp_path / "out", adapter=True)
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        export_huggingface(run, tmp_path / "taken")
    faces = tmp_path / "faces"
    faces.mkdir()
    save_config(Config(model=VisionConfig(), data=TokenDataConfig(root="data")), faces / "config.yaml")
    with pytest.raises(ConfigError, match="export model"):
        export_huggingface(faces, tmp_path / "out")
    save_config(Config(model=decoder.config, data=TokenDataConfig(root="data")), faces / "config.yaml")
    with pytest.raises(CheckpointError, match="no sound checkpoint"):
        export_huggingface(faces, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_verb_says_what_it_wrote(
    adapted: tuple[Path, Decoder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = adapted
    assert main(["hf", str(run), str(tmp_path / "a"), "--dtype", "fp32", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["dtype"], facts["is_adapter"]) == (4, "fp32", False)
    assert main(["hf", str(run), str(tmp_path / "b"), "--adapter"]) == 0
    assert f"wrote {tmp_path / 'b'}: an adapter of 1,836 bf16 weights of step 4" in capsys.readouterr().out
