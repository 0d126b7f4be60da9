"""A decoder as a Hugging Face folder, from a run of any layout: the whole model, or its adapter for PEFT.

Tensors are read from the checkpoint one by one and written shard by shard, so that no more than a shard is
in memory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hpctrain.config.huggingface import make_config_json, read_config
from hpctrain.config.load import load_config
from hpctrain.config.schema import Config, DecoderConfig
from hpctrain.data.tokenizer import TOKENIZER_FILES, DocumentTokenizer
from hpctrain.data.tokens import TOKENIZER_NAME
from hpctrain.errors import ConfigError
from hpctrain.export.trained import DecoderWeights, find_sound, refuse_existing
from hpctrain.models.huggingface import INDEX, SINGLE, make_shapes
from hpctrain.models.lora import merge_weight
from hpctrain.run.directory import RunDirectory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MAX_SHARD_BYTES = 5 * 10**9  # what huggingface_hub calls 5 GB
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class HuggingFaceReport:
    """What `export_huggingface` wrote."""

    out: str
    step: int
    dtype: str
    num_parameters: int
    is_adapter: bool


def export_huggingface(
    run_dir: Path, out: Path, dtype: str = "bf16", adapter: bool = False
) -> HuggingFaceReport:
    """Write the model of a run's newest sound checkpoint into the new folder `out`, for transformers or PEFT.

    Args:
        run_dir: Folder of the run.
        out: Folder to write.
        dtype: Of the weights, a key of `DTYPES`.
        adapter: Write the adapter alone. Otherwise it is merged into the weights it belongs to.

    Raises:
        ConfigError: the run trains no decoder, or has no adapter or no published base; `out` exists.
        CheckpointError: the run has no sound checkpoint.
    """
    refuse_existing(out)
    run = RunDirectory(run_dir)
    config = load_config(run.config)
    model = config.model
    if not isinstance(model, DecoderConfig):
        raise ConfigError(f"export hf {run_dir}", f"model.kind={model.kind}", "hpctrain export model RUN OUT")
    if adapter and (model.lora.rank == 0 or model.pretrained is None):
        raise ConfigError(
            f"export hf {run_dir} --adapter",
            f"model.lora.rank={model.lora.rank}, model.pretrained={model.pretrained}: an adapter without its "
            "base, or none at all, is of no use",
            "leave --adapter out, which writes the whole model",
        )
    checkpoint = find_sound(run)
    state = DecoderWeights(checkpoint.path, model, config.seed)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    write = write_adapter if adapter else write_model
    num_parameters = write(partial, model, state, DTYPES[dtype])
    write_tokenizer(partial, config)
    partial.rename(out)
    return HuggingFaceReport(str(out), checkpoint.step, dtype, num_parameters, adapter)


def write_model(folder: Path, config: DecoderConfig, state: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Write shards of at most 5 GB, their index, and config.json; return the number of parameters.

    Adapters are merged. A tied head has no tensor of its own.

    Args:
        folder: Existing folder.
        config: Of the model.
        state: Whole tensors by name, which may be read only when they are asked for.
        dtype: Of what is written.
    """

    def read(name: str) -> Tensor:
        path, value = name.removesuffix(".weight"), state[name]
        if path + _A in state:
            value = merge_weight(value, state[path + _A], state[path + _B], config.lora)
        return value.to(dtype)

    shapes = make_shapes(config)
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    _write_shards(folder, {name: size * dtype.itemsize for name, size in sizes.items()}, read)
    content = make_config_json(config, str(dtype).removeprefix("torch."))
    if config.pretrained is not None:
        known = read_config(Path(config.pretrained))
        content |= {key: known.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", content)
    return sum(sizes.values())


def _write_shards(folder: Path, num_bytes: dict[str, int], read: Callable[[str], Tensor]) -> None:
    shards = list(_cut(num_bytes))
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = [SINGLE]
    for file, names in zip(files, shards, strict=True):
        save_file({name: read(name).contiguous() for name in names}, folder / file, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        total = {"total_size": sum(num_bytes.values())}
        _write_json(folder / INDEX, {"metadata": total, "weight_map": weight_map})


def _cut(num_bytes: dict[str, int]) -> Iterator[list[str]]:
    """Names in order, in groups of at most `MAX_SHARD_BYTES`; a larger tensor is a group of its own."""
    names: list[str] = []
    total = 0
    for name, size in num_bytes.items():
        if names and total + size > MAX_SHARD_BYTES:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def write_adapter(
    folder: Path, config: DecoderConfig, state: Mapping[str, Tensor], dtype: torch.dtype
) -> int:
    """Write the adapter as PEFT does, with the base model's folder; return its number of parameters.

    The arguments are those of `write_model`.
    """
    lora = config.lora
    adapter = {
        f"base_model.model.{name}": state[name].to(dtype).contiguous()
        for name in state
        if name.endswith((_A, _B))
    }
    save_file(adapter, folder / "adapter_model.safetensors", {"format": "pt"})
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.pretrained,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "inference_mode": True,
    }
    _write_json(folder / "adapter_config.json", content)
    return sum(value.numel() for value in adapter.values())


def write_tokenizer(folder: Path, config: Config) -> None:
    """Copy the tokenizer that the run's data were made with, and from the base model what goes with it.

    What ends a text is added to generation_config.json: a base model's own may not know the end of a turn.
    """
    assert isinstance(config.model, DecoderConfig)
    base = Path(config.model.pretrained) if config.model.pretrained is not None else None
    tokenizer = Path(config.data.root) / TOKENIZER_NAME
    if not (tokenizer / "tokenizer.json").is_file():  # the data may be elsewhere by now
        if base is None:
            return
        tokenizer = base
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    generation: dict[str, Any] = {}
    for path in sorted(base.iterdir()) if base is not None else ():
        if path.is_file() and path.name.upper().startswith(("LICENSE", "NOTICE", "USE_POLICY")):
            shutil.copyfile(path, folder / path.name)
        elif path.name == "generation_config.json":
            generation = json.loads(path.read_text())
    if (tokenizer / "tokenizer.json").is_file():
        known = generation.get("eos_token_id")
        ends = {known} if isinstance(known, int) else set(known or ())
        generation["eos_token_id"] = sorted(ends | {DocumentTokenizer(tokenizer).eos_id})
    _write_json(folder / "generation_config.json", generation)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
