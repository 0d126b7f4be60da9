"""`hpctrain export`: a run's model as files for plain timm or transformers, its embeddings, its words."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpctrain.run.directory import find_run


def main(argv: Sequence[str]) -> int:
    """Carry out `hpctrain export …`; return the exit code."""
    parser = argparse.ArgumentParser(prog="hpctrain export", description="Take a trained model out of a run.")
    verbs = parser.add_subparsers(dest="what", required=True)
    model = verbs.add_parser("model", help="backbone and heads as safetensors, for plain timm")
    embeddings = verbs.add_parser("embeddings", help="embeddings of images, as Parquet")
    decoder = verbs.add_parser("hf", help="a decoder as a Hugging Face folder, or its adapter for PEFT")
    sample = verbs.add_parser("sample", help="let a small decoder answer, on this machine's CPU")
    for each in (model, embeddings, decoder, sample):
        each.add_argument("run", help="folder of the run, or its name under runs/")
        each.add_argument("--json", action="store_true", help="print facts as JSON")
    for each in (model, embeddings):
        each.add_argument(
            "--ema", action=argparse.BooleanOptionalAction, help="averaged weights (default: if any)"
        )
    decoder.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of the weights")
    decoder.add_argument("--adapter", action="store_true", help="the adapter alone, in PEFT's format")
    sample.add_argument("--prompt", help="what the customer says (default: a call of the val split)")
    sample.add_argument("--tokens", type=int, default=64, help="length of the answer, at most")
    sample.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    sample.add_argument("--seed", type=int, default=0, help="chooses the call, and what is drawn")
    embeddings.add_argument("images", type=Path, help="folder of images, or a packed split")
    for each in (model, decoder):
        each.add_argument("out", type=Path, help="folder to write")
    embeddings.add_argument("out", type=Path, help="file to write")
    args = parser.parse_args(argv)
    run_dir = find_run(args.run).path
    if args.what == "model":
        from hpctrain.export.model import export_model

        return _print(asdict(export_model(run_dir, args.out, args.ema)), args.json)
    if args.what == "hf":
        from hpctrain.export.huggingface import export_huggingface

        return _print(asdict(export_huggingface(run_dir, args.out, args.dtype, args.adapter)), args.json)
    if args.what == "sample":
        from hpctrain.export.sample import make_sample

        made = make_sample(run_dir, args.prompt, args.tokens, args.temperature, args.seed)
        print(json.dumps(asdict(made), ensure_ascii=False) if args.json else made.text())
        return 0
    from hpctrain.export.embeddings import export_embeddings

    return _print(asdict(export_embeddings(run_dir, args.images, args.out, args.ema)), args.json)


def _print(facts: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    weights = "averaged weights" if facts.get("uses_ema") else "weights"
    if "is_adapter" in facts:
        kind = "an adapter of" if facts["is_adapter"] else ""
        weights = f"{kind} {facts['num_parameters']:,} {facts['dtype']} weights".strip()
    print(f"wrote {facts['out']}: {weights} of step {facts['step']}")
    if "num_images" in facts:
        print(f"{facts['num_images']} images; {len(facts['damaged'])} damaged ones left out")
        for path, reason in facts["damaged"]:
            print(f"  {path}: {reason}", file=sys.stderr)
    return 0
