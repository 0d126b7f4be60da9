"""What a run reads: its packed data and pretrained weights, looked at on the login node without torch."""

from __future__ import annotations

import difflib
import json
import re
import sys
from pathlib import Path
from typing import Any

from hpctrain.config.huggingface import check_agreement
from hpctrain.config.schema import (
    Config,
    DataConfig,
    DecoderConfig,
    ImageDataConfig,
    ModelConfig,
    TokenDataConfig,
    VisionConfig,
)
from hpctrain.errors import ConfigError
from hpctrain.plan.supply import JPEG_BYTES_PER_PIXEL, TOKEN_BYTES, Workload


def check_data(config: Config) -> None:
    """Refuse data that are missing, unless the run draws its own, or that the model cannot read."""
    root, kind = Path(config.data.root), config.data.kind
    meta = _read_meta(config)
    if meta is None:
        if draws_its_own(config.data):
            return
        what = "it does not exist" if not root.exists() else "it has no train/meta.json"
        raise ConfigError(
            f"data.root={root}",
            what,
            f"pack your {kind}: hpctrain data {kind} SOURCE {root}, or correct data.root",
        )
    found = meta.get("kind", "images")
    if found != kind:
        raise ConfigError(f"data.root={root} with data.kind={kind}", f"it holds {found}", "correct data.root")
    model = config.model
    if isinstance(model, DecoderConfig) and meta["vocab_size"] > model.vocab_size:
        raise ConfigError(
            f"data.root={root} with model.vocab_size={model.vocab_size}",
            f"its tokenizer has {meta['vocab_size']} tokens",
            "pack the text with the model's own tokenizer",
        )


def _read_meta(config: Config) -> dict[str, Any] | None:
    path = Path(config.data.root) / "train" / "meta.json"
    if not path.is_file():
        return None
    kind = config.data.kind
    needed = ("num_tokens", "vocab_size") if kind == "tokens" else ("num_samples", "identities", "shards")
    try:
        meta: dict[str, Any] = json.loads(path.read_text())
        missing = [key for key in needed if key not in meta] if meta.get("kind", "images") == kind else []
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        raise ConfigError(
            f"data.root={config.data.root}",
            f"its train/meta.json is damaged or of another version: {', '.join(missing)}",
            f"pack it again: hpctrain data {kind} SOURCE OUT",
        )
    return meta


def find_workload(config: Config) -> Workload | None:
    """What an epoch reads: packed data as counted, else what `plan.num_samples` or `plan.num_tokens` says."""
    meta, told = _read_meta(config), config.plan
    if isinstance(config.data, TokenDataConfig):
        num_tokens = meta.get("num_tokens") if meta else told.num_tokens  # None: images lie there
        if num_tokens is None:
            return None
        length = config.data.sequence_length
        return Workload(
            num_samples=-(-num_tokens // length),
            sample_bytes=length * TOKEN_BYTES,
            is_packed=meta is not None,
        )
    pixel_bytes = JPEG_BYTES_PER_PIXEL * 1e6
    if meta is not None and "shards" in meta:
        size = sum(shard["size_bytes"] for shard in meta["shards"]) / max(1, meta["num_samples"])
        return Workload(
            num_samples=meta["num_samples"],
            sample_bytes=size,
            megapixels=size / pixel_bytes,
            num_identities=len(meta["identities"]),
        )
    if told.num_samples is None:
        return None
    return Workload(
        num_samples=told.num_samples,
        sample_bytes=told.image_bytes or told.image_megapixels * pixel_bytes,
        megapixels=told.image_megapixels,
        num_identities=told.num_identities,
        is_packed=False,
    )


def data_lines(config: Config) -> list[str]:
    """What the packed data mean for the plan, for a terminal; nothing before they are there."""
    meta, batch = _read_meta(config), config.optim.global_batch_size
    if meta is None:
        return []
    if isinstance(config.data, TokenDataConfig):
        length = config.data.sequence_length
        steps = -(-meta["num_tokens"] // (length * batch))
        return [
            f"data    {meta['num_tokens']:,} tokens in {meta['num_documents']:,} documents, "
            f"{meta['num_learnt'] / meta['num_tokens']:.0%} of them learnt; at least {steps} steps of "
            f"{length * batch:,} tokens an epoch, {steps * config.optim.num_epochs} in all"
        ]
    images = meta["num_samples"]
    steps = -(-images // batch)
    filler = 1 - images / (steps * batch)
    lines = [
        f"data    {images} images of {len(meta['identities'])} people, {steps} steps an epoch, "
        f"{steps * config.optim.num_epochs} in all"
    ]
    if filler > 0.1:
        lines.append(
            f"        {filler:.0%} of each epoch is filler: a smaller optim.global_batch_size wastes less"
        )
    return lines


def check_model(model: ModelConfig) -> None:
    """Refuse a model that cannot be built, or weights that are not there or not its own."""
    if isinstance(model, VisionConfig):
        _check_backbone(model)
    if isinstance(model, DecoderConfig) and model.pretrained is not None:
        folder = Path(model.pretrained)
        if not folder.is_dir():
            raise ConfigError(
                f"model.pretrained={model.pretrained}",
                "no such folder",
                "a Hugging Face folder; null for random weights",
            )
        check_agreement(model, folder)


def _check_backbone(model: VisionConfig) -> None:
    """Refuse a backbone that timm does not have, or weights that are not there, without importing either."""
    if model.pretrained is not None and not Path(model.pretrained).is_file():
        raise ConfigError(
            f"model.pretrained={model.pretrained}", "no such file", "a .safetensors file, or null"
        )
    folders = [Path(entry) / "timm" / "models" for entry in sys.path]
    known: set[str] = set()
    older: set[str] = set()
    for path in (path for folder in folders if folder.is_dir() for path in folder.glob("*.py")):
        text = path.read_text()
        known.update(re.findall(r"^@register_model\s+def (\w+)\(", text, re.MULTILINE))
        _, _, renamed = text.partition("register_model_deprecations(")
        older.update(re.findall(r"['\"](\w+)['\"]\s*:", renamed))
    name = model.backbone.partition(".")[0]
    if known and name not in known | older:
        near = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        raise ConfigError(
            f"model.backbone={model.backbone}",
            "timm has no such model",
            f"model.backbone={near[0]}" + (f" (or {', '.join(near[1:])})" if near[1:] else "")
            if near
            else "a name that timm.list_models() gives",
        )


def draws_its_own(data: DataConfig) -> bool:
    """Whether the experiment makes its data on first use."""
    if isinstance(data, ImageDataConfig):
        return data.synthetic_identities > 0
    return isinstance(data, TokenDataConfig) and data.synthetic_documents > 0


def draw_data(data: DataConfig) -> None:
    """Make the data of an experiment that draws its own; at once if they are there. Raises ConfigError when
    something else is."""
    root = Path(data.root)
    if draws_its_own(data) and not root.exists():
        print(f"hpctrain: making synthetic data in {root}", file=sys.stderr, flush=True)
    if isinstance(data, ImageDataConfig) and data.synthetic_identities:
        from hpctrain.data.synthetic import make_faces

        make_faces(root, num_identities=data.synthetic_identities)
    if isinstance(data, TokenDataConfig) and data.synthetic_documents:
        from hpctrain.data.calls import make_calls

        make_calls(root, num_documents=data.synthetic_documents)
