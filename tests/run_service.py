"""``python run_service.py CONFIG.json``: a service in a process of its own, driven over pipes.

Says what happens as JSON lines on stdout and takes commands as JSON lines on stdin:
``{"policy": [MODEL, POLICY]}``, ``{"raw_policies": ANYTHING}``, ``{"applications": [...]}`` (to
deploy beside its own) and ``{"metrics_port": null}``. Ends like ``shapeserve serve``, on SIGINT or
SIGTERM.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from shapeserve.config import ServeConfig
from shapeserve.errors import ShapeServeError
from shapeserve.serve import launch
from shapeserve.serve.launch import Service, start


def say(event: str, **content: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **content}) + "\n")
    sys.stdout.flush()


def obey(service: Service, command: dict[str, Any]) -> Any:
    if "policy" in command:
        return service.update_policy(*command["policy"])
    if "raw_policies" in command:  # what `serve deploy` would take, without our own check
        service._policies = command["raw_policies"]
        return service._deploy()
    if "applications" in command:
        return deploy_beside(service, command["applications"])
    if "settle" in command:
        return settle()
    import ray

    return ray.nodes()[0]["MetricsExportPort"]


def settle() -> None:
    """Wait until Serve has told every replica what was deployed."""
    from ray import serve

    while {a.status for a in serve.status().applications.values()} != {"RUNNING"}:
        time.sleep(0.1)


def deploy_beside(service: Service, applications: list[dict[str, Any]]) -> None:
    """What `serve deploy` does with a file that has these applications as well."""
    from ray.serve.schema import ServeDeploySchema

    schema = launch.deploy_schema(service.config, service._import_path)
    schema["applications"] += applications
    launch._client().deploy_apps(ServeDeploySchema.model_validate(schema))


def main(path: str) -> None:
    # As in a terminal: a shell without job control starts what it puts into the background, this
    # test run for example, with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config = ServeConfig.from_dict(json.loads(Path(path).read_text()))
    service = start(config, import_path="fake_app:app")
    try:
        say("started", url=service.url, private=str(service.logs.parents[1]))
        service.wait_ready(lambda done, total, stage: say("progress", at=[done, total, stage]))
        say("ready")
        for line in sys.stdin:
            try:
                say("done", answer=obey(service, json.loads(line)))
            except ShapeServeError as error:
                say("error", message=str(error))
        service.wait(lambda ready: say("replicas", ready=ready))
    except KeyboardInterrupt:
        pass
    except ShapeServeError as error:
        say("error", message=str(error))
    finally:
        began = time.monotonic()
        service.shutdown()
        say("stopped", seconds=time.monotonic() - began)


if __name__ == "__main__":
    main(sys.argv[1])
