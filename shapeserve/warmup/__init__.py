"""Warm-up: self-test, compile, capture and verify everything before the first request."""

from shapeserve.warmup.probe import TOLERANCE, Probe, relative_error
from shapeserve.warmup.programs import build_programs, compile_program, compile_sizes, self_test
from shapeserve.warmup.progress import WarmupProgress
from shapeserve.warmup.verify import WarmupContext, launch_overhead, publish_variants, warm_up

__all__ = [
    "TOLERANCE",
    "Probe",
    "WarmupContext",
    "WarmupProgress",
    "build_programs",
    "compile_program",
    "compile_sizes",
    "launch_overhead",
    "publish_variants",
    "relative_error",
    "self_test",
    "warm_up",
]
