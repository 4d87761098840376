# Two targets from one source: `app` (panel, gate, beat) and `worker`, which also compiles and runs
# engines and so needs a compiler and the CUDA toolkit. CUDA 12 still knows Volta; 13 does not.
FROM python:3.11-slim-bookworm AS app
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/srv/mmadmin/.venv/bin:$PATH \
    MM_HOME=/var/lib/mmadmin MM_BIND=0.0.0.0
WORKDIR /srv/mmadmin
RUN python3 -m venv .venv && python3 -m venv --without-pip .venv/isolated
COPY requirements/base.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/base.txt
COPY pyproject.toml setup.py CHANGELOG.md manage.py ./
COPY mmadmin mmadmin
COPY deployments deployments
COPY templates templates
COPY static static
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && useradd --system --uid 10001 --create-home mm && mkdir -p /var/lib/mmadmin \
    && chown mm /var/lib/mmadmin
USER mm
VOLUME /var/lib/mmadmin
ENTRYPOINT ["mm"]
CMD ["run", "panel"]

FROM nvidia/cuda:12.8.1-devel-ubuntu24.04 AS worker
ENV PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/srv/mmadmin/.venv/bin:$PATH \
    MM_HOME=/var/lib/mmadmin MM_BIND=0.0.0.0
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv g++ git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /srv/mmadmin
RUN python3 -m venv .venv && python3 -m venv --without-pip .venv/isolated
COPY requirements/base.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/base.txt
COPY pyproject.toml setup.py CHANGELOG.md manage.py ./
COPY mmadmin mmadmin
COPY deployments deployments
COPY templates templates
COPY static static
RUN pip install --no-cache-dir --no-deps --no-build-isolation -e . \
    && useradd --system --uid 10001 --create-home mm && mkdir -p /var/lib/mmadmin \
    && chown mm /var/lib/mmadmin
USER mm
VOLUME /var/lib/mmadmin
ENTRYPOINT ["mm"]
CMD ["run", "worker"]
