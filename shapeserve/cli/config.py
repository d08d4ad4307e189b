"""``shapeserve config``: the resolved configuration, or its JSON schema."""

from __future__ import annotations

import click
import yaml

from shapeserve.cli.common import write_json
from shapeserve.config import ServeConfig, json_schema


@click.command("config")
@click.argument("config_path", metavar="[CONFIG.yaml]", required=False)
@click.option("--schema", is_flag=True, help="Print the JSON schema: every key, unit and default.")
def config_command(config_path: str | None, schema: bool) -> None:
    """Check a configuration and print it with every default filled in, as YAML.

    \b
    Examples:
      shapeserve config service.yaml
      shapeserve config --schema > shapeserve.schema.json
    """
    if schema == (config_path is not None):
        raise click.UsageError("give either CONFIG.yaml or --schema")
    if config_path is None:
        write_json(json_schema(), "-")
        return
    resolved = ServeConfig.from_yaml(config_path).to_dict()
    click.echo(yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True), nl=False)
