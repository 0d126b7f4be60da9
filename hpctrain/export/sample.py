"""What a decoder says: a few words from a run's newest sound checkpoint, on the CPU.

The whole text is computed again for every token, so this is for small models; others are exported and served.
Shapes: L tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hpctrain.config.load import load_config
from hpctrain.config.schema import Config, DecoderConfig
from hpctrain.data.documents import LeftOutError, Turn
from hpctrain.data.tokenizer import DocumentTokenizer
from hpctrain.data.tokens import TOKENIZER_NAME, TokenSet
from hpctrain.errors import ConfigError
from hpctrain.export.trained import DecoderWeights, find_sound
from hpctrain.models.decoder import Decoder
from hpctrain.models.lora import apply_lora
from hpctrain.plan.costs import parameters
from hpctrain.run.directory import RunDirectory

MAX_BYTES = 4 * 10**9  #: of fp32 weights; beyond, a token takes seconds


@dataclass(frozen=True)
class Sample:
    """What a model said."""

    run: str
    step: int
    prompt: str
    answer: str
    recorded: str | None  #: what was said in the call that the prompt is from, None where it was typed

    def text(self) -> str:
        """Return it for a terminal."""
        said = [f"sample of {self.run}, step {self.step}", *_indented(self.prompt)]
        said += [f"model:    {self.answer}"]
        return "\n".join(said + ([] if self.recorded is None else [f"recorded: {self.recorded}"]))


@dataclass(frozen=True)
class _Prompt:
    ids: npt.NDArray[np.int64]
    end_id: int  #: of the token that ends the answer
    recorded: npt.NDArray[np.int64] | None = None


def make_sample(
    run_dir: Path,
    prompt: str | None = None,
    num_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> Sample:
    """Let the model of a run answer.

    Args:
        run_dir: Folder of the run.
        prompt: What a customer says; None takes a document of the val split up to the second thing to be
            learnt, which in a call is the answer to the customer's first words.
        num_tokens: Length of the answer, at most.
        temperature: Divides the logits; 0 takes the likeliest token.
        seed: Decides the document, and what is drawn with a temperature.

    Raises:
        ConfigError: the run trains no decoder, or one too large for this; it has no tokenizer or val split;
            the tokenizer's chat template refuses the prompt.
        CheckpointError: the run has no sound checkpoint.
    """
    run = RunDirectory(run_dir)
    config = load_config(run.config)
    model = _check_model(config, run_dir)
    tokenizer = DocumentTokenizer(_find_tokenizer(config, model))
    asked = _from_val(config, seed) if prompt is None else _from_text(tokenizer, prompt)
    checkpoint = find_sound(run)
    decoder = _load(model, DecoderWeights(checkpoint.path, model, config.seed))
    ids = generate(decoder, asked.ids, asked.end_id, num_tokens, temperature, seed)
    shown = [tokenizer.decode(each, keep_special=False).strip() for each in (asked.ids, ids)]
    recorded = None
    if asked.recorded is not None:
        recorded = tokenizer.decode(asked.recorded, keep_special=False).strip()
    return Sample(str(run_dir), checkpoint.step, shown[0], shown[1], recorded)


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompt: npt.NDArray[np.int64],
    end_id: int,
    num_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[int]:
    """Return the tokens that follow a prompt, up to and without `end_id`.

    Of a text longer than `max_position_embeddings` only the end is seen. Arguments as in `make_sample`.
    """
    generator = torch.Generator().manual_seed(seed)
    window = decoder.config.max_position_embeddings
    ids = prompt.tolist()
    for _ in range(num_tokens):
        token_1L = torch.tensor([ids[-window:]])
        position_1L = torch.arange(token_1L.shape[1])[None]
        logits_V = decoder.logits(token_1L, position_1L)[0, -1].float()
        if temperature > 0:
            chance_V = torch.softmax(logits_V / temperature, dim=0)
            token = int(torch.multinomial(chance_V, 1, generator=generator))
        else:
            token = int(logits_V.argmax())
        if token == end_id:
            break
        ids.append(token)
    said: list[int] = ids[len(prompt) :]
    return said


def _check_model(config: Config, run_dir: Path) -> DecoderConfig:
    model = config.model
    if not isinstance(model, DecoderConfig):
        raise ConfigError(f"export sample {run_dir}", f"model.kind={model.kind}", "sample a decoder run")
    if (size := 4 * parameters(model)) > MAX_BYTES:
        raise ConfigError(
            f"export sample {run_dir}",
            f"its {parameters(model):,} parameters are {size / 1e9:.0f} GB in fp32; "
            f"this is for small models, up to {MAX_BYTES / 1e9:.0f} GB",
            f"hpctrain export hf {run_dir} OUT, and serve OUT with vLLM, SGLang or transformers",
        )
    return model


def _find_tokenizer(config: Config, model: DecoderConfig) -> Path:
    folders = [Path(config.data.root) / TOKENIZER_NAME]
    if model.pretrained is not None:
        folders.append(Path(model.pretrained))
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return folder
    raise ConfigError(
        f"read the tokenizer of data.root={config.data.root}",
        f"no tokenizer.json in {' or '.join(map(str, folders))}",
        "give the command where data.root leads to the packed data",
    )


def _from_val(config: Config, seed: int) -> _Prompt:
    """A document of the val split, up to where the model is to go on."""
    folder = Path(config.data.root) / "val"
    if not folder.is_dir():
        raise ConfigError("take a prompt from the val split", f"there is no {folder}", "give --prompt TEXT")
    tokens = TokenSet(folder)
    document = seed % tokens.num_documents
    ids, learnt = tokens.tokens(document), tokens.learnt(document)
    edges = np.flatnonzero(np.diff(learnt, prepend=False, append=False)).reshape(-1, 2)
    start, stop = edges[min(1, len(edges) - 1)]
    start = start or len(ids) // 2  # a text is learnt whole
    return _Prompt(ids[:start], int(ids[stop - 1]), ids[start : stop - 1])


def _from_text(tokenizer: DocumentTokenizer, prompt: str) -> _Prompt:
    try:
        return _Prompt(*tokenizer.encode_prompt([Turn("user", prompt)]))
    except LeftOutError as error:
        raise ConfigError(
            f"--prompt {prompt}", str(error), "words that the run's chat template takes"
        ) from None


def _load(config: DecoderConfig, state: DecoderWeights) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
        apply_lora(decoder, config.lora)
    values = {name: state[name].float() for name, _ in decoder.named_parameters()}
    decoder.load_state_dict(values, assign=True)
    return decoder


def _indented(text: str) -> list[str]:
    return [f"  {line}" for line in text.splitlines()]
