"""What a service is made of, as frozen values read from YAML or plain data."""

from shapeserve.config.base import along
from shapeserve.config.paths import model_directory
from shapeserve.config.policy import (
    AxisPolicy,
    Exponential,
    Linear,
    Policy,
    axes_of,
    policy_of,
)
from shapeserve.config.schema import (
    Batching,
    CompileConfig,
    DType,
    HttpConfig,
    InputSpec,
    Limits,
    ModelConfig,
    OutputSpec,
    OverMax,
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
    "along",
    "axes_of",
    "json_schema",
    "model_directory",
    "parse_policy",
    "policy_of",
]
