"""An engine without a model: the words of a text say what happens to it.

``slow N`` waits N seconds in the queue, ``nan`` is a row that fails, ``crash`` raises, ``full`` and
``late`` are refused, ``die`` kills the engine; anything else is answered at once with a vector made
of its length. ``fallback``, ``cut`` and ``split`` are answered and say that this was done.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np

from shapeserve.buckets import Bucket, Grid
from shapeserve.compile.monitor import Recompile
from shapeserve.compile.record import CompileRecord, CompileTotal, VariantState
from shapeserve.config import ModelConfig, Policy, predicted_waste
from shapeserve.engine import RecentFallback, Result, Run, TextPair
from shapeserve.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overloaded,
    RowFailed,
    Unavailable,
)
from shapeserve.metrics import (
    CompilePhase,
    CompileStage,
    FallbackReason,
    Metrics,
    Mode,
    RecompileReason,
    SwapResult,
    Tier,
)
from shapeserve.models.spec import Head, ModelSpec, TensorSpec
from shapeserve.warmup import WarmupProgress

BUCKET = Bucket.of(batch=1, seq=8)
DIM = 4


class FakeSample(str):
    """What stands for a prepared sample: its text, one token a word."""

    __slots__ = ()

    @property
    def executed(self) -> dict[str, int]:
        return {"seq": len(self.split())}


class FakeEngine:
    """The part of ``shapeserve.Engine`` that a replica uses."""

    def __init__(self, config: ModelConfig, metrics: Metrics) -> None:
        self.config = config
        self.metrics = metrics
        self.progress = WarmupProgress("load", 0, 3)
        self.ready = False
        self.cancelled = 0
        self.prepared: list[int] = []  # samples of each call
        self.waiting = 0
        self.grid = Grid(("batch", "seq"), [BUCKET])
        self.policy = config.policy
        self.recent_fallbacks: tuple[RecentFallback, ...] = ()
        self._dead = ""
        self._answered = 0

    @property
    def spec(self) -> ModelSpec:
        tensor = TensorSpec("input_ids", "int64", ("batch", "seq"))
        out = TensorSpec("sentence_embedding", "float32", ("batch", DIM))
        return ModelSpec(
            name=self.config.name or "fake",
            task="embed",
            dtype="float32",
            inputs={"input_ids": tensor},
            outputs={"sentence_embedding": out},
            axes=("batch", "seq"),
            max_length={"seq": 8},
            hard_limit={"seq": 8},
            vocab_size=100,
            embedding_dim=DIM,
            normalize=True,
        )

    def start(self) -> FakeEngine:
        if self.config.path == "fake:broken":
            raise ModelError("the model directory is empty; put a model there")
        for step in range(3):
            self.progress = WarmupProgress("verify", step, 3, BUCKET.label)
            time.sleep(1.0 if self.config.path in ("fake:slow", "fake:busy") else 0)
        self.progress = WarmupProgress("verify", 3, 3)
        self.metrics.preset(self.spec.name, [BUCKET.label], ["batch", "seq"])
        self.metrics.set_grid_version(self.spec.name, self.grid.version)
        self.ready = True
        return self

    def compile_record(self) -> CompileRecord:
        variant = VariantState(BUCKET.label, Tier.EAGER, Tier.COMPILED, degraded=True)
        total = CompileTotal(CompilePhase.WARMUP, CompileStage.DYNAMO, 2, 1.5)
        guard = "tensor 'ids' size mismatch at index 1. expected 8, actual 9"
        recompile = Recompile("5/1", "many_0", RecompileReason.SHAPE, guard, 0.5, 1.8e9)
        return CompileRecord(
            self.spec.name,
            self.grid.version,
            (variant,),
            (total,),
            {"shape": 1},
            (recompile,),
            graph_breaks={"explicit": 1},
            eager_frames={},
            captures={"failed": 1},
        )

    def healthy(self) -> None:
        if self._dead:
            raise Unavailable(self._dead)

    def prepare(
        self, samples: list[Any], *, item: str = "input", start: int = 0, **_: Any
    ) -> list[Any]:
        self.prepared.append(len(samples))
        blank = [i for i, s in enumerate(samples) if isinstance(s, str) and not s.strip()]
        if blank:
            param = f"{item}[{start + blank[0]}]"
            raise InvalidRequest(f"{param} is blank", param=param, code="empty_input")
        return [FakeSample(sample) for sample in samples]

    async def submit_prepared(
        self, samples: list[Any], *, deadline_s: float | None = None
    ) -> list[Result | RowFailed]:
        self.healthy()
        words = [str(sample).split() for sample in samples]
        if ["full"] in words:
            raise Overloaded("the queue is full; retry in 2 s", retry_after_s=2)
        if ["crash"] in words:
            raise RuntimeError("secret detail")
        if ["die"] in words:
            self._dead = "the device thread died"
            raise Unavailable(self._dead)
        self.metrics.rows_accepted_total.child(self.spec.name).inc(len(samples))
        seconds = max([float(w[1]) for w in words if w[0] == "slow"], default=0.0)
        await self._sleep(seconds, deadline_s)
        self.metrics.rows_total.child(self.spec.name, Mode.COMPILED, BUCKET.label).inc(len(samples))
        self._answered += len(samples)
        return [self._answer(word, i) for i, word in enumerate(words)]

    async def _sleep(self, seconds: float, deadline_s: float | None) -> None:
        if deadline_s is not None and time.monotonic() + seconds > deadline_s:
            await asyncio.sleep(max(deadline_s - time.monotonic(), 0))
            raise DeadlineExceeded("the deadline passed before the row ran")
        self._wait(+1)
        try:
            if seconds:
                await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._wait(-1)

    def _wait(self, change: int) -> None:
        self.waiting += change
        self.metrics.queue_rows.child(self.spec.name).set(self.waiting)

    def _answer(self, words: list[str], index: int) -> Result | RowFailed:
        if words == ["nan"]:
            return RowFailed("the model's output is not finite", param=f"input[{index}]")
        vector = np.array([3, 0, 4, len(words)], dtype=np.float32)
        vector /= np.linalg.norm(vector)
        fallback = words == ["fallback"]
        mode, bucket = (Mode.FALLBACK, "none") if fallback else (Mode.COMPILED, BUCKET.label)
        now_s = time.monotonic()
        return Result(
            {"sentence_embedding": vector},
            length=len(words),
            mode=mode,
            bucket=bucket,
            truncated_from=600 if words == ["cut"] else None,
            pieces=2 if words == ["split"] else 1,
            reason=FallbackReason.OVER_MAX if fallback else None,
            runs=(Run(now_s, now_s, now_s, 1, mode, bucket, rows=1, elements=8, padding=7),),
        )

    def swap_policy(self, policy: Policy) -> Grid:
        if self.config.path == "fake:busy":
            self._await_rows(20)
        sizes = policy["seq"].explicit if policy else (8,)
        if max(sizes or ()) > 512:
            self.metrics.policy_swaps_total.child(self.spec.name, SwapResult.REJECTED).inc()
            raise ConfigError("policy.seq: 1024 is above the model's 512")
        time.sleep(5.0 if self.config.path == "fake:slow" else 0)
        self.grid = Grid(("batch", "seq"), [Bucket.of(batch=1, seq=size) for size in sizes or ()])
        self.metrics.preset(self.spec.name, [b.label for b in self.grid.buckets], ["batch", "seq"])
        self.metrics.set_grid_version(self.spec.name, self.grid.version)
        self.metrics.set_predicted_waste(self.spec.name, predicted_waste(policy))
        self.policy = policy
        self.metrics.policy_swaps_total.child(self.spec.name, SwapResult.APPLIED).inc()
        return self.grid

    def _await_rows(self, more: int) -> None:
        """A swap that takes until so many more rows were answered: one beside requests."""
        until, deadline_s = self._answered + more, time.monotonic() + 60
        while self._answered < until:
            if time.monotonic() > deadline_s:
                self.metrics.policy_swaps_total.child(self.spec.name, SwapResult.FAILED).inc()
                raise ModelError(f"{until - self._answered} of {more} rows never came")
            time.sleep(0.01)

    def close(self, drain_s: float = 10.0) -> None:
        self.ready = False


class FakeRanker(FakeEngine):
    """Scores a pair by the number of words of its second text; a row ``nan`` fails."""

    @property
    def spec(self) -> ModelSpec:
        head = Head(("LABEL_0",), "sigmoid", "sigmoid")
        logits = {"logits": TensorSpec("logits", "float32", ("batch", 1))}
        spec = super().spec
        return replace(spec, task="classify", embedding_dim=None, head=head, outputs=logits)

    def prepare(self, samples: list[Any], **options: Any) -> list[Any]:
        pairs = [sample for sample in samples if isinstance(sample, TextPair)]
        if options.get("first") and any(not pair.text.strip() for pair in pairs):
            raise InvalidRequest("query is blank", param=options["first"], code="empty_input")
        texts = [self._scored(sample) for sample in samples]
        return super().prepare(texts, **options)

    @staticmethod
    def _scored(sample: Any) -> Any:
        if not isinstance(sample, TextPair):
            return sample
        return sample.text_pair if sample.text.strip() else sample.text  # blank: to be refused

    def _answer(self, words: list[str], index: int) -> Result | RowFailed:
        answer = super()._answer(words, index)
        if isinstance(answer, RowFailed):
            return answer
        return replace(answer, outputs={"logits": np.array([len(words)], dtype=np.float32)})
