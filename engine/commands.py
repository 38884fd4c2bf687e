"""The commands for one machine: `engine generate` and `engine pack`."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# numpy is imported inside functions: its thread count is fixed when it is loaded.

EXAMPLES = """examples:
  engine generate SmolLM2-135M-Instruct.Q4_1.gguf -p "What is a KV cache?"
  engine generate model.gguf -p "Once upon a time" --raw --temperature 0.8 --top-p 0.95 --seed 7
  engine generate model.pkg -p "Name three boards." --json

A model that is no package is packed on first use; packages are kept in $HARNESS_CACHE, or in
~/.cache/decode-engine.
"""


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    threads = getattr(options, "threads", None)
    if threads is not None:
        if threads < 1:
            print(f"engine: --threads is {threads}, expected at least 1", file=sys.stderr)
            return 2
        for library in ("OPENBLAS", "OMP", "MKL", "VECLIB_MAXIMUM"):
            os.environ[f"{library}_NUM_THREADS"] = str(threads)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except KeyboardInterrupt:
        print("\nengine: interrupted", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ImportError, ValueError) as error:
        # Formats, packages, tokenizers and options raise ValueErrors that speak for themselves.
        print(f"engine: {error}", file=sys.stderr)
        return 2
    except ArithmeticError as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="engine")
    commands = parser.add_subparsers(dest="command", required=True)
    shape = argparse.RawDescriptionHelpFormatter
    generate = commands.add_parser(
        "generate",
        help="stream text from a model on this machine",
        description="Stream text from a model on this machine. The prompt is put into the model's "
        "chat template where it has one.",
        epilog=EXAMPLES,
        formatter_class=shape,
    )
    generate.add_argument("model", type=Path, help="GGUF, safetensors file or folder, or package")
    generate.add_argument("-p", "--prompt", required=True, help="the prompt; - reads it from stdin")
    generate.add_argument("--system", help="a system message for the chat template")
    generate.add_argument(
        "--raw", action="store_true", help="no chat template: continue the prompt"
    )
    generate.add_argument("-n", "--max-new", type=int, default=256, help="new tokens at most (256)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int, default=0, help="keep the k likeliest; 0 off")
    generate.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling; 1 off")
    generate.add_argument("--min-p", type=float, default=0.0, help="share of the likeliest; 0 off")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, help="1 off")
    generate.add_argument("--seed", type=int, default=0, help="of the random stream (0)")
    generate.add_argument("--context", type=int, help="positions at most (the model's own)")
    generate.add_argument("--threads", type=int, help="threads of the matrix products")
    generate.add_argument("--unit", default="packed", help="what executes the ops (packed)")
    generate.add_argument("--json", action="store_true", help="one JSON object instead of text")
    generate.set_defaults(run=_generate)
    pack = commands.add_parser(
        "pack",
        help="make the one-file package that boards map",
        description="Make the one-file package that boards map read-only. Block types that our "
        "layouts hold are moved without loss; what else changes is printed.",
        epilog="example:\n  engine pack SmolLM2-135M-Instruct.Q4_1.gguf smollm2.pkg\n",
        formatter_class=shape,
    )
    pack.add_argument("model", type=Path, help="GGUF, safetensors file or folder")
    pack.add_argument("package", type=Path, help="the file to write")
    pack.add_argument("--name", help="the model's name in results (default: the file's)")
    pack.add_argument("--force", action="store_true", help="replace a file that is no package")
    pack.add_argument("--json", action="store_true", help="the result as JSON")
    pack.set_defaults(run=_pack)
    return parser


def _progress(label: str) -> Callable[[int, int], None]:
    """A counter on stderr, from the second second on, where somebody looks."""
    begun = time.monotonic()

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty() and time.monotonic() - begun > 2:
            end = "\n" if done >= total else ""
            print(f"\r{label} {100 * done // total} %", end=end, file=sys.stderr, flush=True)

    return show


def _pack(options: argparse.Namespace) -> int:
    from engine.formats import open_checkpoint
    from engine.package import build_package

    _check_target(options.model, options.package, options.force)
    checkpoint = open_checkpoint(options.model)
    try:
        name = options.name or options.model.stem
        progress = _progress(f"packing {name}")
        info = build_package(checkpoint, options.package, name=name, progress=progress)
    finally:
        checkpoint.close()
    if options.json:
        fields: dict[str, Any] = {
            "package": str(info.path),
            "sha256": info.sha256,
            "bytes": info.bytes,
            "scheme": info.scheme,
            "notes": info.notes,
            "hyperparameters": info.hyperparameters.to_json(),
        }
        print(json.dumps(fields, indent=1))
    else:
        print(f"{info.path}: {info.bytes / 1e6:.1f} MB, {info.scheme}, sha256 {info.sha256}")
        for note in info.notes:
            print(f"note: {note}", file=sys.stderr)
    return 0


def _check_target(model: Path, target: Path, force: bool) -> None:
    """Raises ValueError rather than replace what is no package: a model, a folder, a device."""
    from engine.package import MAGIC

    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}; make it first")
    if not target.exists():
        return
    if model.exists() and target.samefile(model):
        raise ValueError(f"{target}: is the model itself; name another file for the package")
    if not target.is_file():
        raise ValueError(f"{target}: is no regular file; name a file for the package")
    with target.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC and not force:
            raise ValueError(f"{target}: exists and is no package; --force replaces it")


def _package_of(model: Path) -> Path:
    """`model` if it is a package, else its package from the user's cache, made on first use.

    The key holds the file's identity (path, size, time), not its content: hashing gigabytes at
    every start would take longer than loading them.
    """
    from engine.formats import open_checkpoint
    from engine.package import MAGIC, build_package

    if model.is_file():
        with model.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return model
    checkpoint = open_checkpoint(model)
    try:
        files = sorted(model.iterdir()) if model.is_dir() else [model]
        identity = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        key = hashlib.sha256(json.dumps([MAGIC.decode(), identity]).encode()).hexdigest()[:24]
        path = _cache_folder() / f"{model.stem}-{key}.pkg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            build_package(checkpoint, path, name=model.stem, progress=_progress("packing"))
        return path
    finally:
        checkpoint.close()


def _cache_folder() -> Path:
    """`$HARNESS_CACHE`/packages where that is set, else `decode-engine` in the user's cache."""
    shared = os.environ.get("HARNESS_CACHE")
    if shared:
        return Path(shared) / "packages"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "decode-engine"


def _stdin_text() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"the prompt from stdin is not UTF-8 text: {error}") from error


def _generate(options: argparse.Namespace) -> int:
    from engine.decode import Decoder, generate
    from engine.package import Package
    from engine.sampling import Sampling
    from engine.tokenizer import Tokenizer

    sampling = Sampling(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    text = _stdin_text() if options.prompt == "-" else options.prompt
    if options.max_new < 1:
        raise ValueError(f"--max-new is {options.max_new}, expected at least 1")
    with Package.open(_package_of(options.model)) as package:
        if package.tokenizer is None:
            raise ValueError(
                f"{options.model}: the file carries no tokenizer, so text needs another"
            )
        tokenizer = Tokenizer(package.tokenizer)
        for warning in tokenizer.warnings:
            print(f"engine: {warning}", file=sys.stderr)
        if tokenizer.has_chat_template and not options.raw:
            messages = [{"role": "user", "content": text}]
            if options.system:
                messages.insert(0, {"role": "system", "content": options.system})
            text = tokenizer.chat(messages)
        elif options.system:
            raise ValueError("--system needs a model with a chat template, and no --raw")
        prompt = tokenizer.encode(text)
        if not prompt:
            if tokenizer.bos_id is None:
                raise ValueError(
                    "the prompt is empty and the model has no BOS token; give a prompt"
                )
            prompt = [tokenizer.bos_id]
        decoder = Decoder(package, unit=options.unit, context=options.context)
        run = generate(
            decoder,
            prompt,
            sampling=sampling,
            max_new=options.max_new,
            stop_ids=tokenizer.stop_ids,
        )
        stream, pieces = tokenizer.stream(special=False, start=False), []
        for event in run:
            if event.token not in tokenizer.stop_ids:
                pieces.append(stream.push(event.token))
                if not options.json:
                    print(pieces[-1], end="", flush=True)
        pieces.append(stream.flush())
    result = run.result
    tokens_per_s = None if result.tpot_s is None else 1 / result.tpot_s
    if options.json:
        fields = {
            "text": "".join(pieces),
            "tokens": result.tokens,
            "finish": result.finish,
            "prompt_tokens": result.prompt_tokens,
            "ttft_s": result.ttft_s,
            "tpot_s": result.tpot_s,
            "itl_ms": {f"p{p}": result.itl_ms(p) for p in (50, 95, 99)},
            "unit": decoder.unit.name,
            "peak_rss_mb": _peak_rss_mb(),
        }
        print(json.dumps(fields))
        return 0
    print(pieces[-1])
    speed = "" if tokens_per_s is None else f", {tokens_per_s:.1f} tokens/s after it"
    counts = f"{result.prompt_tokens} + {len(result.tokens)} tokens, finish {result.finish}"
    times = f"first token after {result.ttft_s:.2f} s{speed}"
    memory = f"peak memory {_peak_rss_mb():.0f} MB"
    print(f"[{counts}; {times}; {memory}]", file=sys.stderr)
    return 0


def _peak_rss_mb() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
