"""The safetensors of a Hugging Face folder, read slice by slice: a rank reads the bytes of its own part.

What the folder's config.json means is in config/huggingface.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpctrain.config.schema import DecoderConfig
from hpctrain.errors import ConfigError
from hpctrain.models.decoder import Decoder

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def make_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return name and whole shape of every parameter of the decoder, without adapters."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in Decoder(config).named_parameters()}


class WeightFiles:
    """One file, or several with an index. No tensor is read before it is asked for.

    Raises:
        ConfigError: there are none, or a file that the index names is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._file_of: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        elif (folder / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._reader(SINGLE).keys(), SINGLE)
        else:
            raise ConfigError(
                f"read weights from {folder}",
                f"neither {INDEX} nor {SINGLE}",
                "name a folder with safetensors",
            )
        missing = sorted({name for name in self._file_of.values() if not (folder / name).is_file()})
        if missing:
            raise ConfigError(
                f"read weights from {folder}", f"missing: {', '.join(missing)}", "download the folder again"
            )

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's whole shape."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a part of a tensor on the CPU, in the dtype of the file; without an index all of it.

        Args:
            name: of the tensor.
            index: one slice a dimension, without steps; dimensions left out are taken whole.
        """
        value: Tensor = self._slice(name)[index or (slice(None),)]
        return value

    def check(self, config: DecoderConfig) -> None:
        """Refuse a folder that does not hold exactly this decoder.

        Raises:
            ConfigError: a tensor is missing, too many, or of another shape; all kinds are named.
        """
        shapes = make_shapes(config)
        names = {name for name in self.names() if not name.endswith("rotary_emb.inv_freq")}  # of old folders
        if config.tie_word_embeddings:
            names.discard("lm_head.weight")  # some write it twice
        findings = {
            "missing": sorted(shapes.keys() - names),
            "unknown": sorted(names - shapes.keys()),
            "of another shape": sorted(n for n in names & shapes.keys() if self.shape(n) != shapes[n]),
        }
        if any(findings.values()):
            told = "; ".join(f"{len(v)} {k} ({', '.join(v[:3])})" for k, v in findings.items() if v)
            raise ConfigError(
                f"the weights in {self._folder} are not those of model",
                told,
                "take the weights of this model",
            )

    def _slice(self, name: str) -> Any:
        return self._reader(self._file_of[name]).get_slice(name)

    def _reader(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"read weights from {self._folder / file}", str(error), "download the file again"
                ) from error
        return self._open[file]
