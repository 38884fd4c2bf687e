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

from engine.options import ACTIVATIONS, EXECUTORS, KV_LAYOUTS, KV_SCHEMES, EngineOptions

# numpy is imported inside functions: its thread count is fixed when it is loaded.

EXAMPLES = """examples:
  engine generate SmolLM2-135M-Instruct.Q4_1.gguf -p "What is a KV cache?"
  engine generate model.gguf -p "Once upon a time" --raw --temperature 0.8 --top-p 0.95 --seed 7
  engine generate model.pkg -p "Name three boards." --json
  engine generate model.gguf -p "Go on." --unit packed --executor sync --kv f32
  engine generate model.gguf -p "Go on." --kv int8 --keep 4 --threads 2

A model that is no package is packed on first use; packages are kept in $HARNESS_CACHE, or in
~/.cache/decode-engine.
"""


PACK_HELP = """schemes, with --scheme:
  w4-32 (or w4), w4-64, w4-128, w4-row   4 bits, one scale for that many inputs
  w8-row (or w8), w8-32, w8-64, w8-128   8 bits
  w4-128a, ...                           asymmetric: with a minimum beside each scale
A shape that is no multiple of the group gets the next narrower one, one that is no multiple of 32
becomes f16, and a note says so. Norms and biases stay floats.

With a w4 scheme the embedding and the output matrix are kept in w8-32, unless --keep names other
tensors of the package (L00.attn.q, L00.ffn.down, head.logits, ...); PATTERN=source leaves them as
they are in the model's file.

examples:
  engine pack SmolLM2-135M-Instruct.Q4_1.gguf smollm2.pkg
  engine pack SmolLM2-135M-Instruct.Q4_1.gguf smollm2.pkg --layout interleaved
  engine pack Llama-3.2-1B/ llama.pkg --layout interleaved --scheme w4-128
  engine pack model.gguf model.pkg --scheme w4-64a --keep 'L*.attn.[qkv]=w8' --keep head.logits \\
      --keep embed
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
    _add_engine(generate)
    generate.add_argument("--json", action="store_true", help="one JSON object instead of text")
    generate.set_defaults(run=_generate)
    pack = commands.add_parser(
        "pack",
        help="make the one-file package that boards map",
        description="Make the one-file package that boards map read-only. Without --scheme, GGUF's "
        "Q4, Q5, Q8 and K-quant blocks and 16- and 32-bit floats are moved without loss; what else "
        "changes is printed. With it, matrices are quantised, and the error is measured.",
        epilog=PACK_HELP,
        formatter_class=shape,
    )
    pack.add_argument("model", type=Path, help="GGUF, safetensors file or folder")
    pack.add_argument("package", type=Path, help="the file to write")
    pack.add_argument("--name", help="the model's name in results (default: the file's)")
    pack.add_argument(
        "--layout",
        default="blocked",
        choices=("row", "blocked", "interleaved"),
        help="how quantised weights lie: interleaved for the native kernels, blocked (default) for "
        "numpy, row to compare with",
    )
    pack.add_argument("--scheme", help="quantise to w4-32, w4-128, w8, ... (default: as they are)")
    pack.add_argument(
        "--keep",
        action="append",
        metavar="PATTERN[=SCHEME]",
        help="tensors that get another scheme than --scheme; may be repeated, the first that "
        "matches counts; `none` keeps nothing",
    )
    pack.add_argument(
        "--strict",
        action="store_true",
        help="refuse a tensor whose inputs are no multiple of the group, rather than narrow it",
    )
    pack.add_argument("--force", action="store_true", help="replace a file that is no package")
    pack.add_argument("--json", action="store_true", help="the result as JSON")
    pack.set_defaults(run=_pack)
    return parser


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """How the model runs. What is left out is the unit's own default."""
    group = parser.add_argument_group("how it runs")
    group.add_argument("--threads", type=int, help="threads of one op (native: all CPUs)")
    group.add_argument(
        "--unit", help="native, packed or reference (native where there is a library, else packed)"
    )
    group.add_argument("--executor", choices=EXECUTORS, help="native: compiled; others: sync")
    group.add_argument("--activations", choices=ACTIVATIONS, help="into quantised weights")
    group.add_argument("--kv", choices=KV_SCHEMES, help="precision of the KV cache")
    group.add_argument("--kv-layout", choices=KV_LAYOUTS, help="how keys and values lie")
    group.add_argument("--kernels", metavar="ISA", help="native: generic, avx2, dotprod, …")
    group.add_argument("--huge-pages", action="store_true", default=None, help="for the weights")
    group.add_argument(
        "--keep", type=int, metavar="N", help="a full context goes on as a ring behind N tokens"
    )
    group.add_argument(
        "--pass-off", action="append", metavar="PASS", help="switch a fusion pass off (repeat)"
    )


def _engine_options(options: argparse.Namespace) -> EngineOptions:
    """What the arguments say over the unit's defaults. Without a unit the native one is taken, or
    packed where this machine has no native library."""
    unit = options.unit
    if unit is None:
        from engine.native.library import NativeUnavailable, load

        try:
            load()
            unit = "native"
        except NativeUnavailable as error:
            print(f"engine: running with numpy: {error}", file=sys.stderr)
            unit = "packed"
    threads = options.threads
    if threads is None and unit == "native":
        threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    named = {
        "unit": unit,
        "executor": options.executor,
        "activations": options.activations,
        "kv": options.kv,
        "kv_layout": options.kv_layout,
        "threads": threads,
        "kernels": options.kernels,
        "huge_pages": options.huge_pages,
        "keep": options.keep,
        "passes_off": options.pass_off,
    }
    if options.kv not in (None, "f32") and options.kv_layout is None and unit != "native":
        named["kv_layout"] = "sd"  # plain arrays hold f32 alone
    return EngineOptions.from_mapping({k: v for k, v in named.items() if v is not None})


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
        info = build_package(
            checkpoint,
            options.package,
            name=name,
            layout=options.layout,
            scheme=options.scheme,
            keep=[] if options.keep == ["none"] else options.keep,
            strict=options.strict,
            progress=progress,
        )
    finally:
        checkpoint.close()
    if options.json:
        fields: dict[str, Any] = {
            "package": str(info.path),
            "sha256": info.sha256,
            "bytes": info.bytes,
            "scheme": info.scheme,
            "layout": options.layout,
            "notes": info.notes,
            "relative_errors": info.errors,
            "hyperparameters": info.hyperparameters.to_json(),
        }
        print(json.dumps(fields, indent=1))
    else:
        size = f"{info.bytes / 1e6:.1f} MB"
        print(f"{info.path}: {size}, {info.scheme}, {options.layout}, sha256 {info.sha256}")
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
        found = file.read(len(MAGIC))
        if found[:-1] != MAGIC[:-1] and not force:  # a package of another version may go
            raise ValueError(f"{target}: exists and is no package; --force replaces it")


def _package_of(model: Path, layout: str) -> Path:
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
        named = json.dumps([MAGIC.decode(), layout, identity])
        key = hashlib.sha256(named.encode()).hexdigest()[:24]
        path = _cache_folder() / f"{model.stem}-{key}.pkg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            progress = _progress("packing")
            build_package(checkpoint, path, name=model.stem, layout=layout, progress=progress)
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
    from engine.measure.memory import require_fits
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
    engine = _engine_options(options)
    layout = "interleaved" if engine.unit == "native" else "blocked"
    with Package.open(_package_of(options.model, layout)) as package:
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
        context = options.context or package.hyperparameters.context
        require_fits(package, engine, context)
        decoder = Decoder(package, options=engine, context=context)
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
            "engine": engine.to_mapping(),
            "kernels": dict(getattr(decoder.unit, "kernels", {})),
            "peak_rss_mb": _peak_rss_mb(),
        }
        print(json.dumps(fields))
        return 0
    print(pieces[-1])
    speed = "" if tokens_per_s is None else f", {tokens_per_s:.1f} tokens/s after it"
    counts = f"{result.prompt_tokens} + {len(result.tokens)} tokens, finish {result.finish}"
    run_by = decoder.unit.name
    kernels = getattr(decoder.unit, "kernels", None)
    if kernels:
        count = f"{engine.threads} thread{'' if engine.threads == 1 else 's'}"
        run_by += f" ({kernels['all']}, {count})"
    times = f"first token after {result.ttft_s:.2f} s{speed}"
    memory = f"peak memory {_peak_rss_mb():.0f} MB"
    print(f"[{counts}; {times}; {memory}; {run_by}]", file=sys.stderr)
    return 0


def _peak_rss_mb() -> float:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
