# A server of images: docs/serving/server.md says how to run it.
#   docker build --tag diffusax .                                   for CPUs
#   docker build --tag diffusax --build-arg JAX='jax[cuda13]' .     for NVIDIA GPUs
FROM python:3.12-slim

ARG JAX=jax
COPY pyproject.toml README.md LICENSE /build/
COPY src /build/src
RUN pip install --no-cache-dir "/build[serve]" "$JAX" && rm -r /build

RUN useradd --uid 1000 --create-home diffusax \
    && mkdir /cache /models \
    && chown diffusax /cache
USER 1000

# What is compiled, and what is fetched from the Hub, stays in /cache. Nobody else may write to it.
ENV DIFFUSAX_COMPILATION_CACHE=/cache/programs HF_HOME=/cache/huggingface
VOLUME /cache
EXPOSE 7860
HEALTHCHECK --start-period=120s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:7860/health')"]

# SIGTERM lets it finish what has begun: docker stop --timeout 90.
ENTRYPOINT ["diffusax"]
CMD ["serve", "--host", "0.0.0.0"]
