# A small image with phalanx alone: a base for tests, stores (`phalanx store`) and scripts without torch.
# For training, install phalanx into the image that has your framework; docs/containers.md shows how.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --wheel-dir /wheels '.[metrics]'

FROM python:${PYTHON}-slim
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels 'phalanx[metrics]'
WORKDIR /app
# No name, no home, and the group that OpenShift gives to its random users.
USER 65532:0
CMD ["phalanx", "--help"]
