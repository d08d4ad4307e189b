"""What a service is made of, as frozen values read from YAML or plain data."""

from shapeserve.config.paths import model_directory
from shapeserve.config.schema import (
    AxisPolicy,
    Batching,
    CompileConfig,
    DType,
    Exponential,
    HttpConfig,
    InputSpec,
    Limits,
    Linear,
    ModelConfig,
    OutputSpec,
    OverMax,
    Policy,
    RareShape,
    ServeConfig,
    json_schema,
    parse_policy,
)

__all__ = [
    "AxisPolicy",
    "Batching",
    "CompileConfig",
    "DType",
    "Exponential",
    "HttpConfig",
    "InputSpec",
    "Limits",
    "Linear",
    "ModelConfig",
    "OutputSpec",
    "OverMax",
    "Policy",
    "RareShape",
    "ServeConfig",
    "json_schema",
    "model_directory",
    "parse_policy",
]
