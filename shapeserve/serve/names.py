"""What the applications, their deployments and routes are called."""

APP = "shapeserve"
DEPLOYMENT = "ShapeServe"
IMPORT_PATH = "shapeserve.serve:app"

HEALTH_APP = "shapeserve-health"
HEALTH_DEPLOYMENT = "Health"
HEALTH_IMPORT_PATH = "shapeserve.serve:health_app"
HEALTH_PREFIX = "/v2/health"

OPEN_GRPC = "shapeserve.serve.grpc_ingress.add_to_server"
LOCAL_GRPC = "shapeserve.serve.grpc_ingress.add_to_local_server"
