"""What a service is made of, as frozen values read from YAML or plain data."""

from shapeserve.config.base import along
from shapeserve.config.compiling import CompileConfig
from shapeserve.config.http import HttpConfig
from shapeserve.config.paths import model_directory
from shapeserve.config.policy import (
    AxisPolicy,
    Exponential,
    Linear,
    Policy,
    axes_of,
    policy_of,
    predicted_waste,
)
from shapeserve.config.record import Record
from shapeserve.config.schema import (
    Batching,
    Limits,
    ModelConfig,
    OverMax,
    RareShape,
    ServeConfig,
    json_schema,
    parse_policy,
    policy_schemas,
    policy_to_dict,
)
from shapeserve.config.tensors import DType, InputSpec, OutputSpec

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
    "Record",
    "ServeConfig",
    "along",
    "axes_of",
    "json_schema",
    "model_directory",
    "parse_policy",
    "policy_of",
    "policy_schemas",
    "policy_to_dict",
    "predicted_waste",
]
