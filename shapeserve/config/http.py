"""The service around the models: where it listens, how much it takes."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from shapeserve.config.base import (
    Bool,
    Float,
    Frozen,
    ImportName,
    Int,
    Name,
    field,
    problem,
)


class HttpConfig(Frozen):
    """The HTTP and gRPC service."""

    host: Name = field("Address to listen on.", "address", "127.0.0.1")
    port: Int = field("Port to listen on.", "port", 8000, ge=1, le=65535)
    grpc_port: Int | None = field(
        "Port for the Open Inference Protocol over gRPC; none, no gRPC.",
        "port",
        None,
        ge=1,
        le=65535,
    )
    replicas: Int = field("Processes that each hold the models.", "processes", 1, ge=1)
    max_body_bytes: Int = field(
        "Longer request bodies are refused with 413 (gRPC: RESOURCE_EXHAUSTED).",
        "bytes",
        16_777_216,
        ge=1,
    )
    max_inflight_bytes: Int | None = field(
        "Request bodies that a replica holds at a time; while there are more, requests are refused "
        "with 429. Unset means 64 times `max_body_bytes`.",
        "bytes",
        None,
        ge=1,
    )
    max_answer_bytes: Int = field(
        "Requests whose output tensors would be larger are refused with 400.",
        "bytes",
        268_435_456,
        ge=1,
    )
    proxy: Literal["fast", "default"] = field(
        "`fast` uses Ray Serve's HAProxy and throughput flags, `default` its Python proxy.",
        "word",
        "fast",
    )
    drain_s: Float = field(
        "Longest time to finish what is in flight when stopping.", "seconds", 10.0, ge=0
    )

    log_format: Literal["text", "json"] = field(
        "`json` writes a JSON object for each line, in the replicas, the proxies and the command.",
        "word",
        "text",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = field(
        "The least that is logged; refused requests are INFO, overload and failures WARNING and "
        "ERROR.",
        "word",
        "INFO",
    )
    log_dir: Name | None = field(
        "Directory that keeps the log files of replicas and proxies; unset, they are in Ray's "
        "session directory and go away with the service.",
        "path",
        None,
    )
    access_log: Bool = field(
        "Log a line for every request; it takes longer than to count them, which `/metrics` does "
        "anyway.",
        "boolean",
        False,
    )

    trace_exporter: Literal["otlp"] | ImportName | None = field(
        "Traces requests with OpenTelemetry, through Ray Serve: `otlp` sends the spans to "
        "`OTEL_EXPORTER_OTLP_ENDPOINT`, `module:function` names a function that returns a list of "
        "span processors; unset, nothing is traced.",
        "word",
        None,
    )
    trace_sampling_ratio: Float = field(
        "Share of the requests that are traced, of those whose caller has not decided it "
        "(`traceparent`).",
        "share",
        0.01,
        ge=0,
        le=1,
    )

    @model_validator(mode="after")
    def _room_for_one_body(self) -> Self:
        # Twice, because a compressed body is held beside what it becomes.
        if self.inflight_bytes < 2 * self.max_body_bytes:
            raise problem(
                f"max_inflight_bytes {self.max_inflight_bytes} has no room for one body of "
                f"max_body_bytes {self.max_body_bytes}, compressed and not; use "
                f"{2 * self.max_body_bytes} or more",
                "max_inflight_bytes",
            )
        return self

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port == self.port:
            raise problem(
                f"grpc_port {self.grpc_port} is the HTTP port; choose another", "grpc_port"
            )
        return self

    @model_validator(mode="after")
    def _grpc_host(self) -> Self:
        # Ray's Python proxy opens its gRPC port on all interfaces. Callers can be told apart by
        # whether they are on this machine, but not by the interface they came in at.
        if self.grpc_port and self.proxy == "default" and not (self.is_local or self.is_open):
            raise problem(
                f"with proxy default, gRPC cannot listen on {self.host} alone; use proxy fast, or "
                "host 127.0.0.1 or 0.0.0.0",
                "grpc_port",
            )
        return self

    @property
    def inflight_bytes(self) -> int:
        """``max_inflight_bytes``, also where it is unset."""
        return self.max_inflight_bytes or 64 * self.max_body_bytes

    @property
    def is_local(self) -> bool:
        """Whether only this machine is let in."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def is_open(self) -> bool:
        """Whether all interfaces are listened on."""
        return self.host in ("0.0.0.0", "::")
