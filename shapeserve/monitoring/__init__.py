"""What watches the service: Prometheus rules and a Grafana dashboard, made of the catalogue."""

from shapeserve.monitoring.files import generated_files, rule_groups
from shapeserve.monitoring.rules import FORMS
from shapeserve.monitoring.targets import Targets

__all__ = ["FORMS", "Targets", "generated_files", "rule_groups"]
