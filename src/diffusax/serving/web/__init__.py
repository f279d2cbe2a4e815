"""The HTTP server: APIs that clients speak, jobs, and the page."""

from diffusax.boundary.messages import require_extra

for _module in ("starlette", "uvicorn", "python_multipart", "prometheus_client"):
    require_extra(_module, "serve")
