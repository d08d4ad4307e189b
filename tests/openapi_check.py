"""Holds real responses against the OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import httpx
from jsonschema import Draft202012Validator

# Not ours to document: they come with every response of every server.
COMMON_HEADERS = {"content-length", "content-type", "date", "server", "transfer-encoding"}


class Document:
    """The document, and the questions that tests have."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self._schema = cache(self._validator)

    def resolve(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what a reference stands for; anything else as it is."""
        while "$ref" in part:
            found: Any = self.data
            for step in part["$ref"].removeprefix("#/").split("/"):
                found = found[step]
            part = found
        return part

    def operation(self, method: str, path: str) -> Mapping[str, Any] | None:
        """Return the operation that serves ``path``; the longest pattern wins, as in the router."""
        for pattern in sorted(self.data["paths"], key=lambda p: ("{" in p, -len(p))):
            if re.fullmatch(re.sub(r"\\\{\w+\\\}", ".+", re.escape(pattern)), path):
                found: Mapping[str, Any] | None = self.data["paths"][pattern].get(method.lower())
                return found
        return None

    def check(self, response: httpx.Response) -> None:
        """Assert that status, headers, media type and body are documented."""
        method = "GET" if response.request.method == "HEAD" else response.request.method
        operation = self.operation(method, response.request.url.path)
        if operation is None:
            assert response.status_code in (404, 405), "served, but not documented"
            return
        self.check_as(operation, response)

    def check_as(self, operation: Mapping[str, Any], response: httpx.Response) -> None:
        """Assert that it is a response of this operation."""
        about = f"{operation['operationId']} {response.status_code}"
        assert str(response.status_code) in operation["responses"], about
        documented = self.resolve(operation["responses"][str(response.status_code)])
        unknown = {*response.headers} - {*documented["headers"]} - COMMON_HEADERS
        assert not unknown, f"{about}: {unknown}"
        for name, header in documented["headers"].items():
            assert name in response.headers or not self.resolve(header).get("required"), about
        media_type = response.headers["content-type"].partition(";")[0]
        assert media_type in documented["content"], about
        if media_type == "application/json" and response.content:
            pointer = json.dumps(documented["content"][media_type]["schema"])
            errors = [*self._schema(pointer).iter_errors(response.json())]
            assert not errors, f"{about}: {errors[0]}"

    def accepts(self, operation: Mapping[str, Any], body: object) -> bool:
        """Whether ``body`` is a documented request."""
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        return self._schema(json.dumps(schema)).is_valid(body)

    def _validator(self, schema: str) -> Draft202012Validator:
        whole = {**json.loads(schema), "components": self.data["components"]}
        return Draft202012Validator(whole)
