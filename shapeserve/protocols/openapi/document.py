"""Puts the document together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shapeserve import __version__
from shapeserve.models.spec import ModelSpec
from shapeserve.protocols.openai import ModelInfo
from shapeserve.protocols.openapi import admin, oip, openai, operations, scores
from shapeserve.protocols.openapi.parts import (
    Data,
    error_responses,
    header_components,
    header_parameters,
    path_parameter,
    words,
)


def document(models: Mapping[str, ModelInfo], specs: Sequence[ModelSpec]) -> Data:
    """Return the OpenAPI 3.1 document of a service.

    Args:
        models: every name and alias that is served.
        specs: of the models.
    """
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "shapeserve",
            "version": __version__,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": openai.paths()
        | scores.paths()
        | oip.paths(specs)
        | operations.paths()
        | admin.paths(),
        "components": {
            "schemas": openai.schemas(models)
            | scores.schemas(models)
            | oip.schemas()
            | operations.schemas()
            | admin.schemas(),
            "parameters": header_parameters() | _path_parameters(models),
            "headers": header_components(),
            "responses": error_responses(),
            "securitySchemes": admin.security_schemes(),
        },
    }


def _path_parameters(models: Mapping[str, ModelInfo]) -> Data:
    about = "A name or an alias; a slash in it may stand as it is."
    return {
        "Model": path_parameter("model", about, words(*sorted(models))),
        "Version": oip.version_parameter(),
    }
