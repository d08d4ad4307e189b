"""Before deployment: where a model's graphs break, what that costs, and whether it can be captured.

Everything here comes from a real trace of the module that would serve, on the sizes that would be
compiled. It resets Dynamo, so it has no place in a process that serves.
"""

from shapeserve.explain.explain import explain
from shapeserve.explain.report import Explanation

__all__ = ["Explanation", "explain"]
