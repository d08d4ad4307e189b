# syntax=docker/dockerfile:1
# CPU:   docker build -t shapeserve .
# CUDA:  docker build -t shapeserve:cuda \
#          --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 \
#          --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# Run:   docker run --init -p 8000:8000 --shm-size 1g -v "$PWD/config.yaml:/etc/shapeserve/config.yaml:ro" \
#          -v "$PWD/model:/model:ro" shapeserve
ARG BASE=python:3.12-slim

# Both stages start here, so that the environment finds its interpreter where it was made.
# A C++ compiler and Python's headers are needed at run time: torch.compile builds with them.
FROM ${BASE} AS base
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && if ! command -v python3 >/dev/null; then \
      apt-get install -y --no-install-recommends python3 python3-dev python3-venv; \
    fi \
 && rm -rf /var/lib/apt/lists/*

FROM base AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/venv
RUN /opt/venv/bin/pip install --index-url "${TORCH_INDEX}" "${TORCH}"
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY shapeserve shapeserve
RUN /opt/venv/bin/pip install -c constraints.txt '.[hf]'

FROM base
RUN useradd --create-home --uid 10001 shapeserve
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    HF_HUB_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONUNBUFFERED=1
USER shapeserve
WORKDIR /home/shapeserve
EXPOSE 8000
# Live, not ready: a container that is still warming up must not be restarted for it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=4)"]
# SIGTERM drains; `docker stop` must wait longer (-t 20) than drain_s (10 by default) and a little.
CMD ["shapeserve", "serve", "/etc/shapeserve/config.yaml", "--host", "0.0.0.0"]
