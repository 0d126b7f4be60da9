"""`hpctrain data tokens SOURCE OUT --tokenizer FOLDER`: texts and calls become token shards, train and val.

Several processes tokenize pieces of the source; a second run goes on where the first was stopped, and with
other options it is refused. `train/meta.json`, written last, makes the folder complete.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.documents import Piece, cut_pieces, fingerprint, list_files
from hpctrain.data.restartable import read_begun, record_begun, run_jobs, write_atomically
from hpctrain.data.token_shards import (
    PARTS_NAME,
    SPLITS,
    PieceJob,
    PiecePart,
    SplitPart,
    cannot_write,
    is_written,
    write_piece,
)
from hpctrain.data.tokenizer import TOKENIZER_FILES, DocumentTokenizer, tokenizer_digest
from hpctrain.data.tokens import DOCUMENTS_NAME, META_NAME, TOKENIZER_NAME, TokenMeta, TokenSet
from hpctrain.errors import ConfigError, DataError

LEFT_OUT_NAME = "left_out.txt"

_REPORT_NAME = "report.json"


@dataclass(frozen=True)
class TokenReport:
    """What was packed."""

    out: str
    num_documents: dict[str, int]  #: by split
    num_tokens: dict[str, int]  #: by split
    num_learnt: dict[str, int]  #: by split: tokens with weight in the loss
    tokens_per_syllable: float  #: tokens of the documents, by words that spaces divide
    num_unknown: int  #: tokens for what the vocabulary lacks
    num_empty: int  #: records without words, left out; all that is left out is listed in `left_out.txt`
    num_malformed: int  #: records left out for any other reason
    pieces_found: int  #: written by an earlier run
    seconds: float


def pack_tokens(
    source: Path,
    out: Path,
    *,
    tokenizer: Path,
    learn: str = "agent",
    val_fraction: float = 0.01,
    num_processes: int = 1,
    piece_bytes: int = 32 << 20,
    seed: int = 0,
    show: bool = True,
) -> TokenReport:
    """Packs the documents of a file or a folder into `out/train` and `out/val`.

    Where `out` is complete already, its files are compared with their checksums.

    Args:
        tokenizer: Folder with tokenizer.json, tokenizer_config.json and perhaps a chat template; copied into
            `out/tokenizer`.
        learn: "agent": of calls, the agent's words and what ends its turns. "all": everything.
        val_fraction: Share of the documents for val, decided by a hash of their words.
        piece_bytes: About so much of the source becomes one shard.
        show: Print progress to stderr.

    Raises:
        ConfigError: a wrong option, nothing to read, or `out` was begun with other options.
        DataError: a file cannot be read or written, a checksum differs, or no document came out.
    """
    started_s = time.monotonic()
    _check_options(learn, val_fraction, num_processes, piece_bytes)
    if out.resolve().is_relative_to(source.resolve()):
        raise ConfigError(f"cannot pack {source} into {out}", "that lies within it", "give another folder")
    DocumentTokenizer(tokenizer)
    names = list_files(source)
    options = {
        "learn": learn,
        "val_fraction": val_fraction,
        "piece_bytes": piece_bytes,
        "seed": seed,
        "tokenizer_sha256": tokenizer_digest(tokenizer),
        "source_sha256": fingerprint(source, names),
    }
    try:
        _begin(out, options, tokenizer)
        pieces = cut_pieces(source, names, piece_bytes)
        found = len(pieces)
        if (out / "train" / META_NAME).exists():
            _verify(out)
        else:
            found = _write_pieces(source, out, pieces, options, num_processes, show)
            _publish(out, pieces, options)
    except OSError as error:
        raise cannot_write(out, error) from error
    _forget_parts(out)
    report = json.loads((out / _REPORT_NAME).read_text(encoding="utf-8"))
    return TokenReport(str(out), **report, pieces_found=found, seconds=time.monotonic() - started_s)


def main(argv: list[str]) -> int:
    """Runs `hpctrain data tokens …`; returns the exit code.

    Raises:
        HpctrainError: as `pack_tokens`; the command line prints it and takes its exit code.
    """
    options = vars(_parser().parse_args(argv))
    as_json = options.pop("json")
    options["piece_bytes"] = options.pop("shard_mib") << 20
    report = pack_tokens(**options)
    if as_json:
        print(json.dumps(asdict(report), ensure_ascii=False))
        return 0
    for split, num_documents in report.num_documents.items():
        tokens, learnt = report.num_tokens[split], report.num_learnt[split]
        print(
            f"{split}: {num_documents:,} documents, {tokens:,} tokens, {learnt / tokens:.1%} of them learnt"
        )
    print(f"tokens per syllable: {report.tokens_per_syllable:.2f}")
    if report.num_unknown:
        print(f"unknown: {report.num_unknown:,} tokens; this tokenizer does not know all letters of the text")
    left_out = report.num_empty + report.num_malformed
    where = f" (see {Path(report.out) / LEFT_OUT_NAME})" if left_out else ""
    print(f"left out: {report.num_empty:,} empty, {report.num_malformed:,} malformed{where}")
    print(f"in {report.out}, {report.seconds:.1f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hpctrain data tokens",
        description="Tokenizes texts and calls into memory-mapped shards, split into train/ and val/.",
        epilog='A line of JSON is {"text": …}, or {"turns": [{"role": "customer", "content": …}, …]} '
        "with roles agent (assistant), customer (user), system.",
    )
    add = parser.add_argument
    add("source", type=Path, help="file, or folder of files: .jsonl, .ndjson, .parquet, .txt")
    add("out", type=Path, help="folder to pack into; a stopped run goes on when it is given again")
    add("--tokenizer", type=Path, required=True, help="Hugging Face folder with tokenizer.json")
    add("--learn", choices=["agent", "all"], default="agent", help="of calls (default agent)")
    add("--val-fraction", type=float, default=0.01, help="share of the val split (default 0.01)")
    add("--processes", dest="num_processes", type=int, default=len(os.sched_getaffinity(0)))
    add("--shard-mib", type=int, default=32, help="source that becomes one shard, MiB (default 32)")
    add("--seed", type=int, default=0, help="decides the split (default 0)")
    add("--json", action="store_true", help="print the report as JSON")
    return parser


def _check_options(learn: str, val_fraction: float, num_processes: int, piece_bytes: int) -> None:
    wrong = {
        f"--learn {learn}": learn not in ("agent", "all"),
        f"--val-fraction {val_fraction}": not 0 <= val_fraction < 1,
        f"--processes {num_processes}": num_processes < 1,
        f"--shard-mib {piece_bytes / 2**20:g}": piece_bytes < 1,
    }
    for option, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"{option} is out of range", "", "learn agent or all, fraction 0 … 1 (without 1), others ≥ 1"
            )


def _begin(out: Path, options: dict[str, Any], tokenizer: Path) -> None:
    if read_begun(out, options, "documents") is None:
        record_begun(out, options)
    (out / PARTS_NAME).mkdir(exist_ok=True)
    copy = out / TOKENIZER_NAME
    copy.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file() and not (copy / name).exists():
            write_atomically(copy / name, (tokenizer / name).read_bytes())


def _write_pieces(
    source: Path, out: Path, pieces: list[Piece], options: dict[str, Any], num_processes: int, show: bool
) -> int:
    """Writes the pieces that are not written yet; returns how many were."""
    learn, val_fraction, seed = options["learn"], options["val_fraction"], options["seed"]
    jobs = [
        PieceJob(source, out, number, piece, out / TOKENIZER_NAME, learn, val_fraction, seed)
        for number, piece in enumerate(pieces)
        if not is_written(out, number)
    ]
    run_jobs(write_piece, iter(jobs), sum(job.piece.size_bytes for job in jobs), "bytes", num_processes, show)
    return len(pieces) - len(jobs)


def _publish(out: Path, pieces: list[Piece], options: dict[str, Any]) -> None:
    """Writes the indexes, what was left out and the report, and then what makes the folder complete."""
    parts = [PiecePart.read(out, number) for number in range(len(pieces))]
    left_out = _left_out(pieces, parts)
    write_atomically(out / LEFT_OUT_NAME, "".join(f"{at}\t{reason}\n" for at, reason in left_out).encode())
    if not any(len(part.splits["train"].documents) for part in parts):
        why = f"the first is {left_out[0][0]}: {left_out[0][1]}" if left_out else "the files are empty"
        raise DataError(
            f"no document came out for train; {len(left_out)} records were left out",
            why,
            f"see {out / LEFT_OUT_NAME}, correct the source, and pack into a new folder",
        )
    tokenizer = DocumentTokenizer(out / TOKENIZER_NAME)
    metas = {}
    for name in reversed(SPLITS):
        if any(len(part.splits[name].documents) for part in parts):
            metas[name] = _write_index(out / name, [part.splits[name] for part in parts], tokenizer, options)
    num_empty = sum(reason == "empty" for _, reason in left_out)
    report = {
        **{
            key: {name: getattr(metas[name], key) for name in SPLITS if name in metas}
            for key in ("num_documents", "num_tokens", "num_learnt")
        },
        "tokens_per_syllable": sum(meta.num_tokens for meta in metas.values())
        / max(1, sum(meta.num_syllables for meta in metas.values())),
        "num_unknown": sum(part.num_unknown for part in parts),
        "num_empty": num_empty,
        "num_malformed": len(left_out) - num_empty,
    }
    write_atomically(out / _REPORT_NAME, json.dumps(report, indent=1).encode())
    for name, meta in metas.items():  # train last
        write_atomically(out / name / META_NAME, meta.to_json().encode())


def _left_out(pieces: list[Piece], parts: list[PiecePart]) -> list[tuple[str, str]]:
    """Returns `file:line` and reason of what was left out."""
    listed, name, before = [], "", 0
    for piece, part in zip(pieces, parts, strict=True):
        if piece.name != name:
            name, before = piece.name, 0
        listed += [(f"{name}:{before + line}", reason) for line, reason in part.left_out]
        before += part.num_lines
    return listed


def _write_index(
    folder: Path, parts: list[SplitPart], tokenizer: DocumentTokenizer, options: dict[str, Any]
) -> TokenMeta:
    """Writes `documents.npy` of a split and returns what `meta.json` shall say."""
    parts = [part for part in parts if len(part.documents)]
    documents = np.concatenate([part.documents for part in parts])
    documents["shard"] = np.repeat(np.arange(len(parts)), [len(part.documents) for part in parts])
    buffer = io.BytesIO()
    np.save(buffer, documents)
    write_atomically(folder / DOCUMENTS_NAME, buffer.getvalue())
    return TokenMeta(
        num_documents=len(documents),
        num_tokens=int(documents["length"].sum(dtype=np.int64)),
        num_learnt=int(documents["learnt"].sum(dtype=np.int64)),
        num_syllables=sum(part.num_syllables for part in parts),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_sha256=options["tokenizer_sha256"],
        documents_sha256=hashlib.sha256(buffer.getbuffer()).hexdigest(),
        shards=[part.shard for part in parts],
        options=options,
    )


def _verify(out: Path) -> None:
    for name in SPLITS:
        if (out / name / META_NAME).exists():
            TokenSet(out / name).verify()


def _forget_parts(out: Path) -> None:
    """Deletes what only an unfinished folder needs, and files that killed processes did not finish."""
    shutil.rmtree(out / PARTS_NAME, ignore_errors=True)
    for path in out.rglob(".*"):
        path.unlink()
