"""The OpenAPI document of everything that is served.

Written as data beside the protocol modules, whose checks are by hand; ``tests/test_openapi.py``
proves that the two agree. A new route needs an entry here.
"""

from shapeserve.protocols.openapi.document import document

__all__ = ["document"]
