"""What the engine benchmarks share: models, request lengths, the floor, the machine, the files.

The weights are random: speed does not depend on their values, and nothing has to be fetched.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import importlib.metadata
import json
import math
import os
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console

from benchmarks import environment
from benchmarks.report import Table
from shapeserve import __version__
from shapeserve.config import ServeConfig

RESULTS_DIR = Path(__file__).resolve().parent / "results"
DATA_DIR = Path(__file__).resolve().parent / "data"

# What a bf16 product of two 8192 x 8192 matrices of random numbers reaches on an H200.
PEAK_TFLOPS = 790.0
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz"

# Of the lengths before they are cut to 4..512. The seed is one whose 4,096 lengths have, cut and
# rounded, the mean and the median that are asked for: mean 79.0, p50 52, p99 443, 323,574 tokens.
LOGNORMAL_MEAN, LOGNORMAL_MEDIAN, LOGNORMAL_SEED = 79.0, 52.0, 738
SHORTEST, LONGEST = 4, 512
# The first 8,192 of 19,366 rows: mean 47.1, p50 12, p99 512, 385,446 tokens.
WORKLOAD_ROWS = {"lognormal": 4096, "enc_rag_mix": 8192}

DType = Literal["float32", "bfloat16", "float16"]


# --- models


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a BERT encoder is made of."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int = 30522
    positions: int = 512


MODELS = {
    "minilm": Sizes(layers=6, hidden=384, heads=12, ffn=1536),
    "bert-base": Sizes(layers=12, hidden=768, heads=12, ffn=3072),
    "tiny": Sizes(layers=2, hidden=32, heads=2, ffn=64, vocab=1000),
}


def write_model(
    directory: Path, model: str, dtype: str, *, max_length: int = LONGEST, seed: int = 0
) -> Path:
    """Write a model with random weights in sentence-transformers form and return its directory.

    Args:
        directory: created if missing.
        model: one of ``MODELS``.
        dtype: of the saved weights; what loads them in a wider type gets the same values.
        max_length: ``max_seq_length``, where the grid ends.
        seed: of the weights.
    """
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    sizes = MODELS[model]
    config = BertConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.ffn,
        max_position_embeddings=sizes.positions,
        pad_token_id=SPECIALS.index("[PAD]"),
        # As large as in trained models: the smaller the weights, the more alike the vectors of
        # different texts, and the less a wrong answer shows.
        initializer_range=sizes.hidden**-0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = BertModel(config, add_pooling_layer=False).to(getattr(torch, dtype))
    config.architectures = ["BertModel"]
    directory.mkdir(parents=True, exist_ok=True)
    config.to_json_file(directory / "config.json")
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    modules = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    _write(
        directory / "modules.json",
        [
            {"idx": i, "path": path, "type": f"sentence_transformers.models.{name}"}
            for i, (path, name) in enumerate(modules)
        ],
    )
    (directory / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"embedding_dimension": sizes.hidden, "pooling_mode": "mean", "include_prompt": True}
    _write(directory / "1_Pooling" / "config.json", pooling)
    _write(
        directory / "sentence_bert_config.json",
        {"max_seq_length": max_length, "do_lower_case": False},
    )
    return directory


def _write_tokenizer(directory: Path) -> None:
    """Write a WordPiece tokenizer of single letters: requests here are token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = (*SPECIALS, *LETTERS, *(f"##{letter}" for letter in LETTERS))
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    frame = [(word, vocab[word]) for word in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=frame
    )
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(
        directory / "tokenizer_config.json",
        {"tokenizer_class": "BertTokenizer", "pad_token": "[PAD]", "model_max_length": LONGEST},
    )


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2))


def engine_config(
    directory: Path,
    *,
    layout: str,
    tier: str,
    dtype: str,
    device: str = "auto",
    backend: str = "inductor",
    limits: Mapping[str, Any] | None = None,
    **more: Any,
) -> ServeConfig:
    """Return the configuration of one engine; what is not named is shapeserve's default."""
    model = {
        "path": str(directory),
        "dtype": dtype,
        "device": device,
        "layout": layout,
        "limits": dict(limits or {}),
        "compile": {"tier": tier, "backend": backend},
        **more,
    }
    return ServeConfig.from_dict({"models": [model]})


# --- requests


def workload_lengths(name: str, rows: int | None = None) -> np.ndarray:
    """Return the lengths of a workload's requests in order of arrival, int64.

    Args:
        name: one of ``WORKLOAD_ROWS``.
        rows: how many; its own number if None. ``enc_rag_mix`` begins anew after its last row.
    """
    count = WORKLOAD_ROWS[name] if rows is None else rows
    return lognormal_lengths(count) if name == "lognormal" else recorded_lengths(name, count)


def lognormal_lengths(rows: int, seed: int = LOGNORMAL_SEED) -> np.ndarray:
    """Return log-normal lengths of mean 79 and median 52, rounded and cut to 4..512."""
    sigma = math.sqrt(2 * math.log(LOGNORMAL_MEAN / LOGNORMAL_MEDIAN))
    drawn = np.random.default_rng(seed).lognormal(math.log(LOGNORMAL_MEDIAN), sigma, rows)
    return np.clip(np.rint(drawn), SHORTEST, LONGEST).astype(np.int64)


def recorded_lengths(name: str, rows: int) -> np.ndarray:
    """Return the first ``rows`` lengths of a file in ``data/``, from the start again at its end."""
    with gzip.open(DATA_DIR / f"{name}.csv.gz", "rt", encoding="utf-8") as file:
        lines = [line for line in file.read().splitlines() if not line.startswith("#")]
    return np.resize(np.array([int(line) for line in lines[1:]], dtype=np.int64), rows)


def token_ids(lengths: np.ndarray, vocab: int, seed: int = 0) -> list[np.ndarray]:
    """Return random ids of these lengths, int64, special tokens left out."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(len(SPECIALS), vocab, int(lengths.sum()), dtype=np.int64)
    return np.split(ids, np.cumsum(lengths)[:-1])


def describe_lengths(lengths: np.ndarray) -> dict[str, float]:
    """Return the statistics of a workload."""
    p50, p99 = np.percentile(lengths, [50, 99])
    return {
        "rows": len(lengths),
        "tokens": int(lengths.sum()),
        "mean": round(float(lengths.mean()), 2),
        "p50": float(p50),
        "p99": float(p99),
        "largest": int(lengths.max()),
    }


# --- the floor


@dataclass(frozen=True, slots=True)
class Flops:
    """Multiplications and additions of the matrix products of real tokens, each counted.

    Left out: embeddings, softmax, norms, activations, pooling, and every padded element.

    Attributes:
        projections: query, key, value and output of the attention.
        ffn: both products of the feed-forward layers.
        attention: scores and their product with the values, each row with itself.
    """

    projections: float
    ffn: float
    attention: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.projections + self.ffn + self.attention


def matmul_flops(sizes: Sizes, lengths: np.ndarray) -> Flops:
    """Count the matrix products that answer rows of these lengths."""
    tokens = float(lengths.sum())
    squares = float((lengths.astype(np.float64) ** 2).sum())
    return Flops(
        projections=sizes.layers * tokens * 2 * 4 * sizes.hidden**2,
        ffn=sizes.layers * tokens * 2 * 2 * sizes.hidden * sizes.ffn,
        attention=sizes.layers * squares * 2 * 2 * sizes.hidden,
    )


def floor_seconds(sizes: Sizes, lengths: np.ndarray, peak_tflops: float = PEAK_TFLOPS) -> float:
    """Return the time below which no 16-bit arithmetic answers these rows."""
    return matmul_flops(sizes, lengths).total / (peak_tflops * 1e12)


# --- measuring


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Return median and range of some passes, in milliseconds."""
    passes = [1e3 * s for s in seconds]
    return {
        "median_ms": statistics.median(passes),
        "min_ms": min(passes),
        "max_ms": max(passes),
        "passes_ms": passes,
    }


def attempt(
    label: str, budget: Budget, console: Console, measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the outcome of one measurement; what it raises is its outcome, and others go on."""
    if not budget.left:
        return budget.skipped
    console.print(f"[bold]{label}[/bold] ({budget.spent_s:.0f} s)")
    try:
        return {"status": "ok", **measure()}
    except Exception as error:
        console.print(traceback.format_exc(), markup=False, highlight=False)
        return {"status": "failed", "error": f"{error!r:.500}"}
    finally:
        gc.collect()  # engines hold device memory
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


class Budget:
    """How long a run may take; what begins later is left out."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._started = time.monotonic()

    @property
    def spent_s(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._started

    @property
    def left(self) -> bool:
        """Whether something may begin now."""
        return self.spent_s < self.seconds

    @property
    def skipped(self) -> dict[str, str]:
        """The outcome of what does not begin any more."""
        why = f"left out: {self.spent_s:.0f} s of --time-budget-s {self.seconds:g} were spent"
        return {"status": "skipped", "error": why}


def use_device(wanted: str) -> torch.device:
    """Return the device of a run: ``auto`` is CUDA if there is one."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the machine


def describe_machine(commit: str | None = None) -> dict[str, Any]:
    """Return what a reader needs to judge the numbers of a run.

    Args:
        commit: of the code, where this is no checkout.
    """
    try:
        about = environment.describe(None)
    except OSError as missing:  # no git
        about = {"versions": {}, "commit": f"unknown ({missing})", "cores": environment.cores()}
    about["versions"] |= {
        "shapeserve": __version__,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": np.__version__,
    }
    about["versions"].setdefault("transformers", _version("transformers"))
    if commit:
        about["commit"] = commit
    about["gpu"] = _gpu()
    return about


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return next(iter(done.stdout.splitlines()), None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def headline(about: Mapping[str, Any]) -> str:
    """Return machine and versions in two lines."""
    gpu = about["gpu"]
    device = (
        f"{gpu['count']} x {gpu['name']}, driver {gpu['driver']}, CUDA {gpu['cuda']}"
        if gpu
        else "no GPU"
    )
    versions = ", ".join(f"{name} {found}" for name, found in about["versions"].items() if found)
    return f"{device}, {about['cores']} CPU cores, commit {about['commit']}\n{versions}"


# --- command line and files


def add_options(parser: argparse.ArgumentParser, *, budget_s: float, models: str) -> None:
    """Add what every engine benchmark can be told."""
    parser.add_argument("--models", type=names(MODELS), default=models.split(","))
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument(
        "--backend",
        choices=["inductor", "eager"],
        default="inductor",
        help="of torch.compile; eager generates no code: quick, and no measure of speed",
    )
    parser.add_argument(
        "--time-budget-s", type=float, default=budget_s, help="nothing begins after so many seconds"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rows and passes: is it there?")
    parser.add_argument("--commit", help="of the code, where this is no checkout")
    parser.add_argument("--out", help="name of the files, without ending")
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)


def names(allowed: Mapping[str, object] | Sequence[str]) -> Callable[[str], list[str]]:
    """Return a parser of names with commas between them."""

    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := set(given) - set(allowed):
            raise argparse.ArgumentTypeError(
                f"{', '.join(sorted(unknown))}: not one of {', '.join(allowed)}"
            )
        return given

    return parse


def numbers(text: str) -> list[int]:
    """Parse whole numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def new_result(benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return a result without a measurement."""
    return {
        "benchmark": benchmark,
        "environment": describe_machine(options.commit),
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
        },
    }


def failed(outcomes: Mapping[str, Mapping[str, Any]]) -> bool:
    """Say whether something failed; what was left out did not."""
    return any(outcome["status"] == "failed" for outcome in outcomes.values())


def failure_table(outcomes: Mapping[str, Mapping[str, Any]]) -> Table:
    """What failed or was left out."""
    rows = [
        [name, outcome["status"], outcome["error"]]
        for name, outcome in outcomes.items()
        if outcome["status"] != "ok"
    ]
    return Table("Failed or left out", ["what", "status", "why"], rows)


def finish(
    result: Mapping[str, Any], tables: Sequence[Table], base: Path, console: Console
) -> None:
    """Show the tables that have rows; write everything."""
    tables = [table for table in tables if table.rows]
    for table in tables:
        console.print(f"\n[bold]{table.title}[/bold]")
        console.print(table.rich())
    write_json(result, base)
    about = headline(result["environment"]).replace("\n", "  \n")
    parts = [about, *(table.markdown() for table in tables)]
    base.with_name(f"{base.name}.md").write_text("\n\n".join(parts) + "\n")
    console.print(f"written: {base}.json and .md", highlight=False)


def write_json(result: Mapping[str, Any], base: Path) -> None:
    """Replace BASE.json as a whole, so that a run which is killed leaves the last good one."""
    base.parent.mkdir(parents=True, exist_ok=True)
    partial = base.with_name(f"{base.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, base.with_name(f"{base.name}.json"))
